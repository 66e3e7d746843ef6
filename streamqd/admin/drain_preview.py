"""What happens when an instance goes: who takes its partitions, which are left, how long it takes.

The same assignment that the fleet itself uses says it, so the answer is what will be done as long
as nobody else comes or goes meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamqd.admin import live, steering, steering_moves
from streamqd.admin.steering import FleetSnapshot
from streamqd.model import Unit
from streamqd.policy.rebalance import MemberView, place


@dataclass(frozen=True, slots=True)
class DepartingUnit:
    """One unit of the instance that goes.

    `to` is who takes it, '' when nobody can; `stranded` says why not: no-offer (nobody else has a
    consumer for it), broken (its worker crashes in a loop on all that have), caps-full, or ''.
    """

    topic: str
    partition: int
    group: str
    to: str
    stranded: str
    in_hand: int | None
    lag: int | None


@dataclass(frozen=True, slots=True)
class Departure:
    """The plan for one instance.

    `longest_run_seconds` is how long its longest running message has been running, `longest_run`
    that message's unit: a drain waits for it, up to the drain_timeout of that instance. Both are
    null and '' when no message runs, or it has published nothing.
    """

    instance: str
    last: bool
    units: list[DepartingUnit]
    longest_run_seconds: float | None
    longest_run: str

    @property
    def stranded(self) -> list[DepartingUnit]:
        """The units that nobody takes."""
        return [unit for unit in self.units if unit.stranded]


def look(fleet: FleetSnapshot, instance: str) -> Departure:
    """Plan the departure of an instance. Refused when it does not live."""
    sight = steering.look(fleet)
    steering.living(sight, instance)
    units = steering_moves.offered(fleet, sight)
    owners = steering_moves.owners_of(fleet, units)
    others = [one for one in sight.placeable() if one.member.id != instance]
    moves = {unit: order.to for unit, order in sight.control.moves.items()}
    takers = plan(instance, others, units, owners, moves)
    seen = live.look(fleet.link, fleet.keys, fleet.name, stale=fleet.stale)
    told = {live.unit_key(each): each for each in seen.units if each.owner == instance}
    busiest = max(told.values(), key=lambda each: each.longest_run_seconds or 0.0, default=None)
    run = busiest.longest_run_seconds if busiest else None
    return Departure(
        instance=instance,
        last=not others,
        units=[
            DepartingUnit(
                *unit,
                to=to,
                stranded=why,
                in_hand=told[unit].in_hand if unit in told else None,
                lag=told[unit].lag if unit in told else None,
            )
            for unit, (to, why) in takers.items()
        ],
        longest_run_seconds=run or None,
        longest_run=busiest.name if busiest and run else "",
    )


def plan(
    instance: str,
    others: Sequence[MemberView],
    units: Sequence[Unit],
    owners: Mapping[Unit, str],
    moves: Mapping[Unit, str],
) -> dict[Unit, tuple[str, str]]:
    """Who takes each unit of the instance, and why nobody does. Pure.

    `others` are the members that may own something, without the one that goes.
    """
    # An owner that is no member counts as none, so what the instance owns is placed anew.
    wanted = place(others, units, owners, moves)
    owned = Counter(wanted.values())
    found = {}
    for unit in sorted(unit for unit, owner in owners.items() if owner == instance):
        to = wanted.get(unit, "")
        found[unit] = (to, "" if to else _why_stranded(unit, others, owned))
    return found


def _why_stranded(unit: Unit, others: Sequence[MemberView], owned: Mapping[str, int]) -> str:
    offering = [one for one in others if (unit.topic, unit.group) in one.member.offers]
    if not offering:
        return "no-offer"
    fit = [one.member for one in offering if unit not in one.broken]
    if not fit:
        return "broken"
    return "caps-full" if all(0 < one.cap <= owned.get(one.id, 0) for one in fit) else "no-offer"
