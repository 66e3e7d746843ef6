"""Read the figures that metrics, status and health show. This module writes nothing.

The housekeeper reads the figures of its own instance's assignments, and the command line reads all
figures that its views show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamqd.config.setting import NAME
from streamqd.errors import InvalidValueError
from streamqd.model import QUERY_PREFIX, Assignment
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

QUERIES_MAX = 100  # maximum number of queries of a partition that are shown
_QUERY = re.compile((QUERY_PREFIX + NAME.pattern).encode())
# Labels for errors if the caller passes no key.
TRIM = "the record of trimming of a partition"
RETRIES = "the retries of a group on a partition"


class QueryFigures(NamedTuple):
    """The position of a Spark query on a partition, as the query last reported it."""

    group: str  # name of the group that shows the position, `spark:NAME`
    lag: int | None  # None if the server cannot count it
    idle_ms: int | None  # milliseconds since its last report


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """The figures of one partition. An ID is '' if there is no such entry.

    If a figure cannot be read, it is treated as missing, and `bad` is the error.
    """

    length: int
    added: int  # number of entries ever added
    first_id: str
    last_id: str
    dead: int
    delayed_sends: int
    trimmed_to: str  # the first ID that trimming kept
    next_due_unix_ms: int | None = None  # due time of the next delayed send
    queries: tuple[QueryFigures, ...] = ()
    bad: InvalidValueError | None = None
    counted: bool = True  # False if `added` does not include entries that other clients removed


class Backlog(NamedTuple):
    """The unfinished entries of a group in one stream. An ID is '' if there is no such entry."""

    pending: int
    oldest_pending_id: str
    unread: int | None  # None if the server cannot count them
    oldest_unread_id: str
    length: int


@dataclass(frozen=True, slots=True)
class AssignmentFigures:
    """The figures of one group on one partition.

    They cover both the partition stream (`main`) and the group's retry stream (`retry`).
    """

    main: Backlog
    retry: Backlog
    waiting_retries: int
    next_due_unix_ms: int | None

    @property
    def pending(self) -> int:
        """The number of entries that are delivered but not settled."""
        return self.main.pending + self.retry.pending

    @property
    def lag(self) -> int | None:
        """The number of entries not delivered yet, or None if the server cannot count them."""
        if self.main.unread is None or self.retry.unread is None:
            return None
        return self.main.unread + self.retry.unread

    def oldest_unread_unix_ms(self) -> int | None:
        """Return the time in the ID of the oldest unread entry, or None if all are read."""
        ids = (self.main.oldest_unread_id, self.retry.oldest_unread_id)
        return min((unix_ms(each) for each in ids if each), default=None)

    def oldest_pending_unix_ms(self) -> int | None:
        """Return the time in the ID of the oldest pending entry, or None if none is pending."""
        ids = (self.main.oldest_pending_id, self.retry.oldest_pending_id)
        return min((unix_ms(each) for each in ids if each), default=None)

    def oldest_unix_ms(self) -> int | None:
        """Return the time in the ID of the oldest unsettled entry, or None if all are settled."""
        ids = (*self.main[1::2], *self.retry[1::2])
        return min((unix_ms(str(each)) for each in ids if each), default=None)


def unix_ms(entry_id: str) -> int:
    """Return the time in an entry ID (unix ms).

    A client may choose any ID up to 2^64. The result is therefore limited to INTEGER_MAX, the
    largest integer that readers of the figures accept.
    """
    return min(int(entry_id.partition("-")[0]), untrusted.INTEGER_MAX)


def measure_partition(keys: Keys, topic: str, partition: int) -> Call:
    """Build a call that returns the figures of one partition."""
    return scripts.build_call("partition_measure", keys, (topic, partition))


def partition_figures(reply: Reply, key: str = TRIM) -> PartitionFigures:
    """Parse the reply to `measure_partition`.

    `key` is the key of the trimming record, for error messages.
    """
    length, added, first, last, dead, delayed, kept, due, queries, counted = reply.values
    trimmed_to, bad = "", None
    try:
        trimmed_to = untrusted.entry_id(kept, key, "first", default="")
    except InvalidValueError as error:
        bad = error
    return PartitionFigures(
        length=int(length),
        added=untrusted.integer(added, key, "removed"),
        first_id=first.decode(),
        last_id=last.decode(),
        dead=int(dead),
        delayed_sends=int(delayed),
        trimmed_to=trimmed_to,
        next_due_unix_ms=parse_due_time(due),
        queries=_queries(queries),
        bad=bad,
        counted=bool(counted),
    )


def _queries(raw: list[Any]) -> tuple[QueryFigures, ...]:
    """Return the figures of the groups that show the positions of queries (`spark:NAME`).

    Any client can create such groups, so only the QUERIES_MAX that reported last are returned.
    """
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


def measure_assignment(keys: Keys, assignment: Assignment) -> Call:
    """Build a call that returns the figures of one group on one partition."""
    return scripts.build_call("assignment_measure", keys, assignment)


def assignment_figures(reply: Reply, key: str = RETRIES) -> AssignmentFigures | None:
    """Parse the reply to `measure_assignment`.

    Return None if the group does not exist on the partition. `key` is the key that holds the due
    times of retries, for error messages.
    """
    if reply.word == "NOGROUP":
        return None
    main, retry, waiting, due = reply.values
    return AssignmentFigures(
        main=_backlog(main),
        retry=_backlog(retry),
        waiting_retries=int(waiting),
        next_due_unix_ms=parse_due_time(due, key, "a due time"),
    )


DEAD_LETTERS_AT_ONCE = 500  # maximum number of dead letters that one call counts
GROUP_BYTES_MAX = 256  # number of bytes to which the name of a group in a dead letter is cut
GROUPS_MAX = 1_000  # if the dead letters belong to more groups than this, all counts are unknown


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """The numbers of dead letters of one partition by group.

    It may take several calls to count all dead letters. `after` is the ID of the last one counted
    so far, and `whole` is True once all are counted.
    """

    by_group: Mapping[str, int] = field(default_factory=dict)
    after: str = ""
    whole: bool = False

    def get(self, group: str) -> int | None:
        """Return the number of a group's dead letters, or None if not all are counted yet."""
        return self.by_group.get(group, 0) if self.whole else None


def count_dead_letters(keys: Keys, topic: str, partition: int, known: DeadLetterCount) -> Call:
    """Build a call that continues the count `known` with the next dead letters."""
    place = topic, partition
    return scripts.build_call(
        "dead_letters_measure", keys, place, after=known.after, count=DEAD_LETTERS_AT_ONCE
    )


def merge_dead_letter_count(known: DeadLetterCount, reply: Reply) -> DeadLetterCount:
    """Return the count `known`, continued with the counts in the reply.

    If dead letters were removed since the count was started, it starts again from the first one.
    """
    counted, last, more, there = reply.values
    found = Counter(known.by_group)
    for name, count in zip(counted[::2], counted[1::2], strict=True):
        # A name may be invalid, so use a printable form of it.
        found[name[:GROUP_BYTES_MAX].decode("utf-8", "replace")] += int(count)
    if more:
        return DeadLetterCount(found, last.decode())
    if found.total() != int(there) or len(found) > GROUPS_MAX:
        return DeadLetterCount()
    return DeadLetterCount(found, last.decode(), whole=True)


def _backlog(raw: list[Any]) -> Backlog:
    pending, oldest_pending, unread, oldest_unread, length = raw
    return Backlog(
        pending=int(pending),
        oldest_pending_id=oldest_pending.decode(),
        unread=None if unread == b"" else int(unread),
        oldest_unread_id=oldest_unread.decode(),
        length=int(length),
    )


def parse_due_time(raw: bytes, key: str = "a due time", field: str = "") -> int | None:
    """Parse a due time (unix ms). Return None for an empty reply, because no message is delayed.

    Another client may have set any due time, even a negative one, but the script limits it to
    integers that a double represents exactly. `key` and `field` are for error messages.
    """
    if not raw:
        return None
    return untrusted.integer(raw, key, field, low=-untrusted.INTEGER_MAX)
