"""The daemon works on a Redis Cluster whose nodes die or hang and whose slots move."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import startup
from streamqd.cli import cli
from streamqd.model import Assignment
from streamqd.store.client import connect
from streamqd.store.slots import key_slot
from tests.support import users
from tests.support.cluster import Cluster, Node
from tests.support.daemon import GROUP, TOPIC, Daemon, daemons
from tests.support.ledger import VARIABLE, Audit
from tests.support.waiting import wait_until

Make = Callable[..., Daemon]


@pytest.fixture(scope="module")
def whole_cluster(binary: Path) -> Iterator[Cluster]:
    """A cluster of three masters with one replica each."""
    with Cluster(binary) as made:
        yield made


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Cluster:
    """The empty cluster, with all nodes running."""
    for node in whole_cluster.nodes:
        if not node.running:
            node.restart()
    whole_cluster.wait_ok()
    whole_cluster.flush()
    return whole_cluster


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> Iterator[Make]:
    """Configure daemons on the cluster."""
    with daemons(tmp_path, cluster.url) as make:
        yield make


def nodes_by_partition(cluster: Cluster, daemon: Daemon) -> dict[int, Node]:
    """Return the node that serves each partition."""
    return {
        number: cluster.master_for_key(daemon.keys.stream(TOPIC, number))
        for number in range(daemon.partitions)
    }


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command with a daemon's configuration. Return its output, parsed if it is JSON."""

    def run(daemon: Daemon, *args: str, code: int = 0) -> Any:
        monkeypatch.setenv(VARIABLE, str(daemon.ledger.path))
        done = CliRunner().invoke(cli, ["--config", str(daemon.config_path), *args])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if "--json" in args else done.output

    return run


def test_topic_on_all_cluster_nodes_is_handled(make: Make, cluster: Cluster) -> None:
    daemon = make(partitions=6, consumer={"max_attempts": 2, "backoff": {"base": "10ms"}})
    with daemon:
        assert set(nodes_by_partition(cluster, daemon).values()) == set(cluster.masters)
        daemon.send(["ok"] * 294 + ["fail"] * 3 + ["dead"] * 3)
        daemon.wait_settled()
        assert (
            sorted(each["reason"] for each in daemon.letters()) == ["attempts"] * 3 + ["dead"] * 3
        )
        audit = daemon.ledger.audit(GROUP)
        assert audit.unexpected == []
        assert len(audit.lost) == 6, "those that failed to the end"
        assert sorted(audit.repeated.values()) == [2, 2, 2], "the second attempts"
        assert daemon.stop() == 0
    slots = {key_slot(key) for key in cluster.all_keys()}
    assert len(slots) > 6, "partitions, topic, registry and fleet are in slots of their own"


def test_commands_read_all_cluster_nodes(
    make: Make, cluster: Cluster, run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands read the keys of all nodes.

    `check` skips the handlers, because they are not under test here.
    """
    daemon = make(partitions=4)
    addresses = {f"127.0.0.1:{node.port}" for node in cluster.nodes if node.role() == "master"}
    with daemon:
        *_, dead = daemon.send(["ok"] * 20 + ["dead"])
        daemon.wait_settled()
        monkeypatch.setattr(
            startup, "prepare", lambda settings, **_: startup.Prepared(settings, [])
        )
        found = run_command(daemon, "check", "--json")["findings"]
        servers = {each["text"].split()[-1] for each in found if each["text"].startswith("valkey")}
        assert servers <= addresses
        warned = next(each["text"] for each in found if "append-only" in each["text"])
        assert all(each in warned for each in addresses)
        assert len(run_command(daemon, "partitions", "--json")["assignments"]) == 4
        assert len(run_command(daemon, "topic", "describe", TOPIC, "--json")["partitions"]) == 4
        report = run_command(daemon, "doctor", "--only", "server", "--json", code=1)
        assert {each["about"] for each in report["findings"]} == addresses
        run_command(daemon, "dlq", "replay", TOPIC, "--all", "--yes", "--json")
        daemon.wait_run(dead, count=2)
        assert "Redis Cluster" in run_command(daemon, "topic", "grow", TOPIC, "8", "--yes", code=8)
        assert daemon.stop() == 0
    run_command(daemon, "topic", "delete", TOPIC, "--yes")
    left = [key for key in cluster.all_keys() if TOPIC in key]
    assert left == [daemon.keys.audit(TOPIC)], "and who has deleted it"


def test_acl_users_work_on_a_cluster(make: Make, cluster: Cluster) -> None:
    daemon = make(partitions=4, consumer={"max_attempts": 2, "backoff": {"base": "10ms"}})
    daemon.write_config(redis={"url": cluster.url, "username": users.read("daemon").user})
    nodes = [connect(node.settings, timeout=5.0, name="test:users") for node in cluster.nodes]
    for node in nodes:
        users.grant(node)
    try:
        with daemon:
            daemon.send(["ok"] * 40 + ["fail", "dead"])
            daemon.wait_settled()
            assert len(daemon.letters()) == 2
            daemon.wait_for(lambda: owners(daemon), what="the housekeeper has told of it")
            for name in ("redis.refused", "housekeeper.failed", "worker.stalled"):
                assert daemon.events(name) == []
            assert daemon.stop() == 0
    finally:
        for node in nodes:
            users.revoke(node)
            node.close()


def owners(daemon: Daemon) -> Any:
    """Return the summary that the instance publishes about its partitions."""
    return daemon.link.execute("GET", daemon.keys.instance("default", "one"))


@pytest.mark.fault("F16", "F18")
def test_killed_cluster_master_is_replaced_by_its_replica(make: Make, cluster: Cluster) -> None:
    daemon = make(partitions=6)
    with daemon:
        epochs = daemon.epochs()
        daemon.send("sleep 0.005" for _ in range(900))
        nodes = nodes_by_partition(cluster, daemon)
        victim = cluster.master_for_key(daemon.keys.stream(TOPIC, 0))
        replica = cluster.replica_for_key(victim)
        wait_until(lambda: offset(replica) == offset(victim), what="the replica has it all")
        victim.kill()
        cluster.wait_promoted(replica)
        daemon.wait_settled(60.0)

        assert daemon.running
        after = daemon.epochs()
        assert all(after[number] >= epochs[number] for number in epochs)
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == audit.unexpected == []
        hit = {number for number, node in nodes.items() if node is victim}
        assert {int(uid.split("/")[1]) for uid in audit.repeated} <= hit
        assert daemon.stop() == 0


def offset(node: Node) -> int:
    """Return the replication offset of a node."""
    lines = node.call("INFO", "replication").decode().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    name = "slave_repl_offset" if facts["role"] == "slave" else "master_repl_offset"
    return int(facts[name])


@pytest.mark.fault("F9", "F16")
@pytest.mark.parametrize("coverage", ["no", "yes"])
def test_hung_cluster_node_stops_only_its_partitions(
    make: Make, cluster: Cluster, coverage: str
) -> None:
    """The other partitions keep their leases while one node hangs.

    The node's replica is down as well, so that no other node takes over. If the cluster requires
    full coverage, the other nodes answer CLUSTERDOWN, and all partitions wait.
    """
    ttl = 3.0
    daemon = make(partitions=6, daemon={"lease_ttl": f"{ttl}s"})
    for node in cluster.nodes:
        node.call("CONFIG", "SET", "cluster-require-full-coverage", coverage)
    hung = cluster.master_for_key(daemon.keys.stream(TOPIC, 0))
    # A replica that resumed with the node could still be elected. The last writes would be lost,
    # and the messages that they acknowledged would run again.
    cluster.replica_for_key(hung).kill()
    with daemon:
        epochs, nodes = daemon.epochs(), nodes_by_partition(cluster, daemon)
        others = [number for number, node in nodes.items() if node is not hung]
        assert others
        daemon.send("sleep 0.002" for _ in range(600))
        mark, began = daemon.mark(), time.monotonic()
        hung.pause()
        try:
            daemon.wait_event("redis.lost", after=mark, role="supervisor")
            daemon.wait_for(
                lambda: time.monotonic() - began > 1.4 * ttl, what="every lease is over", every=0.05
            )
            if coverage == "no":
                living = [Assignment(TOPIC, number, GROUP) for number in others]
                for assignment in living:
                    node = nodes[assignment.partition]
                    assert node.call("EXISTS", daemon.keys.lease(*assignment)), "it is renewed"
                    stream = daemon.keys.stream(*assignment[:2])
                    written = node.call("XADD", stream, "*", "payload", "ok").decode()
                    uid = f"{TOPIC}/{assignment.partition}/{written}"
                    daemon.ledger.record_sent(uid, "ok")
                    daemon.wait_run(uid, "end")
        finally:
            hung.resume()
        cluster.wait_ok()
        daemon.wait_settled(40.0)
        daemon.wait_event("redis.recovered", after=mark, role="supervisor")
        for name in ("lease.lost", "lease.acquired", "worker.crashed"):
            assert daemon.events(name, mark) == []
        assert daemon.epochs() == epochs
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0


@pytest.mark.fault("F24", "F16")
def test_slow_slot_migration_repeats_and_loses_nothing(make: Make, cluster: Cluster) -> None:
    """A slot migration that stops with half of its keys moved repeats and loses no message.

    The replies are first TRYAGAIN, then ASK, then MOVED.
    """
    ttl = 2.0
    daemon = make(partitions=3, daemon={"lease_ttl": f"{ttl}s"})
    with daemon:
        epochs = daemon.epochs()
        daemon.send("sleep 0.003" for _ in range(600))
        stream = daemon.keys.stream(TOPIC, 0)
        mark = daemon.mark()
        source, target = cluster.begin_move(stream)
        source.migrate(target, stream)
        daemon.wait_event("worker.stalled", after=mark, partition=0)
        source.migrate(target, daemon.keys.lease(TOPIC, 0, GROUP))
        daemon.wait_event("redis.lost", after=mark, role="supervisor")
        began = time.monotonic()
        daemon.send(["ok"] * 10, partition=0)  # through ASK: the stream has already moved
        for uid in daemon.send(["ok"] * 10, partition=1):
            daemon.wait_run(uid, "end")
        daemon.wait_for(lambda: time.monotonic() - began > 1.5 * ttl, what="the lease is over")
        cluster.end_move(stream, target)
        cluster.wait_ok()
        daemon.wait_settled(40.0)

        for code in ("ASK", "TRYAGAIN"):
            count = source.refusals(code) + target.refusals(code)
            print(f"{code} was answered {count} times")
            assert count > 0
        assert daemon.epochs() == epochs
        for name in ("lease.lost", "worker.crashed", "request.fenced"):
            assert daemon.events(name, mark) == []
        assert daemon.ledger.audit(GROUP) == Audit()
        assert daemon.stop() == 0
