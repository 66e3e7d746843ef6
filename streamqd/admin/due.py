"""Messages with a due time: retries of a group, and delayed sends of a topic, the earliest first.

Both are stored in the same form: a sorted set of due times and a hash of packed fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from streamqd.admin.messages import FoundMessage, MessageFilter, MessageList, MessagePosition
from streamqd.admin.reading import BadValues, ask, measure_each
from streamqd.errors import BadValue
from streamqd.model import Unit
from streamqd.store import retries, untrusted
from streamqd.store.keys import named
from streamqd.store.retries import Delayed, Holder
from streamqd.store.scripts import Reply
from streamqd.store.store import Store

PAGE = 64
BATCH = 64  # messages that are changed by one call
FIRST, LAST = " ", "\U0010ffff"  # sort before and after every place

Due = FoundMessage[Delayed]
Item = TypeVar("Item")
Row = TypeVar("Row")


def holder_of(topic: str, partition: int, group: str) -> Holder:
    """Return the unit of a group's retries, or with '' topic and partition."""
    return Unit(topic, partition, group) if group else (topic, partition)


def messages(
    store: Store, topic: str, group: str, partitions: int, row: Callable[[Due], Row]
) -> MessageList[Delayed, Row]:
    """Return the retries of a group, or with '' the delayed sends of a topic."""
    bad = BadValues()
    holders = [holder_of(topic, number, group) for number in range(partitions)]

    def total() -> int:
        due = [named(store.keys, "delayed", each) for each in holders]
        return sum(each or 0 for each in ask(store, [("ZCARD", key) for key in due], bad))

    def read(
        some: Sequence[int], choice: MessageFilter, after: MessagePosition | None, _limit: int
    ) -> list[Iterator[Due]]:
        return [_ordered(store, holders[each], choice.until_unix_ms, after, bad) for each in some]

    def rows(found: Sequence[Due]) -> list[Row]:
        return [row(each) for each in found]

    return MessageList(store, topic, partitions, total, tuple, read, rows, bad)


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
    score = store.execute("ZSCORE", named(store.keys, "delayed", holder), name)
    if score is None:
        return None
    # The page that starts just before it. A due time has no fraction.
    [one], _ = retries.rows(
        store.run(retries.page(store.keys, holder, (int(float(score)), name[:-1]), 1))
    )
    return _found(holder, one) if one.place == name else None


def _found(holder: Holder, one: Delayed) -> Due:
    return FoundMessage(
        MessagePosition(one.due_unix_ms, holder[1], one.place), one.due_unix_ms, one.fields, one
    )


def _ordered(
    store: Store, holder: Holder, until: int | None, after: MessagePosition | None, bad: BadValues
) -> Iterator[Due]:
    """Yield the messages of one partition after a position. Stops at the time `until`."""
    start = (0, "")
    if after is not None:
        partition = holder[1]
        start = (after.rank, after.place)
        if partition != after.partition:
            start = (after.rank, LAST if partition < after.partition else FIRST)
    while True:
        page, more = _page(store, holder, start, bad)
        for one in page:
            if until is not None and one.due_unix_ms >= until:
                return
            yield _found(holder, one)
        if not page or not more:
            return
        start = (page[-1].due_unix_ms, page[-1].place)


def _page(
    store: Store, holder: Holder, start: tuple[int, str], bad: BadValues
) -> tuple[list[Delayed], bool]:
    """Read a page. An unreadable due time is kept in `bad`, and its message is left out."""
    due, items = named(store.keys, "delayed", holder), named(store.keys, "items", holder)
    (reply,) = measure_each(store, [retries.page(store.keys, holder, start, PAGE)], bad)
    if reply is None:
        return [], False
    page = []
    for row in reply.rest[0]:
        try:
            (one,) = retries.rows(Reply("OK", [[row], False]))[0]
            if abs(one.due_unix_ms) >= untrusted.INTEGER_MAX:  # the script has cut it
                raise BadValue("", "", f"{one.due_unix_ms} or beyond", "a time")
            page.append(one)
        except BadValue as error:
            bad.add(BadValue(due, untrusted.label(row[0]), error.found, error.wanted))
    for one in page:
        for name in (b"retryCount", b"crashCount"):
            field, raw = f"{one.place}: {name.decode()}", one.fields.get(name)
            bad.read(untrusted.integer, raw, items, field, default=0)
    return page, bool(reply.rest[1])
