"""A worker's guards protect against dependencies that are down, and code that kills messages."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from streamqd.config.consumers import Breaker, FloodGuard
from streamqd.handlers import Dead
from streamqd.idle_reason import Wait
from streamqd.message import Message
from streamqd.model import Backoff, Failed
from streamqd.scoreboard import RUNNING, WorkerCommand, WorkerSlot, now_ns
from streamqd.store import directives, messages
from streamqd.store.client import Connection, connect
from streamqd.worker import ExitCode
from streamqd.worker.guards import make_guards
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.life import Life
from tests.support.proxy import Fault, FaultProxy, Trigger
from tests.support.servers import Server
from tests.support.waiting import wait_until

AT_ONCE = Backoff("fixed", 0.0, 0.0, "none")
BREAKER = Breaker(failures=3, window=60.0, probe_every=0.05, on=("ConnectionError",))
OPENS: dict[str, Any] = {"breaker": BREAKER, "backoff": AT_ONCE, "max_attempts": 1}
GUARD: dict[str, Any] = {"flood_guard": FloodGuard(dead_letters=5, window=60.0, share=0.5)}
SEVERAL: dict[str, Any] = {"concurrency": 4, "order": "none"}
ONE: dict[str, Any] = {}
HOLD: dict[str, Any] = {"on_error": "hold-key"}
BATCH: dict[str, Any] = {"batch": 4, "handler": "tests.support.life:handle_batch"}
KINDS = pytest.mark.parametrize(
    "kind",
    [ONE, SEVERAL, HOLD, BATCH],
    ids=["one at a time", "four at a time", "hold-key", "batches"],
)


@pytest.fixture
def harness(harness: Harness) -> Harness:
    """An assignment that t1 owns, with its group and twenty entries."""
    for number in range(1, 21):
        harness.add(f"{number}-0", "payload", "x", "key", f"k{number}")
    return harness


def promote(harness: Harness, link: Connection) -> int:
    """Move due retries into the retry stream, as the housekeeper does."""
    return messages.Promoted.parse(
        link.run(messages.promote_retries(harness.keys, harness.assignment, 100))
    ).moved


@contextlib.contextmanager
def promote_until(
    harness: Harness, link: Connection, until: Callable[[], object], then: Callable[[], object]
) -> Iterator[None]:
    """Promote repeatedly in a thread until a condition holds, and then run `then`."""
    over = threading.Event()

    def play() -> None:
        while not until() and not over.wait(0.005):
            promote(harness, link)
        then()

    player = threading.Thread(target=play)
    player.start()
    try:
        yield
    finally:
        over.set()
        player.join()


@pytest.fixture
def other_life(life: Life) -> Any:
    link = connect(life.settings.redis, timeout=5.0, name="test:other")
    yield link
    link.close()


@KINDS
def test_outage_of_a_dependency_costs_no_attempt(
    harness: Harness, life: Life, slot: WorkerSlot, other_life: Connection, kind: dict[str, Any]
):
    """An outage of a dependency costs no attempt, even if a message has only one."""
    runs: Counter[str] = Counter()
    attempts = set()
    down = threading.Event()
    down.set()
    stopped = threading.Event()
    waits = slot.waits
    probes: list[int] = []
    at_once = set()

    def work(message: Message) -> None:
        attempts.add(message.attempt)
        if waits.read().kind is Wait.PROBING:
            at_once.add(bytes(slot.states).count(RUNNING))
        if down.is_set():
            runs[message.original_id] += 1
            raise ConnectionRefusedError
        runs[message.original_id] = 0

    def play() -> None:
        wait_until(lambda: waits.read().kind is Wait.OPEN, what="the circuit is open")
        before = runs.total()
        wait_until(lambda: runs.total() >= before + 4, what="four probes")
        probes.append(runs.total())
        down.clear()
        while not stopped.is_set():
            promote(harness, other_life)
            if slot.counter("acked") == 20:
                break
            stopped.wait(0.005)
        life.stop()

    player = threading.Thread(target=play)
    player.start()
    try:
        assert life.run(life.worker("t1", **OPENS | kind), work) == ExitCode.STOPPED
    finally:
        stopped.set()
        player.join()
    assert slot.counter("acked") == 20
    assert slot.counter("dead_lettered") == 0
    assert attempts == {1}
    assert at_once == {1}, "one probe at a time"
    assert waits.read().opened == 1
    assert waits.read().kind is Wait.NOTHING
    # The circuit opens after three failures, or after all runs that started together. From then on,
    # one message runs at a time.
    assert probes[0] <= 4 + 4 + 1


def own_two_keys(link: Connection, keys: Any) -> Harness:
    """Return an owned partition with two messages that have different keys."""
    harness = Harness(link, keys)
    harness.groups()
    harness.own("t1")
    for number, key in enumerate("ab", 1):
        harness.add(f"{number}-0", "payload", "x", "key", key)
    return harness


def test_held_message_awaits_the_probe_after_a_lost_connection(
    link: Connection, keys: Any, new_life: Callable[[str], Life], proxy: FaultProxy
):
    own_two_keys(link, keys)
    runs = []
    both = threading.Barrier(2, timeout=10.0)

    def work(message: Message) -> None:
        runs.append(message.id)
        if len(runs) <= 2:
            both.wait()  # otherwise, one message may fail again before the other has started
            raise ConnectionError
        if len(runs) == 3:
            proxy.cut()

    breaker = Breaker(failures=2, window=60.0, probe_every=0.05, on=())
    kept = HOLD | {"breaker": breaker, "backoff": AT_ONCE, "concurrency": 4}
    life = new_life(proxy.url)
    assert life.run(life.worker("t1", max_messages=4, **kept), work) == ExitCode.RECYCLE
    assert sorted(runs) == ["1-0", "1-0", "2-0", "2-0"]


@pytest.mark.parametrize("lost", [1, 2], ids=["the letter", "the pause"])
def test_dead_lettered_held_message_stays_dead_after_a_reconnect(
    link: Connection, keys: Any, new_life: Callable[[str], Life], proxy: FaultProxy,
    slot: WorkerSlot, other_life: Connection, lost: int,
):  # fmt: skip
    harness = own_two_keys(link, keys)
    runs = []

    def work(message: Message) -> None:
        runs.append((message.id, message.attempt))
        if runs[-1] == ("1-0", 1):
            raise ValueError
        if runs[-1] == ("1-0", 2):
            proxy.arm(Fault.CUT_BEFORE, command="EVALSHA", nth=lost)
            raise Dead

    def resume() -> None:
        pause = f"pause:{directives.Scope(*ASSIGNMENT)}"
        key = harness.keys.directives("default")
        wait_until(lambda: other_life.execute("HDEL", key, pause), what="the flood is stopped")

    resumer = threading.Thread(target=resume)
    resumer.start()
    guard = FloodGuard(dead_letters=1, window=60.0, share=0.1)
    kept = HOLD | {"flood_guard": guard, "backoff": AT_ONCE, "prefetch_max": 1}
    life = new_life(proxy.url)
    assert life.run(life.worker("t1", max_messages=3, **kept), work) == ExitCode.RECYCLE
    resumer.join()
    assert runs == [("1-0", 1), ("1-0", 2), ("2-0", 1)]
    assert [letter["originalId"] for letter in harness.state()["dlq"].entries.values()] == [b"1-0"]


def test_open_circuit_starts_nothing_and_allows_a_stop(
    harness: Harness, life: Life, slot: WorkerSlot
):
    runs = []
    waits = slot.waits

    def work(message: Message) -> None:
        runs.append(message.id)
        raise ConnectionError

    def stop() -> None:
        wait_until(lambda: waits.read().kind is Wait.OPEN, what="the circuit is open")
        told.append(waits.read().until_ns > now_ns())
        life.stop()

    told: list[bool] = []
    watcher = threading.Thread(target=stop)
    watcher.start()
    breaker = Breaker(failures=3, window=60.0, probe_every=3600.0, on=())
    worker = life.worker("t1", breaker=breaker, max_attempts=1)
    assert life.run(worker, work) == ExitCode.STOPPED
    watcher.join()
    assert told == [True]
    assert runs == ["1-0", "2-0", "3-0"]
    assert slot.counter("dead_lettered") == 0
    assert set(harness.state()["items"]) == {"m:1-0", "m:2-0", "m:3-0"}
    assert {each["retryCount"] for each in harness.state()["items"].values()} == {b"0"}
    stream = harness.state()["stream"]
    assert slot.counter("released") == len(stream.groups["hits"][1])


def test_circuit_probe_waits_for_earlier_runs(
    harness: Harness, life: Life, slot: WorkerSlot, other_life: Connection
):
    """A probe waits for runs that started earlier.

    Their success does not prove that the dependency works now.
    """
    waits, runs = slot.waits, []
    up, go_on, stopped = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def work(message: Message) -> None:
        runs.append(message.id)
        if message.id == "1-0":
            go_on.wait(5.0)
        elif not up.is_set():
            raise ConnectionError

    def play() -> None:
        wait_until(lambda: waits.read().kind is Wait.OPEN, what="the circuit is open")
        late = waits.read().until_ns + 100_000_000
        wait_until(lambda: now_ns() > late, what="a probe would be due")
        seen.append((waits.read().kind, len(runs)))
        go_on.set()
        wait_until(lambda: len(runs) > seen[0][1] + 2, what="probes")
        up.set()
        while slot.counter("acked") < 20 and not stopped.wait(0.005):
            promote(harness, other_life)
        life.stop()

    player = threading.Thread(target=play)
    player.start()
    try:
        worker = life.worker("t1", **OPENS | SEVERAL | {"concurrency": 2})
        assert life.run(worker, work) == ExitCode.STOPPED
    finally:
        stopped.set()
        player.join()
    assert seen == [(Wait.OPEN, 4)]
    assert waits.read().opened == 1
    assert slot.counter("acked") == 20


def test_circuit_is_not_probed_by_a_state_check(life: Life, slot: WorkerSlot):
    """A state check does not probe the circuit.

    Quarantine and lanes ask the breaker more often than they start a run.
    """
    worker = life.worker("t1", **OPENS | {"breaker": replace(BREAKER, probe_every=1e-9)})
    guards = make_guards(worker.context)
    assert guards is not None
    down = Failed("ConnectionError", "", "", ("ConnectionError",))
    for number in range(3):
        message = Message(worker.context.delivery, f"{number + 1}-0".encode(), [], retried=False)
        assert guards.exempts(down, message)
    wait_until(lambda: guards.admits(0), what="a probe is due")
    assert guards.admits(0)
    guards.await_open(now_ns())
    assert slot.waits.read().kind is Wait.OPEN
    guards.note_start(now_ns())
    assert slot.waits.read().kind is Wait.PROBING
    assert not guards.admits(1)


@pytest.mark.parametrize("kind", [ONE, BATCH], ids=["one at a time", "batches"])
def test_circuit_without_a_probe_message_stays_open(
    link: Connection, keys: Any, new_life: Callable[[str], Life], slot: WorkerSlot, server: Server,
    kind: dict[str, Any],
):  # fmt: skip
    harness, life = Harness(link, keys), new_life(server.url)
    harness.groups()
    harness.own("t1")
    for number in range(1, 4):
        harness.add(f"{number}-0")
    waits = slot.waits
    runs: list[str] = []
    seen = []

    def work(message: Message) -> None:
        runs.append(message.id)
        if len(runs) <= 3:
            raise ConnectionError

    def play() -> None:
        wait_until(lambda: waits.read().kind is Wait.OPEN, what="the circuit is open")
        due = waits.read().until_ns
        wait_until(lambda: now_ns() > due + 100_000_000, what="a probe would be due")
        seen.append(waits.read().kind)
        harness.add("4-0")
        wait_until(lambda: slot.counter("acked"), what="the new message is tried")
        life.stop()

    player = threading.Thread(target=play)
    player.start()
    # The circuit is still open, although the wait is over before it is reported, as on a busy host.
    at_once = replace(BREAKER, probe_every=1e-9)
    never = Backoff("fixed", 3600.0, 3600.0, "none")
    more = OPENS | kind | {"backoff": never, "breaker": at_once}
    if kind:
        more["batch"] = 3
    assert life.run(life.worker("t1", **more), work) == ExitCode.STOPPED
    player.join()
    assert seen == [Wait.OPEN]
    assert runs[3:] == ["4-0"]
    assert waits.read().kind is Wait.NOTHING


def test_other_error_class_does_not_affect_the_circuit(
    harness: Harness, life: Life, slot: WorkerSlot
):
    done = []

    def work(message: Message) -> None:
        number = int(message.id_bytes[:-2])
        if number <= 6:
            raise ValueError
        if number <= 9:
            raise ConnectionError
        if number <= 12:
            raise KeyError  # three probes that have no result
        done.append(number)

    worker = life.worker("t1", max_messages=20, **OPENS)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert slot.counter("dead_lettered") == 9, "only messages with other errors are dead"
    assert done == list(range(13, 21))
    assert slot.waits.read().opened == 1


def test_single_failing_message_keeps_the_circuit_closed(
    harness: Harness, life: Life, slot: WorkerSlot, other_life: Connection
):
    """A single failing message does not open the circuit, because the other messages succeed."""
    runs: Counter[str] = Counter()

    def work(message: Message) -> None:
        runs[message.original_id] += 1
        if message.original_id == "5-0":
            raise ConnectionError

    def stop() -> None:
        wait_until(lambda: slot.counter("acked") == 19, what="the others are done")
        life.stop()

    worker = life.worker("t1", **OPENS | {"max_attempts": 2})
    with promote_until(harness, other_life, lambda: slot.counter("dead_lettered"), stop):
        assert life.run(worker, work) == ExitCode.STOPPED
    assert runs["5-0"] == 3, "the first failure is free"
    (letter,) = harness.state()["dlq"].entries.values()
    assert (letter["originalId"], letter["attempts"]) == (b"5-0", b"2")
    assert slot.waits.read().opened == 0


@KINDS
def test_flood_of_dead_letters_pauses_the_partition(
    harness: Harness, life: Life, slot: WorkerSlot, other_life: Connection, kind: dict[str, Any]
):
    waits = slot.waits
    orders: list[directives.Directives] = []
    cured = threading.Event()

    def work(_message: Message) -> None:
        if not cured.is_set():
            raise Dead("a bad release")

    def read_orders() -> directives.Directives:
        return directives.read(other_life.execute("HGETALL", harness.keys.directives("default")))

    def play() -> None:
        wait_until(lambda: waits.read().kind is Wait.FLOODED, what="the flood is stopped")
        wait_until(lambda: bool(read_orders().pauses), what="the pause is written down")
        orders.append(read_orders())
        # The supervisor reads this state and informs the worker. Then an operator resumes the
        # partition.
        life.send_command(WorkerCommand.PAUSE)
        letters.append(slot.counter("dead_lettered"))
        cured.set()
        other_life.run(
            directives.change(
                harness.keys, "default", remove=[f"pause:{directives.Scope(*ASSIGNMENT)}"]
            )
        )
        life.send_command(WorkerCommand.NONE)
        wait_until(lambda: slot.counter("acked") == 20 - letters[0], what="the rest is done")
        life.stop()

    letters: list[int] = []
    player = threading.Thread(target=play)
    player.start()
    assert life.run(life.worker("t1", **GUARD | kind), work) == ExitCode.STOPPED
    player.join()
    ((scope, order),) = orders[0].pauses.items()
    assert scope == directives.Scope(*ASSIGNMENT)
    assert order.by == "the flood guard of west-1"
    assert order.why == "5 dead letters within 60 s"
    assert 5 <= letters[0] <= (8 if kind in (SEVERAL, BATCH) else 5)
    assert waits.read().flooded == 1
    assert waits.read().kind is Wait.NOTHING


@pytest.mark.parametrize("lost", ["PUBLISH", "HEXISTS"])
def test_resume_during_a_lost_connection_is_kept(
    harness: Harness, new_life: Callable[[str], Life], slot: WorkerSlot, other_life: Connection,
    proxy: FaultProxy, lost: str,
):  # fmt: skip
    """If an operator resumes the partition while the connection is lost, it stays resumed.

    The guard must not pause it again when the worker reconnects.
    """
    life = new_life(proxy.url)
    died: list[str] = []
    held: list[Trigger] = []

    def work(message: Message) -> None:
        died.append(message.id)
        if len(died) == 5:
            held.append(proxy.arm(Fault.HOLD_REQUEST, command=lost))
        if len(died) <= 5:
            raise Dead("a bad release")

    def play() -> None:
        wait_until(lambda: held and held[0].hit, what="the pause is written down")
        proxy.refusing = True
        proxy.cut()
        wait_until(lambda: proxy.refused, what="the worker has lost its connection")
        other_life.run(
            directives.change(
                harness.keys, "default", remove=[f"pause:{directives.Scope(*ASSIGNMENT)}"]
            )
        )
        proxy.refusing = False

    player = threading.Thread(target=play)
    player.start()
    assert life.run(life.worker("t1", max_messages=20, **GUARD), work) == ExitCode.RECYCLE
    player.join()
    assert slot.waits.read().flooded == 1
    assert len(died) == 20


def test_few_dead_letters_are_no_flood(harness: Harness, life: Life, slot: WorkerSlot):
    def work(message: Message) -> None:
        if int(message.id_bytes[:-2]) % 3 == 0:
            raise Dead

    guard = FloodGuard(dead_letters=3, window=60.0, share=0.5)
    worker = life.worker("t1", max_messages=20, flood_guard=guard)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert slot.counter("dead_lettered") == 6
    assert slot.waits.read().flooded == 0


def test_flood_guard_ignores_retries(
    harness: Harness, life: Life, slot: WorkerSlot, other_life: Connection
):
    """The guard ignores retries, because only the last of a message's five runs finishes it."""
    waits = slot.waits

    def work(_message: Message) -> None:
        raise ValueError

    worker = life.worker("t1", **GUARD | {"max_attempts": 5, "backoff": AT_ONCE})
    with promote_until(harness, other_life, lambda: waits.read().kind is Wait.FLOODED, life.stop):
        assert life.run(worker, work) == ExitCode.STOPPED
    assert slot.counter("dead_lettered") == 5


def test_flood_guard_waits_if_no_pause_can_be_written(
    harness: Harness, life: Life, slot: WorkerSlot
):
    for number in range(directives.DIRECTIVES_MAX + 1):
        harness.do("HSET", harness.keys.directives("default"), f"pause:other/{number}/g", "{}")
    waits = slot.waits
    died = []

    def work(message: Message) -> None:
        died.append((message.id, waits.read().flooded))
        raise Dead

    guard = FloodGuard(dead_letters=10, window=0.3, share=0.5)
    worker = life.worker("t1", max_messages=20, flood_guard=guard)
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert [floods for _, floods in died] == [0] * 10 + [1] * 10
