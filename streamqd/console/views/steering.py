"""Directives for groups, partitions and instances, and requests for a worker's stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from streamqd.admin import directives, stacks
from streamqd.admin.directives import DepartingAssignment, PlannedMove, WrittenDirective
from streamqd.console.access import Role
from streamqd.console.formats import sentence
from streamqd.console.forms import REASON_FIELD
from streamqd.console.view import (
    PARTITION_MAX,
    Act,
    ActResult,
    AuditNote,
    FormField,
    Preview,
    Visit,
    integer,
)
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.model import Assignment
from streamqd.store import directives as stored
from streamqd.store.directives import Scope
from streamqd.store.stacks import KEPT_SECONDS
from streamqd.words import age, plural

MOVES_SHOWN = 50

Target = TypeVar("Target", bound="Scope | Assignment | str")


@dataclass(frozen=True, slots=True)
class Steering(Generic[Target]):
    """A directive that an act writes or removes. `target` is a scope, an assignment or an instance.

    `steer` calls the function of `streamqd.admin.directives`. Its last argument is True for a dry
    run. `effect` returns the text of the dry run, and `result` the sentence of the act. `more`
    returns other arguments for the audit log.
    """

    command: str
    target: Callable[[Visit], Target]
    steer: Callable[[Visit, Target, bool], WrittenDirective]
    effect: Callable[[Visit, Target], str]
    result: Callable[[Visit, Target], str]
    more: Callable[[Visit], dict[str, str]] = lambda _visit: {}

    def preview(self, visit: Visit) -> Preview:
        """Return the effect of the directive, and the notes of its dry run."""
        target = self.target(visit)
        done = self.steer(visit, target, True)
        unchanged = [] if done.changed else ["Nothing would change."]
        effect = self.effect(visit, target)
        return Preview([effect, *unchanged, *(sentence(each) for each in done.notes)])

    def run(self, visit: Visit) -> ActResult:
        """Write or remove the directive, and return a note for the affected topics' audit logs."""
        target = self.target(visit)
        topic = None if isinstance(target, str) else target.topic
        stated = {"instance" if isinstance(target, str) else "scope": str(target)}
        topics = [topic] if topic else visit.now.topics
        note = AuditNote(topics, self.command, stated | self.more(visit) | _reason_parameter(visit))
        done = self.steer(visit, target, False)
        return ActResult(self.result(visit, target), note if done.at_unix_ms is not None else None)


def _reason_parameter(visit: Visit) -> dict[str, str]:
    return {"reason": visit.text(REASON_FIELD)} if visit.text(REASON_FIELD) else {}


def _reason(visit: Visit) -> Sequence[FormField]:
    return (visit.field(REASON_FIELD, "Reason", "Shown in the overview."),)


def _partition(visit: Visit) -> Sequence[FormField]:
    return (visit.field("partition", "Partition", "Empty: all partitions."),)


def _group(visit: Visit) -> tuple[str, str]:
    return visit.path["topic"], visit.path["group"]


def _group_scope(visit: Visit) -> Scope:
    """Return the group in the path, or one of its partitions if the form names it.

    Raises InvalidRequestError.
    """
    number = visit.optional_number("partition", most=PARTITION_MAX)
    return Scope(visit.path["topic"], number, visit.path["group"])


def _stop_scope(visit: Visit) -> Scope:
    return stored.stop_scope(*_group(visit))


def _stated_scope(visit: Visit) -> Scope:
    """Parse the scope from the URL or the form. Raises InvalidRequestError."""
    try:
        return stored.parse_scope(visit.text("scope"))
    except ValueError as error:
        raise InvalidRequestError(f"scope: {error}") from None


def _name(scope: Scope) -> str:
    where = "All partitions" if scope.partition is None else f"Partition {scope.partition}"
    return f"{where} of {scope.topic}/{scope.group}"


def find_wider_pause(visit: Visit, scope: Scope) -> str:
    """Return a wider pause that covers a scope, such as `orders/*/*`, or '' if there is none."""
    found = visit.now.snapshot.state.control.find_pause(scope)
    return "" if found is None or found[0] == scope else str(found[0])


PAUSE = Steering(
    "pause",
    _group_scope,
    lambda visit, scope, dry_run: directives.pause(
        visit.resources.fleet, scope, visit.text(REASON_FIELD), dry_run=dry_run
    ),
    lambda _visit, scope: (
        f"{_name(scope)} would fetch no more messages. Running messages finish, the partitions keep"
        " their owners, and the pause applies until you resume them."
    ),
    lambda _visit, scope: f"{_name(scope)}: paused.",
)
RESUME = Steering(
    "resume",
    _group_scope,
    lambda visit, scope, dry_run: directives.resume(visit.resources.fleet, scope, dry_run=dry_run),
    lambda _visit, scope: f"{_name(scope)} would fetch messages again.",
    lambda _visit, scope: f"{_name(scope)}: resumed.",
)
# Resumes a pause of any scope. The list on the fleet page links to this act.
RESUME_PAUSE = Steering(
    "resume",
    _stated_scope,
    RESUME.steer,
    lambda _visit, scope: f"The assignments of {scope} would fetch messages again.",
    lambda _visit, scope: f"{scope}: resumed.",
)
STOP = Steering(
    "group stop",
    _stop_scope,
    lambda visit, _scope, dry_run: directives.stop(
        visit.resources.fleet, *_group(visit), visit.text(REASON_FIELD), dry_run=dry_run
    ),
    lambda _visit, scope: (
        f"No instance would own partitions of {scope.topic}/{scope.group}. Workers finish their"
        " running messages and exit. New messages wait in the topic until the group is started"
        " again."
    ),
    lambda _visit, scope: f"{_name(scope)}: stopped.",
)
START = Steering(
    "group start",
    _stop_scope,
    lambda visit, _scope, dry_run: directives.start(
        visit.resources.fleet, *_group(visit), dry_run=dry_run
    ),
    lambda _visit, scope: (
        f"Instances would own the partitions of {scope.topic}/{scope.group} again."
    ),
    lambda _visit, scope: f"{_name(scope)}: started.",
)


# --- one partition --------------------------------------------------------------------------------


def path_assignment(visit: Visit) -> Assignment:
    """Return the assignment in the path. Raises InvalidRequestError."""
    number = integer(visit.path["partition"], "partition", most=PARTITION_MAX)
    return Assignment(visit.path["topic"], number, visit.path["group"])


def _move_fields(visit: Visit) -> Sequence[FormField]:
    assignment = path_assignment(visit)
    choices = [(each, each) for each in _list_takers(visit, assignment)]
    return (
        FormField("to", "To", _read_target_instance(visit, assignment), choices=choices),
        *_reason(visit),
    )


def _list_takers(visit: Visit, assignment: Assignment) -> list[str]:
    """Return the live instances with a consumer for the group, and the instance in the form."""
    pair, now = (assignment.topic, assignment.group), visit.now
    live = [each for each in now.snapshot.instances if each.instance in now.snapshot.state.live]
    names = {each.instance for each in live if pair in each.offers}
    return sorted(names | {visit.text("to")} - {""})


def _read_owner(visit: Visit, assignment: Assignment) -> str:
    """Return the owner of an assignment, or '' if it has none."""
    return next(
        (each.owner for each in visit.now.snapshot.assignments if each.assignment == assignment), ""
    )


def _read_target_instance(visit: Visit, assignment: Assignment) -> str:
    """Return the instance in the form, or by default one that does not own the partition."""
    owner = _read_owner(visit, assignment)
    names = sorted(_list_takers(visit, assignment), key=lambda name: name == owner)
    return visit.text("to") or next(iter(names), "")


def _move(visit: Visit, assignment: Assignment, dry_run: bool) -> WrittenDirective:
    to = _read_target_instance(visit, assignment)
    if not to:
        raise RequestRefusedError(
            f"no live instance has a consumer for {assignment.topic}/{assignment.group}"
        )
    if not dry_run and not visit.text("to"):
        raise InvalidRequestError('"To" must be the name of a live instance')
    return directives.move(
        visit.resources.fleet, assignment, to, visit.text(REASON_FIELD), dry_run=dry_run
    )


def _describe_move(visit: Visit, assignment: Assignment) -> str:
    to = _read_target_instance(visit, assignment)
    if to == _read_owner(visit, assignment):
        return f"{assignment} would stay on {to}, even if the fleet moves others."
    return (
        f"{to} would own {assignment} after its owner has finished its running messages. It stays"
        " there until it is moved again, or the fleet is rebalanced."
    )


def _from_and_to(visit: Visit) -> dict[str, str]:
    assignment = path_assignment(visit)
    return {
        "from": _read_owner(visit, assignment) or "none",
        "to": _read_target_instance(visit, assignment),
    }


MOVE = Steering(
    "move",
    path_assignment,
    _move,
    _describe_move,
    lambda visit, assignment: (
        f"{assignment} is assigned to {_read_target_instance(visit, assignment)}."
    ),
    _from_and_to,
)
STACK = Steering(
    "stack",
    path_assignment,
    lambda visit, assignment, dry_run: stacks.request(
        visit.resources.fleet, assignment, dry_run=dry_run
    ),
    lambda _visit, assignment: (
        f"The owner of {assignment} would read the stacks of its worker, log them, and publish"
        f" them for {KEPT_SECONDS // 60} minutes. Everyone who may open the console can see them."
        " The worker keeps running."
    ),
    lambda _visit, assignment: f"The stack trace of {assignment} was requested.",
)


# --- instances ------------------------------------------------------------------------------------


def _instance(visit: Visit) -> str:
    return visit.path["instance"]


UNDRAIN = Steering(
    "drain --undo",
    _instance,
    lambda visit, name, dry_run: directives.undrain(visit.resources.fleet, name, dry_run=dry_run),
    lambda _visit, name: f"{name} would accept partitions again.",
    lambda _visit, name: f"{name} accepts partitions again.",
)


DRAIN = Steering(
    "drain",
    _instance,
    lambda visit, name, dry_run: directives.drain(
        visit.resources.fleet, name, visit.text(REASON_FIELD), dry_run=dry_run
    ),
    lambda _visit, name: (
        f"{name} would release its partitions and accept no new ones until it is undrained."
    ),
    lambda _visit, name: f"{name} releases its partitions.",
)


def _assignment(each: DepartingAssignment | PlannedMove) -> str:
    return f"{each.topic}/{each.partition}/{each.group}"


def preview_drain(visit: Visit) -> Preview:
    """Return the effect of a drain: which partitions would move, and which would have no owner."""
    base = DRAIN.preview(visit)
    plan = directives.departure(visit.resources.fleet, _instance(visit))
    owned = plural(len(plan.assignments), "assignment")
    sentences = [*base.sentences, f"{_instance(visit)} owns {owned}."]
    if plan.longest_run_seconds:
        ran = age(plan.longest_run_seconds * 1000)
        sentences.append(
            f"A message of {plan.longest_run} has been running for {ran}. The drain waits"
            " until it has finished."
        )
    if plan.last:
        sentences.append("No other instance is live, so all its assignments would wait.")
    elif plan.stranded:
        sentences.append(f"{plural(len(plan.stranded), 'assignment')} would wait without an owner.")
    rows = [
        (_assignment(each), each.to or f"none ({each.stranded})", each.lag)
        for each in plan.assignments[:MOVES_SHOWN]
    ]
    heads = ("Assignment", "Goes to", "Unread")
    return replace(base, sentences=sentences, rows=(heads, rows) if rows else None)


def preview_rebalance(visit: Visit) -> Preview:
    """Return the moves that a rebalance would start."""
    plan = directives.rebalance(visit.resources.fleet, visit.text(REASON_FIELD), dry_run=True)
    if not plan.moves and not plan.forgotten:
        return Preview(["The fleet is balanced: no partition would move."])
    sentences = [f"{plural(len(plan.moves), 'partition')} would move now, without waiting times."]
    if plan.forgotten:
        sentences.append(f"{plural(len(plan.forgotten), 'move directive')} would be removed.")
    rows = [
        (_assignment(each), each.owner or "none", each.to or "none")
        for each in plan.moves[:MOVES_SHOWN]
    ]
    return Preview(sentences, rows=(("Assignment", "From", "To"), rows) if rows else None)


def rebalance(visit: Visit) -> ActResult:
    """Rebalance the fleet now."""
    topics = visit.now.topics
    done = directives.rebalance(visit.resources.fleet, visit.text(REASON_FIELD))
    note = AuditNote(topics, "rebalance", _reason_parameter(visit), {"moves": len(done.moves)})
    return ActResult(f"{plural(len(done.moves), 'partition')} move.", note)


_GROUP = "/groups/{topic}/{group}"
_ASSIGNMENT = "/topics/{topic}/partitions/{partition}/{group}"
ACTS = (
    Act(
        "pause",
        f"{_GROUP}/pause",
        "Pause",
        "Pause",
        Role.OPERATOR,
        PAUSE.preview,
        PAUSE.run,
        lambda visit: (*_reason(visit), *_partition(visit)),
        back="topic",
    ),
    Act(
        "resume",
        f"{_GROUP}/resume",
        "Resume",
        "Resume",
        Role.OPERATOR,
        RESUME.preview,
        RESUME.run,
        _partition,
        back="topic",
    ),
    Act(
        "stop",
        f"{_GROUP}/stop",
        "Stop a group",
        "Stop",
        Role.OPERATOR,
        STOP.preview,
        STOP.run,
        _reason,
        back="topic_data",  # this page has the buttons Reset and Delete
    ),
    Act(
        "start",
        f"{_GROUP}/start",
        "Start a group",
        "Start",
        Role.OPERATOR,
        START.preview,
        START.run,
        back="topic",
    ),
    Act(
        "move",
        f"{_ASSIGNMENT}/move",
        "Move a partition",
        "Move",
        Role.OPERATOR,
        MOVE.preview,
        MOVE.run,
        _move_fields,
        back="assignment",
    ),
    Act(
        "stack",
        f"{_ASSIGNMENT}/stack",
        "Stack trace",
        "Request stack trace",
        Role.OPERATOR,
        STACK.preview,
        STACK.run,
        back="assignment",
    ),
    Act(
        "resume_pause",
        "/fleet/resume",
        "Resume",
        "Resume",
        Role.OPERATOR,
        RESUME_PAUSE.preview,
        RESUME_PAUSE.run,
        back="fleet",
        query="scope=*/*/*",
    ),
    Act(
        "drain",
        "/fleet/{instance}/drain",
        "Drain an instance",
        "Drain",
        Role.ADMIN,
        preview_drain,
        DRAIN.run,
        _reason,
        back="fleet",
    ),
    Act(
        "undrain",
        "/fleet/{instance}/undrain",
        "Undrain an instance",
        "Undrain",
        Role.ADMIN,
        UNDRAIN.preview,
        UNDRAIN.run,
        back="fleet",
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
