"""Decide which partitions this instance acquires or hands over now. Called with each heartbeat.

`assignment` computes the owner of each partition. This module limits the moves: an owned partition
moves only after the reason has lasted for a delay, and only a few move at a time. It provides
fairness, and the fence provides safety. `silence` decides which members are alive. No I/O.
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

# Without these limits, the first instance of a fleet would acquire all units, and then hand over
# most of them.
ACQUIRES_AT_ONCE = 16  # free units acquired in one step
ACQUIRES_PER_SECOND = 64.0  # further free units per second
MORE_SECONDS = ACQUIRES_AT_ONCE / ACQUIRES_PER_SECOND  # time until the next step


class MemberView(NamedTuple):
    """A member as the server reported it. The last three fields are None if it omits them."""

    member: Member
    heartbeat_unix_ms: int
    leaving: bool
    #: Units whose worker currently crashes in a loop on this member.
    broken: frozenset[Unit] = frozenset()
    #: Time of the last reload directive that it followed (unix ms).
    reloaded: int | None = None
    #: The number of units that it owned at its last heartbeat.
    owned: int | None = None
    #: The TTL of its leases, in seconds.
    ttl: float | None = None


class PartitionView(NamedTuple):
    """A unit that this instance does not own, as Redis reports it."""

    epoch: int
    owner: str  # '' when no instance holds the fence
    leased: bool
    remaining: float = 0.0  # seconds until the lease expires


class Constraints(NamedTuple):
    """The operators' constraints: the owners of moved units, and the members that own nothing.

    `moves` maps a unit to its instance and to the time of the directive. No instance may own a
    partition of a (topic, group) in `stopped`.
    """

    moves: Mapping[Unit, tuple[str, int]] = MappingProxyType({})
    drained: Collection[str] = ()
    stopped: Collection[tuple[str, str]] = ()

    def stops(self, unit: Unit) -> bool:
        """Return True if no instance may own the unit."""
        return (unit.topic, unit.group) in self.stopped


class Decision(NamedTuple):
    """Units to acquire and units to hand over, each in a stable order.

    `more` is True if further units may follow, as long as the next `decide` confirms them.
    """

    acquire: list[Unit]
    shed: list[Unit]
    more: bool = False


@dataclass
class Rebalancer:
    """Turns the assignment into gradual moves. One per supervisor."""

    me: str
    delay: float
    hold: float
    moves_max: int
    grace_seconds: float  # seconds for which a free unit is left to its future owner
    _wanted_elsewhere: dict[Unit, float] = field(default_factory=dict)
    _free_since: dict[Unit, tuple[int, float]] = field(default_factory=dict)
    _moves_seen: dict[Unit, int] = field(default_factory=dict)
    _directed: set[Unit] = field(default_factory=set)  # units to hand over for a new move directive
    # Units to hand over without `delay` and `hold`.
    _without_delay: set[Unit] = field(default_factory=set)
    _skip_delay: bool = False
    _asked: tuple[object, ...] = ()  # input of the last assignment
    _wanted: Mapping[Unit, str] = field(default_factory=dict)
    _allowance: float = ACQUIRES_AT_ONCE
    _allowed_at: float = 0.0

    def skip_delay_once(self) -> None:
        """Skip `delay` and `hold` once, for the units that the next `decide` finds misplaced."""
        self._skip_delay = True

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
        """Decide once per heartbeat.

        `mine` maps the units of this instance to the time when it acquired them. `moving` counts
        the units that it is already handing over. `views` holds all other units. `room` is how many
        more units it may own.
        """
        if self.me in constraints.drained:
            # Immediately and regardless of shares, as if this instance were leaving.
            return Decision([], sorted(mine))
        owners = {unit: view.owner for unit, view in views.items() if view.owner}
        owners |= dict.fromkeys(mine, self.me)
        present = [
            one for one in live if not one.leaving and one.member.id not in constraints.drained
        ]
        present = with_elsewhere(present, units, owners)
        stopped: list[Unit] = []
        if constraints.stopped:
            # A stopped group is not placed, and uses no member's share.
            stopped = sorted(unit for unit in mine if constraints.stops(unit))
            units = [unit for unit in units if not constraints.stops(unit)]
            mine = {unit: since for unit, since in mine.items() if not constraints.stops(unit)}
            views = {unit: view for unit, view in views.items() if not constraints.stops(unit)}
        wanted = self._place(present, units, owners, constraints)
        self._directed |= {
            u for u, (_, at) in constraints.moves.items() if self._moves_seen.get(u) != at
        }
        self._moves_seen = {unit: at for unit, (_, at) in constraints.moves.items()}
        over = len(stopped) + room  # released units of stopped groups make room
        surplus = sorted(mine, key=lambda unit: (mine[unit], unit))[over:] if over < 0 else []
        take = self._acquire(now, wanted, views, live)[: max(0, room)]
        allowed = self._count_allowed(now, len(take))
        return Decision(
            take[:allowed],
            [
                *stopped,
                *surplus,
                *(u for u in self._hand_over(now, wanted, mine, moving) if u not in surplus),
            ],
            more=len(take) > allowed,
        )

    def _place(
        self,
        present: Sequence[MemberView],
        units: Collection[Unit],
        owners: Mapping[Unit, str],
        constraints: Constraints,
    ) -> Mapping[Unit, str]:
        """Return the result of `place`, the previous one if the input is the same."""
        moves = {unit: to for unit, (to, _) in constraints.moves.items()}
        asked = ([(one.member, one.broken) for one in present], list(units), owners, moves)
        if self._asked != asked:
            self._asked, self._wanted = asked, place(present, units, owners, moves)
        return self._wanted

    def _count_allowed(self, now: float, wanted: int) -> int:
        """Return the number of `wanted` units that may be acquired now."""
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
            # A live owner most likely renews its expired lease soon. But an owner that was
            # restarted with other consumers or a smaller cap never will.
            renewing = (unit.topic, unit.group) in others.get(view.owner, ())
            mine = wanted.get(unit) == self.me or alone
            overdue = now - since >= self.grace_seconds and unit in wanted
            if overdue or (mine and not renewing):
                take.append(unit)
        self._free_since = free_since
        return take

    def _hand_over(
        self, now: float, wanted: Mapping[Unit, str], mine: Mapping[Unit, float], moving: int
    ) -> list[Unit]:
        elsewhere = {
            unit: self._wanted_elsewhere.get(unit, now)
            for unit in mine
            if wanted.get(unit, self.me) != self.me
        }
        self._wanted_elsewhere = elsewhere
        if self._skip_delay:
            self._skip_delay, self._without_delay = False, set(elsewhere)
        # A move that was not possible immediately is placed like any other from now on.
        self._directed &= elsewhere.keys()
        self._without_delay &= elsewhere.keys()
        ready = [
            unit
            for unit, since in sorted(elsewhere.items())
            if unit not in self._directed
            and (
                unit in self._without_delay
                or (now - since >= self.delay and now - mine[unit] >= self.hold)
            )
        ]
        return [*sorted(self._directed), *ready[: max(0, self.moves_max - moving)]]


def with_elsewhere(
    members: Sequence[MemberView], units: Collection[Unit], owners: Mapping[Unit, str]
) -> list[MemberView]:
    """Add to each member the number of units that it owns beyond `units`, if it reports that.

    Otherwise an instance that sees only its own units would consider a busy member idle.
    """
    pairs = frozenset(map(attrgetter("topic", "group"), units))
    counts = Counter(owners.values())
    return [
        one
        if one.owned is None or one.member.offers <= pairs
        else one._replace(member=_count_elsewhere(one.member, one.owned - counts[one.member.id]))
        for one in members
    ]


def _count_elsewhere(member: Member, elsewhere: int) -> Member:
    # `replace` is slow, and this is done for every member at every check.
    return Member(member.id, member.weight, member.cap, member.offers, max(0, elsewhere))


_NOWHERE: frozenset[str] = frozenset()


def place(
    members: Sequence[MemberView],
    units: Collection[Unit],
    owners: Mapping[Unit, str],
    moves: Mapping[Unit, str] = MappingProxyType({}),
) -> dict[Unit, str]:
    """Assign units to members, but no unit to a member on which it is broken.

    `moves` maps units to the members that an operator chose. Such a member gets its unit if it can
    have it, within its cap. The others are balanced as if these units did not exist.
    """
    wanted = _apply_moves(members, units, moves)
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


def _apply_moves(
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
    """Return True if it is this instance's turn for a reload directive to the whole fleet.

    Instances reload one after the other, by name. Members that are leaving, or that do not report
    their reloads, do not delay the others.
    """
    return all(
        one.leaving or one.reloaded is None or one.reloaded >= directive_unix_ms
        for one in live
        if one.member.id < me
    )
