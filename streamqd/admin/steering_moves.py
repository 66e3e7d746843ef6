"""Orders about who owns what: a move, a rebalance, and the plan that a rebalance would follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from streamqd.admin.steering import FleetSnapshot, Sight, Steered, check_scope, living, look, write
from streamqd.admin.unreadable import BadValues, lease_views
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.policy.rebalance import place
from streamqd.store import directives
from streamqd.store import topics as registry
from streamqd.store.directives import Scope


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A unit that is to change hands; `owner` and `to` are '' for nobody."""

    topic: str
    partition: int
    group: str
    owner: str
    to: str


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """What a rebalance does: the moves that it begins, and the orders to move that it forgets.

    `waiting` are the units that had not arrived when the time to wait was over.
    """

    at_unix_ms: int | None
    dry_run: bool
    moves: list[PlannedMove]
    forgotten: list[str]
    waiting: list[str]


def move(fleet: FleetSnapshot, unit: Unit, to: str, why: str, *, dry_run: bool = False) -> Steered:
    """Let an instance own a unit until it is moved again or the fleet is rebalanced.

    Refused when the instance could not have it now.
    """
    check_scope(fleet, Scope(unit.topic, unit.partition, None))
    sight = look(fleet)
    seen = living(sight, to)
    if seen.leaving:
        raise Refused(f"the instance {to} is leaving")
    if to in sight.control.drains:
        raise Refused(f"the instance {to} is drained; `streamqd drain {to} --undo` ends that")
    if (unit.topic, unit.group) not in seen.member.offers:
        raise Refused(f"the instance {to} has no consumer for {unit.topic}/{unit.group}")
    if unit in seen.broken:
        raise Refused(f"the worker of {unit} crashes in a loop on {to}")
    if sight.control.stop_of(unit) is not None:
        raise Refused(
            f"the group {unit.group} of {unit.topic} is stopped;"
            f" `streamqd group start {unit.topic} {unit.group}` ends that"
        )
    owners = owners_of(fleet, offered(fleet, sight))
    owner = owners.get(unit, "")
    cap = seen.member.cap
    if cap and owner != to and Counter(owners.values())[to] >= cap:
        raise Refused(f"the instance {to} owns {cap} partitions, which is its max_partitions")
    name = f"move:{unit}"
    notes = [f"{to} owns it already, and will keep it"] if owner == to else []
    known = sight.control.moves.get(unit)
    changed = owner != to or known is None or known.to != to
    if dry_run:
        return Steered(name, None, changed, True, notes)
    at = write(fleet, name, why=why, to=to).at_unix_ms
    return Steered(name, at, changed, False, notes)


def rebalance(fleet: FleetSnapshot, why: str, *, dry_run: bool = False) -> Rebalanced:
    """Forget all moves that were ordered and level the fleet now, without waiting times."""
    sight = look(fleet)
    planned = plan(fleet, sight)
    forgotten = [f"move:{unit}" for unit in sorted(sight.control.moves)]
    if dry_run:
        return Rebalanced(None, True, planned, forgotten, [])
    done = write(fleet, directives.REBALANCE, why=why, remove=forgotten)
    return Rebalanced(done.at_unix_ms, False, planned, forgotten, [])


def plan(fleet: FleetSnapshot, sight: Sight) -> list[PlannedMove]:
    """The units that would change hands if the fleet were levelled now, without ordered moves."""
    units = [unit for unit in offered(fleet, sight) if sight.control.stop_of(unit) is None]
    owners = owners_of(fleet, units)
    wanted = place(sight.placeable(), units, owners)
    return [
        PlannedMove(*unit, owners.get(unit, ""), wanted.get(unit, ""))
        for unit in units
        if owners.get(unit, "") != wanted.get(unit, "")
    ]


def offered(fleet: FleetSnapshot, sight: Sight) -> list[Unit]:
    """Every unit that a living member offers."""
    pairs = {pair for seen in sight.live.values() for pair in seen.member.offers}
    counts = {
        topic: registry.partition_count(fleet.link, fleet.keys, topic) or 0
        for topic in {topic for topic, _ in pairs}
    }
    return sorted(
        Unit(topic, number, group) for topic, group in pairs for number in range(counts[topic])
    )


def owners_of(fleet: FleetSnapshot, units: list[Unit]) -> dict[Unit, str]:
    """Who owns each of the units that somebody owns."""
    views = lease_views(fleet.link, fleet.keys, units, BadValues())
    return {unit: held.owner for unit, held in zip(units, views, strict=True) if held.token}
