"""streaq: many tasks run at a time, no results are stored, uvloop, no log lines per task."""

from __future__ import annotations

import os
from collections.abc import Iterable

import tally
import uvloop
from streaq import Worker

worker = Worker(
    redis_url=os.environ["BENCH_REDIS"],
    concurrency=100,
    prefetch=200,
    anyio_kwargs={"use_uvloop": True},
)


@worker.task(ttl=0, silent=True)
async def job(payload: str) -> None:
    tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    uvloop.run(_single(payloads))


async def _single(payloads: Iterable[str]) -> None:
    async with worker:
        for payload in payloads:
            await job.enqueue(payload)


def bulk(payloads: list[str]) -> None:
    uvloop.run(_bulk(payloads))


async def _bulk(payloads: list[str]) -> None:
    async with worker:
        for start in range(0, len(payloads), 500):
            await worker.enqueue_many([job.enqueue(each) for each in payloads[start : start + 500]])
