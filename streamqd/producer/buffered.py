"""The buffered producer: `send` returns at once, a thread writes many messages together."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, Unpack

from streamqd import config
from streamqd.config.values import Duration, Size
from streamqd.errors import BufferFull, UnknownOutcome
from streamqd.model import Uid
from streamqd.producer.chunk import Result
from streamqd.producer.encoding import Outgoing
from streamqd.producer.options import ProducerOptions, checked
from streamqd.producer.send_buffer import SendBuffer
from streamqd.producer.sender import Sender


class Receipt(Future[Uid]):
    """What `BufferedProducer.send` returns: a future of the message's uid.

    `result` raises what `Producer.send` would have raised. In a child that was forked meanwhile it
    raises UnknownOutcome, for the message is the parent's. `cancel` works until the message is
    about to be written. Callbacks run in the thread that writes: keep them short, and never wait
    for another receipt in one.
    """

    # The ten objects of a future, with its lock, are made when they are needed. Most receipts are
    # only asked for a result that is there, and the garbage collector visits what all of them
    # have: that was half of the producer's work.
    _lock = threading.Lock()
    _complete = False
    _claimed = False
    _outcome: Result | None = None  # until it is complete: the result or the exception

    def __init__(self) -> None:
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> Uid:
        """Wait for the uid. Raises TimeoutError, CancelledError, or why there is none."""
        self._check_process()
        outcome = self._outcome
        return outcome if isinstance(outcome, Uid) else super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome; return why there is no uid, or None when there is one."""
        self._check_process()
        return super().exception(timeout)

    def _claim(self) -> bool:
        """For the thread that writes: False when it was cancelled."""
        with self._lock:
            if not self._complete:
                self._claimed = True
                return True
        return self.set_running_or_notify_cancel()

    def _settle(self, outcome: Result) -> None:
        """For the thread that writes: the uid, or why there is none."""
        with self._lock:
            if not self._complete:
                self._outcome = outcome
                return
        _settle(self, outcome)

    @classmethod
    def _forget(cls) -> None:
        """In a forked child: another thread of the parent may have had the lock."""
        cls._lock = threading.Lock()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            # Waiting would never end: the thread that writes is in the other process.
            raise UnknownOutcome(f"the message was sent by another process, {self._pid}")

    if not TYPE_CHECKING:  # a checker knows the attributes of a future

        def __getattr__(self, name: str) -> Any:
            """Become complete when an attribute of a future is used."""
            with self._lock:
                if not self._complete:
                    future: Future[Uid] = Future()
                    if self._claimed:
                        future.set_running_or_notify_cancel()
                    if self._outcome is not None:
                        _settle(future, self._outcome)
                    self.__dict__.update(future.__dict__, _complete=True)
            return super().__getattribute__(name)


def _settle(future: Future[Uid], outcome: Result) -> None:
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


os.register_at_fork(after_in_child=Receipt._forget)  # noqa: SLF001 - not for users


class BufferedProducer:
    """Writes messages from any thread through a buffer and a thread of its own.

    1. `send` encodes the message, puts it into the buffer and returns a Receipt.
    2. The thread waits `linger` ("5ms") from the first message on, or for `max_batch` (512).
    3. It writes what is there, in one transaction for each topic, and the receipts get their uids.
    4. `flush` waits for all that was sent before; `close`, or the end of the `with`, flushes.

    At most `max_messages` (100,000) of `max_bytes` ("64MiB") together are in the buffer. When it is
    full, `send` waits for room, `block` ("1m") at most, and then raises BufferFull; with `block=0`
    it raises at once. All other options are those of `Producer`; a `partitioner` is called in the
    thread that writes. What waits `backlog_wait` for room holds up its own partition only.

    Thread-safe. In a forked child it is empty and works, with a connection and a thread of the
    child's own. Unsent messages stay with the parent, and a warning says so.
    """

    def __init__(
        self,
        url: str | None = None,
        settings: config.Settings | None = None,
        *,
        linger: Duration = "5ms",
        max_batch: int = 512,
        max_messages: int = 100_000,
        max_bytes: Size = "64MiB",
        block: Duration = "1m",
        **options: Unpack[ProducerOptions],
    ) -> None:
        buffer = checked(
            linger=linger,
            max_batch=max_batch,
            max_messages=max_messages,
            max_bytes=max_bytes,
            block=block,
        )
        self._block: float = buffer.pop("block")
        self._sender = Sender(url, settings, **options)
        self._buffer: SendBuffer[Receipt] = SendBuffer(
            self._sender,
            Receipt._claim,  # noqa: SLF001 - not for users
            _deliver,
            **buffer,
        )
        # Messages must not be lost because a program ends without calling `close`.
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
    ) -> Receipt:
        """Put one message into the buffer; arguments as for `Producer.send`.

        Raises BufferFull, Refused once it is closed, and MessageTooLarge, TypeError or ValueError
        for a message that cannot be encoded. The receipt raises everything else.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires, dedup_id)
        envelopes = (self._sender.encode(item),)
        deadline: float | None = None
        while (receipt := self._buffer.put(topic, envelopes, Receipt)) is None:
            now = time.monotonic()
            deadline = now + self._block if deadline is None else deadline
            if now >= deadline:
                raise BufferFull(
                    f"the buffer has had no room for {self._block:g} s; a message to {topic} was"
                    " not taken"
                )
            self._buffer.wait_for_room(deadline - now)
        return receipt

    def cancel(self, uid: str) -> bool:
        """Cancel a delayed send, by the result of its receipt; waits for Redis.

        Argument, result and errors as for `Producer.cancel`.
        """
        return self._sender.cancel(uid)

    def flush(self, timeout: float | None = None) -> bool:
        """Write all that was sent before; False when that took longer than `timeout` seconds.

        Returns when the outcome of each message is known, whatever it is.
        """
        return self._buffer.flush(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Flush, then end the thread and close the connection. A second call changes nothing.

        Messages that the thread has not begun to write after `timeout` seconds are given up: their
        receipts raise RedisUnavailable, and False is returned.
        """
        atexit.unregister(self.close)
        self._buffer.close()
        if self._buffer.join(timeout):
            return True
        self._buffer.abandon()
        return False


def _deliver(answers: list[tuple[Receipt, list[Result]]]) -> None:
    for receipt, results in answers:
        receipt._settle(results[0])  # noqa: SLF001 - not for users
