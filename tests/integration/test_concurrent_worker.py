"""A worker that handles several messages at once, on a real server that misbehaves."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from streamqd.handlers import Release
from streamqd.message import Message
from streamqd.scoreboard import RUNNING, Slot
from streamqd.store.client import Link
from streamqd.worker import ExitCode
from tests.contract.desk import Desk
from tests.support.life import Life
from tests.support.proxy import FaultProxy
from tests.support.servers import ProcessServer, Server
from tests.support.waiting import wait_until

SEVERAL = {"concurrency": 4, "order": "none"}


def settled(desk: Desk) -> bool:
    return desk.state()["stream"].groups["hits"][1] == {}


@pytest.mark.parametrize("limit", [1, 6])
def test_no_process_begins_more_than_it_may_handle(desk: Desk, life: Life, limit: int):
    for number in range(1, 21):
        desk.add(f"{number}-0")
    runs: list[str] = []
    worker = life.worker("t1", max_messages=limit, **SEVERAL)
    assert life.run(worker, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    assert sorted(runs, key=lambda name: int(name[:-2])) == [f"{n}-0" for n in range(1, limit + 1)]


_sizes: list[int] = []


def take(batch: list[Message]) -> None:
    """A handler of batches."""
    _sizes.append(len(batch))


@pytest.mark.parametrize("limit", [1, 13])
def test_the_last_batch_is_cut_to_what_a_process_may_handle(desk: Desk, life: Life, limit: int):
    for number in range(1, 21):
        desk.add(f"{number}-0")
    _sizes.clear()
    worker = life.worker("t1", handler=f"{__name__}:take", batch=5, max_messages=limit)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert sum(_sizes) == limit
    assert max(_sizes) <= 5


def test_four_run_at_once_and_each_is_acknowledged_by_itself(desk: Desk, life: Life):
    for number in range(1, 9):
        desk.add(f"{number}-0")
    barrier = threading.Barrier(4)
    first = threading.Event()

    def work(message: Message) -> None:
        barrier.wait(5)
        if message.id == "1-0":
            wait_until(lambda: "2-0" not in desk_pending(), what="2-0 is acknowledged")
            first.set()

    def desk_pending() -> set[str]:
        # A link belongs to one thread.
        return {row[0].decode() for row in other.execute("XPENDING", *pending)}

    other = Link(life.settings.redis, timeout=5.0, name="test:other")
    pending = (desk.stream, "hits", "-", "+", 100)
    assert life.run(life.worker("t1", max_messages=8, **SEVERAL), work) == ExitCode.RECYCLE
    assert first.is_set()
    assert settled(desk)
    other.close()


@pytest.mark.parametrize("how", ["inherited", "unread"])
@pytest.mark.parametrize(
    ("size", "bounds"),
    [(10_000, {"prefetch_bytes": 64_000}), (10, {"prefetch_max": 8})],
    ids=["bytes", "number"],
)
def test_what_is_in_hand_is_bounded(
    desk: Desk, life: Life, slot: Slot, how: str, size: int, bounds: dict[str, int]
):
    """Two reads may be in hand, and what runs."""
    for number in range(1, 61):
        desk.add(f"{number}-0", "payload", b"x" * size)
    if how == "inherited":
        desk.fetch(100)
    seen = []
    barrier = threading.Barrier(4)

    def work(_message: Message) -> None:
        barrier.wait(5)
        seen.append(slot.unfinished)

    assert life.run(life.worker("t1", max_messages=60, **SEVERAL, **bounds), work) == (
        ExitCode.RECYCLE
    )
    print("at most in hand:", max(seen))
    assert 4 <= max(seen) <= 2 * 8 + 4


def test_what_runs_is_not_begun_again_after_a_lost_connection(
    desk: Desk, new_life: Callable[[str], Life], server: Server
):
    if not isinstance(server, ProcessServer):
        pytest.skip("needs the server's socket")
    for number in range(1, 13):
        desk.add(f"{number}-0")
    runs: Counter[str] = Counter()
    running = threading.Barrier(4)
    again = threading.Event()

    def work(message: Message) -> None:
        runs[message.id] += 1
        if message.id in ("1-0", "2-0", "3-0"):
            running.wait(5)
            again.wait(5)

    with FaultProxy(server.socket_path) as proxy:
        worker = new_life(proxy.url).worker("t1", max_messages=12, **SEVERAL)

        def cut() -> None:
            running.wait(5)
            before = worker.link.opened
            proxy.cut()
            # It lists what is pending while three still run, and goes on with the others.
            wait_until(lambda: worker.link.opened > before, what="a new connection")
            wait_until(lambda: runs.total() == 12, what="the others have run")
            again.set()

        cutter = threading.Thread(target=cut)
        cutter.start()
        assert new_life(proxy.url).run(worker, work) == ExitCode.RECYCLE
        cutter.join()
    assert runs == {f"{number}-0": 1 for number in range(1, 13)}
    assert settled(desk)


def test_inherited_entries_of_a_lost_host_run_alone(desk: Desk, life: Life, slot: Slot):
    for number in range(1, 6):
        desk.add(f"{number}-0")
    desk.fetch(5)
    desk.do("HSET", desk.fence, "solo", "1")
    marks = []

    def work(message: Message) -> None:
        states = bytes(slot.states)
        marks.append((message.id, states.count(RUNNING)))

    assert life.run(life.worker("t1", max_messages=5, **SEVERAL), work) == ExitCode.RECYCLE
    assert marks == [(f"{number}-0", 1) for number in range(1, 6)]
    assert settled(desk)


def test_suspects_run_alone(desk: Desk, life: Life, slot: Slot):
    for number in range(1, 7):
        desk.add(f"{number}-0")
    desk.fetch(6)
    worker = life.worker("t1", max_messages=6, **SEVERAL)
    worker.suspects = frozenset([b"m:2-0", b"m:5-0"])
    seen = {}

    def work(message: Message) -> None:
        seen[message.id] = slot.unfinished if message.id in ("2-0", "5-0") else 0

    assert life.run(worker, work) == ExitCode.RECYCLE
    assert (seen["2-0"], seen["5-0"]) == (1, 1), "nothing else was in hand"
    assert len(seen) == 6


def test_a_worker_that_has_lost_the_unit_lets_its_runs_end_and_begins_no_more(
    desk: Desk, life: Life, slot: Slot
):
    for number in range(1, 41):
        desk.add(f"{number}-0")
    ended = []

    def work(message: Message) -> None:
        if message.id == "1-0":
            with lock:
                desk.do("HSET", desk.fence, "token", "t2")
        ended.append(message.id)

    lock = threading.Lock()
    worker = life.worker("t1", prefetch_max=8, prefetch_bytes=1 << 30, **SEVERAL)
    assert life.run(worker, work) == ExitCode.FENCED
    assert len(ended) < 40
    assert not slot.batch().running


def test_foreign_entries_are_taken_over(desk: Desk, life: Life, slot: Slot):
    for number in range(1, 6):
        desk.add(f"{number}-0")
    desk.fetch(5, consumer="someone")
    slot.reclaim_requested = 1
    worker = life.worker("t1", max_messages=5, reclaim_idle=0.0, **SEVERAL)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert slot.counter("reclaimed") == 5
    assert settled(desk)


def test_release_comes_back_and_does_not_turn_in_circles(desk: Desk, life: Life, slot: Slot):
    for number in range(1, 21):
        desk.add(f"{number}-0")
    runs: Counter[str] = Counter()

    def work(message: Message) -> None:
        runs[message.id] += 1
        if message.id == "3-0" and runs[message.id] < 3:
            raise Release

    assert life.run(life.worker("t1", max_messages=22, **SEVERAL), work) == ExitCode.RECYCLE
    assert runs.pop("3-0") == 3
    assert set(runs.values()) == {1}
    assert slot.counter("released") == 2
    assert slot.counter("failed") == 0
    assert settled(desk)


def test_with_full_memory_a_failed_message_is_parked_and_the_others_go_on(
    desk: Desk, life: Life, slot: Slot
):
    for number in range(1, 21):
        desk.add(f"{number}-0", "payload", "bad" if number == 5 else "ok")
    done = []

    def work(message: Message) -> None:
        if message.text() == "bad":
            raise ValueError
        done.append(message.id)

    with desk.full_memory():
        life.run(life.worker("t1", max_messages=20, **SEVERAL), work)
        assert len(done) == 19
        assert slot.counter("parked") == 1
    assert set(desk.state()["stream"].groups["hits"][1]) == {"5-0"}
