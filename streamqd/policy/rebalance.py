"""Which partitions this instance should take or hand over now. Pure state, fed with beats.

The assignment says where each partition belongs; this adds what makes moving gentle: members are
not declared dead by age alone, owned partitions move only after the reason has lasted a while, and
only a few at a time. Fairness lives here; safety lives in the fence.
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

# A member must be silent over this many beats of our own before its silence means anything: after
# a pause of Redis every member looks old to the first one that is back.
SILENT_BEATS = 2
# Whose silence has lasted so long may be forgotten, at most this many with one beat.
FORGET_BEATS, FORGET_MAX = 10, 100

# Free units that one instance takes at once, and per second after that. When a fleet starts, the
# first to look would else take everything, and hand nearly all of it over again.
ACQUIRES_AT_ONCE = 16
ACQUIRES_PER_SECOND = 64.0
MORE_SECONDS = ACQUIRES_AT_ONCE / ACQUIRES_PER_SECOND  # until the next look, when there are more


class MemberView(NamedTuple):
    """A member as the server reported it: its last beat, whether it is leaving, what fails there.

    `broken` are units whose worker crashes in a loop on that member, for now. `reloaded` is the
    time of the last order to reload that it has done with, `owned` how many units it owned then,
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
    left: float = 0.0  # seconds that the lease has still to live


class Wishes(NamedTuple):
    """What operators want: where units belong, and which members shall own nothing.

    `moves` maps a unit to its instance and to the time of the order. `stopped` are the (topic,
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


class _Silence(NamedTuple):
    """A beat, over how many of our own it has not moved, and since when (our clock, seconds)."""

    beat_unix_ms: int
    beats: int
    since: float


@dataclass
class Liveness:
    """Tells the living from the dead by the beats they leave in Redis."""

    me: str
    ttl: float
    beat_interval: float
    _last_counted: float = float("-inf")
    _silent: dict[str, _Silence] = field(default_factory=dict)

    def observe(
        self, now: float, server_unix_ms: int, seen: Sequence[MemberView]
    ) -> list[MemberView]:
        """Return the live members. `now` is any monotonic clock, in seconds.

        A member is dead when its beat has not moved while this instance beat at least
        `SILENT_BEATS` times, and is older than the ttl: by the server's clock, or by ours, for a
        clock that was set back would have it live for as long.
        """
        # A wake-up beat right after another proves nothing about the silence of others.
        counts = now - self._last_counted >= self.beat_interval / 2
        # What was counted before this instance itself heard nothing for a while proves nothing.
        if now - self._last_counted > SILENT_BEATS * self.beat_interval:
            self._silent = {name: _Silence(it[0], 0, now) for name, it in self._silent.items()}
        if counts:
            self._last_counted = now
        live = []
        silent: dict[str, _Silence] = {}
        for one in seen:
            name = one.member.id
            known = self._silent.get(name)
            if known is None or known.beat_unix_ms != one.beat_unix_ms:
                known = _Silence(one.beat_unix_ms, 0, now)
            else:
                known = _Silence(known.beat_unix_ms, known.beats + counts, known.since)
            silent[name] = known
            old = server_unix_ms - one.beat_unix_ms > self.ttl * 1000
            old = old or now - known.since > self.ttl
            if name == self.me or not (old and known.beats >= SILENT_BEATS):
                live.append(one)
        self._silent = silent
        return live

    @property
    def forgettable(self) -> list[str]:
        """Members that were silent for long while this instance watched, some of them."""
        found = (name for name, it in self._silent.items() if it.beats >= FORGET_BEATS)
        return [name for name in found if name != self.me][:FORGET_MAX]


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
    _ordered: set[Unit] = field(default_factory=set)  # to be handed over because of a new move
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
        wishes: Wishes = Wishes(),  # noqa: B008 - it never changes
    ) -> Decision:
        """Decide once per beat.

        `mine` maps the units that this instance owns to when it got them, `moving` counts those
        that it is handing over already, `views` holds the others, `room` is how many more units
        it may own.
        """
        if self.me in wishes.drained:
            # At once and without anybody's share in mind, as if this instance were leaving.
            return Decision([], sorted(mine))
        owners = {unit: view.owner for unit, view in views.items() if view.owner}
        owners |= dict.fromkeys(mine, self.me)
        present = [one for one in live if not one.leaving and one.member.id not in wishes.drained]
        present = with_elsewhere(present, units, owners)
        stopped: list[Unit] = []
        if wishes.stopped:
            # A stopped group is placed nowhere and takes up nobody's share.
            stopped = sorted(unit for unit in mine if wishes.stops(unit))
            units = [unit for unit in units if not wishes.stops(unit)]
            mine = {unit: since for unit, since in mine.items() if not wishes.stops(unit)}
            views = {unit: view for unit, view in views.items() if not wishes.stops(unit)}
        wanted = self._placed(present, units, owners, wishes)
        self._ordered |= {u for u, (_, at) in wishes.moves.items() if self._moves_seen.get(u) != at}
        self._moves_seen = {unit: at for unit, (_, at) in wishes.moves.items()}
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
        wishes: Wishes,
    ) -> Mapping[Unit, str]:
        """`place`, which is not asked again what it has just answered: at rest nothing changes."""
        moves = {unit: to for unit, (to, _) in wishes.moves.items()}
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
        self._ordered &= elsewhere.keys()
        self._hurried &= elsewhere.keys()
        ready = [
            unit
            for unit, since in sorted(elsewhere.items())
            if unit not in self._ordered
            and (
                unit in self._hurried
                or (now - since >= self.delay and now - mine[unit] >= self.hold)
            )
        ]
        return [*sorted(self._ordered), *ready[: max(0, self.moves_max - moving)]]


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
    wanted = _as_ordered(members, units, moves)
    chosen = Counter(wanted.values())
    left = [
        one._replace(member=replace(one.member, cap=one.member.cap - chosen[one.member.id]))
        if one.member.cap
        else one
        for one in members
        if not one.member.cap or one.member.cap > chosen[one.member.id]
    ]
    broken_at: dict[Unit, set[str]] = {}
    for one in left:
        for unit in one.broken:
            broken_at.setdefault(unit, set()).add(one.member.id)
    fit_for: dict[frozenset[str], list[Unit]] = defaultdict(list)
    for unit in units:
        if unit not in wanted:
            where = frozenset(broken_at[unit]) if unit in broken_at else _NOWHERE
            fit_for[where].append(unit)
    for where, some in fit_for.items():
        fit = [one.member for one in left if one.member.id not in where]
        wanted |= assign(fit, some, owners)
    return wanted


def _as_ordered(
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


def may_reload(me: str, ordered_unix_ms: int, live: Sequence[MemberView]) -> bool:
    """Whether it is this instance's turn, in an order to reload that all have got.

    One after the other, by name. Members that leave or do not tell are not waited for.
    """
    return all(
        one.leaving or one.reloaded is None or one.reloaded >= ordered_unix_ms
        for one in live
        if one.member.id < me
    )
