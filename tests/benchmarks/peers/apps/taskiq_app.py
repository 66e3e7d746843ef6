"""taskiq: the list broker (no acknowledgment) or, with BENCH_STREAM, the stream broker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

import tally
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker, RedisStreamBroker

if os.environ.get("BENCH_STREAM"):
    # Without "0", the group would skip the entries that are waiting.
    broker = RedisStreamBroker(url=os.environ["BENCH_REDIS"], consumer_id="0")
else:
    broker = ListQueueBroker(url=os.environ["BENCH_REDIS"])
broker = broker.with_serializer(ORJSONSerializer())


@broker.task
async def job(payload: str) -> None:
    tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    asyncio.run(_single(payloads))


async def _single(payloads: Iterable[str]) -> None:
    await broker.startup()
    for payload in payloads:
        await job.kiq(payload)
    await broker.shutdown()


def bulk(payloads: list[str]) -> None:
    asyncio.run(_bulk(payloads))


async def _bulk(payloads: list[str]) -> None:
    await broker.startup()
    for start in range(0, len(payloads), 100):
        await asyncio.gather(*(job.kiq(each) for each in payloads[start : start + 100]))
    await broker.shutdown()
