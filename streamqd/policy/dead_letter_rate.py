"""Detect a flood of dead letters, which indicates a fault in the code, not in the messages."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class DeadLetterRateMemory(NamedTuple):
    """The state of the count, which the next worker of a partition takes over."""

    dead_letter_count: int = 0  # number of dead letters in the window
    since: float = 0.0  # time of the oldest of these dead letters
    settled: int = 0  # number of messages that were settled by that time


NOTHING = DeadLetterRateMemory()


class DeadLetterRate:
    """Watches the rate of dead letters in one partition.

    The caller passes all times. They are seconds on one clock.
    """

    def __init__(
        self, dead_letters: int, window: float, share: float, memory: DeadLetterRateMemory = NOTHING
    ) -> None:
        """Watch for floods, each of at least `dead_letters` dead letters within `window` seconds.

        These dead letters count as a flood only if they make up at least the fraction `share` of
        all messages settled in that time.
        """
        self._window = window
        self._share = share
        # For dead letters of earlier workers, only the time of the oldest one is known, so all of
        # them leave the window at the same time.
        oldest = (memory.since, memory.settled)
        self._dead_letters = deque([oldest] * memory.dead_letter_count, maxlen=dead_letters)

    @property
    def memory(self) -> DeadLetterRateMemory:
        """The state that the next worker of this partition takes over."""
        return (
            DeadLetterRateMemory(len(self._dead_letters), *self._dead_letters[0])
            if self._dead_letters
            else NOTHING
        )

    def record_dead_letter(self, now: float, settled: int) -> bool:
        """Record a dead letter. Return True if it completes a flood.

        After a flood, the count starts again from 0. `settled` is the number of messages settled so
        far, including this one.
        """
        recent = self._dead_letters
        recent.append((now, settled))
        while now - recent[0][0] > self._window:
            recent.popleft()
        among = max(1, settled - recent[0][1] + 1)
        flood = len(recent) == recent.maxlen and len(recent) >= self._share * among
        if flood:
            recent.clear()
        return flood
