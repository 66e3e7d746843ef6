"""Which partition a message goes to."""

from __future__ import annotations

import logging
import random
import time

from streamqd import config
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import RedisRefused, RedisUnavailable, Refused, TopicMissing
from streamqd.policy.partitioning import crc32_partition
from streamqd.producer.encoding import Outgoing, encoded_key
from streamqd.store import topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys

COUNT_TTL = 60.0  # seconds after which a topic's partition count is read again

_log = logging.getLogger("streamqd.producer")


class Routes:
    """Knows the partition counts of topics, and whose turn it is among messages without a key."""

    def __init__(self, settings: config.Settings, keys: Keys, *, create: bool) -> None:
        self._settings = settings
        self._keys = keys
        self._create = create
        self._counts: dict[str, tuple[int, float]] = {}  # topic -> partitions, read when
        self._turns: dict[str, int] = {}  # topic -> messages without a key so far

    def forget_turns(self) -> None:
        """After a fork: else every child would begin at the same partition."""
        self._turns.clear()

    def choose(self, link: Link, topic: str, item: Outgoing, dedup_id: str | None = None) -> int:
        """Choose the partition. Reads or creates the topic when it is not known yet.

        Raises TopicMissing, Refused, RedisRefused, RedisUnavailable (nothing was sent), ValueError.
        """
        count = self._count(link, topic)
        if item.partition is not None:
            if not 0 <= item.partition < count:
                raise Refused(
                    f"the topic {topic} has {count} partitions: there is no partition"
                    f" {item.partition}"
                )
            return item.partition
        if item.key is not None:
            return crc32_partition(encoded_key(item.key), count)
        if dedup_id is not None:
            # The repetition must meet the first send, so it must go where that went.
            return crc32_partition(dedup_id.encode(), count)
        turn = self._turns.get(topic)
        if turn is None:
            turn = random.randrange(count)  # many short-lived producers must not all begin at 0
        self._turns[topic] = turn + 1
        return turn % count

    def _count(self, link: Link, topic: str) -> int:
        now = time.monotonic()
        known = self._counts.get(topic)
        if known is not None and now - known[1] < COUNT_TTL:
            return known[0]
        if not NAME.fullmatch(topic):
            raise ValueError(f"not a topic name: {topic!r}; {NAME_HINT}")
        try:
            count = self._look_up(link, topic, first=known is None)
        except RedisUnavailable as error:
            raise RedisUnavailable(
                f"the partition count of {topic} is not known, nothing was sent: {error}",
                sent=False,
            ) from error
        self._counts[topic] = (count, now)
        return count

    def _look_up(self, link: Link, topic: str, *, first: bool) -> int:
        """Read the topic's partition count, or create the topic. Never guesses."""
        stated = self._settings.topics.get(topic)
        count = topics.partition_count(link, self._keys, topic)
        if count is None:
            count = self._create_topic(link, topic, stated or config.Topic())
        elif first and self._create:
            # Whoever created it may have died before this step.
            try:
                topics.register(link, self._keys, topic)
            except RedisRefused as error:
                if error.code != "NOPERM":
                    raise
        if first and stated and "partitions" in stated.stated and stated.partitions != count:
            _log.warning(
                "the topic %s has %d partitions; the configured %d do not change that",
                topic,
                count,
                stated.partitions,
            )
        return count

    def _create_topic(self, link: Link, topic: str, wanted: config.Topic) -> int:
        advice = f"create it with `streamqd topic create {topic}`"
        if not self._create:
            raise TopicMissing(f"the topic {topic} does not exist; {advice}")
        try:
            return topics.create(link, self._keys, topic, wanted)
        except RedisRefused as error:
            if error.code != "NOPERM":
                raise
            raise RedisRefused(
                error.code,
                f"the topic {topic} does not exist and this Redis user may not create it;"
                f" {advice} ({error})",
            ) from error
