"""Other processes can read which wait a worker is in."""

from __future__ import annotations

import pytest

from streamqd.housekeeper.summary import worker_state
from streamqd.idle_reason import Wait, Waiting
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard, WorkerSlot, WorkerState
from streamqd.worker.held_keys import report_full


@pytest.fixture
def slot() -> WorkerSlot:
    board = Scoreboard(2)
    board.allot(Assignment("access", 0, "hits")).state = WorkerState.READY
    other = board.allot(Assignment("access", 1, "hits"))
    other.state = WorkerState.READY
    other.waits.begin(Wait.OPEN, 7)
    return board.slot(0)


def test_wait_round_trips(slot: WorkerSlot):
    waits = slot.waits
    assert waits.read() == Waiting(Wait.NOTHING, 0, 0, 0, 0, 0)
    waits.begin(Wait.BLOCKED, 123)
    waits.hold(5, 2)
    waits.count_opening()
    waits.count_flood()
    waits.count_flood()
    assert slot.waits.read() == Waiting(Wait.BLOCKED, 123, 5, 2, 1, 2)
    waits.end()
    assert waits.read() == Waiting(Wait.NOTHING, 0, 5, 2, 1, 2)


def test_new_worker_has_no_wait_and_keeps_the_counts(slot: WorkerSlot):
    waits = slot.waits
    waits.begin(Wait.FULL, 9)
    waits.hold(5, 2)
    waits.count_opening()
    waits.reset()
    assert waits.read() == Waiting(Wait.NOTHING, 0, 0, 0, 1, 0)


def test_unknown_wait_kind_is_read_as_no_wait(slot: WorkerSlot):
    slot.waits._words[0] = 99
    assert slot.waits.read().kind is Wait.NOTHING


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Wait.NOTHING, "ready"),
        (Wait.BLOCKED, "blocked"),
        (Wait.FULL, "full"),
        (Wait.OPEN, "halted"),
        (Wait.PROBING, "probing"),
        (Wait.FLOODED, "flooded"),
    ],
)
def test_state_of_a_ready_worker_is_its_wait(slot: WorkerSlot, kind: Wait, word: str):
    slot.waits.begin(kind)
    assert worker_state(slot) == word
    slot.state = WorkerState.PAUSED
    assert worker_state(slot) == "paused"


def test_ready_worker_with_suspects_is_recovering(slot: WorkerSlot):
    slot.suspects_left = 3
    assert worker_state(slot) == "recovering"
    slot.waits.begin(Wait.OPEN)
    assert worker_state(slot) == "halted"
    slot.waits.end()
    slot.state = WorkerState.PAUSED
    assert worker_state(slot) == "paused"
    slot.state = WorkerState.READY
    slot.suspects_left = 0
    assert worker_state(slot) == "ready"


@pytest.mark.parametrize("other", [Wait.OPEN, Wait.PROBING, Wait.RATED])
def test_held_keys_wait_has_the_lowest_priority(slot: WorkerSlot, other: Wait):
    waits = slot.waits
    report_full(waits, 9.0)
    assert waits.read()[:2] == (Wait.FULL, 9)
    waits.begin(other, 5)
    report_full(waits, 9.0)
    assert waits.read()[:2] == (other, 5)
    report_full(waits, None)
    assert waits.read()[:2] == (other, 5)
    waits.end()
    report_full(waits, 9.0)
    report_full(waits, None)
    assert waits.read().kind is Wait.NOTHING
