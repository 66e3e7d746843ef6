"""Select dead letters, parse their fields, and read them page by page.

A walk is one pass over the dead letters of a topic. It reads only those that existed at its start.
If a message is replayed during the walk and fails again, the walk therefore does not read its new
dead letter. Only one page is in memory at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from streamqd.admin import topics
from streamqd.admin.messages import MATCH_ALL, MessageFilter
from streamqd.admin.reading import (
    PAGE_MAX,
    SEQ_MAX,
    Entry,
    Id,
    ask,
    pairs,
    read_forwards,
    read_id,
    read_place,
)
from streamqd.errors import RequestRefusedError
from streamqd.store.store import Store

# This header counts the replays of a message that was written to a partition. The field
# `replayCount` does the same, but is trusted only in a retry stream, because any client can write
# to a partition.
REPLAYS_HEADER = "x-replays"

# Fields that only a dead letter has. `lua/dead_replay.lua` removes the same fields.
DEAD_ONLY = frozenset(
    b"originalTopic originalPartition timestamp group instance handler attempts crashes reason"
    b" errorClass errorMessage traceback fingerprint signal exitCode rss pid failedAt".split()
)
KNOWN = DEAD_ONLY | frozenset(
    b"payload key headers originalId retryCount crashCount replayCount forgivenAt lastError"
    b" lastErrorPlace lastRun".split()
)


# Fields of a dead letter, each under the name that views use for it.
_TEXTS = (
    *("group", "reason", "error_class", "error_message"),
    *("handler", "instance", "traceback", "signal"),
)
_NUMBERS = ("attempts", "crashes", "failed_unix_ms", "original_unix_ms", "exit_code", "pid", "rss")
_OTHER_REDIS_NAMES = {"failed_unix_ms": "failedAt", "original_unix_ms": "timestamp"}


def _redis_name(name: str) -> bytes:
    """Return the name of a field in Redis. For example, `error_class` is stored as `errorClass`."""
    first, *words = name.split("_")
    return _OTHER_REDIS_NAMES.get(name, first + "".join(map(str.title, words))).encode()


class DeadLetterFields:
    """The fields of a dead letter, as strings and integers.

    An invalid number is treated as missing.
    """

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self._fields = fields

    def text(self, name: bytes) -> str:
        return self._fields.get(name, b"").decode("utf-8", "replace")

    def number(self, name: bytes) -> int | None:
        try:
            return int(self._fields[name])
        except (KeyError, ValueError):
            return None

    def fields_for(self, view: type) -> dict[str, Any]:
        """Return the values with which a dataclass of a dead letter can be created.

        `view` is the class of the dataclass. The result maps the names of its fields to the values
        in Redis, and omits fields that Redis does not store.
        """
        names = {field.name for field in fields(view)}
        texts = {name: self.text(_redis_name(name)) for name in _TEXTS if name in names}
        return texts | {name: self.number(_redis_name(name)) for name in _NUMBERS if name in names}


def count_replays(entry: Entry) -> int:
    """Return the number of earlier replays of a dead letter's message, of any kind of replay."""
    found = max(0, DeadLetterFields(entry.fields).number(b"replayCount") or 0)
    raw = entry.fields.get(b"headers", b"")
    if b"x-replays" not in raw and b"\\" not in raw:  # most dead letters, which need no JSON parser
        return found
    with contextlib.suppress(ValueError):
        found = max(found, int((entry.headers or {}).get(REPLAYS_HEADER, "0")))
    return found


def find_origin(topic: str, entry: Entry) -> tuple[str, str, str]:
    """Return the topic, the partition and the ID with which a message was first written.

    The ID is '' if it was not recorded.
    """
    dead_letter = DeadLetterFields(entry.fields)
    return (
        dead_letter.text(b"originalTopic") or topic,
        dead_letter.text(b"originalPartition") or str(entry.partition),
        dead_letter.text(b"originalId"),
    )


def find(store: Store, streams: dict[int, str], dead_letter_id: str) -> Entry:
    """Return the dead letter with an ID such as `3:1700000000000-0`.

    Raises InvalidRequestError if the ID is not valid, and RequestRefusedError if the dead letter
    does not exist.
    """
    place = read_place(dead_letter_id, len(streams))
    page = store.execute("XRANGE", streams[place.partition], str(place.id), str(place.id))
    if not page:
        raise RequestRefusedError(
            f"dead letter {dead_letter_id} not found (it was replayed or purged, or never"
            " existed); `streamqd dlq list` shows the others"
        )
    return Entry(place.partition, place.id, pairs(page[0][1]))


def dead_letter_streams(store: Store, topic: str) -> dict[int, str]:
    """Return the key of each partition's dead-letter stream. Raises TopicNotFoundError."""
    count = topics.partition_count(store, topic)
    return {number: store.keys.dlq(topic, number) for number in range(count)}


def total(store: Store, topic: str) -> int:
    """Return the number of dead letters of a topic. Raises TopicNotFoundError."""
    streams = dead_letter_streams(store, topic)
    return sum(ask(store, [("XLEN", stream) for stream in streams.values()]))


Stop = Callable[[], bool]


def never_stop() -> bool:
    """Return False. This is the default for functions that can stop a walk."""
    return False


def stop_after(seconds: float) -> Stop:
    """Return a function that returns True, and so stops a walk, after this number of seconds."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


class DeadLetterPage(NamedTuple):
    """The matching dead letters on one page of a partition, oldest first.

    `examined` is the number of all dead letters on the page.
    """

    examined: int
    dead_letters: list[Entry]


def pages(
    store: Store, topic: str, choice: MessageFilter, size: int = PAGE_MAX
) -> Iterator[DeadLetterPage]:
    """Yield the matching dead letters, partition by partition and oldest first.

    A page contains the matches among at most `size` dead letters. Dead letters that are added after
    the call are not read. Raises TopicNotFoundError. Raises RequestRefusedError if the partition or
    a named dead letter does not exist, or if a named dead letter does not match.
    """
    streams = dead_letter_streams(store, topic)
    if choice.partition is not None:
        topics.check_partition(topic, choice.partition, len(streams))
        streams = {choice.partition: streams[choice.partition]} if not choice.ids else streams
    if choice.ids:
        return iter(_find_by_ids(store, streams, choice))
    ends = ask(store, [("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in streams.values()])
    until = {
        partition: read_id(newest[0][0])
        for partition, newest in zip(streams, ends, strict=True)
        if newest
    }
    return _walk(store, streams, choice, until, size)


def _walk(
    store: Store,
    streams: dict[int, str],
    choice: MessageFilter,
    ends: dict[int, Id],
    size: int,
) -> Iterator[DeadLetterPage]:
    after = None
    if choice.since_unix_ms:
        after = Id(choice.since_unix_ms - 1, SEQ_MAX)
    for partition, until in ends.items():
        if choice.until_unix_ms is not None:
            if choice.until_unix_ms <= 0:
                return
            until = min(until, Id(choice.until_unix_ms - 1, SEQ_MAX))
        for page in read_forwards(store, streams[partition], after=after, until=until, size=size):
            entries = [Entry(partition, *each) for each in page]
            kept = [each for each in entries if choice.takes(each.id.ms, each.fields)]
            yield DeadLetterPage(len(entries), kept)


def _find_by_ids(
    store: Store, streams: dict[int, str], choice: MessageFilter
) -> list[DeadLetterPage]:
    """Return the named dead letters, each on its own page.

    All of them are read before the first one is returned. Raises RequestRefusedError if one does
    not exist or does not match.
    """
    found = [find(store, streams, dead_letter_id) for dead_letter_id in dict.fromkeys(choice.ids)]
    for entry in found:
        here = choice.partition in (None, entry.partition)
        if here and choice.takes(entry.id.ms, entry.fields):
            continue
        owner = DeadLetterFields(entry.fields).text(b"group")
        if choice.group is not None and owner != choice.group:
            raise RequestRefusedError(
                f"dead letter {entry.place} belongs to group {owner}, not {choice.group};"
                f" pass --group {owner}"
            )
        raise RequestRefusedError(
            f"dead letter {entry.place} does not match the filter; omit the ID, or change the"
            " filter"
        )
    return [DeadLetterPage(1, [entry]) for entry in found]


class MatchCount(NamedTuple):
    """The number of matching dead letters of a topic.

    `examined` is the number of dead letters that were read, out of `total`. If `complete` is False,
    more may match among those that were not read.
    """

    dead_letters: int
    examined: int
    total: int
    complete: bool


def count(store: Store, topic: str, choice: MessageFilter) -> int:
    """Return the number of matching dead letters.

    Raises TopicNotFoundError and RequestRefusedError.
    """
    return count_within(store, topic, choice).dead_letters


def count_within(
    store: Store,
    topic: str,
    choice: MessageFilter,
    *,
    budget: int | None = None,
    stop: Stop = never_stop,
) -> MatchCount:
    """Count the matches among the first `budget` dead letters, in the order of `pages`.

    If `stop` returns True, counting stops earlier. Without a filter, the count is exact and no dead
    letters are read. Raises TopicNotFoundError and RequestRefusedError.
    """
    everything = total(store, topic)
    if choice == MATCH_ALL:
        return MatchCount(everything, everything, everything, complete=True)
    dead_letters = examined = 0
    for page in limit_pages(pages(store, topic, choice, page_size(budget)), budget, stop):
        if page is None:
            return MatchCount(dead_letters, examined, everything, complete=False)
        dead_letters += len(page.dead_letters)
        examined += page.examined
    return MatchCount(dead_letters, examined, everything, complete=True)


def page_size(budget: int | None) -> int:
    """Return the page size of a walk that examines at most `budget` dead letters."""
    return PAGE_MAX if budget is None else max(1, min(PAGE_MAX, budget))


def limit_pages(
    walk: Iterator[DeadLetterPage], budget: int | None, stop: Stop
) -> Iterator[DeadLetterPage | None]:
    """Yield pages until `budget` dead letters are examined or `stop` returns True.

    If the walk stops early, the last value is None.
    """
    examined = 0
    for page in walk:
        if stop() or (budget is not None and examined + page.examined > budget):
            yield None
            return
        examined += page.examined
        yield page
