"""A daemon takes over pending entries of other clients, but not its own running entries."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable

import pytest

from streamqd.model import Assignment
from streamqd.store import messages
from streamqd.store.client import Connection
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.servers import free_port

NewDaemon = Callable[..., Daemon]

IDLE = {"reclaim_idle": "1s"}  # checks every second
ASSIGNMENT = Assignment(TOPIC, 0, GROUP)


def create_topic_and_group(daemon: Daemon) -> str:
    """Create the topic and its group without the daemon. Return the partition's key."""
    daemon.send([])
    daemon.link.run(messages.ensure_group(daemon.keys, ASSIGNMENT, "0"))
    return daemon.keys.stream(TOPIC, 0)


def read_as(link: Connection, consumer: str, stream: str, count: int) -> list[str]:
    """Read as the given consumer of the group. Return the entry IDs."""
    got = link.execute(
        "XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "STREAMS", stream, ">"
    )
    return [entry[0].decode() for entry in got[0][1]] if got else []


def pending(daemon: Daemon, stream: str) -> list[tuple[str, str, int, int]]:
    """Return the ID, consumer, idle milliseconds and deliveries of each pending entry."""
    rows = daemon.link.execute("XPENDING", stream, GROUP, "-", "+", 100)
    return [(row[0].decode(), row[1].decode(), row[2], row[3]) for row in rows]


def wait_idle(daemon: Daemon, stream: str, entry: str, seconds: float) -> None:
    """Wait until a pending entry has been idle for `seconds`."""

    def idle() -> bool:
        (found,) = [row for row in pending(daemon, stream) if row[0] == entry]
        return found[2] >= seconds * 1000

    daemon.wait_for(idle, what=f"{entry} is idle for {seconds} s", every=0.05)


def counters(port: int) -> dict[str, int]:
    """Return the counters of the daemon's only assignment."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10.0) as answer:
        (assignment,) = json.load(answer)["assignments"]
    return assignment["counters"]


def test_entries_of_other_clients_are_claimed_and_handled(new_daemon: NewDaemon):
    port = free_port()
    daemon = new_daemon(consumer=IDLE, http=f"127.0.0.1:{port}")
    stream = create_topic_and_group(daemon)
    uids = daemon.send(["ok"] * 30)
    assert len(read_as(daemon.link, "legacy-1", stream, 12)) == 12
    assert len(read_as(daemon.link, "legacy-2", stream, 8)) == 8
    retry = daemon.keys.retry_stream(*ASSIGNMENT)
    entry = daemon.link.execute("XADD", retry, "*", "payload", "ok", "originalId", "5-1")
    assert read_as(daemon.link, "legacy-1", retry, 1) == [entry.decode()]
    with daemon:
        daemon.wait_event("reclaim.requested")
        uids += daemon.send(["ok"])  # the worker checks the flag when it wakes up
        for uid in [*uids, f"{TOPIC}/0/5-1"]:
            daemon.wait_run(uid, "end")
        daemon.wait_settled()
        assert daemon.events("entries.reclaimed")
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.repeated) == ([], {})
        assert audit.unexpected == [f"{TOPIC}/0/5-1"]
        for key in (stream, retry):
            assert daemon.link.execute("XPENDING", key, GROUP)[0] == 0
        found = counters(port)
        assert (found["reclaimed"], found["missing_entries"]) == (21, 0)


def check_every_second(new_daemon: NewDaemon) -> Daemon:
    """Configure a daemon that checks every second, but takes over only after a minute idle."""
    daemon = new_daemon(groups=[GROUP, "other"])
    patient, hasty = daemon.tables["consumers"]
    patient |= {"reclaim_idle": "60s"}
    hasty |= IDLE
    daemon.write_config()
    return daemon


def test_entry_below_reclaim_idle_stays_with_its_consumer(new_daemon: NewDaemon):
    daemon = check_every_second(new_daemon)
    stream = create_topic_and_group(daemon)
    daemon.send(["ok"])
    (entry,) = read_as(daemon.link, "legacy", stream, 1)
    with daemon:
        (uid,) = daemon.send(["ok"])
        wait_idle(daemon, stream, entry, 3.2)
        daemon.wait_run(uid, "end", count=2)
        assert daemon.events("reclaim.requested") == []
        assert [row[:2] for row in pending(daemon, stream)] == [(entry, "legacy")]


def test_running_entry_is_never_reclaimed(new_daemon: NewDaemon):
    """A running entry is never reclaimed.

    An automatic claim would take it, because it counts as idle.
    """
    daemon = new_daemon(consumer=IDLE)
    stream = create_topic_and_group(daemon)
    with daemon:
        (uid,) = daemon.send(["await done"])
        daemon.wait_run(uid)
        foreign = daemon.send(["ok"] * 3)
        # The worker may have read some entries already. Another client reads the others.
        left = len(read_as(daemon.link, "legacy", stream, 3))
        daemon.wait_event("reclaim.requested")
        entry = uid.rpartition("/")[2]
        wait_idle(daemon, stream, entry, 3.2)  # the housekeeper checks every second

        (ours,) = [row for row in pending(daemon, stream) if row[0] == entry]
        assert (ours[1], ours[3]) == ("w", 1), "delivered once, and still ours"
        assert len(daemon.ledger.records_for(uid, "start")) == 1

        (daemon.folder / "done").touch()
        for each in foreign:
            daemon.wait_run(each, "end")
        daemon.wait_settled()
        assert left == 3
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


@pytest.mark.fault("F25")
@pytest.mark.parametrize("consumer", ["w", "legacy"])
def test_trimmed_pending_entries_are_acknowledged_and_counted(new_daemon: NewDaemon, consumer: str):
    """Pending entries that were trimmed are acknowledged and counted.

    They cannot be handled, and must not stay pending.
    """
    port = free_port()
    daemon = new_daemon(consumer=IDLE, http=f"127.0.0.1:{port}")
    stream = create_topic_and_group(daemon)
    daemon.send(["ok"] * 5)
    assert len(read_as(daemon.link, consumer, stream, 5)) == 5
    daemon.link.execute("XTRIM", stream, "MAXLEN", 0)
    assert daemon.link.execute("XPENDING", stream, GROUP)[0] == 5
    with daemon:
        if consumer == "legacy":
            daemon.wait_event("reclaim.requested")
        (uid,) = daemon.send(["ok"])
        daemon.wait_run(uid, "end")
        daemon.wait_settled()
        found = counters(port)
        assert (found["missing_entries"], found["reclaimed"]) == (5, 0)
        assert [each.uid for each in daemon.ledger.records("start")] == [uid]
        assert daemon.events("worker.crashed") == []


def test_idle_worker_is_woken_to_reclaim_an_entry(new_daemon: NewDaemon):
    """An idle worker is woken to reclaim an entry. To leave its poll, it reconnects.

    A poll may happen to time out at that moment, but not twice.
    """
    daemon = check_every_second(new_daemon)
    stream = create_topic_and_group(daemon)
    with daemon:
        woken = 0
        for _ in range(2):
            daemon.pause()
            # The server keeps reading for the poll until it notices that the connection is closed.
            daemon.wait_for(lambda: not daemon.long_poll(), what="the poll is left")
            (uid,) = daemon.send(["ok"])
            (entry,) = read_as(daemon.link, "legacy", stream, 1)
            daemon.signal(signal.SIGCONT)
            before = daemon.wait_for(daemon.long_poll, what="it waits for messages")
            # Make the entry idle for long enough only now, because the worker has to be waiting
            # first.
            daemon.link.execute(
                *("XCLAIM", stream, GROUP, "legacy", 0, entry, "IDLE", 100_000, "JUSTID")
            )
            daemon.wait_run(uid, "end", count=2)
            daemon.wait_settled()
            woken += daemon.wait_for(daemon.long_poll, what="it waits again") != before
        assert woken
        assert daemon.stop() == 0
