"""Script calls that trim partitions and retry streams, and report which entries must stay.

The housekeeper and the administration use these calls. They need no token, because each script
determines itself which entries are still needed.
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
# Number of nodes of a stream that the scripts measure to estimate its size. The scripts contain the
# same number.
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

    An entry is removed as soon as it exceeds any one of the limits. Entries that a group still
    needs always stay, and so do entries that are not archived if `archive` is True. `keep_from` is
    the age limit: entries from this ID on stay. Pass '' for no age limit, or '0-0' to keep entries
    of any age. A `max_length` or `max_bytes` of None means no limit. At the end of every
    `shrink_every` seconds, the entries that already existed at the start of the interval are
    removed.

    The call removes up to `limit` entries. It removes nothing if a group in `expected` does not
    exist. It also removes nothing if no group reads the stream, unless `without_groups` is True.
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
    stay. `holder` is the group that needs the entry with this ID, '@archive' if the archive needs
    it, or '' if no entry is needed. `held` is the first entry that exceeds a limit and was kept
    only for this holder, or ''. If `more` is True, another call may remove more entries.
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

    Use it only for a topic whose settings explicitly allow this loss. Entries before the ID
    `drop_before` are too old and are removed. Pass '0-0' for no age limit. If a group in `expected`
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
    """The number of removed entries, and the number that each group had not read yet."""

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

    The call removes them from the pending entries of this group, and counts them as dropped.
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

    `needs` is the ID of the first entry that the group has not settled, or ''. `unread` is None if
    the server cannot count the unread entries. `idle_ms` is the time since a consumer of the group
    was last active, or None if the group never had a consumer. `dropped_unread` and
    `dropped_pending` count all entries ever removed by `drop` before the group had read or settled
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
    """The memory use of a partition, and the positions that limit how far it can be trimmed.

    An ID is '' if there is no such entry. `bytes` is an estimate, or None if the Redis user has no
    permission for the command MEMORY.
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

        `key` is the key of the trimming record, for error messages. Raises InvalidValueError if the
        record contains an invalid ID.
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
