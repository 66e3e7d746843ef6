"""`send_many` prepares a chunk while Redis executes the previous one, even if something fails."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from streamqd import BatchOutcomeUnknownError, BatchRejectedError, Outgoing, Producer
from streamqd.config import Topic
from streamqd.errors import RedisResponseError
from streamqd.store import growth, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.integration.test_producer_buffered import payloads
from tests.support.proxy import Fault
from tests.support.servers import Server
from tests.support.waiting import wait_until

CHUNK = 512  # messages in one transaction
UNDER_WAY = CHUNK + 88  # when this item is made, the first chunk has no answer yet


@pytest.fixture
def producer(server: Server, link: Connection) -> Iterator[Producer]:
    with Producer(server.url) as made:
        made.send("access", b"warm")
        yield made


def yield_numbers(count: int, step: Callable[[], object], at: int = UNDER_WAY) -> Iterator[bytes]:
    """Yield items, and take an action just before one of them."""
    for number in range(count):
        if number == at:
            step()
        yield b"%d" % number


def make_texts(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def stream_ids(
    link: Connection, keys: Keys, topic: str = "access", partition: int = 0
) -> list[str]:
    found = link.execute("XRANGE", keys.stream(topic, partition), "-", "+")
    return [f"{topic}/{partition}/{raw_id.decode()}" for raw_id, _ in found]


def assert_in_step(producer: Producer, link: Connection, keys: Keys, topic: str = "access") -> None:
    """Check that each answer belongs to its own request."""
    for text in (b"one", b"two"):
        sent = producer.send(topic, text)
        [[_, fields]] = link.execute("XRANGE", keys.stream(topic, 0), sent.id, sent.id)
        assert fields == [b"payload", text]


# --- chunks made ahead ----------------------------------------------------------------------------


def test_send_many_prepares_one_chunk_ahead(proxy, link, keys):
    made: list[int] = []
    ahead = threading.Event()

    def items() -> Iterator[bytes]:
        for number in range(2000):
            made.append(number)
            if len(made) == 2 * CHUNK:
                ahead.set()
            yield b"%d" % number

    with Producer(proxy.url) as producer, ThreadPoolExecutor() as pool:
        producer.send("access", b"warm")
        answer = proxy.arm(Fault.HOLD_REPLY, command="EVALSHA")
        sending = pool.submit(producer.send_many, "access", items())
        assert ahead.wait(10)
        answer.wait()
        sent = len(payloads(link, keys))
        known = len(made)
        answer.release()
        ids = sending.result(10)

    assert (sent, known) == (1 + CHUNK, 2 * CHUNK)
    assert stream_ids(link, keys)[1:] == ids
    assert payloads(link, keys)[1:] == make_texts(2000)


def test_send_chunks_encodes_no_chunk_ahead(producer, link, keys):
    made: list[int] = []
    chunks = producer.send_chunks("access", (made.append(n) or b"x" for n in range(2000)))
    next(chunks)

    assert len(made) == CHUNK
    assert len(payloads(link, keys)) == 1 + CHUNK


def test_failing_item_does_not_drop_the_chunk_in_progress(producer, link, keys):
    def fail() -> None:
        raise LookupError("the source is gone")

    with pytest.raises(LookupError) as caught:
        producer.send_many("access", yield_numbers(2000, fail))

    assert caught.value.__notes__ == [f"{UNDER_WAY} messages of this call were written before it"]
    assert payloads(link, keys)[1:] == make_texts(UNDER_WAY)
    assert_in_step(producer, link, keys)


# --- missing answers ------------------------------------------------------------------------------


@pytest.mark.fault("F13")
@pytest.mark.parametrize("fault", [Fault.DROP_REPLY, Fault.CUT_REPLY, Fault.SWALLOW_REPLY])
@pytest.mark.parametrize("chunk", [1, 2])
def test_lost_reply_stops_the_following_chunks(proxy, link, keys, fault, chunk):
    with Producer(proxy.url, timeout=0.5) as producer:
        producer.send("access", b"warm")
        proxy.arm(fault, command="EVALSHA", nth=chunk)
        with pytest.raises(BatchOutcomeUnknownError) as caught:
            producer.send_many("access", (b"%d" % n for n in range(2000)))
        assert_in_step(producer, link, keys)

    written = chunk * CHUNK  # the server executes the commands despite each fault
    assert caught.value.unknown == CHUNK
    assert caught.value.ids == stream_ids(link, keys)[1 : 1 + written - CHUNK]
    assert payloads(link, keys)[1 : 1 + written] == make_texts(written)
    assert payloads(link, keys)[1 + written :] == [b"one", b"two"]


def test_send_many_reads_the_reply_after_slow_items(server, link, keys):
    with Producer(server.url, timeout=0.2) as producer:
        ids = producer.send_many("access", yield_numbers(2000, lambda: threading.Event().wait(0.5)))

    assert ids == stream_ids(link, keys)


@pytest.mark.fault("F13")
def test_reset_during_a_chunk_writes_none_of_its_messages(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm")
        proxy.arm(Fault.CUT_BEFORE, command="EVALSHA", nth=2)
        with pytest.raises(BatchOutcomeUnknownError) as caught:
            producer.send_many("access", (b"%d" % n for n in range(2000)))
        assert_in_step(producer, link, keys)

    assert (len(caught.value.ids), caught.value.unknown) == (CHUNK, CHUNK)
    assert payloads(link, keys)[1:] == [*make_texts(CHUNK), b"one", b"two"]


def test_send_many_with_dedup_ids_continues_after_a_lost_reply(proxy, link, keys):
    with Producer(proxy.url) as producer:
        producer.send("access", b"warm", dedup_id="warm")
        proxy.arm(Fault.DROP_REPLY, command="EVALSHA", nth=2)
        items = (Outgoing(b"%d" % n, dedup_id=str(n)) for n in range(3 * CHUNK))
        ids = producer.send_many("access", items)

    assert ids == stream_ids(link, keys)[1:]
    assert payloads(link, keys)[1:] == make_texts(3 * CHUNK)


# --- errors between two chunks --------------------------------------------------------------------


def _no_memory(link: Connection) -> Callable[[], object]:
    link.execute("CONFIG", "SET", "maxmemory", "1")
    return lambda: link.execute("CONFIG", "SET", "maxmemory", "0")


def _no_right(link: Connection) -> Callable[[], object]:
    link.execute("ACL", "SETUSER", "default", "-xadd")
    return lambda: link.execute("ACL", "SETUSER", "default", "+@all")


def _no_master(link: Connection) -> Callable[[], object]:
    link.execute("REPLICAOF", "127.0.0.1", "1")
    return lambda: link.execute("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize(
    ("spoil", "code"), [(_no_memory, "OOM"), (_no_right, "NOPERM"), (_no_master, "READONLY")]
)
@pytest.mark.parametrize("before", [0, 1])
def test_refused_chunk_stops_send_many(producer, link, keys, monkeypatch, spoil, code, before):
    monkeypatch.setattr("streamqd.producer.sender.PAUSES", (0.0,))
    mend: list[Callable[[], object]] = []

    def spoil_it() -> None:
        wait_until(lambda: len(payloads(link, keys)) == 1 + before * CHUNK)
        mend.append(spoil(link))

    items = yield_numbers(2000, spoil_it, at=before * CHUNK + 88)
    try:
        with pytest.raises(BatchRejectedError) as caught:
            producer.send_many("access", items)
    finally:
        for each in mend:
            each()

    assert caught.value.code == code
    assert caught.value.ids == stream_ids(link, keys)[1:] + [None] * CHUNK
    assert payloads(link, keys)[1:] == make_texts(before * CHUNK)
    assert_in_step(producer, link, keys)


def test_interrupted_send_many_leaves_no_stale_reply(producer, link, keys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        producer.send_many("access", yield_numbers(2000, interrupt))
    assert_in_step(producer, link, keys)


# --- items that use the producer ------------------------------------------------------------------


def test_item_iterator_may_send_with_the_same_producer(producer, link, keys):
    def items() -> Iterator[bytes]:
        for number in range(3 * CHUNK):
            if number % 100 == 50:
                assert_in_step(producer, link, keys, "other")
            yield b"%d" % number

    ids = producer.send_many("access", items())

    assert ids == stream_ids(link, keys)[1:]
    assert payloads(link, keys)[1:] == make_texts(3 * CHUNK)
    assert payloads(link, keys, "other") == [b"one", b"two"] * 15


def test_item_iterator_may_send_many_with_the_same_producer(producer, link, keys):
    inner: list[str] = []

    def send() -> None:
        inner.extend(producer.send_many("other", (b"%d" % n for n in range(2000))))

    ids = producer.send_many("access", yield_numbers(2000, send))

    assert (ids, inner) == (stream_ids(link, keys)[1:], stream_ids(link, keys, "other"))
    assert payloads(link, keys, "other") == make_texts(2000)


def test_producer_closed_by_an_item_still_gets_its_reply(producer, link, keys):
    ids = producer.send_many("access", yield_numbers(2000, producer.close))

    assert ids == stream_ids(link, keys)[1:]
    assert payloads(link, keys)[1:] == make_texts(2000)


def test_reply_lost_in_a_nested_send_is_lost_for_the_outer_one(proxy, link, keys):
    with Producer(proxy.url, timeout=0.5) as producer:
        producer.send("access", b"warm")

        def cut_and_go_on() -> None:
            proxy.cut()
            assert_in_step(producer, link, keys, "other")

        lost = proxy.arm(Fault.HOLD_REPLY, command="EVALSHA")
        with pytest.raises(BatchOutcomeUnknownError) as caught:
            producer.send_many("access", yield_numbers(2000, cut_and_go_on))
        lost.release()
        assert_in_step(producer, link, keys)

    assert (caught.value.ids, caught.value.unknown) == ([], CHUNK)


class Interruption(BaseException):
    """An exception that derives from BaseException, like KeyboardInterrupt."""


def test_abandoned_reply_is_not_read_on_a_new_connection(proxy, link, keys):
    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name != "read_all":
            frame = frame.f_back
        if frame is not None:
            raise Interruption
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # at this time, the producer is not waiting yet

    def swallow_it() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with contextlib.suppress(Interruption):
            producer.send("other", b"zero")
        held.release()
        assert_in_step(producer, link, keys, "other")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Producer(proxy.url) as producer:
            producer.send("access", b"warm")
            held = proxy.arm(Fault.HOLD_REPLY, command="EVALSHA")
            with pytest.raises(BatchOutcomeUnknownError) as caught:
                producer.send_many("access", yield_numbers(2000, swallow_it))
            assert_in_step(producer, link, keys)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert (caught.value.ids, caught.value.unknown) == ([], CHUNK)


# --- changes between two chunks -------------------------------------------------------------------


def test_chunk_made_before_a_growth_is_routed_again(server, link, store: Store, keys):
    topics.create(store, "access", Topic(partitions=2))
    routed = 0

    def choose(key: bytes | None, count: int) -> int:
        nonlocal routed
        routed += 1
        if routed == 2 * CHUNK:  # the last message of the second chunk, which has not been sent yet
            wait_until(
                lambda: sum(len(payloads(link, keys, partition=n)) for n in range(2)) == CHUNK,
                what="the first chunk is written",
            )
            link.run(growth.begin(keys, "access", 2, 3, "t1"))
            link.run(growth.switch(keys, "access", "t1", range(2, 3)))
        return zlib.crc32(key or b"") % count

    with Producer(server.url, partitioner=choose) as producer:
        producer.send_many("access", (Outgoing(b"%d" % n, key=b"%d" % n) for n in range(3 * CHUNK)))

    found = {
        int(payload): partition
        for partition in range(3)
        for payload in payloads(link, keys, partition=partition)
    }
    key_of: Any = lambda n: zlib.crc32(b"%d" % n)  # noqa: E731
    assert [found[n] for n in range(CHUNK)] == [key_of(n) % 2 for n in range(CHUNK)]
    assert [found[n] for n in range(CHUNK, 3 * CHUNK)] == [
        key_of(n) % 3 for n in range(CHUNK, 3 * CHUNK)
    ]


@pytest.mark.parametrize("count", [UNDER_WAY, CHUNK])
def test_fork_during_a_chunk_leaves_the_reply_to_the_parent(producer, link, keys, count):
    child = status = -1

    def items() -> Iterator[bytes]:
        nonlocal child, status
        yield from make_texts(count)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)

    try:
        ids = producer.send_many("access", items())
    except BatchOutcomeUnknownError as error:
        if child == 0:
            os._exit(_send_in_child(producer, error))
        raise
    if child == 0:
        os._exit(3)

    assert os.waitstatus_to_exitcode(status) == 0
    assert ids == stream_ids(link, keys)[1:]
    assert payloads(link, keys)[1:] == make_texts(count)
    assert payloads(link, keys, "other") == [b"of the child"]
    assert_in_step(producer, link, keys)


def _send_in_child(producer: Producer, error: BatchOutcomeUnknownError) -> int:
    try:
        producer.send("other", b"of the child")
    except BaseException:  # noqa: BLE001 - the parent reads the code
        return 2
    return 0 if (error.ids, error.unknown) == ([], CHUNK) else 1


# --- one message ----------------------------------------------------------------------------------


def test_refused_message_chooses_its_partition_once(server, link, store: Store, keys):
    topics.create(store, "access", Topic(partitions=4))
    asked: list[bytes | None] = []

    def choose(key: bytes | None, count: int) -> int:
        asked.append(key)
        return 1

    with Producer(server.url, partitioner=choose) as chosen, Producer(server.url) as turns:
        chosen.send("access", b"warm")
        turns.send("access", b"first")
        mend = _no_memory(link)
        try:
            for producer in (chosen, turns):
                with pytest.raises(RedisResponseError):
                    producer.send("access", b"refused")
        finally:
            mend()
        turns.send("access", b"third")

    [first], [third] = (
        [n for n in range(4) if text in payloads(link, keys, partition=n)]
        for text in (b"first", b"third")
    )
    assert asked == [None, None]
    assert third == (first + 2) % 4  # the send that was refused took one turn
