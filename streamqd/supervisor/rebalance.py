"""Acting on a fresh view of the fleet: acquire what is ours, hand over what is not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from streamqd.config.schema import Daemon
from streamqd.model import Unit
from streamqd.policy.rebalance import Rebalancer, Wishes
from streamqd.supervisor.cluster_state import ClusterState
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.plan import Acquire, Action, ReleaseLease, StopWorker


class Moves(NamedTuple):
    """What to take and to hand over; `more`: another look should follow soon."""

    actions: list[Action]
    more: bool = False


class Rebalance:
    """Decides once for each view of the fleet."""

    def __init__(self, daemon: Daemon, interval: float) -> None:
        self._rebalancer = Rebalancer(
            daemon.instance,
            daemon.rebalance_delay,
            daemon.rebalance_hold,
            daemon.rebalance_moves,
            patience=2 * interval,
        )
        self._ticked = 0.0

    def configure(self, daemon: Daemon) -> None:
        """Use the damping of a reloaded configuration."""
        self._rebalancer.delay = daemon.rebalance_delay
        self._rebalancer.hold = daemon.rebalance_hold
        self._rebalancer.moves_max = daemon.rebalance_moves

    def hurry(self) -> None:
        """Move what is in the wrong place at the next view without delay and hold, once."""
        self._rebalancer.hurry()

    def rest_is_over(self, now: float, partitions: Mapping[Unit, OwnedPartition]) -> bool:
        """Whether a partition that crashed in a loop may be tried again since the last tick."""
        since, self._ticked = self._ticked, now
        return any(since < each.broken_until <= now for each in partitions.values())

    def decide(
        self,
        now: float,
        view: ClusterState,
        partitions: Mapping[Unit, OwnedPartition],
        wanted: Collection[Unit],
        *,
        blocked: Collection[Unit],
        room: int,
        wishes: Wishes,
    ) -> Moves:
        """Return what should move.

        `wanted` are the units of all present consumers; of those in `blocked` a process lives that
        cannot be killed. `room` is how many more partitions may be owned. It is negative when a
        reload has lowered the cap: then some are handed over.
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
        decision = self._rebalancer.decide(
            now, view.live, wanted, mine, moving, views, room=room, wishes=wishes
        )
        actions: list[Action] = [
            Acquire(unit, views[unit].epoch, view.dead_tokens.get(unit, ""))
            for unit in decision.acquire
        ]
        for unit in decision.shed:
            actions += hand_over(partitions[unit])
        return Moves(actions, decision.more)


def hand_over(partition: OwnedPartition) -> list[Action]:
    """Let another instance own a partition; nothing, if that is under way."""
    if partition.phase in (Phase.FREE, Phase.RELEASING):
        return []
    if partition.releasable:
        return [ReleaseLease(partition.unit, "shed")]
    if partition.child is None or partition.stop_reason in ("shed", "drain"):
        return []
    return [StopWorker(partition.unit, "shed")]
