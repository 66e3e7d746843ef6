"""The Spark sink writes to a Redis Cluster whose replicas lag when they take over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.spark import streams
from streamqd.spark.options import WriteOptions, write_options
from streamqd.spark.outgoing import Row
from streamqd.store import spark as store
from streamqd.store import topics
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.cluster import Cluster, Node
from tests.support.waiting import wait_until

pytest.importorskip("pyarrow")
sink = pytest.importorskip("streamqd.spark.sink")
staging = pytest.importorskip("streamqd.spark.staging")

QUERY, PARTITIONS = "query", 6
BODIES = [b"%03d" % number for number in range(200)]


@pytest.fixture
def cluster(binary: Path) -> Iterator[Cluster]:
    """A cluster of three masters with one replica each."""
    with Cluster(binary) as made:
        yield made


@pytest.fixture
def options(cluster: Cluster) -> WriteOptions:
    """The options of a topic with partitions on all nodes."""
    made = write_options({"url": cluster.url, "topic": "out", "retryintervalms": "50"}, {})
    link = Store(streams.link_for(made.connection), Keys())
    topics.create(link, "out", config.Topic(partitions=PARTITIONS))
    return made


def write(options: WriteOptions, batch: int, bodies: list[bytes]) -> None:
    """Stage the rows in two tasks and commit them in the driver."""
    parts = []
    for task in range(2):
        stage = staging.Stage(options, QUERY, batch)
        rows = [Row("out", None, body, "", [b"payload", body]) for body in bodies[task::2]]
        parts.append(stage.message(sink.deliver(rows, options, task, stage.send)))
    staging.Publisher(options, QUERY).commit(batch, parts)


def read_written(options: WriteOptions) -> list[bytes]:
    asked = [("XRANGE", Keys().stream("out", number), "-", "+") for number in range(PARTITIONS)]
    pages = streams.link_for(options.connection).pipeline(asked)
    return sorted(fields[1] for page in pages for _, fields in page)


def facts(node: Node) -> dict[str, str]:
    lines = node.call("INFO", "replication").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def cut_off(cluster: Cluster, key: str) -> tuple[Node, Node]:
    """Cut off the replica of a key's master. Return the master and the replica."""
    master = cluster.master_for_key(key)
    replica = cluster.replica_for_key(master)
    wait_until(
        lambda: facts(replica)["slave_repl_offset"] == facts(master)["master_repl_offset"],
        what="the replica has it all",
    )
    replica.call("CONFIG", "SET", "masterauth", "none of its own")
    master.call("CLIENT", "KILL", "TYPE", "replica")
    wait_until(lambda: facts(master)["connected_slaves"] == "0", what="it is cut off")
    return master, replica


def fail_over(cluster: Cluster, master: Node, replica: Node) -> None:
    master.kill()
    cluster.wait_promoted(replica)


def test_rows_staged_again_after_a_failover_are_written_once(
    cluster: Cluster, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are staged again are written once.

    After a failover during the commit, the driver checks the staged rows again before it records
    that the commit has finished.
    """
    real = staging.Publisher._move

    def move(publisher: Any, waiting: Any) -> None:
        monkeypatch.undo()
        nodes = cut_off(cluster, Keys().stream("out", 0))
        real(publisher, waiting)
        fail_over(cluster, *nodes)

    monkeypatch.setattr(staging.Publisher, "_move", move)
    write(options, 3, BODIES)
    assert read_written(options) == BODIES


def test_finished_batch_is_not_written_again_after_a_failover(
    cluster: Cluster, options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished batch is not written again.

    Its plan is open again after the failover, but the emptied streams on the other nodes prove that
    it is done.
    """
    real, nodes = store.end, []

    def end(*given: Any) -> Any:
        nodes.extend(cut_off(cluster, Keys().sink(QUERY)))
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(store, "end", end)
        write(options, 3, BODIES)
    fail_over(cluster, *nodes)
    write(options, 4, [b"next"])
    assert read_written(options) == sorted([*BODIES, b"next"])
