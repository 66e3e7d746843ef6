"""Fixtures for tests that let workers live in their own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from streamqd.scoreboard import Scoreboard, Slot
from tests.contract.desk import UNIT
from tests.support.life import Life, lives
from tests.support.servers import Server


@pytest.fixture
def slot() -> Slot:
    return Scoreboard(1).allot(UNIT)


@pytest.fixture
def new_life(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Life]]:
    """Make a life on the server at a URL, as that of a proxy."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with lives(slot) as make:
        yield make


@pytest.fixture
def life(new_life: Callable[[str], Life], server: Server) -> Life:
    return new_life(server.url)
