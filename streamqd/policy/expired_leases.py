"""Leases that live on although nobody renews them: the clock by which they end was set back.

A lease is taken for seconds, but ends at an instant of the server's clock. When that is set back by
an hour, a lease lives for an hour longer, unless its owner renews it; one that died just then never
does. So here they end by our own clock: the owner is dead, and for two of its ttls, over many
looks, its lease has never had more to live than at the look before, and still has more than its
ttl. Who renews, though his beats do not arrive (their node of a cluster is cut off from him), has
leases that live for a ttl at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamqd.model import Unit
from streamqd.policy.rebalance import SILENT_BEATS, MemberView, PartitionView

# Who still renews is seen to do so sooner, although his lease may be a little shorter at each look.
LOOKS = 10
TTLS = 2.0


class _Unrenewed(NamedTuple):
    """A lease, over how many looks it was not renewed, and since when (our clock, seconds)."""

    epoch: int
    left: float
    looks: int
    since: float

    def is_over(self, now: float, ttl: float) -> bool:
        """Whether it has stayed for so long, and is to stay for longer than it was taken for."""
        return self.looks >= LOOKS and now - self.since > TTLS * ttl and self.left > ttl


@dataclass
class ExpiredLeases:
    """Watches the leases of dead members. `interval`: seconds between two looks, about."""

    interval: float
    _watched: dict[Unit, _Unrenewed] = field(default_factory=dict)
    _counted: float = float("-inf")

    def observe(
        self,
        now: float,
        views: Mapping[Unit, PartitionView],
        seen: Sequence[MemberView],
        live: Sequence[MemberView],
    ) -> frozenset[Unit]:
        """Return the units whose leases count as expired. `now` is any monotonic clock, in seconds.

        Members that do not tell their ttl are waited for.
        """
        counts = now - self._counted >= self.interval / 2
        if now - self._counted > SILENT_BEATS * self.interval:
            # Whoever has not looked for a while has not seen who renewed.
            self._watched = {}
        if counts:
            self._counted = now
        alive = {one.member.id for one in live}
        ttls = {one.member.id: one.ttl for one in seen if one.ttl and one.member.id not in alive}
        watched = {}
        for unit, view in views.items():
            if not view.leased or view.owner not in ttls:
                continue
            known = self._watched.get(unit)
            if known is None or known.epoch != view.epoch or view.left > known.left:
                known = _Unrenewed(view.epoch, view.left, 0, now)
            else:
                known = known._replace(left=view.left, looks=known.looks + counts)
            watched[unit] = known
        self._watched = watched
        return frozenset(
            unit for unit, it in watched.items() if it.is_over(now, ttls[views[unit].owner])
        )
