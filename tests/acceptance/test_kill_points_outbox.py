"""The kill-point matrix of relays: each committed row is sent once, wherever a relay is struck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamqd.store.client import Connection
from tests.support import kill_relays
from tests.support.databases import DatabaseServer
from tests.support.kill_relays import POINTS, RelayTrial
from tests.support.servers import Server

pytestmark = [pytest.mark.promise, pytest.mark.slow, pytest.mark.timeout(400)]

NewTrials = Callable[[str], "list[RelayTrial]"]
# The statements are the same in all dialects, but their outcomes have to be tested in each.
DIALECTS = [
    "sqlite",
    "postgresql",
    "mysql",
]


@pytest.fixture(params=DIALECTS)
def new_trials(
    request: pytest.FixtureRequest,
    new_database_server: Callable[[str], DatabaseServer],
    server: Server,
    link: Connection,
    tmp_path: Path,
) -> Iterator[NewTrials]:
    """Create an outbox for each point, on an empty server."""
    database = new_database_server(request.param)
    with ExitStack() as stack:

        def make(act: str) -> list[RelayTrial]:
            link.execute("FLUSHALL")
            made = []
            for number, point in enumerate(POINTS):
                url = f"{server.url}?db={number}"
                made.append(RelayTrial(tmp_path, url, database, point, act))
                stack.callback(made[-1].close)
            return made

        yield make


def test_relay_killed_at_any_point_sends_each_row_once(new_trials: NewTrials) -> None:
    kill_relays.run_killed(new_trials("KILL"))


def test_relay_paused_at_any_point_sends_each_row_once(new_trials: NewTrials) -> None:
    kill_relays.run_paused(new_trials("STOP"))
