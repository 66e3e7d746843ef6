"""The limits of a worker: boot, time, memory, and progress between messages.

They are judged here and not in the worker, so a handler that holds the interpreter cannot escape
them, and no message pays for a timer.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
from collections.abc import Callable, Iterable

from streamqd import logs
from streamqd.process import Child
from streamqd.scoreboard import RunningEntry, WorkerState, now_ns
from streamqd.supervisor.partition import OwnedPartition
from streamqd.supervisor.rolling_replacement import SPENT
from streamqd.supervisor.worker_pool import WorkerPool

MEASURE_SECONDS = 2.0
LOOK_SECONDS = 0.25  # how late a limit may be noticed
# Longer than anything that a worker waits for between two messages: a doorbell and a reply.
STALLED_SECONDS = 30.0
DEAF_SECONDS = 1.0  # what a worker may take to end after it has closed its control socket
# A gap between two looks that no wait of this process explains: it was frozen, and so were they.
FROZEN_NS = 5_000_000_000
FREEZES_KEPT = 16
AHEAD_SECONDS = 3.0  # how long before a worker has handled enough its successor begins to boot
IDLE_SECONDS = 5.0  # a worker that has begun nothing for so long has nothing to do


class Limits:
    """Enforces the limits of all workers, look by look."""

    def __init__(self, crew: WorkerPool, request: Callable[[OwnedPartition, str], bool]) -> None:
        """`request` wants a worker replaced, for a reason; False: it is not wanted anew."""
        self._crew = crew
        self._request = request
        self._measured_at = 0.0
        self._looked_ns = 0
        self._frozen: list[tuple[int, int]] = []  # from, to
        self._ran: dict[int, tuple[int, float]] = {}  # slot -> last run, when it was seen
        self._suspected: dict[int, int] = {}  # slot -> the run that was over its hard limit

    def watch(self, holdings: Iterable[OwnedPartition], now: float) -> float:
        """Enforce what is due. Returns when to look again (monotonic)."""
        self._notice_freeze()
        next_at = now + MEASURE_SECONDS
        measure = now - self._measured_at >= MEASURE_SECONDS
        if measure:
            self._measured_at = now
        for holding in holdings:
            child = holding.child
            if child is None or holding.kill is not None:
                continue
            if holding.ready and not holding.ready_at:
                # Also of one that runs a handler already: under load it does at every look.
                holding.ready_at = now
                holding.slot.rss_baseline = _rss(child.pid)
                logs.event("worker.ready", unit=holding.unit, child=child.pid)
            running = holding.slot.running
            self._note_run(holding, now, running=bool(running))
            if not running and self._idle_trouble(holding, child, now):
                continue
            if holding.ready_at:
                if measure:
                    self._memory(holding, child, now)
                self._life(holding, now)
            next_at = min(next_at, self._time(holding, child, running, now))
        return next_at

    def _idle_trouble(self, holding: OwnedPartition, child: Child, now: float) -> bool:
        """Judge a worker that runs no handler: boot too long, no progress, no ear."""
        if holding.slot.state == WorkerState.BOOTING:
            if now > holding.started + self._crew.settings.daemon.boot_timeout:
                self._crew.kill(holding, "boot")
            return True
        if not holding.ready_at or holding.is_quiet:
            return True  # it has become ready since the look began, or it ends: see `Succession`
        progress = max(holding.slot.progress_ns, self._frozen[-1][1] if self._frozen else 0)
        silent = (now_ns() - progress) / 1e9
        # A worker publishes its progress once per batch, which may hold many long messages.
        silent = min(silent, now - self._ran[holding.slot.index][1], now - holding.ready_at)
        deaf = child.deaf_at and now - child.deaf_at > DEAF_SECONDS
        if deaf or silent > STALLED_SECONDS:
            self._crew.kill(holding, "stalled")
            return True
        return False

    def _note_run(self, holding: OwnedPartition, now: float, *, running: bool) -> None:
        index, sequence = holding.slot.index, holding.slot.run_seq
        if running or self._ran.get(index, (-1, 0.0))[0] != sequence:
            self._ran[index] = (sequence, now)

    def _memory(self, holding: OwnedPartition, child: Child, now: float) -> None:
        rss = holding.slot.rss = _rss(child.pid)
        limit = holding.consumer.max_rss
        if not limit or rss - holding.slot.rss_baseline <= limit:
            return
        if self._replace(holding, "max_rss", now, rss) and holding.settled() == 0:
            logs.event(
                "worker.tight_limit",
                logging.WARNING,
                unit=holding.unit,
                rss=rss,
                baseline=holding.slot.rss_baseline,
                max_rss=limit,
            )

    def _life(self, holding: OwnedPartition, now: float) -> None:
        """Have a worker replaced that is too old, or that will soon have handled enough."""
        age, messages = holding.consumer.max_age, holding.consumer.max_messages
        # Workers that were born together should not retire together.
        if age and now - holding.ready_at > age * (1 + holding.spread / 10):
            self._replace(holding, "max_age", now)
        if messages:
            pace = holding.pace_of(now)
            if pace and holding.left_of(messages) / pace < AHEAD_SECONDS:
                self._request(holding, SPENT)

    def _replace(
        self, holding: OwnedPartition, reason: str, now: float, rss: int | None = None
    ) -> bool:
        """Have a worker replaced that has worked, or had nothing to do for long enough.

        Whatever its limits are, no worker is replaced before it has begun to handle a message, so
        that a limit that is too tight slows work down and never stops it.
        """
        worked = holding.has_worked or now - holding.ready_at > IDLE_SECONDS
        if holding.child is None or holding.stop_reason or not worked:
            return False
        if not self._request(holding, reason):
            return False
        logs.event(
            "worker.recycled",
            unit=holding.unit,
            child=holding.child.pid,
            reason=reason,
            rss=rss,
        )
        return True

    def _time(
        self, holding: OwnedPartition, child: Child, running: list[RunningEntry], now: float
    ) -> float:
        consumer = holding.works_by or holding.consumer
        soft, hard = consumer.timeout, consumer.hard_timeout
        if not soft and not hard:
            return now + MEASURE_SECONDS
        if not running:
            # A run may begin at any moment: look again before its limit could be over.
            return now + min(soft or LOOK_SECONDS, hard or LOOK_SECONDS, LOOK_SECONDS)
        # Runs are numbered as they begin: of several, the lowest number is the oldest.
        spent = {entry.sequence: self._elapsed(entry.started_ns) for entry in running}
        oldest = min(spent)
        if hard and spent[oldest] > hard:
            # Two readings: the run that was over its limit must still be one that runs.
            again = self._suspected.get(holding.slot.index) == oldest
            if again and holding.slot.running_in(oldest):
                self._crew.kill(holding, "hard-limit", oldest)
                return now + MEASURE_SECONDS
            self._suspected[holding.slot.index] = oldest
            return now + 0.01
        over = max((each for each, seconds in spent.items() if soft and seconds > soft), default=0)
        if over > holding.soft_limited:
            # Meant for this run and for those that began before it.
            holding.soft_limited = over
            holding.slot.soft_kill_seq = over
            child.signal(signal.SIGUSR1)
        left = [
            limit - seconds
            for limit in (soft, hard)
            for seconds in spent.values()
            if limit and limit > seconds
        ]
        return now + max(0.01, min(left, default=LOOK_SECONDS))

    # --- frozen time ---

    def _notice_freeze(self) -> None:
        """Remember when everything stood still: nobody is to blame for that time."""
        now = now_ns()
        if self._looked_ns and now - self._looked_ns > FROZEN_NS:
            logs.event("frozen", logging.WARNING, seconds=round((now - self._looked_ns) / 1e9, 1))
            self._frozen = [*self._frozen, (self._looked_ns, now)][-FREEZES_KEPT:]
        self._looked_ns = now

    def _elapsed(self, started_ns: int) -> float:
        """Seconds since `started_ns`, less the time in which everything was frozen."""
        frozen = sum(max(0, end - max(begin, started_ns)) for begin, end in self._frozen)
        return (now_ns() - started_ns - frozen) / 1e9


def _rss(pid: int) -> int:
    try:
        # psutil looks first whether it is still the same process, at ten times the cost; ours is.
        descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(descriptor, 256).split()[1]) * mmap.PAGESIZE
        finally:
            os.close(descriptor)
    except (OSError, IndexError):
        return 0
