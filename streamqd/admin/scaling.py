"""Measure how many workers each group can use now, for `streamqd scale` and autoscalers.

Everything is read from Redis, so this works even if no instance is running. Nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from streamqd.admin import published, snapshot
from streamqd.admin.assignments import COUNT_MAX, AssignmentRow, by_group, measure_assignments
from streamqd.admin.published import Fleet
from streamqd.admin.reading import Unreadable, ViewReader
from streamqd.errors import RequestRefusedError
from streamqd.model import DLQ_SUFFIX, Assignment
from streamqd.store.directives import Directives
from streamqd.store.keys import Keys


@dataclass(frozen=True, slots=True)
class GroupScale:
    """The work of one group, and the number of workers that it can use.

    `backlog` is the number of messages that are unread, in flight or due. `due` is the number of
    retries, delayed sends and schedules that become due within the requested period. If the unread
    messages of a partition could not all be counted, `backlog_exact` is false and `backlog` is a
    lower bound. `busy` is the number of partitions with pending messages.

    `wanted` is the number of workers that the group can use: one for each partition with a backlog,
    but no more than one for each `target` messages. It is 0 for a paused or stopped group.
    """

    backlog: int
    backlog_exact: bool
    due: int
    busy: int
    partitions: int
    wanted: int


@dataclass(frozen=True, slots=True)
class ScaleView:
    """The work of all selected groups, by TOPIC/GROUP, and their total.

    `target` is the number of messages that each worker should have. `within_seconds` is the period
    within which messages must become due to be counted. `unreadable` lists values in Redis that
    cannot be read. A number that cannot be read is 0.
    """

    fleet: str
    now_unix_ms: int
    target: int
    within_seconds: float
    total: GroupScale
    groups: dict[str, GroupScale]
    unreadable: list[Unreadable]


def measure(
    fleet: Fleet, names: Collection[str] = (), *, target: int, within_seconds: float
) -> ScaleView:
    """Measure the groups with these names (TOPIC or TOPIC/GROUP), or all groups by default.

    `target` is the backlog that each worker should have, at least 1. Raises TopicNotFoundError if a
    topic is unknown, and RequestRefusedError if a group is unknown.
    """
    reader = ViewReader(fleet.store)
    state = published.fleet_state(fleet, reader)
    chosen = [name.partition("/") for name in names]
    assignments: list[Assignment] = []
    for topic in dict.fromkeys(topic for topic, _, _ in chosen) if chosen else (None,):
        _, _, found = snapshot.select_assignments(reader, topic, None, None)
        assignments += [each for each in found if not each.is_of_query]
    if chosen:
        assignments = [
            each for each in assignments if not {each.topic, _name(each)}.isdisjoint(names)
        ]
        known = {_name(each) for each in assignments}
        for name, (topic, slash, group) in zip(names, chosen, strict=True):
            if slash and name not in known:
                raise RequestRefusedError(
                    f"no group {group} reads topic {topic}; run `streamqd group list {topic}`"
                )
    rows = measure_assignments(reader, assignments, state.now_unix_ms)
    due = _count_due(reader, assignments, state.now_unix_ms + int(within_seconds * 1000))
    groups = {
        "/".join(pair): _group(some, due, state.control, target)
        for pair, some in by_group(rows).items()
    }
    return ScaleView(
        fleet=fleet.name,
        now_unix_ms=state.now_unix_ms,
        target=target,
        within_seconds=within_seconds,
        total=_sum_groups(list(groups.values())),
        groups=groups,
        unreadable=reader.rows,
    )


def _name(assignment: Assignment) -> str:
    return f"{assignment.topic}/{assignment.group}"


def _count_due(
    reader: ViewReader, assignments: Sequence[Assignment], last_unix_ms: int
) -> Counter[Assignment]:
    """Count the messages of each assignment that are due by this time."""
    sets = {assignment: _due_keys(reader.keys, assignment) for assignment in assignments}
    names = list(dict.fromkeys(name for some in sets.values() for name in some))
    replies = reader.ask([("ZCOUNT", name, "-inf", last_unix_ms) for name in names])
    counts = dict(zip(names, replies, strict=True))
    return Counter(
        {assignment: sum(counts[name] or 0 for name in some) for assignment, some in sets.items()}
    )


def _due_keys(keys: Keys, assignment: Assignment) -> list[str]:
    """Return the keys of the sorted sets that contain the due times of an assignment."""
    found = [keys.retry(*assignment)]
    if not assignment.group.endswith(DLQ_SUFFIX):  # dead letters have no delayed sends
        place = (assignment.topic, assignment.partition)
        found += [keys.delayed_sends(*place), keys.schedules_due(*place)]
    return found


def _group(
    assignments: Sequence[AssignmentRow], due: Counter[Assignment], control: Directives, target: int
) -> GroupScale:
    backlogs = {each.assignment: _backlog(each) + due[each.assignment] for each in assignments}
    able = [
        backlog
        for assignment, backlog in backlogs.items()
        if control.find_pause(assignment) is None and control.find_stop(assignment) is None
    ]
    return GroupScale(
        backlog=sum(backlogs.values()),
        backlog_exact=all(each.lag is not None for each in assignments if each.exists),
        due=sum(due[assignment] for assignment in backlogs),
        busy=sum(bool(each.pending) for each in assignments),
        partitions=len(backlogs),
        wanted=min(sum(backlog > 0 for backlog in able), -(-sum(able) // target)),
    )


def _backlog(each: AssignmentRow) -> int:
    """Return the number of unread and pending messages, or 0 if the group does not exist yet."""
    lag = min(each.lag_at_least, COUNT_MAX) if each.lag is None else each.lag
    return lag + (each.pending or 0)


def _sum_groups(groups: Sequence[GroupScale]) -> GroupScale:
    return GroupScale(
        backlog=sum(each.backlog for each in groups),
        backlog_exact=all(each.backlog_exact for each in groups),
        due=sum(each.due for each in groups),
        busy=sum(each.busy for each in groups),
        partitions=sum(each.partitions for each in groups),
        wanted=sum(each.wanted for each in groups),
    )
