"""What the system lets this instance serve: a partition that cannot get a process is given up.

Others take such partitions, for the heartbeat says how many this instance can serve. When
processes can be started again, it says so, and gets its share back. The memory of it all is
`policy.capacity.Capacity`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from streamqd import logs
from streamqd.policy.capacity import GIVE_UP_SECONDS, Capacity
from streamqd.supervisor.partition import PartitionState, Phase
from streamqd.supervisor.plan import ReleaseLease


def observe(
    capacity: Capacity, now: float, partitions: Collection[PartitionState], refusal: str
) -> None:
    """Take note of a `refusal` that has lasted: no more than what runs can be served."""
    stuck = _stuck(now, partitions)
    if stuck:
        running = sum(each.child is not None for each in partitions)
        before = capacity.limit
        capacity.refused(now, running, refusal)
        if before != capacity.limit:
            logs.event(
                "capacity.reduced",
                logging.ERROR,
                partitions=capacity.limit,
                given_up=len(stuck),
                error=capacity.problem,
            )


def wishes(now: float, partitions: Iterable[PartitionState]) -> list[ReleaseLease]:
    """Give up what could not be started for a while."""
    return [ReleaseLease(each.unit, "unstartable") for each in _stuck(now, partitions)]


def announcement(capacity: Capacity, cap: int) -> dict[str, object]:
    """Return what heartbeats say to the fleet. Members of an older version obey `cap` too."""
    limit = capacity.limit
    if limit is None:
        return {}
    return {
        "capacity": limit,
        "capacity_problem": capacity.problem[:200],
        # A cap of 0 is no limit: who can serve nothing is passed over like one that leaves.
        **({"cap": min(limit, cap or limit)} if limit else {"leaving": True}),
    }


def _stuck(now: float, partitions: Iterable[PartitionState]) -> list[PartitionState]:
    """Return what the system refuses a process, once that has lasted for one of them.

    All at once: else the rebalancer would take one that runs for each that is still to go.
    """
    refused = [
        each
        for each in partitions
        if each.refused_since and each.phase is Phase.HELD and each.child is None
    ]
    lasting = any(now - each.refused_since >= GIVE_UP_SECONDS for each in refused)
    return refused if lasting else []
