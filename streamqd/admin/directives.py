"""Write and remove directives, plan their effects, and report who has not applied them yet.

A directive is a field in Redis, which every instance reads and applies with its next heartbeat. A
command therefore contacts no instance directly. Whether it accepts a directive depends only on the
fleet's state in Redis. A directive stays until it is removed, even while no instance is running.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from streamqd.admin import assignments, audit, published, reloads, snapshot, topics
from streamqd.admin.published import Fleet, FleetState
from streamqd.admin.reading import Unreadable, ViewReader, lease_views
from streamqd.admin.reloads import PendingReload
from streamqd.errors import RequestRefusedError
from streamqd.idle_reason import WORDS
from streamqd.model import Assignment
from streamqd.policy.rebalance import MemberView, place
from streamqd.store import directives, members
from streamqd.store import topics as registry
from streamqd.store.directives import Directive, DirectiveChange, Scope
from streamqd.store.members import Heartbeat
from streamqd.words import plural, precise_duration

POLL_INTERVAL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class DirectiveRow:
    """One directive. `kind` is pause, stop, move, drain, reload, rebalance or stack.

    `target` is the scope, assignment or instance to which the directive applies, or '' for a
    rebalance. `to` is the new owner in a move, and otherwise ''. `instance_missing` is true if the
    instance of a drain, move or reload is not live. Instances apply reload, rebalance and stack
    directives only once, and `done` becomes true when every live instance has done so. To remove
    the directive, pass `name` to `control clear`.
    """

    name: str
    kind: str
    target: str
    to: str
    at_unix_ms: int
    by: str
    why: str
    instance_missing: bool
    done: bool


@dataclass(frozen=True, slots=True)
class ControlView:
    """All directives of a fleet.

    `unreadable_directives` maps each invalid directive to a description of its problem.
    `unreadable` lists other values of the fleet that cannot be read.
    """

    now_unix_ms: int
    directives: list[DirectiveRow]
    unreadable_directives: dict[str, str]
    unreadable: list[Unreadable]


@dataclass(frozen=True, slots=True)
class WrittenDirective:
    """The result of a command that writes or removes a directive.

    `directive` is the name of the directive. `at_unix_ms` is the time at which it was written, or
    null if nothing was written. `changed` is false if the fleet was already in the requested state.
    `notes` contains sentences with advice. If the command waits for the effect, `waiting` contains
    a sentence for each assignment or instance that had not applied the directive in time.
    """

    directive: str
    at_unix_ms: int | None
    changed: bool
    dry_run: bool
    notes: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)


def consuming_instances(fleet: Fleet, topic: str) -> list[str]:
    """Return the live instances that have a consumer for a topic."""
    live = published.fleet_state(fleet).live
    return sorted(name for name in live if any(t == topic for t, _ in live[name].member.offers))


def view(fleet: Fleet) -> ControlView:
    """Return all directives of a fleet as they are stored."""
    reader = ViewReader(fleet.store)
    state = published.fleet_state(fleet, reader)
    return ControlView(state.now_unix_ms, rows(state), state.control.unreadable, reader.rows)


def rows(state: FleetState) -> list[DirectiveRow]:
    """Return all directives in one list, sorted by kind.

    Pauses come first, followed by stops, drains, moves, reloads, stack directives and the
    rebalance.
    """
    found, live = state.control, state.live

    def row(
        kind: str, target: str, directive: Directive, *, gone: bool = False, done: bool = False
    ) -> DirectiveRow:
        name = f"{kind}:{target}" if target else kind
        return DirectiveRow(name, kind, target, directive.to, *directive[:3], gone, done)

    listed = [
        row("pause", str(scope), directive)
        for scope, directive in sorted(_name_scopes(found.pauses))
    ]
    listed += [
        row("stop", str(scope), directive) for scope, directive in sorted(_name_scopes(found.stops))
    ]
    listed += [
        row("drain", name, directive, gone=name not in live)
        for name, directive in sorted(found.drains.items())
    ]
    listed += [
        row("move", str(assignment), directive, gone=directive.to not in live)
        for assignment, directive in sorted(found.moves.items())
    ]
    listed += [
        row(
            "reload",
            name,
            directive,
            gone=name not in (directives.ALL_INSTANCES, *live),
            done=_is_reloaded(state, name, directive.at_unix_ms),
        )
        for name, directive in sorted(found.reloads.items())
    ]
    # Instances apply these directives as soon as a heartbeat reads them. A live instance whose
    # heartbeat is later than the directive has therefore applied it.
    immediate = [
        ("stack", str(assignment), directive)
        for assignment, directive in sorted(found.stacks.items())
    ]
    if found.rebalance is not None:
        immediate.append(("rebalance", "", found.rebalance))
    for kind, target, directive in immediate:
        reported = [seen.heartbeat_unix_ms > directive.at_unix_ms for seen in live.values()]
        listed.append(row(kind, target, directive, done=bool(reported) and all(reported)))
    return listed


def _is_reloaded(state: FleetState, name: str, ordered_unix_ms: int) -> bool:
    """Return True if every live instance to which a reload applies has carried it out.

    `ordered_unix_ms` is the time of the directive. Instances that do not publish the time of their
    last reload are assumed to have reloaded.
    """
    done = [
        one.reloaded is None or one.reloaded >= ordered_unix_ms
        for member, one in state.live.items()
        if name in (directives.ALL_INSTANCES, member)
    ]
    return bool(done) and all(done)


def _name_scopes(pauses: dict[Scope, Directive]) -> list[tuple[str, Directive]]:
    return [(str(scope), directive) for scope, directive in pauses.items()]


def write(
    fleet: Fleet,
    name: str = "",
    *,
    why: str = "",
    to: str = "",
    remove: list[str] | None = None,
) -> DirectiveChange:
    """Write a directive, remove others, and wake all instances, so that they apply the change soon.

    Raises RequestRefusedError if the fleet already has too many directives.
    """
    call = directives.change(
        fleet.store.keys,
        fleet.name,
        name,
        by=audit.acting_person(),
        why=why,
        to=to,
        remove=remove or [],
    )
    reply = fleet.store.run(call)
    if reply.word == "FULL":
        raise RequestRefusedError(
            f"the fleet has {int(reply.values[0])} directives, which is the maximum; list them with"
            " `streamqd control list`, and remove old ones with `streamqd control clear` or"
            " `streamqd rebalance`"
        )
    # Ignore the reply. Even if this user may not publish, or if no instance receives the message,
    # the instances read the directive with their next heartbeat.
    fleet.store.pipeline([("PUBLISH", fleet.store.keys.wake(fleet.name), "order")])
    return DirectiveChange.parse(reply)


def _write_unless_dry(
    fleet: Fleet,
    name: str,
    *,
    why: str,
    changed: bool,
    dry_run: bool,
    to: str = "",
    notes: Sequence[str] = (),
) -> WrittenDirective:
    """Write a directive. In a dry run, only return the result."""
    at = None if dry_run else write(fleet, name, why=why, to=to).at_unix_ms
    return WrittenDirective(name, at, changed, dry_run, list(notes))


def _remove_directives(
    fleet: Fleet,
    name: str,
    remove: list[str],
    *,
    dry_run: bool,
    notes: Sequence[str] = (),
) -> WrittenDirective:
    """Remove directives. In a dry run, only return the result."""
    at = None if dry_run else write(fleet, remove=remove).at_unix_ms
    return WrittenDirective(name, at, True, dry_run, list(notes))


# --- pauses ---------------------------------------------------------------------------------------


def check_scope(fleet: Fleet, scope: Scope) -> None:
    """Raise RequestRefusedError if the topic, partition or group of a scope does not exist."""
    if scope.topic is None:
        return
    count = topics.partition_count(fleet.store, scope.topic)
    if scope.partition is not None:
        topics.check_partition(scope.topic, scope.partition, count)
    if scope.group is not None:
        known = topics.groups(fleet.store, scope.topic, range(count))
        if scope.group not in known:
            names = ", ".join(known) or "none"
            raise RequestRefusedError(
                f"no group {scope.group} reads {scope.topic}; its groups are: {names}"
            )


def pause(fleet: Fleet, scope: Scope, why: str, *, dry_run: bool = False) -> WrittenDirective:
    """Stop workers from fetching in a scope.

    Raises RequestRefusedError if the scope does not exist.
    """
    check_scope(fleet, scope)
    name = f"pause:{scope}"
    found = published.fleet_state(fleet).control.pauses
    wider = [str(each) for each in found if each != scope and each.covers(scope)]
    notes = [f"it is also paused by {each}" for each in wider]
    return _write_unless_dry(
        fleet, name, why=why, changed=scope not in found, notes=notes, dry_run=dry_run
    )


def resume(fleet: Fleet, scope: Scope, *, dry_run: bool = False) -> WrittenDirective:
    """Remove the pause of a scope and all pauses within it.

    Raises RequestRefusedError if the scope is paused only because a wider scope is paused.
    """
    name = f"pause:{scope}"
    found = published.fleet_state(fleet).control.pauses
    ended = [each for each in found if scope.covers(each)]
    wider = [each for each in found if each not in ended and each.covers(scope)]
    if wider and not ended:
        raise RequestRefusedError(
            f"{scope} is paused as part of {wider[0]}; resume {wider[0]} instead"
        )
    notes = [
        f"{each} is still paused" for each in found if each not in ended and _overlap(each, scope)
    ]
    if not ended:
        check_scope(fleet, scope)
        return WrittenDirective(name, None, False, dry_run, [f"{scope} was not paused", *notes])
    pauses = [f"pause:{each}" for each in ended]
    return _remove_directives(fleet, name, pauses, notes=notes, dry_run=dry_run)


def _overlap(one: Scope, other: Scope) -> bool:
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))


# --- groups ---------------------------------------------------------------------------------------


def stop(
    fleet: Fleet, topic: str, group: str, why: str, *, dry_run: bool = False
) -> WrittenDirective:
    """Prevent all instances from owning partitions of a group.

    Raises RequestRefusedError if the group is unknown.
    """
    scope = directives.stop_scope(topic, group)
    check_scope(fleet, scope)
    changed = scope not in published.fleet_state(fleet).control.stops
    return _write_unless_dry(fleet, f"stop:{scope}", why=why, changed=changed, dry_run=dry_run)


def start(fleet: Fleet, topic: str, group: str, *, dry_run: bool = False) -> WrittenDirective:
    """Allow instances to own the partitions of a stopped group again.

    Raises RequestRefusedError if the group is unknown.
    """
    scope = directives.stop_scope(topic, group)
    name, state = f"stop:{scope}", published.fleet_state(fleet)
    if scope not in state.control.stops:
        check_scope(fleet, scope)
        return WrittenDirective(name, None, False, dry_run, [f"{topic}/{group} was not stopped"])
    notes = [f"{each} is still paused" for each in state.control.pauses if _overlap(each, scope)]
    if not any((topic, group) in seen.member.offers for seen in state.live.values()):
        notes.append(f"no live instance has a consumer for {topic}/{group}")
    return _remove_directives(fleet, name, [name], notes=notes, dry_run=dry_run)


# --- instances ------------------------------------------------------------------------------------


def find_live_member(state: FleetState, instance: str) -> MemberView:
    """Return a live member of the fleet. Raises RequestRefusedError if the instance is not live."""
    if instance in state.live:
        return state.live[instance]
    if instance in state.silent:
        seconds = state.silent[instance] / 1000
        raise RequestRefusedError(
            f"instance {instance} has been silent for {seconds:.0f} s; start it, or run"
            f" `streamqd forget {instance}`"
        )
    near = difflib.get_close_matches(instance, state.live, n=1)
    names = ", ".join(sorted(state.live)) or "none"
    hint = f"did you mean {near[0]}?" if near else f"live instances: {names}"
    raise RequestRefusedError(f"instance {instance} is not in this fleet; {hint}")


def drain(fleet: Fleet, instance: str, why: str, *, dry_run: bool = False) -> WrittenDirective:
    """Make an instance hand over everything that it owns, and keep it from owning anything.

    Other instances take over those assignments for which they have a consumer. Raises
    RequestRefusedError if the instance is not live.
    """
    state = published.fleet_state(fleet)
    seen = find_live_member(state, instance)
    others = [one for one in state.eligible_members() if one.member.id != instance]
    left = sorted(
        f"{topic}/{group}"
        for topic, group in seen.member.offers
        if not any((topic, group) in one.member.offers for one in others)
    )
    notes = [f"no other instance offers {each}: its partitions will wait" for each in left]
    changed = instance not in state.control.drains
    return _write_unless_dry(
        fleet, f"drain:{instance}", why=why, changed=changed, notes=notes, dry_run=dry_run
    )


def undrain(fleet: Fleet, instance: str, *, dry_run: bool = False) -> WrittenDirective:
    """Allow a drained instance to own partitions again. The instance does not need to be live."""
    state = published.fleet_state(fleet)
    name = f"drain:{instance}"
    if instance not in state.control.drains:
        find_live_member(state, instance)
        return WrittenDirective(name, None, False, dry_run, [f"{instance} was not drained"])
    return _remove_directives(fleet, name, [name], dry_run=dry_run)


def reload(
    fleet: Fleet, instance: str | None, why: str, *, dry_run: bool = False
) -> WrittenDirective:
    """Make one instance, or all instances one after another, reload configuration and code.

    If `instance` is None, all instances reload. Raises RequestRefusedError if the given instance is
    not live, or if the fleet has no live instance.
    """
    state = published.fleet_state(fleet)
    if instance is not None:
        find_live_member(state, instance)
    elif not state.live:
        raise RequestRefusedError(
            f"no instance of the fleet {fleet.name} is live; start one, which reads the current"
            " configuration and code"
        )
    name = f"reload:{instance or directives.ALL_INSTANCES}"
    if dry_run:
        order = [instance] if instance else sorted(state.live)
        return WrittenDirective(name, None, True, True, [f"in this order: {', '.join(order)}"])
    gone = [
        each
        for each in state.control.reloads
        if each not in (directives.ALL_INSTANCES, *state.live)
    ]
    asked = [instance] if instance else sorted(state.live)
    notes = [
        f"{each} was already asked to reload {_format_age(state, waiting)}, and waits for"
        f" {waiting.waits_for}; it reloads again after that"
        for each, waiting in unfinished_reloads(fleet, state, asked).items()
    ]
    done = write(fleet, name, why=why, remove=[f"reload:{each}" for each in gone])
    return WrittenDirective(name, done.at_unix_ms, True, False, notes)


def unfinished_reloads(
    fleet: Fleet, state: FleetState, instances: Sequence[str]
) -> dict[str, PendingReload]:
    """Return the unfinished reloads of these live instances, in the given order."""
    summaries = published.read_summaries(ViewReader(fleet.store), fleet.name, instances)
    found = {
        name: reloads.find_pending(state, name, summary)
        for name, summary in zip(instances, summaries, strict=True)
    }
    return {name: each for name, each in found.items() if each is not None}


def _format_age(state: FleetState, waiting: PendingReload) -> str:
    seconds = max(0, state.now_unix_ms - waiting.asked_unix_ms) / 1000
    return f"{precise_duration(seconds)} ago"


# --- instances that are gone for good -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The result of removing an instance from the fleet, or of the dry run.

    `ownerless` is the number of partitions whose last owner was this instance and that no other
    instance has acquired yet. `directives` contains the names of the directives for this instance,
    which are kept. `topics` contains the topics that it consumed.
    """

    instance: str
    host: str
    pid: int | None
    silent_seconds: float
    ownerless: int
    directives: list[str]
    topics: list[str]
    dry_run: bool


def forget(fleet: Fleet, instance: str, *, dry_run: bool = False) -> Forgotten:
    """Remove a dead instance from the fleet.

    Raises RequestRefusedError if the instance is live, or if one of its leases has not expired yet.
    After a jump of the server's clock, every instance seems to be silent, so the call first waits
    for half a TTL to see if a heartbeat arrives. The leases must have expired before the instance
    is removed, because other instances read the duration of its leases from its entry.
    """
    state = published.fleet_state(fleet)
    heartbeat = _member(fleet, state, instance)
    nonce, seen = heartbeat.info.get("nonce"), members.to_member_view(heartbeat)
    if not isinstance(nonce, str):
        raise RequestRefusedError(
            f"the published state of {instance} cannot be read, so its run is unknown; a live"
            " instance replaces the value within a heartbeat, and `streamqd doctor` names it"
        )
    ttl = max(fleet.stale, seen.ttl or 0.0)
    deadline = time.monotonic() + ttl / 2
    while True:
        now, moved = state.now_unix_ms, heartbeat.heartbeat_unix_ms
        if now - moved <= ttl * 1000:
            raise _still_alive_error(instance, (now - moved) / 1000)
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_INTERVAL_SECONDS)
        state = published.fleet_state(fleet)
        heartbeat = _member(fleet, state, instance)
        if (heartbeat.heartbeat_unix_ms, heartbeat.info.get("nonce")) != (moved, nonce):
            raise _still_alive_error(
                instance, (state.now_unix_ms - heartbeat.heartbeat_unix_ms) / 1000
            )
    assignments = _list_assignments(fleet, seen.member.offers)
    views = lease_views(ViewReader(fleet.store), assignments)
    last = [held for held in views if held.token and held.owner == instance]
    lives = [held.ttl for held in last if held.ttl]
    if lives:
        raise RequestRefusedError(
            f"{instance} still owns {plural(len(lives), 'partition')}; run the command again in"
            f" {max(lives):.0f} s, when its leases have expired"
        )
    if not dry_run:
        reply = fleet.store.run(members.leave(fleet.store.keys, fleet.name, instance, nonce))
        if reply.word == "OTHER":
            raise _still_alive_error(instance, 0.0)
    return Forgotten(
        instance=instance,
        host=str(heartbeat.info.get("host", "")),
        pid=published.read_integer(heartbeat.info.get("pid")),
        silent_seconds=(state.now_unix_ms - heartbeat.heartbeat_unix_ms) / 1000,
        ownerless=len(last),
        directives=[row.name for row in rows(state) if instance in (row.target, row.to)],
        topics=sorted({assignment.topic for assignment in assignments}),
        dry_run=dry_run,
    )


def _member(fleet: Fleet, state: FleetState, instance: str) -> Heartbeat:
    for heartbeat in state.heartbeats:
        if heartbeat.instance == instance:
            return heartbeat
    names = ", ".join(sorted(state.silent)) or "none"
    raise RequestRefusedError(
        f"instance {instance} is not in the fleet {fleet.name}; its silent instances are: {names}"
    )


def _still_alive_error(instance: str, seconds: float) -> RequestRefusedError:
    return RequestRefusedError(
        f"instance {instance} is live (last heartbeat {max(0.0, seconds):.1f} s ago); stop"
        " it, and it leaves the fleet"
    )


# --- clearing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cleared:
    """The directives that were removed, or that a dry run would remove."""

    directives: list[str]
    dry_run: bool


def clear(
    fleet: Fleet, names: list[str], *, missing: bool = False, dry_run: bool = False
) -> Cleared:
    """Remove directives by name, including invalid ones.

    If `missing` is True, also remove the directives for instances that are not live. Raises
    RequestRefusedError if there is no directive with one of the names.
    """
    state = published.fleet_state(fleet)
    listed = rows(state)
    known = {row.name for row in listed} | state.control.unreadable.keys()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RequestRefusedError(
            f"directive {unknown[0]} not found; `streamqd control list` prints all"
        )
    chosen = sorted({*names, *(row.name for row in listed if missing and row.instance_missing)})
    if chosen and not dry_run:
        write(fleet, remove=chosen)
    return Cleared(chosen, dry_run)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """An assignment whose owner changes from `owner` to `to`. Each is '' if there is no owner."""

    topic: str
    partition: int
    group: str
    owner: str
    to: str


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The result of a rebalance, or of the dry run.

    `moves` contains the moves that the rebalance starts, and `forgotten` the names of the move
    directives that it removes. If the command waits for the moves, `waiting` contains a sentence
    for each assignment that had not reached its new owner in time.
    """

    at_unix_ms: int | None
    dry_run: bool
    moves: list[PlannedMove]
    forgotten: list[str]
    waiting: list[str]


def move(
    fleet: Fleet, assignment: Assignment, to: str, why: str, *, dry_run: bool = False
) -> WrittenDirective:
    """Move an assignment to an instance, which keeps it until another move or a rebalance.

    Raises RequestRefusedError if the instance cannot own the assignment now.
    """
    check_scope(fleet, Scope(assignment.topic, assignment.partition, None))
    state = published.fleet_state(fleet)
    seen = find_live_member(state, to)
    if seen.leaving:
        raise RequestRefusedError(f"instance {to} is leaving; choose another instance")
    if to in state.control.drains:
        raise RequestRefusedError(
            f"instance {to} is drained; run `streamqd drain {to} --undo` first"
        )
    if (assignment.topic, assignment.group) not in seen.member.offers:
        raise RequestRefusedError(
            f"instance {to} has no consumer for {assignment.topic}/{assignment.group}; configure"
            " one there and reload, or choose another instance"
        )
    if assignment in seen.broken:
        raise RequestRefusedError(
            f"the worker of {assignment} crashes in a loop on {to}; fix the handler and run"
            f" `streamqd reload {to}`, or choose another instance"
        )
    if state.control.find_stop(assignment) is not None:
        raise RequestRefusedError(
            f"group {assignment.group} of {assignment.topic} is stopped; run"
            f" `streamqd group start {assignment.topic} {assignment.group}` first"
        )
    owners = read_owners(fleet, offered_assignments(fleet, state))
    owner = owners.get(assignment, "")
    cap = seen.member.cap
    if cap and owner != to and Counter(owners.values())[to] >= cap:
        raise RequestRefusedError(
            f"instance {to} owns {plural(cap, 'assignment')}, which is its max_partitions; move"
            " another one away, or raise daemon.max_partitions"
        )
    name = f"move:{assignment}"
    notes = [f"{to} already owns it and will keep it"] if owner == to else []
    known = state.control.moves.get(assignment)
    changed = owner != to or known is None or known.to != to
    return _write_unless_dry(
        fleet, name, why=why, to=to, changed=changed, notes=notes, dry_run=dry_run
    )


def rebalance(fleet: Fleet, why: str, *, dry_run: bool = False) -> Rebalanced:
    """Remove all move directives, and rebalance the fleet now, without the usual waiting times."""
    state = published.fleet_state(fleet)
    planned = plan(fleet, state)
    forgotten = [f"move:{assignment}" for assignment in sorted(state.control.moves)]
    if dry_run:
        return Rebalanced(None, True, planned, forgotten, [])
    done = write(fleet, directives.REBALANCE, why=why, remove=forgotten)
    return Rebalanced(done.at_unix_ms, False, planned, forgotten, [])


def plan(fleet: Fleet, state: FleetState) -> list[PlannedMove]:
    """Return the moves that a rebalance, which removes all move directives, would start now."""
    assignments = [
        assignment
        for assignment in offered_assignments(fleet, state)
        if state.control.find_stop(assignment) is None
    ]
    owners = read_owners(fleet, assignments)
    wanted = place(state.eligible_members(), assignments, owners)
    return [
        PlannedMove(*assignment, owners.get(assignment, ""), wanted.get(assignment, ""))
        for assignment in assignments
        if owners.get(assignment, "") != wanted.get(assignment, "")
    ]


def offered_assignments(fleet: Fleet, state: FleetState) -> list[Assignment]:
    """Return every assignment for which at least one live instance has a consumer."""
    return _list_assignments(
        fleet, {pair for seen in state.live.values() for pair in seen.member.offers}
    )


def _list_assignments(fleet: Fleet, pairs: Set[tuple[str, str]]) -> list[Assignment]:
    counts = {
        topic: registry.partition_count(fleet.store, topic) or 0
        for topic in {topic for topic, _ in pairs}
    }
    return sorted(
        Assignment(topic, number, group)
        for topic, group in pairs
        for number in range(counts[topic])
    )


def read_owners(fleet: Fleet, assignments: list[Assignment]) -> dict[Assignment, str]:
    """Return the owner of each assignment that has one."""
    views = lease_views(ViewReader(fleet.store), assignments)
    return {
        assignment: held.owner
        for assignment, held in zip(assignments, views, strict=True)
        if held.token
    }


def not_moved(fleet: Fleet, assignment: Assignment, to: str) -> list[str]:
    """Return a sentence if the instance does not own the assignment yet. Otherwise, return []."""
    owner = read_owners(fleet, [assignment]).get(assignment, "")
    return [] if owner == to else [f"{assignment} is owned by {owner or 'no instance'}"]


def not_drained(fleet: Fleet, instance: str) -> list[str]:
    """Return a sentence for each assignment that a drained instance still owns."""
    owners = read_owners(fleet, offered_assignments(fleet, published.fleet_state(fleet)))
    return [
        f"{instance} owns {assignment}" for assignment, owner in owners.items() if owner == instance
    ]


def not_rebalanced(fleet: Fleet) -> list[str]:
    """Return a sentence for each assignment that has not reached its planned owner yet."""
    return [
        f"{each.topic}/{each.partition}/{each.group} is owned by {each.owner or 'no instance'},"
        f" not by {each.to or 'no instance'}"
        for each in plan(fleet, published.fleet_state(fleet))
    ]


def not_stopped(fleet: Fleet, topic: str, group: str) -> list[str]:
    """Return a sentence for each partition of a stopped group that still has an owner."""
    return [
        f"{owner} owns {assignment}"
        for assignment, owner in _group_owners(fleet, topic, group).items()
        if owner
    ]


def not_started(fleet: Fleet, topic: str, group: str) -> list[str]:
    """Return a sentence for each partition of a started group that has no owner yet."""
    owners = _group_owners(fleet, topic, group)
    return [f"no instance owns {assignment}" for assignment, owner in owners.items() if not owner]


def _group_owners(fleet: Fleet, topic: str, group: str) -> dict[Assignment, str]:
    """Return the owner of every partition of a group, or '' if it has none."""
    count = topics.partition_count(fleet.store, topic)
    assignments = [Assignment(topic, number, group) for number in range(count)]
    owners = read_owners(fleet, assignments)
    return {assignment: owners.get(assignment, "") for assignment in assignments}


# States of a worker that is not paused.
_UNPAUSED = ("ready", "recovering", "booting", "quiet", *WORDS.values())


def not_paused(fleet: Fleet, scope: Scope, since_unix_ms: int) -> list[str]:
    """Return a sentence for each assignment that may not be paused yet.

    This is the case if its worker is still running a message, or if its owner has not published its
    state since `since_unix_ms` (server's clock), so that the worker's state is unknown.
    """
    return _list_unreported(fleet, scope, since_unix_ms, paused=True)


def not_resumed(fleet: Fleet, scope: Scope, since_unix_ms: int) -> list[str]:
    """Return a sentence for each assignment that may not have resumed yet.

    This is the case if its worker is still paused, or if its owner has not published its state
    since `since_unix_ms` (server's clock), so that the worker's state is unknown. Assignments that
    are still paused by another directive are left out.
    """
    return _list_unreported(fleet, scope, since_unix_ms, paused=False)


def _list_unreported(fleet: Fleet, scope: Scope, since: int, *, paused: bool) -> list[str]:
    state = published.fleet_state(fleet)
    assignments = [
        assignment for assignment in offered_assignments(fleet, state) if scope.covers(assignment)
    ]
    if not paused:
        assignments = [
            assignment for assignment in assignments if state.control.find_pause(assignment) is None
        ]
    owners = read_owners(fleet, assignments)
    reports = _read_reports(fleet, sorted(set(owners.values())))
    waiting = []
    for assignment, owner in owners.items():
        at, states = reports[owner]
        worker = states.get(assignment, "")
        if at < since:
            waiting.append(f"{owner} has not reported on {assignment} yet")
        elif worker in (_UNPAUSED if paused else ("paused",)):
            doing = "has a message running" if paused else "is still paused"
            waiting.append(f"{assignment} on {owner} {doing}")
    return waiting


def _read_reports(
    fleet: Fleet, instances: list[str]
) -> dict[str, tuple[int, dict[Assignment, str]]]:
    """Return the time of each instance's last published state, and the states of its workers.

    The time is in Unix ms on the server's clock, or 0 if the instance has published nothing.
    """
    found = published.read_summaries(ViewReader(fleet.store), fleet.name, instances)
    return {
        name: (
            published.read_integer(summary.get("at_unix_ms")) or 0,
            {row.assignment: row.worker for row in assignments.published_rows(name, summary)},
        )
        for name, summary in zip(instances, found, strict=True)
    }


def not_reloaded(fleet: Fleet, instances: list[str], ordered_unix_ms: int) -> list[str]:
    """Return a sentence for each of these live instances that has not finished its reload."""
    state = published.fleet_state(fleet)
    live = state.live
    left = [
        name for name in instances if name in live and (live[name].reloaded or 0) < ordered_unix_ms
    ]
    known = unfinished_reloads(fleet, state, left)
    return [
        f"{name} has not reloaded"
        + (f" and waits for {known[name].waits_for}" if name in known else "")
        for name in left
    ]


def reload_problems(fleet: Fleet, instances: list[str]) -> dict[str, str]:
    """Map each instance that refused its last reload to the reason."""
    infos = published.fleet_state(fleet).infos
    problems = {name: str(infos.get(name, {}).get("reload_problem", "")) for name in instances}
    return {name: problem for name, problem in problems.items() if problem}


@dataclass(frozen=True, slots=True)
class DepartingAssignment:
    """One assignment of the departing instance.

    `to` is the instance that takes it over, or '' if there is none. In that case, `stranded` is the
    reason: no-consumer (no other instance has a consumer for it), broken (its worker crashes in a
    loop on every other instance) or max-partitions (the other instances own as many as they may).
    Otherwise, `stranded` is ''.
    """

    topic: str
    partition: int
    group: str
    to: str
    stranded: str
    in_flight: int | None
    lag: int | None


@dataclass(frozen=True, slots=True)
class Departure:
    """The plan for the departure of an instance. `last` is true if no other instance can take over.

    `longest_run` is the name of the assignment on this instance whose message has been running
    longest, and `longest_run_seconds` is the age of that run. A drain waits for this message, up to
    the drain_timeout of the instance. The fields are '' and null if no message is running, or if
    the instance has published nothing.
    """

    instance: str
    last: bool
    assignments: list[DepartingAssignment]
    longest_run_seconds: float | None
    longest_run: str

    @property
    def stranded(self) -> list[DepartingAssignment]:
        """The assignments that no instance takes over."""
        return [assignment for assignment in self.assignments if assignment.stranded]


def departure(fleet: Fleet, instance: str) -> Departure:
    """Plan the departure of an instance. Raises RequestRefusedError if it is not live."""
    state = published.fleet_state(fleet)
    find_live_member(state, instance)
    assignments = offered_assignments(fleet, state)
    owners = read_owners(fleet, assignments)
    others = [one for one in state.eligible_members() if one.member.id != instance]
    moves = {assignment: directive.to for assignment, directive in state.control.moves.items()}
    who = predict_takers(instance, others, assignments, owners, moves)
    seen = snapshot.read_published(fleet)
    workers = {each.assignment: each for each in seen.assignments if each.owner == instance}
    busiest = max(workers.values(), key=lambda each: each.longest_run_seconds or 0.0, default=None)
    run = busiest.longest_run_seconds if busiest else None
    return Departure(
        instance=instance,
        last=not others,
        assignments=[
            DepartingAssignment(
                *assignment,
                to=to,
                stranded=why,
                in_flight=workers[assignment].in_flight if assignment in workers else None,
                lag=workers[assignment].lag if assignment in workers else None,
            )
            for assignment, (to, why) in who.items()
        ],
        longest_run_seconds=run or None,
        longest_run=busiest.name if busiest and run else "",
    )


def predict_takers(
    instance: str,
    others: Sequence[MemberView],
    assignments: Sequence[Assignment],
    owners: Mapping[Assignment, str],
    moves: Mapping[Assignment, str],
) -> dict[Assignment, tuple[str, str]]:
    """Map each assignment of an instance to its next owner, or to the reason why it has none.

    `instance` is the departing instance, and `others` contains the other members that may own
    assignments. This function does no I/O.
    """
    # The departing owner is not among these members, so its assignments are placed as if they were
    # free.
    wanted = place(others, assignments, owners, moves)
    owned = Counter(wanted.values())
    found = {}
    for assignment in sorted(
        assignment for assignment, owner in owners.items() if owner == instance
    ):
        to = wanted.get(assignment, "")
        found[assignment] = (to, "" if to else _why_stranded(assignment, others, owned))
    return found


def _why_stranded(
    assignment: Assignment, others: Sequence[MemberView], owned: Mapping[str, int]
) -> str:
    offering = [one for one in others if (assignment.topic, assignment.group) in one.member.offers]
    if not offering:
        return "no-consumer"
    fit = [one.member for one in offering if assignment not in one.broken]
    if not fit:
        return "broken"
    return (
        "max-partitions"
        if all(0 < one.cap <= owned.get(one.id, 0) for one in fit)
        else "no-consumer"
    )
