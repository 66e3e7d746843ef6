"""The fleet at a glance for all pages: what needs somebody, and a row for each group.

Built from the views that `status` and `top` print. `read` reads Redis, the rest is pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamqd.admin import fleet as fleets
from streamqd.admin import live
from streamqd.admin.condition import ALARMING, in_words
from streamqd.admin.fleet import GroupStatus, InstanceRow, StatusView
from streamqd.admin.live import LiveUnit, LiveView
from streamqd.admin.published import Fleet
from streamqd.words import age, plural

ALARM, WARN, NOTE = "alarm", "warn", "note"
_ORDER = (ALARM, WARN, NOTE)
_COMMAND = re.compile(r"[;:] (?:see |gone for good: )?`([^`]+)`$")
_UNIT = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*)/(\d+)/([A-Za-z0-9._:-]+)")


@dataclass(frozen=True, slots=True)
class Trouble:
    """One sentence about the fleet. `level` is alarm (needs somebody), warn (will) or note.

    `topic`, `partition`, `group` and `kind` (assignment, group, dead, fleet, schedules, '') say
    where it is mended, `command` the command that does it, '' without one.
    """

    level: str
    text: str
    command: str = ""
    kind: str = ""
    topic: str = ""
    group: str = ""
    partition: int | None = None
    since_unix_ms: int | None = None


@dataclass(frozen=True, slots=True)
class GroupNow:
    """A group over all partitions. Rates are per second, None is unknown.

    `failed_share` is the part of the runs of the last 10 s that failed. `level` is alarm, warn or
    '' for a condition that is as it should be, and `condition` the condition in words.
    """

    topic: str
    group: str
    partitions: int
    owned: int
    level: str
    condition: str
    reason: str
    lag: int | None
    pending: int
    delayed: int
    dead: int | None
    arriving: float | None
    acked: float | None
    failed: float | None
    failed_share: float | None
    oldest_unix_ms: int | None
    lag_per_second: float | None


@dataclass(frozen=True, slots=True)
class FleetNow:
    """One look at the fleet."""

    fleet: str
    now_unix_ms: int
    troubles: list[Trouble]
    groups: list[GroupNow]
    instances: list[InstanceRow]
    units: list[LiveUnit]
    arriving: float
    acked: float
    failed: float
    lag: int
    lag_exact: bool
    dead: int
    oldest_unix_ms: int | None

    @property
    def alarms(self) -> int:
        """The number of troubles that need somebody."""
        return sum(each.level == ALARM for each in self.troubles)


def read(fleet: Fleet) -> FleetNow:
    """Read the fleet. Raises RedisUnavailable, RedisRefused."""
    status = fleets.status(fleet)
    return made(status, live.look(fleet))


def made(status: StatusView, seen: LiveView) -> FleetNow:
    """Join what `status` and `top` show."""
    by_group: dict[tuple[str, str], list[LiveUnit]] = {}
    for unit in seen.assignments:
        by_group.setdefault((unit.topic, unit.group), []).append(unit)
    groups = [_group(each, by_group.get((each.topic, each.group), [])) for each in status.groups]
    groups.sort(key=lambda each: (_rank(each.level), -(each.lag or 0), each.topic, each.group))
    oldest = [each.oldest_unix_ms for each in groups if each.oldest_unix_ms is not None]
    return FleetNow(
        fleet=status.fleet,
        now_unix_ms=status.now_unix_ms,
        troubles=_troubles(status, groups),
        groups=groups,
        instances=status.instances,
        units=seen.assignments,
        arriving=seen.totals.arriving,
        acked=seen.totals.acked,
        failed=seen.totals.failed,
        lag=sum(each.lag or 0 for each in groups),
        lag_exact=all(each.lag is not None for each in groups),
        dead=sum(status.dead_letters.values()),
        oldest_unix_ms=min(oldest, default=None),
    )


def _rank(level: str) -> int:
    return _ORDER.index(level) if level in _ORDER else len(_ORDER)


def _known(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return sum(found) if found else None


def _group(row: GroupStatus, units: Sequence[LiveUnit]) -> GroupNow:
    acked, failed = _known(u.acked for u in units), _known(u.failed for u in units)
    runs = (acked or 0.0) + (failed or 0.0)
    level = ""
    if row.condition in ALARMING:
        level = NOTE if row.condition in ("paused", "stopped") else ALARM
    elif failed and failed / runs >= 0.5:
        level = WARN
    word = in_words(row.condition)
    if row.condition_partitions < row.partitions and level:
        word += f" {row.condition_partitions}/{row.partitions}"
    return GroupNow(
        topic=row.topic,
        group=row.group,
        partitions=row.partitions,
        owned=row.owned,
        level=level,
        condition=word,
        reason=row.reason,
        lag=row.lag,
        pending=row.pending,
        delayed=row.delayed,
        dead=row.dead_letters,
        arriving=_known(u.arriving for u in units),
        acked=acked,
        failed=failed,
        failed_share=(failed or 0.0) / runs if runs else None,
        oldest_unix_ms=row.oldest_unix_ms,
        lag_per_second=_known(u.lag_per_second for u in units),
    )


def _troubles(status: StatusView, groups: Sequence[GroupNow]) -> list[Trouble]:
    found = [_trouble(text, groups) for text in status.problems]
    for each in status.directives:
        if each.kind in ("pause", "stop", "drain"):
            verb = {"pause": "paused", "stop": "stopped", "drain": "drained"}[each.kind]
            target = "everything" if each.target == "*/*/*" else each.target.replace("/*", "")
            text = f"{target} is {verb} by {each.by}{f': {each.why}' if each.why else ''}"
            place = _place(target, groups)
            found.append(Trouble(NOTE, text, since_unix_ms=each.at_unix_ms, **place))
    found += [Trouble(WARN, str(row), "streamqd doctor", "doctor") for row in status.unreadable[:5]]
    for behind in status.lagging:
        slope = behind.lag_per_second
        if slope is not None and slope > 0.5 and behind.lag:
            text = (
                f"{behind.topic}/{behind.group} falls back: {behind.lag:,} unread, growing by"
                f" {slope:,.1f}/s"
            )
            found.append(
                Trouble(
                    WARN, text, "", "group", behind.topic, behind.group, None, behind.since_unix_ms
                )
            )
    return sorted(found, key=lambda each: (_rank(each.level), -(each.since_unix_ms or 0)))


def _trouble(sentence: str, groups: Sequence[GroupNow]) -> Trouble:
    """Read a sentence of `status`: where it is mended, by which command, and how grave it is."""
    match = _COMMAND.search(sentence)
    text, command = (sentence[: match.start()], match[1]) if match else (sentence, "")
    if command.startswith("streamqd dlq"):
        topic = command.rpartition(" ")[2]
        return Trouble(WARN, text, command, "dead", topic)
    if text.startswith("schedules:"):
        return Trouble(WARN, text, command, "schedules")
    place = _place(text, groups)
    if place:
        oldest = next(
            (
                each.oldest_unix_ms
                for each in groups
                if (each.topic, each.group) == (place["topic"], place["group"])
            ),
            None,
        )
        slow = "has been running" in text or "% of the runs" in text
        return Trouble(WARN if slow else ALARM, text, command, since_unix_ms=oldest, **place)
    return Trouble(ALARM, text, command, "fleet")


def _place(text: str, groups: Sequence[GroupNow]) -> dict[str, Any]:
    """Return the assignment or group that a text names first, {} for none."""
    names = {(each.topic, each.group) for each in groups}
    for topic, partition, group in _UNIT.findall(text):
        if (topic, group) in names:
            return {
                "kind": "assignment", "topic": topic, "group": group, "partition": int(partition)
            }  # fmt: skip
    for topic, group in sorted(names, key=lambda pair: -len("/".join(pair))):
        if f"{topic}/{group}" in text:
            return {"kind": "group", "topic": topic, "group": group}
    return {}


def silence(seen: FleetNow) -> str:
    """Return one calm sentence about a fleet without trouble."""
    instances = plural(len(seen.instances), "instance")
    groups = plural(len(seen.groups), "group")
    if seen.oldest_unix_ms is None:
        return f"{instances}, {groups}, no message waits."
    waiting = age(max(0, seen.now_unix_ms - seen.oldest_unix_ms))
    return f"{instances}, {groups}; the oldest waiting message is {waiting} old."
