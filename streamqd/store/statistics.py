"""Reading the figures that metrics, status and health show. Writes nothing.

Called by the housekeeper for what its instance owns, and by the views of the command line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamqd.config.setting import NAME
from streamqd.errors import BadValue
from streamqd.model import QUERIES, Unit
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

QUERIES_MAX = 100  # of one partition that are shown, those that showed their position last
_QUERY = re.compile((QUERIES + NAME.pattern).encode())
TRIM = "the record of trimming of a partition"  # where nobody has said which one it is


class QueryFigures(NamedTuple):
    """How far a Spark query is on a partition."""

    group: str  # spark:NAME
    lag: int | None  # None when the server does not know
    idle_ms: int | None  # since it last showed its position


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """One partition, whoever reads it. Ids are '' when there is none.

    `bad` is what stands in Redis instead of a figure, which then counts as none.
    """

    length: int
    added: int  # entries ever added
    first_id: str
    last_id: str
    dead: int
    scheduled: int
    trimmed_to: str  # the first id that trimming kept
    next_due_unix_ms: int | None = None  # of the scheduled sends
    queries: tuple[QueryFigures, ...] = ()
    bad: BadValue | None = None
    counted: bool = True  # False: `added` leaves out what others removed, see the script


class Backlog(NamedTuple):
    """What a group has before it in one stream. Ids are '' when there is none."""

    pending: int
    oldest_pending_id: str
    unread: int | None  # None when the server does not know
    oldest_unread_id: str
    length: int


@dataclass(frozen=True, slots=True)
class UnitFigures:
    """One group on one partition: the partition's stream and the group's retry stream."""

    main: Backlog
    retry: Backlog
    delayed: int
    next_due_unix_ms: int | None

    @property
    def pending(self) -> int:
        """Entries that were delivered and not settled."""
        return self.main.pending + self.retry.pending

    @property
    def lag(self) -> int | None:
        """Entries not yet delivered, or None when the server does not know."""
        if self.main.unread is None or self.retry.unread is None:
            return None
        return self.main.unread + self.retry.unread

    def oldest_unread_unix_ms(self) -> int | None:
        """Return when the oldest unread entry was written, by its id; None when all are read."""
        ids = (self.main.oldest_unread_id, self.retry.oldest_unread_id)
        return min((unix_ms(each) for each in ids if each), default=None)

    def oldest_unix_ms(self) -> int | None:
        """Return when the oldest entry that is not settled was written; None when all are."""
        ids = (*self.main[1::2], *self.retry[1::2])
        return min((unix_ms(str(each)) for each in ids if each), default=None)


def unix_ms(entry_id: str) -> int:
    """Return the time part of an entry id.

    A client may choose an id of its own, up to 2^64: then the time is the last one that readers of
    our figures take for a number.
    """
    return min(int(entry_id.partition("-")[0]), untrusted.INTEGER_MAX)


def measure_partition(keys: Keys, topic: str, partition: int) -> Call:
    """Ask for the figures of one partition."""
    return scripts.on("partition_measure", keys, (topic, partition))


def partition_figures(reply: Reply, key: str = TRIM) -> PartitionFigures:
    """Read the answer to `measure_partition`; `key` is that of the record of trimming."""
    length, added, first, last, dead, scheduled, kept, due, queries, counted = reply.rest
    trimmed_to, bad = "", None
    try:
        trimmed_to = untrusted.entry_id(kept, key, "first", default="")
    except BadValue as error:
        bad = error
    return PartitionFigures(
        length=int(length),
        added=untrusted.integer(added, key, "removed"),
        first_id=first.decode(),
        last_id=last.decode(),
        dead=int(dead),
        scheduled=int(scheduled),
        trimmed_to=trimmed_to,
        next_due_unix_ms=due_of(due),
        queries=_queries(queries),
        bad=bad,
        counted=bool(counted),
    )


def _queries(raw: list[Any]) -> tuple[QueryFigures, ...]:
    """Of groups that are called as queries are: anybody can make them, and each is a series."""
    found = [
        QueryFigures(
            group.decode(),
            None if lag == b"" else int(lag),
            None if idle == b"" else int(idle),
        )
        for group, lag, idle in raw
        if _QUERY.fullmatch(group)
    ]
    found.sort(key=lambda each: (each.idle_ms is None, each.idle_ms, each.group))
    return tuple(found[:QUERIES_MAX])


def measure_unit(keys: Keys, unit: Unit) -> Call:
    """Ask for the figures of one group on one partition."""
    return scripts.on("unit_measure", keys, unit)


def unit_figures(reply: Reply) -> UnitFigures | None:
    """Read the answer to `measure_unit`. None: the group does not exist there."""
    if reply.word == "NOGROUP":
        return None
    main, retry, delayed, due = reply.rest
    return UnitFigures(
        main=_backlog(main),
        retry=_backlog(retry),
        delayed=int(delayed),
        next_due_unix_ms=due_of(due),
    )


LETTERS_AT_ONCE = 500  # dead letters that one call counts
GROUP_BYTES_MAX = 256  # of the name of a group in a dead letter
GROUPS_MAX = 1_000  # that letters may name; with more, nothing is known


@dataclass(frozen=True, slots=True)
class LetterCount:
    """Dead letters of one partition by group, counted from the oldest on as far as `after`.

    `whole` says that all are counted, so that the counts are those of now.
    """

    by_group: Mapping[str, int] = field(default_factory=dict)
    after: str = ""
    whole: bool = False

    def of(self, group: str) -> int | None:
        """How many a group has, None while not all are counted."""
        return self.by_group.get(group, 0) if self.whole else None


def count_letters(keys: Keys, topic: str, partition: int, known: LetterCount) -> Call:
    """Ask for the letters behind those that are counted."""
    place = topic, partition
    return scripts.on("letters_measure", keys, place, after=known.after, count=LETTERS_AT_ONCE)


def letters_counted(known: LetterCount, reply: Reply) -> LetterCount:
    """Add the answer to `count_letters`. Begins again when letters have gone meanwhile."""
    counted, last, more, there = reply.rest
    found = Counter(known.by_group)
    for name, count in zip(counted[::2], counted[1::2], strict=True):
        # A name that is none of ours is counted under what can be shown of it.
        found[name[:GROUP_BYTES_MAX].decode("utf-8", "replace")] += int(count)
    if more:
        return LetterCount(found, last.decode())
    if found.total() != int(there) or len(found) > GROUPS_MAX:
        return LetterCount()
    return LetterCount(found, last.decode(), whole=True)


def _backlog(raw: list[Any]) -> Backlog:
    pending, oldest_pending, unread, oldest_unread, length = raw
    return Backlog(
        pending=int(pending),
        oldest_pending_id=oldest_pending.decode(),
        unread=None if unread == b"" else int(unread),
        oldest_unread_id=oldest_unread.decode(),
        length=int(length),
    )


def due_of(raw: bytes) -> int | None:
    """Read the earliest due time, unix ms; None when nothing is delayed.

    A score may be anything: the script cuts it to what can be read, so it may be negative.
    """
    if not raw:
        return None
    return untrusted.integer(raw, "a due time", low=-untrusted.INTEGER_MAX)
