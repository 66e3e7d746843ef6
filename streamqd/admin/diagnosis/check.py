"""What a check is: an id that stays, what it looks for, what it needs to know, and its judgement.

A judgement is a pure function over facts that were gathered once for all checks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.admin.diagnosis.facts import DiagnosisFacts

PARTITIONS_SHOWN = 12  # runs of partition numbers in one sentence


class Need(enum.Enum):
    """Facts that are gathered together; the value says what that costs."""

    SERVER = "about 12 commands"
    RIGHTS = "about 130 commands in 4 transactions that are discarded"
    FLEET = "4 commands, and 1 for each instance"
    TOPICS = "2 commands for each topic"
    UNITS = "15 commands for each of at most 4,096 partitions, 17 for each group on it"
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
    """What a judgement says: one sentence of what is wrong, one of how to mend it, the evidence.

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


def spans(numbers: Iterable[int]) -> str:
    """Numbers in words: `partition 3`, `partitions 0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"partition {runs[0][0]}"
    told = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    more = f" and {len(told) - PARTITIONS_SHOWN} more" if len(told) > PARTITIONS_SHOWN else ""
    return f"partitions {', '.join(told[:PARTITIONS_SHOWN])}{more}"


def lasting(seconds: float) -> str:
    """A length of time in words, such as `3 minutes`."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:,.0f} seconds"


def plural(number: int, noun: str) -> str:
    """`1 message`, `3 messages`; 'entry' becomes 'entries'."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"
