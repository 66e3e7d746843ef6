"""Isolate assignments from each other: an unexpected error harms only its own assignment.

The supervisor and its parts use `Isolate` for all work on one assignment: each call, reply, action,
fork and exit. After an unexpected error, the assignment is given up for a time, and the loop
continues with the others. Actions for the whole fleet are not isolated.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from random import random
from typing import Concatenate, ParamSpec, TypeVar

from streamqd import logs
from streamqd.errors import InvalidValueError
from streamqd.model import Assignment, Backoff
from streamqd.policy import backoff
from streamqd.scoreboard import WorkerState, now_ns
from streamqd.supervisor.partition import AssignmentState

CALM_SECONDS = 60.0  # time without an error that resets the backoff

P = ParamSpec("P")
T = TypeVar("T")


class Isolation:
    """Gives up an assignment after an unexpected error, for a time that grows with each error."""

    def __init__(
        self,
        partitions: Mapping[Assignment, AssignmentState],
        policy: Backoff,
        remove_processes: Callable[[AssignmentState], None],
    ) -> None:
        """`remove_processes` removes the processes of an assignment and its planned actions."""
        self._partitions = partitions
        self.policy = policy  # a reload replaces it
        self._remove_processes = remove_processes
        # Consecutive errors, end of the pause.
        self._failed: dict[Assignment, tuple[int, float]] = {}
        # Pauses that could not be set yet: end, problem.
        self._pending_pauses: dict[Assignment, tuple[float, str]] = {}

    def run(
        self, assignment: Assignment, do: Callable[P, T], /, *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Return `do(...)`, or None after an error.

        After an unexpected error, the assignment is given up. An invalid value in Redis is only
        logged, so the caller reads it again.
        """
        try:
            return do(*args, **named)
        except InvalidValueError as error:
            logs.bad_value(error, assignment=assignment)
            return None
        except Exception as error:  # noqa: BLE001 - it may be any: the other assignments continue
            self._give_up(assignment, error)
            return None

    def run_for_each(
        self,
        partitions: Iterable[AssignmentState],
        do: Callable[Concatenate[AssignmentState, P], object],
        /,
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Run a function for each of the assignments."""
        for partition in partitions:
            self.run(partition.assignment, do, partition, *args, **named)

    def observe(self, now: float) -> None:
        """End the pauses that are over, and retry failed steps of giving up."""
        for assignment in list(self._pending_pauses):
            self._pause(assignment)
        for assignment, (_, until) in list(self._failed.items()):
            partition = self._partitions.get(assignment)
            if now >= until and partition is not None:
                if partition.slot.state == WorkerState.FAILED:
                    partition.slot.state = WorkerState.GONE
                if now >= until + CALM_SECONDS:
                    del self._failed[assignment]

    def _give_up(self, assignment: Assignment, error: Exception) -> None:
        now = time.monotonic()
        errors, pauses_until = self._failed.get(assignment, (0, 0.0))
        problem = f"{type(error).__name__}: {error}"
        if now < pauses_until:
            # The assignment already pauses, and its release failed too. Keep the pause, and let the
            # lease expire.
            self._pending_pauses[assignment] = pauses_until, problem
            self._pause(assignment)
            return
        seconds = backoff.delay(self.policy, errors + 1, random())
        self._failed[assignment] = errors + 1, now + seconds
        self._pending_pauses[assignment] = now + seconds, problem
        self._pause(assignment)
        # The log itself may have caused the error.
        with contextlib.suppress(Exception):
            logs.event(
                "assignment.given_up",
                logging.ERROR,
                exc=error,
                assignment=assignment,
                seconds=round(seconds, 1),
                error=problem,
            )

    def _pause(self, assignment: Assignment) -> None:
        """Remove the processes of an assignment and pause it. The next tick retries a failure."""
        until, problem = self._pending_pauses[assignment]
        partition = self._partitions.get(assignment)
        with contextlib.suppress(Exception):
            if partition is not None:
                self._remove_processes(partition)
                partition.fail(until, problem)
                partition.slot.failures.note(f"internal {problem.partition(':')[0]}", now_ns())
                partition.slot.add("assignment_errors")
            del self._pending_pauses[assignment]
