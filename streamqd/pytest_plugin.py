"""Fixtures for those who test their handlers with pytest. Installed with streamqd.

Nothing is imported or started before a test asks for it: this module is loaded into every run of
pytest beside an installed streamqd.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from streamqd.testing import Settled


class RunDaemon(Protocol):
    """What `streamqd_daemon` is."""

    def __call__(
        self, *modules: str, config: str | Path | None = None, timeout: float = 60.0
    ) -> Settled:
        """Run the daemon until everything is settled. Raises AssertionError with its log."""


@pytest.fixture(scope="session")
def streamqd_server() -> Iterator[str]:
    """The URL of a server of this session's own; of each process, with pytest-xdist.

    Tests that do not want what others have left there ask for `streamqd_redis_url`.
    """
    from streamqd.testing.server import embedded_server

    with embedded_server() as url:
        yield url


@pytest.fixture
def streamqd_redis_url(streamqd_server: str) -> str:
    """The URL of the session's server, which is emptied first."""
    from streamqd.config import Redis
    from streamqd.store.client import connect

    link = connect(Redis(url=streamqd_server), timeout=10.0, name="streamqd:test")
    try:
        link.execute("FLUSHALL")
    finally:
        link.close()
    return streamqd_server


@pytest.fixture
def streamqd_daemon(streamqd_redis_url: str, tmp_path: Path) -> RunDaemon:
    """Run the real daemon on handler modules until everything is settled: `run("billing")`.

    With `config`, a file or the text of one, it is configured by that; the server, the state
    directory and the log are the test's. It may be run again, for what was sent since.
    """
    from streamqd.testing.server import settle

    folder = tmp_path / "streamqd"
    folder.mkdir()

    def run(*modules: str, config: str | Path | None = None, timeout: float = 60.0) -> Settled:
        return settle(streamqd_redis_url, folder, modules, config, timeout)

    return run
