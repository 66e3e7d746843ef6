"""Pause and resume a group or one of its partitions."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.admin import directives
from streamqd.admin.directives import Steered
from streamqd.console.access import Role
from streamqd.console.view import Act, ActResult, AuditNote, FormField, Preview, Visit
from streamqd.errors import Malformed
from streamqd.store import directives as stored
from streamqd.store.directives import Scope


def scope_of(visit: Visit) -> Scope:
    """Return the group of the path, or its partition in the form."""
    partition = visit.text("partition")
    if partition and not (partition.isascii() and partition.isdigit() and len(partition) < 6):
        raise Malformed("partition must be a number of a partition")
    return Scope(visit.path["topic"], int(partition) if partition else None, visit.path["group"])


def _fields(visit: Visit) -> Sequence[FormField]:
    return (
        FormField("reason", "Reason", visit.text("reason"), "Others see it in the overview."),
        _partition(visit),
    )


def _partition(visit: Visit) -> FormField:
    return FormField("partition", "Partition", visit.text("partition"), "Empty: all partitions.")


def _name(scope: Scope) -> str:
    where = "All partitions" if scope.partition is None else f"Partition {scope.partition}"
    return f"{where} of {scope.topic}/{scope.group}"


def _previewed(done: Steered, text: str) -> Preview:
    unchanged = [] if done.changed else ["Nothing would change."]
    return Preview([text, *unchanged, *(f"{note[:1].upper()}{note[1:]}." for note in done.notes)])


def _done(scope: Scope, state: str, note: AuditNote | None) -> ActResult:
    place = {"topic": scope.topic, "group": scope.group}
    return ActResult(f"{_name(scope)}: {state}.", "topic", place, note)


def _note(visit: Visit, command: str, scope: Scope) -> AuditNote:
    """Return the entry about a pause. A pause of all topics is in the log of each."""
    topics = [scope.topic] if scope.topic else visit.now.topics
    reason = {"reason": visit.text("reason")} if visit.text("reason") else {}
    return AuditNote(topics, command, {"scope": str(scope), **reason})


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
