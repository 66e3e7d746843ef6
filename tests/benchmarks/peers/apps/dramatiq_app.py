"""Dramatiq: its defaults, or (BENCH_TUNED) one thread, a large prefetch and only the retries."""

from __future__ import annotations

import os
from collections.abc import Iterable

import dramatiq
import tally
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries

middleware = [Retries()] if os.environ.get("BENCH_TUNED") else None
broker = RedisBroker(url=os.environ["BENCH_REDIS"], middleware=middleware)
dramatiq.set_broker(broker)


@dramatiq.actor
def job(payload: str) -> None:
    tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    for payload in payloads:
        job.send(payload)


def bulk(payloads: list[str]) -> None:
    single(payloads)  # it has no call that sends many
