"""What the supervisor knows of the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamqd.model import Unit
from streamqd.policy.rebalance import MemberView, PartitionView


@dataclass(frozen=True)
class ClusterState:
    """One look at the fleet: who lives, and who owns the partitions that are not ours."""

    live: Sequence[MemberView] = ()
    views: Mapping[Unit, PartitionView] = field(default_factory=dict)
    # Of the fences whose owner is proven dead: of this instance before, or of an expired lease.
    dead_tokens: Mapping[Unit, str] = field(default_factory=dict)
