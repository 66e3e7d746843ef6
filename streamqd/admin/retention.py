"""Retention: trimming a topic by hand, and what keeps its memory.

A trim never goes below what groups and the archive still need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamqd import config
from streamqd.admin import backlog, topics, topics_settings
from streamqd.admin.partitions import holder
from streamqd.admin.reading import (
    BadValues,
    Id,
    Unreadable,
    ask,
    lease_views,
    measure,
    measure_each,
    memory_of,
    read_id,
    server_unix_ms,
)
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import retention
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView
from streamqd.store.retention import GroupStand, Stand, Trimmed
from streamqd.store.scripts import Reply
from streamqd.store.store import Store
from streamqd.words import known_sum, plural

PAGE = 4_000  # entries removed by one script, at most
COUNT_MAX = 100_000  # entries counted one by one in a partition
ARCHIVE = "@archive"  # stands for the archive where a group is named


@dataclass(frozen=True, slots=True)
class TrimRow:
    """One partition after a trim, or before one with `--dry-run`.

    `removed` is how many entries went, or would go at most (whole nodes go, of 100 entries by the
    server's defaults); null: more than 100,000. `messages` and `bytes` (about, null when the Redis
    user may not ask) are what is there now. `holder` is who still needs the oldest entry that must
    stay, a group or @archive, '' for none; `held_since_unix_ms` when that was written.
    """

    partition: int
    removed: int | None
    messages: int
    bytes: int | None
    holder: str
    held_since_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class TrimReport:
    """What `trim` did. `removed` is the sum of what is known.

    `unreadable` are values in Redis that cannot be read: their partitions were left alone.
    """

    topic: str
    dry_run: bool
    now_unix_ms: int
    removed: int
    partitions: list[TrimRow]
    unreadable: list[Unreadable]


def settings(store: Store, topic: str, configured: config.Topic | None) -> tuple[config.Topic, int]:
    """The settings of a topic that hold, and its partition count. Raises TopicMissing."""
    count = topics.partition_count(store, topic)
    bad, key = BadValues(), store.keys.meta(topic)
    stored = topics_settings.readable(store.execute("HGET", key, "settings"), key, bad)
    if bad.rows:  # what is retained is never guessed
        raise Refused(f"{bad.rows[0]}: `streamqd doctor --only values` says how to put it right")
    return config.effective(configured or config.Topic(), stored), count


def trim(
    store: Store,
    topic: str,
    wanted: config.Topic,
    partitions: Sequence[int],
    expected: Sequence[str],
    *,
    dry_run: bool,
) -> TrimReport:
    """Trim partitions to what `wanted` retains. `expected` are groups that must exist.

    Refused when no group reads the topic or an expected one is missing: then nothing says what may
    go.
    """
    now = server_unix_ms(store.connection)
    rows, bad = [], BadValues()
    for number in partitions:
        stand = _known(store, topic, number, bad)
        if stand is None:
            continue
        removed: int | None = None
        if dry_run:
            _check_groups(topic, number, stand, wanted, expected)
            removed = _removable(store, topic, number, wanted, stand, now)
        else:
            removed = _trim_one(store, topic, number, wanted, now, expected)
            stand = _stand(store, topic, number)
        holder, entry = floor_of(stand, wanted.archive == "required")
        rows.append(
            TrimRow(
                partition=number,
                removed=removed,
                messages=stand.length,
                bytes=stand.bytes,
                holder=holder,
                held_since_unix_ms=entry.ms if entry else None,
            )
        )
    total = sum(row.removed or 0 for row in rows)
    return TrimReport(topic, dry_run, now, total, rows, bad.rows)


def floor_of(stand: Stand, archive: bool) -> tuple[str, Id | None]:
    """Who needs the oldest entry that must stay, and that entry; '' and None for none."""
    needs = [(read_id(group.needs), group.name) for group in stand.groups if group.needs]
    if archive and stand.unarchived:
        needs.append((read_id(stand.unarchived), ARCHIVE))
    if not needs:
        return "", None
    entry, holder = min(needs)
    return holder, entry


def count_between(
    store: Store, topic: str, partition: int, first: Id | None, before: Id | None
) -> int | None:
    """How many entries there are from `first` on and before `before`; None: more than COUNT_MAX."""
    after = "0-0" if first is None else str(first.before())
    upto = "+" if before is None else str(before.before())
    stream = store.keys.stream(topic, partition)
    total, whole = backlog.count_between(store, stream, after, upto, COUNT_MAX)
    return total if whole else None


def known_stand(
    reply: Reply | None, keys: Keys, topic: str, partition: int, bad: BadValues
) -> Stand | None:
    """Read the answer to `retention.measure`; None when it cannot be read.

    A group whose name is not UTF-8 is shown with its bytes escaped, and kept as bad.
    """
    if reply is None:
        return None
    for row in reply.rest[6]:
        bad.text(row[0], keys.stream(topic, partition), "group")
    return bad.read(Stand.parse, reply, keys.trim(topic, partition))


def _known(store: Store, topic: str, partition: int, bad: BadValues) -> Stand | None:
    (reply,) = measure_each(store, [retention.measure(store.keys, topic, partition)], bad)
    return known_stand(reply, store.keys, topic, partition, bad)


def _stand(store: Store, topic: str, partition: int) -> Stand:
    (reply,) = measure(store, [retention.measure(store.keys, topic, partition)])
    return Stand.parse(reply)


def _trim_one(
    store: Store,
    topic: str,
    partition: int,
    wanted: config.Topic,
    now: int,
    expected: Sequence[str],
) -> int:
    bounds, removed = wanted.retention, 0
    while True:
        reply = store.run(
            retention.trim(
                store.keys,
                topic,
                partition,
                keep_from=_keep_from(bounds, now),
                max_length=bounds.max_length,
                max_bytes=bounds.max_bytes,
                shrink_every=bounds.shrink_every,
                archive=wanted.archive == "required",
                without_groups=bounds.without_groups,
                limit=PAGE,
                expected=expected,
            )
        )
        if reply.word == "NO_GROUPS":
            stand = _stand(store, topic, partition)
            _check_groups(topic, partition, stand, wanted, ())
            return removed  # there is nothing at all
        if reply.word == "MISSING_GROUP":
            raise _missing(topic, partition, reply.rest[0].decode())
        trimmed = Trimmed.parse(reply)
        removed += trimmed.removed
        if not trimmed.more:
            return removed


def _keep_from(bounds: config.Retention, now: int) -> str:
    if bounds.ack_policy == "delete":
        return ""
    if bounds.max_age is None:
        return "0-0"
    return f"{max(0, now - round(bounds.max_age * 1000))}-0"


def _check_groups(
    topic: str, partition: int, stand: Stand, wanted: config.Topic, expected: Sequence[str]
) -> None:
    present = {group.name for group in stand.groups}
    if not present and stand.length and not wanted.retention.without_groups:
        raise Refused(
            f"no group reads partition {partition} of {topic}, so nothing says what may go:"
            " start a consumer, or set retention.without_groups = true for the topic"
        )
    for name in expected:
        if stand.length and name not in present:
            raise _missing(topic, partition, name)


def _missing(topic: str, partition: int, group: str) -> Refused:
    return Refused(
        f"the group {group} of the configuration does not exist on partition {partition} of"
        f" {topic} and would read what is trimmed now: start its consumer, or take it out of the"
        " configuration"
    )


def _removable(
    store: Store,
    topic: str,
    partition: int,
    wanted: config.Topic,
    stand: Stand,
    now: int,
) -> int | None:
    """How many entries a trim would remove at most; None: more than can be counted."""
    bounds = wanted.retention
    _, floor = floor_of(stand, wanted.archive == "required")
    free = stand.length
    if floor is not None:
        counted = count_between(store, topic, partition, None, floor)
        if counted is None:
            return None
        free = counted
    beyond = 0
    if bounds.max_length is not None:
        beyond = stand.length - bounds.max_length
    if bounds.max_bytes is not None and stand.bytes:
        fitting = int(stand.length * min(1, bounds.max_bytes / stand.bytes))
        beyond = max(beyond, stand.length - fitting)
    keep_from = _keep_from(bounds, now)
    if keep_from == "":
        return free
    keep = read_id(keep_from)
    if bounds.shrink_every is not None and stand.shrink_from:
        keep = max(keep, read_id(stand.shrink_from))
    if keep > Id(0, 0) and beyond < free:
        oldest = keep if floor is None else min(keep, floor)
        aged = count_between(store, topic, partition, None, oldest)
        if aged is None:
            return None
        beyond = max(beyond, aged)
    return max(0, min(beyond, free))


@dataclass(frozen=True, slots=True)
class BlockingGroup:
    """One group on one partition.

    `owner` is the instance that holds it, '' for none. `unread` is null when the server cannot
    tell. `needs_unix_ms` is when the oldest entry was written that it has still to settle, null
    when there is none. `idle_seconds` is how long ago a consumer of the group was last seen, null
    when it never had one. `abandoned`: no instance owns it, and no client has read for it lately,
    although it has something to read. `dropped` counts what it ever lost to drop_unacked_*.
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
    """One partition: its memory and what keeps it.

    `kept_by` is group, archive (both: still needed, and beyond what retention would keep),
    retention (it would go later), settings (no setting ever trims it) or empty. `holder` is the
    group, or @archive, that needs the oldest entry that must stay, '' for none;
    `since_unix_ms` is when that entry was written. `needed` is how many entries there are from
    that one on, null for more than 100,000; `needed_bytes` is about their memory. `bytes` is the
    memory of the partition, `dead_bytes` that of its dead letters, `retry_bytes` that of the retry
    streams of its groups: about, null when the Redis user may not ask.
    """

    partition: int
    messages: int
    bytes: int | None
    dead: int
    dead_bytes: int | None
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
    """Something that keeps memory although retention would let it go, and what to do about it.

    `kind` is abandoned, behind, archive, missing_group or no_groups.
    """

    partition: int
    kind: str
    holder: str
    text: str
    advice: str


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What `doctor stream` found. `retention` and `archive` are the settings that hold.

    `unreadable` are values in Redis that cannot be read. A partition that they hide is no row.
    """

    topic: str
    now_unix_ms: int
    archive: str
    retention: dict[str, Any]
    messages: int
    bytes: int | None
    dead: int
    dead_bytes: int | None
    retry_bytes: int | None
    partitions: list[StreamRow]
    problems: list[BlockingProblem]
    unreadable: list[Unreadable]


def examine(
    store: Store,
    topic: str,
    configured: config.Topic | None,
    expected: Sequence[str],
    abandoned_after: float,
) -> StreamReport:
    """Look at every partition of a topic. Raises TopicMissing.

    `expected` are groups of the configuration. A group without an owner counts as abandoned once no
    consumer was seen for `abandoned_after` seconds.
    """
    bad = BadValues()
    count = topics.partition_count(store, topic)
    meta = topics.known_meta(store, topic, bad)
    holds = config.effective(configured or config.Topic(), meta.settings if meta else {})
    now = server_unix_ms(store.connection)
    calls = [retention.measure(store.keys, topic, number) for number in range(count)]
    rows, problems = [], []
    for number, reply in enumerate(measure_each(store, calls, bad)):
        stand = known_stand(reply, store.keys, topic, number, bad)
        if stand is None:
            continue
        groups = _groups(store, topic, number, stand, abandoned_after, bad)
        row = _row(store, topic, number, stand, groups, holds, now)
        rows.append(row)
        problems += _problems(topic, row, stand, holds, expected)
    return StreamReport(
        topic=topic,
        now_unix_ms=now,
        archive=holds.archive,
        retention=config.registered(holds)["retention"],
        messages=sum(row.messages for row in rows),
        bytes=known_sum(row.bytes for row in rows),
        dead=sum(row.dead for row in rows),
        dead_bytes=known_sum(row.dead_bytes for row in rows),
        retry_bytes=known_sum(row.retry_bytes for row in rows),
        partitions=rows,
        problems=problems,
        unreadable=bad.rows,
    )


def _beside(
    store: Store, topic: str, number: int, stand: Stand
) -> tuple[int, int | None, int | None]:
    """The dead letters of a partition, their bytes, and those of the retry streams."""
    dlq = store.keys.dlq(topic, number)
    streams = [dlq, *(store.keys.retry_stream(topic, number, group.name) for group in stand.groups)]
    (dead,) = ask(store, [("XLEN", dlq)])
    sizes = memory_of(store, streams, retention.SAMPLES)
    return int(dead), sizes[0], known_sum(sizes[1:])


def _groups(
    store: Store,
    topic: str,
    number: int,
    stand: Stand,
    abandoned_after: float,
    bad: BadValues,
) -> list[BlockingGroup]:
    units = [Unit(topic, number, group.name) for group in stand.groups]
    views = lease_views(store, units, bad)
    return [
        blocking_group(group, view, abandoned_after)
        for group, view in zip(stand.groups, views, strict=True)
    ]


def blocking_group(
    group: GroupStand, lease: LeaseView | None, abandoned_after: float
) -> BlockingGroup:
    """Where a group stands, and whether a consumer will still read; no lease is known for None."""
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


def _row(
    store: Store,
    topic: str,
    number: int,
    stand: Stand,
    groups: list[BlockingGroup],
    holds: config.Topic,
    now: int,
) -> StreamRow:
    holder, entry = floor_of(stand, holds.archive == "required")
    needed: int | None = 0
    if entry is not None:
        held = next((each for each in groups if each.group == holder), None)
        # Without pending entries the server's own count is that; else they are counted.
        if held is not None and not held.pending and held.unread is not None:
            needed = held.unread
        else:
            needed = count_between(store, topic, number, entry, None)
    needed_bytes = None
    if stand.bytes is not None and needed is not None:
        needed_bytes = stand.bytes * needed // max(1, stand.length)
    dead, dead_bytes, retry_bytes = _beside(store, topic, number, stand)
    return StreamRow(
        partition=number,
        messages=stand.length,
        bytes=stand.bytes,
        dead=dead,
        dead_bytes=dead_bytes,
        retry_bytes=retry_bytes,
        oldest_unix_ms=read_id(stand.first_id).ms if stand.first_id else None,
        kept_by=_kept_by(stand, holds.retention, holder, entry, needed, needed_bytes, now),
        holder=holder,
        since_unix_ms=entry.ms if entry else None,
        needed=needed,
        needed_bytes=needed_bytes,
        groups=groups,
    )


def _kept_by(
    stand: Stand,
    bounds: config.Retention,
    holder: str,
    entry: Id | None,
    needed: int | None,
    needed_bytes: int | None,
    now: int,
) -> str:
    """What keeps it. A holder does where retention would let go of the entry that it needs."""
    if not stand.length:
        return "empty"
    if not bounds.bounded:
        return "settings"
    if entry is None:
        return "retention"
    beyond = (
        bounds.ack_policy == "delete"
        or (bounds.max_age is not None and entry.ms < now - bounds.max_age * 1000)
        or (bounds.max_length is not None and (needed is None or needed > bounds.max_length))
        or (
            bounds.max_bytes is not None
            and (needed is None or needed_bytes is None or needed_bytes > bounds.max_bytes)
        )
        or (
            bounds.shrink_every is not None
            and bool(stand.shrink_from)
            and entry < read_id(stand.shrink_from)
        )
    )
    if not beyond:
        return "retention"
    return "archive" if holder == ARCHIVE else "group"


def _problems(
    topic: str, row: StreamRow, stand: Stand, holds: config.Topic, expected: Sequence[str]
) -> list[BlockingProblem]:
    present = {group.group for group in row.groups}
    found = [_missing_group(row, name) for name in expected if stand.length and name not in present]
    found += [_abandoned(topic, row, group) for group in row.groups if group.abandoned]
    held = next((each for each in row.groups if each.group == row.holder), None)
    if row.kept_by == "group" and held is not None and not held.abandoned:
        found.append(_behind(topic, row, held))
    if row.kept_by == "archive":
        text = f"what is not archived keeps {_amount(row.needed)}"
        advice = f'run `streamqd pipeline archive`; {topic} says archive = "required"'
        found.append(BlockingProblem(row.partition, "archive", ARCHIVE, text, advice))
    bounds = holds.retention
    if stand.length and not present and bounds.bounded and not bounds.without_groups:
        text = "no group reads it, so nothing is trimmed"
        advice = "start a consumer, or set retention.without_groups = true"
        found.append(BlockingProblem(row.partition, "no_groups", "", text, advice))
    return found


def _missing_group(row: StreamRow, name: str) -> BlockingProblem:
    text = f"the group {name} of the configuration does not exist there, so nothing is trimmed"
    advice = "start its consumer, or take it out of the configuration"
    return BlockingProblem(row.partition, "missing_group", name, text, advice)


def _abandoned(topic: str, row: StreamRow, group: BlockingGroup) -> BlockingProblem:
    seen = (
        "no client ever read for it" if group.idle_seconds is None else "no client reads for it now"
    )
    kept = f" and keeps {_amount(row.needed)}" if row.holder == group.group else ""
    text = f"the group {group.group} has no owner, {seen}{kept}"
    advice = (
        f"start its consumer, or, when it is not needed, `streamqd group delete {topic}"
        f" {group.group}`"
    )
    return BlockingProblem(row.partition, "abandoned", group.group, text, advice)


def _behind(topic: str, row: StreamRow, group: BlockingGroup) -> BlockingProblem:
    if group.owner:
        state = f"which {group.owner} owns"
        advice = f"see `streamqd partitions {topic}` for its lag and `streamqd pending {topic}`"
    else:
        state = "which no instance owns at the moment"
        advice = "start its consumer"
    unread = "an unknown number" if group.unread is None else f"{group.unread:,}"
    text = (
        f"the group {group.group}, {state}, keeps {_amount(row.needed)}:"
        f" {unread} unread, {group.pending:,} in its hands"
    )
    return BlockingProblem(row.partition, "behind", group.group, text, advice)


def _amount(needed: int | None) -> str:
    if needed is None:
        return f"more than {COUNT_MAX:,} messages"
    return plural(needed, "message")
