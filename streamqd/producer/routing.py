"""Which partition a message goes to.

A partitioner is chosen by name, or is a function of the key (None without one) and the number of
partitions. With a `dedup_id` a repetition must meet the first send, so such messages never take
turns.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from streamqd import config
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind, Refused, TopicMissing
from streamqd.policy.partitioning import crc32_partition, jump_partition
from streamqd.producer.encoding import Envelope, full
from streamqd.store import topics
from streamqd.store.keys import Keys
from streamqd.store.publishing import ClusterWriter, MessageWriter
from streamqd.store.store import Store

_log = logging.getLogger("streamqd.producer")

Named = Literal["hash", "round-robin", "sticky", "consistent"]
Partitioner = Named | Callable[[bytes | None, int], int]
Choose = Callable[[Sequence[Envelope]], Iterable[int]]  # partitions of messages, in their order


class Chooser:
    """Chooses partitions of one topic. Keeps whose turn it is."""

    def __init__(self, partitioner: Partitioner) -> None:
        self._function = partitioner if callable(partitioner) else None
        self._name = "" if callable(partitioner) else partitioner
        self._by_key = jump_partition if partitioner == "consistent" else crc32_partition
        self._turn: int | None = None

    def takes_turns(self, key: bytes | None, dedup_id: str | None) -> bool:
        """Whether any partition is as good as another for such a message."""
        if dedup_id is not None or self._function is not None:
            return False
        return key is None or self._name == "round-robin"

    def choose(self, key: bytes | None, dedup_id: str | None, count: int) -> int:
        """Choose. Raises ValueError when a function chooses a partition that does not exist."""
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
                f"the partitioner chose {chosen!r}, which is none of the {count} partitions"
            )
        return chosen

    def turns(self, number: int, count: int) -> list[int]:
        """Choose for a number of messages that take turns."""
        turn = self._turn
        if turn is None:
            # Many short-lived producers must not all begin at 0.
            turn = random.randrange(count)
        if self._name == "sticky":
            self._turn = turn
            return [turn % count] * number
        self._turn = turn + number
        return [each % count for each in range(turn, turn + number)]

    def begin_batch(self) -> None:
        """The next messages are written in another transaction than the ones before."""
        if self._name == "sticky" and self._turn is not None:
            self._turn += 1


class Partitioners:
    """The partitioner of each topic. Raises ValueError for an unknown name."""

    def __init__(self, chosen: Partitioner | Mapping[str, Partitioner]) -> None:
        self._of_topic: Mapping[str, Partitioner] = chosen if isinstance(chosen, Mapping) else {}
        self._of_others: Partitioner = "hash" if isinstance(chosen, Mapping) else chosen
        self._choosers: dict[str, Chooser] = {}
        for each in (*self._of_topic.values(), self._of_others):
            if not callable(each) and each not in get_args(Named):
                raise ValueError(
                    f"{each!r} is not a partitioner: choose one of {', '.join(get_args(Named))},"
                    " or give a function"
                )

    def of(self, topic: str) -> Chooser:
        """The chooser of a topic."""
        found = self._choosers.get(topic)
        if found is None:
            chosen = self._of_topic.get(topic, self._of_others)
            found = self._choosers[topic] = Chooser(chosen)
        return found

    def forget_turns(self) -> None:
        """After a fork: else every child would begin at the same partition."""
        self._choosers.clear()


class Router:
    """Routes messages by the partition counts that the writer knows; creates topics."""

    def __init__(
        self,
        settings: config.Settings,
        keys: Keys,
        writer: MessageWriter | ClusterWriter,
        partitioners: Partitioners,
        *,
        create: bool,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._writer = writer
        self._partitioners = partitioners
        self._create = create
        self._checked: set[str] = set()  # topics that were looked up before

    def forget_turns(self) -> None:
        """After a fork: else every child would begin at the same partition."""
        self._partitioners.forget_turns()

    def begin_batch(self, topic: str) -> tuple[int, Choose]:
        """The partition count, and the function that chooses for the next transaction's messages.

        The function raises Refused, or the error of a user's partitioner, when its result is
        iterated up to that message. Raises as `count` does.
        """
        chooser = self._partitioners.of(topic)
        chooser.begin_batch()
        count = self.count(topic)
        return count, self._choose(topic, chooser, count)

    def _choose(self, topic: str, chooser: Chooser, count: int) -> Choose:
        def chosen(envelope: Envelope) -> int:
            if isinstance(envelope, bytes):
                return chooser.choose(None, None, count)
            partition = envelope.partition
            if partition is None:
                return chooser.choose(envelope.key, envelope.dedup_id, count)
            if not 0 <= partition < count:
                raise Refused(
                    f"the topic {topic} has {count} partitions: there is no partition {partition}"
                )
            return partition

        def choose(envelopes: Sequence[Envelope]) -> Iterable[int]:
            if set(map(type, envelopes)) == {bytes} and chooser.takes_turns(None, None):
                return chooser.turns(len(envelopes), count)
            return map(chosen, envelopes)

        return choose

    def again(self, topic: str, envelope: Envelope, before: int) -> int:
        """Choose again after the count has changed.

        A message that took its turn stays where it was, if that partition still exists.
        """
        chooser = self._partitioners.of(topic)
        message = full(envelope)
        free = message.partition is None and chooser.takes_turns(message.key, message.dedup_id)
        count = self.count(topic)
        if free and before < count:
            return before
        [partition] = self._choose(topic, chooser, count)([envelope])
        return partition

    def count(self, topic: str) -> int:
        """The topic's partition count. Asks Redis, or creates the topic, only if it is not known.

        Raises TopicMissing, RedisRefused, RedisUnavailable (nothing was sent) and ValueError.
        Never guesses.
        """
        known = self._writer.known(topic)
        if known is not None and topic in self._checked:
            return known
        if topic not in self._checked and not NAME.fullmatch(topic):
            raise ValueError(f"not a topic name: {topic!r}; {NAME_HINT}")
        try:
            count = self._writer.count(topic)
            if count is None:
                self._create_topic(topic)
                count = self._writer.count(topic)
            elif topic not in self._checked and self._create:
                self._register(topic)
        except RedisUnavailable as error:
            raise RedisUnavailable(
                f"the partition count of {topic} is not known, nothing was sent: {error}",
                sent=False,
            ) from error
        if count is None:
            raise TopicMissing(f"the topic {topic} was deleted; nothing was sent")
        if topic not in self._checked:
            self._checked.add(topic)
            self._warn_of_another_count(topic, count)
        return count

    def _warn_of_another_count(self, topic: str, count: int) -> None:
        stated = self._settings.topics.get(topic)
        if stated and "partitions" in stated.stated and stated.partitions != count:
            _log.warning(
                "the topic %s has %d partitions; the configured %d do not change that",
                topic,
                count,
                stated.partitions,
            )

    def _register(self, topic: str) -> None:
        # The process that created it may have died before this step.
        try:
            topics.register(Store(self._writer.connection, self._keys), topic)
        except RedisRefused as error:
            if error.kind is not RefusalKind.FORBIDDEN:
                raise

    def _create_topic(self, topic: str) -> None:
        wanted = self._settings.topics.get(topic) or config.Topic()
        advice = f"create it with `streamqd topic create {topic}`"
        if not self._create:
            raise TopicMissing(f"the topic {topic} does not exist; {advice}")
        try:
            topics.create(Store(self._writer.connection, self._keys), topic, wanted)
        except RedisRefused as error:
            if error.kind is not RefusalKind.FORBIDDEN:
                raise
            raise RedisRefused(
                error.code,
                f"the topic {topic} does not exist and this Redis user may not create it;"
                f" {advice} ({error})",
            ) from error
