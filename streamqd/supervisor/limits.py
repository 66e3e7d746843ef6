"""Check the limits of workers: boot time, run time, memory, and progress between messages.

The supervisor checks the limits from outside the worker. So they also apply to a handler that
blocks its interpreter, and no message needs a timer of its own.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from streamqd import logs
from streamqd.cgroups import CONTROL_GROUPS, memory_file
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.process import Exit
from streamqd.scoreboard import RunningEntry, WorkerState, now_ns
from streamqd.supervisor.partition import AssignmentState
from streamqd.supervisor.plan import Action, InterruptRun, KillWorker
from streamqd.supervisor.running_worker import RunningWorker

MEASURE_SECONDS = 2.0
CHECK_INTERVAL_SECONDS = 0.25  # longest time until an exceeded limit is noticed
# Seconds without progress after which an idle worker is killed. This must be longer than the
# longest time that a healthy worker waits between two messages, which is a long poll and a reply.
STALLED_SECONDS = 30.0
CONTROL_CLOSED_SECONDS = 1.0  # time limit for the exit of a worker that closed its control socket
# If more time has passed between two checks than this process ever waits, the process and its
# workers must have been frozen, for example by a suspended host.
FROZEN_NS = 5_000_000_000
FREEZES_MAX = 16
SUCCESSOR_BOOT_SECONDS = (
    3.0  # a successor starts to boot this long before `max_messages` is expected
)
IDLE_SECONDS = 5.0  # time in which a ready worker may start a message before it is replaced
# Longest time between the kernel's count of a kill and the exit of the process.
OOM_KILL_SECONDS = 5.0
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

MAX_MESSAGES = "max_messages"  # the worker stops at this limit even without the supervisor


class Replacement(NamedTuple):
    """A worker that must be replaced because it has reached max_rss, max_age or max_messages.

    `rss` is its memory in bytes if the reason is max_rss, and None otherwise.
    """

    partition: AssignmentState
    reason: str
    rss: int | None = None


class LimitsExceeded(NamedTuple):
    """The results of one check. `next_at` is the monotonic time at which to check again."""

    actions: list[Action]
    replacements: list[Replacement]
    next_at: float


class Limits:
    """Checks all workers against their limits, and keeps the state between checks."""

    def __init__(self, isolate: Isolate[Assignment] = run_directly) -> None:
        self._isolate = isolate
        self._measured_at = 0.0
        self._checked_ns = 0
        self._frozen: list[tuple[int, int]] = []  # start and end of each freeze (`now_ns`)
        # Maps each slot to its last run, and to the time at which that run was last seen.
        self._last_runs: dict[int, tuple[int, float]] = {}
        # Maps a slot to the run that was over its hard limit at the last check.
        self._over_hard: dict[int, int] = {}

    def observe(
        self, partitions: Iterable[AssignmentState], now: float, boot_timeout: float
    ) -> LimitsExceeded:
        """Check the limits of all workers, and record their readiness, memory and runs.

        Return the actions and replacements for workers that have exceeded a limit.
        """
        self._detect_freeze()
        actions: list[Action] = []
        replacements: list[Replacement] = []
        next_at = now + MEASURE_SECONDS
        measure = now - self._measured_at >= MEASURE_SECONDS
        if measure:
            self._measured_at = now
        for partition in partitions:
            worker = partition.worker
            if worker is None or worker.kill is not None:
                continue
            found = self._isolate(
                partition.assignment,
                self._check,
                partition,
                worker,
                now,
                boot_timeout,
                measure=measure,
            )
            if found is not None:
                actions += found.actions
                replacements += found.replacements
                next_at = min(next_at, found.next_at)
        return LimitsExceeded(actions, replacements, next_at)

    def _check(
        self,
        partition: AssignmentState,
        worker: RunningWorker,
        now: float,
        boot_timeout: float,
        *,
        measure: bool,
    ) -> LimitsExceeded:
        """Check one worker. Its memory is only checked if `measure` is true."""
        later = now + MEASURE_SECONDS
        actions: list[Action] = []
        replacements: list[Replacement] = []
        _note_ready(partition, worker, now)
        running = partition.slot.running
        self._note_run(partition, now, running=bool(running))
        if not running:
            actions, idle = self._check_idle(partition, worker, now, boot_timeout)
            if not idle:
                return LimitsExceeded(actions, replacements, later)
        if worker.ready_at:
            if measure:
                replacements += self._check_memory(partition, worker, now)
            replacements += self._check_age(partition, worker, now)
        found, due = self._check_time(partition, worker, running, now)
        return LimitsExceeded(actions + found, replacements, due)

    def _check_idle(
        self, partition: AssignmentState, worker: RunningWorker, now: float, boot_timeout: float
    ) -> tuple[list[Action], bool]:
        """Check the boot time, progress and control socket of a worker that runs no handler.

        Return the actions, and True if the worker is ready and may start a run at any time.
        """
        if partition.slot.state == WorkerState.BOOTING:
            late = now > worker.started + boot_timeout
            return [KillWorker(partition.assignment, "boot")] if late else [], False
        if not worker.ready_at or worker.is_quiet:
            return [], False  # it has become ready since it was observed, or is exiting
        progress = max(partition.slot.progress_ns, self._frozen[-1][1] if self._frozen else 0)
        silent = (now_ns() - progress) / 1e9
        # A worker publishes its progress once per batch, and the messages of a batch can take a
        # long time. Therefore, also consider the last run that was seen.
        silent = min(silent, now - self._last_runs[partition.slot.index][1], now - worker.ready_at)
        control_closed = (
            worker.child.control_closed_at
            and now - worker.child.control_closed_at > CONTROL_CLOSED_SECONDS
        )
        if control_closed or silent > STALLED_SECONDS:
            return [KillWorker(partition.assignment, "stalled")], False
        return [], True

    def _note_run(self, partition: AssignmentState, now: float, *, running: bool) -> None:
        index, sequence = partition.slot.index, partition.slot.run_seq
        if running or self._last_runs.get(index, (-1, 0.0))[0] != sequence:
            self._last_runs[index] = (sequence, now)

    def _check_memory(
        self, partition: AssignmentState, worker: RunningWorker, now: float
    ) -> list[Replacement]:
        rss = partition.slot.rss = _rss(worker.child.pid)
        limit = partition.consumer.max_rss
        if not limit or rss - partition.slot.rss_baseline <= limit:
            return []
        return self._replace(partition, worker, "max_rss", now, rss)

    def _check_age(
        self, partition: AssignmentState, worker: RunningWorker, now: float
    ) -> list[Replacement]:
        """Request the replacement of a worker that is too old or close to `max_messages`."""
        found: list[Replacement] = []
        age, messages = partition.consumer.max_age, partition.consumer.max_messages
        # Spread the ages, so that workers that started together do not stop together.
        if age and now - worker.ready_at > age * (1 + worker.spread / 10):
            found = self._replace(partition, worker, "max_age", now)
        if messages:
            pace = partition.message_rate(now)
            if pace and worker.remaining_messages(messages) / pace < SUCCESSOR_BOOT_SECONDS:
                found.append(Replacement(partition, MAX_MESSAGES))
        return found

    def _replace(
        self,
        partition: AssignmentState,
        worker: RunningWorker,
        reason: str,
        now: float,
        rss: int | None = None,
    ) -> list[Replacement]:
        """Request the replacement of a worker, unless it has had no chance to work yet.

        A worker must have started a message or been ready for `IDLE_SECONDS`. Because of this, a
        limit that is too tight slows work down but never stops it.
        """
        worked = worker.has_worked or now - worker.ready_at > IDLE_SECONDS
        if worker.stop_reason or not worked:
            return []
        return [Replacement(partition, reason, rss)]

    def _check_time(
        self,
        partition: AssignmentState,
        worker: RunningWorker,
        running: list[RunningEntry],
        now: float,
    ) -> tuple[list[Action], float]:
        """Return the actions for runs that are over a time limit, and when to check again.

        The second value is a monotonic time.
        """
        soft, hard = worker.consumer.timeout, worker.consumer.hard_timeout
        if not soft and not hard:
            return [], now + MEASURE_SECONDS
        if not running:
            # A run may start right after this check, so check again before it can exceed its limit.
            return [], now + min(
                soft or CHECK_INTERVAL_SECONDS,
                hard or CHECK_INTERVAL_SECONDS,
                CHECK_INTERVAL_SECONDS,
            )
        # Runs are numbered in the order in which they start, so the lowest number is the oldest.
        elapsed = {entry.sequence: self._seconds_since(entry.started_ns) for entry in running}
        oldest = min(elapsed)
        if hard and elapsed[oldest] > hard:
            # Kill the worker only if two checks have found the same run over its limit, because the
            # run may just be finishing.
            again = self._over_hard.get(partition.slot.index) == oldest
            if again and partition.slot.running_in(oldest):
                kill = KillWorker(partition.assignment, "hard-limit", oldest)
                return [kill], now + MEASURE_SECONDS
            self._over_hard[partition.slot.index] = oldest
            return [], now + 0.01
        over = max((run for run, seconds in elapsed.items() if soft and seconds > soft), default=0)
        actions: list[Action] = []
        if over > worker.soft_limited:
            actions.append(InterruptRun(partition.assignment, over))
        remaining = [
            limit - seconds
            for limit in (soft, hard)
            for seconds in elapsed.values()
            if limit and limit > seconds
        ]
        return actions, now + max(0.01, min(remaining, default=CHECK_INTERVAL_SECONDS))

    # --- frozen time ---

    def _detect_freeze(self) -> None:
        """Record the time since the last check as frozen if this process cannot have been running.

        Frozen time does not count as run time.
        """
        now = now_ns()
        if self._checked_ns and now - self._checked_ns > FROZEN_NS:
            logs.event(
                "instance.frozen", logging.WARNING, seconds=round((now - self._checked_ns) / 1e9, 1)
            )
            self._frozen = [*self._frozen, (self._checked_ns, now)][-FREEZES_MAX:]
        self._checked_ns = now

    def _seconds_since(self, started_ns: int) -> float:
        """Return the seconds since `started_ns` (on the `now_ns` clock), without frozen time."""
        frozen = sum(max(0, end - max(begin, started_ns)) for begin, end in self._frozen)
        return (now_ns() - started_ns - frozen) / 1e9


def _note_ready(partition: AssignmentState, worker: RunningWorker, now: float) -> None:
    if worker.is_ready and not worker.ready_at:
        # Record this even if a handler is running, because a worker under load may run one at every
        # check.
        worker.became_ready(now, _rss(worker.child.pid))
        logs.event("worker.ready", assignment=partition.assignment, child=worker.child.pid)


def _rss(pid: int) -> int:
    try:
        # Do not use psutil, which takes ten times as long because it checks for a reused PID. The
        # PID of our own child cannot be reused.
        descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(descriptor, 256).split()[1]) * mmap.PAGESIZE
        finally:
            os.close(descriptor)
    except (OSError, IndexError):
        return 0


class OomMonitor:
    """Detects processes that the kernel killed because memory ran out.

    An exit by SIGKILL does not show who sent the signal. However, the kernel counts its own kills
    for each control group, so a kill that was counted within the last `OOM_KILL_SECONDS` explains
    such an exit.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Start to count kills from now on.

        `path` is the file that contains the kernel's count. If it is None, `find_counter` finds the
        file for the control group of this process.
        """
        self._path = path or find_counter(Path("/proc/self/cgroup"))
        self._seen = self._count()
        self._recent: list[float] = []

    def count_kills(self, now: float) -> None:
        """Record the kills that the kernel has counted since the last call.

        `now` is in monotonic seconds.
        """
        count = self._count()
        if count > self._seen or self._recent:
            fresh = [at for at in self._recent if now - at < OOM_KILL_SECONDS]
            self._recent = fresh + [now] * (count - self._seen)
        self._seen = count

    def explain(self, exit_: Exit) -> Exit:
        """Return the exit, marked as out of memory if the kernel has recently killed a process.

        Each kill that the kernel has counted explains only one exit.
        """
        if exit_.signal != signal.SIGKILL or not self._recent:
            return exit_
        self._recent.pop()
        return exit_._replace(out_of_memory=True)

    def _count(self) -> int:
        if self._path is not None:
            with contextlib.suppress(OSError):
                found = _COUNT.search(self._path.read_text())
                return int(found[1]) if found else 0
        return 0


def find_counter(membership: Path, root: Path = CONTROL_GROUPS) -> Path | None:
    """Return the file in which the kernel counts its out-of-memory kills, or None.

    `membership` is a file in the format of /proc/self/cgroup, which names the control group.
    """
    return memory_file(membership, "memory.events", "memory.oom_control", root)
