"""Why a worker that could work does not begin anything, in memory that processes share.

These are words of a unit's slot in the scoreboard, and its worker alone writes them. They are no
fault of the worker: nobody is charged for them, and no limit of a run counts them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

_KIND, _UNTIL_NS, _HELD, _HELD_KEYS, _OPENED, _FLOODED = range(6)

# What the guards of one worker leave to those of the next, as integers from 0.
CIRCUIT, FLOOD, SETTLED_SO_FAR = range(6, 10), range(10, 13), range(13, 14)


class Wait(enum.IntEnum):
    """What a worker waits for, beside messages."""

    NOTHING = 0
    BLOCKED = 1  # the message at the head of the line has failed, and runs again later
    FULL = 2  # so many messages of held keys are in flight that nothing is read
    OPEN = 3  # the circuit is open: a dependency is down
    PROBING = 4  # the circuit is half open: one message at a time
    FLOODED = 5  # the flood guard has paused the partition
    RATED = 6  # as many runs have begun as the rate allows


# What `status` and `top` call a worker that waits. Within its rate it works as it was asked to.
WORDS = {
    Wait.BLOCKED: "blocked",
    Wait.FULL: "full",
    Wait.OPEN: "halted",
    Wait.PROBING: "probing",
    Wait.FLOODED: "flooded",
    Wait.RATED: "throttled",
}


class Waiting(NamedTuple):
    """What there is to see. `until_ns` on the `now_ns` clock, 0 when no time is known.

    `held` messages of `held_keys` keys wait for a message of their key that has failed. `opened`
    and `flooded` count how often the circuit has opened and the flood guard has struck.
    """

    kind: Wait
    until_ns: int
    held: int
    held_keys: int
    opened: int
    flooded: int


class IdleReason:
    """The words. Counts stay over the incarnations of a worker; `reset` begins one."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def reset(self) -> None:
        """Forget what a worker before this one was waiting for."""
        for word in (_KIND, _UNTIL_NS, _HELD, _HELD_KEYS):
            self._words[word] = 0

    def begin(self, kind: Wait, until_ns: int = 0) -> None:
        """Say what is waited for from now on."""
        self._words[_UNTIL_NS] = until_ns
        self._words[_KIND] = kind

    def end(self) -> None:
        """Say that nothing is waited for."""
        self._words[_KIND] = Wait.NOTHING
        self._words[_UNTIL_NS] = 0

    def hold(self, entries: int, keys: int) -> None:
        """Say how many messages wait behind how many failed ones."""
        self._words[_HELD] = entries
        self._words[_HELD_KEYS] = keys

    def count_opening(self) -> None:
        """The circuit has opened."""
        self._words[_OPENED] += 1

    def count_flood(self) -> None:
        """The flood guard has struck."""
        self._words[_FLOODED] += 1

    def keep(self, words: range, *values: int) -> None:
        """Leave something to the worker after this one."""
        for word, value in zip(words, values, strict=True):
            self._words[word] = value

    def forget(self, words: range) -> None:
        """Leave nothing there to the worker after this one."""
        self.keep(words, *(0 for _ in words))

    def kept(self, words: range) -> list[int]:
        """Return what the worker before this one has left; zeros when there was none."""
        return [self._words[word] for word in words]

    def read(self) -> Waiting:
        """Return what there is to see."""
        kind, *rest = self._words[_KIND : _FLOODED + 1].tolist()
        try:
            return Waiting(Wait(kind), *rest)
        except ValueError:
            return Waiting(Wait.NOTHING, *rest)
