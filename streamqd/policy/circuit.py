"""When to stop trying because a dependency is down, and when to go on: a circuit breaker.

Closed, everything runs. As soon as there were so many failures of the dependency within the window
it opens: nothing is begun for a while. Then it is half open: one message at a time is tried, as a
probe. Its success closes the circuit, its failure opens it again. What fails again while others
succeed counts once: it is that message.

A failure of the dependency is not the message's. But one message alone may fail so, forever, and
nobody knows at its failure which it is. So the first such failure of a message costs it nothing;
a later one counts as an attempt, unless the circuit was open in between. So as long as an outage
opens the circuit it costs no attempt, also if it comes again and again.

Each worker has a circuit of its own. What must not be forgotten with its worker is a
`CircuitMemory`. Each message carries by itself when a failure of it was last forgiven.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import NamedTuple

REMEMBERED = 10_000  # messages whose last failure is known; one that is forgotten fails for nothing


class CircuitState(enum.IntEnum):
    """What may be begun: everything, nothing, or one message at a time."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class CircuitMemory(NamedTuple):
    """What the next worker of a partition starts with.

    The failures that count and the oldest one, when the circuit was last open (0: never), and
    True if it is not closed.
    """

    failures: int = 0
    since: float = 0.0
    opened: float = 0.0
    is_open: bool = False


NOTHING = CircuitMemory()


class Circuit:
    """The circuit of one worker. Times are seconds above 0 of one clock that the caller passes."""

    def __init__(
        self, failures: int, window: float, probe_every: float, memory: CircuitMemory = NOTHING
    ) -> None:
        """Open at so many `failures` within `window`; probe each `probe_every` seconds."""
        self._limit = failures
        self._window = window
        self._probe_every = probe_every
        # Of those before this circuit only the oldest is known: they leave the window together.
        self._failed = deque([memory.since] * memory.failures, maxlen=failures)
        # The last failure of each message, and how many runs had succeeded by then.
        self._last: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._opened = memory.opened or float("-inf")  # when it was last known to be open
        self.state = CircuitState.OPEN if memory.is_open else CircuitState.CLOSED

    @property
    def memory(self) -> CircuitMemory:
        """What the next circuit of this partition is to start with."""
        failed, is_open = self._failed, self.state is not CircuitState.CLOSED
        return CircuitMemory(
            len(failed), failed[0] if failed else 0.0, max(0.0, self._opened), is_open
        )

    def failed(self, uid: str, now: float, successes: int, forgiven: float | None = None) -> bool:
        """Note a failure of the dependency. Returns whether it counts as the message's attempt.

        `successes` is how many runs have succeeded so far, `forgiven` when a failure of the message
        was last forgiven, as far as it says so itself.
        """
        before, at = self._last.pop(uid, (forgiven, successes))
        if before is None or at == successes:
            self._failed.append(now)
        while self._failed and now - self._failed[0] > self._window:
            self._failed.popleft()
        if self.state is not CircuitState.CLOSED or len(self._failed) >= self._limit:
            self.state = CircuitState.OPEN
            self._opened = now
        self._last[uid] = (now, successes)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return before is not None and before > self._opened

    def close(self) -> None:
        """Start everything again: a probe has succeeded. Failures are counted anew."""
        self.state = CircuitState.CLOSED
        self._failed.clear()

    def wait(self, now: float) -> float:
        """Return the seconds until something may start, 0 for now."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened + self._probe_every - now)

    def probe(self, now: float) -> None:
        """Try one message now."""
        self.state = CircuitState.HALF_OPEN
        self._opened = now
