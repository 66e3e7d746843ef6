"""Choose the partition of a message.

A partitioner is a name, or a function of the key (None without a key) and the number of partitions.
Messages with a `dedup_id` never take turns, because a repeated send must reach the same partition
as the first one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from streamqd import config
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import (
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
    RequestRefusedError,
    TopicNotFoundError,
)
from streamqd.policy.partitioning import crc32_partition, jump_partition
from streamqd.producer.encoding import Envelope, to_encoded
from streamqd.store import topics
from streamqd.store.publishing import MessageWriter
from streamqd.store.store import Store

_log = logging.getLogger("streamqd.producer")

Named = Literal["hash", "round-robin", "sticky", "consistent"]
Partitioner = Named | Callable[[bytes | None, int], int]


class Chooser:
    """The partitioner of one topic, which remembers whose turn it is if messages take turns.

    Raises ValueError for an unknown name.
    """

    def __init__(self, partitioner: Partitioner) -> None:
        if not callable(partitioner) and partitioner not in get_args(Named):
            raise ValueError(
                f"{partitioner!r} is not a partitioner; choose one of"
                f" {', '.join(get_args(Named))}, or pass a function"
            )
        self._function = partitioner if callable(partitioner) else None
        self._name = "" if callable(partitioner) else partitioner
        self._by_key = jump_partition if partitioner == "consistent" else crc32_partition
        self._turn: int | None = None

    def takes_turns(self, key: bytes | None, dedup_id: str | None) -> bool:
        """Return True if a message with this key and `dedup_id` may go to any partition."""
        if dedup_id is not None or self._function is not None:
            return False
        return key is None or self._name == "round-robin"

    def choose(self, key: bytes | None, dedup_id: str | None, count: int) -> int:
        """Return one of `count` partitions.

        Raises ValueError if a user's function returns anything else.
        """
        if self.takes_turns(key, dedup_id):
            [turn] = self.turns(1, count)
            return turn
        if dedup_id is not None and (key is None or self._name == "round-robin"):
            return self._by_key(dedup_id.encode(), count)
        if self._function is None:
            assert key is not None
            return self._by_key(key, count)
        chosen = self._function(key, count)
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < count:
            raise ValueError(
                f"the partitioner returned {chosen!r}, but partitions are numbered 0 to {count - 1}"
            )
        return chosen

    def turns(self, number: int, count: int) -> list[int]:
        """Return the partitions of this number of messages, which go to each partition in turn."""
        turn = self._turn
        if turn is None:
            # The first partition is random. Otherwise, many short-lived producers would all start
            # at 0.
            turn = random.randrange(count)
        if self._name == "sticky":
            self._turn = turn
            return [turn % count] * number
        self._turn = turn + number
        return [each % count for each in range(turn, turn + number)]

    def begin_batch(self) -> None:
        """Start a new transaction. A sticky partitioner then moves to the next partition."""
        if self._name == "sticky" and self._turn is not None:
            self._turn += 1


class Router:
    """Routes messages, and creates topics. The writer caches the partition counts.

    Raises ValueError for an unknown partitioner.
    """

    def __init__(
        self,
        settings: config.Settings,
        store: Store,
        writer: MessageWriter,
        partitioner: Partitioner | Mapping[str, Partitioner],
        *,
        create: bool,
    ) -> None:
        self._settings = settings
        self._store = store
        self._writer = writer
        self._create = create
        self._of_topics: Mapping[str, Partitioner] = {}
        self._of_others: Partitioner = "hash"
        if isinstance(partitioner, Mapping):
            self._of_topics = partitioner
        else:
            self._of_others = partitioner
        self._choosers: dict[str, Chooser] = {}
        for each in (*self._of_topics.values(), self._of_others):
            Chooser(each)  # raises ValueError for an unknown name before the first send
        self._checked: set[str] = set()  # topics that have already been looked up

    def chooser(self, topic: str) -> Chooser:
        """Return the partitioner of a topic."""
        found = self._choosers.get(topic)
        if found is None:
            found = self._choosers[topic] = Chooser(self._of_topics.get(topic, self._of_others))
        return found

    def forget_turns(self) -> None:
        """Reset the turns after a fork, so that not every child starts at the same partition."""
        self._choosers.clear()

    def choose(self, topic: str, envelopes: Sequence[Envelope], count: int) -> Iterable[int]:
        """Return the partition of each message, in order, out of `count` partitions.

        When the iteration reaches a message that cannot be routed, it raises RequestRefusedError,
        or the error of a user's partitioner.
        """
        chooser = self.chooser(topic)
        if set(map(type, envelopes)) == {bytes} and chooser.takes_turns(None, None):
            return chooser.turns(len(envelopes), count)
        return (_choose_partition(topic, chooser, each, count) for each in envelopes)

    def choose_one(self, topic: str, envelope: Envelope, count: int) -> int:
        """Return the partition for a single message. Raises the same errors as `choose`."""
        chooser = self._choosers.get(topic) or self.chooser(topic)
        chooser.begin_batch()
        return _choose_partition(topic, chooser, envelope, count)

    def reroute(
        self, topic: str, envelopes: Sequence[Envelope], before: Sequence[int], count: int
    ) -> list[int]:
        """Route messages again after the partition count has changed.

        A message whose partition was only its turn keeps this partition if it still exists. Raises
        the same errors as `choose`.
        """
        chooser = self.chooser(topic)
        return [
            partition
            if partition < count and _is_free(chooser, envelope)
            else _choose_partition(topic, chooser, envelope, count)
            for envelope, partition in zip(envelopes, before, strict=True)
        ]

    def cached_count(self, topic: str) -> int | None:
        """Return the topic's partition count if it is cached, or None."""
        return self._writer.cached_count(topic) if topic in self._checked else None

    def count(self, topic: str) -> int:
        """Return the topic's partition count. If it is not cached, read it, or create the topic.

        A count is never guessed. Raises TopicNotFoundError, RedisResponseError,
        RedisUnavailableError (nothing was sent) and ValueError.
        """
        known = self.cached_count(topic)
        if known is not None:
            return known
        if topic not in self._checked and not NAME.fullmatch(topic):
            raise ValueError(f"{topic!r} is not a valid topic name ({NAME_HINT})")
        try:
            count = self._writer.count(topic)
            if count is None:
                self._create_topic(topic)
                count = self._writer.count(topic)
            elif topic not in self._checked and self._create:
                self._register(topic)
        except RedisUnavailableError as error:
            raise RedisUnavailableError(
                f"cannot read the partition count of topic {topic}, so nothing was sent: {error}",
                sent=False,
            ) from error
        if count is None:
            raise TopicNotFoundError(f"topic {topic} was deleted, so nothing was sent")
        if topic not in self._checked:
            self._checked.add(topic)
            self._warn_of_another_count(topic, count)
        return count

    def _warn_of_another_count(self, topic: str, count: int) -> None:
        stated = self._settings.topics.get(topic)
        if stated and "partitions" in stated.explicit and stated.partitions != count:
            _log.warning(
                "topic %s has %d partitions; the configured %d do not change that",
                topic,
                count,
                stated.partitions,
            )

    def _register(self, topic: str) -> None:
        # The process that created the topic may have died before it registered the topic.
        try:
            topics.register(self._store, topic)
        except RedisResponseError as error:
            if error.kind is not RefusalKind.FORBIDDEN:
                raise

    def _create_topic(self, topic: str) -> None:
        wanted = self._settings.topics.get(topic) or config.Topic()
        advice = f"create it with `streamqd topic create {topic}`"
        if not self._create:
            raise TopicNotFoundError(f"topic {topic} does not exist; {advice}")
        try:
            topics.create(self._store, topic, wanted)
        except RedisResponseError as error:
            if error.kind is not RefusalKind.FORBIDDEN:
                raise
            raise RedisResponseError(
                error.code,
                f"topic {topic} does not exist and this Redis user may not create it;"
                f" {advice} ({error})",
            ) from error


def _choose_partition(topic: str, chooser: Chooser, envelope: Envelope, count: int) -> int:
    if isinstance(envelope, bytes):
        return chooser.choose(None, None, count)
    partition = envelope.partition
    if partition is None:
        return chooser.choose(envelope.key, envelope.dedup_id, count)
    if not 0 <= partition < count:
        raise RequestRefusedError(topics.no_partition_text(topic, partition, count))
    return partition


def _is_free(chooser: Chooser, envelope: Envelope) -> bool:
    """Return True if a message's partition was only its turn, so any other would also do."""
    message = to_encoded(envelope)
    return message.partition is None and chooser.takes_turns(message.key, message.dedup_id)
