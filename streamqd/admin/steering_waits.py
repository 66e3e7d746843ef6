"""Who has not obeyed an order yet, as sentences for people; nothing when all have."""

from __future__ import annotations

from streamqd.admin import live, published, topics
from streamqd.admin.pages import ask
from streamqd.admin.steering import FleetSnapshot, look
from streamqd.admin.steering_moves import offered, owners_of, plan
from streamqd.idle_reason import WORDS
from streamqd.model import Unit
from streamqd.store.directives import Scope


def not_moved(fleet: FleetSnapshot, unit: Unit, to: str) -> list[str]:
    """Whether the unit has not arrived."""
    owner = owners_of(fleet, [unit]).get(unit, "")
    return [] if owner == to else [f"{unit} is owned by {owner or 'nobody'}"]


def not_drained(fleet: FleetSnapshot, instance: str) -> list[str]:
    """What a drained instance still owns."""
    owners = owners_of(fleet, offered(fleet, look(fleet)))
    return [f"{instance} owns {unit}" for unit, owner in owners.items() if owner == instance]


def not_levelled(fleet: FleetSnapshot) -> list[str]:
    """What is not where it should be."""
    return [
        f"{each.topic}/{each.partition}/{each.group} is owned by {each.owner or 'nobody'},"
        f" not by {each.to or 'nobody'}"
        for each in plan(fleet, look(fleet))
    ]


def not_stopped(fleet: FleetSnapshot, topic: str, group: str) -> list[str]:
    """Which partitions of a stopped group are still owned."""
    return [f"{owner} owns {unit}" for unit, owner in _owned(fleet, topic, group).items() if owner]


def not_started(fleet: FleetSnapshot, topic: str, group: str) -> list[str]:
    """Which partitions of a started group nobody owns yet."""
    owners = _owned(fleet, topic, group)
    return [f"nobody owns {unit}" for unit, owner in owners.items() if not owner]


def _owned(fleet: FleetSnapshot, topic: str, group: str) -> dict[Unit, str]:
    """The owner of every partition of a group, '' where there is none."""
    count = topics.partition_count(fleet.link, fleet.keys, topic)
    units = [Unit(topic, number, group) for number in range(count)]
    owners = owners_of(fleet, units)
    return {unit: owners.get(unit, "") for unit in units}


# States of a worker that has not stopped for a pause.
_UNPAUSED = ("ready", "booting", "quiet", *WORDS.values())


def not_paused(fleet: FleetSnapshot, scope: Scope, since_unix_ms: int) -> list[str]:
    """Whose workers still run, or have not told since the order that they do not."""
    return _not_in(fleet, scope, since_unix_ms, paused=True)


def not_resumed(fleet: FleetSnapshot, scope: Scope, since_unix_ms: int) -> list[str]:
    """Whose workers are still paused, or have not told since the order that they are not.

    What another pause covers is left out.
    """
    return _not_in(fleet, scope, since_unix_ms, paused=False)


def _not_in(fleet: FleetSnapshot, scope: Scope, since: int, *, paused: bool) -> list[str]:
    sight = look(fleet)
    units = [unit for unit in offered(fleet, sight) if scope.covers(unit)]
    if not paused:
        units = [unit for unit in units if sight.control.pause_of(unit) is None]
    owners = owners_of(fleet, units)
    told = summaries(fleet, sorted(set(owners.values())))
    waiting = []
    for unit, owner in owners.items():
        at, states = told[owner]
        state = states.get(unit, "")
        if at < since:
            waiting.append(f"{owner} has not reported on {unit} yet")
        elif state in (_UNPAUSED if paused else ("paused",)):
            doing = "has a message running" if paused else "is still paused"
            waiting.append(f"{unit} on {owner} {doing}")
    return waiting


def summaries(fleet: FleetSnapshot, instances: list[str]) -> dict[str, tuple[int, dict[Unit, str]]]:
    """When each instance last told of itself, by the server's clock, and its workers' states."""
    replies = ask(fleet.link, [("GET", fleet.keys.instance(fleet.name, one)) for one in instances])
    found = {}
    for name, raw in zip(instances, replies, strict=True):
        told = published.document(raw)
        at = published.whole(told.get("at_unix_ms"))
        states = {
            live.unit_key(unit): unit.state
            for unit in (live.unit_of(name, each) for each in live.tables(told.get("units")))
        }
        found[name] = (at or 0, states)
    return found


def not_reloaded(fleet: FleetSnapshot, instances: list[str], ordered_unix_ms: int) -> list[str]:
    """Which of the instances that still live have not done with a reload."""
    live = look(fleet).live
    return [
        f"{name} has not reloaded"
        for name in instances
        if name in live and (live[name].reloaded or 0) < ordered_unix_ms
    ]


def reload_problems(fleet: FleetSnapshot, instances: list[str]) -> dict[str, str]:
    """Why instances have refused their last reload."""
    infos = look(fleet).infos
    told = {name: str(infos.get(name, {}).get("reload_problem", "")) for name in instances}
    return {name: problem for name, problem in told.items() if problem}
