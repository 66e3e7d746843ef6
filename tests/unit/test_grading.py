"""A problem has the same severity in `why`, `doctor` and the overview."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamqd.admin import diagnosis, why
from streamqd.admin.assignments import AssignmentRow, published_rows
from streamqd.admin.checks import Severity, run_checks
from streamqd.admin.diagnosis.facts import DiagnosisFacts, FleetHealth
from streamqd.config import Settings

SEVERITIES = {each.id: each.severity for each in diagnosis.CHECKS}
SAME = [
    ("crash-loop", "fleet.crash-loop"),
    ("internal-error", "fleet.assignment-failed"),
    ("no-instance", "fleet.empty"),
    ("no-consumer", "fleet.not-offered"),
    ("no-capacity", "fleet.limited"),
    ("owner-silent", "fleet.owner-silent"),
    ("owner-silent", "fleet.not-renewed"),
    ("loop-blocked", "fleet.loop-blocked"),
    ("other-client", "partitions.other-client"),
    ("unowned", "partitions.unowned"),
    ("outbox-no-relay", "outboxes.no-relay"),
    ("outbox-blocked", "outboxes.failing"),
    ("outbox-late", "outboxes.waiting"),
]


def row(state: str = "ready", **rates: float) -> AssignmentRow:
    raw = {"topic": "access", "partition": 0, "group": "hits", "state": state, "rates": rates}
    return published_rows("west", {"assignments": [raw]})[0]


@pytest.mark.parametrize(("cause", "check"), SAME)
def test_why_and_doctor_assign_the_same_severity(cause: str, check: str) -> None:
    assert why.severity(cause) is SEVERITIES[check]


def test_dead_letters_of_failing_runs_have_their_severity() -> None:
    check = next(e for e in diagnosis.CHECKS if e.id == "partitions.dead-letters-growing")

    def found(acked: float) -> str:
        some = row(acked=acked, failed=1.0, dead_lettered=1.0)
        health = FleetHealth(summaries={"west": {"assignments": [raw_row(some)]}})
        [finding] = run_checks([check], DiagnosisFacts(Settings(), 0, fleet=health))
        return finding.severity

    assert found(acked=0.5) == why.severity("failing")
    assert found(acked=99.0) == Severity.WARNING


def raw_row(some: AssignmentRow) -> dict[str, object]:
    rates = {name: getattr(some, name) for name in ("acked", "failed", "dead_lettered")}
    return {"topic": some.topic, "partition": some.partition, "group": some.group, "rates": rates}


def test_assignment_is_graded_by_cause_and_then_by_condition() -> None:
    free = replace(row(), lease="free", owner="")

    assert why.grade(free, "") is Severity.PROBLEM
    assert why.grade(free, "changing-hands") is Severity.WARNING
    assert why.grade(row(), "lagging") is Severity.WARNING
    assert why.grade(row(), "moving") is None
    assert why.grade(row(acked=1.0, failed=1.0), "") is Severity.PROBLEM
    assert why.grade(replace(row(), paused=True), "") is Severity.NOTE


def test_worker_at_its_limit_of_held_keys_is_a_problem() -> None:
    assert why.grade(row(), "keys-held") is Severity.WARNING
    assert why.grade(row("full"), "keys-held") is Severity.PROBLEM
