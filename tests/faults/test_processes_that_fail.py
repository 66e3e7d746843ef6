"""Lost hosts, signals at the worst moment, grandchildren, full logs, giant messages."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamqd.model import Assignment
from tests.acceptance.test_redis_faults import wait_progress
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.servers import ProcessServer

Make = Callable[..., Daemon]
NewDaemon = Callable[..., Daemon]
TTL = 2.0


# --- a host ---------------------------------------------------------------------------------------


@pytest.mark.fault("F7")
def test_other_host_continues_after_a_host_and_server_loss(make: Make, fresh_server: ProcessServer):
    """After a loss of host and server, another host runs inherited entries alone, under marks."""
    settings = {"lease_ttl": f"{TTL}s"}
    lost = make(name="lost", partitions=2, daemon=settings)
    heir = make(name="heir", partitions=2, daemon={**settings, "state_dir": "elsewhere"})
    with lost:
        uids = lost.send("sleep 0.003" for _ in range(800))
        (running,) = lost.send(["await go"], partition=0)
        wait_progress(lost, 200)
        for each in lost.session():
            each.kill()
        fresh_server.kill()
        lost.wait_gone(5.0)
        killed_at = time.monotonic()
        begun = {each.uid for each in lost.ledger.records("start")}
        ended = lost.ledger.finished_uids(GROUP)
        first = lost.ledger.count("start")
        fresh_server.restart()
        heir.start()
        for number in range(2):
            heir.wait_event("lease.acquired", partition=number, inherited=True, timeout=20.0)
        (heir.folder / "go").touch()
        heir.wait_for(lambda: heir.ledger.count("start") > first, what="the heir is at work")
        took = heir.ledger.records("start")[first].at - killed_at
        print(f"at work again after {took:.2f} s with the start of both, ttl {TTL} s")
        heir.wait_settled(40.0)

        audit = heir.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert audit.repeated.keys() <= begun
        assert set(audit.repeated.values()) <= {2}
        last = {each.uid: each.at for each in heir.ledger.records("end") if each.at < killed_at}
        early = [u for u in audit.repeated if u in ended and killed_at - last[u] > 0.5]
        assert early == [], "acknowledged, and run again"
        assert {running, *uids} == heir.ledger.finished_uids(GROUP)
        for number in range(2):
            fence = heir.keys.fence(*Assignment(TOPIC, number, GROUP))
            assert heir.link.execute("HMGET", fence, "quarantine", "mark") == [None, None]
        assert heir.letters() == []
        assert heir.stop() == 0


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.fault("F31", "F33")
def test_stop_during_forks_leaves_no_process_and_no_lease(
    new_daemon: NewDaemon, chance: random.Random
):
    """A stop signal that arrives during forks leaves no worker process behind, as `wait` checks."""
    daemon = new_daemon(partitions=6)
    for count in (1, 2, 3, 4, 5, 6):
        mark = daemon.mark()
        daemon.start()
        daemon.wait_for(
            lambda mark=mark, count=count: len(daemon.events("worker.started", mark)) >= count,
            what=f"{count} workers are forked",
            every=0.0005,
        )
        for number in chance.sample([signal.SIGUSR1, signal.SIGCHLD, signal.SIGCONT], 3):
            daemon.signal(number)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(20.0) == 0
        assert not any(
            daemon.link.execute("EXISTS", daemon.keys.lease(*assignment))
            for assignment in daemon.assignments()
        )
    assert daemon.traces() == []


@pytest.mark.fault("F31", "F33")
def test_recycling_during_many_signals_keeps_every_message(
    new_daemon: NewDaemon, chance: random.Random
):
    """No message is lost while processes are replaced often and signals arrive every few ms."""
    daemon = new_daemon(partitions=2, consumer={"max_messages": 5})
    with daemon:
        connection = client_ids(daemon, "streamqd:supervisor")
        daemon.send(["ok"] * 150)
        sent: Counter[str] = Counter()
        while daemon.unsettled():
            number = chance.choice([signal.SIGUSR1, signal.SIGCHLD, signal.SIGCONT])
            daemon.signal(number)
            sent[number.name] += 1
        print(dict(sent), "workers:", len(daemon.events("worker.started")))
        assert daemon.ledger.audit(GROUP) == Audit()
        assert len(daemon.events("worker.started")) >= 10
        # No child has closed or used its parent's connection.
        assert client_ids(daemon, "streamqd:supervisor") == connection
        assert daemon.events("worker.crashed") == daemon.events("redis.lost") == []
        for pid in daemon.pids().values():
            assert len(sockets(pid)) <= 3, "one to Redis, its control, no parent's"
        daemon.wait_for(lambda: not zombies(daemon), what="all exited children are reaped")
        assert daemon.stop() == 0


def zombies(daemon: Daemon) -> list[int]:
    """Return the exited children that the supervisor has not reaped yet."""
    every = psutil.process_iter(["pid", "ppid", "status"])
    ended = (each.info for each in every if each.info["status"] == psutil.STATUS_ZOMBIE)
    return [info["pid"] for info in ended if info["ppid"] == daemon.pid]


def client_ids(daemon: Daemon, name: str) -> set[str]:
    """Return the ids that the server gave to connections with a name."""
    rows = daemon.link.execute("CLIENT", "LIST").decode().splitlines()
    return {row.split()[0] for row in rows if f"name={name} " in row}


def sockets(pid: int) -> list[str]:
    """Return the open sockets of a process."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        target = each.readlink() if each.is_symlink() else each
        if str(target).startswith("socket:"):
            found.append(str(target))
    return found


# --- processes of handlers ------------------------------------------------------------------------

RUNAWAY = """
import subprocess
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()

def obey(message: Message) -> None:
    with ledger.run(message):
        if message.text() == "daemonise":
            shell = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
            done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
            ledger.note(message, done.stdout.strip())
"""


@pytest.mark.fault("F37")
def test_process_outside_its_group_is_adopted_and_reaped(new_daemon: NewDaemon):
    daemon = new_daemon(code=RUNAWAY)
    with daemon:
        (uid,) = daemon.send(["daemonise"])
        daemon.wait_run(uid, "end")
        runaway = psutil.Process(int(daemon.ledger.records_for(uid, "note")[0].text))
        try:
            daemon.wait_for(lambda: os.getsid(runaway.pid) == runaway.pid, what="it has left")
            os.kill(daemon.pids()[0], signal.SIGKILL)
            daemon.wait_event("worker.crashed")
            daemon.wait_for(lambda: runaway.ppid() == daemon.pid, what="it is adopted")
        finally:
            runaway.kill()
        daemon.wait_for(lambda: not runaway.is_running(), what="it was collected", timeout=5.0)
        daemon.send(["ok"])
        daemon.wait_settled()
        assert daemon.running, "the supervisor has not hit itself"
        assert daemon.stop() == 0


# --- logs and giants ------------------------------------------------------------------------------


@pytest.mark.fault("F34")
def test_daemon_with_its_log_on_a_full_disk_keeps_working(
    server: ProcessServer, link: object, tmp_path: Path
):
    consumer = {"max_attempts": 2, "backoff": {"kind": "fixed", "base": "10ms"}}
    daemon = Daemon(tmp_path, server.url, daemon={"lease_ttl": "1s"}, consumer=consumer)
    try:
        with Path("/dev/full").open("wb") as full:
            daemon.launch(full, full)
        daemon.wait_for(daemon.pids, what="the worker is there")
        epochs, began = daemon.epochs(), time.monotonic()
        while time.monotonic() - began < 2.5:
            daemon.send(["ok", "fail", "dead"])
            daemon.wait_settled(5.0)
        assert daemon.epochs() == epochs
        assert len(daemon.letters()) * 3 == 2 * daemon.ledger.count("sent")
        assert daemon.stop() == 0
    finally:
        daemon.close()


GIANT = 48 << 20


@pytest.mark.fault("F30")
def test_giant_messages_run_one_by_one_without_a_lost_lease(new_daemon: NewDaemon):
    """Giant messages, written by hand because our producers reject them, run one at a time."""
    daemon = new_daemon(
        daemon={"lease_ttl": "2s", "max_message_bytes": "64MiB"},
        code="""
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()

def obey(message: Message) -> None:
    with ledger.run(message, str(len(message.payload))):
        pass
""",
    )
    with daemon:
        daemon.send(["ok"] * 300)
        daemon.wait_settled()
        small = psutil.Process(daemon.pids()[0]).memory_info().rss
        for _ in range(4):
            daemon.link.execute("XADD", daemon.keys.stream(TOPIC, 0), "*", "payload", b"x" * GIANT)
        most = 0

        def settled() -> bool:
            nonlocal most
            most = max(most, psutil.Process(daemon.pids()[0]).memory_info().rss)
            return daemon.unsettled() == 0

        daemon.wait_for(settled, what="the giants are handled", timeout=60.0)
        giants = [each for each in daemon.ledger.records("end") if each.text == str(GIANT)]
        assert len({each.uid for each in giants}) == len(giants) == 4
        print(f"{(most - small) >> 20} MiB more for messages of {GIANT >> 20} MiB")
        assert daemon.events("lease.lost") == daemon.events("lease.renewed_late") == []
        assert daemon.events("worker.crashed") == []
        assert daemon.stop() == 0
