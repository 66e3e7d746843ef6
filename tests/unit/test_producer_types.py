"""The types of the public producers satisfy a user's type checker in its strict mode."""

from __future__ import annotations

import pytest

from tests.support.type_checker import lines_with_errors

GOOD = """
from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone

from streamqd import (
    AsyncProducer, BacklogFullError, BatchOutcomeUnknownError, BufferedProducer, BufferFullError,
    OutcomeUnknownError, Outbox, Outgoing, Producer, Uid,
)


def by_region(key: bytes | None, partitions: int) -> int:
    return 0 if key is None else key[0] % partitions


def plain() -> None:
    with Producer("redis://localhost", partitioner={"orders": by_region, "logs": "sticky"}) as one:
        entry: str = one.send("orders", {"id": 7}, key="k", expires=timedelta(hours=1))
        later: str = one.send("orders", b"x", at=datetime.now(timezone.utc), dedup_id=entry)
        print(one.cancel(later))
        ids: list[Uid] = one.send_many("orders", [1, "two", Outgoing(b"3", key=later, delay=5)])
        with one.buffered(linger=timedelta(seconds=1), max_batch=100) as many:
            receipt: Future[Uid] = many.send("orders", ids)
            sent: Uid = receipt.result(timeout=5)
            where: tuple[str, int, str] = (sent.topic, sent.partition, sent.id)
            print(where)
    try:
        with BufferedProducer(max_messages=10, block=0, max_backlog=100) as many:
            flushed: bool = many.flush(1.5)
            print(flushed)
    except BatchOutcomeUnknownError as error:
        lost: int = error.unknown
        known: list[str | None] = error.ids
        print(lost, known)
    except (BufferFullError, BacklogFullError, OutcomeUnknownError):
        pass


def in_a_transaction(connection: sqlite3.Connection) -> str:
    with connection:
        return Outbox(table="app.outbox").send(connection, "orders", {"id": 7}, key="k", delay=5)


async def asynchronous() -> None:
    async with AsyncProducer(partitioner="consistent", backlog_wait="5s", timeout="5s") as producer:
        entry: str = await producer.send("orders", b"x")
        ids: list[Uid] = await producer.send_many("orders", (n for n in range(3)))
        print(entry, ids)


asyncio.run(asynchronous())
"""

WRONG = """
from streamqd import AsyncProducer, BufferedProducer, Outgoing, Producer

Producer(partitioner="murmur")
Producer(max_backlog="many")
Producer(linger=1)
BufferedProducer(linger=None)
Producer().send("orders", b"x", delay="5s")
Producer().send("orders", b"x", priority=1)
Outgoing(b"x", key=7)
text: str = BufferedProducer().send("orders", b"x")
number: int = AsyncProducer().send("orders", b"x")
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Return the lines that have errors in the two modules, from a single run of the checker."""
    folder = tmp_path_factory.mktemp("users")
    return lines_with_errors(folder, {"good.py": GOOD, "wrong.py": WRONG})


def test_type_checker_accepts_correct_producer_calls(errors: dict[str, set[int]]) -> None:
    assert errors.keys() <= {"wrong.py"}


def test_type_checker_finds_wrong_producer_calls(errors: dict[str, set[int]]) -> None:
    assert errors["wrong.py"] == set(range(4, 13))
