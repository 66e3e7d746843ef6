"""arq: no results are stored, many jobs run at a time, short poll, uvloop, no log line per job."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import tally
import uvloop
from arq import create_pool
from arq.connections import RedisSettings

uvloop.install()
LOGGING = {"version": 1, "loggers": {"arq": {"level": "WARNING"}}}
SETTINGS = RedisSettings.from_dsn(os.environ["BENCH_REDIS"])


async def job(_context: dict[Any, Any], payload: str) -> None:
    tally.done(payload)


class WorkerSettings:
    functions = [job]  # noqa: RUF012 - as its documentation shows
    redis_settings = SETTINGS
    max_jobs = 100
    keep_result = 0
    poll_delay = 0.01
    log_results = False


def single(payloads: Iterable[str]) -> None:
    asyncio.run(_single(payloads))


async def _single(payloads: Iterable[str]) -> None:
    pool = await create_pool(SETTINGS)
    for payload in payloads:
        await pool.enqueue_job("job", payload)
    await pool.aclose()


def bulk(payloads: list[str]) -> None:
    asyncio.run(_bulk(payloads))


async def _bulk(payloads: list[str]) -> None:
    pool = await create_pool(SETTINGS)
    for start in range(0, len(payloads), 100):
        await asyncio.gather(
            *(pool.enqueue_job("job", each) for each in payloads[start : start + 100])
        )
    await pool.aclose()
