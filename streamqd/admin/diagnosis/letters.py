"""Checks of dead letters: too many, too old, and more of them every minute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamqd.admin.diagnosis.declaration import Check, CheckResult, Need, Severity, lasting, spans
from streamqd.admin.diagnosis.facts import DiagnosisFacts

MANY = 1_000
LATE_SECONDS = 3_600.0  # beyond dlq_retention: they are deleted in bounded steps
GROWING = 0.01  # letters per second, an average of about 10 s


def _many(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    counts: dict[str, int] = {}
    for each in facts.partitions:
        if each.figures is not None:
            counts[each.topic] = counts.get(each.topic, 0) + each.figures.dead
    for topic, count in counts.items():
        if count > MANY:
            yield CheckResult(
                f"{topic} has {count:,} dead letters, which wait for a person and take memory",
                f"`streamqd dlq stats {topic}` groups them by cause; then `streamqd dlq replay"
                f" {topic}` or `streamqd dlq purge {topic}`",
                about=topic,
                evidence={"dead_letters": count},
            )


def _old(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    for topic in facts.topics:
        age = topic.holds.dlq_retention
        if age is None:
            continue
        limit = facts.now_unix_ms - (age + LATE_SECONDS) * 1000
        old = {
            each.partition: each.oldest_letter_unix_ms
            for each in facts.partitions
            if each.topic == topic.name
            and each.oldest_letter_unix_ms is not None
            and each.oldest_letter_unix_ms < limit
        }
        if old:
            yield CheckResult(
                f"{spans(old)} of {topic.name} hold dead letters older than its dlq_retention of"
                f" {lasting(age)}: nobody deletes them",
                "the housekeeper of an owner does that: see who owns the partitions with `streamqd"
                f" partitions {topic.name}`, or `streamqd dlq purge {topic.name} --older-than"
                f" {age:g}s`",
                about=topic.name,
                evidence={"oldest_unix_ms": {str(n): at for n, at in old.items()}},
            )


def _growing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    rates: dict[tuple[str, str], float] = {}
    for summary in facts.fleet.summaries.values():
        for unit in units_of(summary):
            told = unit.get("rates")
            rate = told.get("dead") if isinstance(told, dict) else None
            if isinstance(rate, int | float):
                pair = str(unit.get("topic")), str(unit.get("group"))
                rates[pair] = rates.get(pair, 0.0) + rate
    for (topic, group), rate in rates.items():
        if rate >= GROWING:
            yield CheckResult(
                f"{group} makes {rate * 60:,.1f} dead letters of {topic} in a minute just now",
                f"`streamqd dlq stats {topic}` says of what they died; `streamqd pause"
                f" {topic}/{group}` stops it until that is mended",
                about=f"{topic}/{group}",
                evidence={"dead_per_second": round(rate, 3)},
            )


def units_of(summary: Any) -> list[dict[str, Any]]:
    """The units of a published summary, which may be of another version."""
    units = summary.get("units")
    return [each for each in units if isinstance(each, dict)] if isinstance(units, list) else []


CHECKS = (
    Check(
        "partitions.dead-many",
        Severity.WARNING,
        "A topic has more than 1,000 dead letters.",
        (Need.UNITS,),
        _many,
    ),
    Check(
        "partitions.dead-old",
        Severity.WARNING,
        "Dead letters are an hour and more beyond dlq_retention.",
        (Need.UNITS,),
        _old,
    ),
    Check(
        "partitions.dead-growing",
        Severity.WARNING,
        "A group makes dead letters just now.",
        (Need.FLEET,),
        _growing,
    ),
)
