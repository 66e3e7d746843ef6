"""Chunks of messages: routed and written together, routed anew when their topic has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind
from streamqd.producer.encoding import Envelope, Full, full, kind_of
from streamqd.producer.guard import Prepared, TopicGuard, TransactionResult
from streamqd.producer.routes import Choose, Routes
from streamqd.store import publishing, scripts
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call

REROUTES_MAX = 100  # of one transaction: each time the topic has changed under it


def _unrouted(_envelopes: Sequence[Envelope]) -> Iterable[int]:
    raise AssertionError("the partition count has not been looked at")


@dataclass
class Chunk:
    """Messages of one kind and one transaction, routed by one partition count.

    A `fixed` one is not routed anew: others wait before it, and it could overtake them.
    """

    topic: str
    counted: int = 0
    envelopes: list[Envelope] = field(default_factory=list)
    partitions: list[int] = field(default_factory=list)  # where each goes
    fixed: bool = False
    choose: Choose = _unrouted
    commands: Prepared | None = None  # those that write it where it goes now

    def part(self, numbers: Sequence[int], *, fixed: bool) -> Chunk:
        """Some of the messages, to be written by themselves."""
        envelopes = [self.envelopes[at] for at in numbers]
        partitions = [self.partitions[at] for at in numbers]
        return Chunk(self.topic, self.counted, envelopes, partitions, fixed)


class TopicChanged(Exception):  # noqa: N818 - an answer within the producer, never an error of its
    """The count by which a fixed chunk was routed is not that of the topic; nothing was written."""


Answers = tuple[list[Any], RedisUnavailable | None]  # replies, and the error of a lost answer


class Carrier:
    """Fills chunks and carries them out.

    `window` is how long a dedup id is remembered, in seconds; `max_backlog` how many messages may
    wait in a partition, None for any number.
    """

    def __init__(
        self, keys: Keys, guard: TopicGuard, routes: Routes, window: float, max_backlog: int | None
    ) -> None:
        self._keys = keys
        self._guard = guard
        self._routes = routes
        self._window = window
        self._max_backlog = max_backlog

    def add(
        self, own: Callable[[], Connection], chunk: Chunk, envelopes: Sequence[Envelope]
    ) -> None:
        """Route messages and put them behind those of the chunk. Raises as `Routes` does.

        Those before the one that an error is about have been added then. Redis is asked only for a
        count that is not known.
        """
        if not chunk.envelopes:
            self._routes.begin_batch(chunk.topic)
            # Should it change before the chunk is written, all of it is routed anew.
            known = self._routes.known(chunk.topic)
            chunk.counted = self._routes.count(own(), chunk.topic) if known is None else known
            chunk.choose = self._routes.chooser(chunk.topic, chunk.counted)
        before = len(chunk.partitions)
        try:
            # Where choosing fails, those that were chosen before are there.
            chunk.partitions.extend(chunk.choose(envelopes))
        finally:
            chunk.envelopes += envelopes[: len(chunk.partitions) - before]

    def prepare(self, chunk: Chunk) -> None:
        """Make the commands that write the messages. Redis is not asked."""
        if self._plain(chunk):
            chunk.commands = self._appends(chunk)

    def node_of(self, link: Connection, topic: str, partition: int) -> str:
        """The node of a cluster that serves a partition, as far as is known."""
        return link.node_of(self._keys.stream(topic, partition))

    def write(self, link: Connection, chunk: Chunk) -> Answers:
        """Write the messages. Their replies are entry ids, or the replies of a script.

        Raises RedisUnavailable when nothing was written, TopicMissing, Refused, Changed.
        """
        return self._append(link, chunk) if self._plain(chunk) else self._call(link, chunk)

    def write_at_once(self, link: Connection, chunk: Chunk) -> TransactionResult | None:
        """Try to write a plain chunk without waiting for a connection; None when it cannot be.

        Raises RedisUnavailable, RedisRefused: then nothing was written.
        """
        if not link.connected or not self._plain(chunk):
            return None  # nobody waits once more for a server that does not answer
        commands = self._appends(chunk)
        return self._guard.run(link, chunk.topic, chunk.counted, commands)

    def _plain(self, chunk: Chunk) -> bool:
        """Whether nothing needs a script."""
        return self._max_backlog is None and kind_of(chunk.envelopes[0]) == "plain"

    def _appends(self, chunk: Chunk) -> Prepared:
        streams = {each: self._keys.stream(chunk.topic, each) for each in set(chunk.partitions)}
        return self._guard.appends(map(streams.__getitem__, chunk.partitions), chunk.envelopes)

    def _append(self, link: Connection, chunk: Chunk) -> Answers:
        for _ in range(REROUTES_MAX):
            commands = self._appends(chunk) if chunk.commands is None else chunk.commands
            found = self._guard.run(link, chunk.topic, chunk.counted, commands)
            if found.replies is not None:
                return found.replies, found.lost
            self._reroute(link, chunk)
        raise _restless(chunk)

    def _call(self, link: Connection, chunk: Chunk) -> Answers:
        """Run a script for each message. A server that does not know it knows it for none."""
        by_source = False
        for _ in range(REROUTES_MAX):
            calls = [
                self._call_of(chunk.topic, partition, full(envelope))
                for partition, envelope in zip(chunk.partitions, chunk.envelopes, strict=True)
            ]
            commands = [scripts.command(call, by_source=by_source) for call in calls]
            prepared = self._guard.prepared(commands)
            found = self._guard.run(link, chunk.topic, chunk.counted, prepared)
            if found.replies is None:
                self._reroute(link, chunk)
            elif found.lost is not None:
                return [], found.lost
            elif not by_source and any(map(_unknown_script, found.replies)):
                by_source = True
            else:
                return [
                    _explained(raw, by_source)
                    if isinstance(raw, RedisRefused)
                    else scripts.reply(call, raw)
                    for call, raw in zip(calls, found.replies, strict=True)
                ], None
        raise _restless(chunk)

    def _reroute(self, link: Connection, chunk: Chunk) -> None:
        if chunk.fixed:
            raise TopicChanged
        chunk.commands = None
        chunk.counted = self._routes.count(link, chunk.topic)
        chunk.partitions = [
            self._routes.again(link, chunk.topic, envelope, was)
            for was, envelope in zip(chunk.partitions, chunk.envelopes, strict=True)
        ]

    def _call_of(self, topic: str, partition: int, envelope: Full) -> Call:
        dedup_id = envelope.dedup_id or ""
        if not envelope.send_id:
            return publishing.publish(
                self._keys,
                topic,
                partition,
                envelope.fields,
                dedup_id,
                self._window,
                self._max_backlog,
            )
        return publishing.schedule(
            self._keys,
            topic,
            partition,
            envelope.delay,
            envelope.send_id,
            envelope.fields,
            dedup_id,
            self._window,
            at_unix_ms=envelope.at_unix_ms,
        )


def _explained(reply: RedisRefused, by_source: bool) -> RedisRefused:
    """Say what a user without the right to scripts can do."""
    if reply.kind is not RefusalKind.FORBIDDEN:
        return reply
    if by_source:
        text = (
            "the server does not know the script that this message needs, and this Redis user may"
            " not bring it; a running daemon teaches it within 10 s"
        )
    else:
        text = (
            "this Redis user may not run scripts, which dedup_id, delay, at and max_backlog need:"
            " send without them, or give it the rights of etc/acl/producer-scripts.acl"
        )
    return RedisRefused(reply.code, f"{text} ({reply})")


def _unknown_script(reply: Any) -> bool:
    return isinstance(reply, RedisRefused) and reply.kind is RefusalKind.NO_SCRIPT


def _restless(chunk: Chunk) -> RedisUnavailable:
    return RedisUnavailable(f"the topic {chunk.topic} keeps changing; nothing was sent", sent=False)
