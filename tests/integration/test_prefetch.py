"""A worker holds a limited number of messages, and hands over those that have not started."""

from __future__ import annotations

import threading

import pytest

from streamqd.message import Message
from streamqd.scoreboard import CLEARED, WorkerSlot
from streamqd.store import leases
from streamqd.worker import ExitCode, assembly, concurrent, prefetch
from tests.contract.harness import Harness
from tests.support.life import Life


def test_slow_handler_limits_prefetched_messages(
    harness: Harness, life: Life, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
):
    """A slow handler's worker fetches fewer messages, as no other worker could start them.

    In this test, every run counts as slow.
    """
    monkeypatch.setattr(prefetch, "WORK_IN_FLIGHT_NS", 1)
    for number in range(1, 13):
        harness.add(f"{number}-0")
    in_flight: list[int] = []
    worker = life.worker("t1", max_messages=12)
    assert life.run(worker, lambda _message: in_flight.append(slot.in_flight)) == ExitCode.RECYCLE
    assert in_flight == [4] * 4 + [1] * 8, "the first read knows nothing of the handler yet"


def test_read_with_acknowledgments_fetches_nothing_extra(
    harness: Harness, life: Life, slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
):
    """A read that carries acknowledgments fetches no more than needed.

    In this test, every run counts as slow, and every finished message as overdue for its
    acknowledgment.
    """
    monkeypatch.setattr(prefetch, "WORK_IN_FLIGHT_NS", 1)
    monkeypatch.setattr(concurrent, "WORK_IN_FLIGHT_NS", 1)
    monkeypatch.setattr(assembly, "ACK_DELAY_NS", 0)
    for number in range(1, 101):
        harness.add(f"{number}-0")
    in_flight: list[int] = []
    last = threading.Event()

    def work(message: Message) -> None:
        if message.id in ("1-0", "2-0", "3-0"):
            last.wait(5)  # so that the runs finish one at a time
            return
        in_flight.append(slot.unfinished)
        if len(in_flight) == 57:
            last.set()

    worker = life.worker("t1", concurrency=4, order="none", max_messages=60, prefetch_bytes=1 << 30)
    assert life.run(worker, work) == ExitCode.RECYCLE
    print("in hand:", in_flight)
    assert max(in_flight[-20:]) <= 2 * 4, "the running messages, and one read for a free lane"


def test_next_owner_gets_unstarted_messages_immediately(
    harness: Harness, life: Life, slot: WorkerSlot
):
    """When the partition moves, a slow message does not hold back others of its read."""
    for number in range(1, 5):
        harness.add(f"{number}-0")
    runs: list[tuple[str, str, int]] = []

    def slow(message: Message) -> None:
        assert slot.in_flight == 4
        runs.append(("t1", message.id, message.attempt))
        life.stop()  # as if the partition were moved during the first run

    assert life.run(life.worker("t1"), slow) == ExitCode.STOPPED
    assert slot.counter("released") == 3
    assert slot.states[0] == CLEARED, "the finished message is acknowledged for any next owner"
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    harness.own("t2", seen_epoch=int(harness.do("HGET", harness.fence, "epoch")))
    follower = life.worker("t2", max_messages=3)
    life.run(follower, lambda message: runs.append(("t2", message.id, message.attempt)))
    assert runs == [("t1", "1-0", 1), ("t2", "2-0", 1), ("t2", "3-0", 1), ("t2", "4-0", 1)]
