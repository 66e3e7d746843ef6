"""The instances of the fleet, and the acts that move partitions between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamqd.admin import directives
from streamqd.admin.directives import DirectiveRow, PlannedMove
from streamqd.admin.instances import InstanceRow
from streamqd.console.access import Role
from streamqd.console.view import (
    Act,
    ActResult,
    AuditNote,
    ConsoleView,
    Context,
    FormField,
    Preview,
    Visit,
)
from streamqd.store.directives import Scope, scope_of
from streamqd.words import age, plural

MOVES_SHOWN = 50


def show(visit: Visit) -> Context:
    """Return the instances, and the directives that are in force."""
    control = directives.view(visit.desk.fleet)
    instances = sorted(visit.now.seen.instances, key=_by_name)
    return {
        "now": visit.now,
        "page": visit.page_of(instances, visit.limit),
        "limit": visit.limit,
        "reloads": [each for each in instances if each.reload],
        "drained": {each.target for each in control.directives if each.kind == "drain"},
        "directives": [(each, _place(each)) for each in control.directives],
        "unreadable": control.unreadable_directives,
    }


def _by_name(row: InstanceRow) -> str:
    return row.instance


def _place(row: DirectiveRow) -> dict[str, object]:
    """Return the topic, partition and group that a directive names, as parameters of a view."""
    named = row.kind in ("pause", "stop", "move")
    return (scope_of(row.target) if named else Scope())._asdict()


def _reason(visit: Visit) -> Sequence[FormField]:
    return (FormField("reason", "Reason", visit.text("reason"), "Others see it in the overview."),)


def _note(visit: Visit, command: str, arguments: Mapping[str, object]) -> AuditNote:
    """Return the entry about a change of the whole fleet, for the log of each of its topics."""
    reason = {"reason": visit.text("reason")} if visit.text("reason") else {}
    return AuditNote(visit.now.topics, command, {**arguments, **reason})


def preview_drain(visit: Visit) -> Preview:
    """Return who would take over the partitions of an instance."""
    name, fleet = visit.path["instance"], visit.desk.fleet
    done = directives.drain(fleet, name, visit.text("reason"), dry_run=True)
    plan = directives.departure(fleet, name)
    count = plural(len(plan.assignments), "partition")
    sentences = [f"{name} would hand over {count} and take no new ones until it is undrained."]
    if plan.longest_run_seconds:
        ran = age(plan.longest_run_seconds * 1000)
        sentences.append(
            f"A message of {plan.longest_run} has been running for {ran}. It may finish."
        )
    if plan.last:
        sentences.append("No other instance is there: all its partitions would wait.")
    elif plan.stranded:
        sentences.append(f"{plural(len(plan.stranded), 'partition')} would wait without an owner.")
    rows = [
        (str(f"{u.topic}/{u.partition}/{u.group}"), u.to or f"none ({u.stranded})", u.lag)
        for u in plan.assignments[:MOVES_SHOWN]
    ]
    notes = [f"{note[:1].upper()}{note[1:]}." for note in done.notes]
    return Preview(
        [*sentences, *notes],
        rows=(("Assignment", "Goes to", "Unread"), rows) if rows else None,
    )


def drain(visit: Visit) -> ActResult:
    """Drain."""
    name = visit.path["instance"]
    note = _note(visit, "drain", {"instance": name})
    directives.drain(visit.desk.fleet, name, visit.text("reason"))
    return ActResult(f"{name} hands over its partitions.", "fleet", note=note)


def preview_undrain(visit: Visit) -> Preview:
    """Return what undraining would do."""
    name = visit.path["instance"]
    done = directives.undrain(visit.desk.fleet, name, dry_run=True)
    if not done.changed:
        return Preview([], refusal=f"{name} is not drained.")
    return Preview([f"{name} would take partitions again."])


def undrain(visit: Visit) -> ActResult:
    """Undrain."""
    name = visit.path["instance"]
    note = _note(visit, "drain --undo", {"instance": name})
    done = directives.undrain(visit.desk.fleet, name)
    text = f"{name} takes partitions again."
    return ActResult(text, "fleet", note=note if done.changed else None)


def preview_rebalance(visit: Visit) -> Preview:
    """Return the moves that a rebalance would start."""
    plan = directives.rebalance(visit.desk.fleet, visit.text("reason"), dry_run=True)
    if not plan.moves and not plan.forgotten:
        return Preview(["The fleet is level: no partition would move."])
    sentences = [f"{plural(len(plan.moves), 'partition')} would move now, without waiting times."]
    if plan.forgotten:
        sentences.append(f"{plural(len(plan.forgotten), 'move directive')} would be removed.")
    rows = [(_name(each), each.owner or "none", each.to or "none") for each in plan.moves]
    return Preview(
        sentences, rows=(("Assignment", "From", "To"), rows[:MOVES_SHOWN]) if rows else None
    )


def rebalance(visit: Visit) -> ActResult:
    """Rebalance."""
    note = _note(visit, "rebalance", {})
    done = directives.rebalance(visit.desk.fleet, visit.text("reason"))
    note = replace(note, counts={"moves": len(done.moves)})
    return ActResult(f"{plural(len(done.moves), 'partition')} move.", "fleet", note=note)


def _name(move: PlannedMove) -> str:
    return f"{move.topic}/{move.partition}/{move.group}"


VIEWS = (ConsoleView("fleet", "/fleet", "Fleet", show, label="Fleet", key="f"),)
ACTS = (
    Act(
        "drain",
        "/fleet/{instance}/drain",
        "Drain an instance",
        "Drain",
        Role.ADMIN,
        preview_drain,
        drain,
        _reason,
        back="fleet",
        example="/fleet/one/drain",
    ),
    Act(
        "undrain",
        "/fleet/{instance}/undrain",
        "Undrain an instance",
        "Undrain",
        Role.ADMIN,
        preview_undrain,
        undrain,
        back="fleet",
        example="/fleet/one/undrain",
    ),
    Act(
        "rebalance",
        "/rebalance",
        "Rebalance the fleet",
        "Rebalance",
        Role.OPERATOR,
        preview_rebalance,
        rebalance,
        _reason,
        back="fleet",
    ),
)
