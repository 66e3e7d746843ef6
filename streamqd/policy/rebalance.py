"""Decide which partitions this instance acquires or hands over after each heartbeat.

`assignment` computes which member should own each partition, and `silence` decides which members
are alive. This module turns the result into gradual moves. An owned partition moves only after the
reason for the move has existed for some time, and only a few partitions move at a time. This module
is responsible only for fairness. Even if it makes a mistake, the fence prevents two instances from
working on the same partition. It does no I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from streamqd.model import Assignment
from streamqd.policy.assignment import Member, assign

# Without these limits, the first instance of a fleet would acquire all assignments, and then have
# to hand over most of them.
ACQUIRES_AT_ONCE = 16  # maximum number of free assignments that are acquired in one step
ACQUIRES_PER_SECOND = 64.0  # number of free assignments that may be acquired per second
MORE_SECONDS = ACQUIRES_AT_ONCE / ACQUIRES_PER_SECOND  # time until the next step is allowed


class MemberView(NamedTuple):
    """A member of the fleet, according to its last heartbeat.

    `reloaded`, `owned` and `ttl` are None if the member does not report them.
    """

    member: Member
    heartbeat_unix_ms: int
    leaving: bool
    #: Assignments whose workers are currently crashing in a loop on this member.
    broken: frozenset[Assignment] = frozenset()
    #: Time of the last reload directive that the member has carried out (unix ms).
    reloaded: int | None = None
    #: Number of assignments that the member owned at its last heartbeat.
    owned: int | None = None
    #: TTL of the member's leases in seconds.
    ttl: float | None = None


class PartitionView(NamedTuple):
    """An assignment that this instance does not own, as Redis reports it."""

    epoch: int
    owner: str  # '' if the fence names no owner
    leased: bool
    remaining: float = 0.0  # seconds until the lease expires


class Constraints(NamedTuple):
    """The directives of operators that restrict which instance may own an assignment.

    `moves` maps an assignment to the instance that must own it and to the time of the directive.
    Instances in `drained` must not own any assignment. No instance may own a partition of a (topic,
    group) in `stopped`.
    """

    moves: Mapping[Assignment, tuple[str, int]] = MappingProxyType({})
    drained: Collection[str] = ()
    stopped: Collection[tuple[str, str]] = ()

    def stops(self, assignment: Assignment) -> bool:
        """Return True if no instance may own the assignment."""
        return (assignment.topic, assignment.group) in self.stopped


class Decision(NamedTuple):
    """The assignments to acquire and those to hand over (`shed`), each in a stable order.

    `has_more` is True if this instance should acquire further assignments, but ACQUIRES_AT_ONCE and
    ACQUIRES_PER_SECOND do not allow it yet. The next call of `decide` checks these again.
    """

    acquire: list[Assignment]
    shed: list[Assignment]
    has_more: bool = False


@dataclass
class Rebalancer:
    """Turns the result of `assignment` into gradual moves. Each supervisor has one rebalancer.

    This instance hands over an assignment only after another member should have owned it for
    `delay` seconds, and after it has owned the assignment itself for `hold` seconds. No more than
    `moves_max` assignments move at a time.
    """

    instance: str
    delay: float
    hold: float
    moves_max: int
    grace_seconds: float  # how long a free assignment is left to the member that should own it
    _wanted_elsewhere: dict[Assignment, float] = field(default_factory=dict)
    _free_since: dict[Assignment, tuple[int, float]] = field(default_factory=dict)
    _moves_seen: dict[Assignment, int] = field(default_factory=dict)
    _directed: set[Assignment] = field(
        default_factory=set
    )  # assignments to hand over for a new move directive
    # Assignments that are handed over without waiting for `delay` and `hold`.
    _without_delay: set[Assignment] = field(default_factory=set)
    _skip_delay: bool = False
    _asked: tuple[object, ...] = ()  # arguments of the last call of `place`
    _wanted: Mapping[Assignment, str] = field(default_factory=dict)
    _allowance: float = ACQUIRES_AT_ONCE
    _allowed_at: float = 0.0

    def skip_delay_once(self) -> None:
        """Make the next call of `decide` ignore `delay` and `hold`.

        Assignments that another member should own at that time are handed over without waiting.
        """
        self._skip_delay = True

    def decide(
        self,
        now: float,
        live: Sequence[MemberView],
        assignments: Collection[Assignment],
        owned_since: Mapping[Assignment, float],
        moving: int,
        views: Mapping[Assignment, PartitionView],
        *,
        room: int,
        constraints: Constraints = Constraints(),  # noqa: B008 - it never changes
    ) -> Decision:
        """Return the assignments to acquire and to hand over. Call this once per heartbeat.

        `owned_since` maps the assignments of this instance to the times at which it acquired them.
        `views` contains all other assignments. `moving` is the number of assignments that the
        instance is already handing over, and `room` the number of assignments that it may own in
        addition to its present ones. A negative `room` means that it must hand some over.
        """
        if self.instance in constraints.drained:
            # Hand over everything immediately, as if this instance were leaving.
            return Decision([], sorted(owned_since))
        owners = {assignment: view.owner for assignment, view in views.items() if view.owner}
        owners |= dict.fromkeys(owned_since, self.instance)
        present = [
            one for one in live if not one.leaving and one.member.id not in constraints.drained
        ]
        present = count_owned_elsewhere(present, assignments, owners)
        stopped: list[Assignment] = []
        if constraints.stopped:
            # Leave out stopped groups, so that they do not count toward the share of any member.
            stopped = sorted(
                assignment for assignment in owned_since if constraints.stops(assignment)
            )
            assignments = [
                assignment for assignment in assignments if not constraints.stops(assignment)
            ]
            owned_since = {
                assignment: since
                for assignment, since in owned_since.items()
                if not constraints.stops(assignment)
            }
            views = {
                assignment: view
                for assignment, view in views.items()
                if not constraints.stops(assignment)
            }
        wanted = self._place(present, assignments, owners, constraints)
        self._directed |= {
            u for u, (_, at) in constraints.moves.items() if self._moves_seen.get(u) != at
        }
        self._moves_seen = {assignment: at for assignment, (_, at) in constraints.moves.items()}
        over = len(stopped) + room  # handing over the assignments of stopped groups makes room
        surplus = (
            sorted(owned_since, key=lambda assignment: (owned_since[assignment], assignment))[over:]
            if over < 0
            else []
        )
        take = self._acquire(now, wanted, views, live)[: max(0, room)]
        allowed = self._count_allowed(now, len(take))
        return Decision(
            take[:allowed],
            [
                *stopped,
                *surplus,
                *(u for u in self._hand_over(now, wanted, owned_since, moving) if u not in surplus),
            ],
            has_more=len(take) > allowed,
        )

    def _place(
        self,
        present: Sequence[MemberView],
        assignments: Collection[Assignment],
        owners: Mapping[Assignment, str],
        constraints: Constraints,
    ) -> Mapping[Assignment, str]:
        """Return the result of `place`, and compute it only if the arguments have changed."""
        moves = {assignment: to for assignment, (to, _) in constraints.moves.items()}
        asked = ([(one.member, one.broken) for one in present], list(assignments), owners, moves)
        if self._asked != asked:
            self._asked, self._wanted = asked, place(present, assignments, owners, moves)
        return self._wanted

    def _count_allowed(self, now: float, wanted: int) -> int:
        """Return how many of the `wanted` assignments may be acquired now, within the limits."""
        earned = (now - self._allowed_at) * ACQUIRES_PER_SECOND
        self._allowance = min(ACQUIRES_AT_ONCE, self._allowance + earned)
        self._allowed_at = now
        allowed = min(wanted, int(self._allowance))
        self._allowance -= allowed
        return allowed

    def _acquire(
        self,
        now: float,
        wanted: Mapping[Assignment, str],
        views: Mapping[Assignment, PartitionView],
        live: Sequence[MemberView],
    ) -> list[Assignment]:
        alone = all(one.member.id == self.instance for one in live)
        others = {
            one.member.id: one.member.offers for one in live if one.member.id != self.instance
        }
        free_since: dict[Assignment, tuple[int, float]] = {}
        take = []
        for assignment in sorted(
            assignment for assignment, view in views.items() if not view.leased
        ):
            view = views[assignment]
            epoch, since = self._free_since.get(assignment, (view.epoch, now))
            if epoch != view.epoch:
                since = now
            free_since[assignment] = (view.epoch, since)
            # If the owner is alive, it will probably renew its expired lease soon. However, an
            # owner that was restarted with other consumers or a smaller cap never will.
            renewing = (assignment.topic, assignment.group) in others.get(view.owner, ())
            owned_since = wanted.get(assignment) == self.instance or alone
            overdue = now - since >= self.grace_seconds and assignment in wanted
            if overdue or (owned_since and not renewing):
                take.append(assignment)
        self._free_since = free_since
        return take

    def _hand_over(
        self,
        now: float,
        wanted: Mapping[Assignment, str],
        owned_since: Mapping[Assignment, float],
        moving: int,
    ) -> list[Assignment]:
        elsewhere = {
            assignment: self._wanted_elsewhere.get(assignment, now)
            for assignment in owned_since
            if wanted.get(assignment, self.instance) != self.instance
        }
        self._wanted_elsewhere = elsewhere
        if self._skip_delay:
            self._skip_delay, self._without_delay = False, set(elsewhere)
        # If a directed move is not possible now, because its target cannot own the assignment,
        # forget the move and treat the assignment like any other.
        self._directed &= elsewhere.keys()
        self._without_delay &= elsewhere.keys()
        ready = [
            assignment
            for assignment, since in sorted(elsewhere.items())
            if assignment not in self._directed
            and (
                assignment in self._without_delay
                or (now - since >= self.delay and now - owned_since[assignment] >= self.hold)
            )
        ]
        return [*sorted(self._directed), *ready[: max(0, self.moves_max - moving)]]


def count_owned_elsewhere(
    members: Sequence[MemberView],
    assignments: Collection[Assignment],
    owners: Mapping[Assignment, str],
) -> list[MemberView]:
    """Set for each member the number of assignments that it owns in addition to `assignments`.

    An instance sees only the assignments of its own consumers. Without this number, it would take a
    member that is busy with other assignments for an idle one. Members that do not report how many
    assignments they own are not changed.
    """
    pairs = frozenset(map(attrgetter("topic", "group"), assignments))
    counts = Counter(owners.values())
    return [
        one
        if one.owned is None or one.member.offers <= pairs
        else one._replace(
            member=_with_owned_elsewhere(one.member, one.owned - counts[one.member.id])
        )
        for one in members
    ]


def _with_owned_elsewhere(member: Member, owned_elsewhere: int) -> Member:
    # `dataclasses.replace` is slow, and this runs for every member at every check.
    return Member(member.id, member.weight, member.cap, member.offers, max(0, owned_elsewhere))


_NOWHERE: frozenset[str] = frozenset()


def place(
    members: Sequence[MemberView],
    assignments: Collection[Assignment],
    owners: Mapping[Assignment, str],
    moves: Mapping[Assignment, str] = MappingProxyType({}),
) -> dict[Assignment, str]:
    """Return the member that should own each assignment.

    A member gets no assignment that is broken on it. `moves` maps assignments to the members that
    an operator chose. Such a member gets the assignment if it offers it and has room within its
    cap. All other assignments are balanced as if the moved ones did not exist.
    """
    wanted = _apply_moves(members, assignments, moves)
    chosen = Counter(wanted.values())
    able = [
        one._replace(member=replace(one.member, cap=one.member.cap - chosen[one.member.id]))
        if one.member.cap
        else one
        for one in members
        if not one.member.cap or one.member.cap > chosen[one.member.id]
    ]
    broken_at: dict[Assignment, set[str]] = {}
    for one in able:
        for assignment in one.broken:
            broken_at.setdefault(assignment, set()).add(one.member.id)
    fit_for: dict[frozenset[str], list[Assignment]] = defaultdict(list)
    for assignment in assignments:
        if assignment not in wanted:
            where = frozenset(broken_at[assignment]) if assignment in broken_at else _NOWHERE
            fit_for[where].append(assignment)
    for where, some in fit_for.items():
        fit = [one.member for one in able if one.member.id not in where]
        wanted |= assign(fit, some, owners)
    return wanted


def _apply_moves(
    members: Sequence[MemberView],
    assignments: Collection[Assignment],
    moves: Mapping[Assignment, str],
) -> dict[Assignment, str]:
    by_id = {one.member.id: one for one in members}
    chosen: Counter[str] = Counter()
    wanted: dict[Assignment, str] = {}
    for assignment in sorted(moves.keys() & set(assignments)):
        one = by_id.get(moves[assignment])
        if one is None or assignment in one.broken:
            continue
        member = one.member
        if (assignment.topic, assignment.group) not in member.offers:
            continue
        if not member.cap or chosen[member.id] < member.cap:
            wanted[assignment] = member.id
            chosen[member.id] += 1
    return wanted


def may_reload(instance: str, directive_unix_ms: int, live: Sequence[MemberView]) -> bool:
    """Return True if it is this instance's turn to carry out a reload of the whole fleet.

    Instances reload one after the other, in the order of their names. They do not wait for members
    that are leaving, or that do not report their reloads.
    """
    return all(
        one.leaving or one.reloaded is None or one.reloaded >= directive_unix_ms
        for one in live
        if one.member.id < instance
    )
