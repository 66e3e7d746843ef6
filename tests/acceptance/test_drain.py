"""A stopping daemon finishes or releases its messages, whenever the signal arrives."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

STOPS = 20
GREEDY = {"prefetch_bytes": "256MiB"}  # large, so that it does not limit the first reads
IN_FLIGHT = 60  # messages out of about 160 that a worker fetches; a slow machine fetches fewer
DRAINED, DEADLINE = 0, 6
BACKLOG = 2000  # messages; too many to be handled before any of the stops


@pytest.mark.slow
@pytest.mark.fault("F31")
@pytest.mark.timeout(180)
def test_random_stops_lose_repeat_and_charge_nothing(new_daemon: NewDaemon, chance: random.Random):
    daemon = new_daemon(partitions=8, consumer=GREEDY)
    with daemon:
        uids: list[str] = []
        seen: list[int] = []
        in_flight, took = [], []
        for number in range(STOPS):
            wanted = BACKLOG - (daemon.unsettled() if number else 0)
            uids += daemon.send(f"sleep {chance.uniform(0, 0.05):.4f}" for _ in range(wanted))
            if number:
                daemon.start()
            moment = daemon.ledger.count("start") + 1 + chance.randrange(120)
            daemon.wait_for(
                lambda moment=moment: daemon.ledger.count("start") >= moment,
                what="messages run",
                every=0.001,
            )
            daemon.wait_for(
                lambda: seen.append(daemon.pending()) or seen[-1] >= IN_FLIGHT,
                what=f"{IN_FLIGHT} messages are in hand",
                every=0.001,
            )
            in_flight.append(seen[-1])
            stopped_at = time.monotonic()
            assert daemon.stop() == DRAINED
            took.append(time.monotonic() - stopped_at)
            # Every lease was released, so that a successor does not have to wait until it expires.
            assert not any(
                daemon.link.execute("EXISTS", daemon.keys.lease(*assignment))
                for assignment in daemon.assignments()
            )
        print(f"in hand at the signal: {min(in_flight)} to {max(in_flight)} messages")
        print(f"drain: {min(took) * 1000:.0f} to {max(took) * 1000:.0f} ms")
        left = daemon.unsettled()
        assert left > 0, "the load was too small: the last stops found nothing to do"

        # The test waits only for the released messages, because all the others would take too long.
        done = len(daemon.ledger.finished_uids(GROUP))
        released = daemon.pending_uids()
        daemon.start()
        daemon.wait_for(
            lambda: released <= daemon.ledger.finished_uids(GROUP),
            what="all that was released has run",
        )
        assert daemon.stop() == DRAINED

        audit = daemon.ledger.audit(GROUP)
        assert (audit.repeated, audit.unexpected) == ({}, [])
        assert len(daemon.ledger.finished_uids(GROUP)) > done
        # Messages that have not run are not lost. They are still in their stream, either unread or
        # released.
        assert set(audit.lost) == count_unsettled(daemon)
        assert len(daemon.ledger.finished_uids(GROUP)) + len(audit.lost) == len(uids)
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.ledger.records("raise") == []
        assert daemon.traces() == []
        assert daemon.letters() == []
        assert {each["code"] for each in daemon.events("drain.finished")} == {DRAINED}
        assert daemon.events("worker.crashed") == daemon.events("worker.killed") == []


def count_unsettled(daemon: Daemon) -> set[str]:
    """Return the messages that the group has either not read or not acknowledged."""
    found = daemon.pending_uids()
    for number in range(daemon.partitions):
        stream = daemon.keys.stream(TOPIC, number)
        (group,) = daemon.link.execute("XINFO", "GROUPS", stream)
        facts = dict(zip(group[::2], group[1::2], strict=True))
        last = facts[b"last-delivered-id"].decode()
        unread = daemon.link.execute("XRANGE", stream, f"({last}", "+")
        found |= {f"{TOPIC}/{number}/{row[0].decode()}" for row in unread}
    return found


@pytest.mark.fault("F31")
def test_drain_ignores_a_second_sigterm(
    new_daemon: NewDaemon,
):
    daemon = new_daemon(daemon={"drain_timeout": "20s"})
    with daemon:
        uids = daemon.send(["await go"] + ["ok"] * 9)
        daemon.wait_run(uids[0])

        daemon.signal(signal.SIGTERM)
        begun = daemon.wait_event("drain.started")
        daemon.signal(signal.SIGTERM)
        daemon.wait_for(
            lambda: len(daemon.events("signal.received")) == 2, what="both signals came"
        )
        assert daemon.running
        (daemon.folder / "go").touch()

        assert daemon.wait() == DRAINED
        assert begun["timeout"] == 20.0
        assert daemon.ledger.finished_uids(GROUP) == {uids[0]}
        assert len(daemon.events("drain.started")) == 1
        assert daemon.events("worker.killed") == daemon.events("worker.crashed") == []
        assert count_unsettled(daemon) == set(uids[1:])
        assert daemon.traces() == []

        daemon.start()
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == DRAINED


@pytest.mark.fault("F31")
@pytest.mark.parametrize("payload", ["sleep 600", "hold"])
def test_drain_deadline_releases_a_running_message_uncharged(new_daemon: NewDaemon, payload: str):
    daemon = new_daemon(daemon={"drain_timeout": "500ms"}, consumer={"max_crashes": 1})
    with daemon:
        uids = daemon.send(["ok", payload, "ok"])
        daemon.wait_run(uids[1])
        started = time.monotonic()

        assert daemon.stop() == DEADLINE

        assert 0.5 <= time.monotonic() - started < 5
        assert daemon.events("drain.expired")
        assert daemon.wait_event("worker.killed")["reason"] == "deadline"
        assert daemon.events("worker.charged") == []
        assert daemon.events("drain.finished")[0]["code"] == DEADLINE
        assert not daemon.link.execute("EXISTS", daemon.keys.lease(*daemon.assignments()[0]))
        assert uids[1] in daemon.pending_uids()
        assert count_unsettled(daemon) == set(uids[1:])
        assert daemon.traces() == []
        assert daemon.letters() == []


@pytest.mark.fault("F31")
def test_second_interrupt_shortens_the_drain(new_daemon: NewDaemon):
    daemon = new_daemon(daemon={"drain_timeout": "600s"})
    with daemon:
        uids = daemon.send(["await never", "ok"])
        daemon.wait_run(uids[0])

        daemon.signal(signal.SIGINT)
        daemon.wait_event("drain.started")
        daemon.signal(signal.SIGINT)
        daemon.wait_for(
            lambda: len(daemon.events("signal.received")) == 2, what="both signals came"
        )

        assert daemon.wait(15) == DEADLINE
        assert daemon.events("drain.expired")
        assert uids[0] in daemon.pending_uids()
        assert count_unsettled(daemon) == set(uids)
        assert daemon.traces() == []


@pytest.mark.fault("F31")
def test_third_interrupt_kills_the_workers(new_daemon: NewDaemon):
    daemon = new_daemon(daemon={"drain_timeout": "600s"})
    with daemon:
        uids = daemon.send(["hold", "ok"])
        daemon.wait_run(uids[0])

        for count in (1, 2, 3):
            daemon.signal(signal.SIGINT)
            daemon.wait_for(
                lambda count=count: len(daemon.events("signal.received", signal="SIGINT")) == count,
                what=f"signal {count} came",
            )

        assert daemon.wait(3) == DEADLINE
        assert daemon.events("drain.expired") == []
        assert daemon.wait_event("worker.killed")["reason"] == "quit"
        assert uids[0] in daemon.pending_uids()
        assert count_unsettled(daemon) == set(uids)
        assert daemon.traces() == []


@pytest.mark.fault("F31")
def test_sigquit_kills_immediately_and_messages_stay_pending(new_daemon: NewDaemon):
    daemon = new_daemon(partitions=2, daemon={"drain_timeout": "600s"})
    with daemon:
        uids = daemon.send(["await go", "hold", "ok", "ok"])
        for uid in uids[:2]:
            daemon.wait_run(uid)

        daemon.signal(signal.SIGQUIT)

        assert daemon.wait(3) == DEADLINE
        assert uids[0] in daemon.pending_uids()
        assert count_unsettled(daemon) == set(uids)
        assert daemon.traces() == []
        assert not any(
            daemon.link.execute("EXISTS", daemon.keys.lease(*assignment))
            for assignment in daemon.assignments()
        )


@pytest.mark.fault("F31")
def test_signal_to_workers_only_is_ignored(new_daemon: NewDaemon):
    """A terminal or service manager may signal every process, but only the supervisor reacts."""
    daemon = new_daemon()
    with daemon:
        uids = daemon.send(["await go", "ok"])
        daemon.wait_run(uids[0])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):
            for pid in (daemon.pids()[0], daemon.titles()["streamqd: housekeeper"]):
                os.kill(pid, number)
        (daemon.folder / "go").touch()

        daemon.wait_settled()

        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.events("worker.crashed") == daemon.events("housekeeper.exited") == []
        assert daemon.stop() == DRAINED
