"""A buffer of limited size for messages, and the one thread that writes them.

The buffered and the asynchronous producer use it. A `send` encodes the message and puts it into the
buffer. The thread writes it, together with other messages to the same topic. The buffer itself uses
no futures: it calls `claim` before it writes a message, and passes the results to `deliver`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamqd.errors import RedisUnavailableError, RequestRefusedError
from streamqd.producer.chunk import Chunk, EarlierChunks, Result
from streamqd.producer.encoding import Envelope, check_topic, envelope_kind, envelope_size
from streamqd.producer.sender import CHUNK_BYTES, CHUNK_COUNT, Sender, forget_in_children

_log = logging.getLogger("streamqd.producer")

T = TypeVar("T")  # the ticket of a batch's sender, which is a future


@dataclass(slots=True)
class BufferedBatch(Generic[T]):
    """One or more messages of one kind that are written together to one topic."""

    topic: str
    envelopes: Sequence[Envelope]
    ticket: T
    size: int
    since: float  # time (seconds, monotonic) of the sender's call
    number: int  # the number in the order of arrival, starting at 1


class SendBuffer(Generic[T]):
    """A buffer that accepts batches from any thread, and writes them in the order of arrival.

    The first batch waits `linger` seconds for others, or less if `max_batch` messages are waiting.
    The buffer holds up to `max_messages` messages with `max_bytes` in total, including those that
    are being written. The time limit of a batch starts when it is written, or, if `awaited` is
    True, when it arrives.
    """

    def __init__(
        self,
        sender: Sender,
        claim: Callable[[T], bool],
        deliver: Callable[[list[tuple[T, list[Result]]]], None],
        *,
        linger: float,
        max_batch: int,
        max_messages: int,
        max_bytes: int,
        awaited: bool = False,
    ) -> None:
        self._sender = sender
        self._awaited = awaited
        self._claim = claim
        self._deliver = deliver
        self._linger = linger
        self._max_batch = max_batch
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._reset()
        forget_in_children(self)

    def _reset(self) -> None:
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the writing thread
        self._room = threading.Condition(lock)  # for all other threads
        self._queue: deque[BufferedBatch[T]] = deque()
        self._queued = 0  # number of messages in `_queue`
        self._held = 0  # messages in the buffer, including those being written
        self._held_bytes = 0
        self._taken = 0  # number of batches that have been accepted
        self._unfinished: dict[int, None] = {}  # numbers of batches, in order
        self._urgent = 0  # batches up to this number do not linger
        # Chunks whose messages are waiting for room, in the order of arrival. Each is mapped to
        # those of its batches that have no result yet, by their numbers in the chunk. Only the
        # writing thread uses this.
        self._waiting: dict[Chunk, dict[int, BufferedBatch[T]]] = {}
        self._earlier_chunks: dict[str, EarlierChunks] = {}  # by topic, its waiting chunks
        self._check_at: float | None = None  # time of the next check for room, monotonic
        self._given_up = False
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- the sending threads ---

    def put(
        self,
        topic: str,
        envelopes: Sequence[Envelope],
        make: Callable[[], T],
        since: float | None = None,
    ) -> T | None:
        """Accept a batch and return its ticket from `make`. If the buffer has no room, return None.

        An empty buffer accepts a batch of any size. `since` is the time of the sender's call
        (seconds, monotonic), which defaults to the current time. Raises RequestRefusedError after
        `close`.
        """
        check_topic(topic)
        size = sum(map(envelope_size, envelopes))
        with self._changed:
            if self._closed:
                raise RequestRefusedError("the producer is closed")
            if self._held and (
                self._held + len(envelopes) > self._max_messages
                or self._held_bytes + size > self._max_bytes
            ):
                self._request_flush()
                return None
            ticket = make()
            number = self._taken = self._taken + 1
            arrived = time.monotonic() if since is None else since
            self._queue.append(BufferedBatch(topic, envelopes, ticket, size, arrived, number))
            self._unfinished[number] = None
            before = self._queued
            self._queued += len(envelopes)
            self._held += len(envelopes)
            self._held_bytes += size
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="streamqd-producer", daemon=True
                )
                self._thread.start()
            elif not before or before < self._max_batch <= self._queued:
                self._changed.notify()
            return ticket

    def wait_for_room(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until a batch leaves the buffer. May return earlier."""
        with self._room:
            if self._held:
                self._room.wait(timeout)

    def flush(self, timeout: float | None) -> bool:
        """Write all batches without lingering. Return False if this takes longer than `timeout`."""
        with self._changed:
            last = self._request_flush()
            return self._room.wait_for(
                lambda: next(iter(self._unfinished), last + 1) > last, timeout
            )

    def _request_flush(self) -> int:
        self._urgent = self._taken
        self._changed.notify()
        return self._urgent

    def close(self) -> None:
        """Reject new batches, write all others, and then stop the thread.

        This returns immediately.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()

    def abandon(self) -> None:
        """Give up all batches that are not being written yet."""
        with self._changed:
            batches = list(self._queue)
            self._queue.clear()
            self._queued = 0
            self._given_up = True
            self._changed.notify()
        for batch in batches:
            text = f"the producer was closed before a message to {batch.topic} was sent"
            if self._claim(batch.ticket):
                self._deliver([(batch.ticket, [RedisUnavailableError(text, sent=False)])])
        self._finish(batches)

    def join(self, timeout: float | None) -> bool:
        """Wait until the thread stops. Return False if this takes longer than `timeout`."""
        thread = self._thread
        if thread is None:
            self._sender.close()
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def forget(self) -> None:
        """Empty the buffer in a forked child, because its batches belong to the parent."""
        held = self._held
        self._reset()
        if held:
            _log.warning(
                "%d messages that were not written yet belong to the parent of this process (%d)",
                held,
                os.getppid(),
            )

    # --- the thread ---

    def _run(self) -> None:
        while (batches := self._take_next()) is not None:
            for bundle in _bundles(batches):
                self._write(bundle)
            self._retry_waiting()
        self._sender.close()

    def _take_next(self) -> list[BufferedBatch[T]] | None:
        """Wait for batches that can be written together.

        Return [] if it is time to check for room again. After `close`, return None once the buffer
        is empty.
        """
        with self._changed:
            check_at = self._check_at
            while not self._queue:
                if self._closed and not self._waiting:
                    return None
                left = None if check_at is None else check_at - time.monotonic()
                if self._waiting and (self._given_up or (left is not None and left <= 0)):
                    return []
                self._changed.wait(left)
            ends = self._queue[0].since + self._linger
            if check_at is not None:
                ends = min(ends, check_at)
            while (
                self._queued < self._max_batch
                and not self._closed
                and self._queue[0].number > self._urgent
                and (left := ends - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            batches: list[BufferedBatch[T]] = []
            count = 0
            while self._queue and count < self._max_batch:
                batches.append(self._queue.popleft())
                count += len(batches[-1].envelopes)
            self._queued -= count
            return batches

    def _write(self, bundle: list[BufferedBatch[T]]) -> None:
        claimed: list[BufferedBatch[T]] = []
        canceled: list[BufferedBatch[T]] = []
        for batch in bundle:
            (claimed if self._claim(batch.ticket) else canceled).append(batch)
        self._finish(canceled)
        if not claimed:
            return
        try:
            since = claimed[0].since if self._awaited else None
            chunk = self._sender.chunk(
                bundle[0].topic, [batch.envelopes for batch in claimed], since
            )
        except BaseException as raised:  # noqa: BLE001 - the result of the messages
            self._answer([(batch, [_to_exception(raised)]) for batch in claimed])
            return
        self._waiting[chunk] = dict(enumerate(claimed))
        self._attempt(chunk)

    def _retry_waiting(self) -> None:
        """Try the chunks that are waiting for room again, in the order of arrival.

        A chunk that waits for earlier chunks to the same partitions is tried only after those have
        found room. The work is therefore proportional to the number of waiting chunks.
        """
        now = time.monotonic()
        if not self._waiting or not (self._given_up or (self._check_at or 0.0) <= now):
            return
        self._earlier_chunks, self._check_at = {}, None
        for chunk in list(self._waiting):
            if self._given_up:
                chunk.give_up()
                self._settle(chunk)
            elif chunk.is_blocked or chunk.check_at <= now:
                self._attempt(chunk)
            else:
                self._note_waiting(chunk)

    def _attempt(self, chunk: Chunk) -> None:
        """Write a chunk, except for messages that would overtake messages of earlier chunks."""
        try:
            self._sender.attempt(chunk, self._earlier_chunks.get(chunk.topic))
        except BaseException as raised:  # noqa: BLE001 - the result of the messages
            chunk.fail(_to_exception(raised))
        self._settle(chunk)
        if chunk in self._waiting:
            self._note_waiting(chunk)

    def _note_waiting(self, chunk: Chunk) -> None:
        self._earlier_chunks.setdefault(chunk.topic, EarlierChunks()).add(chunk)
        self._check_at = min(self._check_at or math.inf, chunk.check_at)

    def _settle(self, chunk: Chunk) -> None:
        """Deliver the results of each batch that has no waiting messages left."""
        batches = self._waiting[chunk]
        settled = [number for number in batches if not chunk.waits(number)]
        if settled:
            self._answer([(batches.pop(number), chunk.answer(number)) for number in settled])
        if not batches:
            del self._waiting[chunk]

    def _answer(self, answers: list[tuple[BufferedBatch[T], list[Result]]]) -> None:
        self._deliver([(each.ticket, results) for each, results in answers])
        self._finish([each for each, _ in answers])

    def _finish(self, batches: Sequence[BufferedBatch[T]]) -> None:
        with self._room:
            for batch in batches:
                self._held -= len(batch.envelopes)
                self._held_bytes -= batch.size
                del self._unfinished[batch.number]
            self._room.notify_all()


def _to_exception(raised: BaseException) -> Exception:
    # If a partitioner calls sys.exit, only its own message fails.
    return raised if isinstance(raised, Exception) else RuntimeError(repr(raised))


def _bundles(batches: Sequence[BufferedBatch[T]]) -> list[list[BufferedBatch[T]]]:
    """Group batches into bundles, each for one transaction.

    Batches for one topic keep their order.
    """
    by_topic: dict[str, list[BufferedBatch[T]]] = {}
    for batch in batches:
        by_topic.setdefault(batch.topic, []).append(batch)
    bundles: list[list[BufferedBatch[T]]] = []
    for topic_batches in by_topic.values():
        count = size = 0
        kind = ""
        for batch in topic_batches:
            own = envelope_kind(batch.envelopes[0])
            count, size = count + len(batch.envelopes), size + batch.size
            if own != kind or count > CHUNK_COUNT or size > CHUNK_BYTES:
                bundles.append([])
                kind, count, size = own, len(batch.envelopes), batch.size
            bundles[-1].append(batch)
    return bundles
