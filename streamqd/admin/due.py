"""Read messages with a due time, earliest first: a group's retries, or a topic's delayed sends.

Both are stored in the same way: due times in a sorted set, and the fields of the messages in a
hash.
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
from streamqd.store.keys import key_by_name
from streamqd.store.retries import Delayed, Holder
from streamqd.store.store import Store

PAGE = 64
BATCH = 64  # maximum number of messages that one call changes
FIRST, LAST = " ", "\U0010ffff"  # sort before and after every place
# The buckets of a histogram, each with its end in seconds from now. Messages that are due after the
# last end are counted in LATER.
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
COUNTS_MAX = 4_096  # maximum number of ZCOUNT commands for one histogram
LAST_NAME = "~" * 8  # sorts after every place in a cursor, because ~ is the last valid character

Due = FoundMessage[Delayed]
Item = TypeVar("Item")
Row = TypeVar("Row")


def make_holder(topic: str, partition: int, group: str) -> Holder:
    """Return the assignment whose retries are read, or the partition of delayed sends.

    For delayed sends, `group` is ''.
    """
    return Assignment(topic, partition, group) if group else (topic, partition)


def messages(
    store: Store, topic: str, group: str, partitions: int, row: Callable[[Due], Row]
) -> MessageList[Delayed, Row]:
    """Return the retries of a group, or the delayed sends of a topic if `group` is ''."""
    reader = ViewReader(store)
    holders = [make_holder(topic, number, group) for number in range(partitions)]

    def total() -> int:
        due = [key_by_name(store.keys, "delayed", each) for each in holders]
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
    """The number of messages that are due after the previous bucket, up to the end of this one.

    `until_unix_ms` is the end (inclusive). `label` is a name in `BUCKETS`, or LATER for the last
    bucket, which has no end. To list the messages of the bucket, pass `cursor` to the list. It is
    '' for the first bucket.
    """

    label: str
    until_unix_ms: int | None
    messages: int
    cursor: str


@dataclass(frozen=True, slots=True)
class DueHistogram:
    """The number of waiting messages by due time.

    Counting is limited, so only the first `counted` of `partitions` partitions are included.
    """

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

    This sends no more than `COUNTS_MAX` commands, each of which takes O(log n). A key that cannot
    be read counts as empty.
    """
    ends = [now_unix_ms + seconds * 1000 for seconds in BUCKETS.values()]
    counted = min(partitions, COUNTS_MAX // (len(ends) + 1))
    keys = [
        key_by_name(store.keys, "delayed", make_holder(topic, each, group))
        for each in range(counted)
    ]
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
    """Group items by partition, and yield lists of at most BATCH items.

    Only one incomplete list per partition is kept in memory.
    """
    waiting: dict[int, list[Item]] = {}
    for partition, item in items:
        batch = waiting.setdefault(partition, [])
        batch.append(item)
        if len(batch) == BATCH:
            yield partition, waiting.pop(partition)
    yield from sorted(waiting.items())


def find(store: Store, holder: Holder, name: str) -> Due | None:
    """Return one message, or None if it is not waiting."""
    score = store.execute("ZSCORE", key_by_name(store.keys, "delayed", holder), name)
    if score is None:
        return None
    # Read the page that starts just before the message. Due times are whole milliseconds.
    [one], _ = retries.rows(
        store.run(retries.page(store.keys, holder, (int(float(score)), name[:-1]), 1))
    )
    return _to_message(holder, one) if one.place == name else None


def _to_message(holder: Holder, one: Delayed) -> Due:
    return FoundMessage(
        MessagePosition(one.due_unix_ms, holder[1], one.place), one.due_unix_ms, one.fields, one
    )


def _read_in_order(
    reader: ViewReader, holder: Holder, until: int | None, after: MessagePosition | None
) -> Iterator[Due]:
    """Yield the messages of one partition after a position, up to the due time `until`."""
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
            yield _to_message(holder, one)
        if not page or not more:
            return
        start = (page[-1].due_unix_ms, page[-1].place)


def _page(reader: ViewReader, holder: Holder, start: tuple[int, str]) -> tuple[list[Delayed], bool]:
    """Read a page. A message with an invalid due time is left out, and the reader records it."""
    due, items = (
        key_by_name(reader.keys, "delayed", holder),
        key_by_name(reader.keys, "items", holder),
    )
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
