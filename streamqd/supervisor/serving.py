"""What the system lets this instance serve: what it cannot start a process for, it gives up.

Others take those partitions, for the beat tells them how many this instance can serve. When
processes can be started again, it says so, and gets its share back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from streamqd import logs
from streamqd.policy.capacity import GIVE_UP_SECONDS, Capacity
from streamqd.supervisor.partition import OwnedPartition, Phase

if TYPE_CHECKING:
    from streamqd.supervisor.supervisor import Supervisor


class Serving:
    """Watches the refusals of the system, and tells the fleet what they mean."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.capacity = Capacity()

    def room(self, owned: int, cap: int) -> int:
        """How many more partitions may be taken; negative when `cap` is below what is owned.

        The limit of the system takes nothing away that runs.
        """
        room = self.capacity.room(owned)
        return cap - owned if room is None else min(cap - owned, room)

    def tick(self, now: float) -> None:
        """Give up what could not be started for a while; try now and then whether it could be."""
        supervisor = self._supervisor
        if supervisor.drain.begun:
            return
        holdings = supervisor.holdings.values()
        running = sum(each.child is not None for each in holdings)
        # All at once: else the rebalancer would take one that runs for each that is still to go.
        stuck = [each for each in holdings if _is_refused(each)]
        if any(now - each.refused_since >= GIVE_UP_SECONDS for each in stuck):
            self._give_up(now, running, stuck)
        elif count := self.capacity.to_try(now, running):
            self._try(now, running, count)

    def _give_up(self, now: float, running: int, stuck: list[OwnedPartition]) -> None:
        supervisor, before = self._supervisor, self.capacity.limit
        self.capacity.refused(now, running, supervisor.crew.refusal)
        for holding in stuck:
            holding.refused_since = 0.0
            holding.give_up()
        supervisor.board.add("unstartable", len(stuck))
        if before != self.capacity.limit:
            logs.event(
                "capacity.reduced",
                logging.ERROR,
                partitions=self.capacity.limit,
                given_up=len(stuck),
                error=self.capacity.problem,
            )
        self._tell()

    def _try(self, now: float, running: int, count: int) -> None:
        supervisor, before = self._supervisor, self.capacity.limit
        if supervisor.crew.try_processes(count):
            self.capacity.tried(now, running, count, len(supervisor.wanted_units()))
        else:
            self.capacity.refused(now, before or 0, supervisor.crew.refusal)
        after = self.capacity.limit
        if before != after:
            logs.event("capacity.raised", partitions=after)
            self._tell()

    def _tell(self) -> None:
        """Let the next beat say it, at once. Members of an older version obey `cap` too."""
        supervisor, limit = self._supervisor, self.capacity.limit
        supervisor.exchange.capacity = {}
        if limit is not None:
            cap = supervisor.settings.daemon.max_partitions
            supervisor.exchange.capacity = {
                "capacity": limit,
                "capacity_problem": self.capacity.problem[:200],
                # A cap of 0 is no limit: who can serve nothing is passed over like one that leaves.
                **({"cap": min(limit, cap or limit)} if limit else {"leaving": True}),
            }
        supervisor.exchange.beat_soon()
        supervisor.exchange.wake_fleet()


def _is_refused(holding: OwnedPartition) -> bool:
    """Whether the system refuses this partition its process."""
    return holding.phase is Phase.HELD and holding.child is None and holding.refused_since > 0
