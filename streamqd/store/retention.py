"""Trimming partitions and retry streams, and what holds it up.

Called by the housekeeper and the administration: each script is right whoever runs it, and finds
the floor itself. Each function builds a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamqd.errors import ContractError
from streamqd.model import Unit
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.store.statistics import TRIM

REMOVED_MAX = 1_000_000  # entries removed by one call at most
SAMPLES = 1_000  # nodes that the server looks at to tell the size of a stream, as the scripts say
GHOSTS_MAX = 5_000  # pending entries settled by one call at most


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
    """Trim a partition to what is retained or not acknowledged by all groups.

    `keep_from` is the id from which age retains entries, '' when age retains none, '0-0' when it
    retains all. `shrink_every` is in seconds. `expected` are groups that must exist.
    """
    return scripts.on(
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


def trim_retry(keys: Keys, unit: Unit, limit: int) -> Call:
    """Trim the retry stream of a group to what it has not acknowledged."""
    return scripts.get("stream_trim").call(
        {"stream": keys.retry_stream(*unit)},
        keep_from="",
        max_len=-1,
        max_bytes=-1,
        shrink_ms=-1,
        archive=False,
        groupless=False,
        limit=_page(limit, REMOVED_MAX),
        expected=[unit.group],
    )


class Trimmed(NamedTuple):
    """How many went, the smallest id that must stay, and the group (or archive) that holds it.

    `held` is the first entry that is kept for the holder alone, as no bound retains it, or ''.
    `holder` is '' when nobody needs any. `more` tells that a call may remove more.
    """

    removed: int
    floor: str
    holder: str
    held: str
    more: bool

    @classmethod
    def parse(cls, reply: Reply) -> Trimmed:
        """Read OK."""
        removed, floor, holder, held, more = reply.rest
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
    """Remove entries beyond limits, acknowledged or not: what the topic asks for by name.

    `drop_before` is the id before which age lets entries go, '0-0' when it lets none.
    """
    return scripts.on(
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
    """How many went, and of each group how many of them it had not read."""

    removed: int
    unread: dict[str, int]

    @classmethod
    def parse(cls, reply: Reply) -> Dropped:
        """Read OK."""
        removed, flat = reply.rest
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return cls(removed, {untrusted.label(name): lost for name, lost in pairs})


def settle_ghosts(keys: Keys, unit: Unit, count: int) -> Call:
    """Settle what the group has in hand of entries that `drop` removed."""
    return scripts.get("ghost_settle").call(
        {
            "stream": keys.stream(unit.topic, unit.partition),
            "attempts": keys.attempts(*unit),
            "trim": keys.trim(unit.topic, unit.partition),
        },
        group=unit.group,
        count=_page(count, GHOSTS_MAX),
    )


class GroupStand(NamedTuple):
    """Where a group stands in a partition.

    `needs` is the first entry that it has still to settle, '' when there is none. `unread` is None
    when the server does not know. `idle_ms` is how long ago a consumer of it was last seen, None
    when it never had one.
    `dropped_*` is what it ever lost to limits that drop what is not acknowledged.
    """

    name: str
    pending: int
    needs: str
    unread: int | None
    idle_ms: int | None
    dropped_unread: int
    dropped_pending: int


class Stand(NamedTuple):
    """The memory of a partition and what keeps it. Ids are '' when there is none.

    `bytes` is about, None when the Redis user may not ask for it.
    """

    length: int
    bytes: int | None
    first_id: str
    last_id: str
    archived: str
    shrink_from: str
    groups: list[GroupStand]
    unarchived: str  # the first entry that is not archived

    @classmethod
    def parse(cls, reply: Reply, key: str = TRIM) -> Stand:
        """Read OK of `measure`. Raises BadValue, of the record of trimming, the hash `key`."""
        length, size, first, last, archived, shrink_from, groups, unarchived = reply.rest
        return cls(
            length=int(length),
            bytes=None if size == b"" else int(size),
            first_id=first.decode(),
            last_id=last.decode(),
            archived=untrusted.entry_id(archived, key, "archived", default=""),
            shrink_from=untrusted.entry_id(shrink_from, key, "shrink_from", default=""),
            groups=[
                GroupStand(
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
    """Ask how large a partition is and who needs what of it."""
    return scripts.on("retention_measure", keys, (topic, partition))


def _bound(most: int | None) -> int:
    return -1 if most is None else most


def _page(count: int, most: int) -> int:
    if not 1 <= count <= most:
        raise ContractError(f"a page of {count}, not 1 to {most}")
    return count
