"""When whole hosts are lost, the guilty message is found, and no other is charged."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.registration import ensure_topics
from tests.support import hosts, kill_matrix, quick
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit
from tests.support.servers import ProcessServer

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]
LOSSES = MAX_CRASHES = 3  # a message that kills hosts is dead-lettered after this number of losses
PATIENCE = 30.0
CONSUMER: dict[str, Any] = {}  # empty, because `max_crashes` is 3 by default


@pytest.fixture
def new_host(new_daemon: NewDaemon) -> NewDaemon:
    """Configure daemons, each of which has its own simulated host."""
    hosts.need_hosts()

    def make(**options: Any) -> Daemon:
        options = {"code": hosts.CODE, "consumer": CONSUMER} | options
        return hosts.settle(new_daemon(**options))

    return make


def lose_host_until_survival(daemon: Daemon, *, memory: bool = False) -> int:
    """Start the host again until it survives. Return how often it was lost.

    If `memory` is set, the host keeps its memory, and only its processes are lost.
    """
    for losses in range(3 * LOSSES):
        daemon.start("--burst")
        if daemon.wait(PATIENCE) == 0:
            return losses
        if not memory:
            daemon.lose_memory()
    raise AssertionError(f"lost for ever\n{daemon.tail()}")


def count_charges(daemon: Daemon) -> Counter[str]:
    """Return how often each message was suspected of causing the loss of its host."""
    return Counter(
        f"{TOPIC}/{each['partition']}/{each['suspected'].removeprefix('m:')}"
        for each in daemon.events("lease.acquired")
        if each.get("suspected")
    )


def runs(daemon: Daemon) -> Counter[str]:
    return Counter(each.uid for each in daemon.ledger.records("start"))


@pytest.mark.fault("F7", "F27")
def test_message_that_kills_its_host_is_charged(new_host: NewDaemon):
    daemon = new_host()
    uids = daemon.send(["ok", "sleep 0.03", "lose", "ok", "ok"])
    killer = uids[2]

    # The first loss cannot name a message, and the second one accuses this message. It then runs
    # alone.
    assert lose_host_until_survival(daemon) == LOSSES

    assert runs(daemon) == Counter(uids) + Counter({killer: LOSSES - 1})
    assert {each.attempt for each in daemon.ledger.records("start")} == {1}
    (letter,) = daemon.letters()
    assert letter["uid"] == killer
    assert (letter["reason"], letter["crashes"]) == ("crashes", str(MAX_CRASHES))
    assert letter["attempts"] == "0"
    assert "loss of its host" in letter["errorMessage"]
    blamed = [each.get("suspected") for each in daemon.events("lease.acquired")]
    assert blamed == [*[None] * LOSSES, f"m:{letter['originalId']}"]
    assert daemon.ledger.finished_uids(GROUP) == {*uids} - {killer}
    assert daemon.traces() == []


@pytest.mark.fault("F27")
def test_message_that_kills_its_host_is_identified(
    new_host: NewDaemon,
):
    """The guilty message is found, although long messages of other partitions run at every loss."""
    daemon = new_host(partitions=3)
    (killer,) = daemon.send(["lose 0.5"], 0)
    others = [*daemon.send(["sleep 1.0", "ok"], 1), *daemon.send(["sleep 1.0", "ok"], 2)]

    losses = lose_host_until_survival(daemon)

    assert {each["uid"] for each in daemon.letters()} == {killer}
    assert count_charges(daemon) == {killer: 1}
    assert daemon.ledger.finished_uids(GROUP) >= {*others}
    assert losses == LOSSES
    assert daemon.ledger.records_for(killer, "start")[-1].attempt == 1
    assert daemon.traces() == []


def test_message_that_kills_all_processes_charges_no_other(new_host: NewDaemon):
    """The scoreboard names several running messages, so none of them is charged for the kill."""
    daemon = new_host(partitions=3)
    (killer,) = daemon.send(["lose 0.5"], 0)
    others = [*daemon.send(["sleep 1.0", "ok"], 1), *daemon.send(["sleep 1.0", "ok"], 2)]

    lose_host_until_survival(daemon, memory=True)

    assert {each["uid"] for each in daemon.letters()} == {killer}
    assert daemon.ledger.finished_uids(GROUP) >= {*others}
    assert daemon.traces() == []


@pytest.mark.fault("F27")
def test_throttled_messages_are_not_suspected_of_a_lost_host(new_daemon: NewDaemon):
    """Throttled messages are not suspected of the loss.

    Otherwise, they would be dead-lettered immediately, because `max_crashes` is 1.
    """
    options = {
        "partitions": 2,
        "daemon": {"lease_ttl": "2s"},
        "consumer": {"max_crashes": 1, "rate": "1/h", "rate_burst": 1},
    }
    one, two = new_daemon(**options), new_daemon(**options, name="two")
    ensure_topics(one.link, config.load(one.config_path))
    for partition in (0, 1):
        one.send(["ok", "ok"], partition)
        kill_matrix.lose_owner(one, partition)

    one.start()
    one.wait_for(lambda: one.ledger.count("end") == 2, what="each partition has run one")
    one.wait_for(
        lambda: all(
            one.link.execute("HGET", one.keys.fence(TOPIC, partition, GROUP), "mark") == b"m:0-0"
            for partition in (0, 1)
        ),
        what="nobody is suspected",
    )
    for process in one.session():
        process.kill()
    two.start()
    two.wait_for(lambda: len(two.events("lease.acquired")) == 2, what="two owns both")

    assert [each.get("suspected") for each in two.events("lease.acquired")] == [None, None]
    assert two.letters() == []


@pytest.mark.fault("F7", "F27")
def test_message_that_kills_two_hosts_is_charged(
    new_host: NewDaemon,
):
    """The message moves between two hosts, which restart once both are lost."""
    pair = [new_host(name=name, daemon={"lease_ttl": "2s"}) for name in ("one", "two")]
    uids = pair[0].send(["ok", "sleep 0.03", "lose", "ok", "ok"])
    losses: Counter[str] = Counter()
    while not pair[0].letters():
        for daemon in pair:
            daemon.start()
        pair[0].wait_for(
            lambda: pair[0].letters() or not any(daemon.running for daemon in pair),
            timeout=PATIENCE, what="both hosts are lost",
        )  # fmt: skip
        for daemon in pair:
            if not daemon.running:
                daemon.lose_memory()
        losses.update(daemon.config_path.stem for daemon in pair if not daemon.running)

    pair[0].wait_settled()
    assert losses.keys() == {"one", "two"}
    assert losses.total() == LOSSES
    assert runs(pair[0]) == Counter(uids) + Counter({uids[2]: LOSSES - 1})
    (letter,) = pair[0].letters()
    assert (letter["uid"], letter["reason"]) == (uids[2], "crashes")
    assert letter["crashes"] == str(MAX_CRASHES)
    assert pair[0].traces() == []


def append_only_files(server: ProcessServer) -> list[Path]:
    """Return the append-only files that new writes go to.

    Since Redis 7.0, these files have their own directory.
    """
    found = [file for file in server.folder.rglob("*.aof") if ".base." not in file.name]
    assert found
    return found


# --- host and server lost together ----------------------------------------------------------------


@pytest.mark.fault("F7", "F14")
@pytest.mark.parametrize("appendfsync", quick.slow_after(1, ["always", "everysec"]))
def test_simultaneous_host_and_server_loss_loses_nothing(
    new_host: NewDaemon, fresh_server: ProcessServer, chance: random.Random, appendfsync: str
):
    fresh_server.kill()
    fresh_server.start(appendfsync=appendfsync)
    daemon = new_host(partitions=2, redis_url=fresh_server.url)
    daemon.start()
    daemon.wait_event("daemon.ready", timeout=PATIENCE)
    uids: list[str] = []
    for round_ in range(2):
        uids += daemon.send(f"sleep {chance.uniform(0, 0.004):.4f}" for _ in range(400))
        moment = 400 * round_ + chance.randrange(50, 350)
        daemon.wait_for(
            lambda n=moment: daemon.ledger.count("end") >= n, what=f"{moment} have ended"
        )
        fresh_server.kill()
        daemon.kill()
        daemon.wait_gone(PATIENCE)
        fresh_server.start(appendfsync=appendfsync)
        daemon.link.close()
        daemon.start()
    daemon.wait_settled(PATIENCE)

    audit = daemon.ledger.audit(GROUP)
    assert (audit.lost, audit.unexpected) == ([], [])
    assert max(audit.repeated.values(), default=0) <= 1 + 2
    assert daemon.letters() == []


@pytest.mark.fault("F7", "F14")
def test_power_cut_loses_only_writes_not_on_disk(new_host: NewDaemon, fresh_server: ProcessServer):
    """After a power cut, only writes that were not yet on disk are lost.

    The test cuts off the end of the append-only file, as a power cut with `everysec` does.
    """
    daemon = new_host(redis_url=fresh_server.url)
    daemon.start()
    daemon.wait_event("daemon.ready", timeout=PATIENCE)
    kept = daemon.send(["ok"] * 20)
    daemon.wait_settled()
    (running,) = daemon.send(["await go"])
    daemon.wait_run(running)
    on_disk = {file: file.stat().st_size for file in append_only_files(fresh_server)}
    (daemon.folder / "go").touch()
    late = daemon.send(["ok"] * 20)
    daemon.wait_settled()
    daemon.kill()
    daemon.wait_gone(PATIENCE)
    vanished = daemon.send(["ok"] * 5)
    fresh_server.kill()
    for file, size in on_disk.items():
        os.truncate(file, size)
    fresh_server.start()
    daemon.start()
    daemon.wait_settled(PATIENCE)

    assert daemon.ledger.audit(GROUP) == Audit(
        lost=sorted(vanished),
        repeated={running: 2},  # the acknowledgment was in the lost part
    )
    assert runs(daemon) == Counter([*kept, *late, running, running])
    fresh = daemon.send(["ok"] * 5)
    daemon.wait_settled()
    assert {*fresh} <= daemon.ledger.finished_uids(GROUP)
    assert daemon.letters() == []


BATCHES = """

def many(messages: list[Message]) -> None:
    for message in messages:
        obey(message)
"""
TOGETHER: dict[str, dict[str, Any]] = {
    "tasks": {"concurrency": 8, "order": "none"},
    "hold-key": {"concurrency": 8, "order": "key", "on_error": "hold-key"},
    "batches": {"handler": "work:many", "batch": 8},
}


@pytest.mark.fault("F27")
@pytest.mark.parametrize("partitions", quick.slow_after(1, [3, 1]))
@pytest.mark.parametrize("shape", quick.slow_after(1, TOGETHER))
def test_message_is_dead_lettered_after_three_lost_hosts(
    new_host: NewDaemon, shape: str, partitions: int
):
    """A message that kills hosts is dead-lettered after the third one.

    Three hosts run many messages each, and whenever one is lost, the next one takes over.
    """
    options = {"consumer": TOGETHER[shape], "partitions": partitions, "code": hosts.CODE + BATCHES}
    trio = [
        new_host(name=name, daemon={"lease_ttl": "2s"}, **options)
        for name in ("one", "two", "three")
    ]
    words = ["sleep 0.2"] * 6 + ["lose 0.1"] + ["sleep 0.2"] * 13
    uids = trio[0].send(words, 0)
    killer = uids[6]
    for partition in range(1, partitions):
        uids += trio[0].send(["sleep 0.2"] * 20, partition)

    for daemon in trio:
        daemon.start()
        daemon.wait_for(lambda lost=daemon: not lost.running, timeout=PATIENCE, what="it is lost")
        daemon.lose_memory()
    heir = new_host(name="four", daemon={"lease_ttl": "2s"}, **options)
    heir.start()
    heir.wait_settled(PATIENCE)

    (letter,) = heir.letters()
    assert (letter["uid"], letter["reason"]) == (killer, "crashes")
    assert letter["crashes"] == str(MAX_CRASHES)
    assert [count_charges(each) for each in trio] == [{}, {}, {}]
    assert count_charges(heir) == {killer: 1}
    assert heir.ledger.finished_uids(GROUP) == {*uids} - {killer}
    assert heir.traces() == []
