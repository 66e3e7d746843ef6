"""The tuning and guarantees of each system, with links to its documentation.

The texts are stored together with the results, so that a page describes the settings under which
its own figures were measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """The facts that a reader needs to judge a figure."""

    settings: str  # settings other than its defaults, or the reason why there are none
    acknowledges: str  # when a job is removed from the queue for good
    pages: tuple[str, ...]  # the pages of its documentation that recommend the settings


_CELERY = "https://docs.celeryq.dev/en/stable/"
_DRAMATIQ = "https://dramatiq.io/"
_RQ = "https://python-rq.org/docs/"
_TASKIQ = "https://taskiq-python.github.io/"
_HUEY = "https://huey.readthedocs.io/en/latest/"
_FASTSTREAM = "https://faststream.ag2.ai/latest/redis/"
_CHASQUIMQ = "https://github.com/jotarios/chasquimq/blob/main/"
_BULLMQ = "https://docs.bullmq.io/"

BARE = Tuning(
    "COUNT 256, RESP2, XACK and XREADGROUP in one write",
    "per batch, after its last handler",
    ("https://redis.io/docs/latest/commands/xreadgroup/",),
)
RAW = Tuning(
    "a blocking socket, hiredis's parser and packer, no redis-py, otherwise like the redis-py loop",
    BARE.acknowledges,
    (*BARE.pages, "https://github.com/redis/hiredis-py"),
)
STREAMQD = Tuning(
    "none: two partitions, everything else at its default",
    "after the handler, with the next read, fenced",
    ("../internals/hot-path.md", "recovery-and-data-loss.md"),
)
CELERY = Tuning(
    "`task_acks_late`, `task_reject_on_worker_lost`, `worker_prefetch_multiplier = 64`, no "
    "results, no rate limits, without gossip, mingle and heartbeats, in bulk a `group` of 1,000",
    "after the handler (`task_acks_late`, by default before it)",
    (
        _CELERY + "userguide/optimizing.html",
        _CELERY + "userguide/tasks.html",
        _CELERY + "getting-started/backends-and-brokers/redis.html",
    ),
)
DRAMATIQ = Tuning(
    "none: eight threads in each process",
    "after the handler",
    (_DRAMATIQ + "guide.html", _DRAMATIQ + "advanced.html"),
)
DRAMATIQ_TUNED = Tuning(
    "one thread in each process, `dramatiq_queue_prefetch = 500`, and only the retries of "
    "its middleware",
    "after the handler",
    (_DRAMATIQ + "guide.html", _DRAMATIQ + "reference.html"),
)
RQ = Tuning(
    "`SimpleWorker`, no results, `Retry(max=3)`, in bulk `enqueue_many` of 500",
    "before the handler, and kept in a registry that the workers' maintenance searches",
    (
        "https://github.com/rq/rq/blob/master/docs/benchmark.md",
        _RQ + "workers/",
        _RQ + "exceptions/",
    ),
)
RQ_FORK = Tuning(
    "its default worker, a process for each job, no results, `Retry(max=3)`",
    "before the handler, and kept in a registry while the worker watches its child",
    (_RQ + "workers/", _RQ + "exceptions/"),
)
ARQ = Tuning(
    "100 concurrent jobs, `poll_delay = 0.01`, no results, no log line for each job, uvloop (not "
    "in its documentation), in bulk 100 concurrent calls",
    "after the handler, and a fetched job has a mark that expires",
    ("https://arq-docs.helpmanual.io/",),
)
TASKIQ_LIST = Tuning(
    "100 concurrent tasks and 100 fetched ahead, uvloop, orjson, in bulk 100 concurrent calls",
    "never, because fetching removes it",
    (_TASKIQ + "guide/cli.html", _TASKIQ + "available-components/brokers.html"),
)
TASKIQ_STREAM = Tuning(
    TASKIQ_LIST.settings,
    "after the handler",
    TASKIQ_LIST.pages,
)
STREAQ = Tuning(
    "100 concurrent tasks and 200 fetched ahead, uvloop and the optimized mode of coredis, no "
    "results, no log lines, in bulk `enqueue_many` of 500",
    "after the handler, and a worker keeps its tasks alive",
    (
        "https://streaq.readthedocs.io/en/latest/",
        "https://coredis.readthedocs.io/en/latest/handbook/optimization.html",
    ),
)
HUEY = Tuning(
    "worker processes, a blocking pop, no results",
    "never, because fetching removes it",
    (_HUEY + "consumer.html", _HUEY + "guide.html"),
)
_FASTSTREAM_PAGES = (
    _FASTSTREAM + "streams/groups/",
    _FASTSTREAM + "streams/ack/",
    _FASTSTREAM + "pipeline/",
)
FASTSTREAM = Tuning(
    "200 entries in a read, uvloop, in bulk pipelines of 500",
    "after the handler",
    _FASTSTREAM_PAGES,
)
FASTSTREAM_BATCH = Tuning(
    "200 entries in a read and in a call, uvloop, in bulk pipelines of 500",
    "after the handler",
    _FASTSTREAM_PAGES,
)
BULLMQ = Tuning(
    "100 concurrent jobs, completed jobs removed, in bulk `addBulk` of 1,000",
    "after the handler, and a fetched job is locked",
    (
        _BULLMQ + "guide/workers/concurrency",
        _BULLMQ + "guide/workers/auto-removal-of-jobs",
        _BULLMQ + "guide/workers/stalled-jobs",
    ),
)
CHASQUIMQ = Tuning(
    "no events stream, uvloop (not in its documentation), otherwise its defaults: 100 concurrent "
    "jobs, no results, in bulk `add_bulk` of 500, and senders that wait 0.3 s before they exit "
    "(not measured), because an engine thread can crash the exit",
    "after the handler, in batches, and the entry is deleted",
    (_CHASQUIMQ + "chasquimq-py/README.md", _CHASQUIMQ + "chasquimq/src/config.rs"),
)
