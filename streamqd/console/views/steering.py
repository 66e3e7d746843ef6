"""Pause, resume, stop and start a group, and move a partition to another instance."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.admin import directives
from streamqd.admin.directives import Steered
from streamqd.console.access import Role
from streamqd.console.view import Act, ActResult, AuditNote, FormField, Preview, Visit
from streamqd.errors import Malformed
from streamqd.model import Unit
from streamqd.store import directives as stored
from streamqd.store.directives import Scope

DIGITS_MAX = 6  # of the number of a partition


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS_MAX:
        raise Malformed(f"partition {text} must be the number of a partition")
    return int(text)


def unit_of(visit: Visit) -> Unit:
    """Return the assignment of the path. Raises Malformed."""
    return Unit(visit.path["topic"], _number(visit.path["partition"]), visit.path["group"])


def partition_of(visit: Visit) -> int | None:
    """Return the partition of the form, None for all. Raises Malformed."""
    text = visit.text("partition")
    return _number(text) if text else None


def scope_of(visit: Visit) -> Scope:
    """Return the group of the path, or its partition in the form."""
    return Scope(visit.path["topic"], partition_of(visit), visit.path["group"])


def _reason(visit: Visit) -> FormField:
    return FormField("reason", "Reason", visit.text("reason"), "Others see it in the overview.")


def _fields(visit: Visit) -> Sequence[FormField]:
    return (_reason(visit), _partition(visit))


def _partition(visit: Visit) -> FormField:
    return FormField("partition", "Partition", visit.text("partition"), "Empty: all partitions.")


def _name(scope: Scope) -> str:
    where = "All partitions" if scope.partition is None else f"Partition {scope.partition}"
    return f"{where} of {scope.topic}/{scope.group}"


def _previewed(done: Steered, text: str) -> Preview:
    unchanged = [] if done.changed else ["Nothing would change."]
    return Preview([text, *unchanged, *(_sentence(note) for note in done.notes)])


def _sentence(note: str) -> str:
    """Return a note as a sentence. The name of an instance or a scope stays as it is."""
    return f"{note[:1].upper() if note.partition(' ')[0].isalpha() else note[:1]}{note[1:]}."


def _done(scope: Scope, state: str, note: AuditNote | None) -> ActResult:
    place = {"topic": scope.topic, "group": scope.group}
    return ActResult(f"{_name(scope)}: {state}.", "topic", place, note)


def _note(visit: Visit, command: str, scope: Scope, **more: str) -> AuditNote:
    """Return the entry about a directive. One for all topics is in the log of each."""
    topics = [scope.topic] if scope.topic else visit.now.topics
    reason = {"reason": visit.text("reason")} if visit.text("reason") else {}
    return AuditNote(topics, command, {"scope": str(scope), **more, **reason})


def preview_pause(visit: Visit) -> Preview:
    """Return what a pause would do."""
    scope = scope_of(visit)
    done = directives.pause(visit.desk.fleet, scope, visit.text("reason"), dry_run=True)
    return _previewed(
        done,
        f"{_name(scope)} would fetch no more messages. Running messages finish, the"
        " partitions keep their owners, and the pause stays until it is resumed.",
    )


def pause(visit: Visit) -> ActResult:
    """Pause."""
    scope = scope_of(visit)
    note = _note(visit, "pause", scope)
    directives.pause(visit.desk.fleet, scope, visit.text("reason"))
    return _done(scope, "paused", note)


def preview_resume(visit: Visit) -> Preview:
    """Return what a resume would do."""
    scope = scope_of(visit)
    return _resume_preview(visit, scope, _name(scope))


def _resume_preview(visit: Visit, scope: Scope, whose: str) -> Preview:
    done = directives.resume(visit.desk.fleet, scope, dry_run=True)
    return _previewed(done, f"{whose} would fetch messages again.")


def resume(visit: Visit) -> ActResult:
    """Resume."""
    scope = scope_of(visit)
    note = _note(visit, "resume", scope)
    done = directives.resume(visit.desk.fleet, scope)
    return _done(scope, "resumed", note if done.changed else None)


# --- a group on all instances ---------------------------------------------------------------------


def preview_stop(visit: Visit) -> Preview:
    """Return what stopping a group would do."""
    topic, group = visit.path["topic"], visit.path["group"]
    done = directives.stop(visit.desk.fleet, topic, group, visit.text("reason"), dry_run=True)
    return _previewed(
        done,
        f"No instance would own partitions of {topic}/{group}. Workers finish their running"
        " messages and exit. New messages wait in the topic until the group is started again.",
    )


def stop(visit: Visit) -> ActResult:
    """Stop a group."""
    topic, group = visit.path["topic"], visit.path["group"]
    scope = stored.stop_scope(topic, group)
    note = _note(visit, "group stop", scope)
    directives.stop(visit.desk.fleet, topic, group, visit.text("reason"))
    return _done(scope, "stopped", note)


def preview_start(visit: Visit) -> Preview:
    """Return what starting a group would do."""
    topic, group = visit.path["topic"], visit.path["group"]
    done = directives.start(visit.desk.fleet, topic, group, dry_run=True)
    return _previewed(done, f"Instances would own the partitions of {topic}/{group} again.")


def start(visit: Visit) -> ActResult:
    """Start a stopped group."""
    topic, group = visit.path["topic"], visit.path["group"]
    scope = stored.stop_scope(topic, group)
    note = _note(visit, "group start", scope)
    done = directives.start(visit.desk.fleet, topic, group)
    return _done(scope, "started", note if done.changed else None)


# --- one partition --------------------------------------------------------------------------------


def _move_fields(visit: Visit) -> Sequence[FormField]:
    unit = unit_of(visit)
    names = _takers(visit, unit)
    return (
        FormField("to", "To", _to(visit, unit), choices=[(each, each) for each in names]),
        _reason(visit),
    )


def _takers(visit: Visit, unit: Unit) -> list[str]:
    """Return the live instances with a consumer for the group, and that of the form."""
    pair, now = (unit.topic, unit.group), visit.now
    live = [each for each in now.seen.instances if each.instance in now.seen.state.live]
    names = {each.instance for each in live if pair in each.offers}
    return sorted(names | {visit.text("to")} - {""})


def _owner(visit: Visit, unit: Unit) -> str:
    """Return the owner of an assignment, '' without one."""
    return next((each.owner for each in visit.now.seen.assignments if each.unit == unit), "")


def _to(visit: Visit, unit: Unit) -> str:
    """Return the instance of the form, by default one that does not own the partition."""
    owner = _owner(visit, unit)
    names = sorted(_takers(visit, unit), key=lambda name: name == owner)
    return visit.text("to") or next(iter(names), "")


def preview_move(visit: Visit) -> Preview:
    """Return what a move would do."""
    unit = unit_of(visit)
    to = _to(visit, unit)
    if not to:
        group = f"{unit.topic}/{unit.group}"
        return Preview([], refusal=f"No live instance has a consumer for {group}.")
    done = directives.move(visit.desk.fleet, unit, to, visit.text("reason"), dry_run=True)
    if to == _owner(visit, unit):
        return _previewed(done, f"{unit} would stay on {to}, even if the fleet moves others.")
    return _previewed(
        done,
        f"{to} would own {unit} after its owner has finished its running messages. It stays there"
        " until it is moved again, or the fleet is rebalanced.",
    )


def move(visit: Visit) -> ActResult:
    """Move a partition."""
    unit, to = unit_of(visit), visit.text("to")
    owner = _owner(visit, unit)
    note = _note(visit, "move", Scope(*unit), **{"from": owner or "none", "to": to})
    directives.move(visit.desk.fleet, unit, to, visit.text("reason"))
    return ActResult(f"{unit} is assigned to {to}.", "assignment", unit._asdict(), note)


# --- a pause of any scope, as the fleet lists it --------------------------------------------------


def wider_pause(visit: Visit, scope: Scope) -> str:
    """Return the pause of more than a scope that covers it, such as `orders/*/*`, '' for none."""
    found = visit.now.seen.state.control.pause_of(scope)
    return "" if found is None or found[0] == scope else str(found[0])


def _stated_scope(visit: Visit) -> Scope:
    """Return the scope of the URL or form. Raises Malformed."""
    try:
        return stored.scope_of(visit.text("scope"))
    except ValueError as error:
        raise Malformed(f"scope: {error}") from None


def preview_resume_pause(visit: Visit) -> Preview:
    """Return what the removal of a pause would do."""
    scope = _stated_scope(visit)
    return _resume_preview(visit, scope, f"The assignments of {scope}")


def resume_pause(visit: Visit) -> ActResult:
    """Remove a pause."""
    scope = _stated_scope(visit)
    note = _note(visit, "resume", scope)
    done = directives.resume(visit.desk.fleet, scope)
    return ActResult(f"{scope}: resumed.", "fleet", note=note if done.changed else None)


ACTS = (
    Act(
        "pause",
        "/groups/{topic}/{group}/pause",
        "Pause",
        "Pause",
        Role.OPERATOR,
        preview_pause,
        pause,
        _fields,
        back="topic",
        example="/groups/orders/bill/pause",
    ),
    Act(
        "resume",
        "/groups/{topic}/{group}/resume",
        "Resume",
        "Resume",
        Role.OPERATOR,
        preview_resume,
        resume,
        lambda visit: (_partition(visit),),
        back="topic",
        example="/groups/orders/bill/resume",
    ),
    Act(
        "stop",
        "/groups/{topic}/{group}/stop",
        "Stop a group",
        "Stop",
        Role.OPERATOR,
        preview_stop,
        stop,
        lambda visit: (_reason(visit),),
        back="topic",
        example="/groups/orders/bill/stop",
    ),
    Act(
        "start",
        "/groups/{topic}/{group}/start",
        "Start a group",
        "Start",
        Role.OPERATOR,
        preview_start,
        start,
        back="topic",
        example="/groups/orders/bill/start",
    ),
    Act(
        "move",
        "/topics/{topic}/partitions/{partition}/{group}/move",
        "Move a partition",
        "Move",
        Role.OPERATOR,
        preview_move,
        move,
        _move_fields,
        back="assignment",
        example="/topics/orders/partitions/0/bill/move",
    ),
    Act(
        "resume_pause",
        "/fleet/resume",
        "Resume",
        "Resume",
        Role.OPERATOR,
        preview_resume_pause,
        resume_pause,
        back="fleet",
        example="/fleet/resume?scope=*/*/*",
    ),
)
