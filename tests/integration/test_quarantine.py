"""Turns and marks of the quarantine have one owner, and are released while no message runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd.config.consumers import Breaker
from streamqd.handlers import Retry
from streamqd.idle_reason import Wait
from streamqd.message import Message
from streamqd.model import Backoff
from streamqd.scoreboard import WorkerCommand, WorkerSlot, WorkerState
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.worker import ExitCode
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.worker import WorkerLoop
from tests.contract.harness import Harness
from tests.support import life as lives
from tests.support.life import Life
from tests.support.waiting import wait_until

AT_ONCE = Backoff("fixed", 0.0, 0.0, "none")
ONE: dict[str, Any] = {}
SEVERAL: dict[str, Any] = {"concurrency": 4, "order": "none"}
BATCHES: dict[str, Any] = {"handler": f"{__name__}:handle_batch", "batch": 2}
KINDS = pytest.mark.parametrize(
    "kind", [ONE, SEVERAL, BATCHES], ids=["one at a time", "four at a time", "batches"]
)
NO_MESSAGE = b"m:0-0"


def handle_batch(messages: list[Message]) -> None:
    """A batch handler that does the same as a life's `handle`."""
    for message in messages:
        lives.handle(message)


@pytest.fixture
def harness(harness: Harness) -> Harness:
    """An assignment of t1. Its former owner was lost after it had fetched three messages."""
    for number in (1, 2, 3):
        harness.add(f"{number}-0", "payload", "x", "key", "k")
    harness.fetch(3)
    harness.do("HSET", harness.fence, "quarantine", "1")
    return harness


def make_suspecting_worker(harness: Harness, life: Life, **consumer: Any) -> WorkerLoop:
    """Make a worker that inherits the suspects of a lost round and runs each of them alone."""
    harness.do("HSET", harness.fence, "accused", "m:1-0 m:2-0 m:3-0")
    return life.worker("t1", **consumer)


@pytest.fixture
def read_mark(harness: Harness, life: Life) -> Iterator[Callable[[], bytes]]:
    """Read the mark, always from the same thread, which is not the test's."""
    other = connect(life.settings.redis, timeout=5.0, name="test:other")
    yield lambda: bytes(other.execute("HGET", harness.fence, "mark") or b"")
    other.close()


class Turns:
    """The turns of a life's instance, from the view of another worker."""

    def __init__(self, life: Life) -> None:
        daemon = life.settings.daemon
        self.path = daemon.state_dir / f"{daemon.instance}.quarantine"

    def free(self, wanted: int = fcntl.LOCK_EX) -> bool:
        """Return True if a turn of this kind could start now."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, wanted | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
        return True

    def open_files(self) -> list[int]:
        """Return the file descriptors of this process that refer to the lock."""
        found = []
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of this listing is closed
                if each.readlink() == self.path:
                    found.append(int(each.name))
        return found


@pytest.fixture
def turns(life: Life) -> Turns:
    return Turns(life)


# --- the end of a turn ----------------------------------------------------------------------------


@KINDS
def test_leaked_lock_descriptor_does_not_keep_the_turn(
    harness: Harness, life: Life, turns: Turns, kind: dict[str, Any]
):
    """A copy of the lock's descriptor does not keep the turn.

    Such a copy can leak, for example, into a process that is forked without Python's fork hooks.
    """
    runs, copies = [], []

    def work(message: Message) -> None:
        runs.append(message.id)
        copies.extend(os.dup(file) for file in turns.open_files()[:1])

    worker = make_suspecting_worker(harness, life, max_messages=3, **kind)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert runs == ["1-0", "2-0", "3-0"]
    assert len(copies) >= 3
    assert turns.free()
    for file in copies:
        os.close(file)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_child_does_not_keep_the_turn(harness: Harness, life: Life, turns: Turns):
    """A worker's exit releases the turn, even after a kill. Its child does not keep the turn."""
    told, tell = os.pipe()

    def work(_message: Message) -> None:
        if (child := os.fork()) == 0:
            os.write(tell, str(len(turns.open_files())).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert not turns.free(fcntl.LOCK_SH)

    worker = make_suspecting_worker(harness, life, max_messages=3)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert os.read(told, 9) == b"000"
    os.close(told)
    os.close(tell)


@KINDS
@pytest.mark.parametrize("end", ["max_messages", "fenced", "stop"])
def test_exiting_worker_releases_its_turn_before_on_stop(
    harness: Harness, life: Life, slot: WorkerSlot, turns: Turns, kind: dict[str, Any], end: str
):
    """The worker releases its turn before it calls `on_stop`, because that may take long."""
    worker = make_suspecting_worker(harness, life, max_messages=2, **kind)
    at_the_end: list[bool] = []
    true_wake, true_sleep = worker.channel.wake_supervisor, worker.channel.sleep
    holder = os.open(turns.path, os.O_RDWR | os.O_CREAT)
    if end == "fenced":
        fcntl.flock(holder, fcntl.LOCK_EX)

    def wake() -> None:
        if slot.state == WorkerState.QUIET:
            at_the_end.append(turns.free())
        true_wake()

    def sleep(seconds: float, unstarted: int = 0) -> None:
        # The worker waits for its turn. Once it gets the turn, its mark is refused.
        if end == "fenced" and seconds:
            harness.do("HSET", harness.fence, "token", "t2")
            fcntl.flock(holder, fcntl.LOCK_UN)
        true_sleep(seconds, unstarted)

    worker.channel.wake_supervisor = wake  # type: ignore[method-assign]
    worker.channel.sleep = sleep  # type: ignore[method-assign]

    def work(_message: Message) -> None:
        assert not turns.free(fcntl.LOCK_SH)
        if end == "stop":
            life.stop()

    codes = {
        "max_messages": ExitCode.RECYCLE,
        "fenced": ExitCode.FENCED,
        "stop": ExitCode.STOPPED,
    }
    assert life.run(worker, work) == codes[end]
    assert at_the_end == [True]
    os.close(holder)


# --- no running message ---------------------------------------------------------------------------


def wait_rate(slot: WorkerSlot, _life: Life) -> None:
    wait_until(lambda: slot.waits.read().kind is Wait.RATED, what="the rate holds")


def wait_circuit(slot: WorkerSlot, _life: Life) -> None:
    wait_until(lambda: slot.waits.read().kind is Wait.OPEN, what="the circuit is open")


def wait_pause(slot: WorkerSlot, _life: Life) -> None:
    wait_until(lambda: slot.state == WorkerState.PAUSED, what="the worker is paused")


HOLDS: dict[str, tuple[Callable[[WorkerSlot, Life], None], dict[str, Any]]] = {
    "rate": (wait_rate, {"rate": "1/h", "rate_burst": 1}),
    "circuit": (
        wait_circuit,
        {"breaker": Breaker(failures=1, window=60.0, probe_every=60.0, on=("ValueError",))},
    ),
    "pause": (wait_pause, {}),
}


@pytest.mark.fault("F27")
@KINDS
@pytest.mark.parametrize("held_by", HOLDS)
def test_waiting_worker_has_no_mark_and_no_turn(
    harness: Harness, life: Life, slot: WorkerSlot, turns: Turns, read_mark: Callable[[], bytes],
    kind: dict[str, Any], held_by: str,
):  # fmt: skip
    """A waiting worker has neither a mark nor a turn.

    If the host is lost then, the loss must not be charged to a message that never started.
    """
    is_held, settings = HOLDS[held_by]
    runs: list[str] = []
    seen: list[tuple[bytes, bool]] = []

    def work(message: Message) -> None:
        runs.append(message.id)
        if held_by == "pause":
            life.send_command(WorkerCommand.PAUSE)
        if held_by == "circuit":
            raise ValueError

    def watch() -> None:
        is_held(slot, life)
        wait_until(
            lambda: turns.free() and slot.state != WorkerState.QUIET, what="the turn is free"
        )
        seen.append((read_mark(), turns.free()))
        life.stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    worker = make_suspecting_worker(harness, life, **settings | kind)
    try:
        assert life.run(worker, work) == ExitCode.STOPPED
    finally:
        watcher.join()
    assert runs == ["1-0"]
    ((mark, free),) = seen
    assert free
    assert mark not in (b"m:2-0", b"m:3-0")


@KINDS
def test_lease_expiry_during_marking_suspects_no_message(
    harness: Harness, life: Life, slot: WorkerSlot, turns: Turns, read_mark: Callable[[], bytes],
    kind: dict[str, Any],
):  # fmt: skip
    runs: list[str] = []
    worker = make_suspecting_worker(harness, life, max_messages=3, **kind)
    true_run, true_wait = worker.link.run, worker.channel.await_trust
    waited: list[tuple[bytes, bool, list[str]]] = []

    def run(call: Any) -> Any:
        reply = true_run(call)
        if b"m:2-0" in call.argv and not waited:
            slot.trusted_until_ns = 1
        return reply

    def await_trust() -> int:
        if slot.trusted_until_ns == 1:
            waited.append((read_mark(), turns.free(), list(runs)))
            slot.trusted_until_ns = (1 << 63) - 1
        return true_wait()

    worker.link.run = run  # type: ignore[method-assign]
    worker.channel.await_trust = await_trust  # type: ignore[method-assign]
    assert life.run(worker, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    assert waited == [(NO_MESSAGE, True, ["1-0"])]
    assert runs == ["1-0", "2-0", "3-0"]


@KINDS
def test_pause_after_a_mark_waits_for_the_run(
    harness: Harness,
    life: Life,
    slot: WorkerSlot,
    turns: Turns,
    kind: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """A pause that comes after a mark waits for the run.

    Otherwise, the message would be a suspect during the pause and then run without a turn.
    """
    shared: list[tuple[str, bool]] = []
    worker = make_suspecting_worker(harness, life, max_messages=3, **kind)
    true_begin = Quarantine.begin

    def begin(quarantine: Quarantine, entry: FetchedEntry) -> None:
        true_begin(quarantine, entry)
        if entry.place == b"m:1-0":
            life.send_command(WorkerCommand.PAUSE)

    def resume() -> None:
        wait_until(lambda: slot.state == WorkerState.PAUSED, what="the worker is paused")
        life.send_command(WorkerCommand.NONE)

    monkeypatch.setattr(Quarantine, "begin", begin)
    resumer = threading.Thread(target=resume)
    resumer.start()

    def work(message: Message) -> None:
        shared.append((message.id, turns.free(fcntl.LOCK_SH)))

    assert life.run(worker, work) == ExitCode.RECYCLE
    resumer.join()
    assert shared == [("1-0", False), ("2-0", False), ("3-0", False)]


@pytest.mark.parametrize(
    "kind", [ONE, SEVERAL | {"order": "key"}], ids=["one at a time", "four at a time"]
)
def test_finished_held_message_loses_its_mark(
    harness: Harness, life: Life, turns: Turns, read_mark: Callable[[], bytes], kind: dict[str, Any]
):
    """A message loses its mark even while its worker is full and is still listing entries."""
    harness.add("4-0", "payload", "x" * 10_000, "key", "another")
    harness.fetch(1)
    runs: list[tuple[str, bytes]] = []
    while_waiting: set[tuple[bytes, bool]] = set()

    def work(message: Message) -> None:
        runs.append((message.id, read_mark()))
        if message.attempt == 1 and message.id in ("1-0", "4-0"):
            raise Retry(after=0.0 if message.id == "1-0" else 0.5)

    worker = life.worker("t1", max_messages=6, on_error="hold-key", prefetch_bytes=9_000, **kind)
    await_any = worker.channel.await_any

    def watched(descriptors: list[int], seconds: float) -> set[int]:
        if len(runs) == 5 and not worker.executor.in_flight.running:
            while_waiting.add((read_mark(), turns.free()))
        return await_any(descriptors, seconds)

    worker.channel.await_any = watched  # type: ignore[method-assign]
    assert life.run(worker, work) == ExitCode.RECYCLE
    names = ["1-0", "4-0", "1-0", "2-0", "3-0", "4-0"]
    assert [name for name, _ in runs] == names
    assert all(f"m:{name}".encode() in mark.split() for name, mark in runs)
    assert while_waiting == {(NO_MESSAGE, True)}


@pytest.mark.fault("F27")
@pytest.mark.parametrize(
    ("kind", "alone", "started", "first_mark"),
    [
        (SEVERAL | {"rate": "1/h", "rate_burst": 1}, "", ["1-0"], b"m:1-0 m:2-0"),
        (BATCHES | {"rate": "1/h", "rate_burst": 2}, "m:1-0", ["1-0"], b"m:1-0"),
    ],
    ids=["lanes", "a batch"],
)
def test_round_has_no_mark_and_turn_during_a_rate_wait(
    harness: Harness, life: Life, slot: WorkerSlot, turns: Turns, read_mark: Callable[[], bytes],
    kind: dict[str, Any], alone: str, started: list[str], first_mark: bytes,
):  # fmt: skip
    """A round that waits for the rate has no mark and no turn.

    The rate has room for one start, but the batch needs two.
    """
    if alone:
        harness.do("HSET", harness.fence, "accused", alone)
    runs: list[tuple[str, bytes]] = []
    seen: list[tuple[bytes, bool]] = []

    def watch() -> None:
        wait_rate(slot, life)
        wait_until(turns.free, what="the turn is free")
        seen.append((read_mark(), turns.free()))
        life.stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = life.run(
            life.worker("t1", **kind), lambda message: runs.append((message.id, read_mark()))
        )
    finally:
        watcher.join()
    assert code == ExitCode.STOPPED
    assert [name for name, _ in runs] == started
    assert runs[0][1] == first_mark
    assert seen == [(NO_MESSAGE, True)]


def test_held_member_has_no_mark_during_other_runs(
    harness: Harness, life: Life, turns: Turns, read_mark: Callable[[], bytes],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    harness.add("4-0", "payload", "x", "key", "another")
    harness.fetch(1)
    harness.do("XACK", harness.stream, harness.assignment.group, "2-0", "3-0")
    held, seen = threading.Event(), []
    kept = HeldKeys.finish_runs

    def work(message: Message) -> None:
        if message.id == "1-0" and message.attempt == 1:
            raise ValueError
        if message.id == "4-0":
            held.wait(5.0)
            seen.append((read_mark(), turns.free()))

    def ended(keys: HeldKeys, entries: list[FetchedEntry]) -> None:
        kept(keys, entries)
        held.set()

    options: dict[str, Any] = SEVERAL | {"order": "key", "on_error": "hold-key"}
    worker = life.worker("t1", max_messages=3, backoff=AT_ONCE, **options)
    monkeypatch.setattr(HeldKeys, "finish_runs", ended)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert seen == [(b"m:1-0 m:4-0", False)]


# --- the owner of a turn --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [ONE, SEVERAL | {"order": "key"}], ids=["one at a time", "four at a time"]
)
def test_held_suspect_runs_alone_on_its_retry(
    harness: Harness, life: Life, keys: Keys, turns: Turns, kind: dict[str, Any]
):
    """A held suspect runs alone on its retry, even if the last started entry is not a suspect."""
    harness.do("HSET", keys.attempts(*harness.assignment), "m:1-0:c", "1")
    shared: list[tuple[str, bool]] = []

    def work(message: Message) -> None:
        shared.append((message.id, turns.free(fcntl.LOCK_SH)))
        if message.id == "1-0" and message.attempt == 1:
            raise ValueError

    worker = life.worker(
        "t1",
        max_messages=4,
        on_error="hold-key",
        backoff=AT_ONCE,
        held_max=2,
        prefetch_max=1,
        max_attempts=5,
        **kind,
    )
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert shared[:2] == [("1-0", False), ("1-0", False)]
    assert [name for name, _ in shared] == ["1-0", "1-0", "2-0", "3-0"]


def test_worker_with_many_turns_yields_to_others(
    harness: Harness, life: Life, turns: Turns, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamqd.worker.quarantine.SHARE_SECONDS", 0.0)
    worker = make_suspecting_worker(harness, life, max_messages=3)
    true_sleep = worker.channel.sleep
    order: list[str] = []

    def sleep(seconds: float, unstarted: int = 0) -> None:
        true_sleep(seconds / 2, unstarted)
        if seconds and turns.free():
            order.append("another's turn")
        true_sleep(seconds / 2, unstarted)

    worker.channel.sleep = sleep  # type: ignore[method-assign]
    assert life.run(worker, lambda message: order.append(message.id)) == ExitCode.RECYCLE
    assert order == ["1-0", "another's turn", "2-0", "another's turn", "3-0"]


def test_missing_locks_are_logged_once_and_work_continues(
    harness: Harness, life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """If locks are missing, the worker logs that once and continues.

    A network file system, for example, may lack a lock manager.
    """

    def flock(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("streamqd.worker.quarantine.fcntl.flock", flock)
    runs: list[str] = []
    worker = make_suspecting_worker(harness, life, max_messages=3)
    with caplog.at_level("WARNING"):
        assert life.run(worker, lambda message: runs.append(message.id)) == ExitCode.RECYCLE
    assert runs == ["1-0", "2-0", "3-0"]
    assert [getattr(each, "event", "") for each in caplog.records] == ["quarantine.lock_failed"]
