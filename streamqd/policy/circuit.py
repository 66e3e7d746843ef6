"""A circuit breaker: stop the runs of a partition while a dependency of its handler is down.

While the circuit is closed, all messages run. After a number of failures of the dependency within a
window, it opens, and no run starts until the next probe is due. It is then half open: one message
at a time runs as a probe. A successful probe closes the circuit, and a failed probe opens it again.
A message that fails repeatedly while others succeed counts once, because it is then the cause.

A failure of the dependency is not the message's fault. However, a message can also be the only one
that fails this way, and its first failure does not show the difference. The first such failure of a
message is therefore free. A later one counts as an attempt, unless the circuit was open in between.
An outage that opens the circuit costs no attempt, even if it recurs.

Each worker has its own circuit. `CircuitMemory` is the state that outlives the worker. Each message
carries the time at which a failure was last forgiven.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import NamedTuple

# Messages whose last failure is recorded. The next failure of any other message is not counted.
REMEMBERED = 10_000


class CircuitState(enum.IntEnum):
    """Which messages may start: all, none, or one at a time."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class CircuitMemory(NamedTuple):
    """The state that the next worker of a partition starts with.

    In order: the number of failures in the window, the time of the oldest, the last time at which
    the circuit was open (0: never), and True if it is not closed.
    """

    failures: int = 0
    since: float = 0.0
    opened: float = 0.0
    is_open: bool = False


NOTHING = CircuitMemory()


class Circuit:
    """The circuit of one worker. The caller passes all times: seconds above 0 on one clock."""

    def __init__(
        self, failures: int, window: float, probe_every: float, memory: CircuitMemory = NOTHING
    ) -> None:
        """Open at this many `failures` within `window`, and probe every `probe_every` seconds."""
        self._limit = failures
        self._window = window
        self._probe_every = probe_every
        # Only the oldest earlier failure has a known time, so all earlier ones leave the window
        # together.
        self._failed = deque([memory.since] * memory.failures, maxlen=failures)
        # The last failure of each message, and how many runs had succeeded by then.
        self._last: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._opened = memory.opened or float("-inf")  # when it was last known to be open
        self.state = CircuitState.OPEN if memory.is_open else CircuitState.CLOSED

    @property
    def memory(self) -> CircuitMemory:
        """The state that the next circuit of this partition starts with."""
        failed, is_open = self._failed, self.state is not CircuitState.CLOSED
        return CircuitMemory(
            len(failed), failed[0] if failed else 0.0, max(0.0, self._opened), is_open
        )

    def record_failure(
        self, uid: str, now: float, successes: int, forgiven: float | None = None
    ) -> bool:
        """Record a failure of the dependency. Return True if it counts as a message's attempt.

        `successes` is the number of successful runs so far. `forgiven` is when a failure of the
        message was last forgiven, as recorded in the message, None if never.
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
        """Let everything run again after a successful probe. Earlier failures no longer count."""
        self.state = CircuitState.CLOSED
        self._failed.clear()

    def seconds_until_start(self, now: float) -> float:
        """Return the seconds until something may start, 0 for now."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened + self._probe_every - now)

    def start_probe(self, now: float) -> None:
        """Run one message now as a probe."""
        self.state = CircuitState.HALF_OPEN
        self._opened = now
