"""Which partitions the next exchange speaks for: all in turn, a bounded number at a time.

The server serves no other client while it executes what came in one write, and the time of an
exchange is bounded too, however many leases there are.
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
    """Goes through the partitions; each exchange continues where the last one stopped.

    What is refused is wanted again in each round, and keeps no partition from its turn.
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
        partitions: Mapping[Unit, OwnedPartition],
        wishes: Callable[[OwnedPartition, float], list[Wish]],
    ) -> list[Wish]:
        """Return what the partitions want whose turn it is: their `wishes`.

        `wishes` also gets the time until which renewals are due (monotonic).
        """
        if not self._left:
            self._left = [*partitions][::-1]
            self._due = self._due_until(now, beat_at, partitions)
        found: list[Wish] = []
        while self._left and len(found) < CALLS_MAX:
            partition = partitions.get(self._left.pop())
            if partition is not None:
                found += wishes(partition, self._due)
        return found

    def _due_until(
        self, now: float, beat_at: float, partitions: Mapping[Unit, OwnedPartition]
    ) -> float:
        """Those that would come soon come along with the first, or with a beat.

        Else each lease would have an exchange of its own.
        """
        renewals = (each.renew_at for each in partitions.values() if each.phase is Phase.HELD)
        first = min(renewals, default=beat_at)
        return now + self._interval * TOGETHER if min(first, beat_at) <= now else now
