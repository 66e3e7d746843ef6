"""How each system was tuned and what it promises, and where its documentation says so.

The texts go into the results, so that a page tells of the settings that its figures were measured
with.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a reader must know to judge a figure."""

    settings: str  # other than its defaults, or why there are none
    acknowledges: str  # when a job is taken from the queue for good
    pages: tuple[str, ...]  # of its documentation, from which the settings are


_CELERY = "https://docs.celeryq.dev/en/stable/"
_DRAMATIQ = "https://dramatiq.io/"
_RQ = "https://python-rq.org/docs/"
_TASKIQ = "https://taskiq-python.github.io/"
_HUEY = "https://huey.readthedocs.io/en/latest/"
_FASTSTREAM = "https://faststream.ag2.ai/latest/redis/"
_BULLMQ = "https://docs.bullmq.io/"

BARE = Tuning(
    "COUNT 256; RESP2; XACK and XREADGROUP in one write",
    "a batch at a time, behind its last handler",
    ("https://redis.io/docs/latest/commands/xreadgroup/",),
)
RAW = Tuning(
    "a blocking socket, hiredis's parser and packer, and no redis-py; else as the next",
    BARE.acknowledges,
    (*BARE.pages, "https://github.com/redis/hiredis-py"),
)
STREAMQD = Tuning(
    "none: two partitions, all else at its default",
    "behind the handler, with the next read; fenced",
    ("../internals/hot-path.md", "promises.md"),
)
CELERY = Tuning(
    "`task_acks_late`, `task_reject_on_worker_lost`, `worker_prefetch_multiplier = 64`, no "
    "results, no rate limits; without gossip, mingle and heartbeats; in bulk a `group` of 1,000",
    "behind the handler (`task_acks_late`; by default before it)",
    (
        _CELERY + "userguide/optimizing.html",
        _CELERY + "userguide/tasks.html",
        _CELERY + "getting-started/backends-and-brokers/redis.html",
    ),
)
DRAMATIQ = Tuning(
    "none: eight threads in each process",
    "behind the handler",
    (_DRAMATIQ + "guide.html", _DRAMATIQ + "advanced.html"),
)
DRAMATIQ_TUNED = Tuning(
    "one thread in each process, `dramatiq_queue_prefetch = 500`, and of its middleware the "
    "retries alone",
    "behind the handler",
    (_DRAMATIQ + "guide.html", _DRAMATIQ + "reference.html"),
)
RQ = Tuning(
    "`SimpleWorker`, no results, `Retry(max=3)`; in bulk `enqueue_many` of 500",
    "before the handler, and kept in a registry, which the workers' maintenance looks through",
    (
        "https://github.com/rq/rq/blob/master/docs/benchmark.md",
        _RQ + "workers/",
        _RQ + "exceptions/",
    ),
)
RQ_FORK = Tuning(
    "its default worker, a process for each job; no results, `Retry(max=3)`",
    "before the handler, and kept in a registry; the worker sees its child die",
    (_RQ + "workers/", _RQ + "exceptions/"),
)
ARQ = Tuning(
    "100 jobs at once, `poll_delay = 0.01`, no results, no log line for each job; uvloop, of which "
    "its documentation says nothing; in bulk 100 calls at once",
    "behind the handler; a job in hand carries a mark that expires",
    ("https://arq-docs.helpmanual.io/",),
)
TASKIQ_LIST = Tuning(
    "100 tasks at once and 100 fetched ahead, uvloop, orjson; in bulk 100 calls at once",
    "never: it is taken off the list",
    (_TASKIQ + "guide/cli.html", _TASKIQ + "available-components/brokers.html"),
)
TASKIQ_STREAM = Tuning(
    TASKIQ_LIST.settings,
    "behind the handler",
    TASKIQ_LIST.pages,
)
STREAQ = Tuning(
    "100 tasks at once and 200 fetched ahead, uvloop and the optimized mode of coredis, no "
    "results, no log lines; in bulk `enqueue_many` of 500",
    "behind the handler; a worker keeps its tasks alive",
    (
        "https://streaq.readthedocs.io/en/latest/",
        "https://coredis.readthedocs.io/en/latest/handbook/optimization.html",
    ),
)
HUEY = Tuning(
    "worker processes, a blocking pop, no results",
    "never: it is taken off the list",
    (_HUEY + "consumer.html", _HUEY + "guide.html"),
)
_FASTSTREAM_PAGES = (
    _FASTSTREAM + "streams/groups/",
    _FASTSTREAM + "streams/ack/",
    _FASTSTREAM + "pipeline/",
)
FASTSTREAM = Tuning(
    "200 entries in a read, uvloop; in bulk pipelines of 500",
    "behind the handler",
    _FASTSTREAM_PAGES,
)
FASTSTREAM_BATCH = Tuning(
    "200 entries in a read and in a call, uvloop; in bulk pipelines of 500",
    "behind the handler",
    _FASTSTREAM_PAGES,
)
BULLMQ = Tuning(
    "100 jobs at once, completed jobs removed; in bulk `addBulk` of 1,000",
    "behind the handler; a job in hand is locked",
    (
        _BULLMQ + "guide/workers/concurrency",
        _BULLMQ + "guide/workers/auto-removal-of-jobs",
        _BULLMQ + "guide/workers/stalled-jobs",
    ),
)
