"""Isolate assignments from each other, so that an unexpected error harms only one assignment.

The supervisor does all work on a single assignment through `Isolation.run`, such as handling a
call, a reply, a fork or an exit. After an unexpected error, it gives up the assignment for a while
and continues with the others. Work that concerns the whole fleet is not isolated.
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

CALM_SECONDS = 60.0  # time without an error after which the backoff is reset

P = ParamSpec("P")
T = TypeVar("T")


class Isolation:
    """Gives up an assignment after an unexpected error, for longer with each consecutive error."""

    def __init__(
        self,
        partitions: Mapping[Assignment, AssignmentState],
        policy: Backoff,
        remove_processes: Callable[[AssignmentState], None],
    ) -> None:
        """Create the isolation for these partitions.

        `policy` determines how long an assignment is given up. `remove_processes` must kill the
        processes of an assignment and cancel the replacement of its worker.
        """
        self._partitions = partitions
        self.policy = policy  # a reload replaces it
        self._remove_processes = remove_processes
        # The number of consecutive errors of each assignment, and the monotonic time at which its
        # pause ends.
        self._failed: dict[Assignment, tuple[int, float]] = {}
        # The pauses that must still be set, each with its end and the error that caused it. An
        # entry stays here as long as setting the pause fails.
        self._pending_pauses: dict[Assignment, tuple[float, str]] = {}

    def run(
        self, assignment: Assignment, do: Callable[P, T], /, *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Return the result of `do(...)`, or None after an error.

        After an unexpected error, the assignment is given up for a while. An invalid value in Redis
        is only logged, because the caller reads it again later.
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
        """Run a function for each given assignment, even if some calls fail."""
        for partition in partitions:
            self.run(partition.assignment, do, partition, *args, **named)

    def observe(self, now: float) -> None:
        """End the pauses that are over, and try again to set the pauses that could not be set."""
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
            # The assignment is already paused, but now its release has also failed. Keep the end of
            # the pause. The lease expires if it cannot be released.
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
        """Remove the processes of an assignment and pause it.

        If this fails, `observe` tries again.
        """
        until, problem = self._pending_pauses[assignment]
        partition = self._partitions.get(assignment)
        with contextlib.suppress(Exception):
            if partition is not None:
                self._remove_processes(partition)
                partition.fail(until, problem)
                partition.slot.failures.note(f"internal {problem.partition(':')[0]}", now_ns())
                partition.slot.add("assignment_errors")
            del self._pending_pauses[assignment]
