"""Messages that wait for a due time: one list over all partitions of a topic, the earliest first.

Retries and delayed sends are such lists. A row is named `PARTITION:place`.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from streamqd.admin import topics
from streamqd.admin.reading import BadValues, ask, measure_each
from streamqd.errors import BadValue, Malformed
from streamqd.store import untrusted
from streamqd.store.retries import Delayed, rows
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

PAGE = 64
BATCH = 64  # messages that are changed by one call
FIRST, LAST = " ", "\U0010ffff"  # sort before and after every place

Position = tuple[int, int, str]  # due, partition, place: the order of the list
Start = tuple[int, str]  # due time and place, after which a page of one partition starts

BEGIN: Position = (0, 0, "")
_CURSOR = re.compile(r"([0-9]{1,17})/([0-9]{1,9}):([!-~]{1,200})")


@dataclass(frozen=True, slots=True)
class DueFilter:
    """A filter over waiting messages. A message must pass every filter that is set."""

    partition: int | None = None
    key: str | None = None
    attempt_min: int = 1
    due_within_ms: int | None = None

    @property
    def narrows(self) -> bool:
        """Return True if any filter is set."""
        return self != EVERY

    def partitions(self, topic: str, count: int) -> Sequence[int]:
        """Return the partitions to look at. Raises Refused when the chosen one does not exist."""
        if self.partition is None:
            return range(count)
        topics.check_partition(topic, self.partition, count)
        return (self.partition,)


EVERY = DueFilter()


class DueRow(Protocol):
    """A row of the list as a view shows it."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def due_unix_ms(self) -> int:
        """When it is due."""

    @property
    def key(self) -> str:
        """The key of the message, '' for none."""

    @property
    def attempt(self) -> int:
        """The attempt that it waits for."""


AnyRow = TypeVar("AnyRow", bound=DueRow)


@dataclass(frozen=True)
class WaitingList(Generic[AnyRow]):
    """The list of a topic or of a group.

    For a partition, `due` and `items` name its keys, `page` is the call that reads on, and `row` is
    a message as the view shows it.
    """

    store: Store
    count: int  # of partitions
    due: Callable[[int], str]
    items: Callable[[int], str]
    page: Callable[[int, Start], Call]
    row: Callable[[int, Delayed], AnyRow]

    def total(self, bad: BadValues) -> int:
        """Return the number of waiting messages."""
        sizes = ask(self.store, [("ZCARD", self.due(each)) for each in range(self.count)], bad)
        return sum(each or 0 for each in sizes)

    def chosen(
        self,
        partitions: Sequence[int],
        choice: DueFilter,
        now: int,
        bad: BadValues,
        after: Position = BEGIN,
    ) -> Iterator[tuple[int, AnyRow]]:
        """Yield the chosen messages after a position, with their partitions.

        An unreadable due time is kept in `bad`, and its message has no row.
        """
        readers = [self._ordered(each, after, bad) for each in partitions]
        last = None if choice.due_within_ms is None else now + choice.due_within_ms
        for (due, partition, _), each in heapq.merge(*readers, key=lambda found: found[0]):
            if last is not None and due > last:
                return
            row = self.row(partition, each)
            if choice.key in (None, row.key) and row.attempt >= choice.attempt_min:
                yield partition, row

    def _ordered(
        self, partition: int, after: Position, bad: BadValues
    ) -> Iterator[tuple[Position, Delayed]]:
        due, last_partition, place = after
        start = (due, place)
        if partition != last_partition and place:
            start = (due, LAST if partition < last_partition else FIRST)
        while True:
            page, more = self._page(partition, start, bad)
            for each in page:
                position = (each.due_unix_ms, partition, each.place)
                if position > after:
                    yield position, each
            if not page or not more:
                return
            start = (page[-1].due_unix_ms, page[-1].place)

    def _page(self, partition: int, start: Start, bad: BadValues) -> tuple[list[Delayed], bool]:
        (reply,) = measure_each(self.store, [self.page(partition, start)], bad)
        if reply is None:
            return [], False
        page = []
        for row in reply.rest[0]:
            try:
                (one,) = rows(Reply("OK", [[row], False]))[0]
                if abs(one.due_unix_ms) >= untrusted.INTEGER_MAX:  # the script has cut it
                    raise BadValue("", "", f"{one.due_unix_ms} or beyond", "a time")
                page.append(one)
            except BadValue as error:
                field = untrusted.label(row[0])
                bad.add(BadValue(self.due(partition), field, error.found, error.wanted))
        for each in page:
            for name in (b"retryCount", b"crashCount"):
                field, raw = f"{each.place}: {name.decode()}", each.fields.get(name)
                bad.read(untrusted.integer, raw, self.items(partition), field, default=0)
        return page, bool(reply.rest[1])


def page(found: Iterator[tuple[int, AnyRow]], limit: int) -> tuple[list[AnyRow], str]:
    """Return the first rows and the cursor of the next page, '' on the last one."""
    some = [row for _, row in itertools.islice(found, limit + 1)]
    shown = some[:limit]
    more = len(some) > limit
    return shown, f"{shown[-1].due_unix_ms}/{shown[-1].id}" if more else ""


def read_cursor(text: str) -> Position:
    """Parse a cursor. '' is the start of the list. Raises Malformed."""
    if not text:
        return BEGIN
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise Malformed(f"{text!r} is not a cursor that this command has printed")
    return int(match[1]), int(match[2]), match[3]
