"""Sort, filter and page lists of messages. All kinds of messages use the same kind of list.

Each kind of message has a function that returns its `MessageList`: `tail.messages` (all messages of
a topic), `pending.messages`, `delayed.messages` (delayed sends), `retries.messages` and
`dead_letters.messages`. The modules of these functions also define the rows, the details of a
message, and the actions on messages. Nothing in this module depends on a particular kind.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

from streamqd.admin import topics
from streamqd.admin.reading import (
    PAGE_MAX,
    Entry,
    Id,
    Unreadable,
    ViewReader,
    parse_headers,
    read_backwards,
    read_id,
    server_unix_ms,
)
from streamqd.errors import InvalidRequestError, InvalidValueError
from streamqd.policy.fingerprint import dead_letter_fingerprint
from streamqd.store.store import Store

_CURSOR = re.compile(r"(?:(-?[0-9]{1,17})/)?([0-9]{1,9}):([!-~]{1,200})")

Item = TypeVar("Item")
Row = TypeVar("Row")


class MessagePosition(NamedTuple):
    """The position of a message in its list. As a cursor, it is written `RANK/PARTITION:PLACE`.

    `place` is unique in the partition. Depending on the kind of message, it is an entry ID, `m:ID`,
    `r:ID` or a send ID. `rank` is a number by which the list is sorted first, such as the due time.
    A rank of 0 is omitted from the cursor.
    """

    rank: int
    partition: int
    place: str

    def __str__(self) -> str:
        return f"{self.rank}/{self.name}" if self.rank else self.name

    @property
    def name(self) -> str:
        """The ID of the message on the command line, `PARTITION:PLACE`."""
        return f"{self.partition}:{self.place}"


class FoundMessage(NamedTuple, Generic[Item]):
    """A message as it was read, before it becomes a row.

    `unix_ms` is the time that filters compare. Depending on the kind, this is the time at which the
    message was written or dead-lettered, or its due time. `fields` contains the fields of the
    message. For pending messages, it is empty.
    """

    position: MessagePosition
    unix_ms: int
    fields: Mapping[bytes, bytes]
    item: Item


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A filter for messages. A message must match each field that is set.

    `ids` contains names such as `PARTITION:PLACE`, and is used only by actions. `error_class` is
    compared with the full name of the class and with its last part. `key` must match exactly, and a
    message must have all pairs in `headers`. Retries and delayed sends are read without their
    headers, so a filter with headers matches none of them. `since_unix_ms` (inclusive) and
    `until_unix_ms` (exclusive) limit `FoundMessage.unix_ms`. `attempt_min` is the lowest number of
    the next attempt of a retry. Pending messages can be filtered only by partition and time.
    """

    ids: tuple[str, ...] = ()
    group: str | None = None
    fingerprint: str | None = None
    error_class: str | None = None
    reason: str | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    since_unix_ms: int | None = None
    until_unix_ms: int | None = None
    partition: int | None = None
    attempt_min: int = 1

    def takes(self, unix_ms: int, fields: Mapping[bytes, bytes]) -> bool:
        """Return True if a message with this time and these fields matches the filter.

        IDs and partitions are not checked here.
        """
        if self.since_unix_ms is not None and unix_ms < self.since_unix_ms:
            return False
        if self.until_unix_ms is not None and unix_ms >= self.until_unix_ms:
            return False
        if self.group is not None and _text(fields, b"group") != self.group:
            return False
        if self.reason is not None and _text(fields, b"reason") != self.reason:
            return False
        if self.error_class is not None:
            name = _text(fields, b"errorClass")
            if self.error_class not in (name, name.rpartition(".")[2]):
                return False
        if self.key is not None and fields.get(b"key") != self.key:
            return False
        if self.fingerprint is not None and dead_letter_fingerprint(fields) != self.fingerprint:
            return False
        if self.attempt_min > 1 and waiting_attempt(fields) < self.attempt_min:
            return False
        if not self.headers:
            return True
        headers = parse_headers(fields) or {}
        return all(headers.get(name) == value for name, value in self.headers)

    @property
    def has_filters(self) -> bool:
        """True if any filter is set."""
        return self != MATCH_ALL

    def audit_arguments(self) -> dict[str, Any]:
        """Return the filters that are set, for the audit log."""
        names = {"ids": "dead_letter_ids"}  # the audit log is about dead letters
        found = {
            names.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        if self.key is not None:
            found["key"] = self.key.decode("utf-8", "backslashreplace")
        if self.headers:
            found["headers"] = dict(self.headers)
        return found


MATCH_ALL = MessageFilter()


@dataclass(frozen=True, slots=True)
class MessagePage(Generic[Row]):
    """One page of a list, with rows of its kind.

    `total` is the number of all messages in the list, whether they match or not. Pass `cursor` to
    get the next page. It is '' on the last page. `complete` is False if the search has used up its
    budget, or if the list does not contain all messages of its kind. In both cases, more messages
    may match, even if `cursor` is ''. `unreadable` lists values in Redis that cannot be read. A
    message whose position cannot be read has no row, and a counter that cannot be read is 0.
    """

    now_unix_ms: int
    total: int
    rows: list[Row]
    cursor: str
    complete: bool
    unreadable: list[Unreadable]


@dataclass(frozen=True)
class MessageList(Generic[Item, Row]):
    """The messages of one kind over all partitions of a topic, in one order.

    Use an instance for one search only. It writes nothing. `partitions` is the number of partitions
    of the topic, and `total` returns the number of messages in them. `order` returns the sort key
    of a position, and raises ValueError if the position does not belong to this kind of list.
    `read` is called with partitions, a filter, a position to start from and a number of rows. It
    returns one or more sorted iterators, which may also yield messages that do not match. `rows`
    turns the messages of a page into rows. `complete` is False if `read` leaves messages out.
    `reader` collects invalid values.
    """

    reader: ViewReader
    topic: str
    partitions: int
    total: Callable[[], int]
    order: Callable[[MessagePosition], tuple[Any, ...]]
    read: Callable[
        [Sequence[int], MessageFilter, MessagePosition | None, int],
        Iterable[Iterator[FoundMessage[Item]]],
    ]
    rows: Callable[[Sequence[FoundMessage[Item]]], list[Row]]
    complete: bool = True

    def page(
        self,
        choice: MessageFilter = MATCH_ALL,
        *,
        limit: int = 50,
        cursor: str = "",
        budget: int | None = None,
    ) -> MessagePage[Row]:
        """Return a page of the matching messages.

        The page has at most `limit` rows. The search stops when the page is full. If `budget` is
        set, it also stops after it has examined this number of messages. Payloads are read a few at
        a time. Raises InvalidRequestError if the cursor is from another list, and
        RequestRefusedError if the partition in the filter does not exist.
        """
        following, complete, kept = "", self.complete, list[FoundMessage[Item]]()
        last = self._position(cursor) if cursor else None
        for examined, each in enumerate(self._merge(choice, last, limit + 1)):
            if examined == budget:
                following, complete = str(last), False
                break
            last = each.position
            if choice.takes(each.unix_ms, each.fields):
                if len(kept) == limit:
                    following = str(kept[-1].position)
                    break
                kept.append(each)
        return MessagePage(
            now_unix_ms=server_unix_ms(self.reader.store.connection),
            total=self.total(),
            rows=self.rows(kept),
            cursor=following,
            complete=complete,
            unreadable=self.reader.rows,
        )

    def iterate(
        self, choice: MessageFilter = MATCH_ALL, most: int = 1 << 62
    ) -> Iterator[FoundMessage[Item]]:
        """Yield up to `most` matching messages, reading page by page.

        Raises RequestRefusedError if the partition in the filter does not exist.
        """
        found = self.examine(choice, most)
        some = (each for each in found if choice.takes(each.unix_ms, each.fields))
        return itertools.islice(some, most)

    def examine(
        self, choice: MessageFilter = MATCH_ALL, most: int = 1 << 62
    ) -> Iterator[FoundMessage[Item]]:
        """Yield every message that a search examines, even if it does not match the filter.

        `most` is the approximate number of messages that the caller needs. It only determines the
        page size, and does not limit the result. Raises RequestRefusedError if the partition in the
        filter does not exist.
        """
        return self._merge(choice, None, most)

    def _merge(
        self, choice: MessageFilter, after: MessagePosition | None, limit: int
    ) -> Iterator[FoundMessage[Item]]:
        some: Sequence[int] = range(self.partitions)
        if choice.partition is not None:
            topics.check_partition(self.topic, choice.partition, self.partitions)
            some = (choice.partition,)
        merged = heapq.merge(
            *self.read(some, choice, after, limit), key=lambda message: self.order(message.position)
        )
        if after is None:
            return merged
        passed = self.order(after)
        return (message for message in merged if self.order(message.position) > passed)

    def _position(self, cursor: str) -> MessagePosition:
        match = _CURSOR.fullmatch(cursor)
        try:
            if match is None:
                raise ValueError(cursor)
            found = MessagePosition(int(match[1] or 0), int(match[2]), match[3])
            self.order(found)
        except ValueError:
            raise InvalidRequestError(
                f"{cursor!r} is not a cursor that this command printed; omit it to start again"
            ) from None
        topics.check_partition(self.topic, found.partition, self.partitions)
        return found


def newest_first(
    store: Store, topic: str, streams: Sequence[str], row: Callable[[Entry], Row]
) -> MessageList[Entry, Row]:
    """Return a list of the entries in several streams, one per partition, with the newest first."""
    reader = ViewReader(store)

    def read(
        some: Sequence[int], choice: MessageFilter, after: MessagePosition | None, limit: int
    ) -> list[Iterator[FoundMessage[Entry]]]:
        size = min(PAGE_MAX, -(-limit // len(some)) + 1)
        if replace(choice, partition=None, since_unix_ms=None, until_unix_ms=None).has_filters:
            size = PAGE_MAX  # largest pages, because most entries may not match
        lower = "-" if choice.since_unix_ms is None else f"{max(0, choice.since_unix_ms)}-0"
        ends = [] if after is None else [read_id(after.place)]
        if choice.until_unix_ms is not None:
            ends.append(Id(max(0, choice.until_unix_ms), 0).before())
        upper = str(min(ends)) if ends else "+"
        return [_read_newest(reader, each, streams[each], upper, lower, size) for each in some]

    def order(position: MessagePosition) -> tuple[int, int, int]:
        ms, seq = read_id(position.place)
        return -ms, -seq, -position.partition

    return MessageList(
        reader=reader,
        topic=topic,
        partitions=len(streams),
        total=lambda: sum(each or 0 for each in reader.ask([("XLEN", s) for s in streams])),
        order=order,
        read=read,
        rows=lambda found: [row(each.item) for each in found],
    )


def _read_newest(
    reader: ViewReader, partition: int, stream: str, upper: str, lower: str, size: int
) -> Iterator[FoundMessage[Entry]]:
    try:
        for each in read_backwards(
            reader.store, partition, stream, upper=upper, lower=lower, size=size
        ):
            position = MessagePosition(0, partition, str(each.id))
            yield FoundMessage(position, each.id.ms, each.fields, each)
    except InvalidValueError as error:
        reader.add(error)


def waiting_attempt(fields: Mapping[bytes, bytes]) -> int:
    """Return the number of the attempt that a message is waiting for, starting at 1."""
    return count_in(fields, b"retryCount") + 1


def count_in(fields: Mapping[bytes, bytes], name: bytes) -> int:
    """Return a counter from the fields of a message, or 0 if it is missing or unreadable."""
    raw = fields.get(name, b"0")
    return int(raw) if raw.isdigit() and len(raw) < 17 else 0


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")
