"""Check the limits of workers: boot time, run time, memory, and progress between messages.

The supervisor checks the limits, so they apply even to a handler that blocks the interpreter of its
worker, and no message needs a timer.
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
# Must be longer than any wait of a worker between two messages, which is a long poll and a reply.
STALLED_SECONDS = 30.0
CONTROL_CLOSED_SECONDS = 1.0  # time limit for the exit of a worker that closed its control socket
# If two checks are further apart than any wait of this process, the process and its workers were
# frozen.
FROZEN_NS = 5_000_000_000
FREEZES_KEPT = 16
AHEAD_SECONDS = 3.0  # estimated time left to `max_messages` when the successor starts to boot
IDLE_SECONDS = 5.0  # time in which a ready worker may start a message before it is replaced
# Longest time between a kill counted by the kernel and the exit of the process.
BELIEVED_SECONDS = 5.0
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

MAX_MESSAGES = "max_messages"  # the worker stops at this limit even without the supervisor


class Replacement(NamedTuple):
    """A worker to replace. The reason is max_rss, max_age or max_messages."""

    partition: AssignmentState
    reason: str
    rss: int | None = None


class LimitsExceeded(NamedTuple):
    """The results of one check, and the time of the next check (monotonic seconds)."""

    actions: list[Action]
    replacements: list[Replacement]
    next_at: float


class Limits:
    """Checks all workers against their limits, and keeps the state between checks."""

    def __init__(self, isolate: Isolate[Assignment] = run_directly) -> None:
        self._isolate = isolate
        self._measured_at = 0.0
        self._looked_ns = 0
        self._frozen: list[tuple[int, int]] = []  # start and end of each freeze (ns)
        self._ran: dict[int, tuple[int, float]] = {}  # slot -> last run, time of observation
        self._over_hard: dict[int, int] = {}  # slot -> run over its hard limit at the last check

    def observe(
        self, partitions: Iterable[AssignmentState], now: float, boot_timeout: float
    ) -> LimitsExceeded:
        """Record readiness, memory and runs of all workers. Return the limits that they exceed."""
        self._notice_freeze()
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
        """Check one worker."""
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

        Also return True if the worker is ready and may start a run at any moment.
        """
        if partition.slot.state == WorkerState.BOOTING:
            late = now > worker.started + boot_timeout
            return [KillWorker(partition.assignment, "boot")] if late else [], False
        if not worker.ready_at or worker.is_quiet:
            return [], False  # it became ready after it was observed, or is exiting
        progress = max(partition.slot.progress_ns, self._frozen[-1][1] if self._frozen else 0)
        silent = (now_ns() - progress) / 1e9
        # A worker publishes its progress once per batch, and the messages of a batch can take long.
        # So also use the last run that was seen.
        silent = min(silent, now - self._ran[partition.slot.index][1], now - worker.ready_at)
        control_closed = (
            worker.child.control_closed_at
            and now - worker.child.control_closed_at > CONTROL_CLOSED_SECONDS
        )
        if control_closed or silent > STALLED_SECONDS:
            return [KillWorker(partition.assignment, "stalled")], False
        return [], True

    def _note_run(self, partition: AssignmentState, now: float, *, running: bool) -> None:
        index, sequence = partition.slot.index, partition.slot.run_seq
        if running or self._ran.get(index, (-1, 0.0))[0] != sequence:
            self._ran[index] = (sequence, now)

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
        """Request to replace a worker that is too old or close to `max_messages`."""
        found: list[Replacement] = []
        age, messages = partition.consumer.max_age, partition.consumer.max_messages
        # Spread the ages, so that workers that started together do not stop together.
        if age and now - worker.ready_at > age * (1 + worker.spread / 10):
            found = self._replace(partition, worker, "max_age", now)
        if messages:
            pace = partition.pace_of(now)
            if pace and worker.remaining_of(messages) / pace < AHEAD_SECONDS:
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
        """Request to replace a worker that has started a message, or had `IDLE_SECONDS` to do so.

        Every worker gets this chance, so a limit that is too tight slows work down but never stops
        it.
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
        """Return the actions for exceeded time limits, and the time of the next check."""
        soft, hard = worker.consumer.timeout, worker.consumer.hard_timeout
        if not soft and not hard:
            return [], now + MEASURE_SECONDS
        if not running:
            # A run may start immediately after this check, so check again before its limit can
            # pass.
            return [], now + min(
                soft or CHECK_INTERVAL_SECONDS,
                hard or CHECK_INTERVAL_SECONDS,
                CHECK_INTERVAL_SECONDS,
            )
        # Runs are numbered when they start, so the lowest number is the oldest run.
        elapsed = {entry.sequence: self._seconds_since(entry.started_ns) for entry in running}
        oldest = min(elapsed)
        if hard and elapsed[oldest] > hard:
            # Kill only after two readings, so that a run that is just finishing is not killed.
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

    def _notice_freeze(self) -> None:
        """Record a period in which this process and its workers were frozen.

        No run time includes it.
        """
        now = now_ns()
        if self._looked_ns and now - self._looked_ns > FROZEN_NS:
            logs.event(
                "instance.frozen", logging.WARNING, seconds=round((now - self._looked_ns) / 1e9, 1)
            )
            self._frozen = [*self._frozen, (self._looked_ns, now)][-FREEZES_KEPT:]
        self._looked_ns = now

    def _seconds_since(self, started_ns: int) -> float:
        """Return the seconds since `started_ns`, without frozen periods."""
        frozen = sum(max(0, end - max(begin, started_ns)) for begin, end in self._frozen)
        return (now_ns() - started_ns - frozen) / 1e9


def _note_ready(partition: AssignmentState, worker: RunningWorker, now: float) -> None:
    if worker.is_ready and not worker.ready_at:
        # Do not wait until no handler runs, because a worker under load may run one at every
        # check.
        worker.became_ready(now, _rss(worker.child.pid))
        logs.event("worker.ready", assignment=partition.assignment, child=worker.child.pid)


def _rss(pid: int) -> int:
    try:
        # Do not use psutil, which costs ten times as much because it checks for a reused pid. The
        # pid of our own child cannot be reused.
        descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(descriptor, 256).split()[1]) * mmap.PAGESIZE
        finally:
            os.close(descriptor)
    except (OSError, IndexError):
        return 0


class OomMonitor:
    """Detects processes that the kernel killed because memory ran out.

    An exit by SIGKILL does not show who sent the signal. But the kernel counts its own kills for
    each control group. A kill counted within the last `BELIEVED_SECONDS` explains such an exit.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Count kills from now on.

        `path` is the file with the kernel's count. None searches for it.
        """
        self._path = path or find_counter(Path("/proc/self/cgroup"))
        self._seen = self._count()
        self._recent: list[float] = []

    def count_kills(self, now: float) -> None:
        """Record the kills that were counted since the last call. `now` is in monotonic seconds."""
        count = self._count()
        if count > self._seen or self._recent:
            fresh = [at for at in self._recent if now - at < BELIEVED_SECONDS]
            self._recent = fresh + [now] * (count - self._seen)
        self._seen = count

    def explain(self, exit_: Exit) -> Exit:
        """Return the exit, marked if a kill by the kernel explains it.

        Each kill explains one exit.
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
    """Return the file in which the kernel counts its kills, None if there is none.

    `membership` is a file in the format of /proc/self/cgroup.
    """
    return memory_file(membership, "memory.events", "memory.oom_control", root)
