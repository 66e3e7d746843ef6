"""Trim a topic for an operator (`streamqd trim`).

A trim never removes entries that a group or the archive still needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamqd import config
from streamqd.admin import backlog, topics, topics_settings
from streamqd.admin.reading import Id, Unreadable, ViewReader, measure, read_id, server_unix_ms
from streamqd.errors import RequestRefusedError
from streamqd.store import retention
from streamqd.store.retention import PartitionPositions, Trimmed
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

PAGE = 4_000  # maximum number of entries that one script removes
COUNT_MAX = 100_000  # maximum number of entries counted one by one in a partition
ARCHIVE = "@archive"  # stands for the archive in place of a group's name


@dataclass(frozen=True, slots=True)
class TrimRow:
    """One partition after a trim, or before one in a dry run.

    `removed` is the number of removed entries. In a dry run, it is an upper limit, because the
    server removes only whole nodes (100 entries by default), and it is null if it exceeds 100,000.
    `messages` is the number of entries that the partition has now, and `bytes` is their approximate
    memory use, or null without the permission to read it. `holder` is the group that needs the
    oldest entry that must stay, @archive if the archive needs it, or '' if no entry must stay.
    `held_since_unix_ms` is the time at which that entry was written.
    """

    partition: int
    removed: int | None
    messages: int
    bytes: int | None
    holder: str
    held_since_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class RetentionFloor:
    """The oldest entry of a partition that must stay, regardless of the topic's retention settings.

    `holder` is the group that still needs the entry, or @archive. `since_unix_ms` is the time at
    which the entry was written. If no entry must stay, `holder` and `entry_id` are '', and
    `since_unix_ms` is null.
    """

    partition: int
    holder: str
    entry_id: str
    since_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class TrimReport:
    """The result of `trim`.

    `removed` is the sum over the partitions with a known count. `unreadable` lists values in Redis
    that cannot be read. Their partitions were not trimmed.
    """

    topic: str
    dry_run: bool
    now_unix_ms: int
    removed: int
    partitions: list[TrimRow]
    unreadable: list[Unreadable]


def settings(store: Store, topic: str, configured: config.Topic | None) -> tuple[config.Topic, int]:
    """Return a topic's effective settings and its partition count.

    Raises TopicNotFoundError, and RequestRefusedError if a stored setting is invalid.
    """
    count = topics.partition_count(store, topic)
    reader, key = ViewReader(store), store.keys.meta(topic)
    stored = topics_settings.valid_settings(reader, store.execute("HGET", key, "settings"), key)
    if reader.rows:  # a trim must not guess which entries to keep
        raise RequestRefusedError(
            f"{reader.rows[0]}; run `streamqd doctor --only values` for the fix"
        )
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
    """Trim partitions to the entries that a topic with the settings `wanted` would keep.

    `expected` contains the groups that must exist. Raises RequestRefusedError if one of them is
    missing, or if no group reads the topic, because the trim could then remove messages that have
    not been handled yet.
    """
    now = server_unix_ms(store.connection)
    rows, reader = [], ViewReader(store)
    for number in partitions:
        part = _Partition(store, topic, number, wanted, now)
        positions = part.read_known_positions(reader)
        if positions is None:
            continue
        removed: int | None = None
        if dry_run:
            part.check_groups(positions, expected)
            removed = part.removable(positions)
        else:
            removed = part.trim(expected)
            positions = part.read_positions()
        holder, entry = find_floor(positions, wanted.archive == "required")
        rows.append(
            TrimRow(
                partition=number,
                removed=removed,
                messages=positions.length,
                bytes=positions.bytes,
                holder=holder,
                held_since_unix_ms=entry.ms if entry else None,
            )
        )
    total = sum(row.removed or 0 for row in rows)
    return TrimReport(topic, dry_run, now, total, rows, reader.rows)


def floors(
    reader: ViewReader, topic: str, partitions: Sequence[int], *, archive: bool
) -> list[RetentionFloor]:
    """Return the floor of each partition, which is the oldest entry that must stay.

    If `archive` is True, entries that are not archived must stay as well. A partition that cannot
    be measured is left out, and `reader` records the reason.
    """
    calls = [retention.measure(reader.keys, topic, each) for each in partitions]
    rows = []
    for number, reply in zip(partitions, reader.measure(calls), strict=True):
        positions = parse_positions(reader, topic, number, reply)
        if positions is not None:
            holder, entry = find_floor(positions, archive)
            since = entry.ms if entry else None
            rows.append(RetentionFloor(number, holder, str(entry or ""), since))
    return rows


def find_floor(positions: PartitionPositions, archive: bool) -> tuple[str, Id | None]:
    """Return the holder and the ID of the oldest entry that must stay, or '' and None."""
    needs = [(read_id(group.needs), group.name) for group in positions.groups if group.needs]
    if archive and positions.unarchived:
        needs.append((read_id(positions.unarchived), ARCHIVE))
    if not needs:
        return "", None
    entry, holder = min(needs)
    return holder, entry


def parse_positions(
    reader: ViewReader, topic: str, partition: int, reply: Reply | None
) -> PartitionPositions | None:
    """Parse a reply to `retention.measure`. Return None if it is invalid.

    A group whose name is not UTF-8 is shown with escaped bytes and recorded as unreadable.
    """

    def parse(found: Reply, trim: str) -> PartitionPositions:
        for row in found.values[6]:
            reader.text(row[0], reader.keys.stream(topic, partition), "group")
        return PartitionPositions.parse(found, trim)

    return reader.figures(parse, reply, reader.keys.trim(topic, partition))


@dataclass(frozen=True, slots=True)
class _Partition:
    """One partition, the effective settings of its topic, and the time on the server's clock."""

    store: Store
    topic: str
    number: int
    holds: config.Topic
    now: int

    def read_known_positions(self, reader: ViewReader) -> PartitionPositions | None:
        (reply,) = reader.measure([self._measure()])
        return parse_positions(reader, self.topic, self.number, reply)

    def read_positions(self) -> PartitionPositions:
        (reply,) = measure(self.store, [self._measure()])
        return PartitionPositions.parse(reply)

    def _measure(self) -> Call:
        return retention.measure(self.store.keys, self.topic, self.number)

    def trim(self, expected: Sequence[str]) -> int:
        bounds, removed = self.holds.retention, 0
        while True:
            reply = self.store.run(
                retention.trim(
                    self.store.keys,
                    self.topic,
                    self.number,
                    keep_from=self._keep_from(),
                    max_length=bounds.max_length,
                    max_bytes=bounds.max_bytes,
                    shrink_every=bounds.shrink_every,
                    archive=self.holds.archive == "required",
                    without_groups=bounds.without_groups,
                    limit=PAGE,
                    expected=expected,
                )
            )
            if reply.word == "NO_GROUPS":
                self.check_groups(self.read_positions(), ())
                return removed  # the partition is empty
            if reply.word == "MISSING_GROUP":
                raise self._missing(reply.values[0].decode())
            trimmed = Trimmed.parse(reply)
            removed += trimmed.removed
            if not trimmed.more:
                return removed

    def _keep_from(self) -> str:
        bounds = self.holds.retention
        if bounds.ack_policy == "delete":
            return ""
        if bounds.max_age is None:
            return "0-0"
        return f"{max(0, self.now - round(bounds.max_age * 1000))}-0"

    def check_groups(self, positions: PartitionPositions, expected: Sequence[str]) -> None:
        present = {group.name for group in positions.groups}
        if not present and positions.length and not self.holds.retention.without_groups:
            raise RequestRefusedError(
                f"no group reads partition {self.number} of {self.topic}, so no position bounds the"
                " trim; start a consumer, or set retention.without_groups = true for the topic"
            )
        for name in expected:
            if positions.length and name not in present:
                raise self._missing(name)

    def _missing(self, group: str) -> RequestRefusedError:
        return RequestRefusedError(
            f"group {group} of the configuration does not exist on partition {self.number} of"
            f" {self.topic} and needs the entries to be trimmed; start its consumer, or remove it"
            " from the configuration"
        )

    def removable(self, positions: PartitionPositions) -> int | None:
        """Return the maximum number of entries that a trim would remove.

        Return None if there are more than COUNT_MAX, because counting them would take too long.
        """
        bounds = self.holds.retention
        _, floor = find_floor(positions, self.holds.archive == "required")
        free = positions.length
        if floor is not None:
            counted = self._count(floor)
            if counted is None:
                return None
            free = counted
        beyond = 0
        if bounds.max_length is not None:
            beyond = positions.length - bounds.max_length
        if bounds.max_bytes is not None and positions.bytes:
            fitting = int(positions.length * min(1, bounds.max_bytes / positions.bytes))
            beyond = max(beyond, positions.length - fitting)
        keep_from = self._keep_from()
        if keep_from == "":
            return free
        keep = read_id(keep_from)
        if bounds.shrink_every is not None and positions.shrink_from:
            keep = max(keep, read_id(positions.shrink_from))
        if keep > Id(0, 0) and beyond < free:
            aged = self._count(keep if floor is None else min(keep, floor))
            if aged is None:
                return None
            beyond = max(beyond, aged)
        return max(0, min(beyond, free))

    def _count(self, before: Id) -> int | None:
        return count(self.store, self.topic, self.number, None, before)


def count(
    store: Store, topic: str, partition: int, first: Id | None, before: Id | None
) -> int | None:
    """Count the entries from `first` (inclusive) to `before` (exclusive).

    Return None if there are more than COUNT_MAX.
    """
    after = "0-0" if first is None else str(first.before())
    upto = "+" if before is None else str(before.before())
    stream = store.keys.stream(topic, partition)
    total, whole = backlog.count_between(store, stream, after, upto, COUNT_MAX)
    return total if whole else None
