"""Checks of delayed messages: those without a due time, those without a body, those overdue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamqd.admin.diagnosis.declaration import (
    Check,
    CheckResult,
    Need,
    Severity,
    lasting,
    plural,
    spans,
)
from streamqd.admin.diagnosis.facts import Delays, DiagnosisFacts
from streamqd.store.keys import Keys

OVERDUE_SECONDS = 60.0
NAMES_SHOWN = 8


class _Set(NamedTuple):
    """The delayed messages of one kind on one partition. `group` is '' for `delay=` sends."""

    topic: str
    partition: int
    group: str
    delays: Delays

    @property
    def about(self) -> str:
        return f"{self.topic}/{self.group}" if self.group else self.topic

    @property
    def kind(self) -> str:
        return f"retries of {self.group}" if self.group else "scheduled messages"


def _sets(facts: DiagnosisFacts) -> list[_Set]:
    sends = [_Set(each.topic, each.partition, "", each.scheduled) for each in facts.partitions]
    return sends + [_Set(*each.unit, each.delays) for each in facts.units]


def _names(facts: DiagnosisFacts, each: _Set) -> tuple[str, str]:
    keys = Keys(facts.settings.keys.control, facts.settings.keys.streams)
    if each.group:
        unit = each.topic, each.partition, each.group
        return keys.retry(*unit), keys.retry_items(*unit)
    place = each.topic, each.partition
    return keys.scheduled(*place), keys.scheduled_items(*place)


def _lost(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for each in _sets(facts):
        delays = each.delays
        count = len(delays.lost) or max(0, delays.more)
        if count:
            due, _ = _names(facts, each)
            yield CheckResult(
                f"{plural(count, 'due time')} of {each.kind} on partition {each.partition} of"
                f" {each.topic} have no message: it is lost",
                "find what deleted it; the due times go by themselves when they are due, or now by"
                f" `redis-cli ZREM {due} {' '.join(delays.lost[:NAMES_SHOWN]) or 'MEMBER'}`",
                about=each.about,
                evidence={"partition": each.partition, "members": list(delays.lost[:NAMES_SHOWN])},
            )


def _stuck(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for each in _sets(facts):
        delays = each.delays
        count = len(delays.stuck) or max(0, -delays.more)
        if count:
            due, _ = _names(facts, each)
            pairs = " ".join(f"0 {name}" for name in delays.stuck[:NAMES_SHOWN]) or "0 NAME"
            yield CheckResult(
                f"{plural(count, 'message')} among the {each.kind} on partition {each.partition} of"
                f" {each.topic} have no due time: they wait for ever",
                f"give them one: `redis-cli ZADD {due} {pairs}`",
                about=each.about,
                evidence={"partition": each.partition, "members": list(delays.stuck[:NAMES_SHOWN])},
            )


def _overdue(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    limit = facts.now_unix_ms - OVERDUE_SECONDS * 1000
    late: dict[tuple[str, str], list[_Set]] = {}
    for each in _sets(facts):
        due = each.delays.next_due_unix_ms
        if due is not None and due < limit:
            late.setdefault((each.topic, each.group), []).append(each)
    for (topic, _), some in late.items():
        oldest = min(each.delays.next_due_unix_ms or 0 for each in some)
        waiting = lasting((facts.now_unix_ms - oldest) / 1000)
        yield CheckResult(
            f"{some[0].kind} on {spans(each.partition for each in some)} of {topic} were due up to"
            f" {waiting} ago: nobody moves them on",
            "the housekeeper of the owner does that: see who owns the partitions with `streamqd"
            f" partitions {topic}`, start an instance, or look for `promote.` in its log",
            about=some[0].about,
            evidence={
                "partitions": [each.partition for each in some],
                "oldest_due_unix_ms": oldest,
                "delayed": sum(each.delays.count for each in some),
            },
        )


_NEEDS = (Need.UNITS,)
CHECKS = (
    Check(
        "partitions.delayed-lost",
        Severity.PROBLEM,
        "A due time has no message (retries, and sends with a delay).",
        _NEEDS,
        _lost,
    ),
    Check(
        "partitions.delayed-stuck",
        Severity.PROBLEM,
        "A delayed message has no due time.",
        _NEEDS,
        _stuck,
    ),
    Check(
        "partitions.overdue",
        Severity.PROBLEM,
        "A delayed message was due more than a minute ago.",
        _NEEDS,
        _overdue,
    ),
)
