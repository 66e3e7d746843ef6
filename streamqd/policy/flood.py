"""When so many messages die that it is the code, not the messages: stop before all are dead."""

from __future__ import annotations

from collections import deque


class Flood:
    """Watches the deaths of one partition. Times are seconds of one clock, passed in."""

    def __init__(self, letters: int, window: float, share: float) -> None:
        """A flood is `letters` deaths within `window` that are `share` of what was settled then."""
        self._window = window
        self._share = share
        self._deaths: deque[tuple[float, int]] = deque(maxlen=letters)

    def died(self, now: float, settled: int) -> bool:
        """Note a death; `settled` counts all messages so far, this one too. Whether it is a flood.

        After a flood counting begins anew.
        """
        deaths = self._deaths
        deaths.append((now, settled))
        since, before = deaths[0]
        among = max(1, settled - before + 1)
        flood = (
            len(deaths) == deaths.maxlen
            and now - since <= self._window
            and len(deaths) >= self._share * among
        )
        if flood:
            deaths.clear()
        return flood
