"""Fixtures of the fault battery: daemons on their own servers, and seeded random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import chance, new_daemon
from tests.support.daemon import Daemon, daemons
from tests.support.servers import ProcessServer

__all__ = ["chance", "new_daemon"]

# pytest explains failed assertions in scenarios in the same way as those in tests.
_SCENARIOS = ("admin", "housekeeper", "producer", "spark", "supervisor", "worker")
pytest.register_assert_rewrite(
    "tests.faults.scenario_runner", *(f"tests.faults.scenarios_{role}" for role in _SCENARIOS)
)


@pytest.fixture
def make(fresh_server: ProcessServer, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Configure daemons on a server for this test only: `make(name="b", redis_url=proxy.url)`."""
    with daemons(tmp_path, fresh_server.url) as make:
        yield make
