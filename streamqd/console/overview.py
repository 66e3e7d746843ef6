"""The state of the fleet for all pages: its issues, and a row for each group.

`read` reads a snapshot of the fleet and, every 10 seconds, also the facts that take longer to read.
The other functions are pure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from streamqd.admin import diagnosis, schedules, snapshot, topics, why
from streamqd.admin import fleet as fleets
from streamqd.admin.assignments import AssignmentRow, RecentFailure, by_group
from streamqd.admin.checks import Finding, Need, Severity, run_checks
from streamqd.admin.condition import STEADY, describe_condition
from streamqd.admin.diagnosis.fleet import PAUSED_SECONDS
from streamqd.admin.fleet import GroupStatus
from streamqd.admin.instances import no_instances
from streamqd.admin.notices import INSTANCE_CHECKS
from streamqd.admin.published import Fleet
from streamqd.admin.reading import Unreadable, ViewReader
from streamqd.admin.schedules import ScheduleTotals
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.config import Settings
from streamqd.console import sources
from streamqd.console.formats import sentence
from streamqd.console.sources import NO_SOURCES, Sources
from streamqd.model import Assignment
from streamqd.store.directives import Directive
from streamqd.words import age, count, plural, precise_duration, short_duration

Result = TypeVar("Result")

SLOW_SECONDS = 10.0  # seconds between two reads of schedules and of dead letters by topic
NAMED = 4  # topics with dead letters that the issue names
FAILING = "failing"  # the condition of a group whose runs are failing
BEHIND = "behind"  # the condition of a group whose workers are ready but too slow
ALARM, WARN, NOTE = "alarm", "warn", "note"
_LEVELS = (ALARM, WARN, NOTE)
# The level for each severity of `why` and `doctor`. Each level has a color.
LEVELS: Mapping[Severity | None, str] = {
    Severity.PROBLEM: ALARM,
    Severity.WARNING: WARN,
    Severity.NOTE: NOTE,
    None: "",
}
OF_CHECKS = {each.id: LEVELS[each.severity] for each in diagnosis.CHECKS}  # level by check ID
_CHEAP = {Need.SERVER, Need.FLEET, Need.OUTBOXES}
# The findings of these checks are already shown as issues of an instance, directive or assignment.
_ELSEWHERE = {each.id for each in INSTANCE_CHECKS} | {
    *("fleet.paused", "fleet.stopped", "fleet.crash-loop", "fleet.assignment-failed"),
    *("fleet.loop-blocked", "fleet.directives-unreadable", "partitions.dead-letters-growing"),
}
_DOCTOR_CHECKS = [
    each for each in diagnosis.CHECKS if set(each.needs) <= _CHEAP and each.id not in _ELSEWHERE
]


@dataclass(frozen=True, slots=True)
class Issue:
    """A sentence about a problem of the fleet, and its remedy. Both contain code in backticks.

    `level` is alarm (a problem), warn (a warning) or note. `kind` selects the page with the
    details: assignment, group, dead, dead_topics, fleet, schedules or doctor. For doctor, `area`
    selects the checks.
    """

    level: str
    text: str
    fix: str = ""
    kind: str = ""
    topic: str = ""
    group: str = ""
    partition: int | None = None
    since_unix_ms: int | None = None
    area: str = ""

    @property
    def page(self) -> tuple[str, dict[str, object]]:
        """The view that shows the details, and its parameters."""
        topic, group = self.topic, self.group
        if self.kind == "assignment":
            return "assignment", {"topic": topic, "partition": self.partition, "group": group}
        if self.kind == "group":
            return "topic", {"topic": topic, "group": group}
        if self.kind == "dead":
            return "dead", {"topic": topic}
        if self.kind == "doctor":
            return "doctor", {"area": self.area}
        return self.kind, {}


@dataclass(frozen=True, slots=True)
class GroupNow(GroupStatus):
    """A group, summed over all partitions. Rates are per second, and None means unknown.

    `level` is alarm, warn or note if the `condition` (in words) is unusual, and otherwise ''. If
    the server does not count the lag, `lag` is None, and `least_lag` is a lower bound.
    `failed_share` is the share of recent runs that failed, in which newer runs weigh more.
    `failure` is the latest failure of the last 5 minutes. `mean_seconds` is the mean duration of a
    run.
    """

    level: str
    least_lag: int
    arriving: float | None
    acked: float | None
    failed: float | None
    failed_share: float | None
    failure: RecentFailure | None
    mean_seconds: float | None
    oldest_unread_unix_ms: int | None
    lag_per_second: float | None

    @property
    def growth(self) -> float:
        """The change of the lag per second.

        If the lag is unknown, it is computed from the rates.
        """
        if self.lag is not None:
            return self.lag_per_second or 0.0
        return (self.arriving or 0.0) - (self.acked or 0.0) - (self.failed or 0.0)

    def is_behind(self, now_unix_ms: int) -> bool:
        """Return True if the lag is growing, or a message has been unread for `why.LATE_MS`."""
        since = self.oldest_unread_unix_ms
        late = since is not None and now_unix_ms - since >= why.LATE_MS
        return bool(self.least_lag) and (late or self.growth > STEADY)


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """Facts that are read every 10 seconds.

    `dead` maps each topic with dead letters to their number.

    `findings` come from those checks of `doctor` that are cheap and do not connect to databases.
    `sources` holds the known sources of topics.
    """

    until: float  # time (monotonic) from which on the facts are read again
    dead: Mapping[str, int]
    schedules: ScheduleTotals
    findings: Sequence[Finding]
    sources: Sources = NO_SOURCES


@dataclass(frozen=True, slots=True)
class FleetNow:
    """The fleet's state at one point in time.

    `snapshot` has a row for each assignment. `levels` maps each assignment to its level: alarm,
    warn, note, or '' if its state is normal. `taken_at` is the local time of the snapshot (seconds,
    monotonic). `cache` contains more data for live pages, which was read only once for this
    snapshot.
    """

    snapshot: FleetSnapshot
    slow: SlowFacts
    issues: Sequence[Issue]
    groups: Sequence[GroupNow]
    levels: Mapping[Assignment, str]
    taken_at: float
    cache: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    @property
    def now_unix_ms(self) -> int:
        """The current server time in unix ms, estimated from the snapshot and its age."""
        return self.snapshot.now_unix_ms + round((time.monotonic() - self.taken_at) * 1000)

    def read_once(self, key: Hashable, read: Callable[[], Result]) -> Result:
        """Return the result of `read` for a key.

        Pages that use this snapshot share the first result.

        If threads request a new key at the same time, each of them may call `read`.
        """
        if key not in self.cache:
            self.cache.setdefault(key, read())
        result: Result = self.cache[key]
        return result

    def count(self, level: str) -> int:
        """Return the number of issues at this level."""
        return sum(each.level == level for each in self.issues)

    @property
    def topics(self) -> list[str]:
        """The topics that at least one group reads, sorted by name."""
        return sorted({each.topic for each in self.snapshot.assignments})

    @property
    def dead(self) -> int:
        """The total number of dead letters."""
        return sum(self.slow.dead.values())

    @property
    def oldest_unix_ms(self) -> int | None:
        """The write time of the oldest unread or pending message (unix ms), or None."""
        return _minimum(each.oldest_unix_ms for each in self.groups)

    def rows(self, topic: str, group: str) -> list[AssignmentRow]:
        """Return the assignments of a group."""
        wanted = (topic, group)
        return [each for each in self.snapshot.assignments if (each.topic, each.group) == wanted]


def read(fleet: Fleet, settings: Settings, before: FleetNow | None = None) -> FleetNow:
    """Read the state of the fleet.

    `before` is the previous result. Its slow facts are used again until they are 10 seconds old.
    Raises RedisUnavailableError and RedisResponseError.
    """
    taken = time.monotonic()
    seen = snapshot.read(fleet)
    slow = before.slow if before is not None else None
    if slow is None or time.monotonic() > slow.until:
        slow = _read_slow_facts(fleet, settings, seen)
    return derive(seen, slow, taken)


def _read_slow_facts(fleet: Fleet, settings: Settings, seen: FleetSnapshot) -> SlowFacts:
    reader, dead = ViewReader(fleet.store), Counter[str]()
    for (topic, _), figures in topics.read_figures(reader, seen.topics).items():
        dead[topic] += figures.dead
    timed, rows = schedules.count_schedules(reader, None, seen.now_unix_ms)
    # A read-only console may use a Redis user who lacks the permission for some commands about the
    # server. These checks are left out, because ACL LOG would record each attempt.
    left_out = {Need.SERVER} if settings.console.read_only else set()
    checks = [each for each in _DOCTOR_CHECKS if left_out.isdisjoint(each.needs)]
    report = diagnosis.examine(fleet.store.connection, settings, checks)
    configured = [each.name for each in settings.outboxes]
    found = sources.read(reader, sorted(seen.topics), rows, configured)
    until = time.monotonic() + SLOW_SECONDS
    return SlowFacts(until, dict(+dead), timed, report.findings, found)


def derive(seen: FleetSnapshot, slow: SlowFacts, taken: float) -> FleetNow:
    """Derive the issues and the groups from the facts that were read."""
    slow = replace(slow, dead=_dead_by_topic(seen, slow.dead))
    first = {found.row.assignment: found for found in why.problems(seen)}
    words = {assignment: found.cause.word for assignment, found in first.items()}
    causes = why.summarize(first.values())
    levels = {
        row.assignment: LEVELS[why.grade(row, words.get(row.assignment, ""))]
        for row in seen.assignments
    }
    rows = {pair: list(some) for pair, some in by_group(seen.assignments).items()}
    groups = []
    for each in fleets.group_rows(seen.assignments, seen.state.control):
        some = rows[each.topic, each.group]
        worst = min(some, key=lambda row: _rank(levels[row.assignment]))
        found = _group(each, some, levels[worst.assignment], words.get(worst.assignment, ""))
        groups.append(_warn_of_lag(found, seen.now_unix_ms))
    groups.sort(key=lambda each: (_rank(each.level), -each.least_lag, each.topic, each.group))
    explained = {(each.row.topic, each.row.group) for each, _ in causes}
    issues = [
        *_instance_issues(seen),
        *(_cause_issue(each, text) for each, text in causes),
        *_failure_issues(groups, explained),
        *_lag_issues(groups, explained, seen.now_unix_ms),
        *_dead_letter_issues(slow.dead),
        *_schedule_issues(slow.schedules),
        *_doctor_issues(slow.findings),
        *_unreadable_issues(seen.unreadable[:5]),
        *(_directive_issue(*each, seen.now_unix_ms) for each in seen.directives),
    ]
    issues.sort(key=lambda each: (_rank(each.level), -(each.since_unix_ms or 0)))
    return FleetNow(seen, slow, issues, groups, levels, taken)


def _dead_by_topic(seen: FleetSnapshot, counted: Mapping[str, int]) -> dict[str, int]:
    """Return the number of dead letters by topic, without topics that have none.

    The snapshot's number is used if it is known for all partitions, and otherwise the one in
    `counted`.
    """
    known: dict[str, dict[int, int | None]] = {}
    for row in seen.assignments:
        known.setdefault(row.topic, {})[row.partition] = row.partition_dead_letters
    found = dict(counted)
    for topic, numbers in known.items():
        if None not in numbers.values():
            found[topic] = sum(number or 0 for number in numbers.values())
    return {topic: number for topic, number in found.items() if number}


def _rank(level: str) -> int:
    return _LEVELS.index(level) if level else len(_LEVELS)


def _sum(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return sum(found) if found else None


def _minimum(values: Iterable[int | None]) -> int | None:
    return min((each for each in values if each is not None), default=None)


# --- groups ---------------------------------------------------------------------------------------


def _group(status: GroupStatus, rows: Sequence[AssignmentRow], level: str, cause: str) -> GroupNow:
    acked, failed = _sum(row.acked for row in rows), _sum(row.failed for row in rows)
    share = why.share_failing(acked, failed)
    failures = [each for row in rows if (each := row.last_failure) is not None]
    word = describe_condition(status.condition)
    if status.condition == "ready" and cause:
        # The cause applies to only some of the partitions, or it is not one of the conditions.
        word = cause.replace("-", " ")
    if level and status.condition_partitions < status.partitions:
        word += f" {status.condition_partitions}/{status.partitions}"
    if share >= why.FAILING_SHARE and failures and status.condition == "ready":
        word, level = FAILING, level or LEVELS[why.severity("failing")]
    return GroupNow(
        **asdict(replace(status, condition=word)),
        level=level,
        least_lag=sum(max(row.lag or 0, row.lag_at_least) for row in rows),
        arriving=_sum(row.arriving for row in rows),
        acked=acked,
        failed=failed,
        failed_share=share if acked or failed else None,
        failure=min(failures, key=lambda each: each.seconds_ago, default=None),
        mean_seconds=max((row.mean_seconds or 0.0 for row in rows), default=0.0) or None,
        oldest_unread_unix_ms=_minimum(row.oldest_unread_unix_ms for row in rows),
        lag_per_second=_sum(row.lag_per_second for row in rows),
    )


def _warn_of_lag(group: GroupNow, now_unix_ms: int) -> GroupNow:
    """Return the group. If it is behind and has no other issue, add a warning."""
    if group.level or not group.is_behind(now_unix_ms):
        return group
    word = BEHIND if group.condition == "ready" else group.condition
    return replace(group, level=LEVELS[why.severity("lagging")], condition=word)


# --- issues -------------------------------------------------------------------------------------


def _instance_issues(seen: FleetSnapshot) -> Iterator[Issue]:
    if all(each.state == "silent" for each in seen.instances):
        found = no_instances(seen.fleet)
        yield Issue(ALARM, found.text, found.fix, "fleet")
    silent = {
        each.instance: each.heartbeat_unix_ms for each in seen.instances if each.state == "silent"
    }
    for each in run_checks(INSTANCE_CHECKS, seen):
        if each.severity != Severity.NOTE:
            since = silent.get(each.about)
            yield Issue(_level(each), each.text, each.fix, "fleet", since_unix_ms=since)


def _level(finding: Finding) -> str:
    return LEVELS[Severity(finding.severity)]


def _doctor_issues(findings: Sequence[Finding]) -> Iterator[Issue]:
    """Yield all problems, all findings about outboxes, and a sentence about the other warnings."""
    others: dict[str, int] = Counter()
    for each in findings:
        about = f"{each.about}: " if each.about and each.about not in each.text else ""
        if each.severity == Severity.NOTE:
            continue
        if each.severity == Severity.PROBLEM or each.area == "outboxes":
            yield Issue(_level(each), f"{about}{each.text}", each.fix, "doctor", area=each.area)
        else:
            others[each.check] += 1
    if others:
        names = ", ".join(f"`{name}`" for name in others)
        text = f"`doctor` has {plural(sum(others.values()), 'more warning')}: {names}"
        yield Issue(WARN, text, kind="doctor")


def _cause_issue(found: why.AssignmentCause, text: str) -> Issue:
    assignment, cause = found.row, found.cause
    level = LEVELS[why.grade(assignment, cause.word)]
    return Issue(
        level, text, cause.advice, "assignment", assignment.topic,
        assignment.group, assignment.partition,
        found.row.oldest_unix_ms,
    )  # fmt: skip


def _failure_issues(groups: Sequence[GroupNow], explained: set[tuple[str, str]]) -> Iterator[Issue]:
    """Yield an issue for each group most of whose recent runs failed."""
    for each in groups:
        if each.condition != FAILING or (each.topic, each.group) in explained:
            continue
        text = f"{each.failed_share or 0:.0%} of the last runs of {each.topic}/{each.group} failed"
        if each.failure is not None:
            text += (
                f"; last: {each.failure.error}, {precise_duration(each.failure.seconds_ago)} ago"
            )
        fix = "fix the handler or its dependency"
        if each.dead_letters:
            fix += f"; `streamqd dlq stats {each.topic}` counts its dead letters by error"
        elif each.waiting_retries:
            fix += f"; `streamqd retry list {each.topic} {each.group}` shows the messages"
        level = LEVELS[why.severity("failing")]
        yield Issue(level, text, fix, "group", each.topic, each.group)


def _lag_issues(
    groups: Sequence[GroupNow], explained: set[tuple[str, str]], now_unix_ms: int
) -> Iterator[Issue]:
    """Yield an issue for each group that is behind, unless another issue already explains this."""
    for each in groups:
        pair = (each.topic, each.group)
        level = LEVELS[why.severity("lagging")]
        if each.level != level or pair in explained or not each.is_behind(now_unix_ms):
            continue
        unread = f"{each.least_lag:,}{' or more' if each.lag is None else ''} unread"
        text = f"{each.topic}/{each.group} lags: {unread}"
        if each.arriving is not None and each.acked is not None:
            text += f", {each.arriving:,.1f}/s arrive and {each.acked:,.1f}/s are handled"
        if each.mean_seconds is not None:
            text += f", a run takes {short_duration(each.mean_seconds)}"
        fix = why.lag_advice(each.least_lag, each.growth)
        yield Issue(
            level, text, fix, "group", each.topic, each.group, None, each.oldest_unread_unix_ms
        )


def _dead_letter_issues(dead: Mapping[str, int]) -> Iterator[Issue]:
    """Yield one sentence about the dead letters of all topics."""
    by_count = sorted(dead.items(), key=lambda pair: -pair[1])
    fix = "check their causes, then replay or purge them"
    level = OF_CHECKS["partitions.dead-letters-many"]
    if len(by_count) == 1:
        [(topic, number)] = by_count
        yield Issue(level, f"{plural(number, 'dead letter')} in {topic}", fix, "dead", topic)
    elif by_count:
        parts = [f"{number:,} in {topic}" for topic, number in by_count[:NAMED]]
        if len(by_count) > NAMED:
            parts.append(f"{sum(number for _, number in by_count[NAMED:]):,} in others")
        text = f"{plural(sum(dead.values()), 'dead letter')}: {', '.join(parts)}"
        yield Issue(level, text, fix, "dead_topics")


def _schedule_issues(timed: ScheduleTotals) -> Iterator[Issue]:
    words = {
        "schedules.late": ("late", timed.late),
        "schedules.unreadable": ("unreadable", timed.unreadable),
        "schedules.orphaned": ("orphaned", timed.orphaned),
        "schedules.missing": ("without a topic", timed.missing),
    }
    found = {name: f"{number:,} {word}" for name, (word, number) in words.items() if number}
    if found:
        level = min((OF_CHECKS[name] for name in found), key=_rank)
        text = f"schedules send nothing: {', '.join(found.values())}"
        yield Issue(level, text, "`streamqd doctor --only schedules`", "schedules")


def _unreadable_issues(rows: Iterable[Unreadable]) -> Iterator[Issue]:
    for row in rows:
        yield Issue(OF_CHECKS["values.unreadable"], str(row), "`streamqd doctor`", "doctor")


def _directive_issue(kind: str, scope: str, given: Directive, now_unix_ms: int) -> Issue:
    """Return a note about a directive, or a warning about a pause or stop that is too old."""
    verb = {"pause": "paused", "stop": "stopped", "drain": "drained"}[kind]
    parts = [part for part in scope.split("/") if part != "*"]
    reason = f" ({given.why})" if given.why else ""
    target = "/".join(parts) or "everything"
    text = f"{verb} by {given.by or 'an operator'}: {target}{reason}"
    if kind == "drain":
        return Issue(NOTE, text, "", "fleet", since_unix_ms=given.at_unix_ms)
    topic, _, group = scope.split("/") if scope.count("/") == 2 else (scope, "", "")
    named = topic not in ("", "*")
    level, fix = NOTE, ""
    if now_unix_ms - given.at_unix_ms > PAUSED_SECONDS * 1000:
        level = OF_CHECKS["fleet.paused" if kind == "pause" else "fleet.stopped"]
        fix = f"`streamqd resume {why.as_argument(scope)}`"
        if kind == "stop":
            fix = f"`streamqd group start {topic} {group}`"
    return Issue(
        level, text, fix, "group" if named else "fleet", topic if named else "",
        "" if group == "*" else group, None, given.at_unix_ms,
    )  # fmt: skip


def summarize_fleet(now: FleetNow) -> str:
    """Return a sentence about the fleet's size and its oldest waiting message."""
    size = f"{count(len(now.snapshot.instances), 'instance')}, {count(len(now.groups), 'group')}"
    if now.oldest_unix_ms is None:
        return sentence(f"{size}, no messages waiting")
    waiting = age(max(0, now.now_unix_ms - now.oldest_unix_ms))
    return sentence(f"{size}, the oldest waiting message is {waiting} old")
