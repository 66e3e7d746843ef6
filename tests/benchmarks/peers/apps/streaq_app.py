"""streaq: many tasks at once, results not kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

import tally
from streaq import Worker

worker = Worker(redis_url=os.environ["BENCH_REDIS"], concurrency=100, prefetch=200)


@worker.task(ttl=0)
async def job(payload: str) -> None:
    tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    asyncio.run(_single(payloads))


async def _single(payloads: Iterable[str]) -> None:
    async with worker:
        for payload in payloads:
            await job.enqueue(payload)


def bulk(payloads: list[str]) -> None:
    asyncio.run(_bulk(payloads))


async def _bulk(payloads: list[str]) -> None:
    async with worker:
        for start in range(0, len(payloads), 500):
            await worker.enqueue_many([job.enqueue(each) for each in payloads[start : start + 500]])
