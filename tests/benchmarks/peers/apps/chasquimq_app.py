"""ChasquiMQ: threads of its engine read and acknowledge, and the handlers are coroutines.

It has no command for workers, so `python chasquimq_app.py` runs one. It stores no events and no
results. With 1.3.0, a thread of the engine crashes Python in one of 60 runs if the process exits
too soon after a send.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable

import tally
import uvloop
from chasquimq import Job, Queue, Worker

REDIS = os.environ["BENCH_REDIS"]
EXIT_SECONDS = 0.3  # seconds for the threads of the engine; not part of a measured time
atexit.register(time.sleep, EXIT_SECONDS)


async def job(each: Job) -> None:
    tally.done(each.data)


def single(payloads: Iterable[str]) -> None:
    uvloop.run(_single(payloads))


async def _single(payloads: Iterable[str]) -> None:
    async with Queue("bench", redis_url=REDIS) as queue:
        for payload in payloads:
            await queue.add("job", payload)


def bulk(payloads: list[str]) -> None:
    uvloop.run(_bulk(payloads))


async def _bulk(payloads: list[str]) -> None:
    async with Queue("bench", redis_url=REDIS) as queue:
        for start in range(0, len(payloads), 500):
            many = payloads[start : start + 500]
            await queue.add_bulk([{"name": "job", "data": each} for each in many])


async def work() -> None:
    async with Worker("bench", job, redis_url=REDIS, events_enabled=False) as worker:
        await worker.run()


if __name__ == "__main__":
    uvloop.run(work())
