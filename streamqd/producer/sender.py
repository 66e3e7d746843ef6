"""Sending a batch of messages, and what is known of each of them when an answer is lost.

Every kind of producer sends by this, over one connection and in one thread at a time. Nothing is
repeated unless that is certain to write a message once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamqd import config
from streamqd.errors import (
    BacklogFull,
    ChunkRefused,
    ChunkUnknown,
    RedisRefused,
    RedisUnavailable,
    UnknownOutcome,
)
from streamqd.producer.carrier import Carrier, Chunk, TopicChanged
from streamqd.producer.encoding import Envelope, batches, check_topic, envelope_of, full
from streamqd.producer.guard import ClusterGuard, TopicGuard
from streamqd.producer.options import Duration, checked
from streamqd.producer.partitioners import Partitioner, Partitioners
from streamqd.producer.posting import NOT_YET, PendingSend, Result
from streamqd.producer.routes import Routes
from streamqd.store.client import Connection
from streamqd.store.cluster import connect
from streamqd.store.keys import Keys

CHUNK_COUNT = 512  # messages of one transaction at most
CHUNK_BYTES = 1 << 20  # and about so many bytes
PAUSES = (0.05, 0.2, 0.5)  # seconds before each repetition of a send that is safe to repeat
DEDUP_WINDOW = 600.0


class Sender:
    """One connection, what is known of the topics, and the rules for repeating.

    Not thread-safe. After a fork it works in the child too, over a new connection.
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
    ) -> None:
        options = checked(
            create=create,
            timeout=timeout,
            dedup_window=dedup_window,
            max_backlog=max_backlog,
            backlog_wait=backlog_wait,
        )
        if settings is None:
            settings = config.Settings() if url is not None else config.load(config.find())
        if url is not None:
            settings = replace(settings, redis=replace(settings.redis, url=url))
        self.settings = settings = config.resolved(settings)
        self._backlog_wait: float = options["backlog_wait"]
        # Encodes an `Outgoing` or a value; touches neither the connection nor what changes.
        self.encode: Callable[[Any], Envelope] = functools.partial(
            envelope_of, max_bytes=settings.daemon.max_message_bytes
        )
        self._link = connect(settings.redis, timeout=options["timeout"], name="streamqd:producer")
        keys = Keys(settings.keys.control, settings.keys.streams)
        self._spread = bool(self._link.together(("{a}", "{b}"))[1:])  # over several nodes
        self._guard = ClusterGuard(keys) if self._spread else TopicGuard(keys)
        partitioners = Partitioners(partitioner)
        self._routes = Routes(settings, keys, self._guard, partitioners, create=create)
        self._carrier = Carrier(
            keys, self._guard, self._routes, options["dedup_window"], options["max_backlog"]
        )
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connection. The next use opens a new one."""
        self._own().close()

    def cut(self, items: Iterable[Any]) -> Iterator[list[Envelope]]:
        """Encode many messages and cut them into batches for `post`."""
        return batches(items, self.encode, count=CHUNK_COUNT, size=CHUNK_BYTES)

    def post(self, topic: str, batch: Sequence[Envelope]) -> list[Result]:
        """Write the messages of a batch in one transaction, and wait for room.

        All must be of one kind. When one cannot be routed, those before it are written, its result
        is the error, and those behind it have none. Raises what concerns all.
        """
        return self.complete(self.prepare(topic, [batch]))

    def post_one(self, topic: str, envelope: Envelope) -> Result:
        """Write one message as `post` does. What is nothing special takes a shorter way.

        What that way does not write, for whatever reason, goes the other one, which knows all of
        them. Raises what concerns all messages.
        """
        posting = self._routed(topic, [(envelope,)])
        found = None
        if posting.results:
            with contextlib.suppress(RedisUnavailable, RedisRefused):  # nothing was written
                found = self._carrier.write_at_once(self._own(), posting.chunk)
        if found is not None and found.replies is not None:
            if not found.replies:
                assert found.lost is not None
                return _unknown(topic, found.lost, found.lost)
            if isinstance(found.replies[0], bytes):
                return found.replies[0].decode()
        [result] = self.complete(posting)
        return result

    def prepared(self, topic: str, items: Iterable[Any]) -> Iterator[PendingSend]:
        """Encode and route many messages; each posting is for `complete`, one after the other."""
        for batch in self.cut(items):
            yield self.prepare(topic, [batch])

    def prepare(self, topic: str, bundle: Sequence[Sequence[Envelope]]) -> PendingSend:
        """Make what writes the messages of several batches in one transaction, and do not write.

        Redis is asked only for the partition count of a topic that is not known.
        """
        posting = self._routed(topic, bundle)
        if posting.results:
            self._carrier.prepare(posting.chunk)
        return posting

    def complete(
        self, posting: PendingSend, meanwhile: Callable[[], None] | None = None
    ) -> list[Result]:
        """Write what was prepared, wait for room, and return the results of its only batch.

        `meanwhile` is called while Redis works, at most once. It may use this sender.
        """
        self._guard.meanwhile = meanwhile
        try:
            self._start(posting, ())
        finally:
            self._guard.meanwhile = None
        while posting.open:
            time.sleep(max(0.0, posting.look_at - time.monotonic()))
            self.look(posting)
        return posting.answer(0)

    def begin(
        self, topic: str, bundle: Sequence[Sequence[Envelope]], ahead: Sequence[PendingSend] = ()
    ) -> PendingSend:
        """Write several batches in one transaction, but wait for no room: `look` does so later.

        `ahead` are the open postings of the topic: what goes to a partition for which one of their
        messages waits is not written before those.
        """
        posting = self.prepare(topic, bundle)
        self._start(posting, ahead)
        return posting

    def look(self, posting: PendingSend, ahead: Sequence[PendingSend] = ()) -> None:
        """Write what found no room before, if there is room now. Raises as `begin` does."""
        self._attempt(posting, ahead)
        posting.plan()

    # --- writing and repeating ---

    def _own(self) -> Connection:
        """Return the link, with nothing under way on it."""
        self._notice_fork()
        self._guard.settle()
        return self._link

    def _notice_fork(self) -> None:
        """Make a link that was inherited by a fork this process's own."""
        pid = os.getpid()
        if pid != self._pid:
            self._link.detach()
            self._guard.forget()
            self._routes.forget_turns()
            self._pid = pid

    def _routed(self, topic: str, bundle: Sequence[Sequence[Envelope]]) -> PendingSend:
        check_topic(topic)
        self._notice_fork()
        chunk = Chunk(topic)
        spans: list[tuple[int, int, Exception | None]] = []
        for envelopes in bundle:
            begin, failure = len(chunk.envelopes), None
            try:
                self._carrier.add(self._own, chunk, envelopes)
            except Exception as error:  # noqa: BLE001 - a partitioner may raise anything
                failure = error
            spans.append((begin, len(chunk.envelopes), failure))
        return PendingSend(chunk, spans, [NOT_YET] * len(chunk.envelopes))

    def _start(self, posting: PendingSend, ahead: Sequence[PendingSend]) -> None:
        posting.deadline = time.monotonic() + self._backlog_wait
        if posting.results:
            self._attempt(posting, ahead)
        posting.plan()

    def _attempt(self, posting: PendingSend, ahead: Sequence[PendingSend]) -> None:
        """Write what waits and has nothing ahead of it in its partition."""
        chunk = posting.chunk
        if any(each.chunk.counted != chunk.counted for each in ahead):
            return  # the topic has changed: nobody knows yet where those ahead go
        held = {partition for each in ahead for partition in each.partitions}
        if not posting.looks and not held:
            chunk.fixed = bool(ahead)
            posting.results = self._persist(chunk)
            return
        # Those of a partition that found no room are its last ones: their order is kept.
        free = [at for at in posting.waiting if chunk.partitions[at] not in held]
        if not free:
            return
        found = self._persist(chunk.part(free, fixed=bool(ahead)))
        for at, result in zip(free, found, strict=True):
            unsent = isinstance(result, RedisUnavailable) and not result.sent
            if not (unsent and posting.looks):
                posting.results[at] = result

    def _persist(self, chunk: Chunk) -> list[Result]:
        """Write a chunk; each node of a cluster gets its own: one may answer, another not."""
        if not self._spread:
            return self._persist_part(chunk)
        parts: dict[str, list[int]] = {}
        for at, partition in enumerate(chunk.partitions):
            parts.setdefault(self._carrier.node_of(self._link, chunk.topic, partition), []).append(
                at
            )
        results: dict[int, Result] = {}
        for numbers in parts.values():
            part = chunk.part(numbers, fixed=chunk.fixed)
            results |= zip(numbers, self._persist_part(part), strict=True)
        return [results[at] for at in range(len(chunk.envelopes))]

    def _persist_part(self, chunk: Chunk) -> list[Result]:
        """Write, again after each of `PAUSES` while that cannot write a second message."""
        repeatable = all(map(self._may_repeat, chunk.envelopes))
        lost: RedisUnavailable | None = None  # the first answer that did not come
        for pause in (*PAUSES, None):
            try:
                replies, missing = self._carrier.write(self._own(), chunk)
            except TopicChanged:
                return [NOT_YET] * len(chunk.envelopes)
            except RedisUnavailable as error:
                replies, missing = [], error
            except RedisRefused as error:
                replies, missing = [error] * len(chunk.envelopes), None
            if missing is None:
                if pause is None or not all(map(_for_the_moment, replies)):
                    return _results(chunk, replies, lost)
            else:
                lost = missing if missing.sent and lost is None else lost
                if pause is None or (missing.sent and not repeatable):
                    return [_unknown(chunk.topic, missing, lost) for _ in chunk.envelopes]
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _may_repeat(self, envelope: Envelope) -> bool:
        """Whether a second write of the message is known to be one by the server.

        The same send id again changes nothing while the message waits. When it could be due before
        the last repetition arrives, only a dedup id makes repeating safe.
        """
        message = full(envelope)
        if message.dedup_id is not None:
            return True
        longest = sum(PAUSES) + (len(PAUSES) + 1) * self._link.timeout
        return message.delay is not None and message.delay > longest


def _for_the_moment(reply: Any) -> bool:
    return isinstance(reply, RedisRefused) and reply.transient


def _results(chunk: Chunk, replies: list[Any], lost: RedisUnavailable | None) -> list[Result]:
    if set(map(type, replies)) == {bytes}:
        return [reply.decode() for reply in replies]
    return [
        _result(chunk.topic, partition, envelope, reply, lost)
        for partition, envelope, reply in zip(
            chunk.partitions, chunk.envelopes, replies, strict=True
        )
    ]


def _result(
    topic: str, partition: int, envelope: Envelope, reply: Any, lost: RedisUnavailable | None
) -> Result:
    if isinstance(reply, bytes):
        return reply.decode()
    if isinstance(reply, RedisRefused):
        if lost is None:
            return RedisRefused(reply.code, str(reply))
        return UnknownOutcome(
            f"a message to {topic} may or may not have been written: the first answer was lost,"
            f" then Redis refused the repetition ({reply})"
        )
    if reply.word == "FULL":
        return BacklogFull(
            f"{int(reply.rest[0]):,} messages wait in {topic}/{partition}, which is max_backlog or"
            " more; the message was not sent"
        )
    send_id = full(envelope).send_id
    if send_id and reply.word == "OK":
        return send_id
    return str(reply.rest[0].decode())


def _unknown(
    topic: str, missing: RedisUnavailable, lost: RedisUnavailable | None
) -> RedisUnavailable:
    """Each message gets an error of its own: several threads may raise them."""
    if lost is None:
        return RedisUnavailable(str(missing), sent=False)
    return UnknownOutcome(
        f"no answer for a message to {topic}: it may or may not have been written ({missing})"
    )


# --- what came of a batch -------------------------------------------------------------------------


def confirmed(topic: str, results: Sequence[Result]) -> tuple[list[str], Exception | None]:
    """Read the results of a batch: the ids in order, and the error that ends the sending.

    An error that says of itself how far the batch came leaves no ids.
    """
    sent = [each for each in results if isinstance(each, str)]
    if len(sent) == len(results):
        return sent, None
    failures = [each for each in results if isinstance(each, Exception)]
    ids = [each if isinstance(each, str) else None for each in results]
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
    return [each for each in ids if each is not None], failures[0]
