"""Sending: one message, or many in pipelined chunks, and what is known when an answer is lost."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from streamqd import config
from streamqd.errors import RedisRefused, RedisUnavailable, UnknownOutcome
from streamqd.producer.encoding import Outgoing, fields_of
from streamqd.producer.routes import Routes
from streamqd.store import publishing
from streamqd.store.client import Link
from streamqd.store.keys import Keys

CHUNK_COUNT = 512  # messages of one pipelined write at most
CHUNK_BYTES = 1 << 20  # and about so many bytes
PAUSES = (0.05, 0.2, 0.5)  # seconds before each repetition of a send that is safe to repeat
DEDUP_WINDOW = 600.0

# Replies that mean "not now": nothing was done, and a moment later it may work.
_TRANSIENT = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY"})

_T = TypeVar("_T")
_Chunk = list[tuple[int, list[bytes]]]  # partition and fields of each message


class ChunkUnknown(UnknownOutcome):
    """The connection was lost in the middle of `send_many`.

    `ids` follow the order of the items, from the first one on: what Redis has confirmed (None
    stands for a message that it refused). The `unknown` messages behind them may or may not have
    been written. Items behind those were not sent.
    """

    def __init__(self, message: str, ids: list[str | None], unknown: int) -> None:
        super().__init__(message)
        self.ids = ids
        self.unknown = unknown


class ChunkRefused(RedisRefused):
    """Redis refused messages of `send_many`, as when its memory is full.

    `ids` follow the order of the items, from the first one on; None stands for a message that was
    refused and not written. Items behind them were not sent.
    """

    def __init__(self, code: str, message: str, ids: list[str | None]) -> None:
        super().__init__(code, message)
        self.ids = ids


class Producer:
    """Writes messages to topics over one connection of its own.

    Use it as a context manager or call `close`. Not thread-safe: give each thread its own. A
    producer that was created before a fork works in the child too, over a new connection.

    `url` names the Redis server, `settings` (from `config.load`) all the rest. Without either,
    they come from the environment: STREAMQ_CONFIG names the file, STREAMQ_SECTION__KEY settings.
    With `create` a topic is registered at its first send, with the partition count that the
    settings give it, else one partition; without, sending to an unknown topic raises TopicMissing.
    `timeout` bounds one exchange with Redis and `dedup_window` is how long a `dedup_id` is
    remembered, both in seconds.
    """

    def __init__(
        self,
        url: str | None = None,
        settings: config.Settings | None = None,
        *,
        create: bool = True,
        timeout: float = 5.0,
        dedup_window: float = DEDUP_WINDOW,
    ) -> None:
        if settings is None:
            settings = config.Settings() if url is not None else config.load(None)
        if url is not None:
            settings = replace(settings, redis=replace(settings.redis, url=url))
        settings = config.resolved(settings)
        self._window = dedup_window
        self._keys = Keys(settings.keys.control, settings.keys.streams)
        self._max_bytes = settings.daemon.max_message_bytes
        self._link = Link(settings.redis, timeout=timeout, name="streamqd:producer")
        self._routes = Routes(settings, self._keys, create=create)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next send opens a new one."""
        self._own().close()

    # --- one message ---

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        delay: float | None = None,
        dedup_id: str | None = None,
    ) -> str:
        """Write one message; return its entry id (with `delay`, in seconds, its send id).

        bytes are written as they are, str as UTF-8, everything else as JSON. Messages with the
        same key go to the same partition; without a key (and without a `dedup_id`, which then
        takes its place) partitions take turns. A message whose `dedup_id` was used before, within
        the window, is not written again: the id of the first is returned.

        Raises UnknownOutcome when the answer was lost (never with a `dedup_id` unless every
        repetition was lost too), RedisUnavailable when nothing was written, RedisRefused,
        MessageTooLarge, TopicMissing, Refused, and TypeError or ValueError for what cannot be
        encoded.
        """
        if dedup_id == "" or (delay is not None and delay < 0):
            raise ValueError("dedup_id must not be empty, nor delay negative")
        link = self._own()
        item = Outgoing(value, key, headers, partition)
        fields = fields_of(item, self._max_bytes)
        chosen = self._routes.choose(link, topic, item, dedup_id)
        if delay is not None:
            send_id = secrets.token_hex(16)
            call = publishing.schedule(
                self._keys, topic, chosen, delay, send_id, fields, dedup_id or "", self._window
            )
            # The same send id again changes nothing while the message waits. When it could be due
            # before the last repetition arrives, only a dedup id makes repeating safe.
            waits = delay > sum(PAUSES) + (len(PAUSES) + 1) * link.timeout
            reply = self._persist(lambda: link.run(call), topic, waits or dedup_id is not None)
            return send_id if reply.word == "OK" else _text(reply.rest[0])
        if dedup_id is not None:
            call = publishing.publish(self._keys, topic, chosen, fields, dedup_id, self._window)
            return _text(self._persist(lambda: link.run(call), topic, True).rest[0])
        stream = self._keys.stream(topic, chosen)
        return _text(
            self._persist(lambda: link.execute("XADD", stream, "*", *fields), topic, False)
        )

    # --- many messages ---

    def send_many(self, topic: str, items: Iterable[Any]) -> list[str]:
        """Write many messages, pipelined; return their entry ids in order.

        An item is a value as for `send`, or an `Outgoing`. Messages are written in the order of
        the items, in chunks, each waiting for the answer to the one before. When something fails,
        what came before it has been written and the error says how much that is: ChunkUnknown and
        ChunkRefused have the ids; an item that cannot be encoded, or an error raised by `items`
        itself, stops the sending behind the items before it and is raised with a note.
        """
        ids: list[str] = []
        try:
            for chunk in self.send_chunks(topic, items):
                ids += chunk
        except ChunkUnknown as error:
            error.ids[:0] = ids
            raise
        except ChunkRefused as error:
            error.ids[:0] = ids
            raise
        except Exception as error:
            error.add_note(f"{len(ids)} messages of this call were written before it")
            raise
        return ids

    def send_chunks(
        self, topic: str, items: Iterable[Any], *, delay: float | None = None
    ) -> Iterator[list[str]]:
        """Write many messages as `send_many` does, yielding the ids of each chunk once confirmed.

        The ids in a raised ChunkUnknown or ChunkRefused are those of the failed chunk only.
        With `delay` (seconds) the messages are scheduled and the ids are send ids.
        """
        chunk: _Chunk = []
        size = 0
        failure: Exception | None = None
        source = iter(items)
        while failure is None:
            try:
                value = next(source)
                item = value if isinstance(value, Outgoing) else Outgoing(value)
                fields = fields_of(item, self._max_bytes)
                chunk.append((self._routes.choose(self._own(), topic, item), fields))
                size += sum(map(len, fields))
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - raised below, behind the items before it
                failure = error
            if len(chunk) >= CHUNK_COUNT or size >= CHUNK_BYTES:
                yield self._write(topic, chunk, delay)
                chunk, size = [], 0
        if chunk:
            yield self._write(topic, chunk, delay)
        if failure is not None:
            raise failure

    def _write(self, topic: str, chunk: _Chunk, delay: float | None) -> list[str]:
        """Write a chunk; repeat it only when nothing of it can have been written."""
        for pause in (*PAUSES, None):
            try:
                if delay is not None:
                    return self._write_scheduled(topic, chunk, delay)
                return self._write_now(topic, chunk)
            except ChunkRefused as error:
                if pause is None or error.code not in _TRANSIENT or any(error.ids):
                    raise
            except RedisUnavailable as error:
                if pause is None or error.sent:
                    raise
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _write_now(self, topic: str, chunk: _Chunk) -> list[str]:
        names = {number: self._keys.stream(topic, number) for number, _ in chunk}
        commands = [("XADD", names[number], "*", *fields) for number, fields in chunk]
        replies, lost = self._pipeline(commands)
        if lost is not None:
            unknown = len(commands) - len(replies)
            raise ChunkUnknown(
                f"the connection was lost: {unknown} messages to {topic} may or may not have been"
                f" written ({lost})",
                _ids(replies),
                unknown,
            ) from lost
        return _ids_or_refusal(topic, replies)

    def _write_scheduled(self, topic: str, chunk: _Chunk, delay: float) -> list[str]:
        send_ids = [secrets.token_hex(16) for _ in chunk]
        calls = [
            publishing.schedule(self._keys, topic, number, delay, send_id, fields)
            for send_id, (number, fields) in zip(send_ids, chunk, strict=True)
        ]
        try:
            replies = self._own().run_many(calls)
        except RedisUnavailable as error:
            if not error.sent:
                raise
            raise ChunkUnknown(
                f"the connection was lost: {len(calls)} messages to {topic} may or may not have"
                f" been scheduled ({error})",
                [],
                len(calls),
            ) from error
        return _ids_or_refusal(
            topic,
            [
                reply if isinstance(reply, RedisRefused) else send_id
                for send_id, reply in zip(send_ids, replies, strict=True)
            ],
        )

    def _pipeline(
        self, commands: list[tuple[Any, ...]]
    ) -> tuple[list[Any], RedisUnavailable | None]:
        """Write commands at once; return the replies that came, and the error if not all came.

        `Link.pipeline` would answer all or nothing, and so hide which messages are written. Raises
        RedisUnavailable only when nothing was written.
        """
        link = self._own()
        wire: Any = link.connection
        packed = [b"".join(wire.pack_command(*command)) for command in commands]
        replies: list[Any] = []
        try:
            if link.connected and wire.ended():
                link.close()
            link.open()
            wire.begin(link.timeout)
            wire.transmit(packed)
            for _ in packed:
                replies.append(wire.receive())  # noqa: PERF401 - those before an error are kept
        except RedisUnavailable as error:
            link.close()
            if not error.sent:
                raise
            return replies, error
        except BaseException:
            link.close()
            raise
        return replies, None

    # --- parts of a send ---

    def _own(self) -> Link:
        """Return the link, made this process's own when the producer was inherited by a fork."""
        pid = os.getpid()
        if pid != self._pid:
            self._link.detach()
            self._routes.forget_turns()
            self._pid = pid
        return self._link

    def _persist(self, attempt: Callable[[], _T], topic: str, repeatable: bool) -> _T:
        """Run `attempt`, again after each of `PAUSES` while that cannot write a second message."""
        unknown = False
        for pause in (*PAUSES, None):
            try:
                return attempt()
            except RedisUnavailable as error:
                unknown = unknown or error.sent
                if pause is None or (error.sent and not repeatable):
                    if not unknown:
                        raise
                    raise UnknownOutcome(
                        f"no answer for a message to {topic}: it may or may not have been written"
                        f" ({error})"
                    ) from error
            except RedisRefused as error:
                if pause is None or error.code not in _TRANSIENT:
                    if not unknown:
                        raise
                    raise UnknownOutcome(
                        f"a message to {topic} may or may not have been written: the first answer"
                        f" was lost, then Redis refused the repetition ({error})"
                    ) from error
            time.sleep(pause)
        raise AssertionError("unreachable")


def _ids_or_refusal(topic: str, replies: list[Any]) -> list[str]:
    refused = [reply for reply in replies if isinstance(reply, RedisRefused)]
    if refused:
        raise ChunkRefused(
            refused[0].code,
            f"Redis refused {len(refused)} messages to {topic}: {refused[0]}",
            _ids(replies),
        ) from refused[0]
    return [_text(reply) for reply in replies]


def _ids(replies: list[Any]) -> list[str | None]:
    return [None if isinstance(reply, RedisRefused) else _text(reply) for reply in replies]


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()
