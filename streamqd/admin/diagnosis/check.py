"""What a check is: an id that stays, what it looks for, what it needs to know, and its judgement.

A judgement is a pure function over facts that were gathered once for all checks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.admin.diagnosis.facts import DiagnosisFacts


class Need(enum.Enum):
    """Facts that are gathered together; the value says what that costs."""

    SERVER = "about 12 commands"
    RIGHTS = "about 130 commands in 4 transactions that are discarded"
    FLEET = "5 commands, and 1 for each instance"
    TOPICS = "2 commands for each topic"
    UNITS = "13 commands for each of at most 4,096 partitions, 15 for each group on it"
    BODIES = "2 messages of each partition, at most 64 partitions"
    VALUES = "as much as for the units, once more"
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
    mend: str
    about: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked for. The part of the id before the dot is its area."""

    id: str
    severity: Severity
    title: str
    needs: Sequence[Need]
    judge: Callable[[DiagnosisFacts], Iterable[CheckResult]]

    @property
    def area(self) -> str:
        """Server, rights, topics, partitions, values, fleet or host."""
        return self.id.partition(".")[0]

    @property
    def cost(self) -> str:
        """What its facts cost, which several checks share."""
        return "; ".join(need.value for need in self.needs)


def check(
    name: str, severity: Severity, *needs: Need
) -> Callable[[Callable[[DiagnosisFacts], Iterable[CheckResult]]], Check]:
    """Make a check of the judgement that follows; its docstring is the title."""
    return lambda judge: Check(name, severity, judge.__doc__ or "", needs, judge)
