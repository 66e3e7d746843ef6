"""The synchronous producer, whose calls return after the reply of Redis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack

from streamqd import config
from streamqd.errors import (
    BacklogFullError,
    BatchOutcomeUnknownError,
    BatchRejectedError,
    OutcomeUnknownError,
    RedisResponseError,
)
from streamqd.model import Uid
from streamqd.producer.chunk import Result
from streamqd.producer.encoding import Outgoing, outgoing_of
from streamqd.producer.options import ProducerOptions
from streamqd.producer.sender import Sender

if TYPE_CHECKING:
    from streamqd.producer.buffered import BufferedProducer
    from streamqd.producer.options import BufferOptions


class Producer:
    """A producer that writes messages to topics over its own connection.

    Use it as a context manager or call `close`. It is thread-safe: threads take turns on the
    connection. A producer that was created before a fork also works in the child, over a new
    connection.

    `url` is the Redis server, and `settings` (from `config.load`) are all other settings. Without
    both, the producer uses the settings of the command line: the file in STREAMQ_CONFIG, or else
    ./streamq.toml if it exists, overridden by the variables STREAMQ_SECTION__KEY.

    Options (a duration is a number of seconds, a string such as "5m" or a timedelta):

    - `create`: Register a topic at the first send, with the partition count of the settings, or
      else one partition. With False, sending to an unknown topic raises TopicNotFoundError.
      Default: True.
    - `timeout`: Time limit of one `send`: connecting, all repetitions and the wait for other
      threads. `backlog_wait` is added to it. Default: 5 seconds.
    - `dedup_window`: Time for which a `dedup_id` is remembered. Default: 600 seconds.
    - `partitioner`: "hash" (CRC-32 of the key), "round-robin", "sticky", "consistent", or a
      function of the key (bytes or None) and the number of partitions. A mapping sets it per topic,
      and other topics use "hash". Default: "hash".
    - `max_backlog`: Number of waiting messages at which a partition accepts no more. A send then
      raises BacklogFullError. Default: None, no limit.
    - `backlog_wait`: Time that a send waits for room ahead of BacklogFullError. Default: 0.
    - `traces`: Create an OpenTelemetry span for each call of `send`, `send_many` or `send_chunks`,
      and send its context in the headers. This needs the extra otel. Default: None, the setting
      `telemetry.traces`.

    Raises TypeError or ValueError, with the option's name, for an invalid option.
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
        """Write one message and return its uid, for example for `streamqd trace`.

        A bytes value is written unchanged, a str as UTF-8, and any other value as JSON. Messages
        with the same key go to the same partition. A message without a key is routed by its
        `dedup_id`. Without both, partitions take turns. If the `dedup_id` was used before within
        the window, the message is not written again, and the uid of the first one is returned, with
        `is_duplicate` True.

        With `delay` (seconds or timedelta) or `at` (unix seconds or a datetime with a time zone),
        the message becomes readable later. Pass its uid to `cancel` or `streamqd delayed`. After
        `expires` it is no longer handled: a datetime, or seconds or a timedelta after it became
        readable.

        Raises OutcomeUnknownError if the reply was lost. With a `dedup_id`, the send is repeated,
        and raises it only if the replies of all repetitions were lost. Raises RedisUnavailableError
        if Redis could not be reached. Nothing was written. Raises RedisResponseError if Redis
        rejected the message, for example because its memory is full. Raises BacklogFullError if
        `max_backlog` messages wait in the partition. Raises MessageTooLargeError if the message
        exceeds `max_message_bytes`. Raises TopicNotFoundError if the topic is not registered.
        Raises RequestRefusedError if `partition` does not exist. Raises TypeError or ValueError if
        the message cannot be encoded.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires, dedup_id)
        if self._sender.spans is None:
            return self._send(topic, item)
        with self._sender.spans.of(topic) as span:
            uid = self._send(topic, item._replace(headers=span.headers(headers)))
            span.note_sent(uid)
            return uid

    def _send(self, topic: str, item: Outgoing) -> Uid:
        result = self._sender.send(topic, self._sender.encode(item))
        if isinstance(result, Exception):
            raise result
        return result

    def send_many(self, topic: str, items: Iterable[Any]) -> list[Uid]:
        """Write many messages in pipelined chunks, and return their uids in order.

        An item is a value as for `send`, or an `Outgoing`. Messages are written in the order of
        the items, in chunks. Each chunk waits for the reply to the previous one. During this wait
        the next chunk is encoded, so up to one chunk of items may be consumed but not sent.

        If an error occurs, all messages before it are written, and the error reports them.
        BatchOutcomeUnknownError, BatchRejectedError and BacklogFullError contain the uids. If an
        item cannot be encoded or `items` itself raises, the earlier items are written, and the
        error is raised with a note that contains their number. `timeout` limits each chunk (512
        messages or 1 MiB), without the time that `items` takes.
        """
        if self._sender.spans is None:
            return self._send_many(topic, items)
        with self._sender.spans.of(topic) as span:
            ids = self._send_many(topic, map(span.carry(outgoing_of), items))
            span.sent_many(len(ids))
            return ids

    def _send_many(self, topic: str, items: Iterable[Any]) -> list[Uid]:
        ids: list[Uid] = []
        try:
            for results in self._sender.stream(topic, items):
                chunk, failure = split_results(topic, results)
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
        """Write many messages as `send_many` does, and yield the uids of each confirmed chunk.

        A raised BatchOutcomeUnknownError, BatchRejectedError or BacklogFullError contains only the
        uids of the failed chunk. `delay` (seconds) applies to all items that do not set `delay` or
        `at`.
        """
        if delay is not None:
            items = (_with_delay(item, delay) for item in items)
        if self._sender.spans is None:
            yield from self._send_chunks(topic, items)
            return
        with self._sender.spans.of(topic) as span:
            count = 0
            for ids in self._send_chunks(topic, map(span.carry(outgoing_of), items)):
                count += len(ids)
                span.sent_many(count)
                yield ids

    def _send_chunks(self, topic: str, items: Iterable[Any]) -> Iterator[list[Uid]]:
        for batch in self._sender.cut(items):
            ids, failure = split_results(topic, self._sender.post(topic, batch))
            if ids:
                yield ids
            if failure is not None:
                raise failure

    def cancel(self, uid: str) -> bool:
        """Cancel a delayed send: pass the value that `send` returned.

        Return True if it is now canceled and will never be delivered. Return False if no such send
        waits: it was delivered, canceled before, or never sent. A canceled send keeps its
        `dedup_id`.

        Raises ValueError for a string that is not a uid, OutcomeUnknownError when the reply was
        lost (a second call is safe), RedisUnavailableError when nothing was changed, and
        RedisResponseError.
        """
        return self._sender.cancel(uid)

    def buffered(self, **buffer: Unpack[BufferOptions]) -> BufferedProducer:
        """Return a BufferedProducer with the same settings and its own connection."""
        from streamqd.producer.buffered import BufferedProducer

        return BufferedProducer(None, self._sender.settings, **buffer, **self._options)


def split_results(topic: str, results: Sequence[Result]) -> tuple[list[Uid], Exception | None]:
    """Return the uids of a batch in order, and the error that stops the sending, or None.

    If the error itself contains the written uids of the batch, the list is empty.
    """
    sent = [result for result in results if isinstance(result, Uid)]
    if len(sent) == len(results):
        return sent, None
    failures = [result for result in results if isinstance(result, Exception)]
    ids: list[str | None] = [result if isinstance(result, Uid) else None for result in results]
    for at, result in enumerate(results):
        if isinstance(result, OutcomeUnknownError):
            unknown = len(results) - at
            return [], BatchOutcomeUnknownError(
                f"the connection was lost: {unknown} messages to {topic} may or may not have been"
                f" written ({result})",
                ids[:at],
                unknown,
            )
    refused = [result for result in failures if isinstance(result, RedisResponseError)]
    if refused:
        text = f"Redis refused {len(refused)} messages to {topic}: {refused[0]}"
        return [], BatchRejectedError(refused[0].code, text, ids)
    if isinstance(failures[0], BacklogFullError):
        return [], BacklogFullError(str(failures[0]), ids)
    # A message could not be routed, or nothing was written at all.
    return sent, failures[0]


def note_written(error: Exception, ids: list[Uid]) -> None:
    """Add the uids (or the number) of the messages written before to an error of `send_many`."""
    if isinstance(error, BatchOutcomeUnknownError | BatchRejectedError | BacklogFullError):
        error.ids[:0] = ids
    else:
        error.add_note(f"{len(ids)} messages of this call were written before it")


def _with_delay(item: Any, delay: float) -> Outgoing:
    outgoing = outgoing_of(item)
    if outgoing.delay is None and outgoing.at is None:
        return outgoing._replace(delay=delay)
    return outgoing
