"""Promises of the worker, of fetching and of the start that only a real server can test.

The workers here run in the process of the test: see tests/support/life.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import startup
from streamqd.config import Consumer, Settings, Topic
from streamqd.handlers import Retry, SoftTimeout
from streamqd.message import Message
from streamqd.scoreboard import CLEARED, FAILED, WorkerSlot
from streamqd.store import leases, messages
from streamqd.store.client import Connection
from streamqd.store.fetch import Fetcher
from streamqd.store.keys import Keys
from streamqd.worker import ExitCode
from streamqd.worker.settler import FailedEntry, Settler
from tests.contract.harness import ASSIGNMENT, TTL, Harness
from tests.support import daemon as support
from tests.support.life import Life
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import Server


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


# --- the fetch ------------------------------------------------------------------------------------


def test_read_after_a_fence_change_fetches_and_acks_nothing(
    harness: Harness, new_link: Callable[..., Connection]
):
    harness.pending("1-0")
    harness.add("2-0")
    harness.own("t1")
    fetcher = Fetcher(new_link(), harness.keys, harness.leased("t1"))
    assert fetcher.watch()

    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    fetcher.send_round([b"1-0"], [], 10)
    answer = fetcher.receive_round(polled=False)

    assert (answer.executed, answer.owned) == (False, False)
    assert harness.state()["stream"].groups == {"hits": ("1-0", {"1-0": "w"})}


def test_worker_without_the_assignment_starts_nothing(
    harness: Harness, life: Life, slot: WorkerSlot
):
    harness.groups()
    harness.own("t1")
    harness.add("1-0")
    handled = []

    def work(message: Message) -> None:
        handled.append(message.id)
        harness.link.run(
            leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", [])
        )
        harness.add("2-0")

    assert life.run(life.worker("t1"), work) == ExitCode.FENCED
    assert handled == ["1-0"]
    assert slot.counter("fenced") == 1
    assert harness.state()["stream"].groups == {"hits": ("1-0", {"1-0": "w"})}


def test_entries_of_a_lost_read_are_handled_after_reconnect(
    harness: Harness, new_life: Callable[[str], Life], proxy: FaultProxy
):
    harness.groups()
    harness.own("t1")
    harness.add("1-0")
    harness.add("2-0")
    handled = []
    life = new_life(proxy.url)
    lost = proxy.arm(Fault.DROP_REPLY, command="EXEC")
    code = life.run(life.worker("t1", max_messages=2), lambda message: handled.append(message.id))
    assert lost.hit
    assert handled == ["1-0", "2-0"]
    assert code == ExitCode.RECYCLE
    assert harness.state()["stream"].groups == {"hits": ("2-0", {})}


# --- held messages of a leaving worker ------------------------------------------------------------


def test_released_message_runs_later_as_its_first_attempt(harness: Harness, life: Life):
    harness.groups()
    epoch = harness.own("t1")
    for number in range(1, 4):
        harness.add(f"{number}-0")
    runs = []

    def last(message: Message) -> None:
        runs.append((message.id, message.attempt))
        life.stop()

    assert life.run(life.worker("t1"), last) == ExitCode.STOPPED
    assert runs == [("1-0", 1)], "the current message was finished and no other started"
    assert harness.state()["stream"].groups == {"hits": ("3-0", {"2-0": "w", "3-0": "w"})}

    harness.expect("lease_release", "OK", leases.release(harness.keys, harness.leased("t1")))
    harness.own("t2", seen_epoch=epoch)

    def fail(message: Message) -> None:
        runs.append((message.id, message.attempt))
        raise ValueError

    assert life.run(life.worker("t2", max_messages=2), fail) == ExitCode.RECYCLE
    assert runs[1:] == [("2-0", 1), ("3-0", 1)]
    items = harness.state()["items"]
    assert {(item["retryCount"], item["crashCount"]) for item in items.values()} == {(b"1", b"0")}


def test_charged_message_that_succeeds_leaves_no_counters(harness: Harness, life: Life):
    harness.pending("1-0", "2-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, "m:1-0:c", "1", "m:1-0:last", "{}")
    life.run(life.worker("t1", max_messages=2), lambda _message: None)
    state = harness.state()
    assert state["stream"].groups == {"hits": ("2-0", {})}
    assert "attempts" not in state


def test_crashes_before_and_after_a_retry_are_counted_together(harness: Harness, life: Life):
    harness.pending("1-0")
    harness.own("t1")
    context = '{"what": "signal SIGKILL", "signal": "SIGKILL"}'
    runs = []

    def fail(message: Message) -> None:
        runs.append(message.id)
        raise Retry(after=0)

    harness.do("HSET", harness.attempts, "m:1-0:c", "1", "m:1-0:last", context)
    life.run(life.worker("t1", max_messages=1, max_crashes=2), fail)
    assert runs == ["1-0"]

    harness.expect(
        "message_promote", "OK", messages.promote_retries(harness.keys, harness.assignment, 10)
    )
    (again,) = harness.fetch(stream=harness.retry)
    assert harness.state()["retry"].entries[again.decode()]["crashCount"] == b"1"
    harness.do("HSET", harness.attempts, b"r:%s:c" % again, "1", b"r:%s:last" % again, context)
    harness.add("2-0")
    life.run(life.worker("t1", max_messages=1, max_crashes=2), fail)
    assert runs == ["1-0", "2-0"], "it was buried before it could run again"
    (letter,) = harness.state()["dlq"].entries.values()
    assert (letter["reason"], letter["crashes"]) == (b"crashes", b"2")


# --- limits ---------------------------------------------------------------------------------------


def test_soft_limit_interrupts_only_its_own_run(harness: Harness, life: Life, slot: WorkerSlot):
    harness.groups()
    harness.own("t1")
    for number in range(1, 4):
        harness.add(f"{number}-0")
    interrupted = []

    def work(message: Message) -> None:
        # The supervisor decides that this run exceeds its limit. For the last run, the decision
        # comes too late.
        slot.soft_kill_seq = slot.run_seq - (message.id == "3-0")
        if message.id != "2-0":
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            except SoftTimeout:
                interrupted.append(message.id)
                raise

    worker = life.worker("t1", max_messages=3, timeout=1.0)
    ack = worker.settler.ack

    def interrupted_ack(*arguments: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # the signal arrives when the handler has returned
        ack(*arguments, **named)

    worker.settler.ack = interrupted_ack  # type: ignore[method-assign]
    assert life.run(worker, work) == ExitCode.RECYCLE
    assert interrupted == ["1-0"]
    assert slot.counter("timeouts") == 1
    assert list(harness.state()["items"]) == ["m:1-0"]
    assert harness.state()["stream"].groups == {"hits": ("3-0", {})}


# --- full memory ----------------------------------------------------------------------------------


def test_full_memory_defers_failures_but_not_acknowledgments(harness: Harness, slot: WorkerSlot):
    """With full memory, failures wait, but acknowledgments do not.

    A worker that waited for memory before it acknowledges would never free any.
    """
    failed, done = harness.pending("1-0", "2-0")
    harness.own("t1")
    settler = Settler(harness.link, harness.keys, harness.leased("t1"), slot)
    slot.post_batch([failed, done])
    settler.fail(FailedEntry(failed, 0, 3600.0, {b"retryCount": b"1"}, [], 0), 1)
    settler.ack(b"2-0", retried=False, index=1, has_counters=False, now=1)

    with harness.full_memory():
        settler.flush()

    assert settler.deferred_places == [failed]
    assert slot.counter("deferred") == 1
    assert harness.state()["stream"].groups == {"hits": ("2-0", {"1-0": "w"})}
    settler.begin_batch([])
    assert slot.states[0] == FAILED

    settler._deferred_until_ns = 1  # makes it due now
    settler.flush()
    assert settler.unsettled_count == 0
    assert slot.states[0] == CLEARED
    assert list(harness.state()["delayed"]) == ["m:1-0"]


# --- groups ---------------------------------------------------------------------------------------


LATEST = Settings(
    topics={ASSIGNMENT.topic: Topic(partitions=1)},
    consumers=(
        Consumer(topic=ASSIGNMENT.topic, group=ASSIGNMENT.group, handler="h:go", start="latest"),
    ),
)


def test_recreated_latest_group_starts_at_the_oldest_entry(harness: Harness):
    """A recreated group starts at the oldest entry.

    A new group skips existing entries, but a group that is lost later must skip none.
    """
    harness.add("1-0")
    startup.ensure_topics(harness.link, LATEST)
    harness.add("2-0")
    assert harness.fetch() == [b"2-0"]

    harness.do("XGROUP", "DESTROY", harness.stream, ASSIGNMENT.group)
    startup.ensure_topics(harness.link, LATEST)
    assert harness.fetch() == [b"1-0", b"2-0"]


@pytest.mark.fault("F15")
def test_group_on_an_emptied_server_starts_at_the_oldest_entry(harness: Harness):
    """A group on an emptied server starts at its oldest entry.

    The server has no record of the group, but its consumer has.
    """
    startup.ensure_topics(harness.link, LATEST)
    harness.do("FLUSHALL")
    harness.add("1-0")
    startup.ensure_topics(harness.link, LATEST, emptied=True)
    assert harness.fetch() == [b"1-0"]


# --- the daemon -----------------------------------------------------------------------------------


@pytest.fixture
def start_daemon() -> Iterator[Callable[[support.Daemon], support.Daemon]]:
    """Start daemons, and stop them after the test."""
    made: list[support.Daemon] = []

    def start(daemon: support.Daemon) -> support.Daemon:
        made.append(daemon)
        daemon.start()
        daemon.wait_event("daemon.ready")
        return daemon

    yield start
    for daemon in made:
        daemon.close()


def test_embedded_server_runs_until_the_end_of_a_drain(
    state_dir: Path, start_daemon: Callable[[support.Daemon], support.Daemon]
):
    daemon = support.Daemon(
        state_dir,
        f"unix://{state_dir}/redis.sock",
        daemon={"state_dir": str(state_dir), "drain_timeout": "3s"},
    )
    daemon.write_config(redis={"url": "embedded:"})
    start_daemon(daemon)
    (uid,) = daemon.send(["await go"])
    daemon.wait_run(uid)

    daemon.signal(signal.SIGTERM)
    daemon.wait_event("drain.started")
    (state_dir / "go").touch()

    assert daemon.wait() == 0
    assert daemon.ledger.finished_uids(support.GROUP) == {uid}
    names = [event["event"] for event in daemon.events()]
    assert not {"redis.lost", "embedded.exited"} & {*names}
    assert names.index("lease.released") < names.index("embedded.stopped")


def test_reload_hands_over_when_the_old_worker_is_idle(
    server: Server,
    link: Connection,
    tmp_path: Path,
    start_daemon: Callable[[support.Daemon], support.Daemon],
):
    daemon = start_daemon(support.Daemon(tmp_path, server.url))
    slow, other = daemon.send(["await go", "ok"])
    daemon.wait_run(slow)
    old, epochs, mark = daemon.pids()[0], daemon.epochs(), daemon.mark()

    daemon.signal(signal.SIGHUP)
    daemon.wait_event("standby.ready")
    for _ in range(4):  # each answer takes another tick, and each tick could hand over too early
        ticks = daemon.mark()
        daemon.signal(signal.SIGUSR1)
        daemon.wait_event("state.dumped", after=ticks)
    assert daemon.events("worker.handed_over", after=mark) == []
    assert daemon.epochs() == epochs

    (tmp_path / "go").touch()
    daemon.wait_event("reload.finished")
    daemon.wait_run(other, "end")
    assert daemon.pids()[0] != old
    assert [len(daemon.ledger.records_for(uid, "start")) for uid in (slow, other)] == [1, 1]
