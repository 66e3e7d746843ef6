"""FastStream on a stream with a group, one by one or, with BENCH_BATCH, in batches.

`python faststream_app.py` creates the group, because its subscribers would skip waiting entries.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable

import tally
from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub
from redis.asyncio import Redis

broker = RedisBroker(os.environ["BENCH_REDIS"], log_level=logging.ERROR, logger=None)
app = FastStream(broker)
_SUBSCRIPTION = {"group": "bench", "consumer": f"w-{os.getpid()}", "polling_interval": 100}

if os.environ.get("BENCH_BATCH"):

    @broker.subscriber(stream=StreamSub("jobs", batch=True, max_records=200, **_SUBSCRIPTION))
    async def jobs(payloads: list[str]) -> None:
        tally.done_all(len(payloads), iter(payloads))

else:

    @broker.subscriber(stream=StreamSub("jobs", max_records=200, **_SUBSCRIPTION))
    async def job(payload: str) -> None:
        tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    asyncio.run(_single(payloads))


async def _single(payloads: Iterable[str]) -> None:
    async with broker:
        for payload in payloads:
            await broker.publish(payload, stream="jobs")


def bulk(payloads: list[str]) -> None:
    asyncio.run(_bulk(payloads))


async def _bulk(payloads: list[str]) -> None:
    client = Redis.from_url(os.environ["BENCH_REDIS"])
    async with broker:
        for start in range(0, len(payloads), 500):
            async with client.pipeline(transaction=False) as pipe:
                for each in payloads[start : start + 500]:
                    await broker.publish(each, stream="jobs", pipeline=pipe)
                await pipe.execute()
    await client.aclose()


async def _make_group() -> None:
    client = Redis.from_url(os.environ["BENCH_REDIS"])
    await client.xgroup_create("jobs", "bench", id="0", mkstream=True)
    await client.aclose()


if __name__ == "__main__":
    asyncio.run(_make_group())
