"""Writing messages: the transactions of producers, and the scripts for all that an XADD cannot do.

A message that goes where its key belonged a moment ago would break the order of the key. So every
write is a transaction under WATCH of the topic's meta key: when that has changed since the count
was read (the topic has grown, or was deleted), the server does nothing, and the caller routes
again. The next WATCH and the count that goes with it travel behind each transaction in the same
write, so this costs no round trip: the same device as the fetch of a worker.

Scripts (dedup ids, backlog limits, delays) are queued in the same transaction; `publish` and
`schedule` build their calls. `fields` are flat: name, value, name, value …
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamqd.errors import BadValue, ContractError, RedisRefused, RedisUnavailable
from streamqd.store import scripts, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.replies import accepted, missing_of
from streamqd.store.scripts import Call
from streamqd.store.store import Store
from streamqd.store.transport import Transport, pack

FIELDS_MAX = 128  # names and values of one message at most
WATCHED_MAX = 16  # topics watched at once: those written to last. Each costs each send an HGET

_GIVEN_UP = RedisUnavailable("the connection was given up", sent=True)
_MULTI = pack(("MULTI",))
_EXEC = pack(("EXEC",))


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction that is sent, and its answer once that is read.

    `replies` answer its commands; None when the count has changed and nothing was done. `lost` is
    the error when the answer did not come: then nothing is known. One that is never read is lost.
    """

    commands: int
    on: Transport | None = None  # the connection on which it was sent
    replies: list[Any] | None = field(default_factory=list)
    lost: RedisUnavailable | None = _GIVEN_UP

    def answer(self, replies: list[Any] | None, lost: RedisUnavailable | None = None) -> None:
        self.replies, self.lost = replies, lost


class MessageWriter:
    """Writes to topics, over one connection to one server.

    Knows the partition counts of topics as of the last WATCH. One transaction at most has no answer
    yet; in between anything may happen: another use, the end of the connection, a fork.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.connection = connection
        self._node = connection.node
        self._keys = keys
        self._counts: dict[str, int | None] = {}  # the topic that was looked up last comes last
        self._rewatch = b""  # the next WATCH, packed
        self._watched: Transport | None = None  # where the watch stands, while it does
        self._sent: Transaction | None = None  # the one that has no answer yet

    def known(self, topic: str) -> int | None:
        """The partition count as of the last WATCH; None when Redis must be asked."""
        return self._counts.get(topic)

    def count(self, topic: str) -> int | None:
        """The partition count, from Redis if it is not known; None when there is no such topic.

        Raises RedisRefused, RedisUnavailable.
        """
        self.settle()
        if self._counts.get(topic) is None:
            self._watch(topic)
        return self._counts[topic]

    def post(self, topic: str, expected: int, commands: Sequence[bytes]) -> Transaction:
        """Send packed commands on a topic as one transaction; `collect` reads the answer.

        When the topic's count is known not to be the expected one, nothing is sent. Raises
        RedisUnavailable when nothing was written, RedisRefused when nothing can be watched.
        """
        if self._sent is not None:
            self.settle()
        if self._watched is not self._node.ready():
            self._watch(topic)
        transaction = Transaction(len(commands))
        if self._counts.get(topic) != expected:
            transaction.answer(None)
            return transaction
        transaction.on, self._watched = self._watched, None  # the watch is used up
        packed = [_MULTI, *commands, _EXEC, self._rewatch]
        try:
            self._node.send(packed, needed=len(commands) + 2, on=transaction.on)
        except RedisUnavailable as error:
            if not error.sent:
                raise
            transaction.answer([], error)
            return transaction
        self._sent = transaction
        return transaction

    def collect(self, transaction: Transaction) -> None:
        """Read the answer to a transaction, unless that was done in between, and learn from it."""
        if transaction is not self._sent:
            return
        self._sent, lost = None, None
        end = transaction.commands + 2  # MULTI and EXEC are answered too
        replies: list[Any] = []  # `collect` of the connection would hide that EXEC was answered
        assert transaction.on is not None
        transaction.on.begin(self._node.seconds_left())
        try:
            self._node.receive(end + 1 + len(self._counts), replies, on=transaction.on)
        except RedisUnavailable as error:
            lost = error
        if len(replies) < end:
            transaction.answer([], lost)
        else:
            transaction.answer(_executed(replies[:end]))
        if lost is None:
            self._node.judge(replies)
            # The messages are written; the next use meets the same trouble.
            with contextlib.suppress(RedisRefused, ContractError, BadValue):
                self._learn(replies[end:])

    def settle(self) -> None:
        """Read the answer that has not come yet, if any: the connection is free afterwards."""
        if self._sent is not None:
            self.collect(self._sent)

    def abandon(self, transaction: Transaction) -> None:
        """Close the connection, if the answer to a transaction has not been read."""
        if self._sent is transaction:
            self._sent = None
            self.connection.close()

    def detach(self) -> None:
        """In a forked child: the connection, and the answer on it, are the parent's."""
        self.connection.detach()
        self._watched = self._sent = None

    def _watch(self, topic: str) -> None:
        """Watch in an exchange of its own: at first, and on a new connection."""
        self._counts[topic] = self._counts.pop(topic, None)
        while len(self._counts) > WATCHED_MAX:
            del self._counts[next(iter(self._counts))]
        # Who creates a topic breaks the own watch of it, and would be refused. EXEC ends a watch as
        # UNWATCH does, which a restricted user may not run.
        stands = self._watched is not None and self._watched is self._node.transport
        end: list[tuple[Any, ...]] = [("MULTI",), ("EXEC",)] if stands else []
        self._watched = None
        metas = [self._keys.meta(each) for each in self._counts]
        watch: list[tuple[Any, ...]] = [
            ("WATCH", *metas),
            *(("HGET", meta, "partitionCount") for meta in metas),
        ]
        self._rewatch = b"".join(map(pack, watch))
        try:
            replies = self.connection.pipeline([*end, *watch])
        except RedisUnavailable as error:
            raise RedisUnavailable(str(error), sent=False) from error  # no message was
        self._learn(replies[len(end) :])

    def _learn(self, replies: Sequence[Any]) -> None:
        for topic, raw in zip(self._counts, accepted(replies)[1:], strict=True):
            self._counts[topic] = None if raw is None else topics.count_of(topic, raw)
        self._watched = self._node.transport


class ClusterWriter:
    """Writes to topics of a cluster; used as a `MessageWriter` is.

    There the meta key and the partitions are in different slots, which no transaction spans. So the
    count is looked up beside each write: one write may still go by a count that has just changed,
    which happens only when a topic is deleted and created again, because none grows on a cluster.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.connection = connection
        self._keys = keys
        self._counts: dict[str, int | None] = {}

    def known(self, topic: str) -> int | None:
        return self._counts.get(topic)

    def count(self, topic: str) -> int | None:
        found = self._counts.get(topic)
        if found is None:
            found = topics.partition_count(Store(self.connection, self._keys), topic)
            self._counts[topic] = found
        return found

    def post(self, topic: str, expected: int, commands: Sequence[Sequence[Any]]) -> Transaction:
        """Run commands, each at the node of its key, and read the answers at once."""
        transaction = Transaction(len(commands))
        if self._counts.get(topic) != expected:
            transaction.answer(None)
            return transaction
        look = ("HGET", self._keys.meta(topic), "partitionCount")
        try:
            *replies, count = self.connection.pipeline_each([*commands, look])
        except RedisUnavailable as error:
            if not error.sent:
                raise
            transaction.answer([], error)
            return transaction
        if count is None or isinstance(count, bytes):
            self._counts[topic] = None if count is None else topics.count_of(topic, count)
        if any(isinstance(reply, RedisUnavailable) for reply in replies):
            lost = missing_of(replies)
            if not lost.sent:
                raise lost
            transaction.answer([], lost)
        else:
            transaction.answer(replies)
        return transaction

    def collect(self, transaction: Transaction) -> None:
        """It was read at once."""

    def settle(self) -> None:
        """There is never an answer that has not come yet."""

    def abandon(self, transaction: Transaction) -> None:
        """As `settle`."""

    def detach(self) -> None:
        self.connection.detach()


def _executed(replies: list[Any]) -> list[Any] | None:
    """Read the answers to MULTI, the commands and EXEC."""
    *queued, executed = replies
    if executed is None:
        return None
    if not isinstance(executed, RedisRefused):
        return list(executed)
    # Nothing was done, because a command was refused as it came: the reason is there.
    refused = next((each for each in queued if isinstance(each, RedisRefused)), executed)
    return [refused] * (len(queued) - 1)


def publish(
    keys: Keys,
    topic: str,
    partition: int,
    fields: Sequence[bytes | str],
    dedup_id: str = "",
    window: float = 0.0,
    max_backlog: int | None = None,
) -> Call:
    """Write a message unless its dedup id was used within `window` seconds, or too many wait."""
    if max_backlog is not None and max_backlog < 1:
        raise ContractError(f"message_publish: a limit of {max_backlog}")
    named = {"stream": keys.stream(topic, partition)}
    if dedup_id:
        named["dedup"] = keys.dedup(topic, partition, dedup_id)
    return scripts.get("message_publish").call(
        named,
        window_ms=_window_ms(dedup_id, window),
        max_backlog=-1 if max_backlog is None else max_backlog,
        fields=_paired(fields),
    )


def schedule(
    keys: Keys,
    topic: str,
    partition: int,
    delay: float | None,
    send_id: str,
    fields: Sequence[bytes | str],
    dedup_id: str = "",
    window: float = 0.0,
    *,
    at_unix_ms: int | None = None,
) -> Call:
    """Keep a message for `delay` seconds, or until an instant.

    `send_id` is new, or that of the very same send.
    """
    one_time = (delay is None) != (at_unix_ms is None)
    if not send_id or not one_time or min(delay or 0, at_unix_ms or 0) < 0:
        raise ContractError(
            f"message_schedule: send id {send_id!r}, delay {delay} s, at {at_unix_ms} ms"
        )
    named = {
        "scheduled": keys.scheduled(topic, partition),
        "items": keys.scheduled_items(topic, partition),
    }
    if dedup_id:
        named["dedup"] = keys.dedup(topic, partition, dedup_id)
    return scripts.get("message_schedule").call(
        named,
        delay_ms=0 if delay is None else round(delay * 1000),
        at_ms=-1 if at_unix_ms is None else at_unix_ms,
        send_id=send_id,
        window_ms=_window_ms(dedup_id, window),
        # The entry that comes of it tells by which name it was sent.
        fields=[*_paired(fields), "sendId", send_id],
    )


def _paired(fields: Sequence[bytes | str]) -> Sequence[bytes | str]:
    if not fields or len(fields) % 2 or len(fields) > FIELDS_MAX:
        raise ContractError(f"a message of {len(fields)} names and values")
    return fields


def _window_ms(dedup_id: str, window: float) -> int:
    window_ms = round(window * 1000)
    if dedup_id and window_ms < 1:
        raise ContractError(f"a dedup window of {window} s")
    return window_ms
