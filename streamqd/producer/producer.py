"""The producer whose calls return when Redis has answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack

from streamqd import config
from streamqd.errors import (
    BacklogFull,
    ChunkRefused,
    ChunkUnknown,
    RedisRefused,
    UnknownOutcome,
)
from streamqd.model import Uid
from streamqd.producer.chunk import Result
from streamqd.producer.encoding import Outgoing
from streamqd.producer.options import ProducerOptions
from streamqd.producer.sender import Sender

if TYPE_CHECKING:
    from streamqd.producer.buffered import BufferedProducer
    from streamqd.producer.options import BufferOptions


class Producer:
    """Writes messages to topics over one connection of its own.

    Use it as a context manager or call `close`. Thread-safe: threads take turns on the connection.
    A producer that was created before a fork works in the child too, over a new connection.

    `url` names the Redis server, `settings` (from `config.load`) all the rest. Without either,
    they are those of the command line: of the file that STREAMQ_CONFIG names, else of
    ./streamq.toml if it exists, under the variables STREAMQ_SECTION__KEY.
    With `create` (True) a topic is registered at its first send, with the partition count that the
    settings give it, else one partition; without, sending to an unknown topic raises TopicMissing.
    `timeout` (5) bounds a whole `send`: connecting, all its repetitions and the wait for other
    threads. `backlog_wait` comes on top. `dedup_window` (600) is how long a `dedup_id`
    is remembered. Durations are seconds, a text such as "5m" or a timedelta.

    `partitioner` chooses partitions: "hash" (CRC-32 of the key), "round-robin", "sticky",
    "consistent", or a function of the key (bytes, or None) and the number of partitions; a mapping
    of topics gives each its own, and "hash" to the others. With `max_backlog` a message is not
    written to a partition in which that many wait: after `backlog_wait` (0) BacklogFull is raised.

    Raises TypeError or ValueError, which name the option, for a value that cannot be used.
    """

    def __init__(
        self,
        url: str | None = None,
        settings: config.Settings | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._sender = Sender(url, settings, **options)
        self._options = options

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next send opens a new one."""
        self._sender.close()

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        expires: float | timedelta | datetime | None = None,
        dedup_id: str | None = None,
    ) -> Uid:
        """Write one message; return its uid, which `streamqd trace` takes.

        bytes are written as they are, str as UTF-8, everything else as JSON. Messages with the
        same key go to the same partition; without a key (and without a `dedup_id`, which then
        takes its place) partitions take turns. A message whose `dedup_id` was used before, within
        the window, is not written again: the uid of the first is returned.

        With `delay` (seconds or timedelta) or `at` (unix seconds or a datetime with a time zone) it
        becomes readable later; `cancel` and `streamqd delayed` take its uid. Past `expires` it is
        not handled any more: seconds or a timedelta after it became readable, or a datetime.

        Raises UnknownOutcome when the answer was lost (never with a `dedup_id` unless every
        repetition was lost too), RedisUnavailable when nothing was written, RedisRefused,
        BacklogFull, MessageTooLarge, TopicMissing, Refused, and TypeError or ValueError for what
        cannot be encoded.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires, dedup_id)
        result = self._sender.send(topic, self._sender.encode(item))
        if isinstance(result, Exception):
            raise result
        return result

    def send_many(self, topic: str, items: Iterable[Any]) -> list[Uid]:
        """Write many messages, pipelined; return their uids in order.

        An item is a value as for `send`, or an `Outgoing`. Messages are written in the order of
        the items, in chunks, each waiting for the answer to the one before. Meanwhile the next
        chunk is made, so items of one chunk more may have been taken than are sent. When something
        fails, the messages before it have been written, and the error says how many these are:
        ChunkUnknown, ChunkRefused and BacklogFull have the uids; an item that cannot be encoded, or
        an error raised by `items` itself, stops the sending behind the items before it and is
        raised with a note. `timeout` bounds each chunk (512 messages or 1 MiB), without the time
        that `items` takes.
        """
        ids: list[Uid] = []
        try:
            for results in self._sender.stream(topic, items):
                chunk, failure = confirmed(topic, results)
                ids += chunk
                if failure is not None:
                    raise failure
        except Exception as error:
            note_written(error, ids)
            raise
        return ids

    def send_chunks(
        self, topic: str, items: Iterable[Any], *, delay: float | None = None
    ) -> Iterator[list[Uid]]:
        """Write many messages as `send_many` does, yielding the uids of each chunk once confirmed.

        The uids in a raised ChunkUnknown, ChunkRefused or BacklogFull are those of the failed chunk
        only. With `delay` (seconds) all messages are scheduled, unless an item says otherwise.
        """
        if delay is not None:
            items = (_delayed(item, delay) for item in items)
        for batch in self._sender.cut(items):
            ids, failure = confirmed(topic, self._sender.post(topic, batch))
            if ids:
                yield ids
            if failure is not None:
                raise failure

    def cancel(self, uid: str) -> bool:
        """Cancel a delayed send: pass the value that `send` returned.

        Return True if it is cancelled now and is never delivered. Return False if no such send
        waits: it was delivered, cancelled before, or never sent. A cancelled send keeps its
        `dedup_id`.

        Raises ValueError for a string that is no uid, UnknownOutcome when the answer was lost (a
        second call is safe), RedisUnavailable when nothing was changed, and RedisRefused.
        """
        return self._sender.cancel(uid)

    def buffered(self, **buffer: Unpack[BufferOptions]) -> BufferedProducer:
        """Make a BufferedProducer with the settings of this one and a connection of its own."""
        from streamqd.producer.buffered import BufferedProducer

        return BufferedProducer(None, self._sender.settings, **buffer, **self._options)


def confirmed(topic: str, results: Sequence[Result]) -> tuple[list[Uid], Exception | None]:
    """Read the results of a batch: the uids in order, and the error that ends the sending.

    An error that says of itself how much of the batch was written leaves no ids.
    """
    sent = [each for each in results if isinstance(each, Uid)]
    if len(sent) == len(results):
        return sent, None
    failures = [each for each in results if isinstance(each, Exception)]
    ids: list[str | None] = [each if isinstance(each, Uid) else None for each in results]
    for at, each in enumerate(results):
        if isinstance(each, UnknownOutcome):
            unknown = len(results) - at
            return [], ChunkUnknown(
                f"the connection was lost: {unknown} messages to {topic} may or may not have been"
                f" written ({each})",
                ids[:at],
                unknown,
            )
    refused = [each for each in failures if isinstance(each, RedisRefused)]
    if refused:
        text = f"Redis refused {len(refused)} messages to {topic}: {refused[0]}"
        return [], ChunkRefused(refused[0].code, text, ids)
    if isinstance(failures[0], BacklogFull):
        return [], BacklogFull(str(failures[0]), ids)
    # It ended at a message that could not be routed, or nothing was written at all.
    return sent, failures[0]


def note_written(error: Exception, ids: list[Uid]) -> None:
    """Say in an error that ended `send_many` which messages were written before."""
    if isinstance(error, ChunkUnknown | ChunkRefused | BacklogFull):
        error.ids[:0] = ids
    else:
        error.add_note(f"{len(ids)} messages of this call were written before it")


def _delayed(item: Any, delay: float) -> Outgoing:
    outgoing = item if isinstance(item, Outgoing) else Outgoing(item)
    if outgoing.delay is None and outgoing.at is None:
        return outgoing._replace(delay=delay)
    return outgoing
