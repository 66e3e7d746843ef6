"""The buffered producer, whose `send` returns immediately while a thread writes in batches."""

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
from streamqd.errors import BufferFullError, OutcomeUnknownError
from streamqd.model import Uid
from streamqd.producer.chunk import Result
from streamqd.producer.encoding import Outgoing
from streamqd.producer.options import ProducerOptions, parse_options
from streamqd.producer.send_buffer import SendBuffer
from streamqd.producer.sender import Sender


class Receipt(Future[Uid]):
    """The future of a message's uid, which `BufferedProducer.send` returns.

    `result` raises the same errors as `Producer.send`. In a child that was forked after the send,
    it raises OutcomeUnknownError, because the message belongs to the parent. `cancel` works until
    the thread starts to write the message. Callbacks run in the writing thread, so keep them short,
    and never wait for another receipt in a callback.
    """

    # A future and its lock consist of ten objects, which the garbage collector would spend half of
    # the producer's time on visiting. Most receipts are only asked for a result that is already
    # available, so these objects are created only when they are needed.
    _lock = threading.Lock()
    _complete = False
    _claimed = False
    # The result or the exception, until it is passed on to the future.
    _outcome: Result | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> Uid:
        """Wait for the uid. Raises TimeoutError, CancelledError, or the error of the send."""
        self._check_process()
        outcome = self._outcome
        return outcome if isinstance(outcome, Uid) else super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome. Return the error of the send, or None if it succeeded."""
        self._check_process()
        return super().exception(timeout)

    def _claim(self) -> bool:
        """Mark the message as being written. Return False if it was canceled.

        The writing thread calls this.
        """
        with self._lock:
            if not self._complete:
                self._claimed = True
                return True
        return self.set_running_or_notify_cancel()

    def _settle(self, outcome: Result) -> None:
        """Store the uid or the error. The writing thread calls this."""
        with self._lock:
            if not self._complete:
                self._outcome = outcome
                return
        _settle(self, outcome)

    @classmethod
    def _forget(cls) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        cls._lock = threading.Lock()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            # Waiting would never end, because the writing thread is in another process.
            raise OutcomeUnknownError(
                f"the message belongs to process {self._pid}, so its outcome is unknown here;"
                " wait for it in that process"
            )

    if not TYPE_CHECKING:  # type checkers see the attributes of Future

        def __getattr__(self, name: str) -> Any:
            """Create the parts of the future when one of its attributes is first used."""
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
    """A thread-safe producer with its own buffer and writing thread.

    1. `send` encodes the message, puts it into the buffer and returns a Receipt.
    2. The thread waits for `linger` after the first message, or until `max_batch` messages wait.
    3. It writes the buffered messages, in one or more transactions per topic, and sets the uids of
       their receipts.
    4. `flush` waits until all earlier messages are written. `close` and the end of a `with` block
       also flush.

    The buffer holds up to `max_messages` messages, with `max_bytes` in total. When it is full,
    `send` waits up to `block` for room, and then raises BufferFullError. With `block=0`, it raises
    the error immediately. All other options are the same as for `Producer`. The writing thread
    calls the `partitioner`. While a message waits for room in its partition (`backlog_wait`), only
    messages to the same partition are delayed.

    In a forked child, the buffer is empty, and the producer uses a new connection and a new thread.
    The parent still sends the messages that were in the buffer, and the child logs a warning.
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
        buffer = parse_options(
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
        # Messages must not be lost if a program exits without calling `close`.
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
        """Put one message into the buffer. The arguments are the same as for `Producer.send`.

        Raises BufferFullError if the buffer stays full, RequestRefusedError after `close`, and
        MessageTooLargeError, TypeError or ValueError if the message cannot be encoded. The
        receipt raises all other errors.
        """
        item = Outgoing(value, key, headers, partition, delay, at, expires, dedup_id)
        if self._sender.spans is None:
            return self._put(topic, item)
        with self._sender.spans.start(topic, "create") as span:
            return self._put(topic, item._replace(headers=span.headers(headers)))

    def _put(self, topic: str, item: Outgoing) -> Receipt:
        envelopes = (self._sender.encode(item),)
        deadline: float | None = None
        while (receipt := self._buffer.put(topic, envelopes, Receipt)) is None:
            now = time.monotonic()
            deadline = now + self._block if deadline is None else deadline
            if now >= deadline:
                raise BufferFullError(
                    f"the buffer has had no room for {self._block:g} s, so a message to {topic}"
                    " was not accepted; send it later, or raise max_messages or max_bytes"
                )
            self._buffer.wait_for_room(deadline - now)
        return receipt

    def cancel(self, uid: str) -> bool:
        """Cancel the delayed send with the uid from its receipt. This waits for Redis.

        The argument, the result and the errors are the same as for `Producer.cancel`.
        """
        return self._sender.cancel(uid)

    def flush(self, timeout: float | None = None) -> bool:
        """Write all earlier messages. Return False if this takes longer than `timeout` seconds.

        `flush` waits until the outcome of each message is known. If writes failed, it still returns
        True, and the receipts raise the errors.
        """
        return self._buffer.flush(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Flush, then stop the thread and close the connection. Further calls do nothing.

        If this takes longer than `timeout` seconds, `close` returns False and gives up the messages
        that it has not started to write. Their receipts then raise RedisUnavailableError.
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
