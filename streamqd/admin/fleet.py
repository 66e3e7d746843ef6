"""Build the view of `status`: the instances of a fleet, their assignments, and problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from streamqd.admin import directives, named_fields, schedules, snapshot, why
from streamqd.admin.assignments import AssignmentRow, by_group, error_name
from streamqd.admin.checks import run_checks
from streamqd.admin.condition import recovery, severity_rank
from streamqd.admin.directives import DirectiveRow
from streamqd.admin.instances import InstanceRow, no_instances
from streamqd.admin.notices import INSTANCE_CHECKS
from streamqd.admin.published import Fleet
from streamqd.admin.reading import Unreadable, ViewReader
from streamqd.admin.schedules import ScheduleTotals
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.store.directives import Directives
from streamqd.words import known_sum

# Conditions that are caused by failures.
_FAILING = frozenset(
    {"crash-loop", "circuit-open", "circuit-half-open", "flooded", "blocked", "keys-held"}
)


_INSTANCE = (
    "instance state host pid version started_unix_ms heartbeat_unix_ms offers weight owned rate"
    " capacity limit"
)
_ASSIGNMENT = (
    "topic partition group state owner epoch since_unix_ms lag pending waiting_retries"
    " oldest_unix_ms oldest_unread_unix_ms condition worker in_flight rate longest_run_seconds"
    " lag_per_second progress_seconds held held_keys suspects_left suspects round_size"
    " waits_seconds dead_letters error error_seconds"
)


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group, summarized over all partitions of its topic.

    `condition` is the most serious condition of its partitions (see `AssignmentRow`), and
    `condition_partitions` is the number of partitions in this condition. `reason` explains it: the
    reason that an operator gave for a pause or a stop, the progress of the runs in rounds after a
    crash, or the last failure. It is '' if none of these applies.

    `longest_run_seconds` is the age of the group's oldest handler run. `owned` is the number of
    partitions that instances own. `rate` is the number of messages acknowledged per second, or null
    if it is unknown. `lag` and `dead_letters` are null unless they are known for every partition.
    """

    topic: str
    group: str
    partitions: int
    owned: int
    condition: str
    condition_partitions: int
    longest_run_seconds: float | None
    reason: str
    rate: float | None
    lag: int | None
    pending: int
    waiting_retries: int
    dead_letters: int | None
    oldest_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class LaggingGroup:
    """A group with unread messages, and their number, age and trend.

    `lag` is null if the server cannot count it. `since_unix_ms` is the time at which the oldest
    unread message was written. `lag_per_second` is the median growth of the lag over 20 s, or null
    unless it is known for every partition.
    """

    topic: str
    group: str
    lag: int | None
    since_unix_ms: int | None
    lag_per_second: float | None
    partitions: list[int]


@dataclass(frozen=True, slots=True)
class StatusView:
    """The fleet as `status` shows it.

    `directives` lists pauses first. `unreadable_directives` maps each invalid directive to a
    description of its problem. `dead_letters` maps each topic that has dead letters to their
    number. `problems` contains a sentence for each problem. `unreadable` lists invalid values in
    Redis, which are treated as missing.
    """

    fleet: str
    now_unix_ms: int
    directives: list[DirectiveRow]
    unreadable_directives: dict[str, str]
    problems: list[str]
    instances: list[InstanceRow]
    groups: list[GroupStatus]
    assignments: Sequence[AssignmentRow]
    lagging: list[LaggingGroup]
    dead_letters: dict[str, int]
    schedules: ScheduleTotals
    unreadable: list[Unreadable]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        names = " ".join(each.name for each in fields(self))
        return named_fields(
            self,
            names,
            instances=[_instance(each) for each in self.instances],
            assignments=[_assignment(each) for each in self.assignments],
        )


def _instance(each: InstanceRow) -> dict[str, Any]:
    return named_fields(each, _INSTANCE, offers=sorted("/".join(pair) for pair in each.offers))


def _assignment(row: AssignmentRow) -> dict[str, Any]:
    last = row.last_failure
    return named_fields(
        row,
        _ASSIGNMENT,
        state=row.lease,
        rate=row.acked,
        error=last.error if last else "",
        error_seconds=last.seconds_ago if last else None,
    )


def status(fleet: Fleet, topic: str | None = None) -> StatusView:
    """Return the state of the fleet, either with its work on all topics or on a single one.

    Raises TopicNotFoundError.
    """
    reader = ViewReader(fleet.store)
    seen = snapshot.read(fleet, topic, dead_letters=True, reader=reader)
    state, rows = seen.state, seen.assignments
    # Count the leases, because the published number of a silent instance's partitions is outdated.
    # For the view of one topic, only the leases of that topic are read, so use the published
    # numbers instead.
    owned = Counter(row.owner for row in rows if row.lease == "owned")
    if topic is not None:
        owned = Counter({name: each.owned or 0 for name, each in state.live.items()})
    instances = [replace(each, owned=owned[each.instance]) for each in seen.instances]
    seen = replace(seen, instances=instances)
    dead_letters = Counter[str]()
    for (name, _), each in seen.partitions.items():
        dead_letters[name] += each.dead
    timed = schedules.totals(reader, topic, seen.now_unix_ms)
    return StatusView(
        fleet=fleet.name,
        now_unix_ms=seen.now_unix_ms,
        directives=directives.rows(state),
        unreadable_directives=state.control.unreadable,
        problems=[*_problems(seen, +dead_letters), *_schedule_problems(timed)],
        instances=instances,
        groups=group_rows(rows, state.control),
        assignments=rows,
        lagging=_lagging_groups(rows),
        dead_letters=dict(+dead_letters),
        schedules=timed,
        unreadable=reader.rows,
    )


def group_rows(assignments: Sequence[AssignmentRow], control: Directives) -> list[GroupStatus]:
    """Return a row for each group, in the order of the assignments."""
    found = []
    for (topic, group), some in by_group(assignments).items():
        word = min((row.condition for row in some), key=severity_rank)
        same_condition = [row for row in some if row.condition == word]
        runs = [row.longest_run_seconds for row in some if row.longest_run_seconds is not None]
        oldest = [row.oldest_unix_ms for row in some if row.oldest_unix_ms is not None]
        rates = [row.acked for row in some if row.acked is not None]
        found.append(
            GroupStatus(
                topic=topic,
                group=group,
                partitions=len(some),
                owned=sum(row.lease == "owned" for row in some),
                condition=word,
                condition_partitions=len(same_condition),
                longest_run_seconds=max(runs, default=None),
                reason=_reason(same_condition, control),
                rate=round(sum(rates), 2) if rates else None,
                lag=known_sum(row.lag for row in some),
                pending=sum(row.pending or 0 for row in some),
                waiting_retries=sum(row.waiting_retries or 0 for row in some),
                dead_letters=known_sum(row.dead_letters for row in some),
                oldest_unix_ms=min(oldest, default=None),
            )
        )
    return found


def _reason(same_condition: list[AssignmentRow], control: Directives) -> str:
    """Return the reason for the condition that these assignments share, or '' if it is unknown."""
    first = same_condition[0]
    stop, pause = control.find_stop(first.assignment), control.find_pause(first.assignment)
    if first.condition == "stopped" and stop is not None:
        return stop.why
    if first.condition == "paused" and pause is not None:
        return pause[1].why
    if first.condition in _FAILING:
        return _last_error(same_condition)
    if first.condition == "recovering":
        figures = ((each.suspects_left, each.suspects, each.round_size) for each in same_condition)
        left, of, sizes = zip(*figures, strict=True)
        return recovery(known_sum(left), known_sum(of), max(size or 0 for size in sizes))
    return ""


def _last_error(same_condition: list[AssignmentRow]) -> str:
    known = [(each.seconds_ago, each.error) for row in same_condition if (each := row.last_failure)]
    return error_name(min(known)[1]) if known else ""


def _lagging_groups(assignments: Sequence[AssignmentRow]) -> list[LaggingGroup]:
    """Return the groups with unread messages, starting with the one whose message is the oldest."""
    found = []
    for (topic, group), some in by_group(row for row in assignments if row.lag != 0).items():
        slopes = [each.lag_per_second for each in some if each.lag_per_second is not None]
        oldest = [row.oldest_unread_unix_ms for row in some]
        found.append(
            LaggingGroup(
                topic=topic,
                group=group,
                lag=known_sum(row.lag for row in some),
                since_unix_ms=min((each for each in oldest if each is not None), default=None),
                lag_per_second=round(sum(slopes), 2) if len(slopes) == len(some) else None,
                partitions=[row.partition for row in some],
            )
        )
    return sorted(found, key=lambda each: each.since_unix_ms or math.inf)


def _problems(seen: FleetSnapshot, dead_letters: Mapping[str, int]) -> list[str]:
    problems = [
        each.text
        + (
            f"; if it is gone for good, run `streamqd forget {each.about}`"
            if each.check == "fleet.silent"
            else ""
        )
        for each in run_checks(INSTANCE_CHECKS, seen)
        if each.severity != "note"
    ]
    if all(each.state == "silent" for each in seen.instances):
        problems.insert(0, no_instances(seen.fleet).text)
    problems += [text for _, text in why.summarize(why.problems(seen))]
    for topic, count in dead_letters.items():
        problems.append(
            f"{topic} has {count} dead letters; see `streamqd dlq list {topic}`"
            if count > 1
            else f"{topic} has a dead letter; see `streamqd dlq list {topic}`"
        )
    return problems


def _schedule_problems(timed: ScheduleTotals) -> list[str]:
    """Return a sentence with the number of schedules that have a problem, or [] if none has."""
    words = {
        "late": timed.late,
        "unreadable": timed.unreadable,
        "orphaned": timed.orphaned,
        "without a topic": timed.missing,
    }
    found = [f"{number:,} {word}" for word, number in words.items() if number]
    if not found:
        return []
    return [f"schedules: {', '.join(found)}; see `streamqd doctor --only schedules`"]
