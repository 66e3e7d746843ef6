"""Every kind of worker keeps to its rate, and obeys its supervisor while it waits.

The start times come from the worker's slot, and the bound is arithmetic on these times. A slow
machine makes the intervals longer, but never shorter.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from streamqd import Message
from streamqd.idle_reason import Wait
from streamqd.scoreboard import WorkerCommand, WorkerSlot, now_ns
from streamqd.worker import ExitCode
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.life import Life
from tests.support.waiting import wait_until

SECOND = 1_000_000_000


def fill(harness: Harness, count: int) -> None:
    for number in range(count):
        harness.add(f"{number + 1}-0", "payload", str(number))


def respects_rate(starts: Sequence[int], per_second: float, burst: int) -> bool:
    """Return True if no period contains more starts than the rate and the burst allow."""
    interval = SECOND / per_second
    return all(
        last - first < burst + (starts[last] - starts[first]) / interval
        for first in range(len(starts))
        for last in range(first, len(starts))
    )


class Journal:
    """The start times of runs, as the slot records them."""

    def __init__(self, slot: WorkerSlot) -> None:
        self.slot = slot
        self.starts: list[int] = []

    def note(self, runs: int = 1) -> None:
        self.starts += [self.slot.lanes[1]] * runs


@pytest.fixture
def journal(slot: WorkerSlot) -> Journal:
    return Journal(slot)


def test_rate_limits_runs_including_retries(harness: Harness, life: Life, journal: Journal):
    fill(harness, 30)

    def work(message: Message) -> None:
        journal.note()
        if int(message.text()) % 3 == 0:
            raise ValueError("not this one")

    worker = life.worker("t1", rate="200/s", rate_burst=3, max_messages=30, max_attempts=2)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert len(journal.starts) == 30
    assert respects_rate(journal.starts, 200, 3)
    assert life.slot.counter("throttled_ns") > 0
    assert life.slot.waits.read().kind is Wait.NOTHING


def test_rate_state_survives_a_worker_replacement(harness: Harness, life: Life, journal: Journal):
    """The state even survives a crash, because it is stored outside of the worker."""
    fill(harness, 12)
    for _ in range(4):
        worker = life.worker("t1", rate="20/s", rate_burst=2, max_messages=3)
        assert life.run(worker, lambda _message: journal.note()) == ExitCode.RECYCLE
    assert len(journal.starts) == 12
    assert respects_rate(journal.starts, 20, 2)


def test_rate_share_follows_the_partition_count(
    harness: Harness, life: Life, journal: Journal, slot: WorkerSlot
):
    """The share follows the partition count that the supervisor writes, without a restart."""
    fill(harness, 30)
    slot.partitions = 2

    def work(_message: Message) -> None:
        journal.note()
        if len(journal.starts) == 15:
            slot.partitions = 4

    worker = life.worker("t1", rate="400/s", rate_per="group", rate_burst=1, max_messages=30)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert respects_rate(journal.starts[:15], 200, 1)
    assert respects_rate(journal.starts[15:], 100, 1)
    assert slot.rate_micro == 100_000_000


BATCHES = "tests.integration.test_throttle:handle_batch"
_takers: list[Any] = []


def handle_batch(batch: list[Message]) -> None:
    """A batch handler."""
    _takers[-1](batch)


@pytest.mark.parametrize(("batch", "burst", "most"), [(10, None, 10), (10, 4, 4), (None, 4, 4)])
def test_rate_counts_each_message_of_a_batch(
    harness: Harness, life: Life, journal: Journal, batch: int | None, burst: int | None, most: int
):
    fill(harness, 40)
    sizes: list[int] = []

    def taken(messages: list[Message]) -> None:
        sizes.append(len(messages))
        journal.note(len(messages))

    _takers.append(taken)
    worker = life.worker(
        "t1", handler=BATCHES, batch=batch, rate="200/s", rate_burst=burst, max_messages=40
    )
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert sum(sizes) == 40
    assert max(sizes) <= most
    assert respects_rate(journal.starts, 200, most)


@pytest.mark.parametrize("lanes", [2, 8])
def test_concurrent_runs_share_one_rate(harness: Harness, life: Life, slot: WorkerSlot, lanes: int):
    fill(harness, 30)
    lock = threading.Lock()
    begun: dict[bytes, int] = {}

    def work(message: Message) -> None:
        place = b"m:" + message.id_bytes
        while message.id_bytes not in begun:  # a reading is empty while a batch is being written
            with lock:
                places = {entry.place: entry.started_ns for entry in slot.running}
            if place in places:
                begun[message.id_bytes] = places[place]

    worker = life.worker(
        "t1", concurrency=lanes, order="none", rate="150/s", rate_burst=2, max_messages=30
    )
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert len(begun) == 30
    assert respects_rate(sorted(begun.values()), 150, 2)


@pytest.mark.parametrize(
    ("kind", "prefetched"), [({}, 1), ({"concurrency": 4, "order": "none"}, 3)]
)
def test_rate_bounds_the_fetched_messages(
    harness: Harness, life: Life, slot: WorkerSlot, kind: dict[str, Any], prefetched: int
):
    fill(harness, 100)

    def work(_message: Message) -> None:
        life.stop()

    worker = life.worker("t1", rate="1/s", **kind)
    assert life.run(worker, work) == ExitCode.STOPPED
    assert slot.counter("fetched") <= prefetched


@pytest.mark.parametrize("order", ["none", "key"])
def test_throttled_lanes_fetch_no_messages(
    harness: Harness, life: Life, slot: WorkerSlot, order: str
):
    """Throttled lanes fetch no messages.

    One message per lane would be eight hours of work that no other worker could start.
    """
    fill(harness, 100)

    def stop_when_held() -> None:
        wait_until(lambda: slot.waits.read().kind is Wait.RATED)
        seen = slot.progress_ns
        life.send_command(WorkerCommand.NONE)
        wait_until(lambda: slot.progress_ns != seen, what="it has read all it wants, and waits")
        life.stop()

    player = threading.Thread(target=stop_when_held)
    player.start()
    worker = life.worker("t1", rate="1/h", concurrency=8, order=order)
    assert life.run(worker, lambda _message: None) == ExitCode.STOPPED
    player.join()
    assert slot.counter("fetched") <= 3


@pytest.mark.parametrize("kind", [{}, {"concurrency": 4, "order": "none"}])
def test_stop_does_not_wait_for_the_rate(
    harness: Harness, life: Life, slot: WorkerSlot, kind: dict[str, Any]
):
    fill(harness, 5)
    runs: list[str] = []

    def stop_when_held() -> None:
        wait_until(lambda: slot.waits.read().kind is Wait.RATED)
        life.stop()

    worker = life.worker("t1", rate="1/h", **kind)
    thread = threading.Thread(target=stop_when_held)
    thread.start()
    assert life.run(worker, lambda message: runs.append(message.id)) == ExitCode.STOPPED
    thread.join()
    assert runs == ["1-0"]
    rows = harness.do("XPENDING", harness.stream, ASSIGNMENT.group, "-", "+", 9)
    assert b"1-0" not in [row[0] for row in rows], (
        "finished messages are acknowledged before the wait"
    )


def test_pause_and_resume_work_during_a_rate_wait(
    harness: Harness, life: Life, slot: WorkerSlot, journal: Journal
):
    fill(harness, 4)

    def steer() -> None:
        wait_until(lambda: slot.waits.read().kind is Wait.RATED)
        life.send_command(WorkerCommand.PAUSE)
        wait_until(lambda: slot.state == 3)
        life.send_command(WorkerCommand.NONE)

    thread = threading.Thread(target=steer)
    thread.start()
    worker = life.worker("t1", rate="10/s", rate_burst=1, max_messages=4)
    assert life.run(worker, lambda _message: journal.note()) == ExitCode.RECYCLE
    thread.join()
    assert respects_rate(journal.starts, 10, 1)


def test_rate_wait_respects_an_untrusted_lease(
    harness: Harness, life: Life, slot: WorkerSlot, journal: Journal
):
    fill(harness, 2)
    given: list[int] = []

    def distrust() -> None:
        wait_until(lambda: slot.waits.read().kind is Wait.RATED, every=0.001)
        slot.trusted_until_ns = now_ns()
        wait_until(lambda: now_ns() > slot.rate_due_ns)
        given.append(now_ns())
        slot.trusted_until_ns = (1 << 63) - 1

    thread = threading.Thread(target=distrust)
    thread.start()
    worker = life.worker("t1", rate="2/s", max_messages=2)
    assert life.run(worker, lambda _message: journal.note()) == ExitCode.RECYCLE
    thread.join()
    assert journal.starts[1] >= given[0]
