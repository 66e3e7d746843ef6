"""Script calls that trim partitions and retry streams, and report the entries that must stay.

The housekeeper and the administration use these calls. Any process may run the scripts, because
each script computes the oldest needed entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamqd.errors import ContractError
from streamqd.model import Assignment
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.statistics import TRIM

REMOVED_MAX = 1_000_000  # entries removed by one call
SAMPLES = 1_000  # nodes sampled to estimate the size of a stream, the same as in the scripts
MISSING_MAX = 5_000  # pending entries settled by one call


def trim(
    keys: Keys,
    topic: str,
    partition: int,
    *,
    keep_from: str,
    max_length: int | None,
    archive: bool,
    limit: int,
    expected: Sequence[str],
    max_bytes: int | None = None,
    shrink_every: float | None = None,
    without_groups: bool = False,
) -> Call:
    """Remove entries that are acknowledged by all groups and no longer retained.

    `keep_from` is the first ID that is retained by age, '' if no entry is, or '0-0' if all are.
    `shrink_every` is in seconds. `expected` are groups that must exist.
    """
    return scripts.build_call(
        "stream_trim",
        keys,
        (topic, partition),
        optional=("trim",),
        keep_from=keep_from,
        max_len=_bound(max_length),
        max_bytes=_bound(max_bytes),
        shrink_ms=-1 if shrink_every is None else round(shrink_every * 1000),
        archive=archive,
        groupless=without_groups,
        limit=_page(limit, REMOVED_MAX),
        expected=expected,
    )


def trim_retry(keys: Keys, assignment: Assignment, limit: int) -> Call:
    """Remove the acknowledged entries from the start of a group's retry stream."""
    return scripts.get("stream_trim").call(
        {"stream": keys.retry_stream(*assignment)},
        keep_from="",
        max_len=-1,
        max_bytes=-1,
        shrink_ms=-1,
        archive=False,
        groupless=False,
        limit=_page(limit, REMOVED_MAX),
        expected=[assignment.group],
    )


class Trimmed(NamedTuple):
    """The number of removed entries, the smallest ID that must stay, and its holder.

    `holder` is the group, or @archive, that needs this entry, or ''. `held` is the first entry that
    would be trimmed but for the holder, or ''. With `more`, another call may remove more.
    """

    removed: int
    floor: str
    holder: str
    held: str
    more: bool

    @classmethod
    def parse(cls, reply: Reply) -> Trimmed:
        """Parse the reply OK."""
        removed, floor, holder, held, more = reply.values
        label = untrusted.label
        return cls(removed, label(floor), label(holder), label(held), bool(more))


def drop(
    keys: Keys,
    topic: str,
    partition: int,
    *,
    drop_before: str,
    max_length: int | None,
    archive: bool,
    limit: int,
    expected: Sequence[str],
) -> Call:
    """Remove entries beyond limits, even unacknowledged ones, if the topic explicitly allows it.

    Entries before `drop_before` are removed because of their age. With '0-0', there are none.
    """
    return scripts.build_call(
        "stream_drop",
        keys,
        (topic, partition),
        drop_before=drop_before,
        max_len=_bound(max_length),
        archive=archive,
        limit=_page(limit, REMOVED_MAX),
        expected=expected,
    )


class Dropped(NamedTuple):
    """The number of removed entries, and for each group the number of unread ones among them."""

    removed: int
    unread: dict[str, int]

    @classmethod
    def parse(cls, reply: Reply) -> Dropped:
        """Parse the reply OK."""
        removed, flat = reply.values
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return cls(removed, {untrusted.label(name): lost for name, lost in pairs})


def settle_missing(keys: Keys, assignment: Assignment, count: int) -> Call:
    """Settle the group's pending entries that `drop` removed."""
    return scripts.get("missing_settle").call(
        {
            "stream": keys.stream(assignment.topic, assignment.partition),
            "attempts": keys.attempts(*assignment),
            "trim": keys.trim(assignment.topic, assignment.partition),
        },
        group=assignment.group,
        count=_page(count, MISSING_MAX),
    )


class GroupPosition(NamedTuple):
    """The position of a group in a partition.

    `needs` is the first entry that the group has not settled, or ''. `unread` is None if the server
    cannot count it. `idle_ms` is the time since a consumer of the group was active, or None if it
    never had one. `dropped_*` count all entries that were dropped before the group acknowledged
    them.
    """

    name: str
    pending: int
    needs: str
    unread: int | None
    idle_ms: int | None
    dropped_unread: int
    dropped_pending: int


class PartitionPositions(NamedTuple):
    """The memory use of a partition, and the positions that limit its trimming.

    Missing IDs are ''. `bytes` is approximate, or None if the Redis user may not read it.
    """

    length: int
    bytes: int | None
    first_id: str
    last_id: str
    archived: str
    shrink_from: str
    groups: list[GroupPosition]
    unarchived: str  # the first entry that is not archived

    @classmethod
    def parse(cls, reply: Reply, key: str = TRIM) -> PartitionPositions:
        """Parse the reply OK of `measure`.

        Raises InvalidValueError, naming the trim record `key`.
        """
        length, size, first, last, archived, shrink_from, groups, unarchived = reply.values
        return cls(
            length=int(length),
            bytes=None if size == b"" else int(size),
            first_id=first.decode(),
            last_id=last.decode(),
            archived=untrusted.entry_id(archived, key, "archived", default=""),
            shrink_from=untrusted.entry_id(shrink_from, key, "shrink_from", default=""),
            groups=[
                GroupPosition(
                    untrusted.label(name),
                    pending,
                    needs.decode(),
                    None if unread == b"" else int(unread),
                    None if idle == b"" else int(idle),
                    lost_unread,
                    lost_pending,
                )
                for name, pending, needs, unread, idle, lost_unread, lost_pending in groups
            ],
            unarchived=unarchived.decode(),
        )


def measure(keys: Keys, topic: str, partition: int) -> Call:
    """Build the call that returns the size of a partition and each group's position."""
    return scripts.build_call("retention_measure", keys, (topic, partition))


def _bound(most: int | None) -> int:
    return -1 if most is None else most


def _page(count: int, most: int) -> int:
    if not 1 <= count <= most:
        raise ContractError(f"a page of {count}, not 1 to {most}")
    return count
