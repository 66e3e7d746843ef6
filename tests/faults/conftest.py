"""Fixtures of the fault battery: daemons on servers of their own, random numbers with a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import chance, new_daemon
from tests.support.daemon import Daemon, daemons
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
    with daemons(tmp_path, fresh_server.url) as make:
        yield make
