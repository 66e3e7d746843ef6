"""Checks of schedules: missing messages, and conflicts with this configuration."""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin import schedules, topics
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import DiagnosisFacts, ScheduleFacts
from streamqd.admin.reading import ViewReader, server_unix_ms
from streamqd.admin.schedules import MISSING, ScheduleRow
from streamqd.config import Schedule
from streamqd.schedules.reconciliation import Declaration, find_name_conflict
from streamqd.store.schedules import FILE, ORPHANED, UNREADABLE
from streamqd.words import plural, rough_duration

SCHEDULES_MAX = 10_000  # maximum number of schedules that one check reads
NAMES_SHOWN = 8


def gather(reader: ViewReader, unseen: list[str], *, wanted: bool) -> ScheduleFacts:
    """Read the schedules if a check needs them.

    If there are too many, a sentence about the ones left out is added to `unseen`.
    """
    if not wanted:
        return ScheduleFacts()
    lines = schedules.index(reader)
    some = dict(sorted(lines.items())[:SCHEDULES_MAX])
    now = server_unix_ms(reader.store.connection)
    found = schedules.read_schedules(reader, some)
    specifications = [each.schedule for each in found if each.schedule is not None]
    if len(some) < len(lines):
        unseen.append(f"{len(lines) - len(some):,} schedules: the last by name")
    return ScheduleFacts(
        lines, [each.row(now) for each in found], _without_group(reader, specifications)
    )


def _without_group(reader: ViewReader, found: list[Schedule]) -> dict[str, str]:
    """Map each schedule whose `overlap` group does not read its topic to that group."""
    skipping = [each for each in found if each.overlap_group]
    counts = topics.read_counts(reader, sorted({each.topic for each in skipping}))
    readers = topics.read_groups(reader, {name: many for name, many in counts.items() if many})
    return {
        each.name: each.overlap_group
        for each in skipping
        if each.topic in readers and each.overlap_group not in readers[each.topic]
    }


def _by_topic(facts: DiagnosisFacts, *states: str) -> Iterator[tuple[str, list[ScheduleRow]]]:
    found: dict[str, list[ScheduleRow]] = {}
    for row in facts.schedules.rows:
        if row.state in states:
            found.setdefault(row.topic, []).append(row)
    yield from sorted(found.items())


def _describe(rows: list[ScheduleRow]) -> str:
    names = ", ".join(row.name for row in rows[:NAMES_SHOWN])
    more = f" and {len(rows) - NAMES_SHOWN} more" if len(rows) > NAMES_SHOWN else ""
    return f"{plural(len(rows), 'schedule')} of topic {rows[0].topic} ({names}{more})"


def _evidence(rows: list[ScheduleRow]) -> dict[str, object]:
    return {"schedules": [row.name for row in rows[:NAMES_SHOWN]], "count": len(rows)}


@check("schedules.orphaned", Severity.WARNING, Need.SCHEDULES)
def _orphaned(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """No live instance has declared a schedule for 10 minutes, so it sends nothing."""
    for topic, rows in _by_topic(facts, ORPHANED):
        yield CheckResult(
            f"no instance has declared {_describe(rows)} for 10 minutes: no message is sent",
            "start an instance whose configuration has them, or `streamqd schedule prune`",
            about=topic,
            evidence=_evidence(rows),
        )


@check("schedules.missing", Severity.WARNING, Need.SCHEDULES)
def _missing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The topic of a schedule was deleted, so the schedule sends nothing."""
    for topic, rows in _by_topic(facts, MISSING):
        yield CheckResult(
            f"the topic of {_describe(rows)} was deleted: no message is sent",
            "`streamqd schedule prune`, or restart an instance that declares them",
            about=topic,
            evidence=_evidence(rows),
        )


@check("schedules.unreadable", Severity.PROBLEM, Need.SCHEDULES)
def _unreadable(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The specification of a schedule cannot be read, so it sends nothing."""
    for topic, rows in _by_topic(facts, UNREADABLE):
        yield CheckResult(
            f"the specification of {_describe(rows)} cannot be read: no message is sent",
            "an instance that declares them repairs them within 10 s. Otherwise, run `streamqd"
            f" schedule remove {rows[0].name}`",
            about=topic,
            evidence=_evidence(rows),
        )


@check("schedules.refused", Severity.PROBLEM, Need.SCHEDULES)
def _refused(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The name of a schedule in this configuration is already in use."""
    for each in facts.settings.schedules:
        line = facts.schedules.lines.get(each.name)
        if line is None:
            continue
        reason = find_name_conflict(Declaration(each, facts.settings.daemon.fleet, FILE, 0), line)
        if reason:
            yield CheckResult(
                f"schedule {each.name} of this configuration is rejected: {reason}",
                f"rename it, or inspect the other one: `streamqd schedule show {each.name}`",
                about=each.name,
                evidence={"fleet": line.fleet, "origin": line.origin},
            )


@check("schedules.overlap", Severity.WARNING, Need.SCHEDULES)
def _overlap(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The group in `overlap` does not read the topic, so no tick is ever skipped."""
    by_topic: dict[tuple[str, str], list[ScheduleRow]] = {}
    for row in facts.schedules.rows:
        if group := facts.schedules.without_group.get(row.name):
            by_topic.setdefault((row.topic, group), []).append(row)
    for (topic, group), rows in sorted(by_topic.items()):
        yield CheckResult(
            f"{_describe(rows)} {'names' if len(rows) == 1 else 'name'} group {group} in `overlap`,"
            f" but {group} does not read {topic}, so no tick is ever skipped",
            f"correct `overlap`, or start an instance with a handler for {topic}/{group}",
            about=topic,
            evidence={**_evidence(rows), "group": group},
        )


@check("schedules.late", Severity.PROBLEM, Need.SCHEDULES)
def _late(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A schedule was due more than a minute ago, and no instance has sent its message."""
    late: dict[str, list[ScheduleRow]] = {}
    for row in facts.schedules.rows:
        if schedules.is_late(row, facts.now_unix_ms):
            late.setdefault(row.topic, []).append(row)
    for topic, rows in sorted(late.items()):
        oldest = min(row.due_unix_ms or 0 for row in rows)
        waiting = rough_duration((facts.now_unix_ms - oldest) / 1000)
        yield CheckResult(
            f"{_describe(rows)} were due up to {waiting} ago: no housekeeper sends them",
            "start an instance with `streamqd --config FILE`. If one runs, look for"
            " `housekeeper.failed` in its log",
            about=topic,
            evidence={**_evidence(rows), "oldest_due_unix_ms": oldest},
        )
