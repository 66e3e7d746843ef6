"""Limit the runs of one partition to the rate of its consumer.

`policy.rate` makes the decisions, and this module waits between two runs. If the supervisor
commands the worker to stop or pause, the wait ends early, like every wait of a worker. The state is
stored in the slot, so that the next worker continues with it, even after a crash.
"""

from __future__ import annotations

import time

from streamqd.idle_reason import Wait
from streamqd.policy.rate import Rate
from streamqd.scoreboard import now_ns
from streamqd.worker.context import WorkerContext

SHORT_NS = 2_000_000
BURST_SECONDS = 0.02


class RateLimiter:
    """A gate that limits how many runs of one worker may start per second."""

    def __init__(self, context: WorkerContext, burst: int) -> None:
        """Create the rate limiter. If `rate_burst` is not set, the burst is at least `burst`."""
        slot = self._slot = context.slot
        self._consumer = context.consumer
        self._burst_min = burst
        self._set_rate(slot.partitions)
        self._channel = context.channel
        self._settler = context.settler
        self._waits = slot.waits
        self._since_ns = 0  # start of the current wait, 0 if there is none

    def _set_rate(self, partitions: int) -> None:
        """Compute the rate of this partition. `partitions` is the topic's number of partitions.

        If `rate_per` is "group", each partition gets an equal share of the group's rate.
        """
        self._partitions = partitions
        per_second = self._consumer.rate_per_second(partitions)
        least = max(self._burst_min, int(per_second * BURST_SECONDS))
        self._rate = Rate(per_second, self._consumer.rate_burst or least)
        slot = self._slot
        slot.rate_micro = round(per_second * 1e6)
        slot.rate_due_ns = self._rate.inherit(slot.rate_due_ns, now_ns())

    @property
    def burst(self) -> int:
        """The largest number of runs that may start at the same time."""
        return self._rate.burst

    def await_open(self, now: int, runs: int = 1) -> int:
        """Wait until this many runs may start, and return the time after the wait.

        The caller must start the runs immediately and pass this time to `note_start`, because the
        next runs are delayed from that time on.
        """
        while left := self.held_ns(now, runs):
            self._settler.flush()
            if left > SHORT_NS:
                self._channel.sleep((left - SHORT_NS) / 1e9, self._slot.unfinished)
            else:
                # `ControlChannel.sleep` has a resolution of a millisecond, which is too coarse
                # here.
                time.sleep(left / 1e9)
            now = now_ns()
        return now

    def held_ns(self, now: int, runs: int = 1) -> int:
        """Return the nanoseconds until this many runs may start, or 0 if they may start now.

        If they have to wait, the slot shows the wait and its reason.
        """
        if self._slot.partitions != self._partitions:  # the topic has grown
            self._set_rate(self._slot.partitions)
        left = self._rate.wait(self._slot.rate_due_ns, now, runs)
        if left and not self._since_ns:
            self._since_ns = now
            self._waits.begin(Wait.RATED, now + left)
        return left

    def admits(self, _running: int) -> bool:
        """Return True, because the rate does not limit the number of active runs."""
        return True

    @property
    def one_by_one(self) -> bool:
        """False, because the rate does not limit the number of active runs."""
        return False

    def note_start(self, now: int, runs: int = 1) -> None:
        """Record that this many runs start now."""
        self._slot.rate_due_ns = self._rate.next_due(self._slot.rate_due_ns, now, runs)
        if self._since_ns:
            self._slot.add("throttled_ns", now - self._since_ns)
            self._since_ns = 0
            self._waits.end()


def make_rate_limiter(context: WorkerContext, burst: int) -> RateLimiter | None:
    """Return the rate limiter that the consumer's settings require, or None.

    If the consumer does not set `rate_burst`, the number of runs that may start at the same time is
    `burst`, or the number that the rate allows in BURST_SECONDS if that is larger. The latter is
    necessary, because a worker does not wake up more precisely than that.
    """
    if context.consumer.rate:
        return RateLimiter(context, burst)
    context.slot.rate_micro = context.slot.rate_due_ns = 0
    return None
