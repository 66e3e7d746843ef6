"""The reason why a running worker is not starting a message, in shared memory.

The reason is stored in words (integers) of the assignment's slot in the scoreboard, to which only
the assignment's worker writes. Other processes can see from it that the worker is waiting on
purpose. Such a wait does not count toward the time limits of a run, and no crash is counted against
a message because of it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

_KIND, _UNTIL_NS, _HELD, _HELD_KEYS, _OPENED, _FLOODED = range(6)

# Words in which the guards, such as the circuit breaker, store their state, so that the next worker
# can continue from it. Each is an integer, 0 or greater.
CIRCUIT, FLOOD, SETTLED_SO_FAR = range(6, 10), range(10, 13), range(13, 14)


class Wait(enum.IntEnum):
    """The reason why a worker is waiting, other than a lack of messages."""

    NOTHING = 0
    BLOCKED = 1  # the oldest message failed, and must run again before all others
    FULL = 2  # too many messages with held keys are in flight, so none is read
    OPEN = 3  # the circuit breaker is open, because a dependency is down
    PROBING = 4  # the circuit breaker is half open, so one message runs at a time
    FLOODED = 5  # the flood guard has paused the partition
    RATED = 6  # the rate limit is reached


# Names of the waits in `status` and `top`. "throttled" is normal for a worker with a rate limit.
WORDS = {
    Wait.BLOCKED: "blocked",
    Wait.FULL: "full",
    Wait.OPEN: "halted",
    Wait.PROBING: "probing",
    Wait.FLOODED: "flooded",
    Wait.RATED: "throttled",
}


class Waiting(NamedTuple):
    """The current wait. `until_ns` is its end on the `now_ns` clock, or 0 if the end is unknown.

    `held` is the number of messages that wait for a failed message with the same key, and
    `held_keys` is the number of these keys. `opened` is the number of times that the circuit
    breaker has opened, and `flooded` the number of times that the flood guard has paused the
    partition.
    """

    kind: Wait
    until_ns: int
    held: int
    held_keys: int
    opened: int
    flooded: int


class IdleReason:
    """The words in which one assignment's worker records its waits.

    When a worker starts, it calls `reset`, which keeps the counts of earlier workers.
    """

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def reset(self) -> None:
        """Clear the wait that the previous worker recorded."""
        for word in (_KIND, _UNTIL_NS, _HELD, _HELD_KEYS):
            self._words[word] = 0

    def begin(self, kind: Wait, until_ns: int = 0) -> None:
        """Record that the worker is now waiting, and why."""
        self._words[_UNTIL_NS] = until_ns
        self._words[_KIND] = kind

    def end(self) -> None:
        """Record that the worker is no longer waiting."""
        self._words[_KIND] = Wait.NOTHING
        self._words[_UNTIL_NS] = 0

    def hold(self, entries: int, keys: int) -> None:
        """Record how many messages wait for a failed message, and how many keys they have."""
        self._words[_HELD] = entries
        self._words[_HELD_KEYS] = keys

    def count_opening(self) -> None:
        """Count that the circuit breaker has opened."""
        self._words[_OPENED] += 1

    def count_flood(self) -> None:
        """Count that the flood guard has paused the partition."""
        self._words[_FLOODED] += 1

    def store(self, words: range, *values: int) -> None:
        """Store values for the next worker."""
        for word, value in zip(words, values, strict=True):
            self._words[word] = value

    def forget(self, words: range) -> None:
        """Clear the values that are stored for the next worker."""
        self.store(words, *(0 for _ in words))

    def previous_values(self, words: range) -> list[int]:
        """Return the values that the previous worker stored, or zeros for the first worker."""
        return [self._words[word] for word in words]

    def read(self) -> Waiting:
        """Return the current wait."""
        kind, *rest = self._words[_KIND : _FLOODED + 1].tolist()
        try:
            return Waiting(Wait(kind), *rest)
        except ValueError:
            return Waiting(Wait.NOTHING, *rest)
