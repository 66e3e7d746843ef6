"""For whom the next exchange speaks: for all holdings in turn, a bounded number at a time.

The server serves nobody else while it works off what came in one write, and an exchange has only so
much time, however many leases there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from streamqd.model import Unit
from streamqd.supervisor.partition import OwnedPartition, Phase

CALLS_MAX = 64  # scripts of one exchange, about; each takes some 0.03 ms
TOGETHER = 0.2  # of an interval: how much earlier than it must a lease may be renewed

Wish = TypeVar("Wish")


class RenewalScheduler:
    """Goes through the holdings, at each exchange as far as it allows, and then on from there.

    What is refused is wanted again in each round, and keeps nobody behind it from a turn.
    """

    def __init__(self, interval: float) -> None:
        """`interval` is that of renewals, in seconds."""
        self._interval = interval
        self._left: list[Unit] = []
        self._due = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether some have not had their turn yet in this round."""
        return bool(self._left)

    def next(
        self,
        now: float,
        beat_at: float,
        holdings: Mapping[Unit, OwnedPartition],
        wishes: Callable[[OwnedPartition, float], list[Wish]],
    ) -> list[Wish]:
        """Return what those want whose turn it is, of whom `wishes` is asked.

        It is told, too, until when renewals are due (monotonic).
        """
        if not self._left:
            self._left = [*holdings][::-1]
            self._due = self._due_until(now, beat_at, holdings)
        found: list[Wish] = []
        while self._left and len(found) < CALLS_MAX:
            holding = holdings.get(self._left.pop())
            if holding is not None:
                found += wishes(holding, self._due)
        return found

    def _due_until(
        self, now: float, beat_at: float, holdings: Mapping[Unit, OwnedPartition]
    ) -> float:
        """Those that would come soon come along with the first, or with a beat.

        Else each lease would have an exchange of its own.
        """
        renewals = (each.renew_at for each in holdings.values() if each.phase is Phase.HELD)
        first = min(renewals, default=beat_at)
        return now + self._interval * TOGETHER if min(first, beat_at) <= now else now
