"""Keeps the runs of one partition within the rate of its consumer.

`policy.rate` decides; here it is waited for, between two runs, as everything a worker waits for: a
stop, a pause or a hand-over comes first. The state is a word of the slot, so that a worker that
follows on another, also after a crash, goes on where that one was.
"""

from __future__ import annotations

import time

from streamqd.idle_reason import Wait
from streamqd.policy.rate import Rate
from streamqd.scoreboard import WORD_TRUSTED_UNTIL, now_ns
from streamqd.worker.context import WorkerContext

SHORT_NS = 2_000_000
BURST_SECONDS = 0.02


class RateLimiter:
    """The rate of one worker. Whoever is about to run handlers asks it last."""

    def __init__(self, rate: Rate, context: WorkerContext) -> None:
        slot = self._slot = context.slot
        self._rate = rate
        self._channel = context.channel
        self._settler = context.settler
        self._waits = slot.waits
        slot.rate_due_ns = rate.inherited(slot.rate_due_ns, now_ns())
        self._since_ns = 0  # when the present wait began, 0 = nobody waits

    @property
    def burst(self) -> int:
        """How many runs may begin at once."""
        return self._rate.burst

    def acquire(self, now: int, runs: int = 1) -> int:
        """Wait until `runs` may begin, note that they do, and return that instant.

        Nothing may come between this and the runs: the distance of two is that of two answers.
        """
        now = self.wait(now, runs)
        self.begun(now, runs)
        return now

    def wait(self, now: int, runs: int = 1) -> int:
        """Wait until `runs` may begin, and return that instant."""
        while left := self.left_ns(now, runs):
            self._settler.flush()
            if left > SHORT_NS:
                self._channel.sleep((left - SHORT_NS) / 1e9, self._slot.unfinished)
            else:
                time.sleep(left / 1e9)  # a poll counts milliseconds, which is too coarse here
            now = now_ns()
            if now > self._slot.words[WORD_TRUSTED_UNTIL]:
                now = self._channel.await_trust()
        return now

    def left_ns(self, now: int, runs: int = 1) -> int:
        """How long it is until `runs` may begin, 0 for now. Whoever asks is held by the rate."""
        left = self._rate.wait(self._slot.rate_due_ns, now, runs)
        if left and not self._since_ns:
            self._since_ns = now
            self._waits.begin(Wait.RATED, now + left)
        return left

    def begun(self, now: int, runs: int = 1) -> None:
        """Note that `runs` begin now."""
        self._slot.rate_due_ns = self._rate.after(self._slot.rate_due_ns, now, runs)
        if self._since_ns:
            self._slot.add("throttled_ns", now - self._since_ns)
            self._since_ns = 0
            self._waits.end()


def rate_limiter_of(context: WorkerContext, burst: int) -> RateLimiter | None:
    """Return the rate limiter that a consumer asks for, None when it asks for none.

    `burst` holds where the consumer does not say how much may begin at once, or what comes in
    some milliseconds when that is more: nothing wakes up in time to the microsecond.
    """
    consumer, slot = context.consumer, context.slot
    per_second = consumer.rate_per_second
    slot.rate_micro = round(per_second * 1e6)
    if not per_second:
        slot.rate_due_ns = 0
        return None
    least = max(burst, int(per_second * BURST_SECONDS))
    return RateLimiter(Rate(per_second, consumer.rate_burst or least), context)
