"""Limit the partitions of this instance while the operating system refuses to start processes.

If no process can be started for a partition, the partition is released, and the heartbeat reports
how many partitions this instance can run. The other instances then acquire the rest. As soon as
enough processes can be started again, the heartbeat no longer reports a limit, and the instance
gets its share of the partitions back. `policy.capacity.Capacity` keeps the state.
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
    """Limit the capacity if a partition has waited too long for a process.

    The limit is the number of partitions whose workers are running now. `refusal` is the error with
    which the operating system last refused a process.
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
    """Return actions that release the partitions for which no process can be started."""
    return [ReleaseLease(each.assignment, "unstartable") for each in _stuck(now, partitions)]


def announcement(capacity: Capacity, cap: int) -> dict[str, object]:
    """Return the heartbeat fields that report the limit, or {} if there is none.

    `cap` is the setting `daemon.max_partitions`. The result also contains a field of that name,
    because instances with an older version know only `cap`.
    """
    limit = capacity.limit
    if limit is None:
        return {}
    return {
        "capacity": limit,
        "capacity_problem": capacity.problem[:200],
        # If this instance cannot run any partition, it reports `leaving`, because a cap of 0 would
        # mean that there is no limit.
        **({"cap": min(limit, cap or limit)} if limit else {"leaving": True}),
    }


def _stuck(now: float, partitions: Iterable[AssignmentState]) -> list[AssignmentState]:
    """Return all partitions that wait for a process, once one of them has waited `GIVE_UP_SECONDS`.

    They must all be released at the same time. If only the first one were released, the instance
    would still own more partitions than its limit. For each of them, the rebalancer would then move
    a running partition to another instance.
    """
    refused = [
        each
        for each in partitions
        if each.refused_since and each.phase is Phase.HELD and each.child is None
    ]
    lasting = any(now - each.refused_since >= GIVE_UP_SECONDS for each in refused)
    return refused if lasting else []
