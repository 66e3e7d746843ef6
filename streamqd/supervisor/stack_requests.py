"""Answer the requests of operators for the stack of a worker.

A directive names an assignment. The instance that owns the assignment makes the worker write the
stacks of all its threads, and publishes them in Redis with its epoch. Other instances ignore the
directive. The handler keeps running.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamqd import logs
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.process import Child
from streamqd.store.directives import Directive
from streamqd.store.stacks import PublishedStack
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.loop_watch import LoopWatch
from streamqd.supervisor.partition import AssignmentState

# Seconds between two checks for a stack. It is complete if it has not grown since the last check.
CHECK_INTERVAL_SECONDS = 0.2
RETRY_SECONDS = 1.5  # seconds without an answer after which the request is repeated
SILENCE_SECONDS = 8.0  # seconds without an answer after which an error is published


@dataclass
class _Request:
    """An operator's request that this instance must answer. Times are monotonic seconds."""

    directive: Directive
    since: float
    child: Child | None = None  # the process that was asked for its stack
    asked_at: float = 0.0
    # IDs of threads whose stacks must still be requested. 0 stands for all threads.
    steps: list[int] = field(default_factory=list)


@dataclass
class StackRequests:
    """The requests that a supervisor has not answered yet, no more than one per assignment."""

    leases: LeaseManager
    watch: LoopWatch
    isolate: Isolate[Assignment] = run_directly
    _open: dict[Assignment, _Request] = field(default_factory=dict)

    def add(self, wanted: Mapping[Assignment, Directive], now: float) -> None:
        """Accept new directives. Each replaces an earlier one for the same assignment."""
        self._open |= {
            assignment: _Request(directive, now) for assignment, directive in wanted.items()
        }

    def is_asked(self, assignment: Assignment) -> bool:
        """Return True if the next stack that the assignment's worker writes belongs to a request.

        The stack must then be left to `observe`.
        """
        return assignment in self._open

    def observe(self, partitions: Mapping[Assignment, AssignmentState], now: float) -> float:
        """Continue all open requests. Return the monotonic time at which to check again."""
        for assignment in list(self._open):
            partition = partitions.get(assignment)
            if partition is None or not partition.owned:
                # Another instance owns the assignment and has read the same directive.
                del self._open[assignment]
            elif (
                self.isolate(assignment, self._advance, partition, self._open[assignment], now)
                is not False
            ):
                self._open.pop(assignment, None)  # the request was answered, or an error occurred
        return now + CHECK_INTERVAL_SECONDS if self._open else math.inf

    def _advance(self, partition: AssignmentState, request: _Request, now: float) -> bool:
        """Take the next step of a request. Return True once it has been answered.

        The answer is the stack, or the reason why there is none.
        """
        child, silent = partition.child, now - request.since >= SILENCE_SECONDS
        if child is None:
            problem = "no worker process runs"
            if partition.last_exit:
                problem += f"; the last one ended with {partition.last_exit}"
            return self._answer(partition, request, problem=problem)
        if child is not request.child:  # nothing was requested yet, or the worker was replaced
            request.child, request.asked_at, request.steps = child, 0.0, []
        if self.watch.is_asked(partition.assignment) and not silent:
            return False  # `watch` has requested the next stack, so leave the stack to it
        if request.asked_at and (stack := child.poll_stack()):
            logs.stack(stack, child=child.pid, about=child.title, by=request.directive.by)
            return self._answer(partition, request, stack=stack)
        if silent:
            problem = f"the process wrote no stack within {SILENCE_SECONDS:.0f} s"
            return self._answer(partition, request, problem=problem)
        if not request.asked_at or now - request.asked_at >= RETRY_SECONDS:
            # Start with the thread of the event loop. If it is blocked, the main thread may be
            # waiting for it and cannot write the stacks of all threads.
            loop = partition.slot.loop_thread
            request.asked_at, request.steps = now, [loop, 0] if loop else [0]
        if request.steps:
            thread = request.steps.pop(0)
            child.ask_stack(thread) if thread else child.ask_stacks()
        return False

    def _answer(
        self, partition: AssignmentState, request: _Request, *, stack: str = "", problem: str = ""
    ) -> bool:
        found = PublishedStack(
            requested_unix_ms=request.directive.at_unix_ms,
            at_unix_ms=self.leases.membership.now_unix_ms(),
            instance=self.leases.instance,
            epoch=partition.lease.epoch,
            pid=partition.child.pid if partition.child is not None else 0,
            stack=stack,
            problem=problem,
        )
        self.leases.publish_stack(partition.assignment, found)
        return True
