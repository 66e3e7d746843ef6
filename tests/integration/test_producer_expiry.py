"""A worker acknowledges an expired message without running it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from streamqd import Message, Outgoing, Producer
from tests.contract.harness import ASSIGNMENT, Harness
from tests.support.life import Life
from tests.support.servers import Server

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime.now(UTC) + timedelta(hours=1)


def handle_until_last(life: Life, **consumer: Any) -> list[bytes]:
    """Run a worker until it has handled the message `last`. Return the handled messages."""
    seen: list[bytes] = []

    def work(message: Message) -> None:
        seen.append(message.payload)
        if message.payload == b"last":
            life.stop()

    life.run(life.worker("t1", **consumer), work)
    return seen


_end: list[Callable[[], None]] = []
_seen: list[bytes] = []


def handle_batch(messages: list[Message]) -> None:
    """The handler of a batch worker."""
    for each in messages:
        _seen.append(each.payload)
        if each.payload == b"last":
            _end[-1]()


def test_batch_handler_gets_no_expired_message(harness: Harness, life: Life) -> None:
    harness.do("XADD", harness.stream, "*", "payload", "late", "expiresAt", "1000")
    harness.do("XADD", harness.stream, "*", "payload", "last")
    _seen.clear()
    _end[:] = [life.stop]

    life.run(life.worker("t1", handler=f"{__name__}:handle_batch"), lambda _: None)

    assert _seen == [b"last"]
    assert harness.do("XPENDING", harness.stream, ASSIGNMENT.group)[0] == 0


@pytest.mark.parametrize("consumer", [{}, {"concurrency": 4, "order": "key"}])
def test_expired_message_is_acknowledged_unhandled(
    harness: Harness, life: Life, server: Server, consumer: dict[str, Any]
) -> None:
    items = [
        Outgoing(b"plain", "k"),
        Outgoing(b"past", "k", expires=PAST),
        Outgoing(b"at once", "k", expires=0),
        Outgoing(b"hour", "k", expires=timedelta(hours=1)),
        Outgoing(b"future", "k", expires=FUTURE),
        Outgoing(b"last", "k"),
    ]
    with Producer(server.url) as producer:
        producer.send_many(
            ASSIGNMENT.topic, [each._replace(partition=ASSIGNMENT.partition) for each in items]
        )

    assert handle_until_last(life, **consumer) == [b"plain", b"hour", b"future", b"last"]
    assert life.slot.counter("expired") == 2
    assert harness.do("XPENDING", harness.stream, ASSIGNMENT.group)[0] == 0
    assert harness.do("XLEN", harness.dlq) == 0


def test_expiry_span_starts_when_the_message_is_first_readable(
    harness: Harness, life: Life
) -> None:
    hour = ["expiresAfter", "3600000"]
    old, new = ["originalId", "1000-0"], ["originalId", f"{harness.now_unix_ms()}-0"]
    harness.do("XADD", harness.retry, "*", "payload", "old", *hour, *old)
    harness.do("XADD", harness.retry, "*", "payload", "new", *hour, *new)
    harness.do("XADD", harness.stream, "*", "payload", "last")

    assert handle_until_last(life) == [b"new", b"last"]


@pytest.mark.parametrize("end", ["soon", "-1", "", "9" * 40])
def test_unreadable_expiry_is_ignored(harness: Harness, life: Life, end: str) -> None:
    harness.do("XADD", harness.stream, "*", "payload", "x", "expiresAt", end, "expiresAfter", end)
    harness.do("XADD", harness.stream, "*", "payload", "last")

    assert handle_until_last(life) == [b"x", b"last"]


def test_pending_message_expires_before_its_run(harness: Harness, life: Life) -> None:
    harness.do("XADD", harness.stream, "*", "payload", "x", "expiresAt", "1000")
    harness.fetch(1)
    harness.do("XADD", harness.stream, "*", "payload", "last")

    assert handle_until_last(life) == [b"last"]
    assert harness.do("XPENDING", harness.stream, ASSIGNMENT.group)[0] == 0
