"""Producers that have a writing thread wait for room in a full partition."""

from __future__ import annotations

import asyncio
import threading

import pytest

from streamqd import AsyncProducer, BacklogFullError, BufferedProducer, Producer
from streamqd.producer.chunk import Chunk, Result
from streamqd.producer.sender import Sender
from streamqd.store import growth, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.integration.test_producer_buffered import payloads
from tests.support.waiting import wait_until


def crowd(link: Connection, keys: Keys, url: str) -> None:
    """Create a topic of two partitions with a group.

    Its first partition is full if max_backlog is 1.
    """
    topics.create(Store(link, keys), "access", topics.Topic(partitions=2))
    link.execute("XGROUP", "CREATE", keys.stream("access", 0), "g", "0", "MKSTREAM")
    with Producer(url) as producer:
        producer.send("access", b"first", partition=0)


def make_room(link: Connection, keys: Keys) -> None:
    """Acknowledge every entry of the full partition."""
    stream = keys.stream("access", 0)
    read = link.execute("XREADGROUP", "GROUP", "g", "w", "STREAMS", stream, ">")
    link.execute("XACK", stream, "g", *(entry_id for entry_id, _ in read[0][1]))


def test_full_partition_delays_only_its_own_messages(server, link, keys):
    crowd(link, keys, server.url)
    with BufferedProducer(server.url, linger=0, max_backlog=1, backlog_wait="20s") as producer:
        full = producer.send("access", b"second", partition=0)
        assert producer.send("other", b"x").result(10)
        assert producer.send("access", b"y", partition=1).result(10)
        assert producer.send("another", b"x").result(10)
        assert not full.done()
        assert not producer.flush(0)
        make_room(link, keys)
        behind = producer.send("access", b"third", partition=0)  # before the next check for room
        assert full.result(10)
        assert not behind.done()
        make_room(link, keys)
        assert behind.result(10)
        assert producer.flush(10)
    assert payloads(link, keys) == [b"first", b"second", b"third"]


def test_expired_backlog_wait_also_refuses_later_messages(server, link, keys):
    crowd(link, keys, server.url)
    with BufferedProducer(server.url, linger=0, max_backlog=1, backlog_wait="50ms") as producer:
        receipts = [producer.send("access", b"x", partition=0) for _ in range(20)]
        assert producer.flush(10)
        assert {type(each.exception(0)) for each in receipts} == {BacklogFullError}
    assert payloads(link, keys) == [b"first"]


def test_close_fails_messages_that_wait_for_room(server, link, keys):
    crowd(link, keys, server.url)
    producer = BufferedProducer(server.url, linger=0, max_backlog=1, backlog_wait="1h")
    receipt = producer.send("access", b"x", partition=0)
    assert producer.send("other", b"x").result(10)
    assert not producer.close(timeout=0)
    with pytest.raises(BacklogFullError):
        receipt.result(10)
    wait_until(lambda: "streamqd-producer" not in {each.name for each in threading.enumerate()})


def test_growth_keeps_the_order_of_waiting_messages(server, link, keys):
    crowd(link, keys, server.url)
    with BufferedProducer(
        server.url, linger=0, max_backlog=1, backlog_wait="20s", partitioner={"access": moving}
    ) as producer:
        waiting = producer.send("access", b"1", key="k")
        assert producer.send("other", b"x").result(10)
        link.run(growth.begin(keys, "access", 2, 4, "t1"))
        link.run(growth.switch(keys, "access", "t1", range(2, 4)))
        assert producer.send("another", b"x").result(10)  # now the producer knows the new count
        behind = producer.send("access", b"2", key="k")
        assert waiting.result(10)
        assert not behind.done()
        assert payloads(link, keys, partition=2) == [b"1"]
        link.execute("DEL", keys.stream("access", 2))
        assert behind.result(10)


def moving(_key: bytes | None, partitions: int) -> int:
    """Return a partition that changes from the full one to a new one when the topic grows."""
    return partitions - 2


def test_tasks_wait_only_for_their_own_partition(server, link, keys):
    crowd(link, keys, server.url)

    async def work() -> None:
        async with AsyncProducer(server.url, max_backlog=1, backlog_wait="20s") as producer:
            full = asyncio.create_task(producer.send("access", b"second", partition=0))
            behind = asyncio.create_task(producer.send("access", b"third", partition=0))
            await asyncio.sleep(0)
            await asyncio.wait_for(producer.send("other", b"x"), 10)
            await asyncio.wait_for(producer.send("access", b"y", partition=1), 10)
            assert not full.done()
            make_room(link, keys)
            await asyncio.wait_for(full, 10)
            make_room(link, keys)
            await asyncio.wait_for(behind, 10)

    asyncio.run(work())
    assert payloads(link, keys) == [b"first", b"second", b"third"]


def test_check_for_room_is_linear_in_waiting_messages(server, link, keys, monkeypatch):
    """A check is linear. It does not compare 300 waiting sends of a partition with one another."""
    crowd(link, keys, server.url)
    compared, tried = [0], [0]
    full_partitions, write = Chunk.full_partitions, Sender._write

    def counted(chunk: Chunk) -> set[int]:
        compared[0] += 1
        return full_partitions(chunk)

    def noted(sender: Sender, chunk: Chunk, end: float, *, fixed: bool) -> list[Result]:
        tried[0] += 1
        return write(sender, chunk, end, fixed=fixed)

    monkeypatch.setattr(Chunk, "full_partitions", counted)
    monkeypatch.setattr(Sender, "_write", noted)
    producer = BufferedProducer(
        server.url, linger=0, max_batch=1, max_backlog=1, backlog_wait="60s"
    )
    full = [producer.send("access", b"x", partition=0) for _ in range(300)]
    wait_until(lambda: tried[0] >= 10 and len(producer._buffer._waiting) == 300)
    assert producer.send("access", b"y", partition=1).result(10)
    assert compared[0] <= 300 * (tried[0] + 2)
    make_room(link, keys)
    assert full[0].result(10)
    assert not producer.close(0)
    assert {type(each.exception(10)) for each in full[1:]} == {BacklogFullError}
