"""A worker's guards pass their state to the next worker, and respect the policy's precedence."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from streamqd.config.consumers import Breaker, FloodGuard
from streamqd.handlers import Dead
from streamqd.idle_reason import CIRCUIT, Wait
from streamqd.message import Message
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection, connect
from streamqd.worker import ExitCode
from tests.contract.harness import Harness
from tests.integration.test_guards import (
    AT_ONCE,
    BATCH,
    GUARD,
    ONE,
    OPENS,
    SEVERAL,
    promote,
    promote_until,
)
from tests.support.life import Life
from tests.support.waiting import wait_until


@pytest.fixture
def twenty_entries(harness: Harness) -> Harness:
    """An assignment with twenty entries."""
    for number in range(1, 21):
        harness.add(f"{number}-0", "payload", "x", "key", f"k{number}")
    return harness


@pytest.fixture
def other_life(life: Life) -> Any:
    link = connect(life.settings.redis, timeout=5.0, name="test:other")
    yield link
    link.close()


# --- state that outlives a worker -----------------------------------------------------------------


def run_workers(
    harness: Harness, life: Life, slot: WorkerSlot, work: Any, count: int, **changed: Any
) -> None:
    """Run several workers one after the other. Each of them stops after `max_messages`."""
    for _ in range(count):
        promote(harness, harness.link)
        slot.clear()
        assert life.run(life.worker("t1", **changed), work) == ExitCode.RECYCLE


def test_message_is_forgiven_once_across_workers(harness: Harness, life: Life, slot: WorkerSlot):
    # This value of a producer must not be trusted.
    harness.add("1-0", "payload", "x", "forgivenAt", "99999999999999999")
    attempts = []

    def work(message: Message) -> None:
        attempts.append(message.attempt)
        raise ConnectionError

    breaker = Breaker(failures=20, window=60.0, probe_every=0.05, on=())
    one = {"breaker": breaker, "backoff": AT_ONCE, "max_attempts": 2, "max_messages": 1}
    with harness.instant() as instant:
        run_workers(harness, life, slot, work, 1, **one)
    (waiting,) = harness.state()["items"].values()
    assert instant.first - 200 <= int(waiting["forgivenAt"]) <= instant.last + 200
    run_workers(harness, life, slot, work, 2, **one)
    assert attempts == [1, 1, 2]
    (letter,) = harness.state()["dlq"].entries.values()
    assert (letter["reason"], letter["forgivenAt"]) == (b"attempts", b"0")
    assert slot.waits.read().opened == 0


def test_circuit_survives_frequent_worker_replacements(
    twenty_entries: Harness, life: Life, slot: WorkerSlot
):
    """The third worker opens the circuit. Each later worker finds it open and tries one message."""
    began: list[tuple[str, Wait]] = []
    down = True

    def work(message: Message) -> None:
        began.append((message.original_id, waits.read().kind))
        if down:
            raise ConnectionError

    waits = slot.waits
    one = OPENS | {"max_messages": 1}
    run_workers(twenty_entries, life, slot, work, 6, **one)
    assert [kind for _, kind in began] == [Wait.NOTHING] * 3 + [Wait.PROBING] * 3
    assert waits.read().opened == 1
    down = False
    run_workers(twenty_entries, life, slot, work, 2, **one)
    assert [kind for _, kind in began[6:]] == [Wait.PROBING, Wait.NOTHING]
    # A message that failed before the circuit opened fails once more, and that failure is not
    # counted.
    down = True
    twenty_entries.do("XTRIM", twenty_entries.stream, "MAXLEN", "0")
    run_workers(twenty_entries, life, slot, work, 1, **one)
    assert began[-1][0] in {uid for uid, _ in began[:6]}
    assert slot.counter("dead_lettered") == 0


def test_open_circuit_survives_a_worker_replacement(harness: Harness, life: Life, slot: WorkerSlot):
    harness.add("1-0")

    def work(_message: Message) -> None:
        raise ConnectionError

    breaker = Breaker(failures=1, window=60.0, probe_every=3600.0, on=())
    waits, seen = slot.waits, []

    def stop() -> None:
        wait_until(lambda: waits.read().kind is Wait.OPEN, what="the circuit is open")
        life.stop()

    for _ in range(2):
        slot.clear()
        watcher = threading.Thread(target=stop)
        watcher.start()
        seen.append(life.run(life.worker("t1", breaker=breaker), work))
        watcher.join()
        waits.reset()
    assert seen == [ExitCode.STOPPED] * 2
    slot.clear()
    # Without a breaker, the worker keeps no state.
    harness.add("2-0")
    calm = life.worker("t1", max_messages=1)
    assert life.run(calm, lambda _message: None) == ExitCode.RECYCLE
    assert waits.previous_values(CIRCUIT) == [0, 0, 0, 0]


def test_flood_guard_survives_frequent_worker_replacements(
    twenty_entries: Harness, life: Life, slot: WorkerSlot
):
    def work(_message: Message) -> None:
        raise Dead

    def play() -> None:
        wait_until(lambda: slot.waits.read().kind is Wait.FLOODED, what="a flood")
        life.stop()

    run_workers(twenty_entries, life, slot, work, 2, max_messages=2, **GUARD)
    slot.clear()
    player = threading.Thread(target=play)
    player.start()
    assert life.run(life.worker("t1", max_messages=2, **GUARD), work) == ExitCode.STOPPED
    player.join()
    assert slot.counter("dead_lettered") == 5


def test_flood_guard_counts_successes_across_workers(
    twenty_entries: Harness, life: Life, slot: WorkerSlot
):
    def work(message: Message) -> None:
        if int(message.id_bytes[:-2]) % 3 == 0:
            raise Dead

    guard = FloodGuard(dead_letters=3, window=60.0, share=0.5)
    run_workers(twenty_entries, life, slot, work, 6, max_messages=3, flood_guard=guard)
    assert slot.counter("dead_lettered") == 6
    assert slot.waits.read().flooded == 0


@pytest.mark.parametrize("kind", [ONE, SEVERAL, BATCH], ids=["one", "four", "batches"])
def test_flood_guard_counts_dead_letters_without_a_run(
    harness: Harness, life: Life, slot: WorkerSlot, kind: dict[str, Any]
):
    """The flood guard also counts dead letters that never ran.

    These messages are larger than any producer may send.
    """
    for number in range(1, 11):
        harness.add(f"{number}-0", "payload", "x" * 2_000)
    life.settings = replace(
        life.settings, daemon=replace(life.settings.daemon, max_message_bytes=1_000)
    )

    def play() -> None:
        wait_until(lambda: slot.waits.read().kind is Wait.FLOODED, what="a flood")
        life.stop()

    player = threading.Thread(target=play)
    player.start()
    assert life.run(life.worker("t1", **GUARD | kind), lambda _message: None) == ExitCode.STOPPED
    player.join()
    assert slot.waits.read().flooded == 1
    # A concurrent worker stops only between two reads.
    assert slot.counter("dead_lettered") == (10 if kind is SEVERAL else 5)


# --- precedence of the policy ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [{"dead_on": ("ValueError",)}, {"retry_on": ("KeyError",)}], ids=["dead_on", "retry"]
)
def test_error_without_retry_does_not_open_the_circuit(
    twenty_entries: Harness, life: Life, slot: WorkerSlot, policy: dict[str, Any]
):
    def work(_message: Message) -> None:
        raise ValueError

    breaker = Breaker(failures=3, window=60.0, probe_every=3600.0, on=())
    worker = life.worker("t1", max_messages=20, breaker=breaker, **policy)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert slot.counter("dead_lettered") == 20
    assert slot.waits.read().opened == 0


def test_blocked_message_is_retried_until_too_old(
    harness: Harness, life: Life, slot: WorkerSlot, other_life: Connection
):
    harness.do("XADD", harness.stream, "*", "payload", "x")

    def work(_message: Message) -> None:
        raise ConnectionError

    worker = life.worker("t1", **OPENS | {"max_attempts": 9, "retry_max_age": 0.5})
    with promote_until(harness, other_life, lambda: slot.counter("dead_lettered"), life.stop):
        assert life.run(worker, work) == ExitCode.STOPPED
    (letter,) = harness.state()["dlq"].entries.values()
    assert letter["reason"] == b"too-old"
    assert slot.waits.read().opened == 1
