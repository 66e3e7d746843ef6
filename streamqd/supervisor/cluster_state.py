"""What the supervisor knows of the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamqd.model import Unit
from streamqd.policy.rebalance import MemberView, PartitionView
from streamqd.store.directives import Directives


@dataclass
class ClusterState:
    """What the last beat and the views after it have shown."""

    seen: list[MemberView] = field(default_factory=list)
    server_unix_ms: int = 0
    views: dict[Unit, PartitionView] = field(default_factory=dict)
    tokens: dict[Unit, str] = field(default_factory=dict)  # of the fences, '' for none
    fresh: bool = False  # the views belong to the last beat and have not been acted on
    live: frozenset[str] = frozenset()  # ids of members that are certain to live
    silent: list[str] = field(default_factory=list)  # members that may be forgotten
    control: Directives | None = None  # what operators want; a new one when it has changed
