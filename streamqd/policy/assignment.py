"""Which member should own which unit. Gives fairness only; the fence gives safety.

What holds of the answer, in this order:

1. A unit goes to a member that offers its (topic, group), within the member's cap, or to nobody.
2. Members are balanced in total. Where all offer the same, each has the whole part of its share by
   weight, or one more. Where offers differ, no chain of moves would make it more even.
3. Units stay where they are: only what balance in total needs is moved.
4. What has to move or is free is chosen so that each (topic, group) is spread evenly too.

The answer depends on the arguments only, not on their order, and is stable: assigned again with
itself as owners, nothing moves. So no unit is moved only to spread a (topic, group) better.

The work is done with counts per member and (topic, group), which are few; the units themselves,
which are many, are dealt out at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from streamqd.model import Unit
from streamqd.policy import leveling
from streamqd.policy.leveling import Part

Pair = tuple[str, str]  # (topic, group)


@dataclass(frozen=True, slots=True)
class Member:
    """A live instance. `weight` is at least 1; `cap` 0 means no limit.

    `elsewhere` is how many units it owns that are not among those to be assigned: they count for
    its load and its cap, and do not move.
    """

    id: str
    weight: int
    cap: int
    offers: frozenset[Pair]
    elsewhere: int = 0


def assign(
    members: Sequence[Member], units: Iterable[Unit], owners: Mapping[Unit, str]
) -> dict[Unit, str]:
    """The wanted owner of every unit that somebody offers and has room for.

    `owners` are the present ones; owners that are no members count as none.
    """
    by_pair: dict[Pair, list[Unit]] = defaultdict(list)
    for unit in units:
        by_pair[unit.topic, unit.group].append(unit)
    wanted: dict[Unit, str] = {}
    for some, pairs in _parts(members, by_pair.keys()):
        wanted |= _assign_part(some, {pair: sorted(by_pair[pair]) for pair in pairs}, owners)
    return wanted


def _assign_part(
    members: Sequence[Member], by_pair: Mapping[Pair, list[Unit]], owners: Mapping[Unit, str]
) -> dict[Unit, str]:
    """`assign` for members, in the order of their names, that offers connect with each other."""
    rows = {member.id: row for row, member in enumerate(members)}
    columns = {
        offers: [column for column, pair in enumerate(by_pair) if pair in offers]
        for offers in {member.offers for member in members}
    }
    kept: list[dict[int, list[Unit]]] = []  # by column, then by row
    free: list[list[Unit]] = []  # by column
    counts = [[0] * len(by_pair) for _ in members]
    for column, (pair, units) in enumerate(by_pair.items()):
        offering = {member.id for member in members if pair in member.offers}
        by_row: dict[int, list[Unit]] = defaultdict(list)
        loose: list[Unit] = []
        for unit, owner in zip(units, map(owners.get, units), strict=True):
            (by_row[rows[owner]] if owner in offering else loose).append(unit)
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
        fixed=[member.elsewhere for member in members],
    )
    wants = zip(*leveling.level(part), strict=True)  # by column, too
    wanted: dict[Unit, str] = {}
    for by_row, want, loose in zip(kept, wants, free, strict=True):
        for row, dealt in _deal(by_row, want, loose):
            wanted |= dict.fromkeys(dealt, members[row].id)
    return wanted


def _parts(
    members: Sequence[Member], pairs: Collection[Pair]
) -> Iterator[tuple[list[Member], list[Pair]]]:
    """The members and (topic, group)s that are connected by offers, each part for itself."""
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
    held: Mapping[int, list[Unit]], want: Sequence[int], free: Sequence[Unit]
) -> Iterator[tuple[int, list[Unit]]]:
    """Units of one (topic, group) for each row that wants some: as many as wanted, its own first.

    Members give up their highest partitions; the lowest loose one goes to the first that wants.
    """
    loose = list(free)
    for row, units in held.items():
        loose += units[want[row] :]
    next_loose = iter(sorted(loose))
    for row, count in enumerate(want):
        if count:
            own = held.get(row, [])[:count]
            yield row, own + list(islice(next_loose, count - len(own)))
