"""Scenes of producers: how an application handles an unknown outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from streamqd import BufferedProducer, Outgoing, Producer, config
from streamqd.errors import RedisUnavailable, UnknownOutcome
from streamqd.producer import sender
from streamqd.store import topics
from tests.faults.rehearsal import Stage

TOPIC = "access"
TRIES = 5


@contextmanager
def _hurried() -> Iterator[None]:
    with mock.patch.object(sender, "PAUSES", (0.0, 0.0)):
        yield


def _written(stage: Stage) -> list[bytes]:
    keys = stage.keys
    pages = stage.link.pipeline(
        [("XRANGE", keys.stream(TOPIC, number), "-", "+") for number in range(2)]
    )
    return [fields[fields.index(b"payload") + 1] for page in pages for _, fields in page]


def _scheduled(stage: Stage) -> int:
    keys = stage.keys
    calls = [("ZCARD", keys.scheduled(TOPIC, number)) for number in range(2)]
    return sum(stage.link.pipeline(calls))


def _once(stage: Stage, payload: bytes, send: Callable[[], object]) -> None:
    """Send without dedup ids. After an unknown outcome, look, and send only what is missing."""
    for _ in range(TRIES):
        waiting = _scheduled(stage)
        try:
            send()
            return
        except UnknownOutcome:
            if payload in _written(stage) or _scheduled(stage) > waiting:
                return
        except RedisUnavailable:
            continue  # it never left this process
    raise AssertionError(f"{payload!r} cannot be sent")


def _repeated(send: Callable[[], object]) -> None:
    """Send with dedup ids: repeat until it is confirmed."""
    for _ in range(TRIES):
        with contextlib.suppress(RedisUnavailable):
            send()
            return
    raise AssertionError("it is never confirmed")


def single_messages(stage: Stage) -> None:
    """Every way to send one message."""
    topics.create(stage.store, TOPIC, config.Topic(partitions=2))
    with _hurried(), Producer(stage.proxy.url) as producer:

        def send(payload: bytes, **options: object) -> Callable[[], object]:
            return lambda: producer.send(TOPIC, payload, **options)  # type: ignore[arg-type]

        for number in range(3):
            payload = b"plain %d" % number
            _once(stage, payload, send(payload, partition=number % 2))
        _once(stage, b"soon", send(b"soon", partition=0, delay=20))
        _repeated(send(b"keyed", key="k", dedup_id="keyed"))
        _repeated(send(b"twice", dedup_id="twice"))
        _repeated(send(b"twice", dedup_id="twice"))
        _repeated(send(b"later", dedup_id="later", delay=3600))
    assert sorted(_written(stage)) == [b"keyed", b"plain 0", b"plain 1", b"plain 2", b"twice"]
    assert _scheduled(stage) == 2


def many_messages(stage: Stage) -> None:
    """Pipelined and buffered sends, and one with `max_backlog`."""
    topics.create(stage.store, TOPIC, config.Topic(partitions=2))
    wanted = [b"%d" % number for number in range(40)]
    with _hurried():
        with Producer(stage.proxy.url) as producer:
            for _ in range(TRIES):
                missing = sorted({*wanted[:20]} - {*_written(stage)}, key=int)
                items: Iterable[Outgoing] = [Outgoing(each, partition=0) for each in missing]
                with contextlib.suppress(RedisUnavailable):
                    producer.send_many(TOPIC, items)
        with Producer(stage.proxy.url, max_backlog=1000) as producer:
            for payload in wanted[20:25]:
                _repeated(
                    lambda payload=payload: producer.send(  # type: ignore[misc]
                        TOPIC, payload, partition=1, dedup_id=payload.decode()
                    )
                )
        waiting = wanted[25:]
        with BufferedProducer(stage.proxy.url, linger=3600.0) as buffered:
            for _ in range(TRIES):
                receipts = [
                    buffered.send(TOPIC, each, partition=0, dedup_id=each.decode())
                    for each in waiting
                ]
                buffered.flush()
                waiting = [
                    each
                    for each, receipt in zip(waiting, receipts, strict=True)
                    if receipt.exception(5.0)
                ]
    assert sorted(_written(stage), key=int) == wanted


def the_first_message_of_a_topic(stage: Stage) -> None:
    """It registers the topic. Another send completes an interrupted registration."""
    with _hurried():
        for _ in range(TRIES):
            with Producer(stage.proxy.url) as producer, contextlib.suppress(RedisUnavailable):
                producer.send(TOPIC, b"first", dedup_id="first")
                break
        else:
            raise AssertionError("the topic is never registered")
    assert stage.link.execute("SMEMBERS", stage.keys.registry()) == [TOPIC.encode()]
    assert _written(stage) == [b"first"]
