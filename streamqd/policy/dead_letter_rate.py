"""When so many messages die that it is the code, not the messages: stop before all are dead."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class DeadLetterRateMemory(NamedTuple):
    """What the next watch of a partition begins with."""

    deaths: int = 0
    since: float = 0.0  # the oldest of the deaths
    settled: int = 0  # by then


NOTHING = DeadLetterRateMemory()


class DeadLetterRate:
    """Watches the deaths of one partition. Times are seconds of one clock, passed in."""

    def __init__(
        self, letters: int, window: float, share: float, memory: DeadLetterRateMemory = NOTHING
    ) -> None:
        """A flood is `letters` deaths within `window` that are `share` of what was settled then."""
        self._window = window
        self._share = share
        # Of those before this watch only the oldest is known: they leave the window together.
        oldest = (memory.since, memory.settled)
        self._deaths = deque([oldest] * memory.deaths, maxlen=letters)

    @property
    def memory(self) -> DeadLetterRateMemory:
        """What the next watch of this partition is to begin with."""
        return (
            DeadLetterRateMemory(len(self._deaths), *self._deaths[0]) if self._deaths else NOTHING
        )

    def died(self, now: float, settled: int) -> bool:
        """Note a death; `settled` counts all messages so far, this one too. Whether it is a flood.

        After a flood counting begins again.
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
