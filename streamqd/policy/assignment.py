"""Decide which member of a fleet should own each assignment.

This module is responsible only for fairness. The fence prevents two members from working on the
same assignment, whatever this module decides.

The result has these properties. If two conflict, the earlier one takes precedence:

1. An assignment goes to a member that offers its (topic, group) and has room within its cap. If
   there is none, it goes to no member.
2. The total numbers of assignments are balanced. If all members offer the same, each one gets its
   share by weight, rounded down, or one more. If offers differ, no chain of moves would improve the
   balance.
3. Assignments stay where they are, unless the balance of the total numbers requires a move.
4. Assignments that are free or must move are placed so that each (topic, group) is spread evenly
   too.

The result depends only on the arguments and not on their order. It is also stable: if `assign` is
called again with the result as owners, it moves nothing. As a consequence, no assignment moves only
in order to spread a (topic, group) more evenly.

To be fast, the algorithm first computes only the number of assignments per member and (topic,
group). It deals out the assignments themselves at the end, because there are many more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from streamqd.model import Assignment
from streamqd.policy import balancing
from streamqd.policy.balancing import Part

Pair = tuple[str, str]  # (topic, group)


@dataclass(frozen=True, slots=True)
class Member:
    """A live instance that can own assignments.

    `weight` is at least 1. `cap` is the maximum number of assignments, or 0 for no limit. `offers`
    contains the (topic, group) pairs that the member can consume. `owned_elsewhere` is the number
    of assignments that it owns in addition to those that `assign` distributes. They do not move,
    but count toward the member's load and its cap.
    """

    id: str
    weight: int
    cap: int
    offers: frozenset[Pair]
    owned_elsewhere: int = 0


def assign(
    members: Sequence[Member], assignments: Iterable[Assignment], owners: Mapping[Assignment, str]
) -> dict[Assignment, str]:
    """Return the member that should own each assignment.

    The result omits each assignment for which no member that offers it has spare capacity. `owners`
    maps assignments to their current owners. An assignment whose owner is not in `members` counts
    as free.
    """
    by_pair: dict[Pair, list[Assignment]] = defaultdict(list)
    for assignment in assignments:
        by_pair[assignment.topic, assignment.group].append(assignment)
    wanted: dict[Assignment, str] = {}
    for some, pairs in _parts(members, by_pair.keys()):
        wanted |= _assign_part(some, {pair: sorted(by_pair[pair]) for pair in pairs}, owners)
    return wanted


def _assign_part(
    members: Sequence[Member],
    by_pair: Mapping[Pair, list[Assignment]],
    owners: Mapping[Assignment, str],
) -> dict[Assignment, str]:
    """Do the work of `assign` for one part, whose members are sorted by name."""
    rows = {member.id: row for row, member in enumerate(members)}
    columns = {
        offers: [column for column, pair in enumerate(by_pair) if pair in offers]
        for offers in {member.offers for member in members}
    }
    kept: list[dict[int, list[Assignment]]] = []  # owned assignments by column and row
    free: list[list[Assignment]] = []  # assignments without an owner by column
    counts = [[0] * len(by_pair) for _ in members]
    for column, (pair, assignments) in enumerate(by_pair.items()):
        offering = {member.id for member in members if pair in member.offers}
        by_row: dict[int, list[Assignment]] = defaultdict(list)
        loose: list[Assignment] = []
        for assignment, owner in zip(assignments, map(owners.get, assignments), strict=True):
            (by_row[rows[owner]] if owner in offering else loose).append(assignment)
        for row, held in by_row.items():
            counts[row][column] = len(held)
        kept.append(by_row)
        free.append(loose)
    part = Part(
        weights=[max(1, member.weight) for member in members],
        caps=[member.cap if member.cap > 0 else None for member in members],
        offers=[columns[member.offers] for member in members],
        held=counts,
        free=list(map(len, free)),
        fixed=[member.owned_elsewhere for member in members],
    )
    wants = zip(*balancing.balance(part), strict=True)  # the balanced counts by column
    wanted: dict[Assignment, str] = {}
    for by_row, want, loose in zip(kept, wants, free, strict=True):
        for row, dealt in _deal(by_row, want, loose):
            wanted |= dict.fromkeys(dealt, members[row].id)
    return wanted


def _parts(
    members: Sequence[Member], pairs: Collection[Pair]
) -> Iterator[tuple[list[Member], list[Pair]]]:
    """Divide the members into parts that have no offers in common.

    Yield the members of each part, sorted by name, and the sorted (topic, group)s that they offer.
    """
    by_offers: dict[frozenset[Pair], list[Member]] = defaultdict(list)
    for member in members:
        by_offers[member.offers].append(member)
    parts: list[tuple[frozenset[Pair], list[Member]]] = []
    for offers, some in by_offers.items():
        offered = offers.intersection(pairs)
        if not offered:
            continue
        touched = [part for part in parts if not offered.isdisjoint(part[0])]
        parts = [part for part in parts if offered.isdisjoint(part[0])]
        joined = offered.union(*(found for found, _ in touched))
        parts.append((joined, list(chain(some, *(reached for _, reached in touched)))))
    for found, reached in parts:
        yield sorted(reached, key=lambda member: member.id), sorted(found)


def _deal(
    held: Mapping[int, list[Assignment]], want: Sequence[int], free: Sequence[Assignment]
) -> Iterator[tuple[int, list[Assignment]]]:
    """Deal out the assignments of one (topic, group). Yield each row with its assignments.

    A row stands for a member. `want` lists the number of assignments for each row, and `held` the
    assignments that a row has now, most of which it keeps. If it has too many, it gives up those
    with the highest partition numbers. The free assignments are dealt out in order, so the first
    row that lacks some gets the lowest ones.
    """
    loose = list(free)
    for row, assignments in held.items():
        loose += assignments[want[row] :]
    next_loose = iter(sorted(loose))
    for row, count in enumerate(want):
        if count:
            own = held.get(row, [])[:count]
            yield row, own + list(islice(next_loose, count - len(own)))
