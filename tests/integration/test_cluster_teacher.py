"""The scripts of producers are loaded on every node that is currently a master of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamqd import Outgoing, Producer, config
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.housekeeper.script_loader import PRODUCER_SCRIPTS, ScriptLoader
from streamqd.store import scripts, topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.cluster import Cluster, Node
from tests.support.waiting import wait_until

KEYS = Keys("streaming:mq", "stream:topic")
SHAS = [scripts.get(name).sha for name in PRODUCER_SCRIPTS]


@pytest.fixture
def cluster(binary: Path) -> Iterator[Cluster]:
    """A cluster of three masters with a replica each. Tests kill its nodes, so each has its own."""
    with Cluster(binary, cluster_require_full_coverage="no") as made:
        made.wait_ok()
        yield made


@pytest.fixture
def link(cluster: Cluster) -> Iterator[Connection]:
    """The connection of a housekeeper that sends nothing else."""
    made = connect(replace(config.Redis(), url=cluster.url), timeout=1.0, name="test:house")
    yield made
    made.close()


def has_scripts(node: Node) -> bool:
    return bool(node.call("SCRIPT", "EXISTS", *SHAS) == [1] * len(SHAS))


def test_slow_node_does_not_stop_loading_on_other_nodes(cluster: Cluster, link: Connection):
    busy, *others = cluster.masters
    busy.call("CONFIG", "SET", "lua-time-limit", 1)
    spinning = connect(busy.settings, timeout=5.0, name="test:spinning")
    spinning.node.post([("EVAL", "while true do end", 0)])

    def is_busy() -> bool:
        try:
            has_scripts(busy)
        except RedisResponseError as error:
            return error.code == "BUSY"
        return False

    try:
        wait_until(is_busy, what="it refuses everything")
        ScriptLoader(link).run()
        assert all(map(has_scripts, others))
    finally:
        busy.call("SCRIPT", "KILL")
        spinning.close()


def test_scripts_are_loaded_into_a_promoted_replica(cluster: Cluster, link: Connection) -> None:
    teacher = ScriptLoader(link)
    teacher.run()
    assert all(map(has_scripts, cluster.masters))
    first, *others = cluster.masters
    for node in others:
        node.call("SCRIPT", "FLUSH")
    new = cluster.replica_for_key(first)
    first.kill()
    teacher.run()
    assert all(map(has_scripts, others)), "a missing node must not discard the others"

    cluster.wait_promoted(new)
    new.call("SCRIPT", "FLUSH")

    def taught() -> bool:
        teacher.run()  # the daemon does this every 10 s
        return has_scripts(new)

    wait_until(taught, what="the new master is taught, although nothing of ours is there")


def test_script_loaded_between_two_calls_repeats_no_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only unexecuted calls are repeated, because a chunk's calls are not atomic on a cluster."""
    settings = config.Settings(redis=replace(config.Redis(), url=cluster.url))
    admin = connect(settings.redis, timeout=5.0, name="test:admin")
    topics.create(Store(admin, KEYS), "split", config.Topic(partitions=8))
    for node in cluster.masters:
        node.call("SCRIPT", "FLUSH")
    whole = Connection.pipeline_each

    def with_a_daemon(self: Connection, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Load the scripts once the first call to each node has been answered."""
        first = whole(self, commands[:1])
        ScriptLoader(admin).run()
        return [*first, *whole(self, commands[1:])]

    items = [Outgoing(b"%d" % number, partition=number) for number in range(8)]
    with Producer(settings=settings) as producer:
        monkeypatch.setattr(Connection, "pipeline_each", with_a_daemon)
        sent = producer.send_many("split", items)
        monkeypatch.undo()
    written = [
        admin.execute("XRANGE", KEYS.stream("split", number), "-", "+") for number in range(8)
    ]
    admin.close()

    assert [[fields[1] for _, fields in page] for page in written] == [
        [each.value] for each in items
    ]
    assert [each.id for each in sent] == [page[0][0].decode() for page in written]


def test_unreachable_nodes_are_reported(cluster: Cluster, link: Connection) -> None:
    teacher = ScriptLoader(link)
    teacher.run()
    living = [node for node in cluster.nodes if node.running]
    for node in living:
        node.pause()
    try:
        with pytest.raises(RedisUnavailableError):
            teacher.run()
    finally:
        for node in living:
            node.resume()
