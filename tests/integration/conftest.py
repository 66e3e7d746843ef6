"""Shared fixtures, which run commands, and run workers in the process of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from streamqd import config
from streamqd.cli import cli
from streamqd.housekeeper import batch
from streamqd.housekeeper.figures import ask_time
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard, WorkerSlot
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support import users
from tests.support.commands import HarnessAt, Run
from tests.support.costs import Meter, Page, counting_sockets
from tests.support.daemon import toml
from tests.support.handling import stop_clocks
from tests.support.life import Life, open_lives
from tests.support.servers import Server


@pytest.fixture
def file(tmp_path: Path, server: Server) -> Path:
    """A configuration file that names the shared server."""
    path = tmp_path / "streamq.toml"
    path.write_text(toml({"redis": {"url": server.url, **users.redis_section("admin")}}))
    return path


@pytest.fixture
def run(file: Path, link: Connection) -> Run:
    """Return a function that runs a command with `file` and asserts its exit code.

    `code` is the expected exit code, and `typed` is the standard input of the command.
    """

    def invoke(*args: str, code: int = 0, typed: bytes | str | None = None) -> Result:
        result = CliRunner().invoke(cli, ["--config", str(file), *args], input=typed)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.stderr
        return result

    return invoke


@pytest.fixture
def unlimited_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the housekeeper's tasks so much time that a busy machine cannot cut a turn short."""
    monkeypatch.setattr(batch, "TURN_SECONDS", 60.0)


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the timers of the hot path, after checking that their settings are within bounds."""
    stop_clocks(monkeypatch)


@pytest.fixture
def view(board: Scoreboard, link: Connection) -> MetricsView:
    """Return a housekeeper's view that contains only the time. The test file supplies the board."""
    view = MetricsView("web-1", board)
    ask_time(link, view, "any")
    return view


@pytest.fixture
def harness_at(link: Connection, store: Store, keys: Keys) -> HarnessAt:
    """Return a function that makes a harness for a partition of the topic access and a group.

    The topic has three partitions.
    """
    topics.create(store, "access", config.Topic(partitions=3))
    return lambda partition, group="hits": Harness(
        link, keys, Assignment("access", partition, group)
    )


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    """An assignment with a group, owned by t1."""
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    return harness


@pytest.fixture
def slot() -> WorkerSlot:
    return Scoreboard(2).allot(ASSIGNMENT)


@pytest.fixture
def new_life(slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Life]]:
    """Make lives that use the server at a given URL, such as the URL of a proxy."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with open_lives(slot) as make:
        yield make


@pytest.fixture
def life(new_life: Callable[[str], Life], server: Server) -> Life:
    return new_life(server.url)


@pytest.fixture
def meter(link: Connection) -> Iterator[Meter]:
    """A meter of the shared server. It counts the work of connections that are opened later."""
    with counting_sockets():
        yield Meter(link)


@pytest.fixture
def page(server: Server) -> Page:
    """Return the costs page. It judges costs only on the bundled server.

    Other servers may need one more command for the same work.
    """
    found = Page()
    found.judges = server.product == "valkey" and not users.are_enabled()
    return found
