"""Find the problems that a report lists, and the changes since the last report.

This module does no I/O.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamqd.admin.checks import Severity
from streamqd.admin.condition import ALARMING, STEADY, STUCK_SECONDS, describe_condition
from streamqd.admin.fleet import GroupStatus, LaggingGroup, StatusView
from streamqd.words import plural, precise_duration

Topic = Mapping[str, Any]  # contents of a topic, as built by `report`

FAMILY = "streamqd-report/"
FORMAT = FAMILY + "2"
# Ages of the oldest unread message from which on it is a warning or a problem.
LATE_SECONDS, STALE_SECONDS = 30, 300
ENTRIES_MIN = 1_000  # number of entries below which an uneven distribution means nothing
_UNEVEN = 1.5  # minimum ratio of the fullest partition to the mean for a finding
_RELIEF = 0.7  # suggest more partitions if the fullest would shrink to at most this share
_SHARE = 0.1  # minimum fraction of all entries for a key to be mentioned
_NAME_MAX = 500  # maximum characters in the name of a measure
_NEUTRAL = ("entries of ", "partitions of ")  # measures whose growth is neither good nor bad
_ORDER = (Severity.PROBLEM, Severity.WARNING, Severity.NOTE)


@dataclass(frozen=True, slots=True)
class ReportFinding:
    """A problem of a topic, a group or the fleet, with the number of messages that it affects.

    `command` is a command that shows more about the problem, or fixes it. It is safe to paste: it
    contains only names of topics and groups and the operator's own directory, and never data from
    messages.
    """

    severity: Severity
    about: str
    text: str
    messages: int
    command: str


def assess_status(seen: StatusView, topics: Sequence[Topic]) -> dict[str, Any]:
    """Return lists of findings, groups, causes of dead letters, and topics, with the worst first.

    The result also contains `measures`, numbers with readable names, which the next report compares
    with its own.
    """
    names = [each["topic"] for each in topics]
    groups = [each for each in seen.groups if each.topic in names]
    found = [
        *_fleet(seen),
        *(each for group in groups for each in _group(seen, group)),
        *(each for topic in topics for each in _topic(topic, groups)),
    ]
    found.sort(key=lambda each: (_ORDER.index(each.severity), -each.messages))
    worst: dict[str, int] = {}
    for at, finding in enumerate(found):
        worst.setdefault(finding.about.partition("/")[0], at)
    causes = [{"topic": topic["topic"], **each} for topic in topics for each in topic["causes"]]
    return {
        "findings": [asdict(each) for each in found],
        "groups": [asdict(each) for each in sorted(groups, key=lambda each: -(each.lag or 0))],
        "causes": sorted(causes, key=lambda each: -each["dead_letters"]),
        "topics": sorted(
            topics, key=lambda each: (worst.get(each["topic"], len(found)), -each["entries"])
        ),
        "measures": _measures(groups, topics, causes),
    }


def cause_error(cause: Mapping[str, Any]) -> str:
    """Return a name for a dead letter's cause: the error class, or else the reason."""
    return str(cause["error_class"] or cause["reason"] or "unknown")


# --- problems -----------------------------------------------------------------------------------


def _fleet(seen: StatusView) -> Iterator[ReportFinding]:
    about = f"fleet {seen.fleet}"
    silent = [each.instance for each in seen.instances if each.state == "silent"]
    if not _has_live_instance(seen):
        waiting = sum(_count_waiting(each) for each in seen.groups)
        yield _finding(Severity.PROBLEM, about, "no instance is alive", waiting, "status")
    elif silent:
        what = f"{plural(len(silent), 'instance')} silent, such as {silent[0]}"
        yield _finding(Severity.PROBLEM, about, what, 0, "status")
    if seen.unreadable:
        what = f"{plural(len(seen.unreadable), 'value')} in Redis cannot be read"
        yield _finding(Severity.WARNING, about, what, 0, "doctor")


def _group(seen: StatusView, group: GroupStatus) -> Iterator[ReportFinding]:
    about, why = f"{group.topic}/{group.group}", f"why {group.topic}"
    waiting, run = _count_waiting(group), group.longest_run_seconds or 0.0
    unowned = group.condition in ("free", "expired")
    if group.condition in ALARMING and (_has_live_instance(seen) or not unowned):
        yield _finding(Severity.PROBLEM, about, _state(group), waiting, why)
    elif group.condition in ("stopped", "paused") and waiting:
        yield _finding(Severity.WARNING, about, _state(group), waiting, why)
    elif run >= STUCK_SECONDS:
        what = f"has been running one message for {precise_duration(run)}"
        yield _finding(Severity.PROBLEM, about, what, waiting, why)
    for unread in seen.lagging:
        if (unread.topic, unread.group) == (group.topic, group.group):
            yield from _late_finding(seen.now_unix_ms, about, unread)
    if group.waiting_retries:
        verb = "waits for its" if group.waiting_retries == 1 else "wait for their"
        what = f"{plural(group.waiting_retries, 'message')} {verb} next attempt"
        command = f"retry list {group.topic} {group.group}"
        yield _finding(Severity.WARNING, about, what, group.waiting_retries, command)


def _state(group: GroupStatus) -> str:
    affected, size = group.condition_partitions, group.partitions
    where = f" in {affected} of {size} partitions" if affected < size else ""
    return f"{describe_condition(group.condition)}{where}{group.reason and f': {group.reason}'}"


def _late_finding(now: int, about: str, unread: LaggingGroup) -> Iterator[ReportFinding]:
    age = 0.0 if unread.since_unix_ms is None else (now - unread.since_unix_ms) / 1000
    if age < LATE_SECONDS:
        return
    lag = "more than 1,000 messages" if unread.lag is None else plural(unread.lag, "message")
    what = (
        f"{lag} unread, the oldest for"
        f" {precise_duration(age)}{_trend(unread.lag_per_second or 0.0)}"
    )
    severity = Severity.PROBLEM if age >= STALE_SECONDS else Severity.WARNING
    command = f"group describe {unread.topic} {unread.group}"
    yield _finding(severity, about, what, 1_000 if unread.lag is None else unread.lag, command)


def _count_waiting(group: GroupStatus) -> int:
    return (group.lag or 0) + group.pending


def _has_live_instance(seen: StatusView) -> bool:
    return any(each.state != "silent" for each in seen.instances)


def _trend(slope: float) -> str:
    if abs(slope) < STEADY:
        return ""
    return f", {'growing' if slope > 0 else 'shrinking'} by {abs(slope):,.1f}/s"


def _topic(topic: Topic, groups: Sequence[GroupStatus]) -> Iterator[ReportFinding]:
    name, dead_letters, fields = topic["topic"], topic["dead_letters"], topic["fields"]
    if dead_letters:
        worst = topic["causes"][0]
        share = worst["dead_letters"] / dead_letters
        what = f"{plural(dead_letters, 'dead letter')}, {share:.0%} of them "
        what += f"{cause_error(worst)} in group {worst['group'] or 'unknown'}"
        yield _finding(Severity.WARNING, name, what, dead_letters, f"dlq stats {name}")
    if fields and fields["bad"]:
        verb = "does" if fields["bad"] == 1 else "do"
        what = f"{plural(fields['bad'], 'payload')} {verb} not fit the schema"
        command, held = f"tail {name}", topic.get("quarantine")
        if held:
            what += f", and the quarantine holds {plural(held['rows'], 'row')}"
            if reasons := held.get("reasons"):
                what += f", {reasons[0]['rows'] / held['rows']:.0%} of them: {reasons[0]['reason']}"
            query = f'"SELECT reason, count(*) FROM {held["view"]} GROUP BY reason"'  # noqa: S608
            command = f"pipeline sql --archive {shlex.quote(held['archive'])} {query}"
        yield _finding(Severity.WARNING, name, what, fields["bad"], command)
    if topic["entries"] and topic["live"] and name not in {each.topic for each in groups}:
        what, command = "no group reads it", f"topic describe {name}"
        yield _finding(Severity.NOTE, name, what, topic["entries"], command)
    yield from _skew(topic)


def _skew(topic: Topic) -> Iterator[ReportFinding]:
    """Yield a finding with a remedy if one partition is much fuller than the others."""
    name, total, size = topic["topic"], topic["entries"], topic["partition_count"]
    full = max(topic["partitions"], key=lambda each: each["entries"], default={"entries": 0})
    most = full["entries"]
    if total < ENTRIES_MIN or size < 2 or most < _UNEVEN * total / size:
        return
    what = f"partition {full['partition']} of {size} has {most / total:.0%} of the entries"
    then, command = _fullest(topic, 2 * size), f"partitions {name}"
    hottest = topic["keys"][0]["entries"] if topic["keys"] else 0
    if hottest >= max(_SHARE * total, then / 2):
        what += f", and one key has {hottest / total:.0%}; use finer keys, such as user-7/orders"
    elif then <= _RELIEF * most:
        what += f". With {2 * size} partitions, the fullest would have {then / total:.0%}"
        command = f"topic grow {name} {2 * size}"
    yield _finding(Severity.NOTE, name, what, most, command)


def _fullest(topic: Topic, partitions: int) -> float:
    """Estimate how many entries the fullest of this number of partitions would have.

    The keys with the most entries are assigned to partitions by their hash. All other entries are
    assumed to be spread evenly.
    """
    held = [0] * partitions
    for key in topic["keys"]:
        held[key["crc32"] % partitions] += key["entries"]
    return max(held) + float(topic["entries"] - sum(held)) / partitions


def _finding(severity: Severity, about: str, what: str, messages: int, verb: str) -> ReportFinding:
    return ReportFinding(severity, about, what, messages, f"streamqd {verb}")


# --- changes ------------------------------------------------------------------------------------


def _measures(
    groups: Sequence[GroupStatus], topics: Sequence[Topic], causes: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    found = {}
    for topic in topics:
        found[f"entries of {topic['topic']}"] = topic["entries"]
        found[f"partitions of {topic['topic']}"] = topic["partition_count"]
    for group in groups:
        found[f"{group.topic}/{group.group}: retries"] = group.waiting_retries
        if group.lag is not None:
            found[f"{group.topic}/{group.group}: unread"] = group.lag
    for cause in causes:
        name = f"{cause['topic']}/{cause['group']}: dead letters with {cause_error(cause)}"
        found[name] = found.get(name, 0) + cause["dead_letters"]
    return found


def compare_reports(last: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `changes` since the last report, with the worst first, and `compared_with`.

    `compared_with` is the time of the last report (Unix ms), or a sentence that explains why that
    report cannot be used. Any user may have edited its file, so only numbers with short names are
    taken from it.
    """
    why = ""
    if last is None:
        why = "this is the first report in this directory"
    elif last.get("format") != FORMAT:
        why = "another version of streamqd wrote the last report"
    elif last.get("asked") != now["asked"]:
        why = "the last report in this directory covers other topics, times or files"
    elif not (isinstance(last.get("measures"), dict) and _is_measure("", last.get("made_unix_ms"))):
        why = "the last report cannot be read"
    if last is None or why:
        return {"compared_with": why, "changes": []}
    before = {name: each for name, each in last["measures"].items() if _is_measure(name, each)}
    both: dict[str, int] = {**before, **now["measures"]}
    rows = [
        {"measure": name, "before": before.get(name, 0), "now": now["measures"].get(name, 0)}
        for name in both
    ]
    changed = [each for each in rows if each["before"] != each["now"]]
    changed.sort(key=lambda row: (row["measure"].startswith(_NEUTRAL), row["before"] - row["now"]))
    return {"compared_with": last["made_unix_ms"], "changes": changed}


def _is_measure(name: str, number: object) -> bool:
    return len(name) <= _NAME_MAX and type(number) is int and abs(number) < 1 << 53
