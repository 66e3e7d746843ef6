"""huey: no results are stored, and a worker blocks while it waits for a job."""

from __future__ import annotations

import os
from collections.abc import Iterable

import tally
from huey import RedisHuey

huey = RedisHuey("bench", url=os.environ["BENCH_REDIS"], results=False, blocking=True)


@huey.task()
def job(payload: str) -> None:
    tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    for payload in payloads:
        job(payload)


def bulk(payloads: list[str]) -> None:
    single(payloads)  # it has no call that sends many
