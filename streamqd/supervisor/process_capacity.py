"""Limit the partitions of this instance while the operating system refuses to start processes.

If no process can be started for a partition, the partition is released. The heartbeat reports the
limit, so that other instances acquire such partitions. When enough processes can be started again,
the heartbeat no longer reports a limit, and the instance gets its share back.
`policy.capacity.Capacity` keeps the state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from streamqd import logs
from streamqd.policy.capacity import GIVE_UP_SECONDS, Capacity
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.plan import ReleaseLease


def observe(
    capacity: Capacity, now: float, partitions: Collection[AssignmentState], refusal: str
) -> None:
    """Limit the capacity if the operating system has refused a process for too long.

    The limit is then the number of partitions whose workers are running. `refusal` is the last
    error of the operating system.
    """
    stuck = _stuck(now, partitions)
    if stuck:
        running = sum(each.child is not None for each in partitions)
        before = capacity.limit
        capacity.record_refusal(now, running, refusal)
        if before != capacity.limit:
            logs.event(
                "capacity.reduced",
                logging.ERROR,
                partitions=capacity.limit,
                given_up=len(stuck),
                error=capacity.problem,
            )


def plan_actions(now: float, partitions: Iterable[AssignmentState]) -> list[ReleaseLease]:
    """Return actions that release the partitions for which processes have been refused too long."""
    return [ReleaseLease(each.assignment, "unstartable") for each in _stuck(now, partitions)]


def announcement(capacity: Capacity, cap: int) -> dict[str, object]:
    """Return the heartbeat fields for the limit. Older members of the fleet only use `cap`.

    `cap` is the setting `daemon.max_partitions`.
    """
    limit = capacity.limit
    if limit is None:
        return {}
    return {
        "capacity": limit,
        "capacity_problem": capacity.problem[:200],
        # A cap of 0 means that there is no limit, so an instance with no capacity at all reports
        # `leaving`.
        **({"cap": min(limit, cap or limit)} if limit else {"leaving": True}),
    }


def _stuck(now: float, partitions: Iterable[AssignmentState]) -> list[AssignmentState]:
    """Return all partitions without a process, once one of them has waited `GIVE_UP_SECONDS`.

    They are all released together. If only the first one were released, the rebalancer would move a
    running partition to another instance for each of those that still wait.
    """
    refused = [
        each
        for each in partitions
        if each.refused_since and each.phase is Phase.HELD and each.child is None
    ]
    lasting = any(now - each.refused_since >= GIVE_UP_SECONDS for each in refused)
    return refused if lasting else []
