"""The checks whose findings `top` and `status` show. They read only published values."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin.assignments import by_group
from streamqd.admin.checks import Check, CheckResult, Severity, check
from streamqd.admin.condition import ALARMING, STUCK_SECONDS, describe_condition, severity_rank
from streamqd.admin.instances import (
    SeesInstances,
    housekeeper,
    limited,
    no_instances,
    reload_waits,
    silent,
)
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.words import age, spans


@check("fleet.ordered", Severity.NOTE)
def list_directives(view: FleetSnapshot) -> Iterator[CheckResult]:
    """A directive pauses, stops or drains something."""
    for kind, scope, order in sorted(
        view.directives, key=lambda each: (each[0] != "pause", each[2].at_unix_ms)
    ):
        yield CheckResult(
            f"{kind} of {scope} for {age(view.now_unix_ms - order.at_unix_ms)}"
            f" by {order.by or '?'}{': ' if order.why else ''}{order.why}",
            about=scope,
        )


@check("values.unreadable", Severity.PROBLEM)
def _unreadable(view: FleetSnapshot) -> Iterator[CheckResult]:
    """Values in Redis are invalid. The first one and the number of others are shown."""
    for row in view.unreadable[:1]:
        yield CheckResult(str(row), "`streamqd doctor`", about=row.key)
    if len(view.unreadable) > 1:
        rest = len(view.unreadable) - 1
        yield CheckResult(f"and {rest} more values that cannot be read: `streamqd doctor`")


@check("fleet.empty", Severity.PROBLEM)
def _empty(view: FleetSnapshot) -> Iterator[CheckResult]:
    """No instance is live."""
    if all(each.state == "silent" for each in view.instances):
        yield no_instances(view.fleet)


@check("fleet.suspended", Severity.WARNING)
def _suspended(facts: SeesInstances) -> Iterator[CheckResult]:
    """An instance is paused by a signal. If it is draining or drained, this is a note."""
    for each in facts.instances:
        name, what = each.instance, f"instance {each.instance} is {each.state}"
        if each.state == "paused":
            yield CheckResult(what, f"send SIGCONT to the supervisor of {name}", name)
        elif each.state in ("draining", "drained"):
            cure = f"`streamqd drain {name} --undo`"
            yield CheckResult(what, cure, name, severity=Severity.NOTE)


@check("assignments.alarming", Severity.PROBLEM)
def _alarming(view: FleetSnapshot) -> Iterator[CheckResult]:
    """An assignment needs attention. Each group and condition is shown once."""
    for word in sorted(ALARMING, key=severity_rank):
        by_name = by_group(each for each in view.assignments if each.condition == word)
        for (topic, group), some in sorted(by_name.items()):
            where = f"{topic}/{group} in {spans(each.partition for each in some)}"
            about = some[0].name if len(some) == 1 else where
            yield CheckResult(
                f"{describe_condition(word)}: {about}", f"`streamqd why {topic}`", about=about
            )


@check("assignments.stuck", Severity.WARNING)
def _stuck(view: FleetSnapshot) -> Iterator[CheckResult]:
    """A handler has been running one message for a long time."""
    runs = [(each.longest_run_seconds or 0.0, each.name) for each in view.assignments]
    slow = [run for run in runs if run[0] >= STUCK_SECONDS]
    if slow:
        seconds, name = max(slow)
        more = f" (slow handlers in all: {len(slow)})" if len(slow) > 1 else ""
        text = f"{name} has been running one message for {age(seconds * 1000)}{more}"
        yield CheckResult(text, f"`streamqd why {name}`", about=name)


@check("assignments.unseen", Severity.PROBLEM)
def _unseen(view: FleetSnapshot) -> Iterator[CheckResult]:
    """There are more partitions without an owner than were examined."""
    if view.unseen:
        yield CheckResult(f"{view.unseen} more partitions without an owner are not shown")


INSTANCE_CHECKS: tuple[Check[SeesInstances], ...] = (
    *(limited, silent, _suspended, housekeeper, reload_waits),
)
NOTICES: list[Check[FleetSnapshot]] = [
    _unreadable,
    _empty,
    *INSTANCE_CHECKS,
    _alarming,
    _stuck,
    _unseen,
]
