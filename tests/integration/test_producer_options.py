"""A producer on a real server supports partitioners, instants and `max_backlog`."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from streamqd import BacklogFullError, BatchOutcomeUnknownError, Outgoing, Producer
from streamqd.config import Topic
from streamqd.errors import ContractError, RedisResponseError
from streamqd.policy.partitioning import jump_partition
from streamqd.store import growth, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.integration.test_producer_buffered import payloads
from tests.support.proxy import Fault

GROUP = "hits"


def places(link: Connection, keys: Keys, count: int) -> Counter[int]:
    return Counter(
        {n: length for n in range(count) if (length := len(payloads(link, keys, partition=n)))}
    )


def create(link: Connection, keys: Keys, partitions: int) -> None:
    topics.create(Store(link, keys), "access", Topic(partitions=partitions))


# --- partitioners ---------------------------------------------------------------------------------


def test_round_robin_spreads_messages_of_one_key(server, link, keys):
    create(link, keys, 4)
    with Producer(server.url, partitioner="round-robin") as producer:
        producer.send_many("access", [Outgoing(b"x", "same")] * 8)

    assert places(link, keys, 4) == {0: 2, 1: 2, 2: 2, 3: 2}
    [(_, fields)] = link.execute("XRANGE", keys.stream("access", 0), "-", "+", "COUNT", 1)
    assert fields == [b"payload", b"x", b"key", b"same"]


def test_sticky_partitioner_writes_a_chunk_to_one_partition(server, link, keys):
    create(link, keys, 4)
    with Producer(server.url, partitioner="sticky") as producer:
        producer.send_many("access", [b"x"] * (3 * 512))

    assert sorted(places(link, keys, 4).values()) == [512, 512, 512]


def test_sticky_single_sends_take_partitions_in_turn(server, link, keys):
    create(link, keys, 4)
    with Producer(server.url, partitioner="sticky") as producer:
        for _ in range(8):
            producer.send("access", b"x")

    assert places(link, keys, 4) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_consistent_keys_move_only_to_new_partitions(server, link, keys):
    create(link, keys, 2)
    names = [f"customer-{n}" for n in range(200)]
    with Producer(server.url, partitioner="consistent") as producer:
        producer.send_many("access", [Outgoing(b"1", name) for name in names])
        link.run(growth.begin(keys, "access", 2, 4, "t1"))
        link.run(growth.switch(keys, "access", "t1", range(2, 4)))
        producer.send_many("access", [Outgoing(b"2", name) for name in names])

    expected = Counter(jump_partition(name.encode(), 2) for name in names)
    expected += Counter(jump_partition(name.encode(), 4) for name in names)
    assert places(link, keys, 4) == expected
    assert expected[2]
    assert expected[3]


def test_error_of_a_partitioner_is_raised_by_send(server, link, keys):
    def choose(key: bytes | None, partitions: int) -> int:
        raise LookupError("no such customer")

    with Producer(server.url, partitioner=choose) as producer, pytest.raises(LookupError):
        producer.send("access", b"x")


# --- instants -------------------------------------------------------------------------------------


def test_send_at_keeps_the_millisecond(server, link, keys):
    noon = datetime(2040, 1, 1, 12, 0, 0, 123_000, tzinfo=UTC)
    with Producer(server.url) as producer:
        first = producer.send("access", b"x", at=noon)
        producer.send_many("access", [Outgoing(b"y", at=noon.timestamp() + 1)])

    found = link.execute("ZRANGE", keys.delayed_sends("access", 0), 0, -1, "WITHSCORES")
    due = round(noon.timestamp() * 1000)
    assert [found[0].decode(), found[1], found[3]] == [first.id, b"%d" % due, b"%d" % (due + 1000)]


# --- the limit of the backlog ---------------------------------------------------------------------


def acknowledge(link: Connection, keys: Keys, count: int, topic: str = "access") -> None:
    stream = keys.stream(topic, 0)
    read = ("XREADGROUP", "GROUP", GROUP, "w", "COUNT", count, "STREAMS", stream, ">")
    ids = [entry_id for entry_id, _ in link.execute(*read)[0][1]]
    link.execute("XACK", stream, GROUP, *ids)


def group(link: Connection, keys: Keys) -> None:
    create(link, keys, 1)
    link.execute("XGROUP", "CREATE", keys.stream("access", 0), GROUP, "0", "MKSTREAM")


def test_full_partition_refuses_until_there_is_room(server, link, keys):
    group(link, keys)
    with Producer(server.url, max_backlog=3) as producer:
        producer.send_many("access", [b"1", b"2", b"3"])
        with pytest.raises(BacklogFullError, match="access/0 has a backlog of 3 messages"):
            producer.send("access", b"4")
        acknowledge(link, keys, 3)
        producer.send("access", b"5")

    assert payloads(link, keys) == [b"1", b"2", b"3", b"5"]


def test_send_many_reports_the_messages_that_were_written(server, link, keys):
    create(link, keys, 2)
    with Producer(server.url, max_backlog=2) as producer:
        items = [Outgoing(b"%d" % n, partition=n % 2 if n < 4 else 0) for n in range(6)]
        with pytest.raises(BacklogFullError) as caught:
            producer.send_many("access", items)

    assert [each is not None for each in caught.value.ids] == [True] * 4 + [False] * 2


def test_producer_waits_for_room_and_keeps_the_order(server, link, keys, new_link):
    group(link, keys)
    reader = new_link()
    read: list[bytes] = []
    stop = threading.Event()

    def consume() -> None:
        stream = keys.stream("access", 0)
        while not stop.is_set() and len(read) < 40:
            found = reader.execute(
                "XREADGROUP", "GROUP", GROUP, "w", "COUNT", 5, "BLOCK", 50, "STREAMS", stream, ">"
            )
            for entry_id, fields in found[0][1] if found else ():
                read.append(fields[1])
                reader.execute("XACK", stream, GROUP, entry_id)

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        with Producer(server.url, max_backlog=10, backlog_wait=30) as producer:
            producer.send_many("access", [b"%d" % n for n in range(40)])
        consumer.join(30)
    finally:
        stop.set()
        consumer.join()

    assert read == [b"%d" % n for n in range(40)]


def test_backlog_wait_raises_after_its_timeout(server, link, keys):
    with Producer(server.url, max_backlog=1, backlog_wait=0.05) as producer:
        producer.send("access", b"1")
        with pytest.raises(BacklogFullError):
            producer.send("access", b"2")


def test_send_with_max_backlog_is_not_repeated_after_a_loss(proxy, link, keys):
    with Producer(proxy.url, max_backlog=10) as producer:
        producer.send("access", b"warm")
        proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        with pytest.raises(BatchOutcomeUnknownError) as caught:
            producer.send_many("access", [b"1", b"2"])

    assert (caught.value.ids, caught.value.unknown) == ([], 2)
    assert payloads(link, keys) == [b"warm", b"1", b"2"]


def test_backlog_limit_without_script_permission_is_an_error(server, link, keys):
    create(link, keys, 1)
    rights = ["+xadd", "+hget", "+client", "~stream:*", "~streaming:*", "+watch", "+multi", "+exec"]
    link.execute("ACL", "SETUSER", "sender", "reset", "on", "nopass", *rights)
    try:
        url = server.url.replace("unix://", "unix://sender:x@")
        with (
            Producer(url, max_backlog=5) as producer,
            pytest.raises(RedisResponseError, match="NOPERM"),
        ):
            producer.send("access", b"x")
    finally:
        link.execute("ACL", "DELUSER", "sender")


@pytest.mark.parametrize("wrong", [0, -1])
def test_max_backlog_must_be_at_least_one(server: Any, wrong: int) -> None:
    with pytest.raises((ValueError, ContractError)):
        Producer(server.url, max_backlog=wrong)


def test_send_many_writes_mixed_items_in_order(server, link, keys):
    with Producer(server.url) as producer:
        ids = producer.send_many(
            "access",
            [
                b"1",
                Outgoing(b"2", dedup_id="a"),
                Outgoing(b"later", delay=60),
                Outgoing(b"again", dedup_id="a"),
                b"3",
            ],
        )

    assert payloads(link, keys) == [b"1", b"2", b"3"]
    assert ids[1] == ids[3]
    assert link.execute("ZRANGE", keys.delayed_sends("access", 0), 0, -1) == [ids[2].id.encode()]
