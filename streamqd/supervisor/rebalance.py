"""Decide which partitions to acquire or hand over after the state of the fleet was read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.policy.rebalance import Constraints, Rebalancer
from streamqd.supervisor.cluster_state import ClusterState
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.plan import Acquire, Action, ReleaseLease, StopWorker


def decide(
    rebalancer: Rebalancer,
    now: float,
    view: ClusterState,
    partitions: Mapping[Assignment, AssignmentState],
    wanted: Collection[Assignment],
    *,
    blocked: Collection[Assignment],
    room: int,
    constraints: Constraints,
    isolate: Isolate[Assignment] = run_directly,
) -> tuple[list[Action], bool]:
    """Return the actions for a new view of the fleet, and True if another check must follow soon.

    `wanted` contains the assignments of all current consumers. Assignments in `blocked` have a
    process that cannot be killed, so they are not acquired. `room` is the number of partitions that
    may still be acquired. It is negative if a reload has lowered `daemon.max_partitions`, and
    partitions are then handed over.
    """
    owned_since = {u: each.since for u, each in partitions.items() if each.phase is not Phase.FREE}
    moving = sum(1 for assignment in owned_since if partitions[assignment].stop_reason == "shed")
    views = {
        assignment: seen
        for assignment, seen in view.views.items()
        if partitions[assignment].phase is Phase.FREE
        and partitions[assignment].child is None
        and assignment not in blocked
        and now >= partitions[assignment].broken_until
    }
    decision = rebalancer.decide(
        now, view.live, wanted, owned_since, moving, views, room=room, constraints=constraints
    )
    actions: list[Action] = [
        Acquire(assignment, views[assignment].epoch, view.dead_tokens.get(assignment, ""))
        for assignment in decision.acquire
    ]
    for assignment in decision.shed:
        actions += isolate(assignment, shed, partitions[assignment]) or ()
    return actions, decision.has_more


def count_unowned(
    view: ClusterState,
    partitions: Mapping[Assignment, AssignmentState],
    wanted: Collection[Assignment],
    constraints: Constraints,
) -> int:
    """Return the number of wanted assignments that have no owner although they should have one.

    The assignments of groups that an operator has stopped do not count.
    """
    return sum(
        1
        for assignment in wanted
        if partitions[assignment].phase is Phase.FREE
        and (seen := view.views.get(assignment)) is not None
        and not seen.leased
        and (assignment.topic, assignment.group) not in constraints.stopped
    )


def shed(partition: AssignmentState) -> list[Action]:
    """Return the actions that hand over a partition, or none if it is already being handed over."""
    if partition.phase in (Phase.FREE, Phase.RELEASING):
        return []
    if partition.releasable:
        return [ReleaseLease(partition.assignment, "shed")]
    if partition.child is None or partition.stop_reason in ("shed", "drain"):
        return []
    return [StopWorker(partition.assignment, "shed")]
