"""An asynchronous producer on a real server: many tasks, lost answers and canceled sends."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from streamqd import (
    AsyncProducer,
    BacklogFullError,
    BatchOutcomeUnknownError,
    BatchRejectedError,
    OutcomeUnknownError,
    Outgoing,
    TopicNotFoundError,
)
from streamqd.errors import RequestRefusedError
from streamqd.store import topics
from streamqd.store.store import Store
from tests.integration.test_producer_buffered import Gate, payloads, run_in_child, transactions
from tests.support.proxy import Fault

T = TypeVar("T")


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_async_send_returns_the_ids(server, link, keys):
    async def work() -> list[str]:
        async with AsyncProducer(server.url) as producer:
            one = await producer.send("access", b"1", key="k")
            many = await producer.send_many("access", (b"%d" % n for n in range(2, 1200)))
            return [one, *many]

    ids = run(work())

    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found] == ids
    assert payloads(link, keys) == [b"%d" % n for n in range(1, 1200)]


def test_concurrent_async_sends_are_written_together(server, link, store: Store, keys, gate):
    async def work() -> list[str]:
        async with AsyncProducer(server.url, partitioner=gate) as producer:
            first = asyncio.create_task(producer.send("access", b"first"))
            await asyncio.to_thread(gate.reached.wait, 10)
            rest = [asyncio.create_task(producer.send("access", b"%d" % n)) for n in range(200)]
            await asyncio.sleep(0)
            gate.opened.set()
            return await asyncio.gather(first, *rest)

    topics.create(store, "access", topics.Topic(partitions=1))
    before = transactions(link)
    ids = run(work())

    assert len(set(ids)) == 201
    assert transactions(link) == before + 2
    assert payloads(link, keys) == [b"first", *(b"%d" % n for n in range(200))]


def test_async_send_does_not_block_the_event_loop(server, link, keys, gate):
    async def work() -> bool:
        async with AsyncProducer(server.url, partitioner=gate) as producer:
            send = asyncio.create_task(producer.send("access", b"x"))
            await asyncio.to_thread(gate.reached.wait, 10)
            going_on = not send.done()
            gate.opened.set()
            await send
            return going_on

    assert run(work())


def test_async_sends_above_max_messages_take_turns(server, link, keys):
    async def work() -> None:
        async with AsyncProducer(server.url, max_messages=3) as producer:
            await asyncio.gather(*(producer.send("access", b"%d" % n) for n in range(100)))

    run(work())

    assert payloads(link, keys) == [b"%d" % n for n in range(100)]


def test_async_canceled_send_does_not_affect_others(server, link, keys, gate):
    error: list[dict[str, Any]] = []

    async def work() -> tuple[bool, str, str]:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: error.append(what))
        async with AsyncProducer(server.url, partitioner=gate) as producer:
            begun = asyncio.create_task(producer.send("access", b"begun"))
            await asyncio.to_thread(gate.reached.wait, 10)
            waiting = asyncio.create_task(producer.send("access", b"waiting"))
            behind = asyncio.create_task(producer.send("access", b"behind"))
            await asyncio.sleep(0)
            begun.cancel()
            waiting.cancel()
            await asyncio.gather(begun, waiting, return_exceptions=True)
            gate.opened.set()
            return begun.cancelled(), await behind, await producer.send("access", b"later")

    canceled, *ids = run(work())

    assert canceled
    assert error == []
    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    # A send that is already in progress is still written, although the caller sees it as canceled.
    assert [fields[1] for _, fields in found] == [b"begun", b"behind", b"later"]
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found][1:] == ids


def test_async_send_timeout_cancels_the_message(server, link, keys, gate):
    async def work() -> None:
        async with AsyncProducer(server.url, partitioner=gate) as producer:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(producer.send("access", b"1"), 0.01)
            gate.opened.set()
            await producer.send("access", b"2")

    run(work())

    assert payloads(link, keys)[-1] == b"2"


def test_async_send_with_a_lost_reply_is_not_repeated(proxy, link, keys):
    async def work() -> None:
        async with AsyncProducer(proxy.url) as producer:
            await producer.send("access", b"warm")
            proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
            with pytest.raises(OutcomeUnknownError):
                await producer.send("access", b"1")
            proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=2)
            with pytest.raises(BatchOutcomeUnknownError) as caught:
                await producer.send_many("access", (b"%d" % n for n in range(1200)))
            assert (len(caught.value.ids), caught.value.unknown) == (512, 512)
            await producer.send("access", b"last")

    run(work())

    assert payloads(link, keys) == [b"warm", b"1", *(b"%d" % n for n in range(1024)), b"last"]


def test_async_producer_raises_the_errors_of_the_producer(server, link, keys):
    async def work() -> None:
        async with AsyncProducer(server.url, create=False) as producer:
            with pytest.raises(TopicNotFoundError):
                await producer.send("access", b"x")
            with pytest.raises(TypeError):
                await producer.send("access", object())
        async with AsyncProducer(server.url) as producer:
            with pytest.raises(RequestRefusedError) as caught:
                await producer.send_many("access", [b"1", b"2", Outgoing(b"3", partition=7), b"4"])
            assert caught.value.__notes__ == ["2 messages of this call were written before it"]
            link.execute("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(BatchRejectedError) as refused:
                await producer.send_many("access", [b"x", b"y"])
            assert refused.value.ids == [None, None]

    try:
        run(work())
    finally:
        link.execute("CONFIG", "SET", "maxmemory", "0")
    assert payloads(link, keys) == [b"1", b"2"]


def test_async_producer_respects_max_backlog(server, link, keys):
    async def work() -> None:
        async with AsyncProducer(server.url, max_backlog=2) as producer:
            with pytest.raises(BacklogFullError) as caught:
                await producer.send_many("access", [b"1", b"2", b"3"])
            assert [each is not None for each in caught.value.ids] == [True, True, False]

    run(work())


def test_async_producer_may_be_created_outside_a_loop(server, link, keys):
    producer = AsyncProducer(server.url)

    async def work() -> None:
        await producer.send("access", b"x")
        await producer.close()
        await producer.close()
        with pytest.raises(RequestRefusedError, match="closed"):
            await producer.send("access", b"y")

    run(work())

    assert "streamqd-producer" not in {each.name for each in threading.enumerate()}


def test_async_producer_survives_a_closed_loop(server, link, keys, gate):
    producer = AsyncProducer(server.url, partitioner=gate)

    async def leave() -> None:
        task = asyncio.create_task(producer.send("access", b"x"))
        await asyncio.to_thread(gate.reached.wait, 10)
        task.cancel()

    run(leave())
    gate.opened.set()
    run(producer.close())

    assert payloads(link, keys) == [b"x"]


# --- forks ----------------------------------------------------------------------------------------


def sends_of_a_child(producer: AsyncProducer) -> None:
    """Send more than fits at a time, from the child's own event loop."""

    async def work() -> None:
        sends = (producer.send("access", b"child") for _ in range(5))
        assert len(await asyncio.gather(*sends)) == 5
        await producer.close()

    run(work())


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_async_producer_works_in_a_forked_child(server, link, keys):
    producer = AsyncProducer(server.url, max_messages=1)

    async def work() -> None:
        await asyncio.gather(*(producer.send("access", b"parent") for _ in range(5)))

    run(work())
    run_in_child(lambda: sends_of_a_child(producer))
    run(producer.close())

    assert payloads(link, keys) == [b"parent"] * 5 + [b"child"] * 5


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_fork_during_waiting_async_sends_blocks_no_child(server, link, keys, gate):
    parent = os.getpid()

    def choose(key: bytes | None, partitions: int) -> int:
        return gate(key, partitions) if os.getpid() == parent else 0

    async def work() -> None:
        async with AsyncProducer(server.url, partitioner=choose, max_messages=1) as producer:
            sends = [asyncio.create_task(producer.send("access", b"parent")) for _ in range(3)]
            # The first message is being written, the second one blocks the queue, and the third one
            # waits in it.
            await asyncio.to_thread(gate.reached.wait, 10)
            run_in_child(lambda: sends_of_a_child(producer))
            gate.opened.set()
            await asyncio.gather(*sends)

    run(work())

    assert sorted(payloads(link, keys)) == [b"child"] * 5 + [b"parent"] * 3
