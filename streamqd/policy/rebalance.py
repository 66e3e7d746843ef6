"""Which partitions this instance should take or hand over now. Pure state, fed with beats.

The assignment says where each partition belongs; this adds what makes moving gentle: members are
not declared dead by age alone, owned partitions move only after the reason has lasted a while, and
only a few at a time. Fairness lives here; safety lives in the fence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamqd.model import Unit
from streamqd.policy.assignment import Member, assign

# A member must be silent over this many beats of our own before its silence means anything: after
# a pause of Redis every member looks old to the first one that is back.
SILENT_BEATS = 2


class Seen(NamedTuple):
    """A member as the server reported it: its last beat, whether it is leaving, what fails there.

    `broken` are units whose worker crashes in a loop on that member, for now.
    """

    member: Member
    beat_unix_ms: int
    leaving: bool
    broken: frozenset[Unit] = frozenset()


class View(NamedTuple):
    """What Redis says of a unit that is not ours."""

    epoch: int
    owner: str  # '' when nobody holds the fence
    leased: bool


class Decision(NamedTuple):
    """Units to acquire and units to hand over, each in a stable order."""

    acquire: list[Unit]
    shed: list[Unit]


@dataclass
class Liveness:
    """Tells the living from the dead by the beats they leave in Redis."""

    me: str
    ttl: float
    beat_interval: float
    _last_counted: float = float("-inf")
    _silent: dict[str, tuple[int, int]] = field(default_factory=dict)

    def observe(self, now: float, server_unix_ms: int, seen: Sequence[Seen]) -> list[Seen]:
        """Return the live members. `now` is any monotonic clock, in seconds.

        A member is dead when its beat is older than the ttl and has not moved while this instance
        beat at least `SILENT_BEATS` times.
        """
        # A wake-up beat right after another proves nothing about the silence of others.
        counts = now - self._last_counted >= self.beat_interval / 2
        if counts:
            self._last_counted = now
        live = []
        silent: dict[str, tuple[int, int]] = {}
        for one in seen:
            name = one.member.id
            beat, count = self._silent.get(name, (-1, 0))
            count = count + counts if beat == one.beat_unix_ms else 0
            silent[name] = (one.beat_unix_ms, count)
            old = server_unix_ms - one.beat_unix_ms > self.ttl * 1000
            if name == self.me or not (old and count >= SILENT_BEATS):
                live.append(one)
        self._silent = silent
        return live


@dataclass
class Rebalancer:
    """Damps the assignment into moves. One per supervisor."""

    me: str
    delay: float
    hold: float
    moves_max: int
    patience: float  # how long a free unit is left to the member that it belongs to
    _wanted_elsewhere: dict[Unit, float] = field(default_factory=dict)
    _free_since: dict[Unit, tuple[int, float]] = field(default_factory=dict)

    def decide(
        self,
        now: float,
        live: Sequence[Seen],
        units: Collection[Unit],
        mine: Mapping[Unit, float],
        moving: int,
        views: Mapping[Unit, View],
        *,
        room: int,
    ) -> Decision:
        """Decide once per beat.

        `mine` maps the units that this instance owns to when it got them, `moving` counts those
        that it is handing over already, `views` holds the others, `room` is how many more units
        it may own.
        """
        owners = {unit: view.owner for unit, view in views.items() if view.owner}
        owners |= dict.fromkeys(mine, self.me)
        wanted = place([one for one in live if not one.leaving], units, owners)
        surplus = sorted(mine, key=lambda unit: (mine[unit], unit))[room:] if room < 0 else []
        return Decision(
            self._acquire(now, wanted, views, live)[: max(0, room)],
            [*surplus, *(u for u in self._shed(now, wanted, mine, moving) if u not in surplus)],
        )

    def _acquire(
        self,
        now: float,
        wanted: Mapping[Unit, str],
        views: Mapping[Unit, View],
        live: Sequence[Seen],
    ) -> list[Unit]:
        alone = all(one.member.id == self.me for one in live)
        others = {one.member.id: one.member.offers for one in live if one.member.id != self.me}
        free_since: dict[Unit, tuple[int, float]] = {}
        take = []
        for unit, view in sorted(views.items()):
            if view.leased:
                continue
            epoch, since = self._free_since.get(unit, (view.epoch, now))
            if epoch != view.epoch:
                since = now
            free_since[unit] = (view.epoch, since)
            # The expired lease of a live owner is most likely about to be renewed late; but an
            # owner that was started anew with other consumers or a smaller cap never will.
            renewing = (unit.topic, unit.group) in others.get(view.owner, ())
            mine = wanted.get(unit) == self.me or alone
            overdue = now - since >= self.patience and unit in wanted
            if overdue or (mine and not renewing):
                take.append(unit)
        self._free_since = free_since
        return take

    def _shed(
        self, now: float, wanted: Mapping[Unit, str], mine: Mapping[Unit, float], moving: int
    ) -> list[Unit]:
        elsewhere = {
            unit: self._wanted_elsewhere.get(unit, now)
            for unit in mine
            if wanted.get(unit, self.me) != self.me
        }
        self._wanted_elsewhere = elsewhere
        ready = [
            unit
            for unit, since in sorted(elsewhere.items())
            if now - since >= self.delay and now - mine[unit] >= self.hold
        ]
        return ready[: max(0, self.moves_max - moving)]


def place(
    members: Sequence[Seen], units: Collection[Unit], owners: Mapping[Unit, str]
) -> dict[Unit, str]:
    """Assign units to members, none to a member on which it is broken."""
    broken_on: dict[frozenset[str], list[Unit]] = {}
    for unit in sorted(units):
        where = frozenset(one.member.id for one in members if unit in one.broken)
        broken_on.setdefault(where, []).append(unit)
    wanted: dict[Unit, str] = {}
    for where, some in broken_on.items():
        fit = [one.member for one in members if one.member.id not in where]
        wanted |= assign(fit, some, owners)
    return wanted
