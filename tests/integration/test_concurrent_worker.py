"""A worker handles several messages at a time, although its real server misbehaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from multiprocessing import get_context
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from streamqd.config.consumers import Breaker
from streamqd.handlers import Release, SoftTimeout
from streamqd.message import Message
from streamqd.model import Backoff
from streamqd.scoreboard import WorkerSlot, now_ns
from streamqd.store.client import connect
from streamqd.worker import ExitCode, assembly, turns
from streamqd.worker import worker as worker_module
from streamqd.worker.runs import QUICK_RUN_NS
from tests.contract.harness import Harness
from tests.support.life import Life
from tests.support.proxy import FaultProxy
from tests.support.waiting import wait_until

SEVERAL = {"concurrency": 4, "order": "none"}


def is_settled(harness: Harness) -> bool:
    return harness.state()["stream"].groups["hits"][1] == {}


@pytest.mark.parametrize("limit", [1, 6])
def test_concurrent_worker_starts_at_most_max_messages(harness: Harness, life: Life, limit: int):
    for number in range(1, 21):
        harness.add(f"{number}-0")
    runs: list[str] = []
    worker = life.worker("t1", max_messages=limit, **SEVERAL)
    assert life.run(worker, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    assert sorted(runs, key=lambda name: int(name[:-2])) == [f"{n}-0" for n in range(1, limit + 1)]


_sizes: list[int] = []


def handle_batch(batch: list[Message]) -> None:
    """A batch handler."""
    _sizes.append(len(batch))


@pytest.mark.parametrize("limit", [1, 13])
def test_last_batch_is_truncated_to_max_messages(harness: Harness, life: Life, limit: int):
    for number in range(1, 21):
        harness.add(f"{number}-0")
    _sizes.clear()
    worker = life.worker("t1", handler=f"{__name__}:handle_batch", batch=5, max_messages=limit)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert sum(_sizes) == limit
    assert max(_sizes) <= 5


def test_concurrent_runs_are_acknowledged_separately(harness: Harness, life: Life):
    for number in range(1, 9):
        harness.add(f"{number}-0")
    barrier = threading.Barrier(4)
    first = threading.Event()

    def work(message: Message) -> None:
        barrier.wait(5)
        if message.id == "1-0":
            wait_until(lambda: "2-0" not in harness_pending(), what="2-0 is acknowledged")
            first.set()

    def harness_pending() -> set[str]:
        # Each link belongs to one thread.
        return {row[0].decode() for row in other.execute("XPENDING", *pending)}

    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    pending = (harness.stream, "hits", "-", "+", 100)
    assert life.run(life.worker("t1", max_messages=8, **SEVERAL), work) == ExitCode.RECYCLE
    assert first.is_set()
    assert is_settled(harness)
    other.close()


@pytest.mark.parametrize("on_error", ["requeue", "hold-key"])
def test_slow_failure_of_a_lane_is_settled_without_delay(
    harness: Harness, life: Life, monkeypatch: pytest.MonkeyPatch, on_error: str
):
    """The settlement of a slow failure is not delayed, just as in a worker with one lane.

    Only quick failures wait.
    """
    monkeypatch.setattr(assembly, "ACK_DELAY_NS", 60 * 10**9)
    harness.add("1-0", "payload", "bad", "key", "a")
    harness.add("2-0", "payload", "good", "key", "b")
    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    begun = threading.Barrier(2)

    def noted() -> bool:
        if on_error == "requeue":
            return bool(other.execute("EXISTS", harness.keys.retry(*harness.assignment)))
        return bool(other.execute("HGET", harness.attempts, "m:1-0:f") == b"1")

    def work(message: Message) -> None:
        if message.id == "1-0" and message.attempt == 1:
            begun.wait(5)
            started = now_ns()
            wait_until(lambda: now_ns() - started > 2 * QUICK_RUN_NS, what="the run is not quick")
            raise ValueError("no")
        if message.id == "2-0":
            begun.wait(5)
            wait_until(noted, what="the failure is settled")

    own = {"concurrency": 2, "order": "key", "on_error": on_error}
    assert life.run(life.worker("t1", max_messages=2, **own), work) == ExitCode.RECYCLE
    assert noted()
    other.close()


async def yield_to_others(_message: Message) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("count", [600, 1024])
def test_128_coroutines_settle_messages_with_counters(harness: Harness, life: Life, count: int):
    """128 coroutines settle their messages while all acknowledgments clear counters."""
    for number in range(1, count + 1):
        harness.add(f"{number}-0")
        harness.do("HSET", harness.attempts, f"m:{number}-0:f", "1")
    harness.fetch(count)

    own = {"handler": f"{__name__}:yield_to_others", "concurrency": 128, "order": "none"}
    worker = life.worker("t1", max_messages=count, **own)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert is_settled(harness)
    assert harness.do("EXISTS", harness.attempts) == 0


@pytest.mark.parametrize("how", ["inherited", "unread"])
@pytest.mark.parametrize(
    ("size", "bounds"),
    [(10_000, {"prefetch_bytes": 64_000}), (10, {"prefetch_max": 8})],
    ids=["bytes", "number"],
)
def test_concurrent_worker_bounds_its_held_messages(
    harness: Harness, life: Life, slot: WorkerSlot, how: str, size: int, bounds: dict[str, int]
):
    """A worker holds no more than two reads in addition to the messages that are running."""
    for number in range(1, 61):
        harness.add(f"{number}-0", "payload", b"x" * size)
    if how == "inherited":
        harness.fetch(100)
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


def test_running_messages_do_not_restart_after_a_reconnect(
    harness: Harness, new_life: Callable[[str], Life], proxy: FaultProxy
):
    for number in range(1, 13):
        harness.add(f"{number}-0")
    runs: Counter[str] = Counter()
    running = threading.Barrier(4)
    again = threading.Event()

    def work(message: Message) -> None:
        runs[message.id] += 1
        if message.id in ("1-0", "2-0", "3-0"):
            running.wait(5)
            again.wait(5)

    worker = new_life(proxy.url).worker("t1", max_messages=12, **SEVERAL)

    def cut() -> None:
        running.wait(5)
        before = worker.link.node.opened
        proxy.cut()
        # The worker lists the pending entries while three are still running, and continues with the
        # others.
        wait_until(lambda: worker.link.node.opened > before, what="a new connection")
        wait_until(lambda: runs.total() == 12, what="the others have run")
        again.set()

    cutter = threading.Thread(target=cut)
    cutter.start()
    assert new_life(proxy.url).run(worker, work) == ExitCode.RECYCLE
    cutter.join()
    assert runs == {f"{number}-0": 1 for number in range(1, 13)}
    assert is_settled(harness)


def test_inherited_entries_of_a_lost_host_run_in_marked_rounds(harness: Harness, life: Life):
    for number in range(1, 6):
        harness.add(f"{number}-0")
    harness.fetch(5)
    harness.do("HSET", harness.fence, "quarantine", "1")
    marks, lock = {}, threading.Lock()

    def work(message: Message) -> None:
        with lock:
            marks[message.id] = harness.do("HGET", harness.fence, "mark")

    assert life.run(life.worker("t1", max_messages=5, **SEVERAL), work) == ExitCode.RECYCLE
    first, rest = b"m:1-0 m:2-0", b"m:3-0 m:4-0 m:5-0"
    assert marks == {"1-0": first, "2-0": first, "3-0": rest, "4-0": rest, "5-0": rest}
    assert is_settled(harness)


def test_suspects_of_a_lost_round_run_alone(harness: Harness, life: Life):
    for number in range(1, 6):
        harness.add(f"{number}-0")
    harness.fetch(5)
    harness.do("HSET", harness.fence, "quarantine", "1", "accused", "m:2-0 m:3-0")
    marks, lock = {}, threading.Lock()

    def work(message: Message) -> None:
        with lock:
            marks[message.id] = harness.do("HGET", harness.fence, "mark")

    assert life.run(life.worker("t1", max_messages=5, **SEVERAL), work) == ExitCode.RECYCLE
    assert {name: marks[name] for name in ("2-0", "3-0")} == {"2-0": b"m:2-0", "3-0": b"m:3-0"}
    assert len(marks) == 5


def test_concurrent_worker_runs_suspects_alone(harness: Harness, life: Life, slot: WorkerSlot):
    for number in range(1, 7):
        harness.add(f"{number}-0")
    harness.fetch(6)
    suspects = {b"m:2-0": 1, b"m:5-0": 1}
    worker = life.worker("t1", suspects=suspects, max_messages=6, **SEVERAL)
    seen = {}

    def work(message: Message) -> None:
        seen[message.id] = slot.unfinished if message.id in ("2-0", "5-0") else 0

    assert life.run(worker, work) == ExitCode.RECYCLE
    assert (seen["2-0"], seen["5-0"]) == (1, 1), "no other entry was held"
    assert len(seen) == 6


@pytest.mark.parametrize("several", [{}, SEVERAL], ids=["one at a time", "four at a time"])
def test_suspect_runs_as_soon_as_it_is_listed(
    harness: Harness, life: Life, slot: WorkerSlot, several: dict[str, Any]
):
    """The takeover after a crash does not wait until all pending entries are listed."""
    for number in range(1, 101):
        harness.add(f"{number}-0")
    harness.fetch(100)
    worker = life.worker("t1", suspects={b"m:1-0": 1}, max_messages=100, **several)
    calls = []
    assert life.run(worker, lambda _: calls.append(slot.counter("round_trips"))) == (
        ExitCode.RECYCLE
    )
    assert calls[0] == 1, "the first page names the suspect"
    assert len(calls) == 100


def test_fenced_worker_finishes_its_runs_but_starts_none(
    harness: Harness, life: Life, slot: WorkerSlot
):
    for number in range(1, 41):
        harness.add(f"{number}-0")
    ended = []

    def work(message: Message) -> None:
        if message.id == "1-0":
            with lock:
                harness.do("HSET", harness.fence, "token", "t2")
        ended.append(message.id)

    lock = threading.Lock()
    worker = life.worker("t1", prefetch_max=8, prefetch_bytes=1 << 30, **SEVERAL)
    assert life.run(worker, work) == ExitCode.FENCED
    assert len(ended) < 40
    assert not slot.batch().running


def test_concurrent_worker_reclaims_entries_of_other_clients(
    harness: Harness, life: Life, slot: WorkerSlot
):
    for number in range(1, 6):
        harness.add(f"{number}-0")
    harness.fetch(5, consumer="someone")
    slot.reclaim_requested = 1
    worker = life.worker("t1", max_messages=5, reclaim_idle=0.0, **SEVERAL)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert slot.counter("reclaimed") == 5
    assert is_settled(harness)


def test_released_message_returns_without_a_busy_loop(
    harness: Harness, life: Life, slot: WorkerSlot
):
    for number in range(1, 21):
        harness.add(f"{number}-0")
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
    assert is_settled(harness)


def test_full_memory_parks_only_the_failed_message(harness: Harness, life: Life, slot: WorkerSlot):
    for number in range(1, 21):
        harness.add(f"{number}-0", "payload", "bad" if number == 5 else "ok")
    done = []

    def work(message: Message) -> None:
        if message.text() == "bad":
            raise ValueError
        done.append(message.id)

    with harness.full_memory():
        life.run(life.worker("t1", max_messages=20, **SEVERAL), work)
        assert len(done) == 19
        assert slot.counter("deferred") == 1
    assert set(harness.state()["stream"].groups["hits"][1]) == {"5-0"}


def test_concurrent_worker_fetches_while_all_lanes_are_busy(
    harness: Harness, life: Life, slot: WorkerSlot
):
    """A worker fetches even if all lanes are busy.

    Its first read has no sizes yet and fetches four entries, which wait until more arrive.
    """
    for number in range(1, 9):
        harness.add(f"{number}-0")
    largest = life.settings.daemon.max_message_bytes
    seen = []
    more = threading.Event()

    def work(message: Message) -> None:
        if message.id == "1-0":
            wait_until(lambda: slot.unfinished == 8, what="the next four are held")
            more.set()
        assert more.wait(5)
        seen.append(message.id)

    worker = life.worker("t1", max_messages=8, prefetch_bytes=4 * largest, **SEVERAL)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert len(seen) == 8
    assert is_settled(harness)


@pytest.mark.parametrize(
    "held",
    [
        {"breaker": Breaker(failures=1, window=60.0, probe_every=3600.0, on=("OSError",))},
        {"on_error": "hold-key", "order": "key"},
        {"on_error": "hold-key", "order": "key", "rate": "1/h", "rate_burst": 4},
    ],
    ids=["circuit", "hold-key", "hold-key and rate"],
)
def test_held_messages_do_not_cause_a_reconnect(
    harness: Harness,
    life: Life,
    slot: WorkerSlot,
    monkeypatch: pytest.MonkeyPatch,
    held: dict[str, Any],
):
    """A held message may wait for a long time.

    It is pending because the worker holds it, so there is no reason to reconnect.
    """
    monkeypatch.setattr(worker_module, "IDLE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(turns, "BLOCK_SECONDS", 0.01)
    for number in range(1, 7):
        harness.add(f"{number}-0", "payload", "x", "key", f"k{number % 5}")
    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    sessions: list[bytes] = []

    def work(_message: Message) -> None:
        raise OSError("down")

    def look() -> None:
        wait_until(lambda: slot.counter("fetched") == 6 and slot.counter("failed") >= 4)
        sessions.append(other.execute("HGET", harness.fence, "session"))
        before = slot.counter("round_trips")
        wait_until(lambda: slot.counter("round_trips") > before + 4, what="four looks")
        sessions.append(other.execute("HGET", harness.fence, "session"))
        life.stop()

    player = threading.Thread(target=look)
    player.start()
    settings = {**SEVERAL, "backoff": Backoff("fixed", 3600.0, 3600.0, "none"), **held}
    assert life.run(life.worker("t1", **settings), work) == ExitCode.STOPPED
    player.join()
    other.close()
    assert sessions[0] == sessions[1]


def trace() -> None:
    """Trace a call of the interpreter."""
    traced: list[CodeType] = []
    sys.settrace(lambda frame, _event, _argument: traced.append(frame.f_code))
    os.fspath(Path())
    sys.settrace(None)
    assert Path.__fspath__.__code__ in traced


def test_interpreter_can_be_traced_during_threads(harness: Harness, life: Life, slot: WorkerSlot):
    """The interpreter can be traced while threads run, as debuggers and coverage tools do."""
    for number in range(1, 5):
        harness.add(f"{number}-0")
    interrupted: list[str] = []

    def work(message: Message) -> None:
        if message.id != "2-0":
            return
        place = b"m:" + message.id_bytes
        slot.soft_kill_seq = next(run.sequence for run in slot.running if run.place == place)
        os.kill(os.getpid(), signal.SIGUSR1)  # the supervisor has decided
        try:
            while True:
                pass
        except SoftTimeout:
            interrupted.append(message.id)

    worker = life.worker("t1", max_messages=4, timeout=1.0, **SEVERAL)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert interrupted == ["2-0"]
    # If the worker cannot raise an exception in the run, the run is not interrupted.
    tracing = get_context("fork").Process(target=trace)
    tracing.start()
    tracing.join(10)
    tracing.kill()
    assert tracing.exitcode == 0


def test_slot_page_lists_each_concurrent_run(harness: Harness, life: Life, slot: WorkerSlot):
    """The slot page lists each concurrent run, even if a slow run splits the page's free lanes."""
    for number in range(1, 1301):
        harness.add(f"{number}-0")
    absent: list[str] = []
    last = threading.Event()

    def work(message: Message) -> None:
        if message.id == "20-0":
            last.wait(5)
        number = int(message.id[:-2])
        if number > 1100 and b"m:" + message.id_bytes not in {run.place for run in slot.running}:
            absent.append(message.id)
        if number == 1290:
            last.set()

    worker = life.worker("t1", max_messages=1300, prefetch_bytes=1 << 30, **SEVERAL)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert absent == []
    assert is_settled(harness)


def test_overdue_acknowledgments_are_sent_with_a_read(
    harness: Harness, life: Life, monkeypatch: pytest.MonkeyPatch
):
    """Overdue acknowledgments travel with a read, so only the start and the stop call scripts.

    In this test, every finished message counts as overdue.
    """
    monkeypatch.setattr(assembly, "ACK_DELAY_NS", 0)
    for number in range(1, 301):
        harness.add(f"{number}-0")
    harness.do("CONFIG", "RESETSTAT")
    worker = life.worker("t1", max_messages=200, prefetch_bytes=1 << 30, **SEVERAL)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    (called,) = re.findall(rb"cmdstat_evalsha:calls=(\d+)", harness.do("INFO", "commandstats"))
    print("scripts:", called)
    assert int(called) <= 5


def test_held_key_runs_if_reads_send_acknowledgments(
    harness: Harness, life: Life, monkeypatch: pytest.MonkeyPatch
):
    """Held messages that are due get their lanes, because fetched entries take none of them.

    The length of the stream does not matter.
    """
    monkeypatch.setattr(assembly, "ACK_DELAY_NS", 0)
    for number in range(1, 401):
        harness.add(f"{number}-0", "payload", "x", "key", f"k{number}")
    runs: list[tuple[str, int]] = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if runs[-1] == ("1-0", 1):
            raise ValueError

    worker = life.worker(
        "t1",
        concurrency=4,
        order="key",
        on_error="hold-key",
        backoff=Backoff("fixed", 0.001, 0.001, "none"),
        max_messages=401,
        prefetch_max=16,
        prefetch_bytes=1 << 30,
    )
    assert life.run(worker, work) == ExitCode.RECYCLE
    print("again after", runs.index(("1-0", 2)), "runs")
    assert runs.index(("1-0", 2)) < 300
    assert is_settled(harness)


@pytest.mark.parametrize("how", ["inherited", "unread"])
def test_concurrent_worker_skips_expired_messages(
    harness: Harness, life: Life, slot: WorkerSlot, how: str
):
    for number in range(1, 7):
        harness.add(f"{number}-0", "payload", b"x", *(("expiresAt", "1") if number % 2 else ()))
    if how == "inherited":
        harness.fetch(6)
    runs: list[str] = []
    life.run(
        life.worker("t1", max_messages=3, prefetch_bytes=1 << 30, **SEVERAL),
        lambda message: runs.append(message.id),
    )
    assert sorted(runs) == ["2-0", "4-0", "6-0"]
    assert slot.counter("expired") == 3
    assert is_settled(harness)


# --- coroutines -----------------------------------------------------------------------------------

_mine: ContextVar[str] = ContextVar("_mine", default="")
_begun: list[str] = []
_found: list[str] = []


async def set_context(message: Message) -> None:
    """Set a context variable before and after a wait."""
    _found.append(_mine.get())
    _mine.set(message.id)
    if int(message.id[:-2]) % 2:
        await asyncio.sleep(0)
        _found.append("" if _mine.get() == message.id else "another's")


def test_coroutines_do_not_share_context_variables(harness: Harness, life: Life):
    for number in range(1, 21):
        harness.add(f"{number}-0")
    _found.clear()
    worker = life.worker("t1", handler=f"{__name__}:set_context", max_messages=20, **SEVERAL)
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    assert _found == [""] * 30


async def cancel_others(message: Message) -> None:
    """A hostile handler, whose first run cancels all others."""
    _begun.append(message.id)
    if len(_begun) == 1:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    await asyncio.sleep(0)


def test_canceled_run_counts_as_failed(harness: Harness, life: Life, slot: WorkerSlot):
    for number in range(1, 5):
        harness.add(f"{number}-0")
    _begun.clear()
    worker = life.worker(
        "t1", handler=f"{__name__}:cancel_others", max_messages=4, prefetch_bytes=1 << 30, **SEVERAL
    )
    assert life.run(worker, lambda _message: None) == ExitCode.RECYCLE
    print("begun:", _begun)
    assert (slot.counter("acked") + slot.counter("failed"), is_settled(harness)) == (4, True)
    if len(_begun) == 1:  # Python 3.12 starts each task immediately
        assert slot.counter("failed") == 3
