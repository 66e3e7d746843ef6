"""Connections to a whole cluster, and to the node of a single key, on real nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamqd import config, inspection
from streamqd.admin.tail import Tail
from streamqd.errors import OutcomeUnknownError, RedisResponseError, RedisUnavailableError
from streamqd.model import Assignment, Lease
from streamqd.producer import Outgoing, Producer
from streamqd.spark import streams
from streamqd.spark.offsets import EARLIEST
from streamqd.spark.options import read_options
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog
from streamqd.store import leases, messages, topics
from streamqd.store.client import Connection, connect
from streamqd.store.fetch import Fetcher
from streamqd.store.keys import Keys
from streamqd.store.slots import key_slot
from streamqd.store.store import Store
from tests.support import tls
from tests.support.cluster import Cluster
from tests.support.servers import ProcessServer, find_binary, require
from tests.support.waiting import wait_until

Open = Callable[..., Connection]


@pytest.fixture(scope="module")
def whole_cluster(binary: Path) -> Iterator[Cluster]:
    """A cluster of three masters without replicas."""
    with Cluster(binary, replicas=0, cluster_require_full_coverage="no") as made:
        yield made


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Cluster:
    """The same cluster, empty and healthy at the start of each test."""
    whole_cluster.wait_ok()
    whole_cluster.flush()
    return whole_cluster


@pytest.fixture
def open_link(cluster: Cluster) -> Iterator[Open]:
    """A function that makes links to the cluster: `open_link(key="a")`."""
    made: list[Connection] = []

    def make(*, key: str = "", timeout: float = 5.0, **settings: Any) -> Connection:
        redis = replace(config.Redis(), **{"url": cluster.url, **settings})
        made.append(connect(redis, timeout=timeout, name="test", key=key))
        return made[-1]

    yield make
    for each in made:
        each.close()


# --- routing --------------------------------------------------------------------------------------


def test_cluster_replies_keep_the_order_of_the_commands(open_link: Open, cluster: Cluster) -> None:
    link = open_link()
    names = [f"k{number}" for number in range(60)]
    assert {link.node_for_key(name) for name in names} == {""}, (
        "nothing is known before the first use"
    )
    assert link.pipeline([("SET", name, name) for name in names]) == [b"OK"] * 60
    commands = [part for name in names for part in (("GET", name), ("TIME",), ("INCR", name))]
    replies = link.pipeline(commands)
    assert replies[::3] == [name.encode() for name in names]
    assert all(isinstance(reply, RedisResponseError) for reply in replies[2::3])
    assert {link.node_for_key(name) for name in names} == {
        f"127.0.0.1:{node.port}" for node in cluster.masters
    }


def test_cluster_scripts_are_loaded_on_each_node(open_link: Open, keys: Keys) -> None:
    link = open_link()
    assignments = [Assignment("orders", number, "bill") for number in range(12)]
    for reply in link.run_many(
        [messages.ensure_group(keys, assignment, "0") for assignment in assignments]
    ):
        assert reply.word == "CREATED"  # type: ignore[union-attr]
    words = [
        reply.word  # type: ignore[union-attr]
        for reply in link.run_many(
            [
                leases.acquire(keys, Lease(assignment, "t" * 32, 0), 10.0, "me")
                for assignment in assignments
            ]
        )
    ]
    assert words == ["OK"] * 12


def test_cluster_transaction_runs_on_one_node(open_link: Open) -> None:
    *_, done = open_link().pipeline([("MULTI",), ("SET", "{a}1", 1), ("GET", "{a}1"), ("EXEC",)])
    assert done == [b"OK", b"1"]


def test_cluster_command_with_two_slots_is_refused(open_link: Open) -> None:
    with pytest.raises(RedisResponseError) as caught:
        open_link().execute("UNLINK", "a", "b")
    assert caught.value.code == "CROSSSLOT"


def test_together_groups_keys_by_slot(open_link: Open) -> None:
    assert open_link().group_by_node(["{a}1", "b", "{a}2"]) == [["{a}1", "{a}2"], ["b"]]
    assert open_link().group_by_node([]) == []


# --- slots that move ------------------------------------------------------------------------------


@pytest.mark.fault("F24")
def test_cluster_command_follows_a_moved_slot_once(open_link: Open, cluster: Cluster) -> None:
    link, pinned = open_link(), open_link(key="a")
    link.execute("XADD", "a", "*", "f", "1")
    pinned.execute("XLEN", "a")
    source, target = cluster.begin_move("a")
    source.migrate(target, "a")
    cluster.end_move("a", target)

    assert [link.execute("XADD", "a", "*", "f", str(number)) for number in (2, 3)]
    assert link.execute("XLEN", "a") == target.call("XLEN", "a") == 3
    assert link.node_for_key("a") == f"127.0.0.1:{target.port}"
    with pytest.raises(RedisUnavailableError, match="MOVED") as caught:
        pinned.execute("XLEN", "a")
    assert not caught.value.sent
    assert pinned.execute("XLEN", "a") == 3
    assert f":{target.port}" in pinned.address


@pytest.mark.fault("F24")
def test_cluster_slot_move_keeps_the_owner_of_a_fence(
    open_link: Open, cluster: Cluster, keys: Keys
) -> None:
    assignment = Assignment("moving", 1, "bill")
    fence = keys.fence(*assignment)
    open_link().run(leases.acquire(keys, Lease(assignment, "t" * 32, 0), 60.0, "me"))
    link = open_link(key=fence)
    fetcher = Fetcher(link, keys, Lease(assignment, "t" * 32))
    assert fetcher.watch()
    source, target = cluster.begin_move(fence)
    source.migrate(target, fence, keys.lease(*assignment))
    fetcher.send_round([], [], 1)
    with pytest.raises(RedisUnavailableError, match="ASK"):
        fetcher.receive_round(polled=False)
    with pytest.raises(RedisUnavailableError, match="ASK"):
        fetcher.watch()
    cluster.end_move(fence, target)
    assert fetcher.watch()


@pytest.mark.fault("F24")
def test_cluster_finds_each_key_during_a_slot_migration(
    open_link: Open, cluster: Cluster, keys: Keys
) -> None:
    assignment = Assignment("moving", 0, "bill")
    stream, lease, fence = (
        keys.stream(*assignment[:2]),
        keys.lease(*assignment),
        keys.fence(*assignment),
    )
    link = open_link()
    link.execute("XADD", stream, "*", "f", "1")
    link.run(leases.acquire(keys, Lease(assignment, "t" * 32, 0), 60.0, "me"))
    source, target = cluster.begin_move(stream)
    try:
        source.migrate(target, stream, fence)
        assert link.execute("XADD", stream, "*", "f", "2"), "ASK"
        assert target.call("CLUSTER", "COUNTKEYSINSLOT", key_slot(stream)) == 2
        assert link.execute("PTTL", lease) > 0, "it has not moved"
        for made in (link, open_link(key=stream)):
            with pytest.raises(RedisUnavailableError) as caught:
                made.run(
                    leases.renew(keys, Lease(assignment, "t" * 32), 60.0)
                )  # one key for each node
            assert not caught.value.sent
        source.migrate(target, lease)
        assert link.run(leases.renew(keys, Lease(assignment, "t" * 32), 60.0)).word == "OK", (
            "ASK for a script"
        )
    finally:
        cluster.end_move(stream, target)
    assert link.execute("XLEN", stream) == 2
    assert link.run(leases.renew(keys, Lease(assignment, "t" * 32), 60.0)).word == "OK"


# --- nodes that do not answer ---------------------------------------------------------------------


@pytest.mark.fault("F16")
def test_hung_cluster_node_fails_only_its_own_commands(open_link: Open, cluster: Cluster) -> None:
    link = open_link(timeout=0.5)
    names = [f"k{number}" for number in range(30)]
    link.pipeline([("SET", name, name) for name in names])
    hung = cluster.master_for_key(names[0])
    theirs = {name for name in names if cluster.master_for_key(name) is hung}
    hung.pause()
    try:
        answers = link.pipeline_each([("INCR", f"{{{name}}}n") for name in names])
        with pytest.raises(RedisUnavailableError) as caught:
            link.pipeline([("GET", name) for name in names])
        assert caught.value.sent, "some were executed"
        assert link.execute("TIME"), "another node answers"
    finally:
        hung.resume()
    for name, answer in zip(names, answers, strict=True):
        if name in theirs:
            assert isinstance(answer, RedisUnavailableError)
            assert answer.sent, "it was written to the connection"
        else:
            assert answer == 1
    assert link.pipeline([("GET", name) for name in names]) == [name.encode() for name in names]


def test_unreachable_cluster_raises_one_error(cluster: Cluster) -> None:
    settings = replace(config.Redis(), url="redis+cluster://me:s3cret@127.0.0.1:1,127.0.0.1:2")
    for key in ("", "a"):
        link = connect(settings, timeout=1.0, name="test", key=key)
        with pytest.raises(
            RedisUnavailableError, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: "
        ) as caught:
            link.execute("GET", "a")
        assert not caught.value.sent
        assert "s3cret" not in str(caught.value)


def test_cluster_url_of_a_single_server_is_an_error(
    new_server: Callable[..., ProcessServer], open_link: Open
) -> None:
    plain = new_server(tcp=True)
    with pytest.raises(RedisUnavailableError, match="cluster support disabled"):
        open_link(url=plain.tcp_url.replace("redis:", "redis+cluster:")).execute("GET", "a")


def test_cluster_link_reconnects_in_a_forked_child(open_link: Open) -> None:
    link = open_link()
    before = {each.execute("CLIENT", "ID") for each in link.masters()}
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="detach it"):
                link.execute("SET", "child", 0)
            link.detach()
            link.execute("SET", "child", 1)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.execute("GET", "child") == b"1"
    assert {each.execute("CLIENT", "ID") for each in link.masters()} == before


def test_cluster_link_without_a_key_has_no_single_node(open_link: Open) -> None:
    with pytest.raises(RuntimeError, match="connect with a key"):
        _ = open_link().node
    assert open_link(key="a").node.open_transport().sock.fileno() >= 0


def test_plain_url_of_a_cluster_node_is_reported(cluster: Cluster) -> None:
    settings = replace(config.Redis(), url=f"redis://127.0.0.1:{cluster.masters[0].port}")
    link = connect(settings, timeout=5.0, name="test")
    servers = inspection.ask_servers(link, 0.0)
    link.close()
    problems, _ = inspection.check_servers(servers, replace(config.Settings(), redis=settings))
    assert problems == [
        'redis: the server is a node of a Redis Cluster; write "redis+cluster://HOST:PORT,HOST:PORT"'
    ]


def test_tail_follows_all_cluster_nodes(
    new_producer: Callable[..., Producer], open_link: Open, keys: Keys
) -> None:
    producer, link = new_producer(), open_link()
    producer.send("orders", "before")
    news = Tail(Store(link, keys), "orders").follow()
    ids = producer.send_many("orders", [Outgoing("y", partition=n) for n in range(6)])
    seen = {each.partition: each.id for each in next(news)}
    assert seen == {each.partition: each.id for each in ids}


# --- producers ------------------------------------------------------------------------------------


@pytest.fixture
def new_producer(cluster: Cluster) -> Iterator[Callable[..., Producer]]:
    made: list[Producer] = []

    def make(**options: Any) -> Producer:
        topic = config.Topic(partitions=6)
        settings = replace(
            config.Settings(),
            redis=replace(config.Redis(), url=cluster.url),
            topics={"orders": topic},
        )
        made.append(Producer(settings=settings, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_batch_keeps_its_order_on_every_cluster_node(
    new_producer: Callable[..., Producer], open_link: Open, keys: Keys
) -> None:
    ids = new_producer().send_many(
        "orders", [Outgoing(str(n), partition=n % 6) for n in range(600)]
    )
    link = open_link()
    for number in range(6):
        entries = link.execute("XRANGE", keys.stream("orders", number), "-", "+")
        assert [entry[0].decode() for entry in entries] == [each.id for each in ids[number::6]]
        assert [int(entry[1][1]) for entry in entries] == list(range(number, 600, 6))


def test_cluster_supports_delays_and_dedup_ids(
    new_producer: Callable[..., Producer], open_link: Open, keys: Keys
) -> None:
    producer = new_producer(max_backlog=1000)
    first = producer.send("orders", "x", dedup_id="one")
    assert producer.send("orders", "x", dedup_id="one") == first
    producer.send("orders", "later", delay=60.0, partition=1)
    assert open_link().execute("ZCARD", keys.delayed_sends("orders", 1)) == 1


def test_cluster_producer_notices_a_recreated_topic(
    new_producer: Callable[..., Producer], open_link: Open, keys: Keys
) -> None:
    producer, link = new_producer(), open_link()
    producer.send("orders", "x")
    link.execute("UNLINK", keys.meta("orders"))
    topics.create(Store(link, keys), "orders", config.Topic(partitions=2))
    producer.send("orders", "x")
    producer.send_many("orders", [Outgoing("y", key=f"{n}") for n in range(40)])
    lengths = link.pipeline([("XLEN", keys.stream("orders", number)) for number in range(6)])
    assert sum(lengths[:2]) >= 40
    assert sum(lengths) == 42


@pytest.mark.fault("F12")
def test_dead_node_makes_only_its_outcomes_unknown(
    new_producer: Callable[..., Producer], open_link: Open, cluster: Cluster, keys: Keys
) -> None:
    producer, link = new_producer(timeout=0.4), open_link()
    producer.send("orders", "first")
    sender = producer._sender
    [envelopes] = sender.split_batches(Outgoing("y", partition=n % 6) for n in range(60))
    hung = cluster.master_for_key(keys.stream("orders", 0))
    hung.pause()
    try:
        results = sender.post("orders", envelopes)
    finally:
        hung.resume()
    cluster.wait_ok()
    theirs = {n for n in range(6) if cluster.master_for_key(keys.stream("orders", n)) is hung}
    for number, result in enumerate(results):
        assert isinstance(result, OutcomeUnknownError if number % 6 in theirs else str)
    lengths = [link.execute("XLEN", keys.stream("orders", number)) for number in range(6)]
    assert max(lengths) <= 11, "nothing was written twice"
    assert all(lengths[number] >= 10 for number in {*range(6)} - theirs)


# --- Spark ----------------------------------------------------------------------------------------


def test_spark_source_reads_each_partition_from_its_node(
    new_producer: Callable[..., Producer], cluster: Cluster
) -> None:
    """Each partition is read from its node.

    The test runs the steps of a task without Spark, and moves a slot between two reads.
    """
    ids = new_producer().send_many("orders", [Outgoing("y", partition=n % 6) for n in range(120)])
    options = read_options({"url": cluster.url, "subscribe": "orders"}, {})
    for _ in range(2):
        catalog = Catalog(options)
        facts = catalog.facts(catalog.places())
        ends = {place: facts[place].latest for place in facts}
        spans = catalog.spans(catalog.starts(facts, EARLIEST), ends, facts)
        found = {
            place[1]: [
                entry[0].decode()
                for batch in EntryReader(options, span).batches()
                for entry in batch
            ]
            for place, span in spans.items()
        }
        assert found == {number: [each.id for each in ids[number::6]] for number in range(6)}
        stream = Keys().stream("orders", 0)
        source, target = cluster.begin_move(stream)
        source.migrate(target, stream)
        cluster.end_move(stream, target)


def test_spark_source_opens_few_connections(cluster: Cluster) -> None:
    """The source opens few connections, even for many slots, and after the password has changed."""
    options = read_options({"url": cluster.url, "subscribe": "orders"}, {}).connection
    for number in range(5 * streams.LINKS_MAX):
        assert streams.link_for(options, f"{{{number}}}").execute("GET", f"{{{number}}}") is None
    last = f"{{{5 * streams.LINKS_MAX - 1}}}"
    assert streams.link_for(options, last) is streams.link_for(options, last)

    def opened() -> int:
        lists = [node.call("CLIENT", "LIST").decode() for node in cluster.nodes]
        return sum(each.count("name=streamqd:spark") for each in lists)

    # A server lists a closed connection until it has read the end of the stream.
    wait_until(lambda: opened() <= streams.LINKS_MAX, what="the closed connections are gone")
    for each in streams._links.values():
        each.used_at -= 2 * streams.IDLE_MAX
    streams.link_for(replace(options, redis=replace(options.redis, username="new")))
    wait_until(lambda: opened() == 0, what="the connections of the old user are gone")


# --- TLS ------------------------------------------------------------------------------------------


@pytest.mark.fault("F36")
def test_cluster_link_uses_client_certificates(tmp_path: Path) -> None:
    folder, binary = require(tls.certificates, tmp_path), require(find_binary, "redis7")
    with Cluster(binary, masters=2, replicas=0, certificates=folder) as cluster:
        settings = tls.settings(cluster.url, folder)
        for key in ("", "a"):
            link = connect(settings, timeout=5.0, name="test", key=key)
            assert link.execute("SET", "a", "1") == b"OK"
            link.close()
            stranger = replace(settings, ca_file=folder / "other.pem")
            with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                connect(stranger, timeout=5.0, name="test", key=key).execute("GET", "a")
