"""Register checks and run them, for `doctor`, `doctor stream`, `status`, `top` and the console.

A check has a stable ID, a title, and a pure function that derives findings from facts. All facts
are read once, before any check runs. The facts contain no invalid values from Redis, because
`ViewReader` leaves them out and reports them. An invalid value therefore affects only its own
assignment.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Facts = TypeVar("Facts", contravariant=True)  # a check can get more facts than it needs


class Need(enum.Enum):
    """A set of facts that `doctor` reads together. The value describes the cost of reading them."""

    SERVER = "about 12 commands"
    PERMISSIONS = "about 130 commands, in 4 transactions that are discarded"
    FLEET = "5 commands, and 1 command for each instance"
    TOPICS = "2 commands for each topic"
    ASSIGNMENTS = (
        "13 commands for each of at most 4,096 partitions, and 15 for each group on a partition"
    )
    BODIES = "2 messages from each of at most 64 partitions"
    VALUES = "6 commands for each partition, and 5 for each group on a partition"
    SCHEDULES = "1 command, and 3 commands for each of at most 10,000 schedules"
    OUTBOXES = (
        "1 command, 2 commands for each outbox, and about 5 queries in each configured database"
    )
    HOST = "no Redis commands"


class Severity(enum.StrEnum):
    """The severity of a finding."""

    PROBLEM = "problem"  # messages are lost, delayed or unprotected
    WARNING = "warning"  # it will become a problem, or it costs more than it should
    NOTE = "note"  # information, which does not change the exit code


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A problem that a check function found, with its fix (a sentence each) and the evidence.

    `about` is the subject, such as a topic or an instance, or '' for the server or this host. If
    `severity` is set, it replaces the severity of the check.
    """

    text: str
    fix: str = ""
    about: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check.

    `about` is the subject, or '' for the server or this host. `severity` is problem, warning or
    note. `evidence` contains the values that led to the finding. Its fields depend on the check,
    and later versions may add more.
    """

    check: str
    area: str
    severity: str
    about: str
    text: str
    fix: str
    evidence: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """A check. The part of the ID before the dot is its area."""

    id: str
    severity: Severity
    title: str
    needs: Sequence[Need]
    run: Callable[[Facts], Iterable[CheckResult]]

    @property
    def area(self) -> str:
        """The first part of the ID: server, permissions, topics, partitions, fleet and so on."""
        return self.id.partition(".")[0]

    @property
    def cost(self) -> str:
        """The cost of reading the facts that it needs.

        Facts that several checks need are read only once.
        """
        return "; ".join(need.value for need in self.needs)


def check(
    name: str, severity: Severity, *needs: Need
) -> Callable[[Callable[[Facts], Iterable[CheckResult]]], Check[Facts]]:
    """Return a decorator that turns a function into a check.

    The function's docstring is the title.
    """
    return lambda run: Check(name, severity, run.__doc__ or "", needs, run)


def run_checks(checks: Iterable[Check[Facts]], facts: Facts) -> list[Finding]:
    """Run checks over the facts and return their findings in the order of the checks."""
    return [
        Finding(
            check=each.id,
            area=each.area,
            severity=str(found.severity or each.severity),
            about=found.about,
            text=found.text,
            fix=found.fix,
            evidence=dict(found.evidence),
        )
        for each in checks
        for found in each.run(facts)
    ]
