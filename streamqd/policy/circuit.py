"""When to stop trying because a dependency is down, and when to go on: a circuit breaker.

Closed, everything runs. As soon as there were so many failures of the dependency within the window
it opens: nothing is begun for a while. Then it is half open: one message at a time is tried, as a
probe. Its success closes the circuit, its failure opens it again. What fails again while others
succeed counts once: it is that message.

A failure of the dependency is not the message's. But one message alone may fail so, forever, and
nobody knows at its failure which it is. So the first such failure of a message costs it nothing;
a later one counts as an attempt, unless the circuit was open in between. So as long as an outage
opens the circuit it costs no attempt, also if it comes again and again.

The circuit is that of a group: what its partitions know of each other's failures counts as well as
what a worker has seen itself, and they take turns to probe. What must not be forgotten with its
worker is a `CircuitMemory`. Each message carries by itself when a failure of it was last forgiven.
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
    """What the next worker of a partition begins with: the failures that count, the oldest one."""

    failures: int = 0
    since: float = 0.0


NOTHING = CircuitMemory()


class Circuit:
    """One partition's part of the circuit. Times are seconds of one clock that the caller passes.

    `heard` keeps it at one with the circuit of its group.
    """

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
        self._opened = float("-inf")  # when it was last known to be open
        self.state = CircuitState.CLOSED

    @property
    def memory(self) -> CircuitMemory:
        """What the next circuit of this partition is to begin with."""
        failed = self._failed
        return CircuitMemory(len(failed), failed[0] if failed else 0.0)

    def failed(
        self, uid: str, now: float, successes: int, forgiven: float | None = None, others: int = 0
    ) -> bool:
        """Note a failure of the dependency. Returns whether it counts as the message's attempt.

        `successes` is how many runs of the group have succeeded so far, `forgiven` when a failure
        of the message was last forgiven, as far as it says so itself. `others` are the failures of
        other partitions that count.
        """
        before, at = self._last.pop(uid, (forgiven, successes))
        if before is None or at == successes:
            self._failed.append(now)
        while self._failed and now - self._failed[0] > self._window:
            self._failed.popleft()
        many = len(self._failed) + others >= self._limit
        if self.state is not CircuitState.CLOSED or many:
            self.state = CircuitState.OPEN
            self._opened = now
        self._last[uid] = (now, successes)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return before is not None and before > self._opened

    def heard(self, *, is_open: bool, opened: float) -> None:
        """Take over what the group knows: whether it is open, and when it last was."""
        self._opened = max(self._opened, opened)
        if is_open and self.state is CircuitState.CLOSED:
            self.state = CircuitState.OPEN
        elif not is_open and self.state is not CircuitState.CLOSED:
            self.state = CircuitState.CLOSED
            self._failed.clear()
        while self._failed and self._failed[0] <= opened:
            self._failed.popleft()

    def wait(self, now: float, later: float = 0.0) -> float:
        """Seconds until something may be begun, 0 for now. `later`: what others get for theirs."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened + self._probe_every + later - now)

    def probe(self) -> None:
        """One message is tried now."""
        self.state = CircuitState.HALF_OPEN

    def rest(self) -> None:
        """Another partition tries one meanwhile."""
        self.state = CircuitState.OPEN
