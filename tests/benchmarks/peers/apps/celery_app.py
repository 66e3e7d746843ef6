"""Celery, with late acknowledgment, no results and a large prefetch.

The prefetch is recommended by its guide to optimizing. Its guide to tasks recommends the settings
that return a task to the queue when the task's process dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import tally
from celery import Celery, group

app = Celery("bench", broker=os.environ["BENCH_REDIS"])
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    worker_disable_rate_limits=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def job(payload: str) -> None:
    tally.done(payload)


def single(payloads: Iterable[str]) -> None:
    for payload in payloads:
        job.delay(payload)


def bulk(payloads: list[str]) -> None:
    for start in range(0, len(payloads), 1000):
        group(job.s(payload) for payload in payloads[start : start + 1000]).apply_async()
