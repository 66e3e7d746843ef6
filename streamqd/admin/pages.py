"""Reading in bounded pieces, and merging the partitions of a topic into one order.

No reply may grow with the data: commands travel a few hundred at a time, and bodies are fetched a
few at a time from each partition, by need.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streamqd.errors import BadValue, Malformed, RedisRefused, RefusalKind, Refused
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply

BATCH = 256  # commands of one exchange
SEQ_MAX = (1 << 64) - 1  # largest second part of an id
LAST_ID = b"%d-%d" % (SEQ_MAX, SEQ_MAX)  # anybody may have written it
PAGE_MAX = 100  # entries with their bodies of one reply


class Id(NamedTuple):
    """An entry id, in its order."""

    ms: int
    seq: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"


class Place(NamedTuple):
    """An entry of one of a topic's partitions, written `PARTITION:ms-seq`."""

    partition: int
    id: Id

    def __str__(self) -> str:
        return f"{self.partition}:{self.id}"


class Entry(NamedTuple):
    """An entry as read."""

    partition: int
    id: Id
    fields: dict[bytes, bytes]

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.partition, self.id)

    @property
    def headers(self) -> dict[str, str] | None:
        """Its headers; None when they are not a JSON object."""
        try:
            found: Any = json.loads(self.fields.get(b"headers", b"{}"))
            return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else None
        except (ValueError, RecursionError):
            return None


def read_id(raw: bytes | str) -> Id:
    """Read `ms-seq`. ValueError when it is not one."""
    text = raw.decode() if isinstance(raw, bytes) else raw
    ms, dash, seq = text.partition("-")
    if not (dash and ms.isascii() and ms.isdigit() and seq.isascii() and seq.isdigit()):
        raise ValueError(f"{text!r} is not an id such as 1700000000000-0")
    found = Id(int(ms), int(seq))
    if max(found) > SEQ_MAX:
        raise ValueError(f"{text!r} is not an id: its numbers are too large")
    return found


def read_place(text: str, partitions: int | None = None) -> Place:
    """Read `PARTITION:ms-seq`. Malformed when it is not one, Refused without such a partition."""
    number, colon, rest = text.partition(":")
    try:
        if not (colon and number.isascii() and number.isdigit()):
            raise ValueError(f"{text!r} is not an id such as 3:1700000000000-0")
        place = Place(int(number), read_id(rest))
    except ValueError as error:
        raise Malformed(str(error)) from None
    if partitions is not None and place.partition >= partitions:
        raise Refused(
            f"there is no partition {place.partition}: partitions are numbered 0 to"
            f" {partitions - 1}"
        )
    return place


def read_fields(raw: Sequence[bytes]) -> dict[bytes, bytes]:
    """Names and values by turns, as a dict."""
    return dict(zip(raw[::2], raw[1::2], strict=True))


def server_unix_ms(link: Connection) -> int:
    """The server's clock."""
    seconds, micros = link.execute("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def ask(link: Connection, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Run reading commands in bounded exchanges. A missing key answers None, not an error.

    Raises BadValue, of a key of another type.
    """
    replies: list[Any] = []
    for start in range(0, len(commands), BATCH):
        replies += link.pipeline(commands[start : start + BATCH])
    for index, reply in enumerate(replies):
        if isinstance(reply, RedisRefused):
            if reply.code == "WRONGTYPE":
                raise _of_another_type(key_of(commands[index])) from reply
            if "no such key" not in str(reply) and reply.kind is not RefusalKind.NO_GROUP:
                raise reply
            replies[index] = None
    return replies


def key_of(command: Sequence[Any]) -> str:
    """The key that a reading command is about."""
    at = 2 if str(command[0]) in ("XINFO", "MEMORY") else 1
    return str(command[at]) if len(command) > at else str(command[0])


def _of_another_type(key: str) -> BadValue:
    return BadValue(key, "", "of another type", "what streamqd writes there")


def measure(link: Connection, calls: Sequence[Call]) -> list[Reply]:
    """Run reading scripts in bounded exchanges."""
    replies: list[Reply] = []
    for start in range(0, len(calls), BATCH):
        for reply in link.run_many(calls[start : start + BATCH]):
            if isinstance(reply, RedisRefused):
                raise reply
            replies.append(reply)
    return replies


def newest_first(
    link: Connection,
    streams: Mapping[int, str],
    *,
    before: Place | None = None,
    since: Id | None = None,
    keep: Callable[[Entry], bool] | None = None,
    limit: int,
) -> Iterator[Entry]:
    """Yield entries of many streams merged, the newest first, those that `keep` accepts.

    `before` is the place of the last entry seen: what follows it in this order is yielded, so a
    place is all that a next page needs. Entries older than `since` are not read.
    """
    size = min(PAGE_MAX, max(1, -(-limit // max(1, len(streams))) + 1))
    if keep is not None:
        size = PAGE_MAX  # most of what is read may not be wanted
    lower = "-" if since is None else str(since)
    readers = [
        _backwards(link, partition, stream, _upper(partition, before), lower, size)
        for partition, stream in streams.items()
    ]
    merged = heapq.merge(*readers, key=lambda entry: (entry.id, entry.partition), reverse=True)
    for entry in merged:
        if limit <= 0:
            return
        if keep is None or keep(entry):
            limit -= 1
            yield entry


def _upper(partition: int, before: Place | None) -> str:
    if before is None:
        return "+"
    return str(before.id) if partition < before.partition else f"({before.id}"


def _backwards(
    link: Connection, partition: int, stream: str, upper: str, lower: str, size: int
) -> Iterator[Entry]:
    while True:
        page = _page(link, "XREVRANGE", stream, upper, lower, size)
        for raw_id, raw_fields in page:
            yield Entry(partition, read_id(raw_id), read_fields(raw_fields))
        if len(page) < size:
            return
        upper = f"({page[-1][0].decode()}"


def forwards(
    link: Connection, stream: str, *, after: Id | None = None, until: Id | None = None, size: int
) -> Iterator[list[tuple[Id, dict[bytes, bytes]]]]:
    """Yield pages of a stream, oldest first, of entries behind `after` and not beyond `until`."""
    lower = "-" if after is None else behind(str(after).encode())
    upper = "+" if until is None else str(until)
    while lower:
        page = _page(link, "XRANGE", stream, lower, upper, size)
        if page:
            yield [(read_id(raw_id), read_fields(fields)) for raw_id, fields in page]
        if len(page) < size:
            return
        lower = behind(page[-1][0])


def behind(raw_id: bytes) -> str:
    """Where what follows an id begins; '' behind the last id of all, of which nobody may ask."""
    return "" if raw_id == LAST_ID else f"({raw_id.decode()}"


def _page(
    link: Connection, command: str, stream: str, first: str, last: str, size: int
) -> list[Any]:
    try:
        page: list[Any] = link.execute(command, stream, first, last, "COUNT", size)
    except RedisRefused as error:
        if error.code != "WRONGTYPE":
            raise
        raise _of_another_type(stream) from error
    return page
