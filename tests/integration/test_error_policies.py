"""Workers keep the order of failed messages with the policies `block` and `hold-key`."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from streamqd.handlers import Dead, Release, Retry
from streamqd.idle_reason import Wait
from streamqd.message import Message
from streamqd.model import Backoff
from streamqd.scoreboard import WorkerSlot, now_ns
from streamqd.store import scripts
from streamqd.store.client import connect
from streamqd.worker import ExitCode
from streamqd.worker.runs import ACK_DELAY_NS
from tests.contract.harness import Harness
from tests.support.life import Life
from tests.support.proxy import Fault, FaultProxy
from tests.support.waiting import wait_until

AT_ONCE = Backoff("fixed", 0.0, 0.0, "none")
NEVER = Backoff("fixed", 3600.0, 3600.0, "none")
BLOCK: dict[str, Any] = {"on_error": "block", "backoff": AT_ONCE}
HOLD: dict[str, Any] = {"on_error": "hold-key", "backoff": AT_ONCE}
SEVERAL: dict[str, Any] = {**HOLD, "concurrency": 4, "order": "key"}
WAIT = 0.15
WAITING = Backoff("fixed", WAIT, WAIT, "none")

Runs = list[tuple[str, int]]


def add_entries(harness: Harness, keys: str) -> None:
    """Add one entry per letter, with the letter as its key. A dot adds an entry without a key."""
    for number, key in enumerate(keys, 1):
        harness.add(f"{number}-0", "payload", "x", *(() if key == "." else ("key", key)))


def pending_ids(harness: Harness) -> set[str]:
    return set(harness.state()["stream"].groups["hits"][1])


def count_failures(harness: Harness) -> dict[str, bytes]:
    """Return how often each entry has failed in place."""
    found = harness.state().get("attempts", {})
    return {name: value for name, value in found.items() if not name.endswith(":due")}


def fail_times(runs: Runs, times: dict[str, int]) -> Callable[[Message], None]:
    """Return a handler that fails each message the given number of times."""

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if message.attempt <= times.get(message.id, 0):
            raise ValueError(message.id)

    return work


# --- block ----------------------------------------------------------------------------------------


def test_blocked_message_is_retried_in_place(harness: Harness, life: Life, slot: WorkerSlot):
    add_entries(harness, "abc")
    runs: Runs = []
    worker = life.worker("t1", max_messages=6, max_attempts=0, **BLOCK)
    assert life.run(worker, fail_times(runs, {"2-0": 3})) == ExitCode.RECYCLE
    assert runs == [("1-0", 1), *(("2-0", attempt) for attempt in (1, 2, 3, 4)), ("3-0", 1)]
    assert pending_ids(harness) == set()
    assert "attempts" not in harness.state()
    assert (slot.counter("failed"), slot.counter("retried")) == (3, 0)


def test_blocked_message_is_dead_lettered_after_its_attempts(harness: Harness, life: Life):
    add_entries(harness, "abc")
    runs: Runs = []
    worker = life.worker("t1", max_messages=4, max_attempts=2, **BLOCK)
    assert life.run(worker, fail_times(runs, {"2-0": 9})) == ExitCode.RECYCLE
    assert runs == [("1-0", 1), ("2-0", 1), ("2-0", 2), ("3-0", 1)]
    (letter,) = harness.state()["dlq"].entries.values()
    assert (letter["originalId"], letter["attempts"]) == (b"2-0", b"2")
    assert (letter["reason"], letter["retryCount"]) == (b"attempts", b"2")
    assert "attempts" not in harness.state()


def test_block_policy_respects_dead_and_retry(harness: Harness, life: Life):
    add_entries(harness, "abc")
    runs = []

    def work(message: Message) -> None:
        runs.append(message.id)
        if message.id == "1-0":
            raise Retry(after=0.0) if message.attempt < 3 else Dead
        if message.id == "2-0" and runs.count("2-0") < 2:
            raise Release

    worker = life.worker("t1", max_messages=6, **BLOCK)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert runs == ["1-0", "1-0", "1-0", "2-0", "2-0", "3-0"]
    (letter,) = harness.state()["dlq"].entries.values()
    assert (letter["originalId"], letter["reason"]) == (b"1-0", b"dead")


def test_stop_during_a_block_leaves_messages_to_the_successor(
    harness: Harness, life: Life, slot: WorkerSlot
):
    add_entries(harness, "abcd")
    runs: Runs = []
    worker = life.worker("t1", **BLOCK | {"backoff": NEVER, "max_attempts": 0})
    seen = []

    def stop() -> None:
        waits = slot.waits
        wait_until(lambda: waits.read().kind is Wait.BLOCKED, what="the message is waited for")
        told = waits.read()
        seen.append((told.until_ns > now_ns(), slot.batch().running, slot.unfinished))
        life.stop()

    watcher = threading.Thread(target=stop)
    watcher.start()
    assert life.run(worker, fail_times(runs, {"2-0": 2})) == ExitCode.STOPPED
    watcher.join()
    assert seen == [(True, [], 3)]
    assert slot.counter("released") == 3
    assert pending_ids(harness) == {"2-0", "3-0", "4-0"}
    assert count_failures(harness) == {"m:2-0:f": b"1"}
    # The next worker continues this wait.
    slot.waits.reset()
    watcher = threading.Thread(target=stop)
    watcher.start()
    worker = life.worker("t1", **BLOCK)
    assert life.run(worker, fail_times(runs, {})) == ExitCode.STOPPED
    watcher.join()
    assert len(runs) == 2
    harness.do("HSET", harness.attempts, "m:2-0:due", 0)
    worker = life.worker("t1", max_messages=4, max_attempts=0, **BLOCK)
    assert life.run(worker, fail_times(runs, {"2-0": 2})) == ExitCode.RECYCLE
    assert runs == [
        *(("1-0", 1), ("2-0", 1), ("2-0", 2), ("2-0", 3)),
        *(("3-0", 1), ("4-0", 1)),
    ]
    assert slot.waits.read().kind is Wait.NOTHING
    assert "attempts" not in harness.state()


def test_stop_interrupts_retries_without_backoff(harness: Harness, life: Life):
    add_entries(harness, "ab")
    runs: Runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if len(runs) == 3:
            life.stop()
        if len(runs) < 20:
            raise Retry(after=0.0)

    worker = life.worker("t1", max_attempts=0, **BLOCK)
    assert life.run(worker, work) == ExitCode.STOPPED
    assert runs == [("1-0", 1), ("1-0", 2), ("1-0", 3)]
    assert pending_ids(harness) == {"1-0", "2-0"}


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.DROP_REPLY])
def test_blocked_message_survives_a_lost_connection(
    harness: Harness, new_life: Callable[[str], Life], proxy: FaultProxy, fault: Fault
):
    sha = scripts.get("settle_note").sha.encode()
    add_entries(harness, "abcd")
    runs: Runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if message.id == "2-0" and message.attempt < 4:
            # Recording the failure is refused, or the answer is lost.
            proxy.arm(fault, wanted=lambda arguments: sha in arguments)
            raise ValueError

    life = new_life(proxy.url)
    worker = life.worker("t1", max_messages=7, max_attempts=0, **BLOCK)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert runs == [
        *(("1-0", 1), ("2-0", 1), ("2-0", 2), ("2-0", 3), ("2-0", 4)),
        *(("3-0", 1), ("4-0", 1)),
    ]
    assert pending_ids(harness) == set()


def test_blocked_message_is_retried_with_full_memory(harness: Harness, life: Life):
    add_entries(harness, "abc")
    runs: Runs = []
    with harness.full_memory():
        worker = life.worker("t1", max_messages=5, max_attempts=0, **BLOCK)
        assert life.run(worker, fail_times(runs, {"2-0": 2})) == ExitCode.RECYCLE
    assert runs == [("1-0", 1), ("2-0", 1), ("2-0", 2), ("2-0", 3), ("3-0", 1)]
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [BLOCK, HOLD], ids=["block", "hold-key"])
def test_quarantine_has_no_suspect_during_a_wait(
    harness: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any]
):
    """No message is a suspect while it waits.

    If the host is lost then, the loss must not be charged to the message.
    """
    add_entries(harness, "aabb")
    harness.fetch(4)
    harness.do("HSET", harness.fence, "quarantine", "1")
    marks: list[tuple[str, bytes]] = []
    while_waiting = []

    def look() -> bytes:
        return bytes(other.execute("HGET", harness.fence, "mark") or b"")

    other = connect(life.settings.redis, timeout=5.0, name="test:other")

    def work(message: Message) -> None:
        marks.append((message.id, look()))
        if message.id == "1-0" and message.attempt == 1:
            raise ValueError

    worker = life.worker("t1", max_messages=5, **policy)
    true_sleep = worker.channel.sleep

    def sleep(seconds: float, unstarted: int = 0) -> None:
        while_waiting.append(look())
        true_sleep(seconds, unstarted)

    worker.channel.sleep = sleep  # type: ignore[method-assign]
    assert life.run(worker, work) == ExitCode.RECYCLE
    other.close()
    assert all(mark == f"m:{name}".encode() for name, mark in marks[:1])
    assert [name for name, _ in marks].count("1-0") == 2
    assert {mark for name, mark in marks if name == "2-0"} <= {b"m:2-0", b""}
    if policy is BLOCK:
        assert b"m:0-0" in while_waiting
        assert all(mark == f"m:{name}".encode() for name, mark in marks)
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_quarantine_marks_nothing_during_a_held_key(
    harness: Harness, life: Life, policy: dict[str, Any]
):
    """The quarantine marks nothing while a key is held.

    The worker is full while it lists pending entries, so it waits and then runs in quarantine.
    """
    add_entries(harness, "ab")
    harness.fetch(2)
    harness.do("HSET", harness.fence, "quarantine", "1")
    while_waiting: set[bytes] = set()
    runs: list[tuple[str, int, bytes]] = []
    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    lock = threading.Lock()

    def look() -> bytes:
        with lock:
            return bytes(other.execute("HGET", harness.fence, "mark") or b"")

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt, look()))
        if message.attempt == 1:
            raise ValueError

    waiting = policy | {"backoff": Backoff("fixed", 0.5, 0.5, "none"), "held_max": 2}
    worker = life.worker("t1", max_messages=4, **waiting)
    await_any = worker.channel.await_any

    def watched(descriptors: list[int], seconds: float) -> set[int]:
        if len(runs) == 2 and not worker.executor.in_flight.running:
            while_waiting.add(look())
        return await_any(descriptors, seconds)

    worker.channel.await_any = watched  # type: ignore[method-assign]
    assert life.run(worker, work) == ExitCode.RECYCLE
    other.close()
    assert while_waiting == {b"m:0-0"}
    assert sorted(run[:2] for run in runs) == [("1-0", 1), ("1-0", 2), ("2-0", 1), ("2-0", 2)]
    # The worker has room again after that, and the end of the list ends the quarantine.
    assert all(f"m:{name}".encode() in mark.split() for name, _, mark in runs[:3])
    assert runs[2][2] == f"m:{runs[2][0]}".encode(), "a held message runs alone"
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_quarantine_runs_due_keys_one_by_one(harness: Harness, life: Life, policy: dict[str, Any]):
    """The quarantine runs due keys one by one.

    Each held message has its own mark, so the number of free lanes does not matter.
    """
    add_entries(harness, "ab")
    harness.fetch(2)
    harness.do("HSET", harness.fence, "quarantine", "1")
    runs: list[tuple[str, int, bytes]] = []
    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    lock = threading.Lock()

    def work(message: Message) -> None:
        with lock:
            mark = bytes(other.execute("HGET", harness.fence, "mark") or b"")
        runs.append((message.id, message.attempt, mark))
        if message.attempt <= 2:
            raise ValueError

    worker = life.worker("t1", max_messages=6, held_max=2, **policy)
    assert life.run(worker, work) == ExitCode.RECYCLE
    other.close()
    first, again = sorted(runs[:2]), sorted(runs[2:4])
    assert [run[:2] for run in first] == [("1-0", 1), ("2-0", 1)]
    assert all(f"m:{name}".encode() in mark.split() for name, _, mark in first)
    assert again == [(name, 2, f"m:{name}".encode()) for name in ("1-0", "2-0")]
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_quarantine_resumes_a_held_key_after_a_lost_mark(
    harness: Harness, new_life: Callable[[str], Life], proxy: FaultProxy, policy: dict[str, Any]
):
    add_entries(harness, "aa")
    harness.fetch(2)
    harness.do("HSET", harness.fence, "quarantine", "1")
    runs: Runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if len(runs) == 1:
            proxy.arm(
                Fault.CUT_BEFORE, command="EVALSHA"
            )  # loses the mark that would clear all suspects
            raise ValueError

    worker = new_life(proxy.url).worker("t1", max_messages=3, **policy)
    assert new_life(proxy.url).run(worker, work) == ExitCode.RECYCLE
    assert runs == [("1-0", 1), ("1-0", 2), ("2-0", 1)]
    assert pending_ids(harness) == set()


# --- hold-key -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_held_key_keeps_its_order_while_other_keys_pass(
    harness: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any]
):
    add_entries(harness, "abacab")
    runs: Runs = []
    waits = slot.waits

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if message.id == "1-0" and message.attempt < 3:
            raise Retry(after=0.05)

    def stop() -> None:
        wait_until(lambda: waits.read().held == 3, what="its key is held")
        wait_until(lambda: slot.counter("acked") == 6, what="all are acknowledged")
        wait_until(lambda: waits.read()[2:4] == (0, 0), what="nothing is held any more")
        life.stop()

    watcher = threading.Thread(target=stop)
    watcher.start()
    assert life.run(life.worker("t1", **policy), work) == ExitCode.STOPPED
    watcher.join()
    assert [name for name, _ in runs if name in ("1-0", "3-0", "5-0")] == [
        *("1-0", "1-0", "1-0", "3-0", "5-0")
    ]
    assert [name for name, _ in runs if name in ("2-0", "6-0")] == ["2-0", "6-0"]
    assert runs.index(("6-0", 1)) < runs.index(("1-0", 2)), "the other keys did not wait"
    assert pending_ids(harness) == set()
    assert "attempts" not in harness.state()
    assert slot.counter("retried") == 0


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_held_messages_stay_pending_and_are_counted(
    harness: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any]
):
    add_entries(harness, "abacab")
    runs: Runs = []
    worker = life.worker("t1", **policy | {"backoff": NEVER})
    waits = slot.waits

    def stop() -> None:
        wait_until(lambda: len(runs) == 4, what="all others have run")
        wait_until(lambda: waits.read().held == 3, what="three are held")
        wait_until(lambda: slot.counter("acked") == 3, what="the others are acknowledged")
        life.stop()

    watcher = threading.Thread(target=stop)
    watcher.start()
    assert life.run(worker, fail_times(runs, {"1-0": 1})) == ExitCode.STOPPED
    watcher.join()
    assert pending_ids(harness) == {"1-0", "3-0", "5-0"}
    assert waits.read().held_keys == 1
    assert count_failures(harness) == {"m:1-0:f": b"1"}
    # A new owner also holds the messages until they are due.
    runs.clear()
    waits.reset()

    def stop_again() -> None:
        wait_until(lambda: waits.read()[2:4] == (3, 1), what="three are held again")
        life.stop()

    watcher = threading.Thread(target=stop_again)
    watcher.start()
    worker = life.worker("t1", **policy)
    assert life.run(worker, fail_times(runs, {})) == ExitCode.STOPPED
    watcher.join()
    assert runs == []
    harness.do("HSET", harness.attempts, "m:1-0:due", 0)
    worker = life.worker("t1", max_messages=3, **policy | {"backoff": NEVER})
    assert life.run(worker, fail_times(runs, {"1-0": 1})) == ExitCode.RECYCLE
    assert runs == [("1-0", 2), ("3-0", 1), ("5-0", 1)]
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_retried_message_queues_after_its_held_key(
    harness: Harness, life: Life, policy: dict[str, Any]
):
    """A retried message queues after its held key, as does a dead letter that is replayed."""
    add_entries(harness, "ab")
    harness.add("1-0", "payload", "x", "key", "a", "originalId", "0-7", stream=harness.retry)
    runs = []

    def work(message: Message) -> None:
        runs.append((message.original_id, message.attempt))
        if message.original_id == "0-7" and message.attempt < 3:
            raise Retry(after=0.05)
        if message.original_id == "2-0":
            harness_add()

    once = iter([1])

    def harness_add() -> None:
        for _ in once:
            fields = ("payload", "x", "key", "a", "originalId", "0-8")
            other.execute("XADD", harness.retry, "2-0", *fields)

    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    worker = life.worker("t1", max_messages=6, **policy)
    assert life.run(worker, work) == ExitCode.RECYCLE
    other.close()
    of_key = [name for name, _ in runs if name != "2-0"]
    assert of_key == ["0-7", "0-7", "0-7", "1-0", "0-8"]


@pytest.mark.parametrize(
    "policy", [BLOCK, HOLD, SEVERAL], ids=["block", "hold-key", "hold-key, four at a time"]
)
def test_next_process_waits_for_the_remaining_backoff(
    harness: Harness, life: Life, policy: dict[str, Any]
):
    """If each process handles one message, each wait is continued by the next process."""
    add_entries(harness, "aa")
    runs: Runs = []
    began: list[int] = []
    fails = fail_times(runs, {"1-0": 2})

    def work(message: Message) -> None:
        began.append(now_ns())
        fails(message)

    for _ in range(4):
        worker = life.worker("t1", max_messages=1, **policy | {"backoff": WAITING})
        assert life.run(worker, work) == ExitCode.RECYCLE
    assert runs == [("1-0", 1), ("1-0", 2), ("1-0", 3), ("2-0", 1)]
    # The waits may be slightly shorter, because Redis counts whole milliseconds.
    least = (WAIT - 0.002) * 1e9
    assert began[1] - began[0] >= least
    assert began[2] - began[1] >= least
    assert pending_ids(harness) == set()
    assert "attempts" not in harness.state()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
@pytest.mark.parametrize("late", ["1-0", "2-0"])
def test_expired_held_message_releases_its_key(
    harness: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any], late: str
):
    end = str(harness.now_unix_ms() + 300)
    for name in ("1-0", "2-0", "3-0"):
        harness.add(name, "payload", "x", "key", "a", *(("expiresAt", end) if name == late else ()))
    runs: Runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if message.id == "3-0":
            life.stop()
        if runs == [("1-0", 1)]:
            raise Retry(after=0.4)

    worker = life.worker("t1", **policy)
    assert life.run(worker, work) == ExitCode.STOPPED
    ran = [("1-0", 1), ("2-0", 1)] if late == "1-0" else [("1-0", 1), ("1-0", 2)]
    assert runs == [*ran, ("3-0", 1)]
    assert slot.counter("expired") == 1
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_constantly_due_keys_do_not_starve_others(
    harness: Harness, life: Life, policy: dict[str, Any]
):
    add_entries(harness, "abcdefghijklmnopqrst")
    healthy: set[bytes] = set()

    def work(message: Message) -> None:
        assert message.key is not None
        if message.key < b"d":
            raise Retry(after=0.0)
        healthy.add(message.key)
        if len(healthy) == 17:
            life.stop()

    worker = life.worker("t1", max_attempts=0, prefetch_max=4, **policy)
    assert life.run(worker, work) == ExitCode.STOPPED
    assert len(healthy) == 17
    assert pending_ids(harness) == {"1-0", "2-0", "3-0"}


def test_hold_key_delays_a_message_without_a_key(harness: Harness, life: Life, slot: WorkerSlot):
    add_entries(harness, "...a")
    runs: Runs = []
    worker = life.worker("t1", max_messages=4, **HOLD | {"backoff": NEVER})
    assert life.run(worker, fail_times(runs, {"2-0": 9})) == ExitCode.RECYCLE
    assert slot.counter("retried") == 1
    assert set(harness.state()["items"]) == {"m:2-0"}
    assert harness.state()["items"]["m:2-0"]["retryCount"] == b"1"
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_held_limit_stops_reading(
    harness: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any]
):
    add_entries(harness, "a" * 40)
    runs: Runs = []
    worker = life.worker("t1", held_max=8, **policy | {"backoff": NEVER})
    waits = slot.waits

    def stop() -> None:
        wait_until(lambda: waits.read().kind is Wait.FULL, what="nothing more fits")
        life.stop()

    watcher = threading.Thread(target=stop)
    watcher.start()
    assert life.run(worker, fail_times(runs, {"1-0": 1})) == ExitCode.STOPPED
    watcher.join()
    assert runs == [("1-0", 1)]
    assert 8 <= waits.read().held <= 9
    assert len(pending_ids(harness)) == waits.read().held


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_failure_in_place_is_written_before_its_wait(
    harness: Harness, life: Life, policy: dict[str, Any]
):
    """A failure is written before its wait.

    If the process is killed while waiting, its successor continues the count.
    """
    add_entries(harness, "ab")
    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    found: list[bytes] = []

    def written() -> bool:
        found[:] = other.execute("HGETALL", harness.keys.attempts(*harness.assignment))
        return bool(found)

    def watch() -> None:
        try:
            wait_until(written, timeout=3.0, what="the failure is written down")
        finally:
            life.stop()

    def work(message: Message) -> None:
        if message.id == "1-0":
            raise ValueError

    watcher = threading.Thread(target=watch)
    watcher.start()
    life.run(life.worker("t1", **policy | {"backoff": NEVER}), work)
    watcher.join()
    other.close()
    assert found[:2] == [b"m:1-0:f", b"1"]


def test_failure_in_place_stays_due_after_sent_acks(life: Life):
    settler = life.worker("t1").settler
    settler.note(b"m:1-0", 1, 2_000, now=1_000)
    settler.ack(b"2-0", 1, 1_001, retried=False, has_counters=False)
    settler.confirm_acks(1_002)
    assert settler.since_ns == 1_000


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_held_message_keeps_its_place_after_a_lost_connection(
    harness: Harness, new_life: Callable[[str], Life], proxy: FaultProxy, policy: dict[str, Any]
):
    add_entries(harness, "abcabcabcabcabcabcabcabc")
    runs: dict[bytes, list[str]] = defaultdict(list)
    failures: Counter[str] = Counter()
    lock = threading.Lock()

    def work(message: Message) -> None:
        with lock:
            if int(message.id_bytes[:-2]) % 2 and failures[message.id] < 2:
                failures[message.id] += 1
                if failures[message.id] == 1:
                    proxy.cut()
                raise ValueError
            assert message.key is not None
            runs[message.key].append(message.id)

    life = new_life(proxy.url)
    worker = life.worker("t1", max_messages=24 + 24, max_attempts=0, **policy)
    assert life.run(worker, work) == ExitCode.RECYCLE
    for key, first in ((b"a", 1), (b"b", 2), (b"c", 3)):
        assert list(dict.fromkeys(runs[key])) == [f"{n}-0" for n in range(first, 25, 3)], key
    assert pending_ids(harness) == set()


def test_due_held_key_runs_after_a_lost_connection(
    harness: Harness, new_life: Callable[[str], Life], proxy: FaultProxy
):
    add_entries(harness, "abc")
    runs: Runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if len(runs) <= 2:
            raise Retry(after=0.005)
        if len(runs) == 3:
            be_long()  # both are due when this run finishes
        if len(runs) == 4:
            proxy.arm(Fault.CUT_BEFORE, command="EVALSHA")
            be_long()
            raise Dead  # this must be settled before the next run, but the settlement fails

    def be_long() -> None:
        late = now_ns() + ACK_DELAY_NS
        while now_ns() <= late:
            pass

    life = new_life(proxy.url)
    worker = life.worker("t1", max_messages=5, **HOLD)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert sorted(runs) == [("1-0", 1), ("1-0", 2), ("2-0", 1), ("2-0", 2), ("3-0", 1)]
    assert pending_ids(harness) == set()


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
@pytest.mark.parametrize("seed", range(3))
def test_random_failures_keep_the_order_of_each_key(
    harness: Harness, life: Life, policy: dict[str, Any], seed: int
):
    chance = random.Random(seed)
    keys = [chance.choice("abcdefghijkl") for _ in range(400)]
    add_entries(harness, "".join(keys))
    fails = {f"{n}-0": chance.choice((0, 0, 0, 1, 2, 9)) for n in range(1, 401)}
    ended: dict[bytes, list[int]] = defaultdict(list)
    begun: dict[bytes, list[int]] = defaultdict(list)
    total = sum(min(times, 4) + (times < 4) for times in fails.values())

    def work(message: Message) -> None:
        assert message.key is not None
        number = int(message.id_bytes[:-2])
        begun[message.key].append(number)
        if message.attempt <= fails[message.id]:
            if message.attempt == 4:
                ended[message.key].append(number)
            raise Retry(after=chance.choice((0.0, 0.0, 0.001, 0.01)))
        ended[message.key].append(number)

    worker = life.worker("t1", max_messages=total, max_attempts=4, held_max=64, **policy)
    assert life.run(worker, work) == ExitCode.RECYCLE
    for key in set(keys):
        expected = [number for number, each in enumerate(keys, 1) if each == key]
        assert ended[key.encode()] == expected
        assert begun[key.encode()] == sorted(begun[key.encode()])
    assert pending_ids(harness) == set()
    dead = {n for n, times in fails.items() if times >= 4}
    assert len(harness.state()["dlq"].entries) == len(dead)


@pytest.mark.parametrize("policy", [HOLD, SEVERAL], ids=["one at a time", "four at a time"])
def test_released_message_waits_with_its_key(
    harness: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any]
):
    add_entries(harness, "aba")
    runs: Runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if runs.count(("1-0", 1)) == 1 and message.id == "1-0":
            raise Release

    worker = life.worker("t1", max_messages=4, **policy)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert [name for name, _ in runs if name != "2-0"] == ["1-0", "1-0", "3-0"]
    assert runs.index(("2-0", 1)) < 3
    assert {attempt for _, attempt in runs} == {1}
    assert (slot.counter("failed"), slot.counter("released")) == (0, 1)
    assert pending_ids(harness) == set()
