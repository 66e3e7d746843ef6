"""Isolate the subjects of the housekeeper's tasks, so that an error affects only one of them.

A subject is an assignment or a partition. Every task does its work for a single subject through
this module. After an unexpected error, the task skips that subject for a while, which becomes
longer with each error, and continues with the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from streamqd import logs
from streamqd.errors import InvalidValueError, RedisResponseError, RedisUnavailableError
from streamqd.failures import HOUSEKEEPING
from streamqd.isolate import Isolate
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment, Backoff
from streamqd.policy import backoff

P = ParamSpec("P")
T = TypeVar("T")
Subject = Assignment | tuple[str, int]  # an assignment, or the topic and number of a partition

BACKOFF = Backoff(kind="exponential", base=2.0, max=60.0, jitter="none")


@dataclass
class _Failing:
    """The failures of one task for one subject."""

    until: float = 0.0  # monotonic time until which the task pauses for the subject
    last: float = 0.0  # monotonic time of the last error
    error: str = ""  # class of the last error
    episode: logs.Episode = field(
        default_factory=lambda: logs.Episode("housekeeper.failed", "housekeeper.recovered")
    )


class TaskIsolation:
    """Counts and logs the errors of each subject, and makes a task skip a subject that fails.

    All tasks and the thread that serves HTTP share one instance.
    """

    def __init__(self, view: MetricsView) -> None:
        self._view = view
        self._failing: dict[tuple[str, Subject], _Failing] = {}

    def isolate_task(self, task: str) -> Isolate[Subject]:
        """Return a function that runs other functions for a subject of the task with this name.

        While the task skips the subject, the function does nothing and returns None.
        RedisUnavailableError and RedisResponseError are not isolated, so the task must handle them.
        """

        def run(
            subject: Subject, do: Callable[P, T], /, *args: P.args, **named: P.kwargs
        ) -> T | None:
            failing = self._failing.get((task, subject)) if self._failing else None
            if failing is not None and time.monotonic() < failing.until:
                return None
            try:
                return do(*args, **named)
            except (RedisUnavailableError, RedisResponseError):
                raise
            except Exception as error:  # noqa: BLE001 - it may be any: the others continue
                self._note_failure(task, subject, error)
                return None

        return run

    def observe(self) -> None:
        """Log that a subject has recovered if it has had no error since it was skipped last."""
        now = time.monotonic()
        for (task, subject), failing in list(self._failing.items()):
            if now > failing.until + BACKOFF.base:
                failing.episode.log_recovery(task=task, **_subject_fields(subject))
                del self._failing[task, subject]

    def failures(self, assignment: Assignment) -> list[dict[str, Any]]:
        """Return what the summary shows of the failures of an assignment and of its partition."""
        now, subjects = time.monotonic(), (assignment, (assignment.topic, assignment.partition))
        return [
            {
                "error": f"{HOUSEKEEPING} {task}: {failing.error}",
                "count": failing.episode.failures,
                "seconds_ago": round(now - failing.last, 1),
            }
            for (task, subject), failing in list(self._failing.items())
            if subject in subjects
        ]

    def _note_failure(self, task: str, subject: Subject, error: Exception) -> None:
        failing = self._failing.setdefault((task, subject), _Failing())
        known = isinstance(error, InvalidValueError)
        self._view.count("failures", (self._view.instance, task))
        failing.episode.log_failure(
            logging.WARNING if known else logging.ERROR,
            exc=None if known else error,
            task=task,
            error=f"{type(error).__name__}: {error}",
            **_subject_fields(subject),
        )
        failing.error, failing.last = type(error).__name__, time.monotonic()
        failing.until = failing.last + backoff.delay(BACKOFF, failing.episode.failures, 1.0)


def _subject_fields(subject: Subject) -> dict[str, Any]:
    if isinstance(subject, Assignment):
        return {"assignment": subject}
    return {"topic": subject[0], "partition": subject[1]}
