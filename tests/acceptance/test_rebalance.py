"""When instances join, leave or pause, partitions move, and no message is lost or handled twice."""

from __future__ import annotations

import contextlib
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from tests.support.daemon import GROUP, Daemon
from tests.support.ledger import Audit
from tests.support.servers import free_port

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

PARTITIONS = 8
# Leases are renewed every 0.4 s. Moves start within 0.1 s, up to 8 at a time.
QUICK = {
    "lease_ttl": "2s",
    "rebalance_delay": "100ms",
    "rebalance_hold": "100ms",
    "rebalance_moves": 8,
}
AT_ONCE = 10.0  # seconds; the target is 1, but a busy machine may need more


class Fleet:
    """Instances that share the same partitions on one server."""

    def __init__(self, *members: Daemon) -> None:
        self.one = members[0]
        self.members: dict[str, Daemon] = {}
        for member in members:
            member.start()
        for member in members:
            self._joined(member)

    def add(self, member: Daemon) -> None:
        member.start()
        self._joined(member)

    def _joined(self, member: Daemon) -> None:
        member.wait_event("daemon.ready", timeout=30.0)
        self.members[member.tables["daemon"]["instance"]] = member

    def owners(self) -> dict[int, str]:
        """Return the instance that the fence of each partition names."""
        fences = [self.one.keys.fence(*assignment) for assignment in self.one.assignments()]
        held = self.one.link.pipeline([("HMGET", fence, "owner", "token") for fence in fences])
        return {
            number: owner.decode() for number, (owner, token) in enumerate(held) if owner and token
        }

    def shares(self) -> list[int]:
        """Return the number of partitions that each owner has, sorted."""
        return sorted(Counter(self.owners().values()).values())

    def wait_shares(self, *wanted: int) -> None:
        self.one.wait_for(
            lambda: self.shares() == list(wanted), timeout=30.0, what=f"shares of {wanted}"
        )

    def wait_workers(self) -> None:
        """Wait until every owner is running a worker for each of its partitions."""

        def running() -> bool:
            owners = self.owners()
            return len(owners) == self.one.partitions and all(
                set(member.pids()) == {p for p, owner in owners.items() if owner == name}
                for name, member in self.members.items()
                if member.running
            )

        self.one.wait_for(running, timeout=30.0, what="every partition has its worker")

    def moves(self) -> int:
        """Return how many lease changes all members have logged."""
        names = ("lease.acquired", "lease.released", "lease.lost", "partition.handed_over")
        return sum(len(m.events(name)) for m in self.members.values() for name in names)

    def heartbeats(self) -> dict[str, float]:
        """Return the time of each instance's last heartbeat (Redis time)."""
        flat = self.one.link.execute(
            "ZRANGE", self.one.keys.members("default"), 0, -1, "WITHSCORES"
        )
        return {flat[at].decode(): float(flat[at + 1]) for at in range(0, len(flat), 2)}

    def wait_heartbeats(self, count: int) -> None:
        """Wait until every instance has sent `count` heartbeats."""
        seen: dict[str, set[float]] = {}

        def enough() -> bool:
            for name, heartbeat in self.heartbeats().items():
                seen.setdefault(name, set()).add(heartbeat)
            return all(len(heartbeats) > count for heartbeats in seen.values())

        self.one.wait_for(enough, timeout=30.0, what=f"{count} beats of each")


def wait_run_elsewhere(fleet: Fleet, partitions: set[int], since: float) -> float:
    """Wait until a message of each partition has started elsewhere. Return the elapsed seconds."""
    first: dict[int, float] = {}

    def all_run() -> bool:
        for record in fleet.one.ledger.records("start"):
            partition = int(record.uid.split("/")[1])
            if record.at > since and partition in partitions:
                first.setdefault(partition, record.at)
        return first.keys() == partitions

    fleet.one.wait_for(all_run, timeout=30.0, what=f"messages of {partitions} run", every=0.005)
    return max(first.values()) - since


@pytest.mark.fault("F28")
def test_three_instances_share_eight_partitions(new_daemon: NewDaemon):
    fleet = Fleet(*(new_daemon(name=name, partitions=PARTITIONS, daemon=QUICK) for name in "abc"))
    fleet.wait_shares(2, 3, 3)
    fleet.wait_workers()
    moves, epochs = fleet.moves(), fleet.one.epochs()
    fleet.wait_heartbeats(6)

    assert fleet.moves() == moves, "something moved in steady state"
    assert fleet.one.epochs() == epochs
    assert fleet.shares() == [2, 3, 3]


def test_leaving_and_returning_instances_repeat_nothing(
    new_daemon: NewDaemon,
):
    fleet = Fleet(*(new_daemon(name=name, partitions=PARTITIONS, daemon=QUICK) for name in "abc"))
    fleet.wait_shares(2, 3, 3)
    fleet.wait_workers()
    one, took = fleet.one, []
    one.send("sleep 0.005" for _ in range(2000))
    for name, leaver in fleet.members.items():
        leaving = {p for p, owner in fleet.owners().items() if owner == name}
        assert leaving
        # Every partition still has work, even if its first messages have all been handled.
        one.send("sleep 0.005" for _ in range(800))
        signalled = time.monotonic()
        leaver.signal(signal.SIGTERM)
        drained = leaver.wait_event("drain.finished", timeout=20.0)
        ended = time.monotonic()
        assert drained["code"] == leaver.wait() == 0
        # Messages that the leaving instance finished itself started before it exited.
        took.append((name, wait_run_elsewhere(fleet, leaving, ended) + ended - signalled))
        fleet.wait_shares(4, 4)
        leaver.start()
        leaver.wait_event("daemon.ready", after=drained["number"], timeout=30.0)
        fleet.wait_shares(2, 3, 3)
    one.wait_settled(60.0)

    for name, seconds in took:
        print(f"{name} left by SIGTERM: its partitions run elsewhere after {seconds:.3f} s")
        assert seconds < AT_ONCE
    assert one.ledger.audit(GROUP) == Audit()
    assert {each.attempt for each in one.ledger.records("start")} == {1}
    assert one.traces() == []


# --- a paused instance ----------------------------------------------------------------------------

# Each instance has its own gate, so that the test controls when it acts after the pause.
GATED = """
from pathlib import Path
import time
from streamqd import Dead, Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment()
me = ""

def on_start(context):
    global me
    me = context.instance

def obey(message: Message) -> None:
    with ledger.run(message):
        word = message.text()
        if word == "ok":
            return
        while not Path(f"gate-{me}").exists():
            time.sleep(0.002)
        if me == "a" and word == "fail":
            raise ValueError("this belongs to another by now")
        if me == "a" and word == "dead":
            raise Dead("this belongs to another by now")
"""

STANDSTILL = {"lease_ttl": "1s", "rebalance_delay": "10m"}
WORDS = ("ack", "fail", "dead")  # the outcome that the paused instance tries to store


def dump_keyspace(daemon: Daemon) -> dict[bytes, bytes]:
    """Return a dump of every key that is about messages or owners."""
    passing = (":members:", ":info:", ":instance:", ":history:")
    names = sorted(daemon.link.execute("KEYS", "*"))
    kept = [name for name in names if not any(one.encode() in name for one in passing)]
    return dict(zip(kept, daemon.link.pipeline([("DUMP", name) for name in kept]), strict=True))


@pytest.mark.fault("F8")
def test_paused_and_replaced_instance_is_refused_every_write(
    new_daemon: NewDaemon,
):
    port = free_port()
    options = {"partitions": len(WORDS), "daemon": STANDSTILL, "code": GATED}
    sleeper = new_daemon(name="a", http=f"127.0.0.1:{port}", **options)
    gated = [sleeper.send([word], partition=number)[0] for number, word in enumerate(WORDS)]
    behind = set(sleeper.send(["ok"] * 30))
    fleet = Fleet(sleeper)
    heir = new_daemon(name="b", **options)
    for uid in gated:
        sleeper.wait_run(uid)
    assert all(sleeper.pending(number) > 1 for number in range(len(WORDS))), "more is in hand"
    fleet.add(heir)
    assert set(fleet.owners().values()) == {"a"}

    asleep = sleeper.session()
    stopped_at = time.monotonic()
    for process in asleep:
        process.send_signal(signal.SIGSTOP)
    for number, uid in enumerate(gated):
        heir.wait_event("lease.acquired", partition=number, inherited=True, timeout=20.0)
        sleeper.wait_run(uid, count=2)
    print(f"taken over from a stopped instance after {time.monotonic() - stopped_at:.3f} s")
    assert set(fleet.owners().values()) == {"b"}
    before, epochs = dump_keyspace(heir), heir.epochs()

    (sleeper.folder / "gate-a").touch()
    mark = sleeper.mark()
    for process in asleep:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    # Its handlers return, fail or raise Dead, its workers exit, and its supervisor gives up the
    # partitions.
    for number, uid in enumerate(gated):
        sleeper.wait_run(uid, "raise" if WORDS[number] != "ack" else "end")
        fenced = sleeper.wait_event("request.fenced", after=mark, partition=number)
        sleeper.wait_event("worker.exited", after=fenced["number"], partition=number)
    assert [each["event"] for each in sleeper.events("lease.acquired", mark)] == []
    fleet.wait_heartbeats(2)

    assert dump_keyspace(heir) == before, "an act of the old owner had an effect"
    assert heir.epochs() == epochs
    old_workers = {each["child"] for each in sleeper.events("worker.started")}
    late = [
        each
        for each in sleeper.ledger.records("start")
        if each.pid in old_workers and each.uid in behind and each.at > stopped_at
    ]
    assert late == [], "it began something new"
    refused = count_refusals(port)
    print(f"refused operations by partition: {refused}")
    assert all(refused[number] >= 1 for number in range(len(WORDS)))

    (heir.folder / "gate-b").touch()
    heir.wait_settled()
    assert heir.ledger.audit(GROUP) == Audit(repeated=dict.fromkeys(sorted(gated), 2))
    assert {each.attempt for each in heir.ledger.records("start")} == {1}
    assert heir.letters() == []
    assert heir.traces() == []
    assert sleeper.stop() == 0
    assert heir.stop() == 0


def count_refusals(port: int) -> dict[int, int]:
    """Return how many operations were refused because of a newer owner, by partition.

    Source: metrics.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("streamqd_fenced_total{"):
            labels, value = line.removeprefix("streamqd_fenced_total{").split("} ")
            named = dict(each.split("=") for each in labels.split(","))
            found[int(named["partition"].strip('"'))] = int(float(value))
    return found
