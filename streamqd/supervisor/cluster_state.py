"""What the supervisor knows of the fleet, and how it asks who owns the units that are not ours.

It uses as few commands as possible.

A token is made for one owner and one epoch, and is in the fence before it is in a lease:
`lease_acquire`, `lease_refence` and `lease_renew` see to that. So while a lease carries the token
that was read with a fence, the fence says what it said, and only the lease is read. A lease that is
gone, or carries another token, has the fence read again, and so has one whose owner may be dead:
there the remaining lease time matters too. None of it decides anything by itself: to take a unit is
to compare epochs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd import logs
from streamqd.errors import BadValue, RedisUnavailable, StreamqdError
from streamqd.isolate import Isolate, directly
from streamqd.model import Unit
from streamqd.policy.rebalance import MemberView, PartitionView
from streamqd.store import leases, topics
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView

LOOK_SECONDS = 2.0  # between two looks at the entries of the topics

# Runs equally many commands for each of the units, in order; what a node does not answer is an
# error in its place.
Ask = Callable[[Sequence[Unit], list[tuple[Any, ...]]], list[Any]]


@dataclass(frozen=True)
class ClusterState:
    """One look at the fleet: who lives, and who owns the partitions that are not ours."""

    live: Sequence[MemberView] = ()
    views: Mapping[Unit, PartitionView] = field(default_factory=dict)
    # Of the fences whose owner is proven dead: of this instance before, or of an expired lease.
    dead_tokens: Mapping[Unit, str] = field(default_factory=dict)


class OwnershipCache:
    """The last look at each unit that somebody held then."""

    def __init__(self, keys: Keys, isolate: Isolate[Unit] = directly) -> None:
        self._keys = keys
        self._isolate = isolate
        self._held: dict[Unit, LeaseView] = {}
        self.bad: list[BadValue] = []  # of the last look: the units are missing in what it returned

    def take(self, units: Sequence[Unit], live: Collection[str], ask: Ask) -> dict[Unit, LeaseView]:
        """Return what is to be seen of the units.

        Those of a node that is silent are missing, and those whose fence cannot be read.

        `live` are the owners that are known to live: of a unit that one of them holds as before the
        `ttl` is that of an earlier look. Raises what `ask` raises.
        """
        held = {unit: view for unit, view in self._held.items() if view.owner in live}
        found: dict[Unit, LeaseView] = {}
        silent: set[Unit] = set()
        glance = {unit: self._isolate(unit, leases.glance, self._keys, unit) for unit in held}
        known = [unit for unit in units if glance.get(unit)]
        glances = ask(known, [command for unit in known if (command := glance[unit])])
        for unit, token in zip(known, glances, strict=True):
            if isinstance(token, RedisUnavailable):
                silent.add(unit)
            elif token == held[unit].token.encode():
                found[unit] = held[unit]
        self.bad = []
        left = [unit for unit in units if unit not in found and unit not in silent]
        views = {unit: self._isolate(unit, leases.view, self._keys, unit) for unit in left}
        rest = [unit for unit in left if views[unit]]
        replies = ask(rest, [each for unit in rest for each in views[unit] or ()])
        for unit, fence, ttl in zip(rest, replies[::2], replies[1::2], strict=True):
            if not (isinstance(fence, StreamqdError) or isinstance(ttl, StreamqdError)):
                view = self._isolate(unit, self._read, unit, fence, ttl)
                if view is not None:
                    found[unit] = view
        self._held = {
            unit: view for unit, view in found.items() if view.token and view.ttl is not None
        }
        return found

    def _read(self, unit: Unit, fence: Any, ttl: Any) -> LeaseView | None:
        try:
            return LeaseView.parse(fence, ttl, self._keys.fence(*unit))
        except BadValue as error:
            self.bad.append(error)
            return None


class TopicPresence:
    """Whether the topics that are consumed are still registered, asked with each look at the fleet.

    An operator may delete a topic's entry while everything else stays: senders are refused then,
    and no fence is missing that would tell. Or a count that could not be read when this instance
    began can be read now.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._looked_at = -LOOK_SECONDS
        self._lost = logs.Once("topic.lost", logging.WARNING)
        self._bad = logs.bad_values()

    def look(
        self,
        names: Sequence[str],
        served: Collection[str],
        ask: Callable[[list[tuple[Any, ...]]], list[Any]],
    ) -> bool:
        """Return whether a topic should be registered again. Raises what `ask` raises.

        Asks every two seconds at most. Of `served` this instance knows the partitions.
        """
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        lost: list[str] = []
        found: list[str] = []
        bad: list[BadValue] = []
        replies = ask([topics.presence(self._keys, name) for name in names])
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, StreamqdError):
                continue  # of a node that is silent, or of another type: registering names it
            try:
                count = topics.present(self._keys, name, reply)
            except BadValue as error:
                bad.append(error)
                continue
            if count is None:
                lost.append(name)
            elif name not in served and count:
                found.append(name)
        self._lost.look({name: {"topic": name} for name in lost})
        self._bad.values(bad)
        return bool(lost or found)
