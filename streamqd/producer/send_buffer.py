"""A bounded buffer of messages and the one thread that writes them.

Below the buffered and the asynchronous producer. Whoever sends encodes the message and puts it
here; the thread routes it and writes it, together with what else waits for the same topic. The
outbox knows nothing of futures: it asks `claim` before it writes and tells `deliver` what came.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from streamqd.errors import RedisUnavailable, Refused
from streamqd.producer.encoding import Envelope, check_topic, kind_of, size_of
from streamqd.producer.posting import PendingSend, Result
from streamqd.producer.sender import CHUNK_BYTES, CHUNK_COUNT, Sender

_log = logging.getLogger("streamqd.producer")

T = TypeVar("T")  # what stands for the sender of a parcel: a future


@dataclass(slots=True)
class BufferedBatch(Generic[T]):
    """Messages of one kind to one topic that are written together: one, or a batch of many."""

    topic: str
    envelopes: Sequence[Envelope]
    ticket: T
    size: int
    since: float  # monotonic time of its arrival
    number: int  # parcels are counted as they come, from 1


@dataclass(slots=True)
class WaitingSend(Generic[T]):
    """A posting of which some messages wait for room, with the parcels that have no answer yet."""

    posting: PendingSend
    parcels: dict[int, BufferedBatch[T]]  # by the number of the batch in the posting


class SendBuffer(Generic[T]):
    """Takes parcels from any thread and writes them in the order in which they came.

    `linger` is how long the first parcel waits for others, unless `max_batch` messages are there;
    at most `max_messages` messages of `max_bytes` together are here, those being written included.
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
    ) -> None:
        self._sender = sender
        self._claim = claim
        self._deliver = deliver
        self._linger = linger
        self._max_batch = max_batch
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._begin()
        _outboxes.add(self)

    def _begin(self) -> None:
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # the thread waits for it
        self._room = threading.Condition(lock)  # the others wait for it
        self._parcels: deque[BufferedBatch[T]] = deque()
        self._waiting = 0  # messages in `_parcels`
        self._held = 0  # messages here, those being written included
        self._held_bytes = 0
        self._taken = 0  # parcels that ever came
        self._finished = 0  # parcels of which the outcome was delivered
        self._passed = 0  # parcels that were written, or have found no room: in their order
        self._urgent = 0  # do not linger before so many have passed
        self._parked: list[WaitingSend[T]] = []  # in the order of their parcels; the thread's own
        self._unroomed: set[int] = set()  # numbers of the parcels in `_parked`
        self._given_up = False
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- for those who send ---

    def put(self, topic: str, envelopes: Sequence[Envelope], make: Callable[[], T]) -> T | None:
        """Take a parcel, with a ticket that `make` makes; None when there is no room for it.

        An empty outbox has room for anything. Raises Refused once it is closed.
        """
        check_topic(topic)
        size = sum(map(size_of, envelopes))
        with self._changed:
            if self._closed:
                raise Refused("the producer is closed")
            if self._held and (
                self._held + len(envelopes) > self._max_messages
                or self._held_bytes + size > self._max_bytes
            ):
                self._hurry()
                return None
            ticket = make()
            self._taken += 1
            arrived = time.monotonic()
            self._parcels.append(
                BufferedBatch(topic, envelopes, ticket, size, arrived, self._taken)
            )
            before = self._waiting
            self._waiting += len(envelopes)
            self._held += len(envelopes)
            self._held_bytes += size
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="streamqd-producer", daemon=True
                )
                self._thread.start()
            elif not before or before < self._max_batch <= self._waiting:
                self._changed.notify()
            return ticket

    def wait_for_room(self, timeout: float) -> None:
        """Wait until something has left, `timeout` seconds at most."""
        with self._room:
            finished = self._finished
            self._room.wait_for(lambda: self._finished != finished or not self._held, timeout)

    def flush(self, timeout: float | None) -> bool:
        """Write what is here without lingering; False when that took longer than `timeout`."""
        with self._changed:
            target = self._hurry()
            return self._room.wait_for(
                lambda: self._passed >= target and not any(n <= target for n in self._unroomed),
                timeout,
            )

    def _hurry(self) -> int:
        self._urgent = self._taken
        self._changed.notify()
        return self._urgent

    def close(self) -> None:
        """Take nothing any more, write what is here, then end the thread. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def abandon(self) -> None:
        """Give up what the thread has not begun to write."""
        with self._changed:
            parcels = list(self._parcels)
            self._parcels.clear()
            self._waiting = 0
            self._given_up = True
            self._changed.notify()
        for each in parcels:
            text = f"the producer was closed; a message to {each.topic} was not sent"
            if self._claim(each.ticket):
                self._deliver([(each.ticket, [RedisUnavailable(text, sent=False)])])
        self._finish(parcels)
        self._pass(parcels)

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of the thread; False when that took longer than `timeout`."""
        thread = self._thread
        if thread is None:
            self._sender.close()
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def forget(self) -> None:
        """In a forked child, which has no other thread: what is here is the parent's."""
        held = self._held
        self._begin()
        if held:
            _log.warning(
                "%d messages that were not written yet belong to the parent of this process (%d)",
                held,
                os.getppid(),
            )

    # --- the thread ---

    def _run(self) -> None:
        while (parcels := self._next()) is not None:
            by_topic: dict[str, list[BufferedBatch[T]]] = {}
            for each in parcels:
                by_topic.setdefault(each.topic, []).append(each)
            for topic, mine in by_topic.items():
                for bundle in _bundles(mine):
                    self._post(topic, bundle)
            self._pass(parcels)
            self._look()
        self._sender.close()

    def _next(self) -> list[BufferedBatch[T]] | None:
        """Wait for parcels and return those of a batch; None once it is closed and empty.

        No parcels when a look for room is due.
        """
        with self._changed:
            look_at = min((each.posting.look_at for each in self._parked), default=None)
            while not self._parcels:
                if self._closed and not self._parked:
                    return None
                left = None if look_at is None else look_at - time.monotonic()
                if self._parked and (self._given_up or (left is not None and left <= 0)):
                    return []
                self._changed.wait(left)
            ends = self._parcels[0].since + self._linger
            if look_at is not None:
                ends = min(ends, look_at)
            while (
                self._waiting < self._max_batch
                and self._passed >= self._urgent
                and not self._closed
                and (left := ends - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            parcels: list[BufferedBatch[T]] = []
            count = 0
            while self._parcels and count < self._max_batch:
                parcels.append(self._parcels.popleft())
                count += len(parcels[-1].envelopes)
            self._waiting -= count
            return parcels

    def _post(self, topic: str, bundle: list[BufferedBatch[T]]) -> None:
        claimed: list[BufferedBatch[T]] = []
        cancelled: list[BufferedBatch[T]] = []
        for each in bundle:
            (claimed if self._claim(each.ticket) else cancelled).append(each)
        self._finish(cancelled)
        if not claimed:
            return
        try:
            posting = self._sender.begin(
                topic, [each.envelopes for each in claimed], self._ahead(topic)
            )
        except BaseException as raised:  # noqa: BLE001 - whoever sent it must hear of it
            self._answer([(each, [_error_of(raised)]) for each in claimed])
            return
        parked = WaitingSend(posting, dict(enumerate(claimed)))
        self._settle(parked)
        if parked.parcels:
            self._parked.append(parked)

    def _ahead(self, topic: str, before: WaitingSend[T] | None = None) -> list[PendingSend]:
        """The open postings of a topic, those before `before`."""
        found = []
        for each in self._parked:
            if each is before:
                break
            if each.posting.open and each.posting.chunk.topic == topic:
                found.append(each.posting)
        return found

    def _look(self) -> None:
        """Look for room for what waits, in the order in which it came."""
        now = time.monotonic()
        for each in self._parked:
            posting = each.posting
            if self._given_up:
                posting.give_up()
            elif posting.look_at <= now:
                try:
                    self._sender.look(posting, self._ahead(posting.chunk.topic, each))
                except BaseException as raised:  # noqa: BLE001 - as in `_post`
                    posting.fail(_error_of(raised))
            else:
                continue
            self._settle(each)
        self._parked = [each for each in self._parked if each.parcels]

    def _settle(self, parked: WaitingSend[T]) -> None:
        """Answer the parcels of which no message waits any more; note the others."""
        posting = parked.posting
        open_ = posting.unsettled if posting.open else frozenset()
        numbers = [number for number in parked.parcels if number not in open_]
        settled = [(parked.parcels.pop(number), posting.answer(number)) for number in numbers]
        if parked.parcels:
            with self._room:
                self._unroomed.update(each.number for each in parked.parcels.values())
        if settled:
            self._answer(settled)

    def _answer(self, answers: list[tuple[BufferedBatch[T], list[Result]]]) -> None:
        self._deliver([(each.ticket, results) for each, results in answers])
        self._finish([each for each, _ in answers])

    def _pass(self, parcels: Sequence[BufferedBatch[T]]) -> None:
        with self._room:
            self._passed += len(parcels)
            self._room.notify_all()

    def _finish(self, parcels: Sequence[BufferedBatch[T]]) -> None:
        with self._room:
            self._held -= sum(len(each.envelopes) for each in parcels)
            self._held_bytes -= sum(each.size for each in parcels)
            self._finished += len(parcels)
            self._unroomed.difference_update(each.number for each in parcels)
            self._room.notify_all()


def _error_of(raised: BaseException) -> Exception:
    # A partitioner that calls sys.exit ends nothing but its own message.
    return raised if isinstance(raised, Exception) else RuntimeError(repr(raised))


def _bundles(parcels: Sequence[BufferedBatch[T]]) -> list[list[BufferedBatch[T]]]:
    """Cut parcels to one topic, in order, into what one transaction carries."""
    bundles: list[list[BufferedBatch[T]]] = []
    count = size = 0
    kind = ""
    for each in parcels:
        own = kind_of(each.envelopes[0])
        count, size = count + len(each.envelopes), size + each.size
        if not bundles or own != kind or count > CHUNK_COUNT or size > CHUNK_BYTES:
            bundles.append([])
            kind, count, size = own, len(each.envelopes), each.size
        bundles[-1].append(each)
    return bundles


_outboxes: weakref.WeakSet[SendBuffer[Any]] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_outboxes):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
