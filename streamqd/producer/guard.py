"""Writing only while a topic has the partition count by which the writes were routed.

A message that went where its key belonged a moment ago would break the order of the key. So every
write is a transaction under WATCH of the topic's meta key: when that was changed since the count
was read (the topic has grown, or was deleted), the server does nothing, and the caller routes anew.
The next WATCH, and the count that goes with it, travel behind each transaction in the same write,
so this costs no round trip: the same device as the fetch of a worker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import hiredis

from streamqd.errors import BadValue, ContractError, RedisRefused, RedisUnavailable
from streamqd.producer.encoding import Envelope, full
from streamqd.store import topics
from streamqd.store.client import Connection, missing_of
from streamqd.store.keys import Keys

_EMPTY = b"$0\r\n\r\n"  # an argument without bytes, packed
WATCHED_MAX = 8  # topics watched at once: those written to last

Command = tuple[Any, ...]
Prepared = Sequence[Any]  # commands as a guard made them ready, each in one piece


class TransactionResult(NamedTuple):
    """What became of a transaction.

    `replies` answer its commands, as far as they are known; None when the count has changed and
    nothing was done. `lost` is the error when the answer did not come: then nothing is known.
    """

    replies: list[Any] | None
    lost: RedisUnavailable | None = None


class SentTransaction:
    """A transaction that is sent, and its answer, which is read once.

    In between anything may happen: another use of the connection, its end, a fork. What is read
    later on than that is no answer to this.
    """

    def __init__(self, link: Connection, end: int, count: int) -> None:
        """Of `count` replies, `end` are those of the transaction. The link must be open."""
        self.link = link
        self.end = end
        self.outcome: TransactionResult | None = None
        self._count = count
        self._lost: RedisUnavailable | None = None
        self._owner = (os.getpid(), link.opened)

    def send(self, packed: Sequence[bytes]) -> None:
        """Raises RedisUnavailable only when nothing was written."""
        wire: Any = self.link.connection
        wire.begin(self.link.timeout)
        try:
            wire.transmit(packed)
        except RedisUnavailable as error:
            self.link.close()
            if not error.sent:
                raise
            self._lost = error
        finally:
            wire.finish()

    def receive(self) -> tuple[list[Any], RedisUnavailable | None]:
        """Return the replies that came, and the error if not all of them did.

        `Connection.pipeline` would answer all or nothing, and so hide that EXEC was answered.
        """
        replies: list[Any] = []
        link, lost = self.link, self._lost
        if lost is None and self._owner != (os.getpid(), link.opened):
            lost = RedisUnavailable("the connection was given up", sent=True)
        if lost is not None:
            return replies, lost
        wire: Any = link.connection
        wire.begin(link.timeout)
        try:
            wire.receive_all(self._count, replies)
        except RedisUnavailable as error:
            link.close()
            return replies, error
        except BaseException:
            link.close()
            raise
        finally:
            wire.finish()
        link.judge(replies)
        return replies, None


class TopicGuard:
    """Knows the partition counts of topics as of the last WATCH on the present connection."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._counts: dict[str, int | None] = {}  # the topic that was looked up last comes last
        self._begin = self._end = b""  # what surrounds the commands of a transaction, packed
        self._connection = (
            0  # the value of `Connection.opened` for which the watch stands, 0 = none
        )
        self._flight: SentTransaction | None = None  # what has not been answered yet
        # Called once, while the server works on the next transaction. It may use this guard, behind
        # `settle`; an error that it raises is raised by `run`, which then knows no outcome.
        self.meanwhile: Callable[[], None] | None = None

    def count(self, link: Connection, topic: str) -> int | None:
        """The partition count as far as this guard knows; None when there is no such topic.

        Raises RedisRefused, RedisUnavailable.
        """
        found = self._counts.get(topic)
        if found is not None:
            return found
        self._arm(link, topic)
        return self._counts[topic]

    def known(self, topic: str) -> int | None:
        """The partition count as of the last WATCH; None when it is to be looked up."""
        return self._counts.get(topic)

    def prepared(self, commands: Sequence[Command]) -> Prepared:
        """Make commands ready for `run`."""
        return [hiredis.pack_command(command) for command in commands]

    def appends(self, streams: Iterable[str], envelopes: Sequence[Envelope]) -> Prepared:
        """Make ready what adds messages, each to its stream, with ids of the server's."""
        heads: dict[str, bytes] = {}  # how a message without more than a payload begins
        packed: list[bytes] = []
        for stream, envelope in zip(streams, envelopes, strict=True):
            if type(envelope) is not bytes:
                packed.append(hiredis.pack_command(_append(stream, envelope)))
                continue
            head = heads.get(stream)
            if head is None:
                command = _append(stream, b"")
                head = heads[stream] = hiredis.pack_command(command).removesuffix(_EMPTY)
            packed.append(b"%b$%d\r\n%b\r\n" % (head, len(envelope), envelope))
        return packed

    def run(
        self, link: Connection, topic: str, expected: int, commands: Prepared
    ) -> TransactionResult:
        """Run commands on the topic at once, if its count is the expected one.

        Raises RedisUnavailable when nothing was written, RedisRefused when nothing can be watched.
        """
        wire: Any = link.connection
        if link.connected and wire.ended():
            link.close()
        link.open()
        if self._connection != link.opened:
            self._arm(link, topic)
        if self._counts.get(topic) != expected:
            return TransactionResult(None)
        end = len(commands) + 2
        flight = self._flight = SentTransaction(link, end, end + 1 + len(self._counts))
        self._connection = 0  # the watch is used up
        meanwhile, self.meanwhile = self.meanwhile, None
        try:
            flight.send([self._begin, *commands, self._end])
            if meanwhile is not None:
                meanwhile()
            return self._land(flight)
        except BaseException:
            # Whatever interrupts this, nobody must take the answer for that to something else.
            self._flight = None
            link.close()
            raise

    def settle(self) -> None:
        """Read the answer that is under way, if one is: the connection is free afterwards."""
        if self._flight is not None:
            self._land(self._flight)

    def _land(self, flight: SentTransaction) -> TransactionResult:
        """Read the answer, if that was not done in between, and learn from it."""
        if flight.outcome is None:
            replies, lost = flight.receive()
            if len(replies) < flight.end:
                flight.outcome = TransactionResult([], lost)
            else:
                flight.outcome = _outcome(replies[: flight.end])
            if lost is None:
                # What was written is written; the next use meets the same trouble.
                with contextlib.suppress(RedisRefused, ContractError, BadValue):
                    self._learn(flight.link, replies[flight.end :])
        self._flight = None
        return flight.outcome

    def forget(self) -> None:
        """The connection is another process's."""
        self._connection = 0
        self._flight = None

    def _arm(self, link: Connection, topic: str) -> None:
        """Watch in an exchange of its own: at first, and on a new connection."""
        self._counts[topic] = self._counts.pop(topic, None)
        while len(self._counts) > WATCHED_MAX:
            del self._counts[next(iter(self._counts))]
        self._connection = 0
        watch = self._watch()
        pack: Any = link.connection.pack_command
        self._begin = b"".join(pack("MULTI"))
        self._end = b"".join(b"".join(pack(*each)) for each in (("EXEC",), *watch))
        try:
            replies = link.pipeline(watch)
        except RedisUnavailable as error:
            raise RedisUnavailable(str(error), sent=False) from error  # no message was
        self._learn(link, replies)

    def _watch(self) -> list[Command]:
        metas = [self._keys.meta(topic) for topic in self._counts]
        return [("WATCH", *metas), *(("HGET", meta, "partitionCount") for meta in metas)]

    def _learn(self, link: Connection, replies: Sequence[Any]) -> None:
        for reply in replies:
            if isinstance(reply, RedisRefused):
                raise reply
        for topic, raw in zip(self._counts, replies[1:], strict=True):
            self._counts[topic] = None if raw is None else topics.count_of(topic, raw)
        self._connection = link.opened


class ClusterGuard(TopicGuard):
    """Knows the partition counts of topics in a cluster, as of the last write.

    There the meta key and the partitions are in different slots, which no transaction spans. So the
    count is looked at beside each write: one write may still go by a count that has just changed,
    which happens only when a topic is deleted and made anew, because none grows on a cluster.
    """

    def prepared(self, commands: Sequence[Command]) -> Prepared:
        return commands  # each is sent to a node by its key

    def appends(self, streams: Iterable[str], envelopes: Sequence[Envelope]) -> Prepared:
        return [_append(*each) for each in zip(streams, envelopes, strict=True)]

    def run(
        self, link: Connection, topic: str, expected: int, commands: Prepared
    ) -> TransactionResult:
        if self._counts.get(topic) != expected:
            return TransactionResult(None)
        look = ("HGET", self._keys.meta(topic), "partitionCount")
        try:
            *replies, count = link.pipeline_each([*commands, look])
        except RedisUnavailable as error:
            if not error.sent:
                raise
            return TransactionResult([], error)
        if count is None or isinstance(count, bytes):
            self._counts[topic] = None if count is None else topics.count_of(topic, count)
        if not any(isinstance(reply, RedisUnavailable) for reply in replies):
            return TransactionResult(replies)
        lost = missing_of(replies)
        if not lost.sent:
            raise lost
        return TransactionResult([], lost)

    def _arm(self, link: Connection, topic: str) -> None:
        self._counts[topic] = topics.partition_count(link, self._keys, topic)


def _append(stream: str, envelope: Envelope) -> Command:
    return ("XADD", stream, "*", *full(envelope).fields)


def _outcome(replies: list[Any]) -> TransactionResult:
    """Read the answers to MULTI, the commands and EXEC."""
    *queued, executed = replies
    if executed is None:
        return TransactionResult(None)
    if not isinstance(executed, RedisRefused):
        return TransactionResult(list(executed))
    # Nothing was done, because a command was refused as it came: the reason is there.
    refused = next((each for each in queued if isinstance(each, RedisRefused)), executed)
    return TransactionResult([refused] * (len(queued) - 1))
