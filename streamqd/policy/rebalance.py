"""Which partitions this instance should take or hand over now. Pure state, fed with heartbeats.

The assignment says where each partition belongs; this adds what makes moving gentle: owned
partitions move only after the reason has lasted a while, and only a few at a time. Fairness lives
here; safety lives in the fence. `silence` says who lives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from streamqd.model import Unit
from streamqd.policy.assignment import Member, assign

# Free units that one instance takes at once, and per second after that. When a fleet starts, the
# first to look would else take everything, and hand nearly all of it over again.
ACQUIRES_AT_ONCE = 16
ACQUIRES_PER_SECOND = 64.0
MORE_SECONDS = ACQUIRES_AT_ONCE / ACQUIRES_PER_SECOND  # until the next look, when there are more


class MemberView(NamedTuple):
    """A member as the server reported it: its last beat, whether it is leaving, what fails there.

    `broken` are units whose worker crashes in a loop on that member, for now. `reloaded` is the
    time of the last directive to reload that it has followed, `owned` how many units it owned then,
    and `ttl` for how many seconds it takes its leases; None when it does not tell.
    """

    member: Member
    beat_unix_ms: int
    leaving: bool
    broken: frozenset[Unit] = frozenset()
    reloaded: int | None = None
    owned: int | None = None
    ttl: float | None = None


class PartitionView(NamedTuple):
    """What Redis says of a unit that is not ours."""

    epoch: int
    owner: str  # '' when nobody holds the fence
    leased: bool
    remaining: float = 0.0  # seconds of the lease


class Constraints(NamedTuple):
    """What operators want: where units belong, and which members shall own nothing.

    `moves` maps a unit to its instance and to the time of the directive. `stopped` are the (topic,
    group)s of which nobody shall own a partition.
    """

    moves: Mapping[Unit, tuple[str, int]] = MappingProxyType({})
    drained: Collection[str] = ()
    stopped: Collection[tuple[str, str]] = ()

    def stops(self, unit: Unit) -> bool:
        """Whether nobody shall own the unit."""
        return (unit.topic, unit.group) in self.stopped


class Decision(NamedTuple):
    """Units to acquire and units to hand over, each in a stable order.

    `more` tells that there are more to acquire, if the next look still says so.
    """

    acquire: list[Unit]
    shed: list[Unit]
    more: bool = False


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
    _moves_seen: dict[Unit, int] = field(default_factory=dict)
    _directed: set[Unit] = field(default_factory=set)  # to be handed over because of a new move
    _hurried: set[Unit] = field(default_factory=set)  # to be handed over without delay and hold
    _hurry: bool = False
    _asked: tuple[object, ...] = ()  # what the last assignment was made of, and the answer
    _wanted: Mapping[Unit, str] = field(default_factory=dict)
    _allowance: float = ACQUIRES_AT_ONCE
    _allowed_at: float = 0.0

    def hurry(self) -> None:
        """Let what the next look finds in the wrong place move without delay and hold, once."""
        self._hurry = True

    def decide(
        self,
        now: float,
        live: Sequence[MemberView],
        units: Collection[Unit],
        mine: Mapping[Unit, float],
        moving: int,
        views: Mapping[Unit, PartitionView],
        *,
        room: int,
        constraints: Constraints = Constraints(),  # noqa: B008 - it never changes
    ) -> Decision:
        """Decide once per beat.

        `mine` maps the units that this instance owns to when it got them, `moving` counts those
        that it is handing over already, `views` holds the others, `room` is how many more units
        it may own.
        """
        if self.me in constraints.drained:
            # At once and without anybody's share in mind, as if this instance were leaving.
            return Decision([], sorted(mine))
        owners = {unit: view.owner for unit, view in views.items() if view.owner}
        owners |= dict.fromkeys(mine, self.me)
        present = [
            one for one in live if not one.leaving and one.member.id not in constraints.drained
        ]
        present = with_elsewhere(present, units, owners)
        stopped: list[Unit] = []
        if constraints.stopped:
            # A stopped group is placed nowhere and takes up nobody's share.
            stopped = sorted(unit for unit in mine if constraints.stops(unit))
            units = [unit for unit in units if not constraints.stops(unit)]
            mine = {unit: since for unit, since in mine.items() if not constraints.stops(unit)}
            views = {unit: view for unit, view in views.items() if not constraints.stops(unit)}
        wanted = self._placed(present, units, owners, constraints)
        self._directed |= {
            u for u, (_, at) in constraints.moves.items() if self._moves_seen.get(u) != at
        }
        self._moves_seen = {unit: at for unit, (_, at) in constraints.moves.items()}
        over = len(stopped) + room  # what is given up with its group makes room
        surplus = sorted(mine, key=lambda unit: (mine[unit], unit))[over:] if over < 0 else []
        take = self._acquire(now, wanted, views, live)[: max(0, room)]
        allowed = self._allowed(now, len(take))
        return Decision(
            take[:allowed],
            [
                *stopped,
                *surplus,
                *(u for u in self._shed(now, wanted, mine, moving) if u not in surplus),
            ],
            more=len(take) > allowed,
        )

    def _placed(
        self,
        present: Sequence[MemberView],
        units: Collection[Unit],
        owners: Mapping[Unit, str],
        constraints: Constraints,
    ) -> Mapping[Unit, str]:
        """`place`, which is not asked again what it has just answered: at rest nothing changes."""
        moves = {unit: to for unit, (to, _) in constraints.moves.items()}
        asked = ([(one.member, one.broken) for one in present], list(units), owners, moves)
        if self._asked != asked:
            self._asked, self._wanted = asked, place(present, units, owners, moves)
        return self._wanted

    def _allowed(self, now: float, wanted: int) -> int:
        """How many of the wanted units may be acquired now."""
        earned = (now - self._allowed_at) * ACQUIRES_PER_SECOND
        self._allowance = min(ACQUIRES_AT_ONCE, self._allowance + earned)
        self._allowed_at = now
        allowed = min(wanted, int(self._allowance))
        self._allowance -= allowed
        return allowed

    def _acquire(
        self,
        now: float,
        wanted: Mapping[Unit, str],
        views: Mapping[Unit, PartitionView],
        live: Sequence[MemberView],
    ) -> list[Unit]:
        alone = all(one.member.id == self.me for one in live)
        others = {one.member.id: one.member.offers for one in live if one.member.id != self.me}
        free_since: dict[Unit, tuple[int, float]] = {}
        take = []
        for unit in sorted(unit for unit, view in views.items() if not view.leased):
            view = views[unit]
            epoch, since = self._free_since.get(unit, (view.epoch, now))
            if epoch != view.epoch:
                since = now
            free_since[unit] = (view.epoch, since)
            # The expired lease of a live owner is most likely about to be renewed late; but an
            # owner that was started again with other consumers or a smaller cap never will.
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
        if self._hurry:
            self._hurry, self._hurried = False, set(elsewhere)
        # What could not be obeyed at once is placed like everything else from now on.
        self._directed &= elsewhere.keys()
        self._hurried &= elsewhere.keys()
        ready = [
            unit
            for unit, since in sorted(elsewhere.items())
            if unit not in self._directed
            and (
                unit in self._hurried
                or (now - since >= self.delay and now - mine[unit] >= self.hold)
            )
        ]
        return [*sorted(self._directed), *ready[: max(0, self.moves_max - moving)]]


def with_elsewhere(
    members: Sequence[MemberView], units: Collection[Unit], owners: Mapping[Unit, str]
) -> list[MemberView]:
    """Say of the members what they own beyond `units`, as far as they have told it.

    Whoever looks at its own units alone would take a member for idle that works for others.
    """
    pairs = frozenset(map(attrgetter("topic", "group"), units))
    counts = Counter(owners.values())
    return [
        one
        if one.owned is None or one.member.offers <= pairs
        else one._replace(member=_owning(one.member, one.owned - counts[one.member.id]))
        for one in members
    ]


def _owning(member: Member, elsewhere: int) -> Member:
    # `replace` is slow, and this is done for every member at every look.
    return Member(member.id, member.weight, member.cap, member.offers, max(0, elsewhere))


_NOWHERE: frozenset[str] = frozenset()


def place(
    members: Sequence[MemberView],
    units: Collection[Unit],
    owners: Mapping[Unit, str],
    moves: Mapping[Unit, str] = MappingProxyType({}),
) -> dict[Unit, str]:
    """Assign units to members, none to a member on which it is broken.

    `moves` maps units to the members that an operator chose. Where such a member can have its unit,
    it gets it, within its cap; the others are levelled as if these units were not there.
    """
    wanted = _as_directed(members, units, moves)
    chosen = Counter(wanted.values())
    able = [
        one._replace(member=replace(one.member, cap=one.member.cap - chosen[one.member.id]))
        if one.member.cap
        else one
        for one in members
        if not one.member.cap or one.member.cap > chosen[one.member.id]
    ]
    broken_at: dict[Unit, set[str]] = {}
    for one in able:
        for unit in one.broken:
            broken_at.setdefault(unit, set()).add(one.member.id)
    fit_for: dict[frozenset[str], list[Unit]] = defaultdict(list)
    for unit in units:
        if unit not in wanted:
            where = frozenset(broken_at[unit]) if unit in broken_at else _NOWHERE
            fit_for[where].append(unit)
    for where, some in fit_for.items():
        fit = [one.member for one in able if one.member.id not in where]
        wanted |= assign(fit, some, owners)
    return wanted


def _as_directed(
    members: Sequence[MemberView], units: Collection[Unit], moves: Mapping[Unit, str]
) -> dict[Unit, str]:
    by_id = {one.member.id: one for one in members}
    chosen: Counter[str] = Counter()
    wanted: dict[Unit, str] = {}
    for unit in sorted(moves.keys() & set(units)):
        one = by_id.get(moves[unit])
        if one is None or unit in one.broken:
            continue
        member = one.member
        if (unit.topic, unit.group) not in member.offers:
            continue
        if not member.cap or chosen[member.id] < member.cap:
            wanted[unit] = member.id
            chosen[member.id] += 1
    return wanted


def may_reload(me: str, directive_unix_ms: int, live: Sequence[MemberView]) -> bool:
    """Whether it is this instance's turn, by a directive to reload that all have got.

    One after the other, by name. Members that leave or do not tell are not waited for.
    """
    return all(
        one.leaving or one.reloaded is None or one.reloaded >= directive_unix_ms
        for one in live
        if one.member.id < me
    )
