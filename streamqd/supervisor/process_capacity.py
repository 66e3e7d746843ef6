"""What the system lets this instance serve: a partition that cannot get a process is given up.

Others take such partitions, for the heartbeat tells how many this instance can serve. When
processes can be started again, it says so, and gets its share back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from streamqd import logs
from streamqd.policy.capacity import GIVE_UP_SECONDS, Capacity
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.plan import ReleaseLease


class ProcessCapacity:
    """Watches the refusals of the system."""

    def __init__(self) -> None:
        self._capacity = Capacity()

    @property
    def limit(self) -> int | None:
        """How many partitions can be served, None while the system sets no limit."""
        return self._capacity.limit

    def room(self, owned: int, cap: int) -> int:
        """How many more partitions may be taken; negative when `cap` is below what is owned.

        The limit of the system takes nothing away that runs.
        """
        room = self._capacity.room(owned)
        return cap - owned if room is None else min(cap - owned, room)

    def announcement(self, cap: int) -> dict[str, object]:
        """What heartbeats tell the fleet. Members of an older version obey `cap` too."""
        limit = self._capacity.limit
        if limit is None:
            return {}
        return {
            "capacity": limit,
            "capacity_problem": self._capacity.problem[:200],
            # A cap of 0 is no limit: who can serve nothing is passed over like one that leaves.
            **({"cap": min(limit, cap or limit)} if limit else {"leaving": True}),
        }

    def wishes(
        self, now: float, partitions: Iterable[OwnedPartition], running: int, refusal: str
    ) -> list[ReleaseLease]:
        """Give up what could not be started for a while, because of `refusal`."""
        # All at once: else the rebalancer would take one that runs for each that is still to go.
        stuck = [each for each in partitions if _is_refused(each)]
        if not any(now - each.refused_since >= GIVE_UP_SECONDS for each in stuck):
            return []
        before = self._capacity.limit
        self._capacity.refused(now, running, refusal)
        if before != self._capacity.limit:
            logs.event(
                "capacity.reduced",
                logging.ERROR,
                partitions=self._capacity.limit,
                given_up=len(stuck),
                error=self._capacity.problem,
            )
        return [ReleaseLease(each.unit, "unstartable") for each in stuck]

    def to_try(self, now: float, running: int) -> int:
        """How many processes, beside those that run, should be tried now; mostly 0."""
        return self._capacity.to_try(now, running)

    def tried(self, now: float, running: int, count: int, *, wanted: int, refusal: str) -> None:
        """Note whether `count` more processes could be started; `refusal` is '' when they could."""
        before = self._capacity.limit
        if refusal:
            self._capacity.refused(now, before or 0, refusal)
        else:
            self._capacity.tried(now, running, count, wanted)
        after = self._capacity.limit
        if before != after:
            logs.event("capacity.raised", partitions=after)


def _is_refused(partition: OwnedPartition) -> bool:
    """Whether the system refuses this partition its process."""
    return partition.phase is Phase.HELD and partition.child is None and partition.refused_since > 0
