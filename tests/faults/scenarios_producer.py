"""Scenarios of producers: how an application handles a send whose outcome is unknown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from streamqd import BufferedProducer, Outgoing, Producer, config
from streamqd.errors import OutcomeUnknownError, RedisUnavailableError
from streamqd.producer import sender
from streamqd.store import topics
from tests.faults.scenario_runner import ScenarioContext

TOPIC = "access"
TRIES = 5


@contextmanager
def _without_pauses() -> Iterator[None]:
    with mock.patch.object(sender, "PAUSES", (0.0, 0.0)):
        yield


def _read_payloads(context: ScenarioContext) -> list[bytes]:
    keys = context.keys
    pages = context.link.pipeline(
        [("XRANGE", keys.stream(TOPIC, number), "-", "+") for number in range(2)]
    )
    return [fields[fields.index(b"payload") + 1] for page in pages for _, fields in page]


def _count_scheduled(context: ScenarioContext) -> int:
    keys = context.keys
    calls = [("ZCARD", keys.delayed_sends(TOPIC, number)) for number in range(2)]
    return sum(context.link.pipeline(calls))


def _send_if_missing(context: ScenarioContext, payload: bytes, send: Callable[[], object]) -> None:
    """Send without dedup ids. After an unknown outcome, send only the messages that are missing."""
    for _ in range(TRIES):
        waiting = _count_scheduled(context)
        try:
            send()
            return
        except OutcomeUnknownError:
            if payload in _read_payloads(context) or _count_scheduled(context) > waiting:
                return
        except RedisUnavailableError:
            continue  # the message never left this process
    raise AssertionError(f"{payload!r} cannot be sent")


def _send_until_confirmed(send: Callable[[], object]) -> None:
    """Send with dedup ids, and repeat each send until it is confirmed."""
    for _ in range(TRIES):
        with contextlib.suppress(RedisUnavailableError):
            send()
            return
    raise AssertionError("it is never confirmed")


def single_messages(context: ScenarioContext) -> None:
    """Send one message in every possible way."""
    topics.create(context.store, TOPIC, config.Topic(partitions=2))
    with _without_pauses(), Producer(context.proxy.url) as producer:

        def send(payload: bytes, **options: object) -> Callable[[], object]:
            return lambda: producer.send(TOPIC, payload, **options)  # type: ignore[arg-type]

        for number in range(3):
            payload = b"plain %d" % number
            _send_if_missing(context, payload, send(payload, partition=number % 2))
        _send_if_missing(context, b"soon", send(b"soon", partition=0, delay=20))
        _send_until_confirmed(send(b"keyed", key="k", dedup_id="keyed"))
        _send_until_confirmed(send(b"twice", dedup_id="twice"))
        _send_until_confirmed(send(b"twice", dedup_id="twice"))
        _send_until_confirmed(send(b"later", dedup_id="later", delay=3600))
    assert sorted(_read_payloads(context)) == [
        b"keyed",
        b"plain 0",
        b"plain 1",
        b"plain 2",
        b"twice",
    ]
    assert _count_scheduled(context) == 2


def many_messages(context: ScenarioContext) -> None:
    """Send many messages: in a pipeline, from a buffer, and with `max_backlog`."""
    topics.create(context.store, TOPIC, config.Topic(partitions=2))
    wanted = [b"%d" % number for number in range(40)]
    with _without_pauses():
        with Producer(context.proxy.url) as producer:
            for _ in range(TRIES):
                missing = sorted({*wanted[:20]} - {*_read_payloads(context)}, key=int)
                items: Iterable[Outgoing] = [Outgoing(each, partition=0) for each in missing]
                with contextlib.suppress(RedisUnavailableError):
                    producer.send_many(TOPIC, items)
        with Producer(context.proxy.url, max_backlog=1000) as producer:
            for payload in wanted[20:25]:
                _send_until_confirmed(
                    lambda payload=payload: producer.send(  # type: ignore[misc]
                        TOPIC, payload, partition=1, dedup_id=payload.decode()
                    )
                )
        waiting = wanted[25:]
        with BufferedProducer(context.proxy.url, linger=3600.0) as buffered:
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
    assert sorted(_read_payloads(context), key=int) == wanted


def the_first_message_of_a_topic(context: ScenarioContext) -> None:
    """Register a topic by sending its first message. Another send completes a lost registration."""
    with _without_pauses():
        for _ in range(TRIES):
            with (
                Producer(context.proxy.url) as producer,
                contextlib.suppress(RedisUnavailableError),
            ):
                producer.send(TOPIC, b"first", dedup_id="first")
                break
        else:
            raise AssertionError("the topic is never registered")
    assert context.link.execute("SMEMBERS", context.keys.registry()) == [TOPIC.encode()]
    assert _read_payloads(context) == [b"first"]
