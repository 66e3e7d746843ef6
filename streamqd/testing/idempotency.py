"""Check that a second run for the same message changes nothing.

Messages are delivered at least once, so a handler must expect that a message runs twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Unpack

from streamqd.testing.declared import TestedOptions
from streamqd.testing.result import Run
from streamqd.testing.worker import Worker

CRASHES_MAX = 500


def assert_idempotent(
    handler: Callable[..., object],
    payload: object,
    *,
    observe: Callable[[], object],
    reset: Callable[[], object] | None = None,
    key: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    topic: str | None = None,
    group: str | None = None,
    state_dir: Path | None = None,
    **settings: Unpack[TestedOptions],
) -> None:
    """Run a handler twice for the same message, as happens after a crash before the acknowledgment.

    `observe` returns a value that shows the effects of the handler, and must return an equal value
    after both runs. A crash loses the memory of a process, so observe a file or a database instead.

    `reset` is a function that undoes all effects. If you pass it, the handler also runs in a
    process that is killed at each of its first 500 steps, and the run after each crash must lead to
    the same value. A step is one executed line of the handler.

    Raises AssertionError with the difference, or if a run does not succeed.
    """
    with Worker(handler, topic=topic, group=group, state_dir=state_dir, **settings) as worker:
        message = worker.message(payload, key=key, headers=headers)
        _check_success(worker.run(message), "the first run")
        # The value is copied, because the second run may change the same object.
        once = copy.deepcopy(observe())
        _check_success(worker.run(message), "the second run")
        _check_same(once, observe(), "the second run")
        for step in range(CRASHES_MAX if reset is not None else 0):
            assert reset is not None
            reset()
            try:
                worker.run(message, crash_at=step)
            except ValueError:
                return  # finished before this step, so all steps were tried
            what = f"the run after a crash at step {step}"
            _check_success(worker.run(message), what)
            _check_same(once, observe(), what)


def _check_success(run: Run, what: str) -> None:
    if run.verdict != "ack":
        raise AssertionError(f"{what} ended with {run.verdict}: {run.error!r}") from run.error


def _check_same(once: object, again: object, what: str) -> None:
    if again != once:
        raise AssertionError(
            f"{what} changed the result: it was {once!r} after one run, and is now {again!r}"
        )
