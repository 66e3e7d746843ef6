"""The daemon recovers after Redis pauses, dies, loses data, is full or drops replies."""

from __future__ import annotations

import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamqd.store.client import Connection
from tests.support.daemon import GROUP, TOPIC, Daemon, daemons
from tests.support.ledger import Audit
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer, free_port

Make = Callable[..., Daemon]


@pytest.fixture
def make(fresh_server: ProcessServer, tmp_path: Path) -> Iterator[Make]:
    """Configure daemons on a server for this test alone, with an append-only file."""
    with daemons(tmp_path, fresh_server.url) as make:
        yield make


def wait_progress(daemon: Daemon, count: int = 1) -> None:
    """Wait until `count` more messages are handled."""
    before = daemon.ledger.count("end")
    daemon.wait_for(
        lambda: daemon.ledger.count("end") >= before + count,
        what=f"{count} more messages are handled",
        every=0.002,
    )


def stat(link: Connection, section: str, name: str) -> int:
    """Return a number from a section of the server's INFO."""
    told = link.execute("INFO", section).decode().splitlines()
    (line,) = [line for line in told if line.startswith(f"{name}:")]
    return int(line.partition(":")[2].removeprefix("calls=").partition(",")[0])


def wait_clock(daemon: Daemon, since: float, seconds: float) -> None:
    """Wait until `seconds` have passed since `since` (monotonic)."""
    daemon.wait_for(
        lambda: time.monotonic() - since >= seconds, what=f"{seconds} s are over", every=0.02
    )


def wait_counted(daemon: Daemon, port: int) -> None:
    """Wait until the metric equals the number of logged `group.restored` events."""

    def counted() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith("streamqd_groups_restored_total{")]
        return float(line.split()[-1]) == len(daemon.events("group.restored"))

    daemon.wait_for(counted, what="the metric counts what was told")


@contextmanager
def run_pair(make: Make, ttl: float, partitions: int = 4) -> Iterator[tuple[Daemon, Daemon]]:
    """Run two instances that share the partitions and rebalance without delay."""
    settings = {"lease_ttl": f"{ttl}s", "rebalance_delay": "0s", "rebalance_hold": "0s"}
    first, second = (make(name=name, partitions=partitions, daemon=settings) for name in "ab")
    with first, second:
        first.wait_for(
            lambda: len(first.pids()) == len(second.pids()) == partitions // 2,
            what="as many partitions each",
            timeout=60.0,
        )
        yield first, second


# --- pauses and crashes ---------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.fault("F9")
def test_server_pause_of_three_ttls_moves_no_partition(make: Make, fresh_server: ProcessServer):
    """No partition moves, although every lease has expired and every heartbeat is too old."""
    ttl = 1.0
    with run_pair(make, ttl) as (first, second):
        epochs, expired = first.epochs(), stat(first.link, "stats", "expired_keys")
        first.send("sleep 0.005" for _ in range(1200))
        wait_progress(first, 100)
        marks = pause_server(fresh_server, 3 * ttl, first, second)
        first.wait_settled(40.0)

        assert first.epochs() == epochs
        assert stat(first.link, "stats", "expired_keys") >= expired + 4, "the leases had expired"
        assert_nothing_moved(marks)
        assert first.ledger.audit(GROUP) == Audit()


def pause_server(server: ProcessServer, seconds: float, *daemons: Daemon) -> dict[Daemon, int]:
    """Pause the server until every daemon has noticed it, and wait until all have reconnected.

    Return a log mark per daemon from before the pause.
    """
    marks = {daemon: daemon.mark() for daemon in daemons}
    server.pause()
    paused_at = time.monotonic()
    for daemon, mark in marks.items():
        daemon.wait_event("redis.lost", after=mark, role="supervisor")
    wait_clock(daemons[0], paused_at, seconds)
    server.resume()
    for daemon, mark in marks.items():
        daemon.wait_event("redis.recovered", after=mark, role="supervisor")
    return marks


def assert_nothing_moved(marks: dict[Daemon, int]) -> None:
    """Check that since then no lease has moved, no worker has exited, and every lease is held."""
    for daemon, mark in marks.items():
        for name in ("lease.acquired", "lease.lost", "lease.released", "worker.exited"):
            assert daemon.events(name, mark) == []
        for assignment in daemon.assignments():
            lease, fence = daemon.keys.lease(*assignment), daemon.keys.fence(*assignment)
            held = daemon.link.pipeline([("GET", lease), ("HGET", fence, "token")])
            assert held[0] == held[1] is not None


@pytest.mark.promise
@pytest.mark.fault("F9")
def test_server_killed_and_restarted_loses_nothing(
    make: Make, fresh_server: ProcessServer, chance: random.Random
):
    """A server that is killed and restarted loses nothing.

    The last outage lasts until every lease has expired and every heartbeat is overdue.
    """
    ttl = 3.0
    with run_pair(make, ttl) as (first, second):
        start = {first: first.mark(), second: second.mark()}
        workers, epochs = [first.pids(), second.pids()], first.epochs()
        first.send("sleep 0.004" for _ in range(2400))
        for down in (0.0, 0.0, 1.1 * ttl):
            wait_progress(first, chance.randrange(50, 150))
            marks, killed_at = {one: one.mark() for one in start}, time.monotonic()
            fresh_server.kill()
            for one, mark in marks.items():
                one.wait_event("redis.lost", after=mark, role="supervisor")
            wait_clock(first, killed_at, down)
            fresh_server.restart()
            for one, mark in marks.items():
                one.wait_event("redis.recovered", after=mark, role="supervisor")
        for one, mark in marks.items():
            for number in one.pids():
                one.wait_event("lease.renewed_late", after=mark, partition=number)
        assert first.unsettled() > 0, "the load was too small"
        first.wait_settled(40.0)

        # Every write that was answered was on disk, and commands without an answer were sent again.
        assert first.ledger.audit(GROUP) == Audit()
        assert [first.pids(), second.pids()] == workers, "no process of ours had to end"
        assert first.epochs() == epochs
        assert_nothing_moved(start)
        assert first.stop() == second.stop() == 0


def test_paused_server_delays_neither_reaping_nor_a_stop(make: Make, fresh_server: ProcessServer):
    with make(partitions=2, daemon={"drain_timeout": "2s"}) as daemon:
        daemon.send(["ok"] * 10)
        daemon.wait_settled()
        victim = daemon.pids()[0]
        fresh_server.pause()
        os.kill(victim, signal.SIGKILL)
        crashed = daemon.wait_event("worker.crashed", timeout=5.0)
        assert crashed["child"] == victim
        assert daemon.stop(10.0) == 6, "the leases could not be released"
        fresh_server.resume()
        (uid,) = daemon.send(["ok"], partition=0)
        daemon.start()
        daemon.wait_run(uid, "end", timeout=10.0)  # seconds; the lease lasts 60
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


# --- lost data ------------------------------------------------------------------------------------


@pytest.mark.fault("F20")
def test_scripts_flushed_under_load_are_loaded_again(make: Make):
    with make(partitions=2, consumer={"backoff": {"base": "10ms"}}) as daemon:
        uids = daemon.send("fail" if number % 20 == 7 else "ok" for number in range(2000))
        flushes = 0
        while daemon.unsettled():
            daemon.link.execute("SCRIPT", "FLUSH")
            flushes += 1
        print(f"{flushes} times")
        assert flushes > 20
        failing = {uid for number, uid in enumerate(uids) if number % 20 == 7}
        audit = daemon.ledger.audit(GROUP)
        assert set(audit.lost) == failing == {letter["uid"] for letter in daemon.letters()}
        assert audit.repeated == dict.fromkeys(sorted(failing), 5)
        assert daemon.events("worker.crashed") == []


@pytest.mark.fault("F15")
def test_emptied_server_is_initialized_again(make: Make):
    port = free_port()
    with make(partitions=4, http=f"127.0.0.1:{port}") as daemon:
        assert daemon.events("group.restored") == [], "new ones are no news"
        wait_counted(daemon, port)
        for _ in range(3):
            epochs, mark = daemon.epochs(), daemon.mark()
            daemon.send("sleep 0.003" for _ in range(600))
            wait_progress(daemon, 30)
            daemon.link.execute("FLUSHALL")
            for number in range(4):
                daemon.wait_event("worker.ready", after=mark, partition=number)
            fresh = daemon.send(["ok"] * 100)
            for uid in fresh:
                daemon.wait_run(uid, "end")
            daemon.wait_settled()

            assert all(daemon.epochs()[number] > epochs[number] for number in range(4))
            told = daemon.events("group.restored", mark, level="warning")
            assert {each["partition"] for each in told} == {0, 1, 2, 3}, "it is told loudly"
            assert daemon.events("worker.crashed") == []
            assert len(daemon.events("worker.started", mark)) <= 8, "a crash loop"
        wait_counted(daemon, port)
        assert all(len(daemon.ledger.records_for(uid, "start")) == 1 for uid in fresh)
        registered = daemon.link.execute("HGET", daemon.keys.meta(TOPIC), "partitionCount")
        assert registered == b"4"
        assert daemon.link.execute("SMEMBERS", daemon.keys.registry()) == [TOPIC.encode()]
        assert daemon.stop() == 0


@pytest.mark.fault("F26")
def test_destroyed_group_is_created_again(make: Make):
    """The owner restores a destroyed group from its own record, so nothing is repeated or lost."""
    with make(partitions=1, consumer={"max_attempts": 2}) as daemon:
        old = daemon.send(["ok"] * 20)
        daemon.wait_settled()
        ids = daemon.pids()
        for stream in (daemon.keys.stream(TOPIC, 0), daemon.keys.retry_stream(TOPIC, 0, GROUP)):
            mark = daemon.mark()
            assert daemon.link.execute("XGROUP", "DESTROY", stream, GROUP) == 1
            (uid,) = daemon.send(["ok"])  # wakes the worker, which finds its group missing
            daemon.wait_run(uid, "end")
            daemon.wait_event("group.restored", after=mark)
            daemon.wait_settled()
        assert daemon.pids() == ids, "the same process goes on"
        assert daemon.events("worker.crashed") == []
        assert all(len(daemon.ledger.records_for(uid, "start")) == 1 for uid in old)


@pytest.mark.parametrize("lanes", [1, 4])
def test_group_destroyed_under_load_repeats_no_message(make: Make, lanes: int):
    """Failures are retried, fetched messages are handled, and all others run exactly once."""
    backoff = {"kind": "fixed", "base": "10ms"}
    concurrent = {} if lanes == 1 else {"concurrency": lanes}
    with make(consumer={"max_attempts": 2, "backoff": backoff, **concurrent}) as daemon:
        pause = 0.004 * lanes
        payloads = ["fail" if n % 20 == 7 else f"sleep {pause}" for n in range(500)]
        uids = daemon.send(payloads)
        for times in (1, 2):
            wait_progress(daemon, 50)
            assert daemon.link.execute("XGROUP", "DESTROY", daemon.keys.stream(TOPIC, 0), GROUP)
            daemon.wait_for(
                lambda times=times: len(daemon.events("group.restored")) >= times,
                what="the group is there again",
            )
        daemon.wait_settled()
        starts = {uid: len(daemon.ledger.records_for(uid, "start")) for uid in uids}
        fails = {uid for uid, payload in zip(uids, payloads, strict=True) if payload == "fail"}
        assert min(starts.values()) >= 1, "lost"
        assert {starts[uid] for uid in fails} == {2}
        repeated = [uid for uid, count in starts.items() if count > 1 and uid not in fails]
        assert repeated == []


@pytest.mark.fault("F26")
def test_reload_recreates_and_counts_a_missing_group(make: Make):
    port = free_port()
    with make(partitions=2, http=f"127.0.0.1:{port}") as daemon:
        daemon.send(["ok"] * 10)
        daemon.wait_settled()
        for number in range(2):
            stream = daemon.keys.stream(TOPIC, number)
            assert daemon.link.execute("XGROUP", "DESTROY", stream, GROUP) == 1
        mark = daemon.mark()
        daemon.signal(signal.SIGHUP)
        daemon.wait_event("reload.finished", after=mark)
        told = daemon.events("group.restored")
        assert sorted(each["partition"] for each in told) == [0, 1]
        wait_counted(daemon, port)


@pytest.mark.fault("F26")
@pytest.mark.parametrize("which", [("main",), ("retry",), ("main", "retry")], ids="-".join)
def test_group_destroyed_repeatedly_under_load_loses_nothing(make: Make, which: tuple[str, ...]):
    """The group disappears while the worker reads, settles and retries.

    The remaining messages are found again.
    """
    backoff = {"kind": "fixed", "base": "10ms"}
    with make(consumer={"max_attempts": 2, "backoff": backoff}) as daemon:
        streams = {
            "main": daemon.keys.stream(TOPIC, 0),
            "retry": daemon.keys.retry_stream(TOPIC, 0, GROUP),
        }
        payloads = ["fail" if number % 20 == 7 else "sleep 0.002" for number in range(400)]
        uids = daemon.send(payloads)
        for _ in range(2):
            wait_progress(daemon, 50)
            for name in which:
                assert daemon.link.execute("XGROUP", "DESTROY", streams[name], GROUP) == 1
            daemon.wait_for(
                lambda: all(
                    daemon.link.execute("XINFO", "GROUPS", key) for key in streams.values()
                ),
                what="both groups are there again",
            )
        (last,) = daemon.send(["ok"])
        daemon.wait_run(last, "end")
        daemon.wait_settled(40.0)

        failing = {uid for uid, payload in zip(uids, payloads, strict=True) if payload == "fail"}
        assert set(daemon.ledger.audit(GROUP).lost) == failing
        assert {letter["uid"] for letter in daemon.letters()} == failing
        assert daemon.events("worker.crashed") == []
        assert len(daemon.events("worker.started")) <= 1 + 2 * 3, "a crash loop"
        assert daemon.stop() == 0


# --- cut connections ------------------------------------------------------------------------------


@pytest.mark.fault("F13")
def test_connections_killed_repeatedly_lose_and_repeat_nothing(make: Make, chance: random.Random):
    with make(partitions=3, consumer={"backoff": {"base": "10ms"}, "max_attempts": 2}) as daemon:
        failing = {number for number in range(3000) if chance.random() < 0.02}
        uids = daemon.send(
            "fail" if number in failing else f"sleep {chance.uniform(0, 0.003):.4f}"
            for number in range(3000)
        )
        killed = 0
        for _ in range(25):
            wait_progress(daemon, chance.randrange(10, 60))
            for kind in ("normal", "pubsub"):  # every connection except the test's own
                killed += daemon.link.execute("CLIENT", "KILL", "TYPE", kind)
        assert daemon.unsettled() > 0, "the load was too small"
        daemon.wait_settled(40.0)

        print(f"connections killed: {killed}")
        assert killed >= 25
        dead = {uids[number] for number in failing}
        audit = daemon.ledger.audit(GROUP)
        assert set(audit.lost) == dead == {letter["uid"] for letter in daemon.letters()}
        assert audit.repeated == dict.fromkeys(sorted(dead), 2)
        assert daemon.events("worker.crashed") == daemon.events("lease.lost") == []


# --- a full server --------------------------------------------------------------------------------


@pytest.mark.fault("F21")
def test_full_memory_parks_failures_but_not_acknowledgments(make: Make):
    """When memory is full, failures that cannot be written wait.

    Other messages are still acknowledged, which frees memory.
    """
    with make(consumer={"backoff": {"base": "10ms"}, "max_attempts": 2}) as daemon:
        worker = daemon.pids()[0]
        daemon.send(["ok"])
        daemon.wait_settled()
        pause(daemon)
        payloads = ["fail" if number % 10 == 3 else "ok" for number in range(100)]
        uids = daemon.send(payloads)
        failing = [uid for uid, payload in zip(uids, payloads, strict=True) if payload == "fail"]
        daemon.link.execute("CONFIG", "SET", "maxmemory", "1")
        daemon.signal(signal.SIGCONT)

        daemon.wait_event("message.deferred")
        daemon.wait_for(
            lambda: len(daemon.ledger.finished_uids(GROUP)) == 91, what="the others are done"
        )
        daemon.wait_for(lambda: daemon.pending_uids() == set(failing), what="and acknowledged")
        rounds = stat(daemon.link, "commandstats", "cmdstat_exec")
        wait_clock(daemon, time.monotonic(), 1.5)
        rounds = stat(daemon.link, "commandstats", "cmdstat_exec") - rounds
        print(f"reads in 1.5 s while {len(failing)} are deferred: {rounds}")
        assert rounds < 30, "it spins"
        assert daemon.pids()[0] == worker

        daemon.link.execute("CONFIG", "SET", "maxmemory", "0")
        daemon.wait_settled()
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == sorted(failing)
        assert audit.repeated == dict.fromkeys(sorted(failing), 2), "deferred, not run again"
        assert {letter["uid"] for letter in daemon.letters()} == set(failing)
        assert daemon.events("lease.lost") == []


# --- lost replies ---------------------------------------------------------------------------------


@pytest.fixture
def proxied(make: Make, fresh_server: ProcessServer) -> Iterator[tuple[Daemon, FaultProxy]]:
    """A running daemon that connects through a proxy. The test itself connects directly."""
    with FaultProxy(fresh_server.socket_path) as proxy:
        daemon = make(consumer={"backoff": {"base": "10ms"}, "max_attempts": 2})
        daemon.send(["ok"])
        daemon.write_config(redis={"url": proxy.url})
        with daemon:
            daemon.wait_settled()
            yield daemon, proxy


@pytest.mark.fault("F12")
def test_replies_lost_at_random_lose_and_repeat_nothing(
    proxied: tuple[Daemon, FaultProxy], chance: random.Random
):
    daemon, proxy = proxied
    faults = (Fault.CUT_BEFORE, Fault.DROP_REPLY, Fault.CUT_REPLY)
    failing: list[str] = []
    triggers = []
    for turn in range(40):
        triggers.append(proxy.arm(chance.choice(faults), nth=chance.randrange(1, 30)))
        word = "fail" if turn % 4 == 0 else "ok"
        uids = daemon.send([word if number == 5 else "ok" for number in range(12)])
        failing += [uids[5]] if word == "fail" else []
        daemon.wait_settled()
    hits = sum(trigger.hit for trigger in triggers)
    print(f"faults that struck: {hits} of 40")
    assert hits > 20
    audit = daemon.ledger.audit(GROUP)
    assert audit.lost == sorted(failing)
    assert audit.repeated == dict.fromkeys(sorted(failing), 2)
    assert sorted(letter["uid"] for letter in daemon.letters()) == sorted(failing)
    assert daemon.events("worker.crashed") == daemon.events("lease.lost") == []


def pause(daemon: Daemon) -> None:
    """Pause the daemon, and wait until its idle worker has closed its connection."""
    process = psutil.Process(daemon.pids()[0])
    name, before = f"name=streamqd:{TOPIC}/0", process.num_fds()

    def has_left() -> bool:
        # As long as the proxy holds a request, it keeps the server side of the connection open.
        known = name in daemon.link.execute("CLIENT", "LIST").decode()
        return not known or process.num_fds() < before

    daemon.signal(signal.SIGTSTP)
    daemon.wait_for(has_left, what="the worker has left its read")


def count_reads(proxy: FaultProxy) -> list[bytes]:
    """Return the reads so far. An idle worker starts its read with XREAD, the long poll."""
    return [one[0] for one in proxy.commands if one[0] in (b"XREAD", b"XREADGROUP")]


def hold_a_read(daemon: Daemon, proxy: FaultProxy) -> Any:
    """Hold back a transaction of an idle worker, which is then waiting for the reply."""
    # One round is already at the server. The next one carries the acknowledgment, so the third one
    # is held.
    daemon.wait_for(lambda: count_reads(proxy)[-2:] == [b"XREAD", b"XREADGROUP"], what="it is idle")
    trigger = proxy.arm(Fault.HOLD_REQUEST, command="XREADGROUP", nth=2)
    (uid,) = daemon.send(["ok"])
    daemon.wait_run(uid, "end")
    trigger.wait()
    return trigger


@pytest.mark.fault("F12")
def test_read_executed_after_its_reader_exited_is_recovered(
    proxied: tuple[Daemon, FaultProxy],
):
    daemon, proxy = proxied
    held = hold_a_read(daemon, proxy)
    pause(daemon)
    (uid,) = daemon.send(["ok"])
    assert daemon.pending() == 0
    held.release()
    daemon.wait_for(lambda: daemon.pending() == 1, what="the late read has executed")
    assert daemon.ledger.records_for(uid, "start") == [], "nobody knows of it"
    daemon.signal(signal.SIGCONT)
    daemon.wait_run(uid, "end")
    daemon.wait_settled()
    assert daemon.ledger.audit(GROUP) == Audit()


@pytest.mark.fault("F12")
def test_read_executed_after_recovery_is_refused(
    proxied: tuple[Daemon, FaultProxy],
):
    """A read that arrives after the recovery is refused.

    Otherwise, its entries would stay pending, and no worker would list them.
    """
    daemon, proxy = proxied
    held = hold_a_read(daemon, proxy)
    pause(daemon)
    mark = len(proxy.commands)
    daemon.signal(signal.SIGCONT)
    daemon.wait_for(
        lambda: any(one[0] == b"XREAD" for one in proxy.commands[mark:]),
        what="the worker has listed what is pending, and waits again",
    )
    # The first message ends both long polls and keeps the worker busy, so the others stay unread.
    uids = daemon.send(["await go"])
    daemon.wait_run(uids[0])
    uids += daemon.send(["ok"] * 5)
    mark = len(proxy.commands)
    held.release()
    daemon.wait_for(
        lambda: any(one[0] == b"HGET" for one in proxy.commands[mark:]),
        what="the late read is with the server",
    )
    (daemon.folder / "go").touch()
    daemon.wait_settled(10.0)
    assert [each.uid for each in daemon.ledger.records("start")][-6:] == uids
    assert daemon.ledger.audit(GROUP) == Audit()
