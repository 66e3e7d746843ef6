"""The reason why a running worker does not start a message, in shared memory.

The reasons are stored in words of an assignment's slot in the scoreboard, which only the
assignment's worker writes. Such a wait is not the worker's fault: no crash is charged for it, and
it does not count towards the time limits of a run.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

_KIND, _UNTIL_NS, _HELD, _HELD_KEYS, _OPENED, _FLOODED = range(6)

# Words with the state of the guards, which the next worker continues. Each is an integer from 0.
CIRCUIT, FLOOD, SETTLED_SO_FAR = range(6, 10), range(10, 13), range(13, 14)


class Wait(enum.IntEnum):
    """The reason why a worker waits, other than a lack of messages."""

    NOTHING = 0
    BLOCKED = 1  # the oldest message failed and runs again later, before all others
    FULL = 2  # no reads, because too many messages of held keys are in flight
    OPEN = 3  # the circuit is open: a dependency is down
    PROBING = 4  # the circuit is half open: one message at a time
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
    """The current wait. `until_ns` is on the `now_ns` clock, 0 if its end is unknown.

    `held` messages of `held_keys` keys wait for a failed message with the same key. `opened` counts
    how often the circuit breaker opened, and `flooded` how often the flood guard paused the
    partition.
    """

    kind: Wait
    until_ns: int
    held: int
    held_keys: int
    opened: int
    flooded: int


class IdleReason:
    """The words of one assignment. Counts survive a restart of the worker, which calls `reset`."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def reset(self) -> None:
        """Clear the wait of the previous worker."""
        for word in (_KIND, _UNTIL_NS, _HELD, _HELD_KEYS):
            self._words[word] = 0

    def begin(self, kind: Wait, until_ns: int = 0) -> None:
        """Record that the worker waits from now on, and why."""
        self._words[_UNTIL_NS] = until_ns
        self._words[_KIND] = kind

    def end(self) -> None:
        """Record that the worker no longer waits."""
        self._words[_KIND] = Wait.NOTHING
        self._words[_UNTIL_NS] = 0

    def hold(self, entries: int, keys: int) -> None:
        """Record how many messages wait for a failed message, and the number of their keys."""
        self._words[_HELD] = entries
        self._words[_HELD_KEYS] = keys

    def count_opening(self) -> None:
        """Count an opening of the circuit breaker."""
        self._words[_OPENED] += 1

    def count_flood(self) -> None:
        """Count a pause by the flood guard."""
        self._words[_FLOODED] += 1

    def store(self, words: range, *values: int) -> None:
        """Store values for the next worker."""
        for word, value in zip(words, values, strict=True):
            self._words[word] = value

    def forget(self, words: range) -> None:
        """Clear the values for the next worker."""
        self.store(words, *(0 for _ in words))

    def previous_values(self, words: range) -> list[int]:
        """Return the values from the previous worker, zeros for the first worker."""
        return [self._words[word] for word in words]

    def read(self) -> Waiting:
        """Return the current wait."""
        kind, *rest = self._words[_KIND : _FLOODED + 1].tolist()
        try:
            return Waiting(Wait(kind), *rest)
        except ValueError:
            return Waiting(Wait.NOTHING, *rest)
