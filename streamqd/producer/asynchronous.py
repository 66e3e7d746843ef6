"""The producer for asyncio. A thread waits for Redis, so that the event loop is never blocked.

It uses the same buffer as the buffered producer, but writes at once instead of waiting for more
messages (no linger). Concurrent sends of several tasks are written together, and both producers
handle lost replies in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, Unpack

from streamqd import config
from streamqd.config.values import Size
from streamqd.errors import RedisUnavailableError
from streamqd.model import Uid
from streamqd.producer.chunk import Result
from streamqd.producer.encoding import Envelope, Outgoing, to_outgoing
from streamqd.producer.options import ProducerOptions, parse_options
from streamqd.producer.producer import note_written, split_results
from streamqd.producer.send_buffer import SendBuffer
from streamqd.producer.sender import CHUNK_COUNT, Sender

Ticket = asyncio.Future[list[Result]]


class AsyncProducer:
    """A producer for the tasks of one event loop.

    Use it as an asynchronous context manager, or await `close` when you no longer need it. It takes
    the same options as `Producer`. At most `max_messages` messages, with `max_bytes` in total, are
    in flight at a time. When this limit is reached, `send` waits. A separate thread writes the
    messages and calls the `partitioner`. While a message waits for room in its partition
    (`backlog_wait`), only messages to the same partition are delayed.

    If you cancel a task during `send`, its message may or may not be written, but other sends are
    not affected. Use the producer only in the event loop in which you first used it. A forked child
    does not inherit the messages in flight, and can use the producer in an event loop of its own.
    """

    def __init__(
        self,
        url: str | None = None,
        settings: config.Settings | None = None,
        *,
        max_messages: int = 10_000,
        max_bytes: Size = "64MiB",
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._sender = Sender(url, settings, **options)
        self._buffer: SendBuffer[Ticket] = SendBuffer(
            self._sender,
            _claim,
            _deliver,
            linger=0.0,
            max_batch=CHUNK_COUNT,
            awaited=True,
            **parse_options(max_messages=max_messages, max_bytes=max_bytes),
        )
        self._queue = asyncio.Lock()  # keeps sends in order while they wait for room
        self._queued = 0  # sends that are waiting for room
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(
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
        """Write one message and return its uid.

        The arguments and errors are the same as for `Producer.send`.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires, dedup_id)
        if self._sender.spans is None:
            return await self._send(topic, item)
        with self._sender.spans.start(topic) as span:
            uid = await self._send(topic, item._replace(headers=span.headers(headers)))
            span.note_sent(uid)
            return uid

    async def _send(self, topic: str, item: Outgoing) -> Uid:
        [result] = await self._post(topic, (self._sender.encode(item),))
        if isinstance(result, Exception):
            raise result
        return result

    async def send_many(self, topic: str, items: Iterable[Any]) -> list[Uid]:
        """Write many messages in pipelined chunks, and return their uids in order.

        The items, their order and the errors are the same as for `Producer.send_many`. However,
        messages of other sends may be written between the chunks.
        """
        if self._sender.spans is None:
            return await self._send_many(topic, items)
        with self._sender.spans.start(topic) as span:
            ids = await self._send_many(topic, map(span.carry(to_outgoing), items))
            span.sent_many(len(ids))
            return ids

    async def _send_many(self, topic: str, items: Iterable[Any]) -> list[Uid]:
        ids: list[Uid] = []
        try:
            for batch in self._sender.split_batches(items):
                confirmed_ids, failure = split_results(topic, await self._post(topic, batch))
                ids += confirmed_ids
                if failure is not None:
                    raise failure
        except Exception as error:
            note_written(error, ids)
            raise
        return ids

    async def cancel(self, uid: str) -> bool:
        """Cancel a delayed send.

        The argument, the result and the errors are the same as for `Producer.cancel`.
        """
        return await asyncio.get_running_loop().run_in_executor(None, self._sender.cancel, uid)

    async def close(self) -> None:
        """Write all sent messages, and then close the connection. Further calls do nothing."""
        self._buffer.close()
        await asyncio.get_running_loop().run_in_executor(None, self._buffer.join, None)

    async def _post(self, topic: str, envelopes: Sequence[Envelope]) -> list[Result]:
        loop, since = asyncio.get_running_loop(), time.monotonic()
        if os.getpid() != self._pid:
            # The lock belongs to the parent's event loop. If one of its tasks holds the lock, this
            # process could never release it.
            self._pid, self._queue, self._queued = os.getpid(), asyncio.Lock(), 0
        ticket: Ticket | None = None
        if not self._queued:  # otherwise, it would overtake waiting sends
            ticket = self._buffer.put(topic, envelopes, loop.create_future, since)
        return await (ticket or await self._put_in_turn(topic, envelopes, since))

    async def _put_in_turn(self, topic: str, envelopes: Sequence[Envelope], since: float) -> Ticket:
        """Wait for room in the buffer. Earlier sends that are waiting for it come first.

        Raises RedisUnavailableError if there is no room within the time limit of one send.
        """
        loop = asyncio.get_running_loop()
        self._queued += 1
        try:
            async with asyncio.timeout(self._sender.timeout), self._queue:
                make = loop.create_future
                while (ticket := self._buffer.put(topic, envelopes, make, since)) is None:
                    await loop.run_in_executor(None, self._buffer.wait_for_room, 1.0)
                return ticket
        except TimeoutError:
            raise RedisUnavailableError(
                f"no room for a message to {topic} within {self._sender.timeout:g} s, so nothing"
                " was sent; send fewer messages at a time, or raise max_messages and max_bytes",
                sent=False,
            ) from None
        finally:
            self._queued -= 1


def _claim(ticket: Ticket) -> bool:
    # This runs in the writing thread. If a cancellation comes just too late, the message is
    # written.
    return not ticket.cancelled()


def _deliver(answers: list[tuple[Ticket, list[Result]]]) -> None:
    if answers:
        loop = answers[0][0].get_loop()
        with contextlib.suppress(RuntimeError):  # if the loop is closed, no task is waiting
            loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: list[tuple[Ticket, list[Result]]]) -> None:
    for ticket, results in answers:
        if not ticket.done():
            ticket.set_result(results)
