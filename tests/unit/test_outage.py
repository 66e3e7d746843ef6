"""What the workers of a group tell each other of an outage, by words that they share."""

from __future__ import annotations

import pytest

from streamqd.idle_reason import CIRCUIT
from streamqd.model import Unit
from streamqd.scoreboard import Scoreboard, WorkerSlot, now_ns
from streamqd.worker.guards import TURN_SECONDS, Outage


def now() -> float:
    return now_ns() / 1e9


@pytest.fixture
def board() -> Scoreboard:
    board = Scoreboard(slots=8)
    board.allot(Unit("other", 0, "hits"))
    for partition in (2, 0, 1):
        board.allot(Unit("access", partition, "hits"))
    board.allot(Unit("access", 0, "hits@dlq"))
    return board


def of(board: Scoreboard, partition: int, topic: str = "access", group: str = "hits") -> WorkerSlot:
    return board.allot(Unit(topic, partition, group))


def fail(slot: WorkerSlot, failures: int, since: float) -> None:
    slot.waits.keep(CIRCUIT, failures, int(since * 1e9))


def test_what_one_opens_is_open_for_the_group_and_nobody_else(board: Scoreboard):
    two, one = Outage(of(board, 2)), Outage(of(board, 1))
    strangers = [Outage(of(board, 0, "other")), Outage(of(board, 0, "access", "hits@dlq"))]
    before = now()
    assert one.failed()
    assert not two.failed(), "it was open"
    assert two.is_open
    assert (one.mine, two.mine) == (True, False)
    assert before <= two.opened <= now()
    assert not any(each.is_open for each in strangers)
    late = Outage(of(board, 7))
    assert late.is_open
    assert late.close()
    assert not two.close()
    assert not one.is_open
    assert one.opened >= before, "that it was is not forgotten"


def test_failures_of_the_others_count_within_the_window_and_since_it_was_open(board: Scoreboard):
    one = Outage(of(board, 1))
    fail(of(board, 1), 9, now())
    fail(of(board, 0, "other"), 9, now())
    assert one.failures(now(), 5.0) == 0, "not its own, and none of another topic"
    fail(of(board, 0), 2, now() - 4.0)
    fail(of(board, 2), 3, now() - 1.0)
    assert one.failures(now(), 5.0) == 5
    assert one.failures(now(), 3.0) == 3
    fail(of(board, 3), 1, now())
    assert one.failures(now(), 3.0) == 4, "a partition that came later"
    one.failed()
    one.close()
    assert one.failures(now(), 5.0) == 0, "they were of an outage that is over"


def test_successes_are_those_of_the_others(board: Scoreboard):
    for partition in range(3):
        of(board, partition).add("acked", 10**partition)
    assert Outage(of(board, 1)).successes() == 101


def test_turns_pass_along_the_line_and_who_was_last_is_last_again(board: Scoreboard):
    line = [Outage(of(board, partition)) for partition in (2, 0, 1)]
    line[1].failed()
    waits = [each.later(10.0) for each in line]
    assert waits == [TURN_SECONDS, 2 * TURN_SECONDS, 0]
    line[2].probe(again=False)
    assert [each.later(10.0) for each in line] == [0, TURN_SECONDS, 2 * TURN_SECONDS]
    assert line[1].later(0.06) == pytest.approx(0.01), "all turns fit into half of the time"
    alone = Outage(of(board, 0, "other"))
    alone.failed()
    assert alone.later(10.0) == 0


def test_who_tries_again_does_not_keep_its_turn_for_longer(board: Scoreboard):
    one = Outage(of(board, 1))
    one.failed()
    one.probe(again=False)
    opened = one.opened
    one.probe(again=True)
    assert one.opened == opened
    assert one.mine


def test_who_runs_on_behind_its_probe_has_had_success(board: Scoreboard):
    slot = of(board, 1)
    one, two = Outage(slot), Outage(of(board, 2))
    slot.run_seq = 41
    one.failed()
    assert not two.proved
    one.probe(again=False)
    for sequence, proved in ((41, False), (42, False), (43, True)):
        slot.run_seq = sequence
        assert two.proved is proved
        assert not one.proved, "it sees for itself"
    one.failed()
    assert not two.proved
    one.close()
    slot.run_seq = 99
    assert not two.proved
