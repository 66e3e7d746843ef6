"""A circuit breaker, which stops a partition while a dependency of its handler is unavailable.

While the circuit is closed, all messages run. After a number of failures of the dependency within a
window, the circuit opens, and no run starts until the next probe is due. The circuit is then half
open, and one message at a time runs as a probe. A successful probe closes the circuit, and a failed
probe opens it again. If a message fails repeatedly while others succeed, only its first failure
counts, because the message itself is probably the cause.

A failure of the dependency is not the fault of the message, so it should not count as one of the
message's attempts. However, the first failure of a message does not show whether the dependency or
the message itself is the cause. It is therefore forgiven, which means that it does not count. A
later failure of the same message counts as an attempt, unless the circuit was open in between. As a
result, an outage that opens the circuit costs no attempt, even if it recurs.

Each worker has its own circuit. The next worker of the partition continues with its
`CircuitMemory`. The message itself stores when one of its failures was last forgiven.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import NamedTuple

# Number of messages whose last failure the circuit remembers. For any other message, the circuit
# knows of an earlier failure only if the message contains the time at which one was forgiven.
REMEMBERED = 10_000


class CircuitState(enum.IntEnum):
    """The state of a circuit, which determines whether all messages may start, none, or one."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class CircuitMemory(NamedTuple):
    """The state of a circuit, which the next worker of the partition takes over."""

    failures: int = 0  # number of failures in the window
    since: float = 0.0  # time of the oldest of these failures
    opened: float = 0.0  # last time at which the circuit was open, 0 if it never was
    is_open: bool = False  # True if the circuit is open or half open


NOTHING = CircuitMemory()


class Circuit:
    """The circuit of one worker.

    The caller passes all times. They are seconds on one clock, and greater than 0.
    """

    def __init__(
        self, failures: int, window: float, probe_every: float, memory: CircuitMemory = NOTHING
    ) -> None:
        """Create a circuit that opens after `failures` failures within `window` seconds.

        While it is open, a probe is due every `probe_every` seconds.
        """
        self._limit = failures
        self._window = window
        self._probe_every = probe_every
        # For failures of earlier workers, only the time of the oldest one is known, so all of them
        # leave the window at the same time.
        self._failed = deque([memory.since] * memory.failures, maxlen=failures)
        # The time of the last failure of each message, and the number of runs that had succeeded
        # until then.
        self._last: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._opened = memory.opened or float("-inf")  # last time at which the circuit was open
        self.state = CircuitState.OPEN if memory.is_open else CircuitState.CLOSED

    @property
    def memory(self) -> CircuitMemory:
        """The state that the next circuit of this partition takes over."""
        failed, is_open = self._failed, self.state is not CircuitState.CLOSED
        return CircuitMemory(
            len(failed), failed[0] if failed else 0.0, max(0.0, self._opened), is_open
        )

    def record_failure(
        self, uid: str, now: float, successes: int, forgiven: float | None = None
    ) -> bool:
        """Record a failure of the dependency. Return True if it counts as an attempt.

        `successes` is the number of successful runs so far. `forgiven` is the time, stored in the
        message, at which one of its failures was last forgiven, or None if there is none.
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
        """Close the circuit after a successful probe. Earlier failures no longer count."""
        self.state = CircuitState.CLOSED
        self._failed.clear()

    def seconds_until_start(self, now: float) -> float:
        """Return the number of seconds until a message may start, or 0 if one may start now."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened + self._probe_every - now)

    def start_probe(self, now: float) -> None:
        """Record that one message starts as a probe."""
        self.state = CircuitState.HALF_OPEN
        self._opened = now
