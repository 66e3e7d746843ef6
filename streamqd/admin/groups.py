"""List groups with their positions, delete a group, or reset its position.

After a reset, no message of the group is pending any more. Messages after the new position are
unread again, and those before it count as finished. While an instance owns a partition of the
group, a reset is refused unless it is forced. A forced reset takes the partition from its owner in
the same step, so that Redis rejects later calls of the owner's worker.
"""

from __future__ import annotations

import datetime as dt
import difflib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from streamqd.admin import backlog, growth, named_fields, topics
from streamqd.admin.assignments import AssignmentRow, by_group, measure_assignments
from streamqd.admin.reading import (
    SEQ_MAX,
    Id,
    Unreadable,
    ViewReader,
    ask,
    last_id,
    lease_views,
    read_id,
    server_unix_ms,
)
from streamqd.config.values import parse_duration
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.model import KEEPERS, Assignment
from streamqd.store import groups as group_calls
from streamqd.store import topics as registry
from streamqd.store.store import Store


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group in `group list`, with sums over the partitions of its topic.

    `owned` is the number of partitions that instances own, and `owners` contains the names of these
    instances. The other fields mean the same as in `group describe`. `unreadable` lists values of
    the topic that cannot be read. If no group of a topic can be read because of them, the topic has
    a single row without a group.
    """

    topic: str
    group: str
    partitions: int
    owned: int
    owners: list[str]
    lag: int
    lag_exact: bool
    pending: int
    waiting_retries: int
    oldest_unix_ms: int | None
    unreadable: list[Unreadable]


_PARTITION = (
    "partition state owner epoch since_unix_ms position lag lag_exact pending retry_unread"
    " waiting_retries oldest_unread_unix_ms oldest_pending_unix_ms"
)


@dataclass(frozen=True, slots=True)
class GroupDetail:
    """A group on a topic.

    `missing` contains the partitions on which the group does not exist. If `lag_exact` is false,
    `lag` is a lower bound. `unreadable` lists values in Redis that cannot be read. These values are
    treated as missing.
    """

    topic: str
    group: str
    now_unix_ms: int
    lag: int
    lag_exact: bool
    pending: int
    waiting_retries: int
    oldest_unix_ms: int | None
    missing: list[int]
    partitions: list[AssignmentRow]
    unreadable: list[Unreadable]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        rows = [
            named_fields(
                each,
                _PARTITION,
                state=each.lease,
                lag=each.lag_at_least,
                lag_exact=each.lag is not None,
            )
            for each in self.partitions
        ]
        return named_fields(self, " ".join(each.name for each in fields(self)), partitions=rows)


@dataclass(frozen=True, slots=True)
class GroupDeleted:
    """The result of `group delete`."""

    topic: str
    group: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The pending and the failed messages of a group, which are lost if the group is deleted.

    `retries` is the number of all its retries. `due` is the number of those that are due but have
    not been read yet, which are also part of the lag.
    """

    pending: int
    retries: int
    due: int

    @property
    def total(self) -> int:
        """The number of pending messages and retries."""
        return self.pending + self.retries


def list_groups(store: Store, topic: str | None = None) -> list[GroupRow]:
    """Return the groups of one topic, or of all topics. Raises TopicNotFoundError."""
    reader = ViewReader(store)
    counts = topics.read_partition_counts(reader, topic)
    rows = [_row("", "", [], reader)] if reader.rows else []
    for name, count in counts.items():
        reader = ViewReader(store)
        names = topics.read_groups(reader, {name: count})[name]
        assignments = [
            Assignment(name, number, group) for group in names for number in range(count)
        ]
        found = by_group(_measure_existing(reader, assignments))
        rows += [_row(name, group, some, reader) for (_, group), some in found.items()]
        if reader.rows and not found:
            rows.append(_row(name, "", [], reader))
    return rows


def describe(store: Store, topic: str, group: str) -> GroupDetail:
    """Return the details of a group, partition by partition.

    Raises TopicNotFoundError. Raises RequestRefusedError if the group does not read the topic.
    """
    reader = ViewReader(store)
    count = partition_count(store, topic, group, reader)
    assignments = [Assignment(topic, number, group) for number in range(count)]
    streams = {assignment.partition: store.keys.source(*assignment) for assignment in assignments}
    positions = backlog.read_positions(reader, [*streams.values()])
    parts = [
        replace(row, position=positions[streams[row.partition]].get(group, "0-0"))
        for row in _measure_existing(reader, assignments)
    ]
    row = _row(topic, group, parts, reader)
    present = {each.partition for each in parts}
    return GroupDetail(
        topic=topic,
        group=group,
        now_unix_ms=server_unix_ms(store.connection),
        lag=row.lag,
        lag_exact=row.lag_exact,
        pending=row.pending,
        waiting_retries=row.waiting_retries,
        oldest_unix_ms=row.oldest_unix_ms,
        missing=[number for number in range(count) if number not in present],
        partitions=parts,
        unreadable=row.unreadable,
    )


def partition_count(store: Store, topic: str, group: str, reader: ViewReader | None = None) -> int:
    """Return the partition count of a topic that a group reads.

    Raises TopicNotFoundError. Raises RequestRefusedError if the group does not read the topic.
    """
    count = topics.partition_count(store, topic)
    found = topics.read_groups(reader or ViewReader(store), {topic: count})[topic]
    if group not in found:
        near = difflib.get_close_matches(group, found, n=1)
        hint = f"did you mean {near[0]}?" if near else f"run `streamqd group list {topic}`"
        raise RequestRefusedError(f"no group {group} reads topic {topic}; {hint}")
    return count


def names(store: Store, topic: str) -> list[str]:
    """Return the groups of a topic, including those whose deletion is unfinished.

    Raises TopicNotFoundError.
    """
    count = topics.partition_count(store, topic)
    found = {*topics.groups(store, topic, range(count))}
    return sorted(found | {*registry.known_groups(store, topic)})


def delete(store: Store, topic: str, group: str, *, force: bool) -> GroupDeleted:
    """Delete a group with its position, its retries and its counters. Its dead letters are kept.

    To finish an interrupted deletion, repeat the call. All partitions are checked before the first
    one is changed. Raises TopicNotFoundError. Raises RequestRefusedError if the group is unknown.
    Without `force`, also raises it if an instance owns the group or it has unfinished messages.
    """
    count = topics.partition_count(store, topic)
    if group not in names(store, topic):
        partition_count(store, topic, group)  # raises RequestRefusedError for an unknown group
    assignments = [Assignment(topic, number, group) for number in range(count)]
    if not force:
        _refuse_busy(store, assignments)
    for assignment in assignments:
        call = group_calls.delete(store.keys, assignment, force=force, token=secrets.token_hex(16))
        while (reply := store.run(call)).word == "MORE":
            pass
        if reply.word == "OWNED":
            raise RequestRefusedError(owned_sentence(assignment, reply.values[0].decode()))
        if reply.word == "UNSETTLED":
            raise RequestRefusedError(
                f"{assignment} received new messages; pass --force to discard them"
            )
    # Remove the record of the group last, because without it, an interrupted deletion could not be
    # repeated.
    store.execute("HDEL", store.keys.meta(topic), f"group:{group}")
    return GroupDeleted(topic, group, count)


def growth_obstacle(store: Store, topic: str, group: str) -> str:
    """Return the reason why deleting a group would break the growth of its topic, or ''."""
    progress = growth.read_progress(store, topic)
    for row in progress.groups if progress is not None else ():
        if row.group == group and not row.done:
            return (
                f"{topic} is growing, and {group} has not acknowledged {row.left} messages of the"
                " old partitions; a new group of this name would read old and new partitions in"
                " parallel, and keys would lose their order"
            )
    return ""


def count_unfinished(parts: Iterable[AssignmentRow]) -> Unfinished:
    """Count the unfinished messages of partitions. Unknown numbers count as 0."""
    rows = [*parts]
    due = sum(row.retry_unread for row in rows)
    waiting = sum(row.waiting_retries or 0 for row in rows)
    return Unfinished(sum(row.pending or 0 for row in rows), waiting + due, due)


def owned_sentence(assignment: Assignment, owner: str) -> str:
    """Return the error text for a request that is refused because an assignment has an owner."""
    if owner in KEEPERS:
        return (
            f"a {owner.replace('-', ' ')} is changing {assignment}, or was interrupted; run this"
            " command again when it is done, or in 15 s"
        )
    return (
        f"{assignment} is owned by {owner}; stop the group first with `streamqd group stop"
        f" {assignment.topic}"
        f" {assignment.group} --wait`, or pass --force to take the partition from its owner"
    )


def _refuse_busy(store: Store, assignments: Sequence[Assignment]) -> None:
    for row in _measure_existing(ViewReader(store), assignments):
        if row.lease == "owned":
            raise RequestRefusedError(owned_sentence(row.assignment, row.owner))
        left = count_unfinished([row])
        if left.total:
            raise RequestRefusedError(
                f"{row.assignment} has {left.total} messages that are pending or wait for a retry;"
                " pass --force to discard them"
            )


def _measure_existing(reader: ViewReader, assignments: Sequence[Assignment]) -> list[AssignmentRow]:
    """Return rows with exact lags, for the assignments whose group exists on the partition."""
    rows = measure_assignments(reader, assignments, 0, count_max=backlog.COUNT_MAX)
    return [row for row in rows if row.exists]


def _row(topic: str, group: str, parts: Sequence[AssignmentRow], reader: ViewReader) -> GroupRow:
    times = [part.oldest_unix_ms for part in parts if part.oldest_unix_ms is not None]
    return GroupRow(
        topic=topic,
        group=group,
        partitions=len(parts),
        owned=sum(part.lease == "owned" for part in parts),
        owners=sorted({part.owner for part in parts if part.owner}),
        lag=sum(part.lag_at_least for part in parts),
        lag_exact=all(part.lag is not None for part in parts),
        pending=sum(part.pending or 0 for part in parts),
        waiting_retries=sum(part.waiting_retries or 0 for part in parts),
        oldest_unix_ms=min(times, default=None),
        unreadable=reader.rows,
    )


EARLIEST, LATEST = "earliest", "latest"
FUTURE_MS_MAX = 60_000  # ms that a client's clock may be ahead of the server's


@dataclass(frozen=True, slots=True)
class PartitionReset:
    """One partition in the result of `group reset`.

    `before` and `after` are the old and the new position, each of which is the ID of the last entry
    read. `unread` is the number of entries after the new position, or a lower bound if
    `unread_exact` is false. `pending` is the number of entries that were pending before the reset,
    and `waiting_retries` the number of waiting retries that it removed. `retried` is the number of
    entries that it removed from the retry stream, including acknowledged ones that were still
    stored there.
    """

    partition: int
    before: str
    after: str
    unread: int
    unread_exact: bool
    pending: int
    waiting_retries: int
    retried: int

    @property
    def reached(self) -> str:
        """The new position: `end` if it is after all messages, or else as in `format_position`."""
        return "end" if self.unread_exact and not self.unread else format_position(self.after)


@dataclass(frozen=True, slots=True)
class GroupReset:
    """The result of `group reset`, or of its dry run.

    `obstacle` is the reason why the reset would be refused now, or '' if there is none.
    """

    topic: str
    group: str
    to: str
    dry_run: bool
    retries: str  # keep | drop
    partitions: list[PartitionReset]
    obstacle: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for the entry of this reset in the audit log."""
        moved = {row.partition: f"{row.before} -> {row.after}" for row in self.partitions}
        return named_fields(self, "group to retries") | {"partitions": moved}

    @property
    def counts(self) -> dict[str, int]:
        """The counts for the entry of this reset in the audit log."""
        return {
            "forgotten": sum(row.pending for row in self.partitions),
            "dropped": sum(row.waiting_retries + row.retried for row in self.partitions),
        }


def format_position(position: str) -> str:
    """Format the position of a group as `start`, as `before ID`, or as the last ID read.

    `before ID` stands for a position between two messages.
    """
    ms, _, seq = position.partition("-")
    if position == "0-0":
        return "start"
    if seq == str(SEQ_MAX) and ms.isdigit():
        # No server generates the greatest sequence number of a millisecond. Such a position
        # therefore means that the next entry to read has at least the ID that follows.
        return f"before {int(ms) + 1}-0"
    return position


def position(text: str, now_unix_ms: int) -> str:
    """Parse the value of `--to`. Return the ID to read after, or '' for the last one.

    The value is earliest, latest, the ID of the first message to read, or a time. A time is either
    in RFC 3339 format, or a duration before `now_unix_ms`. Raises InvalidRequestError if the value
    is not valid, and RequestRefusedError if the time is in the future.
    """
    if text == EARLIEST:
        return "0-0"
    if text == LATEST:
        return ""
    try:
        first = read_id(text)
    except ValueError:
        try:
            first = Id(_unix_ms(text, now_unix_ms), 0)
        except (ValueError, OverflowError):
            raise InvalidRequestError(
                f"{text} is not a position; pass earliest, latest, an id such as"
                " 1700000000000-0, a time such as 2026-11-21T09:00:00Z, or how long ago, such as"
                " 2h"
            ) from None
    if first.ms > now_unix_ms + FUTURE_MS_MAX:
        raise RequestRefusedError(
            f"{text} is in the future; pass latest to skip all messages written so far"
        )
    return str(first.before())


def _unix_ms(text: str, now_unix_ms: int) -> int:
    try:
        return max(0, now_unix_ms - round(parse_duration(text) * 1000))
    except ValueError:
        moment = dt.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time without a time zone")
    return max(0, round(moment.timestamp() * 1000))


def reset(
    store: Store,
    topic: str,
    group: str,
    to: str,
    *,
    partitions: Sequence[int] = (),
    drop_retries: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> GroupReset:
    """Set the position of a group on all partitions of a topic, or only on the given ones.

    A partition is changed in one step, or in several if it has many pending messages. In that case,
    the reset itself owns the partition until the last step. The reset is refused, and changes
    nothing, if one of the partitions is new and its topic is still growing, or if an instance owns
    one of them and `force` is False. A dry run only reads, and reports such a refusal as
    `obstacle`. Raises TopicNotFoundError and RequestRefusedError.
    """
    count = partition_count(store, topic, group)
    for number in partitions:
        topics.check_partition(topic, number, count)
    after = position(to, server_unix_ms(store.connection))
    chosen = sorted({*partitions}) or range(count)
    assignments = [Assignment(topic, number, group) for number in chosen]
    obstacle = _obstacle(store, assignments, force=force)
    if obstacle and not dry_run:
        raise RequestRefusedError(obstacle)
    rows = []
    for assignment in assignments:
        if dry_run:
            rows.append(_predict_reset(store, assignment, after, drop_retries))
            continue
        done = _reset(store, assignment, after, drop_retries=drop_retries, force=force)
        if done is not None:
            rows.append(_reset_row(store, assignment, done))
    retries = "drop" if drop_retries else "keep"
    return GroupReset(topic, group, to, dry_run, retries, rows, obstacle)


def _reset(
    store: Store, assignment: Assignment, after: str, *, drop_retries: bool, force: bool
) -> group_calls.ResetResult | None:
    """Reset one partition, in as many calls as its pending messages require.

    Return None if the group does not exist on the partition yet. It will then start at its
    configured position. Raises RequestRefusedError if the partition is owned.
    """
    token = secrets.token_hex(16)
    part: group_calls.ResetResult | None = None
    while True:
        reply = store.run(
            group_calls.reset(
                store.keys,
                assignment,
                part.after if part else after,
                drop_retries=drop_retries,
                force=force,
                keeper=growth.OWNER,
                token=token,
            )
        )
        if reply.word == "OWNED":
            raise RequestRefusedError(_owned_sentence(assignment, reply.values[0].decode()))
        if reply.word == "NOGROUP":
            return None
        found = group_calls.ResetResult.parse(reply)
        part = found.following(part) if part else found
        if reply.word == "OK":
            return part


def _obstacle(store: Store, assignments: Sequence[Assignment], *, force: bool) -> str:
    """Return the reason why these assignments cannot be reset now, or '' if they can.

    Even a forced reset is refused for new partitions of a topic that is still growing, because the
    group must first finish the old partitions to keep the order of each key.
    """
    views = lease_views(ViewReader(store), assignments)
    for assignment, view in zip(assignments, views, strict=True):
        if view.ttl is not None and (view.owner == growth.OWNER or not force):
            return _owned_sentence(assignment, view.owner)
    return ""


def _owned_sentence(assignment: Assignment, owner: str) -> str:
    if owner != growth.OWNER:
        return owned_sentence(assignment, owner)
    return (
        f"{assignment.topic} is growing, and {assignment} is not read until the growth is"
        " complete; run `streamqd topic grow` to continue it"
    )


def _reset_row(
    store: Store, assignment: Assignment, done: group_calls.ResetResult
) -> PartitionReset:
    stream = store.keys.source(*assignment)
    unread, exact = backlog.count_behind(store, stream, done.after)
    return PartitionReset(assignment.partition, unread=unread, unread_exact=exact, **done._asdict())


def _predict_reset(
    store: Store, assignment: Assignment, after: str, drop_retries: bool
) -> PartitionReset:
    """Predict the reply of the script `group_reset` without changing anything."""
    stream, retry = store.keys.source(*assignment), store.keys.retry_stream(*assignment)
    info, pending, waiting, retried = ask(
        store,
        [
            ("XINFO", "STREAM", stream),
            ("XPENDING", stream, assignment.group),
            ("ZCARD", store.keys.retry(*assignment)),
            ("XLEN", retry),
        ],
    )
    last = last_id(info)
    if not after or read_id(after) > read_id(last):
        after = last
    return _reset_row(
        store,
        assignment,
        group_calls.ResetResult(
            before=backlog.read_positions(ViewReader(store), [stream])[stream].get(
                assignment.group, "0-0"
            ),
            after=after,
            pending=int(pending[0]) if pending else 0,
            waiting_retries=waiting if drop_retries else 0,
            retried=retried if drop_retries else 0,
        ),
    )
