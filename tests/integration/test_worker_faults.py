"""A worker protects itself against faults of handlers, servers and other clients.

The workers here run in the process of the test: see tests/support/life.py.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from streamqd import handlers, logs
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.handlers import Retry, SoftTimeout
from streamqd.message import Message
from streamqd.model import ENTRIES_MAX, LANES_MAX
from streamqd.scoreboard import DONE, WorkerCommand, WorkerSlot, WorkerState
from streamqd.store import messages
from streamqd.worker import ExitCode
from streamqd.worker.runs import RunPace, RunStarts
from streamqd.worker.settler import FailedEntry, Settler
from streamqd.worker.soft_limit import SoftLimit
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.life import Life
from tests.support.proxy import FaultProxy
from tests.support.waiting import wait_until

WIDE = 4500  # fields; with their values, they exceed a script's limit for one command


@pytest.fixture
def logged_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the logged events, in order."""
    names: list[str] = []
    monkeypatch.setattr(logs, "_log", lambda name, *_rest: names.append(name))
    return names


def add_wide(harness: Harness, entry_id: str) -> None:
    fields = [part for n in range(WIDE) for part in (f"f{n}", "v")]
    harness.add(entry_id, *fields, "payload", "wide", "key", "k", "headers", "{}")


def dead_letters_by_message(harness: Harness) -> dict[bytes, dict[str, bytes]]:
    """Return the dead letters by the ID of their message."""
    found = harness.state().get("dlq")
    return {letter["originalId"]: letter for letter in found.entries.values()} if found else {}


def fail(_message: Message) -> None:
    raise ValueError("no")


def fail_bad(message: Message) -> None:
    if message.payload in (b"bad", b"wide"):
        raise ValueError("no")


# --- entries that are too wide --------------------------------------------------------------------


def test_too_wide_entry_is_dead_lettered_in_part(harness: Harness, life: Life):
    add_wide(harness, "1-0")
    harness.add("2-0", "payload", "bad")
    harness.add("3-0")
    life.run(life.worker("t1", max_messages=3, max_attempts=1), fail_bad)

    found = dead_letters_by_message(harness)
    assert set(found) == {b"1-0", b"2-0"}
    wide = found[b"1-0"]
    assert (wide["payload"], wide["key"], wide["headers"]) == (b"wide", b"k", b"{}")
    assert wide["reason"] == b"attempts"
    assert harness.state()["stream"].groups == {"hits": ("3-0", {})}


@pytest.mark.parametrize("body", ["hash", "none"])
def test_wide_entry_without_a_body_becomes_a_dead_letter(harness: Harness, life: Life, body: str):
    """The fields that replace a body fit into one call, no matter how many fields the entry has."""
    add_wide(harness, "1-0")
    harness.add("2-0")
    life.run(life.worker("t1", max_messages=2, max_attempts=1, dlq_body=body), fail_bad)

    wide = dead_letters_by_message(harness)[b"1-0"]
    assert (wide["payload"], wide["payloadBytes"], wide["key"]) == (b"", b"4", b"k")
    assert harness.state()["stream"].groups == {"hits": ("2-0", {})}


def test_too_wide_entry_is_retried_without_blocking_others(harness: Harness, life: Life):
    add_wide(harness, "1-0")
    harness.add("2-0", "payload", "bad")

    def again(_message: Message) -> None:
        raise Retry(after=0)

    life.run(life.worker("t1", max_messages=2), again)
    harness.expect(
        "message_promote", "OK", messages.promote_retries(harness.keys, harness.assignment, 10)
    )
    entries = harness.state()["retry"].entries.values()
    assert sorted((e["payload"], e["originalId"], e["retryCount"]) for e in entries) == [
        (b"bad", b"2-0", b"1"),
        (b"wide", b"1-0", b"1"),
    ]
    assert harness.state()["stream"].groups == {"hits": ("2-0", {})}


def test_entry_within_the_script_limit_keeps_all_fields(harness: Harness, life: Life):
    fields = [part for n in range(3000) for part in (f"f{n}", "v")]
    harness.add("1-0", *fields, "payload", "bad")
    life.run(life.worker("t1", max_messages=1, max_attempts=1), fail_bad)
    assert dead_letters_by_message(harness)[b"1-0"].keys() >= {"payload", "f0", "f2999"}


# --- exceptions that cannot be described ----------------------------------------------------------


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Quits(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit(3)


class Hurried(Retry):
    def __init__(self) -> None:
        """Leave out the attributes that `Retry` needs."""


class Vague(Retry):
    def __init__(self) -> None:
        super().__init__()
        self.after = "soon"  # type: ignore[assignment]


class Hidden(Retry):
    def __init__(self) -> None:
        """Define an attribute that cannot be read."""

    @property
    def after(self) -> float:  # type: ignore[override]
        raise OSError


class Unwritable(Exception):  # noqa: N818
    pass


Unwritable.__qualname__ = "Caf\udce9"


@pytest.mark.parametrize("kind", [Unspeakable, Quits, Hurried, Vague, Hidden, Unwritable])
@pytest.mark.parametrize("attempts", [1, 2])
def test_undescribable_exception_counts_as_a_failure(
    harness: Harness, life: Life, slot: WorkerSlot, kind: type[Exception], attempts: int
):
    harness.add("1-0")
    harness.add("2-0")
    harness.add("3-0")

    def work(message: Message) -> None:
        if message.id == "1-0":
            raise kind

    code = life.run(life.worker("t1", max_messages=3, max_attempts=attempts), work)
    assert code == ExitCode.RECYCLE
    assert slot.counter("recycled") == 1
    assert slot.counter("failed") == 1
    state = harness.state()
    assert state["stream"].groups == {"hits": ("3-0", {})}
    if attempts == 1:
        (letter,) = dead_letters_by_message(harness).values()
        assert letter["errorClass"]
        assert len(letter["fingerprint"]) == 12
    else:
        assert list(state["items"]) == ["m:1-0"]


def test_undescribable_exception_keeps_class_and_traceback():
    outcome = handlers.describe_failure(Unspeakable(), "traceback")
    assert outcome.error_class.endswith("Unspeakable")
    assert "RuntimeError" in outcome.message
    assert "Unspeakable" in outcome.traceback


@pytest.mark.parametrize("context", [b"\xff", b"{", b"[1]", b"7"])
def test_message_with_an_invalid_crash_record_is_dead_lettered(
    harness: Harness, life: Life, context: bytes
):
    harness.add("1-0")
    harness.add("2-0")
    harness.fetch()
    harness.do("HSET", harness.attempts, "m:1-0:c", "3", "m:1-0:last", context)
    assert life.run(life.worker("t1", max_messages=1), lambda _message: None) == ExitCode.RECYCLE
    assert dead_letters_by_message(harness)[b"1-0"]["reason"] == b"crashes"


# --- refusals of the server -----------------------------------------------------------------------


@pytest.mark.fault("F21")
def test_refused_dead_letters_do_not_block_others(
    harness: Harness, life: Life, slot: WorkerSlot, logged_events: list[str]
):
    harness.do("SET", harness.dlq, "not a stream")
    harness.add("1-0", "payload", "bad")
    for number in range(2, 5):
        harness.add(f"{number}-0")
    worker = life.worker("t1", max_messages=4, max_attempts=1)
    assert life.run(worker, fail_bad) == ExitCode.RECYCLE
    assert harness.state()["stream"].groups == {"hits": ("4-0", {"1-0": "w"})}
    assert slot.counter("deferred") == 1
    assert logged_events.count("message.deferred") == 1
    assert "worker.stalled" not in logged_events


def test_refused_item_does_not_block_its_batch(harness: Harness, slot: WorkerSlot):
    harness.add("1-0")
    harness.add("2-0")
    harness.fetch()
    settler = Settler(harness.link, harness.keys, harness.leased("t1"), slot)
    slot.post_batch([b"m:1-0", b"m:2-0", b"x:3-0"])
    for at, place in enumerate((b"m:1-0", b"x:3-0", b"m:2-0")):
        settler.fail(FailedEntry(place, at, 3600.0, {b"retryCount": b"1"}, [], 0), 1)
    settler.flush()
    assert settler.deferred_places == [b"x:3-0"]
    assert sorted(harness.state()["delayed"]) == ["m:1-0", "m:2-0"]


def test_delays_are_judged_after_a_slow_settlement(
    harness: Harness, life: Life, monkeypatch: pytest.MonkeyPatch
):
    """Delays are judged after the settlement.

    Otherwise, a slow reply of Redis before a start would not count as a delay.
    """
    settled, judged = [], []
    settle_first, choose_note = RunPace.settle_first, RunStarts.choose_note

    def settle(pace: RunPace, now: int, ran_ns: int) -> int:
        settled.append(settle_first(pace, now, ran_ns))
        return settled[-1]

    def judge(starts: RunStarts, now: int) -> Callable[[int], None]:
        judged.append(now)
        return choose_note(starts, now)

    def work(_message: Message) -> None:
        until = time.monotonic() + 0.005
        while time.monotonic() < until:
            pass  # a slow run's acknowledgment does not wait for the next one

    monkeypatch.setattr(RunPace, "settle_first", settle)
    monkeypatch.setattr(RunStarts, "choose_note", judge)
    for number in range(1, 5):
        harness.add(f"{number}-0")
    assert life.run(life.worker("t1", max_messages=4), work) == ExitCode.RECYCLE
    assert len(settled) == 3
    assert judged == settled


@pytest.mark.parametrize(("listed", "reads"), [(False, 1), (True, 2)])
def test_failed_entries_of_two_reads_are_read_together(
    harness: Harness, slot: WorkerSlot, listed: bool, reads: int
):
    """Failed entries are read together. Each is found, even if other entries lie between them."""
    places = harness.pending("1-0", "2-0")
    settler = Settler(harness.link, harness.keys, harness.leased("t1"), slot)
    for place in places:
        settler.begin_batch([place], read=not listed)
        item = FailedEntry(place, 0, 3600.0, {b"retryCount": b"1"}, [], 0, settler.number(0))
        settler.fail(item, 1)
    harness.do("CONFIG", "RESETSTAT")
    settler.flush()
    (calls,) = re.findall(rb"cmdstat_xrange:calls=(\d+)", harness.do("INFO", "commandstats"))
    assert int(calls) == reads
    assert sorted(harness.state()["delayed"]) == ["m:1-0", "m:2-0"]


@pytest.mark.parametrize("count", [600, ENTRIES_MAX])
def test_settler_acknowledges_counted_entries_in_parts(
    harness: Harness, slot: WorkerSlot, count: int
):
    """Acknowledgments that clear counters are split into calls of a bounded length."""
    slot.open_table(LANES_MAX)
    ids = [f"{number}-0" for number in range(1, count + 1)]
    places = harness.pending(*ids)
    settler = Settler(harness.link, harness.keys, harness.leased("t1"), slot)
    slot.put(0, *places)
    for at, entry in enumerate(ids):
        harness.do("HSET", harness.attempts, f"m:{entry}:c", "1")
        slot.states[at] = DONE
        settler.ack(entry.encode(), at, 1, retried=False, has_counters=True)
    settler.flush()
    assert settler.unsettled_count == 0
    assert slot.counter("acked") == count
    assert slot.unsettled_places() == []
    assert harness.do("XPENDING", harness.stream, harness.assignment.group)[0] == 0
    assert harness.do("EXISTS", harness.attempts) == 0


def test_refused_reads_are_logged_once_and_backed_off(
    harness: Harness, life: Life, slot: WorkerSlot, logged_events: list[str]
):
    worker = life.worker("t1")
    waits: list[float] = []

    def refuse(*_given: Any) -> Any:
        raise RedisResponseError("NOPERM", "this user has no permissions")

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 6:
            del worker._step  # type: ignore[attr-defined]  # the worker can read again
            harness.add("1-0")

    worker._step = refuse  # type: ignore[assignment, method-assign]
    worker.channel.sleep = sleep  # type: ignore[method-assign]
    life.run(worker, lambda _message: life.stop())

    assert waits[0] == 0
    assert all(later >= 0.05 * 2**n for n, later in enumerate(waits[1:]))
    assert waits[5] > 0.5
    assert slot.counter("redis_errors") == 5
    assert logged_events.count("worker.stalled") == 1
    assert logged_events.count("worker.resumed") == 1
    assert worker.reconnect_wait == 0


# --- a pause without Redis ------------------------------------------------------------------------


def test_pause_during_an_outage_takes_effect(
    harness: Harness, new_life: Callable[[str], Life], slot: WorkerSlot, proxy: FaultProxy
):
    harness.add("1-0")
    harness.add("2-0")
    life = new_life(proxy.url)

    def come_back() -> None:
        wait_until(lambda: slot.state == WorkerState.PAUSED, what="it pauses")
        proxy.refusing = False
        life.send_command(WorkerCommand.NONE)

    helper = threading.Thread(target=come_back)

    def work(message: Message) -> None:
        if message.id == "1-0":
            proxy.refusing = True
            proxy.cut()
            life.send_command(WorkerCommand.PAUSE)
            helper.start()

    code = life.run(life.worker("t1", max_messages=2), work)
    helper.join()
    assert code == ExitCode.RECYCLE
    assert harness.state()["stream"].groups == {"hits": ("2-0", {})}


# --- limits of held messages ----------------------------------------------------------------------


def test_reclaimed_entries_respect_the_held_limit(harness: Harness, life: Life, slot: WorkerSlot):
    harness.link.pipeline([("XADD", harness.stream, "*", "payload", "x")] * 1500)
    assert len(harness.fetch(1500, consumer="legacy")) == 1500
    slot.reclaim_requested = 1
    worker = life.worker("t1", reclaim_idle=0.0)
    most = 0

    def sleep(seconds: float) -> None:
        if seconds:  # the worker is waiting for room
            life.stop()
            worker.channel.check()

    def work(message: Message) -> None:
        nonlocal most
        most = max(most, slot.in_flight)
        fail(message)

    worker.channel.sleep = sleep  # type: ignore[method-assign]
    with harness.full_memory():
        assert life.run(worker, work) == ExitCode.STOPPED
    assert most <= 512
    assert 256 <= slot.counter("reclaimed") <= 512
    assert slot.counter("deferred") == slot.counter("reclaimed")


def test_parked_inherited_entries_are_bounded(harness: Harness, life: Life, slot: WorkerSlot):
    for number in range(1, 9):
        harness.add(f"{number}-0", "payload", "bad")
    harness.fetch()
    worker = life.worker("t1", prefetch_max=2)
    runs: list[str] = []

    def work(message: Message) -> None:
        runs.append(message.id)
        fail(message)

    def sleep(seconds: float) -> None:
        if seconds:
            life.stop()
            worker.channel.check()

    worker.channel.sleep = sleep  # type: ignore[method-assign]
    with harness.full_memory():
        assert life.run(worker, work) == ExitCode.STOPPED
    assert runs == ["1-0", "2-0"]


@pytest.mark.fault("F21")
def test_acknowledgments_are_sent_with_full_memory(harness: Harness, life: Life):
    """Acknowledgments are sent even with full memory, because only they can free memory."""
    harness.add("1-0", "payload", "bad", stream=harness.retry)
    harness.add("1-0")
    worker = life.worker("t1", prefetch_max=1)
    pending: list[int] = []

    def work(message: Message) -> None:
        harness.do("CONFIG", "SET", "maxmemory", "1")
        fail_bad(message)

    def sleep(seconds: float) -> None:
        if seconds:
            pending.append(harness.do("XPENDING", harness.stream, ASSIGNMENT.group)[0])
            life.stop()
            worker.channel.check()

    worker.channel.sleep = sleep  # type: ignore[method-assign]
    with harness.full_memory():
        harness.do("CONFIG", "SET", "maxmemory", "0")
        assert life.run(worker, work) == ExitCode.STOPPED
    assert pending == [0]


def test_oversized_message_with_full_memory_is_not_handled(harness: Harness, life: Life):
    harness.add("1-0", "payload", "x" * (life.settings.daemon.max_message_bytes + 1))
    harness.add("2-0")
    runs: list[str] = []

    def work(message: Message) -> None:
        runs.append(message.id)
        harness.do("CONFIG", "SET", "maxmemory", "0")
        life.stop()

    with harness.full_memory():
        assert life.run(life.worker("t1"), work) == ExitCode.STOPPED
    assert runs == ["2-0"]
    [letter] = harness.state()["dlq"].entries.values()
    assert (letter["originalId"], letter["reason"]) == (b"1-0", b"too-large")


# --- sessions, clocks, missing entries ------------------------------------------------------


def test_outdated_session_reconnects_and_keeps_the_assignment(
    harness: Harness, life: Life, slot: WorkerSlot
):
    for number in range(1, 4):
        harness.add(f"{number}-0")
    harness.fetch()
    harness.do("HSET", harness.fence, "quarantine", "1")
    runs: list[str] = []

    def work(message: Message) -> None:
        runs.append(message.id)
        if message.id == "1-0":
            # A copy of an earlier `recover` call arrives late.
            harness.do("HSET", harness.fence, "session", "late")

    assert life.run(life.worker("t1", max_messages=3), work) == ExitCode.RECYCLE
    assert runs == ["1-0", "2-0", "3-0"]
    assert slot.counter("fenced") == 0
    assert harness.state()["stream"].groups == {"hits": ("3-0", {})}


def test_message_age_uses_the_server_clock(
    harness: Harness, life: Life, monkeypatch: pytest.MonkeyPatch
):
    harness.add("1-0")
    harness.do("XADD", harness.stream, "*", "payload", "young")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    life.run(life.worker("t1", max_messages=2, retry_max_age=3600.0), fail)
    found = dead_letters_by_message(harness)
    assert {uid: letter["reason"] for uid, letter in found.items()} == {b"1-0": b"too-old"}
    assert len(harness.state()["items"]) == 1


def test_server_clock_is_reread_after_its_interval(harness: Harness, life: Life):
    worker = life.worker("t1", retry_max_age=60.0)
    clock = worker.context.clock
    assert not clock.is_old(1 << 60)
    clock.read(harness.link)
    read = clock._read_ns
    assert not clock.is_old(read + 59_000_000_000)
    assert clock.is_old(read + 61_000_000_000)


@pytest.mark.fault("F25")
@pytest.mark.parametrize("attempts", [1, 2])
def test_message_trimmed_during_its_run_is_settled(harness: Harness, life: Life, attempts: int):
    """If a message is trimmed during its run, it is still settled.

    Only this process has the body, and a successor would find a missing entry.
    """
    harness.add("1-0", "payload", "precious")

    def work(message: Message) -> None:
        harness.do("XTRIM", harness.stream, "MAXLEN", 0)
        fail(message)

    life.run(life.worker("t1", max_messages=1, max_attempts=attempts), work)
    state = harness.state()
    assert state["stream"].groups == {"hits": ("1-0", {})}
    kept = state["items"]["m:1-0"] if attempts == 2 else dead_letters_by_message(harness)[b"1-0"]
    assert kept["payload"] == b"precious"


def test_parked_items_are_retried_at_exit(harness: Harness, slot: WorkerSlot):
    harness.add("1-0")
    harness.fetch()
    settler = Settler(harness.link, harness.keys, harness.leased("t1"), slot)
    slot.post_batch([b"m:1-0"])
    settler.fail(FailedEntry(b"m:1-0", 0, 3600.0, {b"retryCount": b"1"}, [], 0), 1)
    with harness.full_memory():
        settler.flush()
    settler.flush()
    assert settler.unsettled_count == 1
    settler.flush_last()
    assert settler.unsettled_count == 0
    assert list(harness.state()["items"]) == ["m:1-0"]


# --- exit without a connection --------------------------------------------------------------------


@pytest.mark.parametrize("end", [None, ValueError("no")], ids=["done", "failed"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_run_settles_on_a_new_connection_if_the_old_hangs(
    harness: Harness,
    new_life: Callable[[str], Life],
    proxy: FaultProxy,
    concurrency: int,
    end: Exception | None,
):
    """The run settles on a new connection.

    Otherwise, its failure would be lost, and the next owner would not count it.
    """
    harness.add("1-0")
    life = new_life(proxy.url)
    worker = life.worker("t1", max_messages=1, concurrency=concurrency)
    if worker.settler.link is not worker.link:
        worker.settler.link.open()
        proxy.deafen()  # this is not yet the connection that the worker reads from

    def work(_message: Message) -> object:
        if worker.settler.link is worker.link:
            proxy.deafen()
        return end

    assert life.run(worker, work) == ExitCode.RECYCLE
    state = harness.state()
    assert state["stream"].groups == {"hits": ("1-0", {})}
    assert list(state.get("items", {})) == (["m:1-0"] if end else [])


def test_exiting_worker_tries_an_unreachable_server_only_once(
    new_life: Callable[[str], Life], proxy: FaultProxy
):
    """A worker that exits tries only once.

    Otherwise, its exit would take twice the timeout of a connection.
    """
    settler = new_life(proxy.url).worker("t1").settler
    settler.ack(b"1-0", 0, 1, retried=False, has_counters=False)
    proxy.refusing = True
    with pytest.raises(RedisUnavailableError):
        settler.flush_last()
    assert proxy.refused == 1
    assert settler.unsettled_count == 1


# --- order and size of reads ----------------------------------------------------------------------


def test_inherited_entries_run_in_order_over_all_pages(harness: Harness, life: Life):
    """Inherited entries of both streams are merged by ID, no matter how many pages they fill."""
    main = [f"{2 * number}-0" for number in range(1, 201)]
    retried = [f"{number}-0" for number in (3, 5, 301, 303, 399, 900)]
    for entry_id in main:
        harness.add(entry_id)
    for entry_id in retried:
        harness.add(entry_id, stream=harness.retry)
    harness.fetch(500)
    harness.fetch(500, stream=harness.retry)
    runs: list[str] = []
    life.run(life.worker("t1", max_messages=206), lambda message: runs.append(message.id))
    assert runs == sorted(main + retried, key=lambda entry_id: int(entry_id[:-2]))


@pytest.mark.fault("F30")
@pytest.mark.parametrize("how", ["inherited", "reclaimed", "unread"])
def test_bytes_of_held_messages_are_bounded(
    harness: Harness, life: Life, slot: WorkerSlot, how: str
):
    for number in range(1, 41):
        harness.add(f"{number}-0", "payload", b"x" * 10_000)
    if how != "unread":
        harness.fetch(100, consumer="w" if how == "inherited" else "legacy")
    slot.reclaim_requested = 1
    most = 0

    def work(_message: Message) -> None:
        nonlocal most
        most = max(most, slot.in_flight)

    worker = life.worker("t1", max_messages=40, prefetch_bytes=64_000, reclaim_idle=0.0)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert 2 <= most <= 6


# --- limits ---------------------------------------------------------------------------------------


def test_soft_limit_is_raised_once_per_run(harness: Harness, life: Life, slot: WorkerSlot):
    harness.add("1-0")

    def work(_message: Message) -> None:
        slot.soft_kill_seq = slot.run_seq
        with pytest.raises(SoftTimeout):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)

    life.run(life.worker("t1", max_messages=1, timeout=1.0), work)
    assert slot.counter("failed") == 0


def test_late_soft_limit_stays_within_its_run(harness: Harness, life: Life, slot: WorkerSlot):
    """The limit stays in its run, even if it is raised at the first instruction of `finally`."""
    harness.add("1-0", "payload", "bad")
    worker = life.worker("t1", max_messages=1, timeout=1.0)
    flags = [True]

    class Late(SoftLimit):
        @property
        def in_handler(self) -> bool:
            return flags[-1]

        @in_handler.setter
        def in_handler(self, value: bool) -> None:
            if not value and len(flags) == 2:
                flags.append(True)
                os.kill(os.getpid(), signal.SIGUSR1)
            flags.append(value)

    flags.clear()
    flags.append(False)
    worker.context.limit.__class__ = Late

    def work(_message: Message) -> None:
        slot.soft_kill_seq = slot.run_seq

    flush = worker.settler.flush

    def interrupted_flush(**named: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        flush(**named)

    worker.settler.flush = interrupted_flush  # type: ignore[method-assign]
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert slot.counter("timeouts") == 1
    assert flags[-1] is False


# --- log records of a handler ---------------------------------------------------------------------


def test_handler_log_lines_name_their_message(
    harness: Harness, life: Life, caplog: pytest.LogCaptureFixture
):
    harness.add("1-0")
    harness.add("2-0")

    def work(message: Message) -> None:
        logging.getLogger("app").warning("handling %s", message.id)

    assert life.run(life.worker("t1", max_messages=2), work) == ExitCode.RECYCLE
    logging.getLogger("app").warning("between messages")
    marks = [(each.uid, each.attempt) for each in caplog.records if each.name == "app"]  # type: ignore[attr-defined]
    assert marks == [("access/0/1-0", 1), ("access/0/2-0", 1), (None, None)]
