"""Send the messages of all producers to Redis, and report each outcome.

If a reply is lost, the outcome is unknown, and this is reported as well. A producer has one
connection, which only one thread at a time uses. This module routes messages, builds the commands,
and writes them in one transaction. A write is repeated only if this cannot write a message twice.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import hiredis

from streamqd import config, telemetry
from streamqd.config.setting import NAME
from streamqd.config.values import Duration
from streamqd.errors import (
    BacklogFullError,
    ConfigError,
    OutcomeUnknownError,
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
)
from streamqd.model import Uid, duplicate_uid
from streamqd.producer.chunk import NOT_YET, Chunk, EarlierChunks, Result
from streamqd.producer.encoding import (
    Encoded,
    Envelope,
    batches,
    check_topic,
    envelope_kind,
    to_encoded,
    to_envelope,
)
from streamqd.producer.options import parse_options
from streamqd.producer.routing import Partitioner, Router
from streamqd.store import publishing, scheduled, scripts
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.publishing import MessageWriter
from streamqd.store.replies import check_replies
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

CHUNK_COUNT = 512  # maximum messages in one transaction
CHUNK_BYTES = 1 << 20  # bytes after which a transaction is full
PAUSES = (0.05, 0.2, 0.5)  # seconds before each repetition of a send that may be repeated
HEADS_MAX = 4096  # maximum cached calls, which do not contain messages yet
# Maximum number of times that a transaction is routed again because its topic has changed.
REROUTES_MAX = 100
DEDUP_WINDOW = 600.0
_UID = re.compile(r"([^/]+)/([0-9]{1,9})/([!-~]{1,200})")

T = TypeVar("T")

_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_in_children(each: Any) -> None:
    """Call the object's `forget` method in all children that are forked while the object exists."""
    _inherited.add(each)


def _forget_all() -> None:
    for each in list(_inherited):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


class Sender:
    """One connection, the cached partition counts of topics, and the rules for repeating sends.

    It is thread-safe: a lock protects the connection for one round trip at a time. While a send
    waits for its next attempt, the lock is free. After a fork, it also works in the child, over a
    new connection.
    """

    def __init__(
        self,
        url: str | None = None,
        settings: config.Settings | None = None,
        *,
        create: bool = True,
        timeout: Duration = 5.0,
        dedup_window: Duration = DEDUP_WINDOW,
        partitioner: Partitioner | Mapping[str, Partitioner] = "hash",
        max_backlog: int | None = None,
        backlog_wait: Duration = 0.0,
        traces: bool | None = None,
    ) -> None:
        options = parse_options(
            create=create,
            timeout=timeout,
            dedup_window=dedup_window,
            max_backlog=max_backlog,
            backlog_wait=backlog_wait,
            traces=traces,
        )
        if settings is None:
            settings = config.Settings() if url is not None else config.load(config.find())
        if url is not None:
            settings = replace(settings, redis=replace(settings.redis, url=url))
        self.settings = settings = config.resolve_url(settings)
        self._backlog_wait: float = options["backlog_wait"]
        self._max_backlog: int | None = options["max_backlog"]
        self._window: float = options["dedup_window"]
        # Encodes an `Outgoing` or a plain value. It uses neither the connection nor any other
        # state.
        self.encode: Callable[[Any], Envelope] = functools.partial(
            to_envelope, max_bytes=settings.daemon.max_message_bytes
        )
        self._timeout: float = options["timeout"]
        try:
            self.spans = telemetry.send_spans(settings, options["traces"])
        except telemetry.TelemetryUnavailableError as error:
            raise ConfigError([str(error)]) from error
        connection = connect(settings.redis, timeout=self._timeout, name="streamqd:producer")
        self._connection = connection
        self._keys = keys = Keys(settings.keys.control, settings.keys.streams)
        self._writer = MessageWriter(connection, keys)
        # Calls that write to a partition, with no messages in them yet, and their commands.
        self._heads: dict[tuple[str, int, int, bool], tuple[Call, tuple[str, ...]]] = {}
        store = Store(connection, keys)
        self._router = Router(settings, store, self._writer, partitioner, create=create)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        forget_in_children(self)

    @property
    def timeout(self) -> float:
        """The time limit of one send in seconds, without its wait for room."""
        return self._timeout

    def close(self) -> None:
        """Close the connection. The next use opens a new one."""
        with contextlib.suppress(
            RedisUnavailableError
        ):  # other threads use the connection, and would open it again
            self._run_exclusively(time.monotonic() + self._timeout, self._close)

    def _close(self) -> None:
        self._writer.settle()
        self._connection.close()

    def _run_exclusively(self, end: float, work: Callable[[], T]) -> T:
        """Call `work` with exclusive use of the connection, until `end` (seconds, monotonic).

        Raises RedisUnavailableError if other threads use the connection until `end`. Raises
        RuntimeError in a signal handler that has interrupted a send of its own thread. In both
        cases, nothing was sent.
        """
        lock = self._lock
        owned = lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001 - as Condition does
        if owned():
            raise RuntimeError(
                "the producer is sending in this thread; use another producer in a signal handler"
            )
        try:
            if not lock.acquire(timeout=max(0.0, end - time.monotonic())):
                raise RedisUnavailableError(
                    "other threads used the producer until the timeout, so nothing was sent; use"
                    " one producer per thread, or set a longer timeout",
                    sent=False,
                )
            self._connection.set_deadline(end)
            return work()
        finally:
            # A signal handler may raise an exception before or after the lock is acquired.
            if owned():
                lock.release()

    def forget(self) -> None:
        """Drop the connection and the turns in a forked child, as both belong to the parent."""
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a thread of the parent may have held the old lock
        self._writer.detach()
        self._router.forget_turns()

    def split_batches(self, items: Iterable[Any]) -> Iterator[list[Envelope]]:
        """Encode many messages, and split them into batches for `chunk` and `post`."""
        return batches(items, self.encode, count=CHUNK_COUNT, size=CHUNK_BYTES)

    def send(self, topic: str, envelope: Envelope) -> Result:
        """Write one message, as `post` does for a batch, and return its result.

        Messages without options to a known topic on a single server take a fast path. `post` and
        `finish` handle all other messages, and all replies that are not an entry ID.
        """
        if os.getpid() != self._pid:
            self.forget()
        count = self._router.cached_count(topic) if type(topic) is str else None
        if count is None or not self._can_append_directly(envelope):
            [result] = self.post(topic, (envelope,))
            return result
        since = time.monotonic()
        try:
            partition = self._router.choose_one(topic, envelope, count)
        except Exception as error:  # noqa: BLE001 - a partitioner may raise anything
            return error
        alone = type(envelope) is bytes
        messages = (
            (envelope,) if alone else publishing.flatten_messages([to_encoded(envelope).fields])
        )
        _, head = self._call_head(topic, partition, count, alone)
        command = hiredis.pack_command((*head, *messages))
        answer = self._run_exclusively(
            since + self._timeout, functools.partial(self._writer.write, topic, command)
        )
        if isinstance(answer, bytes):
            return Uid(f"{topic}/{partition}/{answer.decode()}")
        chunk = Chunk(topic, count, [envelope], [partition], [(0, 1, None)], since=since)
        chunk.begin()
        self._prepare(chunk)
        chunk.transaction = answer
        [result] = self.finish(chunk)
        return result

    def _can_append_directly(self, envelope: Envelope) -> bool:
        usual = self._connection.connected and not self._writer.spread
        return usual and envelope_kind(envelope) == "plain"

    def post(self, topic: str, batch: Sequence[Envelope]) -> list[Result]:
        """Write the messages of a batch in one transaction, and wait for room.

        All messages must be of one kind. If a message cannot be routed, the earlier messages are
        written, its own result is the error, and later messages have no result. An error that
        affects all messages is raised.
        """
        return self.finish(self.chunk(topic, [batch], time.monotonic()))

    def stream(self, topic: str, items: Iterable[Any]) -> Iterator[list[Result]]:
        """Write many messages, and yield the results of each batch.

        While Redis is processing a batch, the next batch is encoded. `items` may therefore use this
        sender as well. If `items` raises an error, it is raised after the results of all earlier
        items.
        """
        made = (self.chunk(topic, [batch]) for batch in self.split_batches(items))
        sent: Chunk | None = None
        try:
            while True:
                failure = following = None
                try:
                    following = next(made, None)
                except Exception as error:  # noqa: BLE001 - raised below, after the earlier results
                    failure = error
                if sent is not None:
                    sent.since = time.monotonic()  # without the time for encoding the next items
                    yield self.finish(sent)
                if failure is not None:
                    raise failure
                if following is None:
                    return
                sent = following
                sent.since = time.monotonic()
                self._start(sent)
                if sent.batches[0][2] is not None:  # a message failed, so this is the last batch
                    yield self.finish(sent)
                    return
        except BaseException:
            if sent is not None and sent.transaction is not None:
                self._abandon(sent.transaction)
            raise

    def chunk(
        self, topic: str, bundle: Sequence[Sequence[Envelope]], since: float | None = None
    ) -> Chunk:
        """Route the messages of several batches, which will be written in one transaction.

        Redis is used only to read the partition count of an unknown topic. `since` is the start of
        the messages' time limit (seconds, monotonic), which defaults to the current time.
        """
        if os.getpid() != self._pid:
            self.forget()  # by default, uWSGI does not run Python's fork hooks
        check_topic(topic)
        chunk = Chunk(topic) if since is None else Chunk(topic, since=since)
        envelopes, partitions = chunk.envelopes, chunk.partitions
        self._router.chooser(topic).begin_batch()
        for batch in bundle:
            begin, failure = len(envelopes), None
            try:
                # If the count changes before the write, all messages are routed again.
                chunk.count = chunk.count or self._count(topic, chunk.since + self._timeout)
                partitions.extend(self._router.choose(topic, batch, chunk.count))
            except Exception as error:  # noqa: BLE001 - a partitioner may raise anything
                failure = error
            # If a choice fails, `partitions` already contains the earlier choices.
            envelopes += batch[: len(partitions) - begin]
            chunk.batches.append((begin, len(envelopes), failure))
        chunk.begin()
        if envelopes:
            self._prepare(chunk)
        return chunk

    def finish(self, chunk: Chunk) -> list[Result]:
        """Write the remaining messages, wait for room, and return the results of the batch."""
        while chunk.waiting:
            pause = chunk.check_at - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            self.attempt(chunk)
        return chunk.answer(0)

    def attempt(self, chunk: Chunk, ahead: EarlierChunks | None = None) -> None:
        """Write the waiting messages once.

        If one finds no room, set the time of the next try (`check_at`).

        `ahead` contains the earlier chunks of the topic that are waiting for room. As long as one
        of their messages waits for a partition, no message of this chunk is written to that
        partition.
        """
        if chunk.deadline is None:
            chunk.deadline = chunk.since + self._backlog_wait
        end = min(time.monotonic(), chunk.deadline) + self._timeout
        free = chunk.waiting
        if ahead is not None:
            # If the topic has changed, the earlier chunks may wait for other partitions than
            # before.
            known = ahead.counts <= {chunk.count}
            blocked = ahead.partitions
            free = [at for at in free if known and chunk.partitions[at] not in blocked]
        chunk.is_blocked = not free
        if free:
            # If a partition has too little room, the last messages find none, so the order is kept.
            found = self._write(chunk.subset(free), end, fixed=ahead is not None)
            chunk.settle(free, found)
        chunk.plan()

    def cancel(self, uid: str) -> bool:
        """Cancel a delayed send. Return False if no send with this uid is waiting.

        Raises the same errors as `Producer.cancel`.
        """
        if os.getpid() != self._pid:
            self.forget()
        topic, partition, send_id = _parse_send_uid(uid)
        commands = scheduled.withdraw(self._keys, topic, partition, send_id)

        def exchange() -> list[Any]:
            self._writer.settle()
            return self._connection.pipeline(commands)

        try:
            replies = self._run_exclusively(time.monotonic() + self._timeout, exchange)
            removed = check_replies(check_replies(replies)[-1])[0]
        except RedisUnavailableError as error:
            if not error.sent:
                raise
            raise OutcomeUnknownError(
                f"no reply to canceling {uid}; it may or may not be canceled ({error})"
            ) from error
        except RedisResponseError as error:
            raise RedisResponseError(
                error.code, f"the delayed send {uid} was not canceled ({error})"
            ) from error
        return bool(removed)

    # --- writing and repeating ---

    def _start(self, chunk: Chunk) -> None:
        """Send a chunk now, and read its reply later, in `finish`.

        If that is not possible, write it now.
        """
        if chunk.envelopes and self._connection.connected and not self._writer.spread:
            with contextlib.suppress(
                RedisUnavailableError, RedisResponseError
            ):  # nothing was written
                end = chunk.since + self._timeout
                chunk.transaction = self._run_exclusively(end, lambda: self._post(chunk))
        if chunk.transaction is None:
            self.attempt(chunk)

    def _write(self, chunk: Chunk, end: float, *, fixed: bool) -> list[Result]:
        """Write a chunk.

        In a cluster, split it by node, because a single node may be unavailable.
        """
        if not self._writer.spread:
            return self._repeat(chunk, end, fixed=fixed)
        parts: dict[str, list[int]] = {}
        for at, partition in enumerate(chunk.partitions):
            node = self._connection.node_for_key(self._keys.stream(chunk.topic, partition))
            parts.setdefault(node, []).append(at)
        results: dict[int, Result] = {}
        for left, numbers in zip(range(len(parts), 0, -1), parts.values(), strict=True):
            now = time.monotonic()
            share = now + (end - now) / left  # a silent node leaves time for the others
            found = self._repeat(chunk.subset(numbers), share, fixed=fixed)
            results |= zip(numbers, found, strict=True)
        return [results[at] for at in range(len(chunk.envelopes))]

    def _repeat(self, chunk: Chunk, end: float, *, fixed: bool) -> list[Result]:
        """Write a chunk.

        If this fails, try again after each of `PAUSES`, unless it could write twice.

        If the server lacks a script that this user may not load, try until `end`, because a daemon
        loads the script soon after the server restarts or fails over.

        All attempts finish by `end` (seconds, monotonic). An attempt that may be repeated gets half
        of the remaining time, so that a silent connection does not use up all of it.
        """
        lost: RedisUnavailableError | None = None  # error of the first lost reply
        repeatable = all(map(self._may_repeat, chunk.envelopes))
        for pause in itertools.chain(PAUSES, itertools.repeat(math.inf)):
            replies: list[Any] = []
            left = end - time.monotonic()
            last = pause >= left
            try:
                replies = self._exchange(
                    chunk, end - left / 2 if repeatable and not last else end, fixed=fixed
                )
            except RedisResponseError as error:
                replies = [error] * len(chunk.envelopes)
            except RedisUnavailableError as error:
                lost = error if error.sent and lost is None else lost
                final = error.sent and not repeatable
                if final or time.monotonic() + pause >= end:
                    return [_unknown(chunk.topic, error, lost) for _ in chunk.envelopes]
            if set(map(type, replies)) == {bytes}:
                return _uids(chunk, replies)
            if replies and all(isinstance(reply, _NotLoadedError) for reply in replies):
                pause = PAUSES[-1]
            over = time.monotonic() + pause >= end
            if over or not all(map(_is_transient, replies)):
                return [
                    _result(chunk.topic, *each, lost)
                    for each in zip(chunk.partitions, chunk.envelopes, replies, strict=True)
                ]
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _count(self, topic: str, end: float) -> int:
        """Return the topic's partition count, cached or from Redis.

        Raises the same errors as `Router.count`.
        """
        known = self._router.cached_count(topic)
        if known is not None:
            return known
        return self._run_exclusively(end, lambda: self._router.count(topic))

    def _exchange(self, chunk: Chunk, end: float, *, fixed: bool) -> list[Any]:
        """Write a chunk in one transaction. If the topic changes, route it again.

        A `fixed` chunk is not routed again, because it could overtake earlier messages that are
        waiting. Returns entry IDs, or the replies of scripts. Raises RedisUnavailableError (its
        `sent` shows whether anything was sent), RedisResponseError, TopicNotFoundError and
        RequestRefusedError.
        """
        by_source = False
        for _ in range(REROUTES_MAX):
            transaction = self._send_and_read(chunk, end)
            if transaction.replies is None:
                if fixed:
                    return [NOT_YET] * len(chunk.envelopes)
                self._reroute(chunk, end)
            elif transaction.lost is not None:
                raise RedisUnavailableError(str(transaction.lost), sent=transaction.lost.sent)
            elif not (by_source or self._writer.spread) and any(
                map(publishing.is_unknown_script, transaction.replies)
            ):
                by_source = True  # the server lacks the script, so nothing was written
                chunk.commands = self._writer.pack_calls(chunk.calls, by_source=True)
            else:
                if by_source:  # the script may be loaded by the next attempt
                    chunk.commands = self._writer.pack_calls(chunk.calls)
                return _replies_of_messages(chunk, transaction.replies, by_source=by_source)
        text = (
            f"topic {chunk.topic} changed {REROUTES_MAX} times during one send, so nothing was"
            " sent; send again"
        )
        raise RedisUnavailableError(text, sent=False)

    def _send_and_read(self, chunk: Chunk, end: float) -> publishing.Transaction:
        """Send a chunk if it was not sent yet, and read the reply."""

        def exchange() -> publishing.Transaction:
            transaction = chunk.transaction or self._post(chunk)
            chunk.transaction = None
            self._writer.collect(transaction)
            return transaction

        try:
            return self._run_exclusively(end, exchange)
        except RedisUnavailableError as error:
            if chunk.transaction is None:
                raise
            raise RedisUnavailableError(str(error), sent=True) from error

    def _abandon(self, transaction: publishing.Transaction) -> None:
        """Give up a reply without waiting for it.

        After this, the connection cannot be used any longer.
        """
        with contextlib.suppress(RedisUnavailableError):
            self._run_exclusively(
                time.monotonic() + self._timeout, lambda: self._writer.abandon(transaction)
            )

    def _post(self, chunk: Chunk) -> publishing.Transaction:
        """Send a chunk as it is currently routed."""
        if not chunk.commands:
            self._prepare(chunk)
        return self._writer.post(chunk.topic, chunk.count, chunk.commands)

    def _prepare(self, chunk: Chunk) -> None:
        """Build the commands that write the messages to their partitions, without using Redis.

        Messages for the same partition share one call, unless each of them needs keys of its own.
        """
        if envelope_kind(chunk.envelopes[0]) == "plain":
            places: dict[int, list[int]] = {}
            for at, partition in enumerate(chunk.partitions):
                places.setdefault(partition, []).append(at)
            chunk.numbers = [*places.values()]
            chunk.calls = [
                self._plain_call(chunk, partition, numbers) for partition, numbers in places.items()
            ]
        else:
            chunk.numbers = [[at] for at in range(len(chunk.envelopes))]
            chunk.calls = [
                self._call(chunk, partition, to_encoded(envelope))
                for partition, envelope in zip(chunk.partitions, chunk.envelopes, strict=True)
            ]
        chunk.commands = self._writer.pack_calls(chunk.calls)

    def _plain_call(self, chunk: Chunk, partition: int, numbers: Sequence[int]) -> Call:
        """Return a call that writes messages to a partition."""
        envelopes = [chunk.envelopes[at] for at in numbers]
        alone = set(map(type, envelopes)) == {bytes}
        call, _ = self._call_head(chunk.topic, partition, chunk.count, alone)
        messages = (
            envelopes
            if alone
            else publishing.flatten_messages([to_encoded(each).fields for each in envelopes])
        )
        return Call(call.script, call.key, (*call.argv, *messages))

    def _call_head(
        self, topic: str, partition: int, count: int, alone: bool
    ) -> tuple[Call, tuple[str, ...]]:
        """Return a call that writes to a partition, with no messages in it yet, and its command."""
        place = (topic, partition, count, alone)
        found = self._heads.get(place)
        if found is None:
            meta = self._writer.meta(topic)
            call = publishing.append(
                self._keys, topic, partition, count, meta, self._max_backlog, alone=alone
            )
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            found = self._heads[place] = (call, tuple(map(str, scripts.command(call))))
        return found

    def _call(self, chunk: Chunk, partition: int, message: Encoded) -> Call:
        place = (self._keys, chunk.topic, partition)
        known: Any = {"partitions": chunk.count, "meta": self._writer.meta(chunk.topic)}
        sent = (message.dedup_id or "", self._window)
        if not message.send_id:
            return publishing.publish(*place, message.fields, *sent, self._max_backlog, **known)
        return publishing.schedule(
            *(*place, message.delay, message.send_id, message.fields, *sent),
            at_unix_ms=message.at_unix_ms,
            **known,
        )

    def _reroute(self, chunk: Chunk, end: float) -> None:
        chunk.commands = []
        chunk.count = self._count(chunk.topic, end)
        chunk.partitions = self._router.reroute(
            chunk.topic, chunk.envelopes, chunk.partitions, chunk.count
        )

    def _may_repeat(self, envelope: Envelope) -> bool:
        """Return True if the server recognizes a second write of the same message.

        While a delayed send is waiting, a second write with its send ID changes nothing. If it
        could become due before the last repetition arrives, only a `dedup_id` makes it safe to
        repeat.
        """
        if isinstance(envelope, bytes):
            return False
        if envelope.dedup_id is not None:
            return True
        return envelope.delay is not None and envelope.delay > self._timeout


def _parse_send_uid(uid: str) -> tuple[str, int, str]:
    """Parse a delayed send's uid into the topic, the partition and the send ID.

    Raises ValueError.
    """
    match = _UID.fullmatch(uid) if isinstance(uid, str) else None
    if match is None or not NAME.fullmatch(match[1]):
        raise ValueError(
            f"{uid!r} is not the uid of a delayed send; pass what send(…, delay=) returned"
        )
    return match[1], int(match[2]), match[3]


# --- interpreting replies -------------------------------------------------------------------------


def _replies_of_messages(chunk: Chunk, replies: Sequence[Any], *, by_source: bool) -> list[Any]:
    """Return the reply for each message: the ID of its entry, a RedisResponseError, or a Reply."""
    found: list[Any] = [None] * len(chunk.envelopes)
    for numbers, call, raw in zip(chunk.numbers, chunk.calls, replies, strict=True):
        each: Sequence[Any]
        if isinstance(raw, RedisResponseError):
            each = [_explain_refusal(raw, by_source)] * len(numbers)
        else:
            reply = scripts.reply(call, raw)
            ids = reply.values[0] if isinstance(reply.values[0], list) else reply.values
            if reply.word == "OK" and call.script.name != "message_schedule":
                last = ids[-1]
                refused = isinstance(last, RedisResponseError)
                rest = _explain_refusal(last, False) if refused else Reply("FULL", reply.values[1:])
                each = [*ids, *[rest] * (len(numbers) - len(ids))]
            else:
                each = [reply] * len(numbers)
        for at, one in zip(numbers, each, strict=True):
            found[at] = one
    return found


class _NotLoadedError(RedisResponseError):
    """Raised if the server has not loaded the script, and this Redis user may not load it."""

    @property
    def transient(self) -> bool:
        return True


def _is_transient(reply: Any) -> bool:
    return isinstance(reply, RedisResponseError) and reply.transient


def _explain_refusal(reply: RedisResponseError, by_source: bool) -> RedisResponseError:
    """Add the remedy to an error about missing permissions. Other errors are returned unchanged."""
    if publishing.is_unknown_script(reply) or (by_source and publishing.is_eval_forbidden(reply)):
        text = (
            "the script that this message needs is not loaded on the server, and this Redis user"
            " may not load it; a running daemon loads it within 2 s"
        )
        return _NotLoadedError(reply.code, f"{text} ({reply})")
    if reply.kind is not RefusalKind.FORBIDDEN:
        return reply
    text = (
        "this Redis user may not run the script that this message needs; give it the permissions"
        " of etc/acl/producer.acl, or of etc/acl/producer-scripts.acl for dedup_id, delay, at and"
        " max_backlog"
    )
    return RedisResponseError(reply.code, f"{text} ({reply})")


def _result(
    topic: str, partition: int, envelope: Envelope, reply: Any, lost: RedisUnavailableError | None
) -> Result:
    if isinstance(reply, BacklogFullError):  # no write was attempted
        return reply
    if isinstance(reply, bytes):
        return Uid(f"{topic}/{partition}/{reply.decode()}")
    if isinstance(reply, RedisResponseError):
        if lost is None:
            return RedisResponseError(reply.code, str(reply))
        return OutcomeUnknownError(
            f"a message to {topic} may or may not have been written: the first answer was lost,"
            f" then Redis rejected the repetition ({reply})"
        )
    if reply.word == "FULL":
        return BacklogFullError(
            f"{topic}/{partition} has a backlog of {int(reply.values[0]):,} messages, max_backlog"
            " or"
            " more, so the message was not sent; send it later"
        )
    send_id = to_encoded(envelope).send_id
    if reply.word == "DUPLICATE":
        return duplicate_uid(f"{topic}/{partition}/{reply.values[0].decode()}")
    return Uid(f"{topic}/{partition}/{send_id or reply.values[0].decode()}")


def _uids(chunk: Chunk, entry_ids: Sequence[bytes]) -> list[Result]:
    """Return the uids of messages that have all been written."""
    heads = {each: f"{chunk.topic}/{each}/" for each in set(chunk.partitions)}
    return [
        Uid(heads[partition] + entry_id.decode())
        for partition, entry_id in zip(chunk.partitions, entry_ids, strict=True)
    ]


def _unknown(
    topic: str, missing: RedisUnavailableError, lost: RedisUnavailableError | None
) -> RedisUnavailableError:
    """Return the error of a message that got no reply.

    Several threads may raise the errors of one transaction, so each message gets its own object.
    """
    if lost is None:
        return RedisUnavailableError(str(missing), sent=False)
    return OutcomeUnknownError(
        f"no answer for a message to {topic}: it may or may not have been written ({missing})"
    )
