"""The worker process of an assignment, from its fork or handover until its exit.

The supervisor records its observations and commands here. This module does no I/O. The counters in
a slot are not reset when a new process starts. So `RunningWorker` stores their values at its start,
and reports only the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import random
from typing import NamedTuple

from streamqd.config import Consumer
from streamqd.process import Child
from streamqd.scoreboard import WorkerSlot, WorkerState


class Kill(NamedTuple):
    """A SIGKILL that the supervisor has sent, with its reason and the sequence number of a run.

    For a hard limit, this is the run that exceeded the limit. Otherwise, it is the last run.
    """

    reason: str  # hard-limit | boot | stalled | on_stop | deadline | quit | unstarted
    run_seq: int
    at: float  # monotonic time of the signal


class Counters(NamedTuple):
    """A slot's counters of finished messages, recycled workers and started runs."""

    settled: int
    recycled: int
    run_seq: int

    @classmethod
    def read(cls, slot: WorkerSlot) -> Counters:
        """Return the current values of a slot's counters."""
        settled = slot.counter("acked") + slot.counter("failed")
        return cls(settled, slot.counter("recycled"), slot.run_seq)


@dataclass
class RunningWorker:
    """A worker process, and what the supervisor has observed of it. Times are monotonic seconds."""

    child: Child
    slot: WorkerSlot
    consumer: Consumer  # settings at its start, which a reload does not change
    started: float
    ready_at: float = 0.0  # 0 until it has booted
    quiet_at: float = 0.0  # time at which it was first seen quiet, 0 if it is not quiet
    stop_reason: str = ""  # reason for the stop command: shed, drain, reload, recycle, lost
    kill: Kill | None = None
    soft_limited: int = 0  # sequence number of the last run interrupted at its soft limit
    spread: float = field(default_factory=random)  # from 0 to 1, to vary `max_age` between workers

    def __post_init__(self) -> None:
        self._at_start = Counters.read(self.slot)

    def became_ready(self, now: float, rss: int) -> None:
        """Record that the process has booted, and the number of bytes of memory that it uses."""
        self.ready_at = now
        self.slot.rss_baseline = rss

    def note_quiet(self, now: float) -> None:
        """If the process is quiet, record the time at which this was first noticed."""
        self.quiet_at = (self.quiet_at or now) if self.is_quiet else 0.0

    def seconds_ready(self, now: float) -> float:
        """Return the seconds since the process became ready, or 0 if it is not ready yet."""
        return now - self.ready_at if self.ready_at else 0.0

    def pace(self, now: float) -> float:
        """Return the mean number of messages per second that the process has finished so far."""
        settled = self._settled_since_start()
        return settled / max(0.001, self.seconds_ready(now)) if settled else 0.0

    def remaining_messages(self, limit: int) -> int:
        """Return how many more messages the process may finish before it reaches a limit."""
        return limit - self._settled_since_start()

    def count_settled(self) -> int:
        """Return the number of messages that the process has finished, successfully or not.

        Messages that were dead-lettered because of earlier crashes do not count, because no handler
        ran for them.
        """
        return self._settled_since_start() + len(self.slot.batch().done)

    def _settled_since_start(self) -> int:
        return Counters.read(self.slot).settled - self._at_start.settled

    @property
    def has_worked(self) -> bool:
        """True if the process has started to handle a message."""
        return self.slot.run_seq != self._at_start.run_seq

    @property
    def has_recycled(self) -> bool:
        """True if the process has already counted itself as recycled after reaching a limit."""
        return self.slot.counter("recycled") != self._at_start.recycled

    @property
    def is_quiet(self) -> bool:
        """True if the process has reported that it handles no more messages."""
        return self.slot.state == WorkerState.QUIET and not self.kill

    @property
    def is_ready(self) -> bool:
        """True if the process has booted and is either working or paused."""
        return self.slot.state in (WorkerState.READY, WorkerState.PAUSED)
