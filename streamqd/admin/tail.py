"""Follow the messages of a topic without a group, so that its consumers still get all of them."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamqd.admin import topics
from streamqd.admin.messages import MessageFilter, MessageList, newest_first
from streamqd.admin.reading import (
    PAGE_MAX,
    SEQ_MAX,
    Entry,
    Id,
    ask,
    last_id,
    pairs,
    read_forwards,
    read_id,
)
from streamqd.store.store import Store

BLOCK_MS = 1000  # ms that a read waits for new messages, less than the connection's timeout
READ_COUNT = 16  # messages per partition in one reply, because XREAD has no byte limit


@dataclass(frozen=True, slots=True)
class TailedEntry:
    """A message as a line of `tail --json`. `headers` is null if they are not a JSON object."""

    topic: str
    partition: int
    id: str
    written_unix_ms: int
    key: bytes | None
    headers: dict[str, str] | None
    payload: bytes


class Tail:
    """A reader of a topic, which remembers where the topic ended when the reader was created.

    `last` and `since` return messages up to this position, and `follow` returns those after it.
    """

    def __init__(self, store: Store, topic: str, partition: int | None = None) -> None:
        """Start at the current end of all partitions, or of one partition.

        Raises TopicNotFoundError and RequestRefusedError.
        """
        count = topics.partition_count(store, topic)
        if partition is not None:
            topics.check_partition(topic, partition, count)
        chosen = range(count) if partition is None else [partition]
        self._store = store
        self.topic, self._partition = topic, partition
        self._streams = {number: store.keys.stream(topic, number) for number in chosen}
        infos = ask(store, [("XINFO", "STREAM", stream) for stream in self._streams.values()])
        # The end is read once. A read that starts at `$` would miss messages written between two
        # reads.
        self._positions = {
            stream: read_id(last_id(info))
            for stream, info in zip(self._streams.values(), infos, strict=True)
        }

    def last(self, count: int, since_unix_ms: int | None = None) -> list[TailedEntry]:
        """Return the last `count` messages of all partitions together, oldest first.

        If `since_unix_ms` is set, messages written before this time are left out.
        """
        choice = MessageFilter(since_unix_ms=since_unix_ms, partition=self._partition)
        every = messages(self._store, self.topic).iterate(choice, count)
        found = [each.item for each in every]
        for entry in found:  # an entry may be newer than the start of `follow`
            stream = self._streams[entry.partition]
            self._positions[stream] = max(self._positions[stream], entry.id)
        return [_row(self.topic, entry) for entry in reversed(found)]

    def since(self, unix_ms: int) -> Iterator[TailedEntry]:
        """Yield the messages written from this time until now, oldest first."""
        after = Id(max(0, unix_ms - 1), SEQ_MAX if unix_ms > 0 else 0)
        pages = [self._pages(number, stream, after) for number, stream in self._streams.items()]
        for entry in heapq.merge(*pages, key=lambda each: (each.id, each.partition)):
            yield _row(self.topic, entry)

    def _pages(self, partition: int, stream: str, after: Id) -> Iterator[Entry]:
        until = self._positions[stream]  # the start of `follow`
        for page in read_forwards(self._store, stream, after=after, until=until, size=PAGE_MAX):
            yield from (Entry(partition, *each) for each in page)

    def follow(self) -> Iterator[list[TailedEntry]]:
        """Yield messages as they are written, and [] after each second without one.

        Never returns.
        """
        numbers = {stream.encode(): number for number, stream in self._streams.items()}
        groups = self._store.connection.group_by_node(list(self._positions))
        while True:
            if len(groups) > 1:  # a single command cannot wait at several nodes
                pages = ask(self._store, [self._command(streams) for streams in groups])
                reply = [page for each in pages for page in each or ()]
                if not reply:
                    time.sleep(BLOCK_MS / 1000)
            else:
                reply = self._store.execute(*self._command(groups[0], "BLOCK", BLOCK_MS))
            found = [
                Entry(numbers[name], read_id(raw_id), pairs(fields))
                for name, page in reply or ()
                for raw_id, fields in page
            ]
            for entry in found:
                self._positions[self._streams[entry.partition]] = entry.id
            yield [_row(self.topic, e) for e in sorted(found, key=lambda e: (e.id, e.partition))]

    def _command(self, streams: Sequence[str], *wait: str | int) -> tuple[str | int, ...]:
        positions = (str(self._positions[stream]) for stream in streams)
        return ("XREAD", "COUNT", READ_COUNT, *wait, "STREAMS", *streams, *positions)


def messages(store: Store, topic: str) -> MessageList[Entry, TailedEntry]:
    """Return the messages of a topic, the newest first. Raises TopicNotFoundError."""
    count = topics.partition_count(store, topic)
    streams = [store.keys.stream(topic, number) for number in range(count)]
    return newest_first(store, topic, streams, lambda entry: _row(topic, entry))


def _row(topic: str, entry: Entry) -> TailedEntry:
    return TailedEntry(
        topic=topic,
        partition=entry.partition,
        id=str(entry.id),
        written_unix_ms=entry.id.ms,
        key=entry.fields.get(b"key"),
        headers=entry.headers,
        payload=entry.fields.get(b"payload", b""),
    )
