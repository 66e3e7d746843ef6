"""A partition has one owner at a time, despite late packets, duplicate instances and kills.

The first part simulates two owners with the real scripts. To simulate a late packet, a test runs
the same call later, because a script does not depend on the connection. A late read is written to
its connection only at that time.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from streamqd.model import Assignment, Lease
from streamqd.store import leases, messages
from streamqd.store.client import Connection, connect
from streamqd.store.fetch import Fetcher, FetchResult
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.harness import ASSIGNMENT, TTL, Harness
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.servers import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]


class Owner:
    """The calls that one instance and its worker make for an assignment."""

    def __init__(self, name: str, harness: Harness, server: Server) -> None:
        self.name = name
        self.harness = harness
        self.keys = harness.keys
        self.link = connect(server.settings, timeout=10.0, name=f"test:{name}")
        self.token = ""
        self.session = ""

    def acquire(self) -> Call:
        """Return a call with a new token and the current epoch.

        A test may run it once, twice, or late.
        """
        self.token = secrets.token_hex(8)
        epoch = int(self.harness.do("HGET", self.harness.fence, "epoch") or 0)
        return leases.acquire(self.keys, Lease(ASSIGNMENT, self.token, epoch), TTL, self.name)

    def release(self) -> Call:
        return leases.release(self.keys, Lease(ASSIGNMENT, self.token))

    def recover(self) -> Call:
        self.session = secrets.token_hex(8)
        return messages.recover(
            self.keys, Lease(ASSIGNMENT, self.token), self.session, True, "", "", 100
        )

    def say(self, call: Call) -> str:
        return self.link.run(call).word

    def attach(self) -> tuple[Fetcher, list[bytes]]:
        """Recover on a new connection, as a worker does.

        Return the fetcher and the IDs of the pending entries.
        """
        self.link.close()
        page = messages.Recovered.parse(self.link.run(self.recover()))
        fetcher = Fetcher(self.link, self.keys, Lease(ASSIGNMENT, self.token))
        assert fetcher.watch()
        return fetcher, [entry.id for entry in page.main]


@pytest.fixture
def owners(harness: Harness, server: Server) -> Iterator[tuple[Owner, Owner]]:
    harness.groups()
    pair = Owner("a", harness, server), Owner("b", harness, server)
    yield pair
    for owner in pair:
        owner.link.close()


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    return Harness(link, keys)


def read(fetcher: Fetcher, acks: list[bytes] | None = None) -> FetchResult:
    fetcher.send_round(acks or [], [], 10)
    return fetcher.receive_round(polled=False)


def ids(got: FetchResult) -> list[bytes]:
    return [entry[0] for entry in got.main]


def expire_lease(harness: Harness) -> None:
    """Delete the lease, with the same result as if it had expired."""
    assert harness.do("DEL", harness.lease) == 1


# --- late packets ---------------------------------------------------------------------------------


def test_late_acquire_does_not_restore_an_old_token(harness: Harness, owners: tuple[Owner, Owner]):
    """The late copy of a repeated call has no effect once another owner has had the lease."""
    a, b = owners
    acquire = a.acquire()  # the first copy is still in transit
    assert a.say(acquire) == "OK"  # the repeated call gets a reply
    added = [harness.add(f"{number}-1") for number in range(1, 4)]
    reader, _ = a.attach()
    assert ids(read(reader)) == [b"1-1", b"2-1", b"3-1"]  # then the owner pauses
    expire_lease(harness)
    assert b.say(b.acquire()) == "OK"
    other, inherited = b.attach()
    assert inherited == [b"1-1", b"2-1", b"3-1"]
    assert read(other, [b"1-1"]).acked == 1
    assert b.say(b.release()) == "OK"

    before = harness.dump()
    assert a.say(acquire) == "MOVED", "the first copy, late"
    assert harness.dump() == before
    late = read(reader, [b"2-1"])
    assert (late.executed, late.owned, late.acked) == (False, False, 0)
    assert a.say(messages.ack(a.keys, Lease(ASSIGNMENT, a.token), added[1:2])) == "FENCED"
    assert harness.dump() == before


def test_late_release_has_no_effect(harness: Harness, owners: tuple[Owner, Owner]):
    """A late release has no effect after this instance or another one has acquired a new lease."""
    a, b = owners
    assert a.say(a.acquire()) == "OK"
    release = a.release()
    assert a.say(release) == "OK"
    for owner in (a, b, a):
        assert owner.say(owner.acquire()) == "OK"
        before = harness.dump()
        assert a.say(release) == "FENCED", "a copy of it, late"
        assert harness.dump() == before
        assert owner.say(owner.release()) == "OK"


@pytest.mark.fault("F12")
def test_acquire_with_a_lost_reply_costs_no_epoch(harness: Harness, owners: tuple[Owner, Owner]):
    a, b = owners
    acquire = a.acquire()
    assert a.say(acquire) == "OK"
    before = harness.do("HGETALL", harness.fence)
    assert a.say(acquire) == "MINE"
    expire_lease(harness)
    assert a.say(acquire) == "MINE"
    assert harness.do("HGETALL", harness.fence) == before
    assert b.say(b.acquire()) == "HELD"


def owner_calls(owner: Owner, places: list[bytes]) -> dict[str, Call]:
    """Return every call that an owner can make, by script."""
    keys, token = owner.keys, owner.token
    fields = {b"originalId": b"1-1", b"retryCount": b"1", b"crashCount": b"0"}
    return {
        "lease_renew": leases.renew(keys, Lease(ASSIGNMENT, token), TTL),
        "lease_refence": leases.refence(
            keys, Lease(ASSIGNMENT, token), "successor", TTL, places[0], b"{}", places[1:]
        ),
        "lease_release": owner.release(),
        "message_recover": messages.recover(keys, Lease(ASSIGNMENT, token), "s", True, "", "", 10),
        "message_reclaim": messages.reclaim(keys, Lease(ASSIGNMENT, token), "s1", "m", 0.0, 10),
        "settle_ack": messages.ack(keys, Lease(ASSIGNMENT, token), places),
        "settle_retry": messages.retry(keys, Lease(ASSIGNMENT, token), [(places[0], 0.0, fields)]),
        "settle_dead": messages.dead(keys, Lease(ASSIGNMENT, token), [(places[0], fields)]),
        "quarantine_mark": messages.quarantine_mark(
            keys, Lease(ASSIGNMENT, token), owner.session, places[0], places[1:]
        ),
    }


# An expired lease still belongs to its owner until another instance acquires it.
@pytest.mark.fault("F8")
@pytest.mark.parametrize(
    ("ending", "heir"),
    [
        ("expired", "b"),
        ("released", "b"),
        ("released", "nobody"),
        ("refenced", "b"),
        ("refenced", "nobody"),
    ],
)
def test_no_call_of_an_old_owner_has_an_effect(
    harness: Harness, owners: tuple[Owner, Owner], ending: str, heir: str
):
    a, b = owners
    assert a.say(a.acquire()) == "OK"
    places = [harness.add(f"{number}-1") for number in range(1, 6)]
    reader, _ = a.attach()
    read(reader)
    harness.add("9-1")  # an entry that can be fetched
    harness.add("8-8", stream=harness.retry)
    assert harness.fetch(1, consumer="legacy", stream=harness.retry)  # an entry for a reclaim
    if ending == "expired":
        expire_lease(harness)
    elif ending == "released":
        assert b.say(a.release()) == "OK"
    else:
        assert (
            b.say(leases.refence(a.keys, Lease(ASSIGNMENT, a.token), "new", TTL, None, b"", []))
            == "OK"
        )
        if heir == "b":
            expire_lease(harness)
    if heir == "b":
        assert b.say(b.acquire()) == "OK"
        b.attach()

    before = harness.dump()
    for script, call in owner_calls(a, places).items():
        assert call.script.name == script
        assert a.harness.link.run(call).word == "FENCED", script
        assert harness.dump() == before, script
    late = read(reader, [b"1-1"])
    assert (late.executed, late.owned, late.acked, ids(late)) == (False, False, 0, [])
    assert harness.dump() == before, "the read"


def test_late_read_on_an_old_connection_is_refused(
    harness: Harness, owners: tuple[Owner, Owner], server: Server
):
    """A late read on an old connection is refused.

    Its token is valid, but the owner has since listed its pending entries.
    """
    a, _ = owners
    assert a.say(a.acquire()) == "OK"
    old, _ = a.attach()
    given_up, a.link = a.link, connect(server.settings, timeout=10.0, name="test:again")
    new, inherited = a.attach()
    assert inherited == []
    harness.add("1-1")
    late = read(old)
    assert (late.executed, late.owned, ids(late)) == (False, True, [])
    assert ids(read(new)) == [b"1-1"]
    given_up.close()


def test_read_before_recovery_is_listed_as_pending(harness: Harness, owners: tuple[Owner, Owner]):
    a, _ = owners
    assert a.say(a.acquire()) == "OK"
    reader, _ = a.attach()
    harness.add("1-1")
    harness.add("2-1")
    read(reader)  # the reply is lost
    _, inherited = a.attach()
    assert inherited == [b"1-1", b"2-1"]


def test_mark_of_an_abandoned_connection_suspects_nothing(
    harness: Harness, owners: tuple[Owner, Owner]
):
    """A mark on an abandoned connection suspects no message.

    No worker was running the entry that it names.
    """
    a, b = owners
    assert a.say(a.acquire()) == "OK"
    place = harness.add("1-1")
    reader, _ = a.attach()
    read(reader)
    mark = messages.quarantine_mark(a.keys, Lease(ASSIGNMENT, a.token), a.session, place, [])
    a.attach()
    assert a.say(mark) == "SESSION"
    expire_lease(harness)
    reply = b.link.run(b.acquire())
    assert (reply.word, leases.Acquired.parse(reply).victim) == ("OK", b"")


# --- duplicate instances and killed predecessors --------------------------------------------------

SHORT = "1s"
LONGER = "5s"  # long enough for the second instance to publish several summaries


@pytest.mark.fault("F32")
def test_duplicate_on_another_host_names_the_first_and_exits(new_daemon: NewDaemon):
    """A duplicate on another host logs the host and pid of the first instance, and exits.

    It does not replace the summary of the first instance. The test uses another state directory to
    simulate another host, because the two then share no lock.
    """
    first = new_daemon(name="east", daemon={"instance": "same", "lease_ttl": LONGER})
    with first:
        epochs, mark = first.epochs(), first.mark()
        summary = first.keys.instance("default", "same")
        wait_until(lambda: first.link.execute("EXISTS", summary))
        own = {"other_host": socket.gethostname(), "other_pid": first.pid}
        duplicate = new_daemon(
            name="west",
            daemon={"instance": "same", "lease_ttl": LONGER, "state_dir": "elsewhere"},
        )
        duplicate.start()
        started = duplicate.wait_event("daemon.started")
        began = time.monotonic()
        named = duplicate.wait_event("instance.duplicated")
        assert own.items() <= named.items()

        def over() -> bool:
            published = first.link.execute("GET", summary)
            assert json.loads(published)["pid"] == first.pid
            return not duplicate.running

        wait_until(over)
        second = json.loads(first.link.execute("GET", first.keys.duplicate("default", "same")))
        assert second["pid"] == duplicate.pid, "for doctor"
        assert duplicate.wait() == 5
        print(f"gave way after {time.monotonic() - began:.2f} s, ttl {LONGER}")
        (given_up,) = duplicate.events("duplicate_instance.exited", after=started["number"])
        assert own.items() <= given_up.items()
        assert duplicate.events("lease.acquired") == []

        assert [each["other_pid"] for each in duplicate.events("instance.duplicated")] == [
            first.pid
        ]

        first.send(["ok"] * 5)
        first.wait_settled()
        assert first.epochs() == epochs
        assert first.events("lease.lost", mark) == []
        assert first.ledger.audit(GROUP) == Audit()
        assert first.stop() == 0


@pytest.mark.fault("F8", "F32")
def test_paused_instance_exits_after_losing_its_id(
    new_daemon: NewDaemon,
):
    options = {"instance": "same", "lease_ttl": SHORT}
    first = new_daemon(name="east", daemon=options)
    with first:
        first.send(["ok"])
        first.wait_settled()
        asleep = first.session()
        for process in asleep:
            process.send_signal(signal.SIGSTOP)
        second = new_daemon(name="west", daemon={**options, "state_dir": "elsewhere"})
        second.start()
        second.wait_event("lease.acquired", timeout=15.0)
        second.wait_event("worker.ready")
        epochs = second.epochs()
        for process in asleep:
            process.send_signal(signal.SIGCONT)
        assert first.wait(15.0) == 5

        (uid,) = second.send(["ok"])
        second.wait_run(uid, "end")
        second.wait_settled()
        assert second.epochs() == epochs
        assert second.ledger.audit(GROUP) == Audit()
        assert second.stop() == 0


@pytest.mark.fault("F32")
def test_second_instance_on_the_same_host_is_refused(new_daemon: NewDaemon):
    with new_daemon(name="east", daemon={"instance": "same"}) as first:
        second = new_daemon(name="west", daemon={"instance": "same"})
        second.start()
        assert second.wait(10.0) == 5
        assert f"already running as process {first.pid}" in "\n".join(
            [*second.plain, second.tail()]
        )
        assert first.running


def test_successor_without_a_scoreboard_resumes_immediately(
    new_daemon: NewDaemon,
):
    """The successor resumes immediately, because the lock alone proves that no process is left.

    Pending messages run in a marked round.
    """
    with new_daemon() as daemon:
        (uid,) = daemon.send(["await nothing"])
        daemon.wait_run(uid)
        mark = daemon.mark()
        daemon.kill()
        daemon.wait_gone(2.0)
        daemon.lose_memory()
        daemon.start()
        daemon.wait_event("lease.acquired", after=mark, inherited=True)
        daemon.wait_run(uid, count=2, timeout=15.0)
        quarantine = daemon.link.execute(
            "HGET", daemon.keys.fence(*Assignment(TOPIC, 0, GROUP)), "mark"
        )
        assert quarantine == b"m:" + uid.rpartition("/")[2].encode(), "inherited entries are marked"


@pytest.mark.fault("F6")
def test_leases_of_a_killed_predecessor_are_taken_immediately(new_daemon: NewDaemon):
    """The successor does not wait for the TTL. The lock proves that no old process is left."""
    with new_daemon(partitions=3) as daemon:
        epochs = daemon.epochs()
        uids = daemon.send(["await nothing"], partition=0) + daemon.send(["ok"] * 20, partition=1)
        daemon.wait_run(uids[0])
        # A message of partition 1 that was still running at the kill would be a second suspect.
        daemon.wait_for(
            lambda: set(uids[1:]) <= daemon.ledger.finished_uids(GROUP) and daemon.pending() == 1,
            what="the others are done",
        )
        held = {
            n: daemon.link.execute("PTTL", daemon.keys.lease(TOPIC, n, GROUP)) for n in range(3)
        }
        assert min(held.values()) > 30_000
        killed_at = time.monotonic()
        daemon.kill()
        daemon.wait_gone(2.0)
        mark = daemon.mark()
        daemon.start()
        for number in range(3):
            daemon.wait_event("lease.resumed", after=mark, partition=number)
            assert daemon.epochs()[number] > epochs[number]
        daemon.wait_run(uids[0], count=2, timeout=10.0)
        took = time.monotonic() - killed_at
        print(f"killed, started, and at work again after {took:.2f} s (lease ttl 60 s)")
        assert took < 15.0
        place = "m:" + uids[0].rpartition("/")[2]
        charged = daemon.link.execute(
            "HGET", daemon.keys.attempts(*Assignment(TOPIC, 0, GROUP)), f"{place}:c"
        )
        assert charged == b"1", "what ran is charged"


SLOW_FORKS = """
import os, time


def slow():
    with open("forks", "a") as file:
        file.write(f"{time.time()}\\n")
    time.sleep(0.15)


os.register_at_fork(before=slow)
"""
BESIDE = 4  # forks that are not workers: the housekeeper and short tasks


def test_slow_forks_are_spread_over_several_ticks(new_daemon: NewDaemon):
    """Slow forks are spread over several ticks.

    If one tick made them all, no lease would be renewed until the last.

    A tick logs its workers after the last fork, so the log shows how many forks each tick made.
    """
    count = 24
    daemon = new_daemon(partitions=count, daemon={"lease_ttl": "3s", "preload": ["slow_forks"]})
    (daemon.folder / "slow_forks.py").write_text(SLOW_FORKS)
    with daemon:
        daemon.wait_for(
            lambda: len(daemon.events("worker.ready")) == count, what="all workers", timeout=60
        )
        logged = [datetime.fromisoformat(each["ts"]) for each in daemon.events("worker.started")]
        forks = [float(line) for line in (daemon.folder / "forks").read_text().split()]
        ahead = [
            sum(each < at.timestamp() for each in forks) - number
            for number, at in enumerate(logged)
        ]
        assert max(ahead) <= 2 + BESIDE
        print(f"late: {len(daemon.events('lease.renewed_late'))} of {count} leases")
        assert daemon.stop() == 0
