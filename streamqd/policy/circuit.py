"""When to stop trying because a dependency is down, and when to go on: a circuit breaker.

Closed, everything runs. As soon as there were so many failures of the dependency within the window
it opens: nothing is begun for a while. Then it is half open: one message at a time is tried, as a
probe. Its success closes the circuit, its failure opens it again. What fails again while others
succeed counts once: it is that message.

A failure of the dependency is not the message's. But one message alone may fail so, for ever, and
nobody knows at its failure which it is. So the first such failure of a message costs it nothing;
a later one counts as an attempt, unless the circuit was open in between. So as long as an outage
opens the circuit it costs no attempt, also if it comes again and again.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque

REMEMBERED = 10_000  # messages whose last failure is known; one that is forgotten fails for nothing


class State(enum.IntEnum):
    """What may be begun: everything, nothing, or one message at a time."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class Circuit:
    """One circuit. Times are seconds of one clock, which the caller passes in."""

    def __init__(self, failures: int, window: float, probe_every: float) -> None:
        """Open at so many `failures` within `window`; probe each `probe_every` seconds."""
        self._limit = failures
        self._window = window
        self._probe_every = probe_every
        self._failed: deque[float] = deque(maxlen=failures)
        # The last failure of each message, and how many runs had succeeded by then.
        self._last: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._opened = float("-inf")
        self.state = State.CLOSED

    def failed(self, uid: str, now: float, successes: int) -> bool:
        """Note a failure of the dependency. Returns whether it counts as the message's attempt.

        `successes` is how many runs have succeeded so far.
        """
        before, others = self._last.pop(uid, (None, successes))
        if before is None or others == successes:
            self._failed.append(now)
        many = len(self._failed) == self._limit and now - self._failed[0] <= self._window
        if self.state is not State.CLOSED or many:
            self.state = State.OPEN
            self._opened = now
        self._last[uid] = (now, successes)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return before is not None and before > self._opened

    def succeeded(self) -> bool:
        """Note the success of a run that began as a probe. Returns whether that has closed it."""
        if self.state is not State.HALF_OPEN:
            return False
        self.state = State.CLOSED
        self._failed.clear()
        return True

    def wait(self, now: float) -> float:
        """Seconds until something may be begun, 0 for now. An open circuit becomes half open."""
        if self.state is not State.OPEN:
            return 0.0
        left = self._opened + self._probe_every - now
        if left > 0:
            return left
        self.state = State.HALF_OPEN
        return 0.0
