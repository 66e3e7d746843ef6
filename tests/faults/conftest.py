"""Fixtures of the fault battery: daemons on servers of their own, random numbers with a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import chance, new_daemon
from tests.support.daemon import Daemon
from tests.support.servers import ProcessServer

__all__ = ["chance", "new_daemon"]

# What fails in a scene is explained as in a test.
_SCENES = ("admin", "housekeeper", "producer", "spark", "supervisor", "worker")
pytest.register_assert_rewrite(
    "tests.faults.rehearsal", *(f"tests.faults.scenes_{role}" for role in _SCENES)
)


@pytest.fixture
def make(fresh_server: ProcessServer, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Configure daemons on a server of this test's own: `make(name="b", redis_url=proxy.url)`."""
    made: list[Daemon] = []

    def make(**options: Any) -> Daemon:
        made.append(Daemon(tmp_path, options.pop("redis_url", fresh_server.url), **options))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()
