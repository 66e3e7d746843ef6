"""A buffered producer on a real server: batches, receipts, a full buffer, forks and closing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from streamqd import (
    BufferedProducer,
    BufferFullError,
    MessageTooLargeError,
    OutcomeUnknownError,
    Producer,
    RedisUnavailableError,
    StreamqdError,
    TopicNotFoundError,
)
from streamqd.errors import RequestRefusedError
from streamqd.producer.buffered import Receipt
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.proxy import Fault
from tests.support.waiting import wait_until

NEVER = 3600.0  # seconds to linger; so long that lingering never causes a write


def payloads(
    link: Connection, keys: Keys, topic: str = "access", partition: int = 0
) -> list[bytes]:
    found = link.execute("XRANGE", keys.stream(topic, partition), "-", "+")
    return [fields[1] for _, fields in found]


def transactions(link: Connection) -> int:
    stats = link.execute("INFO", "commandstats").decode()
    line = next((each for each in stats.splitlines() if each.startswith("cmdstat_evalsha:")), "")
    return int(line.partition("calls=")[2].partition(",")[0] or 0)


class Gate:
    """A partitioner that blocks the writing thread until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, _key: bytes | None, _partitions: int) -> int:
        self.reached.set()
        assert self.opened.wait(10)
        return 0


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


# --- batches --------------------------------------------------------------------------------------


def test_buffered_messages_keep_order_and_return_ids(server, link, keys):
    with BufferedProducer(server.url) as producer:
        receipts = [producer.send("access", b"%d" % n) for n in range(2000)]

    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found] == [
        each.result(0) for each in receipts
    ]
    assert payloads(link, keys) == [b"%d" % n for n in range(2000)]


def test_buffered_messages_are_written_in_one_batch(server, link, keys):
    with BufferedProducer(server.url, linger=NEVER, max_batch=100) as producer:
        producer.send("access", b"warm")
        producer.flush()
        before = transactions(link)
        receipts = [producer.send("access", b"%d" % n) for n in range(100)]
        concurrent.futures.wait(receipts, 10)
        assert transactions(link) == before + 1
        assert not producer.send("access", b"alone").done()
        assert producer.flush(10)
        assert transactions(link) == before + 2

    assert len(payloads(link, keys)) == 102


def test_buffered_message_is_sent_after_linger(server, link, keys):
    with BufferedProducer(server.url, linger="10ms") as producer:
        assert producer.send("access", b"x").result(10)
        assert payloads(link, keys) == [b"x"]


def test_buffered_send_accepts_every_option_of_send(server, link, keys):
    with BufferedProducer(server.url, linger=NEVER) as producer:
        plain = producer.send("access", b"1", key="k", headers={"a": "b"})
        first = producer.send("access", b"2", dedup_id="x")
        again = producer.send("access", b"3", dedup_id="x")
        later = producer.send("access", b"4", delay=60)
        other = producer.send("orders", b"5")
        producer.flush()

    assert first.result(0) == again.result(0) != plain.result(0)
    assert payloads(link, keys) == [b"1", b"2"]
    scheduled = link.execute("ZRANGE", keys.delayed_sends("access", 0), 0, -1)
    assert scheduled == [later.result(0).id.encode()]
    assert payloads(link, keys, "orders") == [b"5"]
    assert other.result(0)


def test_buffered_producer_serves_many_threads(server, link, keys):
    def many(name: int) -> list[str]:
        return [producer.send("access", b"%d %d" % (name, n)).result(30) for n in range(50)]

    with (
        BufferedProducer(server.url, linger=0) as producer,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        ids = [each for found in pool.map(many, range(8)) for each in found]

    written = payloads(link, keys)
    assert len(set(ids)) == len(written) == 400
    for name in range(8):
        own = [each for each in written if each.startswith(b"%d " % name)]
        assert own == [b"%d %d" % (name, n) for n in range(50)]


def test_buffered_producer_inherits_producer_settings(server, link, store: Store, keys):
    topics.create(store, "access", topics.Topic(partitions=4))
    with (
        Producer(server.url, partitioner=lambda _key, _count: 3) as producer,
        producer.buffered(linger="1ms") as buffered,
    ):
        buffered.send("access", b"x").result(10)

    assert payloads(link, keys, partition=3) == [b"x"]


# --- failures -------------------------------------------------------------------------------------


def test_buffered_send_refuses_an_unencodable_message(server, link):
    with BufferedProducer(server.url) as producer:
        with pytest.raises(TypeError):
            producer.send("access", object())
        with pytest.raises(MessageTooLargeError):
            producer.send("access", b"x" * (1 << 21))


def test_buffered_messages_fail_individually(server, link, store: Store, keys):
    with BufferedProducer(server.url, linger=NEVER, create=False) as producer:
        topics.create(store, "access", topics.Topic(partitions=1))
        receipts = [
            producer.send("access", b"1"),
            producer.send("missing", b"2"),
            producer.send("access", b"3", partition=9),
            producer.send("access", b"4"),
        ]
        producer.flush()

    errors = [each.exception(0) for each in receipts]
    assert [type(each) for each in errors] == [
        type(None),
        TopicNotFoundError,
        RequestRefusedError,
        type(None),
    ]
    assert payloads(link, keys) == [b"1", b"4"]


def test_lost_reply_affects_only_its_buffered_batch(proxy, link, keys):
    with BufferedProducer(proxy.url, linger=NEVER) as producer:
        producer.send("access", b"warm")
        producer.flush()
        proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        lost = [producer.send("access", b"%d" % n) for n in range(3)]
        producer.flush()
        good = producer.send("access", b"good")
        producer.flush()

    assert [type(each.exception(0)) for each in lost] == [OutcomeUnknownError] * 3
    assert good.result(0)
    # No message has been sent twice.
    assert payloads(link, keys) == [b"warm", b"0", b"1", b"2", b"good"]


def test_buffered_send_with_dedup_id_repeats_after_a_lost_reply(proxy, link, keys):
    with BufferedProducer(proxy.url, linger=NEVER) as producer:
        producer.send("access", b"warm", dedup_id="warm")
        producer.flush()
        proxy.arm(Fault.DROP_REPLY, command="EVALSHA")
        receipts = [producer.send("access", b"%d" % n, dedup_id=f"id-{n}") for n in range(3)]
        producer.flush()

    found = link.execute("XRANGE", keys.stream("access", 0), "-", "+")
    assert [f"access/0/{raw_id.decode()}" for raw_id, _ in found][1:] == [
        each.result(0) for each in receipts
    ]


def test_failing_partitioner_does_not_stop_the_buffer(server, link, keys):
    def choose(key: bytes | None, _partitions: int) -> int:
        return sys.exit("no") if key == b"bad" else 0

    with BufferedProducer(server.url, linger=0, partitioner=choose) as producer:
        bad = producer.send("access", b"1", key="bad")
        assert isinstance(bad.exception(10), RuntimeError)
        assert producer.send("access", b"2").result(10)


def test_canceled_buffered_message_is_not_sent(server, link, keys, gate):
    with BufferedProducer(server.url, linger=0, max_batch=1, partitioner=gate) as producer:
        first, second = producer.send("access", b"1"), producer.send("access", b"2")
        third = producer.send("access", b"3")
        assert gate.reached.wait(10)
        assert not first.cancel()
        assert second.cancel()
        gate.opened.set()
        assert third.result(10)

    assert payloads(link, keys) == [b"1", b"3"]


@pytest.mark.parametrize("written", [False, True])
def test_receipt_behaves_like_a_future(server, gate, written):
    async def waits(receipt: Receipt) -> str:
        return await asyncio.wait_for(asyncio.wrap_future(receipt), 10)

    with BufferedProducer(server.url, linger=0, partitioner=gate) as producer:
        sends = [producer.send("access", b"1") for _ in range(4)]
        wrong = producer.send("access", b"2", partition=7)
        if written:
            gate.opened.set()
            assert producer.flush(10)
        assert {each.done() for each in sends[:2]} == {written}
        called: list[Receipt] = []
        sends[1].add_done_callback(called.append)
        wrong.add_done_callback(called.append)
        gate.opened.set()
        done, waiting = concurrent.futures.wait([*sends, wrong], 10)
        assert (done, waiting) == ({*sends, wrong}, set())
        assert set(concurrent.futures.as_completed(sends)) == {*sends}
        assert called == [sends[1], wrong]
        assert sorted(each.result(0) for each in sends) == [each.result(0) for each in sends]
        assert asyncio.run(waits(sends[0])) == sends[0].result(0)
        assert not sends[0].cancel()
        with pytest.raises(RequestRefusedError, match="partition 7 of topic"):
            wrong.result(0)
        assert isinstance(wrong.exception(0), RequestRefusedError)
        assert not hasattr(sends[2], "nothing")
        assert "finished" in repr(sends[3])


def test_receipts_are_thread_safe_during_a_write(server):
    called: list[Receipt] = []
    with BufferedProducer(server.url, linger=0, max_batch=8) as producer:
        receipts = []
        for _ in range(5000):
            receipts.append(producer.send("access", b"1"))
            receipts[len(receipts) // 2].add_done_callback(called.append)
        assert producer.flush(10)
    assert len(called) == 5000
    assert not {*called} - {*receipts}
    assert all(each.result(0) for each in receipts)


# --- a full buffer --------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_messages": 2}, {"max_bytes": 20}])
def test_full_buffer_raises_or_blocks(server, link, keys, gate, limits):
    with BufferedProducer(server.url, linger=0, block=0, partitioner=gate, **limits) as producer:
        producer.send("access", b"1")
        producer.send("access", b"2")
        with pytest.raises(BufferFullError, match="was not accepted"):
            producer.send("access", b"3")
        gate.opened.set()
        assert producer.flush(10)
        producer.send("access", b"4")
    assert payloads(link, keys) == [b"1", b"2", b"4"]


def test_buffered_send_waits_for_room(server, link, keys):
    # The message would linger forever, so only a send that waits for room can trigger the write.
    with BufferedProducer(server.url, linger=NEVER, max_messages=3, block="1m") as producer:
        for n in range(10):
            producer.send("access", b"%d" % n)

    assert payloads(link, keys) == [b"%d" % n for n in range(10)]


def test_empty_buffer_accepts_a_message_above_its_limit(server, link, keys):
    with BufferedProducer(server.url, max_bytes=10) as producer:
        assert producer.send("access", b"x" * 100).result(10)


# --- closing --------------------------------------------------------------------------------------


def test_close_flushes_the_buffer_and_refuses_new_messages(server, link, keys):
    producer = BufferedProducer(server.url, linger=NEVER)
    receipt = producer.send("access", b"x")

    assert producer.close()
    assert receipt.result(0)
    assert producer.close()
    with pytest.raises(RequestRefusedError, match="closed"):
        producer.send("access", b"y")


def test_close_gives_up_after_its_timeout(server, link, keys, gate):
    producer = BufferedProducer(server.url, linger=0, max_batch=1, partitioner=gate)
    begun = producer.send("access", b"1")
    assert gate.reached.wait(10)
    never = producer.send("access", b"2")

    assert not producer.close(timeout=0.01)
    error = never.exception(10)
    assert isinstance(error, RedisUnavailableError)
    assert not error.sent
    gate.opened.set()
    assert begun.result(10)
    assert producer.close()
    assert payloads(link, keys) == [b"1"]


def test_program_exit_flushes_the_buffer(server, link, keys):
    code = (
        "import sys; from streamqd import BufferedProducer;"
        "BufferedProducer(sys.argv[1], linger=3600).send('access', b'x')"
    )
    subprocess.run([sys.executable, "-c", code, server.url], check=True, timeout=60)

    assert payloads(link, keys) == [b"x"]


# --- processes ------------------------------------------------------------------------------------


def run_in_child(work: Callable[[], None]) -> None:
    """Run a function in a forked child. If it raises an exception, the test fails."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_forked_child_discards_the_parents_buffer(server, link, keys, caplog, tmp_path):
    said = tmp_path / "said"
    with BufferedProducer(server.url, linger=NEVER) as producer:
        receipt = producer.send("access", b"parent")

        def child() -> None:
            said.write_text(caplog.text)
            assert not receipt.done()
            with pytest.raises(OutcomeUnknownError, match="belongs to process"):
                receipt.result(0)
            own = producer.send("access", b"child")
            assert producer.flush(10)
            assert own.result(0)

        # A thread of the parent may be about to write this receipt.
        with caplog.at_level(logging.WARNING, "streamqd.producer"), receipt._lock:
            run_in_child(child)
        assert "1 messages that were not written yet belong to the parent" in said.read_text()
        assert not receipt.done()

    assert receipt.result(0)
    assert sorted(payloads(link, keys)) == [b"child", b"parent"]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_fork_during_a_buffered_send_does_not_block(server, link, keys):
    with BufferedProducer(server.url, linger=0) as producer:
        for n in range(20):
            for _ in range(50):
                producer.send("access", b"parent")
            run_in_child(lambda: producer.send("access", b"child").result(10) and None)
            assert producer.flush(10), n

    written = payloads(link, keys)
    assert (written.count(b"parent"), written.count(b"child")) == (1000, 20)


def test_buffered_producer_closes_its_connection(server, link):
    def connected() -> int:
        return link.execute("CLIENT", "LIST").count(b"name=streamqd:producer")

    with BufferedProducer(server.url) as producer:
        producer.send("access", b"x").result(10)
        assert connected() == 1
    wait_until(lambda: connected() == 0)


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"linger": "soon"}, {"max_bytes": "many"}])
def test_buffered_producer_rejects_invalid_options(server, wrong):
    with pytest.raises((ValueError, StreamqdError)):
        BufferedProducer(server.url, **wrong)
