"""Messages that wait for a due time: one list over all partitions of a topic, the earliest first.

Retries and delayed sends are such lists. A row is named `PARTITION:place`.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from streamqd.errors import Malformed
from streamqd.store.retries import Delayed

PAGE = 200
BATCH = 64  # messages that are changed by one call
FIRST, LAST = " ", "\U0010ffff"  # before and behind every place

Position = tuple[int, int, str]  # due, partition, place: the order of the list
Read = Callable[[int, tuple[int, str]], tuple[list[Delayed], bool]]

BEGIN: Position = (0, 0, "")
_CURSOR = re.compile(r"([0-9]{1,17})/([0-9]{1,9}):([!-~]{1,200})")


class DueRow(Protocol):
    """A row of the list as a view shows it."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def due_unix_ms(self) -> int:
        """When it is due."""


AnyRow = TypeVar("AnyRow", bound=DueRow)


def merged(
    partitions: Iterable[int], read: Read, after: Position = BEGIN
) -> Iterator[tuple[int, Delayed]]:
    """Yield what waits behind a position, with its partition.

    `read` gets a partition and where a page begins; it returns the page, and whether there is more.
    """
    readers = [_ordered(each, read, after) for each in partitions]
    for (_, partition, _), row in heapq.merge(*readers, key=lambda found: found[0]):
        yield partition, row


def _ordered(partition: int, read: Read, after: Position) -> Iterator[tuple[Position, Delayed]]:
    due, last_partition, place = after
    start = (due, place)
    if partition != last_partition and place:
        start = (due, LAST if partition < last_partition else FIRST)
    while True:
        page, more = read(partition, start)
        for each in page:
            position = (each.due_unix_ms, partition, each.place)
            if position > after:
                yield position, each
        if not page or not more:
            return
        start = (page[-1].due_unix_ms, page[-1].place)


def page(rows: Iterator[AnyRow], limit: int) -> tuple[list[AnyRow], str]:
    """The first rows, and the cursor that continues behind them; '' at the end."""
    found = list(itertools.islice(rows, limit + 1))
    shown = found[:limit]
    more = len(found) > limit
    return shown, f"{shown[-1].due_unix_ms}/{shown[-1].id}" if more else ""


def read_cursor(text: str) -> Position:
    """Read a cursor; the begin of the list for ''. Raises Malformed."""
    if not text:
        return BEGIN
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise Malformed(f"{text!r} is not a cursor that this command has printed")
    return int(match[1]), int(match[2]), match[3]
