"""Find the message that a row of an outbox became. Writes nothing.

`Outbox.send` returns `TOPIC/outbox/UID`, because the message is not in a partition yet. When a
relay writes the message to a partition, the entry's send ID is this UID. The UID starts with the
time of the send by the sender's clock, so only entries since that time are searched. The search is
limited, so it may be incomplete. If a partition cannot be read, the search continues with the
others, but is incomplete too.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from streamqd.admin.reading import BATCH, PAGE_MAX, ViewReader, read_backwards, read_id
from streamqd.errors import (
    ContractError,
    InvalidRequestError,
    RedisResponseError,
    RedisUnavailableError,
)
from streamqd.store import tracing
from streamqd.store.store import Store

CALLS_MAX = 40  # calls to search one stream, enough for 20,000 entries after the time of the send
NEWEST = 10_000  # newest entries of the topic, searched if those calls do not reach the end
SKEW_MS = 5_000  # ms that the sender's clock may be ahead of the server's
_UID = re.compile(r"([^/]+)/outbox/(.*)", re.DOTALL)
_DIGITS = re.compile(r"[0-9a-f]{12}7[0-9a-f]{19}")


class OutboxUid(NamedTuple):
    """A parsed result of `Outbox.send`. `uid` is a UUIDv7 as 32 hex digits."""

    topic: str
    uid: str

    def __str__(self) -> str:
        return f"{self.topic}/outbox/{self.uid}"


class FoundEntry(NamedTuple):
    """The partition and the entry of the message.

    `entry_id` is '' if the message is still a delayed send.
    """

    partition: int
    entry_id: str


class Search(NamedTuple):
    """The result of a search. `found` is None if the message was not found.

    `trimmed` is True if entries from the time of the message have been trimmed in a partition.
    `complete` is False if some entries were not examined. In both cases, the message may exist or
    have existed even if it was not found.
    """

    found: FoundEntry | None
    trimmed: bool = False
    complete: bool = True


def read_uid(text: str) -> OutboxUid | None:
    """Parse TOPIC/outbox/UID. Return None for any other form.

    Raises InvalidRequestError if the UID is invalid.
    """
    match = _UID.fullmatch(text)
    if match is None:
        return None
    if _DIGITS.fullmatch(match[2]) is None:
        raise InvalidRequestError(
            f"{text!r} is not an ID of an outbox; pass TOPIC/outbox/UID as Outbox.send returned it"
        )
    return OutboxUid(match[1], match[2])


def find(store: Store, name: OutboxUid, partitions: int) -> Search:
    """Search for a message among delayed sends, and then among entries written after the send."""
    reader, keys, numbers = ViewReader(store), store.keys, range(partitions)
    # Delayed sends are searched first. If one becomes due during the search, it is in its stream
    # when the streams are searched.
    waiting = [("ZSCORE", keys.delayed_sends(name.topic, number), name.uid) for number in numbers]
    for number, score in zip(numbers, reader.ask(waiting), strict=True):
        if score is not None:
            return Search(FoundEntry(number, ""))
    sent_ms = int(name.uid[:12], 16)
    streams = {number: keys.stream(name.topic, number) for number in numbers}
    found, left, unreadable = _search_since_send(store, streams, name.uid, sent_ms)
    if found is None and left:
        found = _search_newest(store, {number: streams[number] for number in left}, name.uid)
    if found is not None:
        return Search(found)
    firsts = reader.ask([("HGET", keys.trim(name.topic, number), "first") for number in numbers])
    trimmed = any(_first_kept_ms(first) >= sent_ms for first in firsts)
    return Search(None, trimmed, complete=not (left or unreadable or reader.rows))


def _search_since_send(
    store: Store, streams: Mapping[int, str], uid: str, sent_ms: int
) -> tuple[FoundEntry | None, list[int], list[int]]:
    """Examine all partitions' entries since the send, BATCH partitions per pipeline.

    Return the message, the partitions whose entries were not all examined, and those that could not
    be read.
    """
    begins = dict.fromkeys(streams, f"{max(0, sent_ms - SKEW_MS)}-0")
    unreadable: list[int] = []
    for _ in range(CALLS_MAX):
        after: dict[int, str] = {}
        places = list(begins.items())
        for some in (places[at : at + BATCH] for at in range(0, len(places), BATCH)):
            calls = [tracing.find_send(streams[number], uid, begin) for number, begin in some]
            for (number, _), reply in zip(some, store.run_each(calls), strict=True):
                if isinstance(reply, RedisUnavailableError):
                    raise reply
                if isinstance(reply, RedisResponseError | ContractError):
                    unreadable.append(number)
                    continue
                copies, begin = tracing.parse_copies(reply)
                if copies:
                    return FoundEntry(number, copies[0].id), [], []
                if begin:
                    after[number] = begin
        begins = after
        if not begins:
            break
    return None, list(begins), unreadable


def _search_newest(store: Store, streams: Mapping[int, str], uid: str) -> FoundEntry | None:
    """Search the newest entries for the message, which may have been written long after the send.

    This is the case for a delayed send that has become due.
    """
    pages = [read_backwards(store, number, key, size=PAGE_MAX) for number, key in streams.items()]
    newest = heapq.merge(*pages, key=lambda entry: entry.id, reverse=True)
    for entry in itertools.islice(newest, NEWEST):
        if entry.fields.get(b"sendId") == uid.encode():
            return FoundEntry(entry.partition, str(entry.id))
    return None


def _first_kept_ms(first: bytes | None) -> int:
    """Return the time (Unix ms) of the first entry that still exists, or -1 if there is none."""
    try:
        return read_id(first).ms if first else -1
    except (ValueError, UnicodeDecodeError):
        return -1
