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

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from streamqd.model import Unit
from streamqd.policy import leveling
from streamqd.policy.leveling import Part


@dataclass(frozen=True, slots=True)
class Member:
    """A live instance. `weight` is at least 1; `cap` 0 means no limit.

    `elsewhere` is how many units it owns that are not among those to be assigned: they count for
    its load and its cap, and do not move.
    """

    id: str
    weight: int
    cap: int
    offers: frozenset[tuple[str, str]]
    elsewhere: int = 0


def assign(
    members: Sequence[Member], units: Sequence[Unit], owners: Mapping[Unit, str]
) -> dict[Unit, str]:
    """The wanted owner of every unit that somebody offers and has room for.

    `owners` are the present ones; owners that are no members count as none.
    """
    by_id = {member.id: member for member in members}
    kept: dict[tuple[str, tuple[str, str]], list[Unit]] = defaultdict(list)
    free: dict[tuple[str, str], list[Unit]] = defaultdict(list)
    for unit in sorted(set(units)):
        pair = (unit.topic, unit.group)
        owner = by_id.get(owners.get(unit, ""))
        if owner is not None and pair in owner.offers:
            kept[owner.id, pair].append(unit)
        else:
            free[pair].append(unit)
    pairs = {pair for _, pair in kept} | set(free)
    wanted: dict[Unit, str] = {}
    for some_members, some_pairs in _parts(by_id, pairs):
        part = Part(
            weights=[max(1, member.weight) for member in some_members],
            caps=[member.cap if member.cap > 0 else None for member in some_members],
            offers=[
                [index for index, pair in enumerate(some_pairs) if pair in member.offers]
                for member in some_members
            ],
            held=[
                [len(kept.get((member.id, pair), ())) for pair in some_pairs]
                for member in some_members
            ],
            free=[len(free.get(pair, ())) for pair in some_pairs],
            fixed=[member.elsewhere for member in some_members],
        )
        counts = leveling.level(part)
        for column, pair in enumerate(some_pairs):
            held = [kept.get((member.id, pair), []) for member in some_members]
            want = [row[column] for row in counts]
            dealt = _deal(held, want, free.get(pair, []))
            for member, dealt_units in zip(some_members, dealt, strict=True):
                for unit in dealt_units:
                    wanted[unit] = member.id
    return wanted


def _parts(
    by_id: Mapping[str, Member], pairs: set[tuple[str, str]]
) -> Iterator[tuple[list[Member], list[tuple[str, str]]]]:
    """The members and (topic, group)s that are connected by offers, each part for itself."""
    offers = {member_id: by_id[member_id].offers & pairs for member_id in by_id}
    offerers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for member_id, offered in offers.items():
        for pair in offered:
            offerers[pair].append(member_id)
    seen: set[str] = set()
    for first in offers:
        if first in seen or not offers[first]:
            continue
        seen.add(first)
        reached, found, todo = [first], set[tuple[str, str]](), [first]
        while todo:
            for pair in offers[todo.pop()] - found:
                found.add(pair)
                fresh = [each for each in offerers[pair] if each not in seen]
                seen.update(fresh)
                reached += fresh
                todo += fresh
        yield [by_id[each] for each in sorted(reached)], sorted(found)


def _deal(held: list[list[Unit]], want: list[int], free: list[Unit]) -> list[list[Unit]]:
    """Units of one (topic, group) per member: as many as wanted, its own first.

    Members give up their highest partitions; the lowest loose one goes to the first that wants.
    """
    loose = list(free)
    for units, count in zip(held, want, strict=True):
        loose += units[count:]
    next_loose = iter(sorted(loose))
    return [
        units[:count] + list(itertools.islice(next_loose, max(0, count - len(units))))
        for units, count in zip(held, want, strict=True)
    ]
