"""Which partition a message goes to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from streamqd import config
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind, Refused, TopicMissing
from streamqd.producer.encoding import Envelope, full
from streamqd.producer.guard import TopicGuard
from streamqd.producer.partitioners import Partitioners
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys

_log = logging.getLogger("streamqd.producer")

Choose = Callable[[Sequence[Envelope]], Iterable[int]]  # partitions of messages, in their order


class Routes:
    """Routes messages by the partition counts that the guard knows."""

    def __init__(
        self,
        settings: config.Settings,
        keys: Keys,
        guard: TopicGuard,
        partitioners: Partitioners,
        *,
        create: bool,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._guard = guard
        self._partitioners = partitioners
        self._create = create
        self._greeted: set[str] = set()  # topics of which the count was looked at before

    def forget_turns(self) -> None:
        """After a fork: else every child would begin at the same partition."""
        self._partitioners.forget_turns()

    def begin_batch(self, topic: str) -> None:
        """What is chosen next is written in another transaction than what was before."""
        self._partitioners.of(topic).begin_batch()

    def chooser(self, topic: str, count: int) -> Choose:
        """What chooses the partitions of messages, as long as the topic has so many.

        What it returns raises Refused, and what a partitioner of the user's raises, where the
        partition of that message is asked for.
        """
        chooser = self._partitioners.of(topic)

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

    def again(self, link: Connection, topic: str, envelope: Envelope, was: int) -> int:
        """Choose anew after the count has changed; a message whose turn it was stays, if it can."""
        chooser = self._partitioners.of(topic)
        said = full(envelope)
        free = said.partition is None and chooser.takes_turns(said.key, said.dedup_id)
        count = self.count(link, topic)
        if free and was < count:
            return was
        [partition] = self.chooser(topic, count)([envelope])
        return partition

    def known(self, topic: str) -> int | None:
        """The topic's partition count, when that needs no look at all."""
        return self._guard.known(topic) if topic in self._greeted else None

    def count(self, link: Connection, topic: str) -> int:
        """The topic's partition count. Reads it, or creates the topic, when it is not known yet.

        Raises TopicMissing, RedisRefused, RedisUnavailable (nothing was sent) and ValueError.
        Never guesses.
        """
        if topic not in self._greeted and not NAME.fullmatch(topic):
            raise ValueError(f"not a topic name: {topic!r}; {NAME_HINT}")
        try:
            count = self._guard.count(link, topic)
            if count is None:
                self._create_topic(link, topic)
                count = self._guard.count(link, topic)
            elif topic not in self._greeted and self._create:
                self._register(link, topic)
        except RedisUnavailable as error:
            raise RedisUnavailable(
                f"the partition count of {topic} is not known, nothing was sent: {error}",
                sent=False,
            ) from error
        if count is None:
            raise TopicMissing(f"the topic {topic} was deleted; nothing was sent")
        if topic not in self._greeted:
            self._greet(topic, count)
        return count

    def _greet(self, topic: str, count: int) -> None:
        """Say once when the configuration states another count."""
        self._greeted.add(topic)
        stated = self._settings.topics.get(topic)
        if stated and "partitions" in stated.stated and stated.partitions != count:
            _log.warning(
                "the topic %s has %d partitions; the configured %d do not change that",
                topic,
                count,
                stated.partitions,
            )

    def _register(self, link: Connection, topic: str) -> None:
        # Whoever created it may have died before this step.
        try:
            topics.register(link, self._keys, topic)
        except RedisRefused as error:
            if error.kind is not RefusalKind.FORBIDDEN:
                raise

    def _create_topic(self, link: Connection, topic: str) -> None:
        wanted = self._settings.topics.get(topic) or config.Topic()
        advice = f"create it with `streamqd topic create {topic}`"
        if not self._create:
            raise TopicMissing(f"the topic {topic} does not exist; {advice}")
        try:
            topics.create(link, self._keys, topic, wanted)
        except RedisRefused as error:
            if error.kind is not RefusalKind.FORBIDDEN:
                raise
            raise RedisRefused(
                error.code,
                f"the topic {topic} does not exist and this Redis user may not create it;"
                f" {advice} ({error})",
            ) from error
