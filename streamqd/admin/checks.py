"""The one engine of checks: `doctor`, `doctor stream`, `status` and `top` judge by it.

A check is an id that stays, what it looks for, and a pure function from what was read to what it
finds. Reading comes first, once for all checks of a look, and a value that cannot be read is
missing in the facts (`BadValues` names it), so it hides nothing but its own unit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Facts = TypeVar("Facts", contravariant=True)  # what judges less, judges more too


class Need(enum.Enum):
    """Facts of the doctor that are gathered together; the value says what that costs."""

    SERVER = "about 12 commands"
    RIGHTS = "about 130 commands in 4 transactions that are discarded"
    FLEET = "5 commands, and 1 for each instance"
    TOPICS = "2 commands for each topic"
    UNITS = "13 commands for each of at most 4,096 partitions, 15 for each group on it"
    BODIES = "2 messages of each partition, at most 64 partitions"
    VALUES = "6 commands for each partition, and 5 for each group on it"
    SCHEDULES = "1 command, and 3 for each of at most 10,000 schedules"
    HOST = "nothing in Redis"


class Severity(enum.StrEnum):
    """How bad a finding is."""

    PROBLEM = "problem"  # messages are lost, stand still, or nothing guards them
    WARNING = "warning"  # it will become a problem, or it costs more than it should
    NOTE = "note"  # worth knowing; does not change the exit code


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a judgement says: one sentence of what is wrong, one of how to fix it, the evidence.

    `about` names the thing, such as a topic or an instance; '' for the server or this host.
    `severity` replaces the check's own.
    """

    what: str
    mend: str = ""
    about: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `about` names the thing, '' for the server or this host.

    `severity` is problem, warning or note. `evidence` holds the figures; its fields depend on the
    check and may grow.
    """

    check: str
    area: str
    severity: str
    about: str
    what: str
    mend: str
    evidence: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check(Generic[Facts]):
    """One thing that is looked for. The part of the id before the dot is its area."""

    id: str
    severity: Severity
    title: str
    needs: Sequence[Need]
    judge: Callable[[Facts], Iterable[CheckResult]]

    @property
    def area(self) -> str:
        """Server, rights, topics, partitions, values, schedules, fleet, host, stream or units."""
        return self.id.partition(".")[0]

    @property
    def cost(self) -> str:
        """What its facts cost, which several checks share."""
        return "; ".join(need.value for need in self.needs)


def check(
    name: str, severity: Severity, *needs: Need
) -> Callable[[Callable[[Facts], Iterable[CheckResult]]], Check[Facts]]:
    """Make a check of the judgement that follows; its docstring is the title."""
    return lambda judge: Check(name, severity, judge.__doc__ or "", needs, judge)


def judged(checks: Iterable[Check[Facts]], facts: Facts) -> list[Finding]:
    """Let checks judge what was read. What they find, in their order."""
    return [
        Finding(
            check=each.id,
            area=each.area,
            severity=str(found.severity or each.severity),
            about=found.about,
            what=found.what,
            mend=found.mend,
            evidence=dict(found.evidence),
        )
        for each in checks
        for found in each.judge(facts)
    ]
