"""The scripts of producers are taught to every master of a cluster, whoever that is just now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamqd import config
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.housekeeper.script_loader import PRODUCER_SCRIPTS, ScriptLoader
from streamqd.store import scripts
from streamqd.store.client import Connection, connect
from tests.support.cluster import Cluster, Node
from tests.support.waiting import wait_until

SHAS = [scripts.get(name).sha for name in PRODUCER_SCRIPTS]


@pytest.fixture(scope="module")
def cluster(binary: Path) -> Iterator[Cluster]:
    """Three masters with a replica each."""
    with Cluster(binary, cluster_require_full_coverage="no") as made:
        made.wait_ok()
        yield made


@pytest.fixture
def link(cluster: Cluster) -> Iterator[Connection]:
    """The link of a housekeeper that asks for nothing else."""
    made = connect(replace(config.Redis(), url=cluster.url), timeout=1.0, name="test:house")
    yield made
    made.close()


def knows(node: Node) -> bool:
    return bool(node.call("SCRIPT", "EXISTS", *SHAS) == [1] * len(SHAS))


def test_a_node_that_answers_later_is_no_reason_to_forget_the_others(
    cluster: Cluster, link: Connection
):
    busy, *others = cluster.masters
    busy.call("CONFIG", "SET", "lua-time-limit", 1)
    spinning = connect(busy.settings, timeout=5.0, name="test:spinning")
    spinning.node.post([("EVAL", "while true do end", 0)])

    def is_busy() -> bool:
        try:
            knows(busy)
        except RedisRefused as error:
            return error.code == "BUSY"
        return False

    try:
        wait_until(is_busy, what="it refuses everything")
        ScriptLoader(link).run()
        assert all(map(knows, others))
    finally:
        busy.call("SCRIPT", "KILL")
        spinning.close()


def test_every_master_is_taught_also_one_that_was_a_replica(
    cluster: Cluster, link: Connection
) -> None:
    teacher = ScriptLoader(link)
    teacher.run()
    assert all(map(knows, cluster.masters))
    first, *others = cluster.masters
    for node in others:
        node.call("SCRIPT", "FLUSH")
    new = cluster.replica_of(first)
    first.kill()
    teacher.run()
    assert all(map(knows, others)), "one that is gone is no reason to forget the others"

    cluster.wait_promoted(new)
    new.call("SCRIPT", "FLUSH")

    def taught() -> bool:
        teacher.run()  # as every 10 s
        return knows(new)

    wait_until(taught, what="the new master is taught, although nothing of ours is there")


def test_when_no_node_answers_that_is_told(cluster: Cluster, link: Connection) -> None:
    teacher = ScriptLoader(link)
    teacher.run()
    living = [node for node in cluster.nodes if node.running]
    for node in living:
        node.pause()
    try:
        with pytest.raises(RedisUnavailable):
            teacher.run()
    finally:
        for node in living:
            node.resume()
