"""`doctor stream`: find out why a topic uses memory, and how to free it.

All partitions are read together. The checks then run for one partition at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamqd import config
from streamqd.admin import topics
from streamqd.admin.assignments import holder
from streamqd.admin.checks import Check, CheckResult, Severity, check, run_checks
from streamqd.admin.reading import (
    Id,
    Unreadable,
    ViewReader,
    lease_views,
    measure_memory,
    read_id,
    server_unix_ms,
)
from streamqd.admin.retention import ARCHIVE, COUNT_MAX, count, find_floor, parse_positions
from streamqd.model import Assignment
from streamqd.store import retention
from streamqd.store.leases import LeaseView
from streamqd.store.retention import GroupPosition, PartitionPositions
from streamqd.store.store import Store
from streamqd.words import known_sum, plural


@dataclass(frozen=True, slots=True)
class BlockingGroup:
    """A group on one partition, in `doctor stream`.

    `owner` is an instance, or '' if there is no owner. `unread` is null if the server does not
    count unread entries. `needs_unix_ms` is the time at which the oldest entry that the group has
    not acknowledged was written, or null if there is none. `idle_seconds` is the time since a
    consumer of the group was last active, or null if the group never had a consumer. `abandoned` is
    true if entries wait, but no instance owns the assignment and no client has read for the group
    recently. `dropped` is the number of the group's unacknowledged messages that drop_unacked_*
    removed.
    """

    group: str
    owner: str
    pending: int
    unread: int | None
    needs_unix_ms: int | None
    idle_seconds: float | None
    abandoned: bool
    dropped: int


@dataclass(frozen=True, slots=True)
class StreamRow:
    """The memory of one partition, and the reason why its oldest entries are kept.

    `kept_by` is group or archive (the entries are beyond the retention limits, but still needed),
    retention (they will be trimmed later), settings (no limit is set) or empty. `holder` is the
    group that needs the oldest entry that must stay, @archive if the archive needs it, or '' if no
    entry must stay. `since_unix_ms` is the time at which that entry was written. `needed` is the
    number of entries from that one on, or null if it exceeds 100,000, and `needed_bytes` is their
    memory.

    `bytes` is the memory of the partition's stream, `dead_letter_bytes` that of its dead letters,
    and `retry_bytes` that of its groups' retry streams. All of these are approximate, and null
    without the permission to read them.
    """

    partition: int
    messages: int
    bytes: int | None
    dead_letters: int
    dead_letter_bytes: int | None
    retry_bytes: int | None
    oldest_unix_ms: int | None
    kept_by: str
    holder: str
    since_unix_ms: int | None
    needed: int | None
    needed_bytes: int | None
    groups: list[BlockingGroup]


@dataclass(frozen=True, slots=True)
class BlockingProblem:
    """Memory that is kept although retention would free it, and the fix.

    `kind` is abandoned, lag, archive, missing_group or no_groups.
    """

    partition: int
    kind: str
    holder: str
    text: str
    advice: str


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The report of `doctor stream`. `retention` and `archive` are the effective settings.

    `unreadable` lists invalid values in Redis. A partition has no row if its values are invalid.
    """

    topic: str
    now_unix_ms: int
    archive: str
    retention: dict[str, Any]
    messages: int
    bytes: int | None
    dead_letters: int
    dead_letter_bytes: int | None
    retry_bytes: int | None
    partitions: list[StreamRow]
    problems: list[BlockingProblem]
    unreadable: list[Unreadable]


def blocking_group(
    group: GroupPosition, lease: LeaseView | None, abandoned_after: float
) -> BlockingGroup:
    """Return the state of a group on one partition.

    If the lease is unknown, the group has no owner.
    """
    state, name, _ = holder(lease) if lease else ("free", "", None)
    owner = name if state == "owned" else ""
    idle = None if group.idle_ms is None else group.idle_ms / 1000
    return BlockingGroup(
        group=group.name,
        owner=owner,
        pending=group.pending,
        unread=group.unread,
        needs_unix_ms=read_id(group.needs).ms if group.needs else None,
        idle_seconds=idle,
        abandoned=bool(group.needs) and not owner and (idle is None or idle >= abandoned_after),
        dropped=group.dropped_unread + group.dropped_pending,
    )


def examine(
    store: Store,
    topic: str,
    configured: config.Topic | None,
    expected: Sequence[str],
    abandoned_after: float,
) -> StreamReport:
    """Report on every partition of a topic. Raises TopicNotFoundError.

    `expected` contains the configured groups. A group without an owner counts as abandoned if none
    of its consumers has been active for `abandoned_after` seconds.
    """
    reader = ViewReader(store)
    total = topics.partition_count(store, topic)
    meta = topics.known_meta(reader, topic)
    holds = config.effective(configured or config.Topic(), meta.settings if meta else {})
    now = server_unix_ms(store.connection)
    calls = [retention.measure(store.keys, topic, number) for number in range(total)]
    by_partition: dict[int, PartitionPositions] = {}
    for number, reply in enumerate(reader.measure(calls)):
        positions = parse_positions(reader, topic, number, reply)
        if positions is not None:
            by_partition[number] = positions
    groups = _groups(reader, topic, by_partition, abandoned_after)
    side_streams = _measure_side_streams(reader, topic, by_partition)
    found = []
    for number, positions in by_partition.items():
        floor = _floor(store, topic, number, positions, holds, groups[number])
        row = StreamRow(
            partition=number,
            messages=positions.length,
            bytes=positions.bytes,
            **side_streams[number],
            oldest_unix_ms=read_id(positions.first_id).ms if positions.first_id else None,
            kept_by=_find_holder(positions, floor, holds.retention, now),
            holder=floor.holder,
            since_unix_ms=floor.entry.ms if floor.entry else None,
            needed=floor.needed,
            needed_bytes=floor.needed_bytes,
            groups=groups[number],
        )
        found.append(HeldPartition(topic, row, holds, expected))
    rows = [each.row for each in found]
    return StreamReport(
        topic=topic,
        now_unix_ms=now,
        archive=holds.archive,
        retention=config.registered_settings(holds)["retention"],
        messages=sum(row.messages for row in rows),
        bytes=known_sum(row.bytes for row in rows),
        dead_letters=sum(row.dead_letters for row in rows),
        dead_letter_bytes=known_sum(row.dead_letter_bytes for row in rows),
        retry_bytes=known_sum(row.retry_bytes for row in rows),
        partitions=rows,
        problems=[
            BlockingProblem(
                partition=each.row.partition,
                kind=problem.check.partition(".")[2],
                holder=problem.about,
                text=problem.text,
                advice=problem.fix,
            )
            for each in found
            for problem in run_checks(STREAM_CHECKS, each)
        ],
        unreadable=reader.rows,
    )


# --- reading --------------------------------------------------------------------------------------


def _groups(
    reader: ViewReader,
    topic: str,
    by_partition: Mapping[int, PartitionPositions],
    abandoned_after: float,
) -> dict[int, list[BlockingGroup]]:
    assignments = [
        Assignment(topic, number, each.name)
        for number in by_partition
        for each in by_partition[number].groups
    ]
    leases = iter(lease_views(reader, assignments))
    return {
        number: [blocking_group(each, next(leases), abandoned_after) for each in positions.groups]
        for number, positions in by_partition.items()
    }


def _measure_side_streams(
    reader: ViewReader, topic: str, by_partition: Mapping[int, PartitionPositions]
) -> dict[int, dict[str, Any]]:
    """Measure the dead letters of each partition and the retry streams of its groups."""
    keys = reader.keys
    streams = [
        [
            keys.dlq(topic, number),
            *(keys.retry_stream(topic, number, g.name) for g in positions.groups),
        ]
        for number, positions in by_partition.items()
    ]
    dead_letters = reader.ask([("XLEN", some[0]) for some in streams])
    sizes = iter(
        measure_memory(reader.store, [each for some in streams for each in some], retention.SAMPLES)
    )
    return {
        number: {
            "dead_letters": int(dead or 0),
            "dead_letter_bytes": next(sizes),
            "retry_bytes": known_sum([next(sizes) for _ in some[1:]]),
        }
        for number, some, dead in zip(by_partition, streams, dead_letters, strict=True)
    }


class _Floor(NamedTuple):
    """The oldest entry that must stay, its holder, and the number of entries from it on.

    `entry` is None if no entry must stay. `needed` is None if there are too many entries to count.
    """

    holder: str
    entry: Id | None
    needed: int | None
    needed_bytes: int | None


def _floor(
    store: Store,
    topic: str,
    partition: int,
    positions: PartitionPositions,
    holds: config.Topic,
    groups: Sequence[BlockingGroup],
) -> _Floor:
    name, entry = find_floor(positions, holds.archive == "required")
    needed: int | None = 0
    if entry is not None:
        # If the group has no pending entries, the server's own count is used. Otherwise, the
        # entries are counted.
        known = [each.unread for each in groups if each.group == name and not each.pending]
        needed = known[0] if known else None
        if needed is None:
            needed = count(store, topic, partition, entry, None)
    if positions.bytes is None or needed is None:
        return _Floor(name, entry, needed, None)
    return _Floor(name, entry, needed, positions.bytes * needed // max(1, positions.length))


def _find_holder(
    positions: PartitionPositions, floor: _Floor, bounds: config.Retention, now: int
) -> str:
    """Return the reason why a partition's oldest entries are kept, as in `StreamRow.kept_by`."""
    if not positions.length:
        return "empty"
    if not bounds.bounded:
        return "settings"
    entry, needed, size = floor.entry, floor.needed, floor.needed_bytes
    if entry is None:
        return "retention"
    beyond = (
        bounds.ack_policy == "delete"
        or (bounds.max_age is not None and entry.ms < now - bounds.max_age * 1000)
        or (bounds.max_length is not None and (needed is None or needed > bounds.max_length))
        or (bounds.max_bytes is not None and (size is None or size > bounds.max_bytes))
        or (
            bounds.shrink_every is not None
            and bool(positions.shrink_from)
            and entry < read_id(positions.shrink_from)
        )
    )
    if not beyond:
        return "retention"
    return "archive" if floor.holder == ARCHIVE else "group"


# --- the checks -----------------------------------------------------------------------------------


class HeldPartition(NamedTuple):
    """One partition as the checks see it. `expected` contains the groups in the configuration."""

    topic: str
    row: StreamRow
    holds: config.Topic
    expected: Sequence[str]

    @property
    def present(self) -> frozenset[str]:
        """The groups that exist on the partition."""
        return frozenset(group.group for group in self.row.groups)


@check("stream.missing_group", Severity.PROBLEM)
def _missing_group(facts: HeldPartition) -> Iterator[CheckResult]:
    """A group of the configuration does not exist on the partition."""
    for name in facts.expected:
        if facts.row.messages and name not in facts.present:
            yield CheckResult(
                f"group {name} of the configuration does not exist there, so nothing is trimmed",
                "start its consumer, or remove it from the configuration",
                about=name,
            )


@check("stream.abandoned", Severity.PROBLEM)
def _abandoned(facts: HeldPartition) -> Iterator[CheckResult]:
    """A group needs messages, and no client reads for it."""
    row = facts.row
    for each in row.groups:
        if not each.abandoned:
            continue
        ever = each.idle_seconds is not None
        seen = "no client reads for it now" if ever else "no client has ever read for it"
        kept = f"; it keeps {_amount(row.needed)}" if row.holder == each.group else ""
        yield CheckResult(
            f"group {each.group} has no owner, and {seen}{kept}",
            "start its consumer, or if the group is not needed, run `streamqd group delete"
            f" {facts.topic} {each.group}`",
            about=each.group,
        )


@check("stream.lag", Severity.PROBLEM)
def _behind(facts: HeldPartition) -> Iterator[CheckResult]:
    """A group needs entries that retention would free."""
    row, topic = facts.row, facts.topic
    for each in row.groups:
        if row.kept_by != "group" or each.group != row.holder or each.abandoned:
            continue
        state, advice = "which no instance owns at the moment", "start its consumer"
        if each.owner:
            state = f"which {each.owner} owns"
            advice = f"see `streamqd partitions {topic}` for its lag and `streamqd pending {topic}`"
        unread = "an unknown number" if each.unread is None else f"{each.unread:,}"
        yield CheckResult(
            f"group {each.group}, {state}, keeps {_amount(row.needed)}:"
            f" {unread} unread, {each.pending:,} pending",
            advice,
            about=each.group,
        )


@check("stream.archive", Severity.PROBLEM)
def _archive(facts: HeldPartition) -> Iterator[CheckResult]:
    """Entries that retention would free are not archived yet."""
    if facts.row.kept_by == "archive":
        yield CheckResult(
            f"unarchived entries keep {_amount(facts.row.needed)}",
            f'run `streamqd pipeline archive`; {facts.topic} has archive = "required"',
            about=ARCHIVE,
        )


@check("stream.no_groups", Severity.PROBLEM)
def _no_groups(facts: HeldPartition) -> Iterator[CheckResult]:
    """Retention is set, but no group reads the topic."""
    bounds = facts.holds.retention
    if facts.row.messages and not facts.present and bounds.bounded and not bounds.without_groups:
        yield CheckResult(
            "no group reads it, so nothing is trimmed",
            "start a consumer, or set retention.without_groups = true",
        )


STREAM_CHECKS: tuple[Check[HeldPartition], ...] = (
    *(_missing_group, _abandoned, _behind, _archive, _no_groups),
)


def _amount(needed: int | None) -> str:
    if needed is None:
        return f"more than {COUNT_MAX:,} messages"
    return plural(needed, "message")
