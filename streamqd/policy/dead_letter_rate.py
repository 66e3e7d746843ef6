"""Detect a flood of dead letters, which means that the code is at fault, not the messages."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class DeadLetterRateMemory(NamedTuple):
    """The state that the next watch of a partition starts with."""

    deaths: int = 0
    since: float = 0.0  # time of the oldest death
    settled: int = 0  # messages that were settled by then


NOTHING = DeadLetterRateMemory()


class DeadLetterRate:
    """Watches the deaths in one partition. Times are seconds on one clock of the caller."""

    def __init__(
        self, dead_letters: int, window: float, share: float, memory: DeadLetterRateMemory = NOTHING
    ) -> None:
        """Set the limit: `dead_letters` within `window` that are `share` of settled messages."""
        self._window = window
        self._share = share
        # Only the oldest earlier death has a known time, so all earlier ones leave the window
        # together.
        oldest = (memory.since, memory.settled)
        self._deaths = deque([oldest] * memory.deaths, maxlen=dead_letters)

    @property
    def memory(self) -> DeadLetterRateMemory:
        """The state that the next watch of this partition starts with."""
        return (
            DeadLetterRateMemory(len(self._deaths), *self._deaths[0]) if self._deaths else NOTHING
        )

    def record_dead_letter(self, now: float, settled: int) -> bool:
        """Record a death. Return True if it completes a flood, after which counting restarts.

        `settled` is the number of messages settled so far, including this one.
        """
        deaths = self._deaths
        deaths.append((now, settled))
        while now - deaths[0][0] > self._window:
            deaths.popleft()
        among = max(1, settled - deaths[0][1] + 1)
        flood = len(deaths) == deaths.maxlen and len(deaths) >= self._share * among
        if flood:
            deaths.clear()
        return flood
