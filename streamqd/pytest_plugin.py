"""Pytest fixtures for testing handlers, which are installed together with streamqd.

Wherever streamqd is installed, pytest loads this module in every run. Nothing is therefore imported
or started until a test requests a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from streamqd.testing import Settled


class RunDaemon(Protocol):
    """The type of the `streamqd_daemon` fixture."""

    def __call__(
        self, *modules: str, config: str | Path | None = None, timeout: float = 60.0
    ) -> Settled:
        """Run the daemon until all messages are handled.

        Raises AssertionError if the daemon fails.
        """


@pytest.fixture(scope="session")
def streamqd_server() -> Iterator[str]:
    """The URL of a server that this session, or this process of pytest-xdist, uses.

    If a test must start with an empty server, use `streamqd_redis_url`.
    """
    from streamqd.testing.server import embedded_server

    with embedded_server() as url:
        yield url


@pytest.fixture
def streamqd_redis_url(streamqd_server: str) -> str:
    """The URL of the session's server. All its data is deleted before the test."""
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
    """Return a function that runs the daemon until all messages are handled.

    Pass the handler modules, as in `streamqd_daemon("billing")`. `config` is a configuration file
    or its text. The server, the state directory and the log are always those of the test. To handle
    messages that are sent after a run, call the function again.
    """
    from streamqd.testing.server import settle

    folder = tmp_path / "streamqd"
    folder.mkdir()

    def run(*modules: str, config: str | Path | None = None, timeout: float = 60.0) -> Settled:
        return settle(streamqd_redis_url, folder, modules, config, timeout)

    return run
