"""Read messages with a due time, earliest first: a group's retries, or a topic's delayed sends.

Both are stored in the same format: a sorted set of due times and a hash of packed fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamqd.admin.messages import FoundMessage, MessageFilter, MessageList, MessagePosition
from streamqd.admin.reading import ViewReader
from streamqd.errors import InvalidValueError
from streamqd.model import Assignment
from streamqd.store import retries, untrusted
from streamqd.store.keys import key_of
from streamqd.store.retries import Delayed, Holder
from streamqd.store.store import Store

PAGE = 64
BATCH = 64  # messages that are changed by one call
FIRST, LAST = " ", "\U0010ffff"  # sort before and after every place
# The buckets of a histogram, with their ends in seconds from now. Later messages are in LATER.
BUCKETS = {
    "overdue": 0,
    "within 1 min": 60,
    "within 10 min": 600,
    "within 1 h": 3_600,
    "within 6 h": 6 * 3_600,
    "within 24 h": 86_400,
    "within 7 d": 7 * 86_400,
}
LATER = "later"
COUNTS_MAX = 4_096  # ZCOUNT commands of one histogram
LAST_NAME = "~" * 8  # sorts after every place in a cursor, whose characters end with this one

Due = FoundMessage[Delayed]
Item = TypeVar("Item")
Row = TypeVar("Row")


def holder_of(topic: str, partition: int, group: str) -> Holder:
    """Return the assignment, or only topic and partition if `group` is '' (delayed sends)."""
    return Assignment(topic, partition, group) if group else (topic, partition)


def messages(
    store: Store, topic: str, group: str, partitions: int, row: Callable[[Due], Row]
) -> MessageList[Delayed, Row]:
    """Return the retries of a group, or the delayed sends of a topic if `group` is ''."""
    reader = ViewReader(store)
    holders = [holder_of(topic, number, group) for number in range(partitions)]

    def total() -> int:
        due = [key_of(store.keys, "delayed", each) for each in holders]
        return sum(each or 0 for each in reader.ask([("ZCARD", key) for key in due]))

    def read(
        some: Sequence[int], choice: MessageFilter, after: MessagePosition | None, _limit: int
    ) -> list[Iterator[Due]]:
        return [_read_in_order(reader, holders[each], choice.until_unix_ms, after) for each in some]

    def rows(found: Sequence[Due]) -> list[Row]:
        return [row(each) for each in found]

    return MessageList(reader, topic, partitions, total, tuple, read, rows)


@dataclass(frozen=True, slots=True)
class DueBucket:
    """The messages that are due after the previous bucket, up to `until_unix_ms` (inclusive).

    `label` is a name in `BUCKETS`, or LATER for the last bucket, which has no `until_unix_ms`.
    `cursor` is the start of the bucket, for a page of the list, '' for the first bucket.
    """

    label: str
    until_unix_ms: int | None
    messages: int
    cursor: str


@dataclass(frozen=True, slots=True)
class DueHistogram:
    """The waiting messages by due time, counted in the first `counted` of `partitions`."""

    buckets: Sequence[DueBucket]
    counted: int
    partitions: int

    @property
    def messages(self) -> int:
        """The number of counted messages."""
        return sum(each.messages for each in self.buckets)


def histogram(
    store: Store, topic: str, group: str, partitions: int, now_unix_ms: int
) -> DueHistogram:
    """Count retries of a group, or delayed sends of a topic if `group` is '', by due time.

    Sends at most `COUNTS_MAX` commands, each O(log n). An unreadable key counts as empty.
    """
    ends = [now_unix_ms + seconds * 1000 for seconds in BUCKETS.values()]
    counted = min(partitions, COUNTS_MAX // (len(ends) + 1))
    keys = [key_of(store.keys, "delayed", holder_of(topic, each, group)) for each in range(counted)]
    ranges = list(zip(["-inf", *(f"({end}" for end in ends)], [*ends, "+inf"], strict=True))
    replies = ViewReader(store).ask([("ZCOUNT", key, *each) for each in ranges for key in keys])
    starts = ["", *(str(MessagePosition(end, partitions - 1, LAST_NAME)) for end in ends)]
    buckets = [
        DueBucket(label, end, sum(each or 0 for each in replies[at : at + counted]), start)
        for at, label, end, start in zip(
            range(0, len(replies), counted),
            [*BUCKETS, LATER],
            [*ends, None],
            starts,
            strict=True,
        )
    ]
    return DueHistogram(buckets, counted, partitions)


def batches(items: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, list[Item]]]:
    """Group items by partition, in lists of at most BATCH. Holds one list per partition."""
    waiting: dict[int, list[Item]] = {}
    for partition, item in items:
        batch = waiting.setdefault(partition, [])
        batch.append(item)
        if len(batch) == BATCH:
            yield partition, waiting.pop(partition)
    yield from sorted(waiting.items())


def find(store: Store, holder: Holder, name: str) -> Due | None:
    """Return one message, None if it does not wait."""
    score = store.execute("ZSCORE", key_of(store.keys, "delayed", holder), name)
    if score is None:
        return None
    # Read the page that starts just before the message. Due times have no fraction.
    [one], _ = retries.rows(
        store.run(retries.page(store.keys, holder, (int(float(score)), name[:-1]), 1))
    )
    return _message_of(holder, one) if one.place == name else None


def _message_of(holder: Holder, one: Delayed) -> Due:
    return FoundMessage(
        MessagePosition(one.due_unix_ms, holder[1], one.place), one.due_unix_ms, one.fields, one
    )


def _read_in_order(
    reader: ViewReader, holder: Holder, until: int | None, after: MessagePosition | None
) -> Iterator[Due]:
    """Yield the messages of one partition after a position. Stops at the time `until`."""
    start = (0, "")
    if after is not None:
        partition = holder[1]
        start = (after.rank, after.place)
        if partition != after.partition:
            start = (after.rank, LAST if partition < after.partition else FIRST)
    while True:
        page, more = _page(reader, holder, start)
        for one in page:
            if until is not None and one.due_unix_ms >= until:
                return
            yield _message_of(holder, one)
        if not page or not more:
            return
        start = (page[-1].due_unix_ms, page[-1].place)


def _page(reader: ViewReader, holder: Holder, start: tuple[int, str]) -> tuple[list[Delayed], bool]:
    """Read a page. An unreadable due time is kept, and its message is left out."""
    due, items = key_of(reader.keys, "delayed", holder), key_of(reader.keys, "items", holder)
    (reply,) = reader.measure([retries.page(reader.keys, holder, start, PAGE)])
    if reply is None:
        return [], False
    page = []
    for row in reply.values[0]:
        one = reader.read(retries.row, row, due)
        if one is not None and abs(one.due_unix_ms) < untrusted.INTEGER_MAX:
            page.append(one)
        elif one is not None:  # the script has cut the message
            reader.add(InvalidValueError(due, one.place, f"{one.due_unix_ms} or beyond", "a time"))
    for one in page:
        for name in (b"retryCount", b"crashCount"):
            field, raw = f"{one.place}: {name.decode()}", one.fields.get(name)
            reader.read(untrusted.integer, raw, items, field, default=0)
    return page, bool(reply.values[1])
