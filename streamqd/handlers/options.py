"""The options of `@handler` and `@schedule`, for type checkers.

They correspond to the settings of `[[consumers]]` and `[[schedules]]`, which the configuration
reference explains. Where a file contains the name of an exception class, an option may also be the
class itself. As with a file, exception classes, durations and sizes are checked only when the
daemon starts.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypedDict

from streamqd.config.values import Duration, Size
from streamqd.model import Backoff

Class = str | type[BaseException]
Classes = tuple[Class, ...] | list[Class] | set[Class] | frozenset[Class]  # not a single string


class BackoffOptions(TypedDict, total=False):
    """The `backoff` option as a mapping."""

    kind: Literal["fixed", "linear", "exponential"]
    base: Duration
    max: Duration
    jitter: Literal["full", "none"]


class BreakerOptions(TypedDict, total=False):
    """The `breaker` option as a mapping."""

    failures: int
    window: Duration
    probe_every: Duration
    on: Classes


class FloodGuardOptions(TypedDict, total=False):
    """The `flood_guard` option as a mapping."""

    dead_letters: int
    window: Duration
    share: float


class HandlerOptions(TypedDict, total=False):
    """The options of `@handler`. None means the default."""

    source: Literal["topic", "dlq"] | None
    start: Literal["earliest", "latest"] | None
    prefetch_max: int | None
    prefetch_bytes: Size | None
    batch: int | None
    codec: Literal["json", "msgpack"] | None
    concurrency: int | None
    order: Literal["key", "none", "partition"] | None
    ack: Literal["batched", "each"] | None
    rate: str | None
    rate_per: Literal["group", "partition"] | None
    rate_burst: int | None
    max_attempts: int | None
    max_crashes: int | None
    backoff: Backoff | BackoffOptions | None
    retry_max_age: Duration | None
    retry_on: Classes | None
    dead_on: Classes | None
    on_error: Literal["requeue", "block", "hold-key"] | None
    held_max: int | None
    breaker: BreakerOptions | None
    flood_guard: FloodGuardOptions | None
    timeout: Duration | None
    hard_timeout: Duration | None
    max_messages: int | None
    max_rss: Size | None
    max_age: Duration | None
    handover: Literal["warm", "cold"] | None
    reclaim_idle: Duration | None
    dlq_error: Literal["none", "class", "message", "traceback"] | None
    dlq_body: Literal["full", "hash", "none"] | None


class ScheduleOptions(TypedDict, total=False):
    """The options of `@schedule`: the settings of a `[[schedules]]` table."""

    name: str | None
    topic: str | None
    cron: str | None
    every: Duration | None
    at: str | datetime | None
    timezone: str | None
    key: str | None
    partition: int | None
    payload: Any
    misfire: Literal["once", "skip", "all"] | None
    misfire_grace: Duration | None
    overlap: str | None
    jitter: Duration | None
