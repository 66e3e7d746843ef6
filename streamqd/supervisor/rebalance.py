"""Compute actions from a new view of the fleet: acquire missing partitions, shed surplus ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streamqd.isolate import Isolate, directly
from streamqd.model import Unit
from streamqd.policy.rebalance import Constraints, Rebalancer
from streamqd.supervisor.cluster_state import ClusterState
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.plan import Acquire, Action, ReleaseLease, StopWorker


def decide(
    rebalancer: Rebalancer,
    now: float,
    view: ClusterState,
    partitions: Mapping[Unit, AssignmentState],
    wanted: Collection[Unit],
    *,
    blocked: Collection[Unit],
    room: int,
    constraints: Constraints,
    isolate: Isolate[Unit] = directly,
) -> tuple[list[Action], bool]:
    """Return the moves for a new view of the fleet, and True if another check should follow soon.

    `wanted` are the units of all current consumers. Those in `blocked` have a process that cannot
    be killed. `room` is the number of further partitions that may be owned. After a reload has
    lowered the cap, it can be negative, and some partitions are shed.
    """
    mine = {u: each.since for u, each in partitions.items() if each.phase is not Phase.FREE}
    moving = sum(1 for unit in mine if partitions[unit].stop_reason == "shed")
    views = {
        unit: seen
        for unit, seen in view.views.items()
        if partitions[unit].phase is Phase.FREE
        and partitions[unit].child is None
        and unit not in blocked
        and now >= partitions[unit].broken_until
    }
    decision = rebalancer.decide(
        now, view.live, wanted, mine, moving, views, room=room, constraints=constraints
    )
    actions: list[Action] = [
        Acquire(unit, views[unit].epoch, view.dead_tokens.get(unit, ""))
        for unit in decision.acquire
    ]
    for unit in decision.shed:
        actions += isolate(unit, shed, partitions[unit]) or ()
    return actions, decision.more


def count_unowned(
    view: ClusterState,
    partitions: Mapping[Unit, AssignmentState],
    wanted: Collection[Unit],
    constraints: Constraints,
) -> int:
    """Return the number of wanted units that no instance owns, without those of stopped groups."""
    return sum(
        1
        for unit in wanted
        if partitions[unit].phase is Phase.FREE
        and (seen := view.views.get(unit)) is not None
        and not seen.leased
        and (unit.topic, unit.group) not in constraints.stopped
    )


def shed(partition: AssignmentState) -> list[Action]:
    """Return the actions that hand over a partition, none if a handover is in progress."""
    if partition.phase in (Phase.FREE, Phase.RELEASING):
        return []
    if partition.releasable:
        return [ReleaseLease(partition.unit, "shed")]
    if partition.child is None or partition.stop_reason in ("shed", "drain"):
        return []
    return [StopWorker(partition.unit, "shed")]
