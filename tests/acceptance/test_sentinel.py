"""With Sentinel, the daemon survives masters that die, are demoted, lose writes, or exist twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd.errors import RedisResponseError, RedisUnavailableError
from tests.support.daemon import GROUP, Daemon, daemons
from tests.support.sentinels import NAME, Data, Sentinels
from tests.support.servers import free_port
from tests.support.waiting import wait_until

Make = Callable[..., Daemon]


@pytest.fixture
def sentinels(binary: Path) -> Iterator[Sentinels]:
    """A master with two replicas, and three sentinels.

    A master that loses its replicas rejects writes.
    """
    options = {"min_replicas_to_write": "1", "min_replicas_max_lag": "2"}
    with Sentinels(binary, replicas=2, **options) as made:
        yield made


@pytest.fixture
def make(sentinels: Sentinels, tmp_path: Path) -> Iterator[Make]:
    """Configure daemons that use the sentinels."""
    with daemons(tmp_path, sentinels.url) as make:
        yield make


def wait_handled(daemon: Daemon, count: int) -> None:
    """Wait until `count` messages are handled."""
    daemon.wait_for(lambda: daemon.ledger.count("end") >= count, what=f"{count} are handled")


def assert_epochs_grew(before: dict[int, int], after: dict[int, int]) -> None:
    """Check that the epochs of all partitions are at least as high as before."""
    assert all(after[number] >= before[number] for number in before), (before, after)


@pytest.mark.fault("F17", "F18")
def test_killed_master_is_replaced_by_sentinel(make: Make, sentinels: Sentinels) -> None:
    daemon = make(partitions=3)
    with daemon:
        epochs, old = daemon.epochs(), sentinels.master
        daemon.send("sleep 0.004" for _ in range(600))
        wait_handled(daemon, 50)
        assert old.call("WAIT", 2, 5000) == 2
        old.kill()
        new = sentinels.wait_failover(old)
        daemon.wait_settled(60.0)

        assert daemon.running
        assert_epochs_grew(epochs, daemon.epochs())
        assert_master_used(daemon, new)
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == audit.unexpected == []
        assert daemon.stop() == 0


def assert_master_used(daemon: Daemon, master: Data) -> None:
    """Wait until the supervisor uses this master. Idle readers may still use the old one."""
    daemon.wait_for(
        lambda: "name=streamqd:supervisor" in master.call("CLIENT", "LIST").decode(),
        what="the supervisor is at the new master",
    )


@pytest.mark.fault("F17")
def test_daemon_switches_from_a_demoted_to_the_new_master(make: Make, sentinels: Sentinels) -> None:
    """The daemon switches to the new master, although its connections to the demoted one stay open.

    The old master answers every write with READONLY.
    """
    daemon = make(partitions=3)
    with daemon:
        old, new = sentinels.master, sentinels.servers[1]
        daemon.send("sleep 0.004" for _ in range(600))
        wait_handled(daemon, 50)
        swap_master(sentinels, new)
        refused = old.call("INFO", "errorstats").decode()
        daemon.wait_for(
            lambda: "READONLY" in old.call("INFO", "errorstats").decode(),
            what=f"the old master has refused a write {refused}",
        )
        point_sentinels_at(sentinels, new)
        daemon.wait_settled(60.0)

        assert daemon.running
        assert_master_used(daemon, new)
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == audit.unexpected == []
        assert daemon.events("worker.crashed") == []
        assert daemon.stop() == 0


def swap_master(sentinels: Sentinels, new: Data) -> None:
    """Make a replica the master of all others, without the sentinels."""
    new.call("REPLICAOF", "NO", "ONE")
    for server in sentinels.servers:
        if server is not new:
            server.call("REPLICAOF", "127.0.0.1", new.port)


def point_sentinels_at(sentinels: Sentinels, new: Data) -> None:
    """Tell all sentinels about the new master."""
    for each in sentinels.sentinels:
        each.call("SENTINEL", "REMOVE", NAME)
        each.call("SENTINEL", "MONITOR", NAME, "127.0.0.1", new.port, 2)


@pytest.mark.fault("F18")
def test_failover_that_loses_writes_raises_the_epochs(make: Make, sentinels: Sentinels) -> None:
    """A failover that loses writes raises all epochs.

    Messages that were acknowledged in the lost part run again, and messages that were sent in it
    are lost.
    """
    for server in sentinels.servers:
        server.call("CONFIG", "SET", "min-replicas-to-write", 0)
    daemon = make(partitions=2)
    with daemon:
        old = sentinels.master
        before = daemon.send(["ok"] * 40)
        daemon.wait_settled()
        kept = daemon.send(["sleep 0.002"] * 200)
        wait_handled(daemon, 60)
        assert old.call("WAIT", 2, 5000) == 2
        for server in sentinels.servers[1:]:
            # The sentinels still list this server as a replica of the master, but it no longer
            # receives writes.
            server.call("REPLICAOF", "127.0.0.1", free_port())
        sent = daemon.send(["ok"] * 20)
        daemon.wait_settled()
        for pid in daemon.pids().values():
            os.kill(
                pid, signal.SIGKILL
            )  # creates a new token and epoch in the part that is about to be lost
        daemon.wait_for(lambda: len(daemon.events("worker.ready")) >= 4, what="new workers")
        lost_epochs = daemon.epochs()
        old.kill()
        sentinels.wait_failover(old)
        wait_until(
            lambda: is_reacquired(daemon, lost_epochs), timeout=40, what="greater epochs", every=0.1
        )
        daemon.wait_settled(60.0)

        audit = daemon.ledger.audit(GROUP)
        assert audit.unexpected == []
        assert set(audit.lost) <= set(sent)
        assert audit.repeated, "nothing was lost: the test shows nothing"
        assert set(audit.repeated) <= set(kept), "acknowledged in the part that was lost"
        assert not set(audit.repeated) & set(before)
        assert daemon.stop() == 0


def is_reacquired(daemon: Daemon, before: dict[int, int]) -> bool:
    """Return True if every partition has a greater epoch than before."""
    try:
        after = daemon.epochs()
    except RedisUnavailableError:
        return False
    return all(after[number] > before[number] for number in before)


@pytest.mark.fault("F19")
def test_daemon_uses_the_master_with_replicas(make: Make, sentinels: Sentinels) -> None:
    """The daemon uses the master that has replicas.

    The old master still runs, is connected and reports that it is a master, but has lost its
    replicas.
    """
    daemon = make(partitions=3)
    with daemon:
        epochs = daemon.epochs()
        old, new, other = sentinels.servers
        daemon.send("sleep 0.004" for _ in range(600))
        wait_handled(daemon, 50)
        new.call("REPLICAOF", "NO", "ONE")
        other.call("REPLICAOF", "127.0.0.1", new.port)
        point_sentinels_at(sentinels, new)
        daemon.wait_for(
            lambda: rejects_writes(old), what="the old master refuses writes", every=0.05
        )
        assert old.role() == "master"
        daemon.link.close()  # the test's own idle connection would stay with the old master
        daemon.wait_settled(60.0)

        assert_master_used(daemon, new)
        assert_epochs_grew(epochs, daemon.epochs())
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == audit.unexpected == []
        uids = daemon.send(["ok"] * 30)
        daemon.wait_settled()
        for uid in uids:
            assert len(daemon.ledger.records_for(uid, "end")) == 1
        assert daemon.stop() == 0


def rejects_writes(server: Data) -> bool:
    """Return True if the server is a master that rejects writes because it has no replicas."""
    try:
        server.call("SET", "probe", "1")
    except RedisResponseError as error:
        return error.code == "NOREPLICAS"
    return False


@pytest.mark.fault("F8", "F19")
def test_paused_master_is_replaced_by_sentinel(make: Make, sentinels: Sentinels) -> None:
    daemon = make(partitions=3, daemon={"lease_ttl": "3s"})
    with daemon:
        epochs, old = daemon.epochs(), sentinels.master
        daemon.send("sleep 0.004" for _ in range(600))
        wait_handled(daemon, 50)
        assert old.call("WAIT", 2, 5000) == 2
        old.pause()
        try:
            sentinels.wait_failover(old)
            daemon.wait_settled(60.0)
        finally:
            old.resume()
        assert_epochs_grew(epochs, daemon.epochs())
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == audit.unexpected == []
        assert daemon.stop() == 0
