"""Script calls that trim partitions and retry streams, and report which entries must stay.

The housekeeper and the administration use these calls. Any process may call the scripts, because
each script itself determines the oldest entry that is still needed.
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

REMOVED_MAX = 1_000_000  # maximum number of entries that one call removes
# To estimate the size of a stream, the scripts sample this many of its nodes. They contain the same
# number.
SAMPLES = 1_000
MISSING_MAX = 5_000  # maximum number of pending entries that one call settles


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
    """Build a call that removes acknowledged entries beyond the retention limits, oldest first.

    No entry is removed that a group still needs or, if `archive` is True, that is not archived. Any
    one of the limits is enough to remove an entry. `keep_from` is the ID from which entries are
    young enough to stay. Pass '' if age does not matter, or '0-0' to retain entries of any age. A
    `max_length` or `max_bytes` of None means no limit. `shrink_every` is the length of the shrink
    interval in seconds.

    The call removes up to `limit` entries. If a group in `expected` does not exist, it removes
    nothing. The same applies if no group reads the stream, unless `without_groups` is True.
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
    """Build a call that removes up to `limit` acknowledged entries from a group's retry stream."""
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
    """The result of trimming a stream.

    `removed` is the number of entries that were removed, and `floor` the smallest ID that must
    stay. `holder` is the group that needs this entry, '@archive' if the archive needs it, or '' if
    no entry is needed. `held` is the first entry that would have been trimmed if the holder did not
    need it, or ''. If `more` is True, another call may remove more entries.
    """

    removed: int
    floor: str
    holder: str
    held: str
    more: bool

    @classmethod
    def parse(cls, reply: Reply) -> Trimmed:
        """Parse an OK reply."""
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
    """Build a call that removes entries beyond the limits, even if they are not acknowledged.

    Use it only for a topic whose settings explicitly allow this loss. Entries before `drop_before`
    are removed because of their age. Pass '0-0' if age does not matter. If a group in `expected`
    does not exist, nothing is removed.
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
    """The number of removed entries, and for each group, how many of them it had not read."""

    removed: int
    unread: dict[str, int]

    @classmethod
    def parse(cls, reply: Reply) -> Dropped:
        """Parse an OK reply."""
        removed, flat = reply.values
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return cls(removed, {untrusted.label(name): lost for name, lost in pairs})


def settle_missing(keys: Keys, assignment: Assignment, count: int) -> Call:
    """Build a call that settles up to `count` entries that `drop` removed while they were pending.

    Only the pending entries of this group are settled.
    """
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
    cannot count the unread entries. `idle_ms` is the time since a consumer of the group was last
    active, or None if the group never had a consumer. `dropped_unread` and `dropped_pending` are
    the total numbers of entries that were dropped while they were unread or pending.
    """

    name: str
    pending: int
    needs: str
    unread: int | None
    idle_ms: int | None
    dropped_unread: int
    dropped_pending: int


class PartitionPositions(NamedTuple):
    """The memory use of a partition, and the positions that limit how far it can be trimmed.

    An ID is '' if there is no such entry. `bytes` is approximate, or None if the Redis user has no
    permission to measure it.
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
        """Parse an OK reply to `measure`.

        `key` is the key of the trimming record, which errors mention. Raises InvalidValueError.
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
    """Build a call that returns the memory use of a partition and the position of each group."""
    return scripts.build_call("retention_measure", keys, (topic, partition))


def _bound(most: int | None) -> int:
    return -1 if most is None else most


def _page(count: int, most: int) -> int:
    if not 1 <= count <= most:
        raise ContractError(f"a page of {count}, not 1 to {most}")
    return count
