"""Limit the partitions of this instance while the operating system refuses processes.

A partition that cannot get a process is released. The heartbeat reports the limit, so other
instances acquire such partitions. When processes can be started again, the heartbeat no longer
reports it, and the instance gets its share back. `policy.capacity.Capacity` keeps the state.
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
    """Record a lasting `refusal`. From then on, the limit is the number of running partitions."""
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
    """Release the partitions that could not be started for `GIVE_UP_SECONDS`."""
    return [ReleaseLease(each.assignment, "unstartable") for each in _stuck(now, partitions)]


def announcement(capacity: Capacity, cap: int) -> dict[str, object]:
    """Return the heartbeat fields for the limit. Members of an older version use only `cap`."""
    limit = capacity.limit
    if limit is None:
        return {}
    return {
        "capacity": limit,
        "capacity_problem": capacity.problem[:200],
        # A cap of 0 means no limit, so an instance without any capacity reports `leaving`.
        **({"cap": min(limit, cap or limit)} if limit else {"leaving": True}),
    }


def _stuck(now: float, partitions: Iterable[AssignmentState]) -> list[AssignmentState]:
    """Return all partitions without a process, once one has waited long enough.

    They are released together. Otherwise, the rebalancer would move a running partition for each of
    the others.
    """
    refused = [
        each
        for each in partitions
        if each.refused_since and each.phase is Phase.HELD and each.child is None
    ]
    lasting = any(now - each.refused_since >= GIVE_UP_SECONDS for each in refused)
    return refused if lasting else []
