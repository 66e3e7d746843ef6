"""Functions that create a Worker and run one message or one batch in a single call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Unpack

from streamqd.testing.crashes import CrashAt
from streamqd.testing.declared import TestedOptions
from streamqd.testing.result import Run
from streamqd.testing.worker import RUNS_MAX, Worker


def run(
    handler: Callable[..., object],
    payload: object,
    *,
    key: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    expires: float | timedelta | datetime | None = None,
    attempt: int = 1,
    age: float = 0.0,
    crashes: int = 0,
    crash_at: CrashAt | None = None,
    topic: str | None = None,
    group: str | None = None,
    state_dir: Path | None = None,
    **settings: Unpack[TestedOptions],
) -> Run:
    """Run a handler once for one message, as the daemon would.

    The arguments and errors are the same as for `Worker`, `Worker.message` and `Worker.run`.
    """
    with Worker(handler, topic=topic, group=group, state_dir=state_dir, **settings) as worker:
        message = worker.message(
            payload, key=key, headers=headers, expires=expires, attempt=attempt, age=age
        )
        return worker.run(message, crashes=crashes, crash_at=crash_at)


def run_batch(
    handler: Callable[..., object],
    payloads: Iterable[object],
    *,
    topic: str | None = None,
    group: str | None = None,
    state_dir: Path | None = None,
    **settings: Unpack[TestedOptions],
) -> list[Run]:
    """Run a handler of `list[Message]` once. Each message gets its own verdict."""
    with Worker(handler, topic=topic, group=group, state_dir=state_dir, **settings) as worker:
        return worker.run_batch([worker.message(payload) for payload in payloads])


def run_to_end(
    handler: Callable[..., object],
    payload: object,
    *,
    key: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    expires: float | timedelta | datetime | None = None,
    crash_at: CrashAt | None = None,
    duplicate: bool = False,
    jitter: float = 1.0,
    runs_max: int = RUNS_MAX,
    topic: str | None = None,
    group: str | None = None,
    state_dir: Path | None = None,
    **settings: Unpack[TestedOptions],
) -> list[Run]:
    """Run a handler until its message is acknowledged or dead-lettered, without waiting.

    The arguments and errors are the same as for `Worker`, `Worker.message` and `Worker.run_to_end`.
    """
    with Worker(handler, topic=topic, group=group, state_dir=state_dir, **settings) as worker:
        return worker.run_to_end(
            worker.message(payload, key=key, headers=headers, expires=expires),
            crash_at=crash_at,
            duplicate=duplicate,
            jitter=jitter,
            runs_max=runs_max,
        )
