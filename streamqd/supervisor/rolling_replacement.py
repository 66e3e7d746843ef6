"""Replace workers without a gap, one at a time: a standby boots while the old worker works.

    request ──► standby boots ──► standby warm: worker gets the stop command ──► worker quiet:
    new token ──► standby gets the token and works ──► next request

A worker is quiet when it handles no more messages. The standby gets its token only then. Otherwise,
the old worker's unfinished message would run twice. If a standby exits too early, the old worker
continues, and another standby is forked. After too many such exits in a row, no standby is forked
for `daemon.crash_cooldown`. Replacements run one at a time, so only one partition at a time needs
the memory of two processes. Quiet workers that are slow to exit because of `on_stop` do not delay
other partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import random
from typing import NamedTuple

from streamqd import logs
from streamqd.config.schema import Daemon
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.policy import restart
from streamqd.supervisor.limits import MAX_MESSAGES
from streamqd.supervisor.partition import ON_STOP_SECONDS, AssignmentState, Phase
from streamqd.supervisor.plan import (
    Action,
    DismissStandby,
    DismissWorker,
    ForkStandby,
    KillStandby,
    KillWorker,
    StopWorker,
)

LEAVING = ("drain", "shed", "lost")
IDLE_PATIENCE_SECONDS = 10.0  # longest wait of a standby for the worker to reach `max_messages`
DISMISSED_MAX = 4  # no replacement starts while this many dismissed processes are exiting
# Time limit for the exit of a quiet worker, after which its partition continues without it.
QUIET_SECONDS = 1.0


@dataclass(frozen=True)
class RollConditions:
    """The state of the instance that decides if a replacement may start or must be given up.

    `now` is in monotonic seconds.
    """

    now: float
    daemon: Daemon
    draining: bool
    removed_assignments: frozenset[Assignment]
    exiting: int  # number of dismissed processes that have not exited yet


class RollResult(NamedTuple):
    """The result of a roll, in which a reload replaces all workers.

    `assignment` is the one whose worker could not be replaced because of `problem`, or None if all
    workers were replaced.
    """

    assignment: Assignment | None = None
    problem: str = ""
    remaining: int = 0  # number of workers that were not replaced


class RollProgress(NamedTuple):
    """The progress of a roll: the worker that is being replaced, and the step of its replacement.

    `step` is "queue" while another replacement must finish first, "start" while the successor is
    starting, and "finish" after the old worker was asked to stop. `workers` is the number of
    workers that remain to be replaced after this one. If no worker is being replaced, `assignment`
    is None and `step` is ''.
    """

    assignment: Assignment | None
    step: str
    workers: int


@dataclass
class _ActiveReplacement:
    """The replacement that is in progress. Times are monotonic seconds, or 0 if not known yet."""

    partition: AssignmentState
    reason: str
    old_pid: int
    without_standby: (
        bool  # True if there is no standby, and the next worker is forked after the old one exits
    )
    standby_since: float = 0.0
    warm_at: float = 0.0
    retry_at: float = 0.0

    @property
    def is_old_worker_active(self) -> bool:
        child = self.partition.child
        return child is not None and child.pid == self.old_pid

    @property
    def keeps_old_worker(self) -> bool:
        """True if the old worker is still running and was not asked to stop.

        If the replacement is given up now, this worker simply continues.
        """
        return self.is_old_worker_active and not self.partition.stop_reason

    @property
    def stops_old_worker(self) -> bool:
        """True if the old worker must be commanded to stop now.

        This is not necessary if it is replaced because of `max_messages`, because it then stops
        automatically.
        """
        return self.without_standby or (
            self.partition.standby_is_warm and self.reason != MAX_MESSAGES
        )


class RollingReplacement:
    """The current replacement, and the queue of those that follow.

    `observe` chooses the current replacement and tracks its progress. `plan_actions` only returns
    the next actions, and changes nothing.
    """

    def __init__(self, isolate: Isolate[Assignment] = run_directly) -> None:
        self._isolate = isolate
        # Maps each queued assignment to the reason for its replacement, in the order of requests.
        self._wanted: dict[Assignment, str] = {}
        self._current: _ActiveReplacement | None = None
        self._standby_exits: list[restart.WorkerExit] = []
        self._cooling_down: dict[
            Assignment, float
        ] = {}  # monotonic times at which replacements may start again
        # Maps assignments to the reason why their last replacement was given up.
        self._failed: dict[Assignment, str] = {}
        self._roll: list[Assignment] = []  # workers that a reload must replace after `_rolling`
        self._rolling: Assignment | None = None

    def request(self, assignment: Assignment, reason: str) -> bool:
        """Queue the replacement of a worker. Return False if the request is ignored.

        It is ignored if a replacement of the worker is already queued or in progress, or if its
        last replacement has failed less than `daemon.crash_cooldown` ago. A request because of a
        reload is never ignored.
        """
        if reason == "reload":
            self._cooling_down.pop(assignment, None)
            self._failed.pop(assignment, None)
        elif self.is_wanted(assignment) or assignment in self._cooling_down:
            return False
        self._wanted[assignment] = reason
        return True

    def is_wanted(self, assignment: Assignment, reason: str = "") -> bool:
        """Return True if a replacement for this reason is queued or in progress ('' means any)."""
        found = {self._wanted.get(assignment)}
        if self._current is not None and self._current.partition.assignment == assignment:
            found.add(self._current.reason)
        found.discard(None)
        return reason in found if reason else bool(found)

    def forget(self) -> None:
        """Drop all replacements after a reload, because their standbys would have the old code.

        A replacement whose old worker is already stopping continues.
        """
        if self._current is not None and not self._current.partition.stop_reason:
            self._current = None
        self._wanted.clear()

    def drop(self, assignment: Assignment) -> None:
        """Drop the replacement of one worker, because its assignment was given up."""
        self._wanted.pop(assignment, None)
        if self._current is not None and self._current.partition.assignment == assignment:
            self._current = None

    # --- a roll: all workers, one by one ---

    def roll(self, assignments: list[Assignment]) -> None:
        """Start to replace these workers for a reload, one after another."""
        self._roll, self._rolling = assignments, None

    @property
    def progress(self) -> RollProgress:
        """The progress of the roll that is in progress, if any."""
        assignment, current = self._rolling, self._current
        if assignment is None:
            return RollProgress(None, "", len(self._roll))
        step = "queue"
        if current is not None and current.partition.assignment == assignment:
            step = (
                "finish"
                if current.is_old_worker_active and not current.keeps_old_worker
                else "start"
            )
        return RollProgress(assignment, step, len(self._roll))

    def continue_roll(self, partitions: Mapping[Assignment, AssignmentState]) -> RollResult | None:
        """Request the next replacement of a roll if the last one is complete.

        Return the result when the roll is over, and None until then. If a replacement fails, the
        roll stops, so that the other partitions keep their old workers.
        """
        if self._rolling is not None:
            # Look for this reason only, because a new worker with a small `max_messages` may be
            # queued for its next replacement immediately.
            if self._isolate(self._rolling, self.is_wanted, self._rolling, "reload"):
                return None
            assignment, self._rolling = self._rolling, None
            problem = self._failed.get(assignment)
            if problem is not None:
                remaining, self._roll = len(self._roll) + 1, []
                return RollResult(assignment, problem, remaining)
        while self._roll:
            assignment = self._roll.pop(0)
            if partitions[assignment].child is not None:
                self._isolate(assignment, self.request, assignment, "reload")
                self._rolling = assignment
                return None
        return RollResult()

    # --- observe ---

    def observe(
        self, partitions: Mapping[Assignment, AssignmentState], given: RollConditions
    ) -> None:
        """Track the current replacement, or start the next one."""
        for assignment in [
            assignment for assignment, until in self._cooling_down.items() if until <= given.now
        ]:
            del self._cooling_down[assignment]
        replacing = self._current
        if replacing is None:
            self._begin(partitions, given)
        else:
            self._isolate(replacing.partition.assignment, self._continue, replacing, given)

    def _continue(self, replacing: _ActiveReplacement, given: RollConditions) -> None:
        if _is_over(replacing, given):
            self._current = None
        elif replacing.partition.standby is not None:
            self._follow(replacing, given.now)

    def _begin(
        self, partitions: Mapping[Assignment, AssignmentState], given: RollConditions
    ) -> None:
        if given.draining:
            self._wanted.clear()
        # Skip an assignment while its dismissed standby, which has the old code, is exiting. Its
        # `on_stop` may take up to 30 seconds.
        ready = [
            assignment for assignment in self._wanted if not partitions[assignment].slot.standby_pid
        ]
        if not ready or given.exiting >= DISMISSED_MAX:
            return
        # A reload requests one worker at a time. Its request comes first, because otherwise, each
        # step of the reload would wait for all workers that reach `max_messages`.
        assignment = next(
            (assignment for assignment in ready if self._wanted[assignment] == "reload"), ready[0]
        )
        partition = partitions[assignment]
        reason = self._wanted.pop(assignment)
        worker = partition.worker
        if worker is None or worker.stop_reason or partition.phase is not Phase.HELD:
            return  # the worker exits anyway, and its successor replaces it
        if reason == MAX_MESSAGES and not worker.ready_at:
            return  # the worker has exited at `max_messages`, and this is its successor
        without_standby = partition.consumer.handover == "cold" or not worker.ready_at
        self._current = _ActiveReplacement(partition, reason, worker.child.pid, without_standby)
        self._standby_exits = []
        self._failed.pop(assignment, None)

    def _follow(self, replacing: _ActiveReplacement, now: float) -> None:
        """Record when the standby was forked and has booted, and give it up if it is not needed.

        A standby that waits for the old worker to reach `max_messages` is given up after
        `IDLE_PATIENCE_SECONDS`, or if a reload wants to replace a worker.
        """
        partition = replacing.partition
        replacing.standby_since = replacing.standby_since or now
        if not partition.standby_is_warm:
            return
        if not replacing.warm_at:
            replacing.warm_at = now
            child = partition.standby.pid if partition.standby is not None else None
            logs.event("standby.ready", assignment=partition.assignment, child=child)
        if replacing.reason != MAX_MESSAGES or partition.is_quiet or not replacing.keeps_old_worker:
            return
        idle = now - replacing.warm_at > IDLE_PATIENCE_SECONDS
        if idle:
            partition.pace = 0.0  # no messages arrive, so the earlier rate no longer applies
        if idle or "reload" in self._wanted.values():
            self._current = None

    def on_standby_refused(self, assignment: Assignment) -> None:
        """Give up the current replacement, because the operating system refused its standby."""
        self._current = None  # `Limits` requests the replacement again, unless it was for a reload
        self._failed[assignment] = "the operating system refuses another process"

    def on_standby_exit(
        self, partition: AssignmentState, how: str, now: float, daemon: Daemon
    ) -> None:
        """Plan another standby after a backoff, because the current one has exited too early.

        After too many such exits, give up the replacement for `daemon.crash_cooldown`. `how`
        describes the exit.
        """
        replacing = self._current
        if replacing is None or replacing.partition is not partition:
            return
        if not replacing.keeps_old_worker:
            self._current = (
                None  # the old worker is stopping or gone, so the partition gets a new worker
            )
            return
        self._standby_exits.append(restart.WorkerExit(now, restart.ExitCause.BOOT))
        decision = restart.decide(
            self._standby_exits,
            now,
            backoff=daemon.crash_backoff,
            crash_loop=daemon.crash_loop,
            cooldown=daemon.crash_cooldown,
            max_crashes=partition.consumer.max_crashes,
            jitter=random(),
        )
        if isinstance(decision, restart.Restart):
            replacing.standby_since = replacing.warm_at = 0.0
            replacing.retry_at = now + decision.after
            return
        logs.event(
            "standby.given_up",
            logging.ERROR,
            assignment=partition.assignment,
            last_exit=how,
            seconds=round(decision.until - now, 1),
        )
        self._cooling_down[partition.assignment] = decision.until
        self._failed[partition.assignment] = f"it terminated with {how}"
        self._current = None

    # --- plan ---

    def plan_actions(
        self, partitions: Iterable[AssignmentState], now: float, boot_timeout: float
    ) -> list[Action]:
        """Return the next action of the current replacement, and those that remove other processes.

        These are workers that are quiet but do not exit, and standbys that are no longer needed.
        """
        current = None if self._current is None else self._current.partition
        actions: list[Action] = []
        for partition in partitions:
            actions += self._isolate(partition.assignment, _dismiss_quiet, partition, now) or ()
            if partition.standby is not None and partition is not current:
                actions.append(DismissStandby(partition.assignment))
        if self._current is not None:
            step = self._isolate(
                self._current.partition.assignment, _step, self._current, now, boot_timeout
            )
            actions += step or ()
        return actions


def _step(replacing: _ActiveReplacement, now: float, boot_timeout: float) -> list[Action]:
    """Return the next action of a replacement, or [] if it has to wait.

    It forks the standby, kills one that boots too slowly, or stops or dismisses the old worker.
    """
    partition = replacing.partition
    assignment = partition.assignment
    if partition.standby is None:
        if (
            replacing.keeps_old_worker
            and not replacing.without_standby
            and now >= replacing.retry_at
        ):
            return [ForkStandby(assignment)]
    elif not partition.standby_is_warm:
        late = now - replacing.standby_since > boot_timeout
        return [KillStandby(assignment)] if late else []
    elif partition.is_quiet:
        return [DismissWorker(assignment)]
    if replacing.stops_old_worker and replacing.keeps_old_worker:
        return [StopWorker(assignment, "reload" if replacing.reason == "reload" else "recycle")]
    return []


def _dismiss_quiet(partition: AssignmentState, now: float) -> list[Action]:
    """Return the action that dismisses or kills a worker that is quiet but slow to exit."""
    worker = partition.worker
    if worker is None or not worker.is_quiet:
        return []
    since = now - worker.quiet_at
    if partition.consumer.handover == "cold" or partition.slot.leaving_pid:
        return [KillWorker(partition.assignment, "on_stop")] if since > ON_STOP_SECONDS else []
    if since > QUIET_SECONDS:
        return [DismissWorker(partition.assignment, unexplained=not worker.stop_reason)]
    return []


def _is_over(replacing: _ActiveReplacement, given: RollConditions) -> bool:
    """Return True if the replacement is complete, or no longer possible or needed."""
    partition = replacing.partition
    if partition.worker is not None and not replacing.is_old_worker_active:
        # Check `ready_at` rather than the current state, so that the event `worker.ready` is logged
        # before the end of the replacement.
        return bool(partition.worker.ready_at)
    leaving = partition.stop_reason in LEAVING or partition.release_after
    free = partition.phase not in (Phase.HELD, Phase.REFENCING)
    return (
        leaving
        or free
        or given.draining
        or partition.broken_until > given.now
        or partition.assignment in given.removed_assignments
    )
