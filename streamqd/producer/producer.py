"""The synchronous producer, whose calls return after Redis has replied."""

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
from streamqd.producer.encoding import Outgoing, to_outgoing
from streamqd.producer.options import ProducerOptions
from streamqd.producer.sender import Sender

if TYPE_CHECKING:
    from streamqd.producer.buffered import BufferedProducer
    from streamqd.producer.options import BufferOptions


class Producer:
    """A producer that writes messages to topics over its own connection.

    Use it as a context manager, or call `close` when you no longer need it. It is thread-safe,
    because threads take turns on the connection. A producer that was created before a fork also
    works in the child, over a new connection.

    `url` is the address of Redis. `settings`, as returned by `config.load`, contains all other
    settings. If you pass neither, the producer uses the same settings as the command line: those of
    the file that STREAMQ_CONFIG names, or of ./streamq.toml if it exists. The variables
    STREAMQ_SECTION__SETTING override them.

    The options are as follows. A duration is a number of seconds, a string such as "5m" or a
    timedelta.

    - `create`: Register an unknown topic at the first send, with the partition count of the
      settings, or else one partition. With False, the send raises TopicNotFoundError.
      Default: True.
    - `timeout`: The time limit of one `send`. It includes connecting, all repetitions and the wait
      for other threads, but not `backlog_wait`. Default: 5 seconds.
    - `dedup_window`: The time for which a `dedup_id` is remembered. Default: 600 seconds.
    - `partitioner`: The way in which a partition is selected: "hash" (CRC-32 of the key),
      "round-robin", "sticky", "consistent", or a function of the key (bytes or None) and the number
      of partitions. To select one per topic, pass a mapping. Topics that are not in it use "hash".
      Default: "hash".
    - `max_backlog`: The number of waiting messages at which a partition accepts no more. A send
      then raises BacklogFullError. Default: None, no limit.
    - `backlog_wait`: The time for which a send waits for room before it raises BacklogFullError.
      Default: 0.
    - `traces`: Create an OpenTelemetry span for each call of `send`, `send_many` or `send_chunks`,
      and send its context in the headers. Requires the otel extra. Default: None, which uses the
      setting `telemetry.traces`.

    Raises TypeError or ValueError for an invalid option.
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
        `dedup_id`. Messages with neither go to each partition in turn.

        If the `dedup_id` was already used within `dedup_window`, the message is not written.
        Instead, the call returns the uid of the earlier message, with `is_duplicate` True.

        With `delay` (seconds or a timedelta) or `at` (unix seconds or a datetime with a time zone),
        the message is delivered later. To cancel it, pass its uid to `cancel` or to
        `streamqd delayed cancel`.

        A message that has not been handled by the time in `expires` is dropped. `expires` is a
        datetime, or seconds or a timedelta after the delivery.

        Raises:

        - OutcomeUnknownError if the reply was lost. With a `dedup_id`, the send is repeated, and
          the error is raised only if the replies of all repetitions were lost.
        - RedisUnavailableError if Redis could not be reached. Nothing was written.
        - RedisResponseError if Redis rejected the message, for example because its memory is full.
        - BacklogFullError if `max_backlog` messages wait in the partition.
        - MessageTooLargeError if the message exceeds `max_message_bytes`.
        - TopicNotFoundError if the topic is not registered and `create` is False.
        - RequestRefusedError if `partition` does not exist.
        - TypeError or ValueError if the message cannot be encoded.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires, dedup_id)
        if self._sender.spans is None:
            return self._send(topic, item)
        with self._sender.spans.start(topic) as span:
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

        An item is a value as for `send`, or an `Outgoing`. Messages are written in the order of the
        items, in chunks of 512 messages or 1 MiB. The producer sends a chunk when it has received
        the reply to the previous one. While it waits for a reply, it already encodes the next
        chunk, so after an error, up to one chunk of items was consumed but not sent. `timeout`
        limits the time for each chunk, not including the time in which `items` yields its messages.

        If an error occurs, all messages before the affected ones were written.
        BatchOutcomeUnknownError, BatchRejectedError and BacklogFullError contain their uids. If an
        item cannot be encoded or `items` itself raises an exception, a note on the exception
        contains the number of written messages.
        """
        if self._sender.spans is None:
            return self._send_many(topic, items)
        with self._sender.spans.start(topic) as span:
            ids = self._send_many(topic, map(span.carry(to_outgoing), items))
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

        BatchOutcomeUnknownError, BatchRejectedError and BacklogFullError contain only the uids of
        the failed chunk. `delay` (seconds) applies to all items that do not set `delay` or `at`.
        """
        if delay is not None:
            items = (_with_delay(item, delay) for item in items)
        if self._sender.spans is None:
            yield from self._send_chunks(topic, items)
            return
        with self._sender.spans.start(topic) as span:
            count = 0
            for ids in self._send_chunks(topic, map(span.carry(to_outgoing), items)):
                count += len(ids)
                span.sent_many(count)
                yield ids

    def _send_chunks(self, topic: str, items: Iterable[Any]) -> Iterator[list[Uid]]:
        for batch in self._sender.split_batches(items):
            ids, failure = split_results(topic, self._sender.post(topic, batch))
            if ids:
                yield ids
            if failure is not None:
                raise failure

    def cancel(self, uid: str) -> bool:
        """Cancel the delayed send with the uid that `send` returned.

        Return True if the send is now canceled and will never be delivered. Return False if it is
        not waiting, because it was delivered, canceled before, or never sent. The `dedup_id` of a
        canceled send stays in use.

        Raises:

        - ValueError if `uid` is not a uid.
        - OutcomeUnknownError if the reply was lost. You can safely repeat the call.
        - RedisUnavailableError if Redis could not be reached. Nothing was changed.
        - RedisResponseError if Redis returned an error.
        """
        return self._sender.cancel(uid)

    def buffered(self, **buffer: Unpack[BufferOptions]) -> BufferedProducer:
        """Return a BufferedProducer with the same settings and its own connection."""
        from streamqd.producer.buffered import BufferedProducer

        return BufferedProducer(None, self._sender.settings, **buffer, **self._options)


def split_results(topic: str, results: Sequence[Result]) -> tuple[list[Uid], Exception | None]:
    """Return the uids of a batch in order, and the error that stops the sending, or None.

    If the error itself contains the uids of the written messages, the list is empty.
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
    # A message could not be routed, or nothing at all was written.
    return sent, failures[0]


def note_written(error: Exception, ids: list[Uid]) -> None:
    """Add the messages that a `send_many` call already wrote to its error, by uid or number."""
    if isinstance(error, BatchOutcomeUnknownError | BatchRejectedError | BacklogFullError):
        error.ids[:0] = ids
    else:
        error.add_note(f"{len(ids)} messages of this call were written before it")


def _with_delay(item: Any, delay: float) -> Outgoing:
    outgoing = to_outgoing(item)
    if outgoing.delay is None and outgoing.at is None:
        return outgoing._replace(delay=delay)
    return outgoing
