"""Chunks of messages: routed and written together, routed anew when their topic has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.producer.encoding import Envelope
from streamqd.producer.guard import Command, Guard, Outcome
from streamqd.producer.routes import Routes
from streamqd.store import publishing, scripts
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call

REROUTES_MAX = 100  # of one transaction: each time the topic has changed under it


def _unrouted(_envelope: Envelope) -> int:
    raise AssertionError("the partition count has not been looked at")


class Routed(NamedTuple):
    """A message with the partition that it goes to."""

    partition: int
    envelope: Envelope


@dataclass
class Chunk:
    """Messages of one kind and one transaction, routed by one partition count.

    A `fixed` one is not routed anew: others wait before it, and it could overtake them.
    """

    topic: str
    counted: int = 0
    messages: list[Routed] = field(default_factory=list)
    fixed: bool = False
    choose: Callable[[Envelope], int] = _unrouted  # the partition of a message


class Changed(Exception):  # noqa: N818 - an answer within the producer, never an error of its
    """The count by which a fixed chunk was routed is not that of the topic; nothing was written."""


Answers = tuple[list[Any], RedisUnavailable | None]  # replies, and the error of a lost answer


class Carrier:
    """Fills chunks and carries them out.

    `window` is how long a dedup id is remembered, in seconds; `max_backlog` how many messages may
    wait in a partition, None for any number.
    """

    def __init__(
        self, keys: Keys, guard: Guard, routes: Routes, window: float, max_backlog: int | None
    ) -> None:
        self._keys = keys
        self._guard = guard
        self._routes = routes
        self._window = window
        self._max_backlog = max_backlog

    def add(self, link: Link, chunk: Chunk, envelopes: Sequence[Envelope]) -> None:
        """Route messages and put them behind those of the chunk. Raises as `Routes` does.

        Those before the one that an error is about have been added then.
        """
        if not chunk.messages:
            self._routes.begin_batch(chunk.topic)
            # Should it change before the chunk is full, all of it is routed anew.
            chunk.counted = self._routes.count(link, chunk.topic)
            chunk.choose = self._routes.chooser(chunk.topic, chunk.counted)
        choose, messages = chunk.choose, chunk.messages
        for envelope in envelopes:
            messages.append(Routed(choose(envelope), envelope))

    def node_of(self, link: Link, topic: str, message: Routed) -> str:
        """The node of a cluster that a message goes to, as far as is known."""
        return link.node_of(self._keys.stream(topic, message.partition))

    def write(self, link: Link, chunk: Chunk) -> Answers:
        """Write the messages. Their replies are entry ids, or the replies of a script.

        Raises RedisUnavailable when nothing was written, TopicMissing, Refused, Changed.
        """
        first = chunk.messages[0].envelope
        if first.send_id or first.dedup_id is not None or self._max_backlog is not None:
            return self._call(link, chunk)
        return self._append(link, chunk)

    def write_one(self, link: Link, topic: str, envelope: Envelope) -> Outcome | None:
        """Try to write a message that is nothing special; None when it must go into a chunk.

        Raises as `write` does, and what concerns the message as `Routes` does.
        """
        if not link.connected:
            return None  # nobody waits once more for a server that does not answer
        count = self._routes.known(topic)
        special = envelope.send_id or envelope.dedup_id is not None or self._max_backlog is not None
        if count is None or special:
            return None
        self._routes.begin_batch(topic)
        partition = self._routes.chooser(topic, count)(envelope)
        command = ("XADD", self._keys.stream(topic, partition), "*", *envelope.fields)
        return self._guard.run(link, topic, count, (command,))

    def _append(self, link: Link, chunk: Chunk) -> Answers:
        def commands() -> list[Command]:
            names: dict[int, str] = {}
            found: list[Command] = []
            for partition, envelope in chunk.messages:
                name = names.get(partition)
                if name is None:
                    name = names[partition] = self._keys.stream(chunk.topic, partition)
                found.append(("XADD", name, "*", *envelope.fields))
            return found

        for _ in range(REROUTES_MAX):
            found = self._guard.run(link, chunk.topic, chunk.counted, commands())
            if found.replies is not None:
                return found.replies, found.lost
            self._reroute(link, chunk)
        raise _restless(chunk)

    def _call(self, link: Link, chunk: Chunk) -> Answers:
        """Run a script for each message. A server that does not know it knows it for none."""
        by_source = False
        for _ in range(REROUTES_MAX):
            calls = [self._call_of(chunk.topic, each) for each in chunk.messages]
            commands = [scripts.command(call, by_source=by_source) for call in calls]
            found = self._guard.run(link, chunk.topic, chunk.counted, commands)
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

    def _reroute(self, link: Link, chunk: Chunk) -> None:
        if chunk.fixed:
            raise Changed
        chunk.counted = self._routes.count(link, chunk.topic)
        chunk.messages = [
            Routed(self._routes.again(link, chunk.topic, envelope, was), envelope)
            for was, envelope in chunk.messages
        ]

    def _call_of(self, topic: str, message: Routed) -> Call:
        partition, envelope = message
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
    if reply.code != "NOPERM":
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
    return isinstance(reply, RedisRefused) and reply.code == "NOSCRIPT"


def _restless(chunk: Chunk) -> RedisUnavailable:
    return RedisUnavailable(f"the topic {chunk.topic} keeps changing; nothing was sent", sent=False)
