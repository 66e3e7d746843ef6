"""RQ: jobs that have no results and are retried."""

from __future__ import annotations

import os
from collections.abc import Iterable

from redis import Redis
from rq import Queue, Retry
from rq_job import job

queue = Queue("bench", connection=Redis.from_url(os.environ["BENCH_REDIS"]))
RETRY = Retry(max=3)


def single(payloads: Iterable[str]) -> None:
    for payload in payloads:
        queue.enqueue(job, payload, result_ttl=0, retry=RETRY)


def bulk(payloads: list[str]) -> None:
    for start in range(0, len(payloads), 500):
        many = payloads[start : start + 500]
        queue.enqueue_many(
            [Queue.prepare_data(job, (each,), result_ttl=0, retry=RETRY) for each in many]
        )
