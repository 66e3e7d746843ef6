"""Delete dead letters that are older than the `dlq_retention` of their topic.

Without this setting, no dead letters are deleted automatically. The dead-letter stream is not
trimmed by length. Instead, the oldest dead letters are deleted by ID, a limited number at a time.
If the topic requires an archive, dead letters stay until they are archived.
"""

from __future__ import annotations

from collections import Counter

from streamqd import logs
from streamqd.config import Settings
from streamqd.errors import RedisResponseError
from streamqd.housekeeper.batch import Refusals, Steps, TimeSlice, run_batched
from streamqd.housekeeper.topics import Topics
from streamqd.isolate import Isolate, run_directly
from streamqd.metrics.view import MetricsView
from streamqd.model import TopicPartition
from streamqd.store import dead
from streamqd.store.scripts import Call, Reply
from streamqd.store.store import Store

PAGE = 64  # largest number of dead letters that one script deletes, in less than 1 ms
ROUNDS_MAX = 80  # number of scripts for one partition before the partitions are listed again


class DeadLetterExpirer:
    """Deletes the expired dead letters of each partition for which this instance owns a lease."""

    def __init__(
        self,
        store: Store,
        view: MetricsView,
        settings: Settings,
        isolate: Isolate[TopicPartition] = run_directly,
    ) -> None:
        self._store = store
        self._isolate = isolate
        self._view = view
        self._topics = Topics(store, settings.topics)
        self._turns = TimeSlice(self._steps)

    def run(self) -> float | None:
        """Delete expired dead letters for one turn. Return 0 if more are left, or else None."""
        return self._turns.run()

    def _steps(self) -> Steps:
        places = {
            (assignment.topic, assignment.partition) for _, assignment in self._view.owned_slots()
        }
        self._topics.refresh({topic for topic, _ in places})
        waiting = sorted(place for place in places if self._expires(place[0]))
        refusals = Refusals()
        expired: Counter[str] = Counter()

        def book(place: TopicPartition, reply: Reply | RedisResponseError) -> bool:
            if isinstance(reply, RedisResponseError):
                return refusals.accept(reply)
            done = dead.PurgeReply.parse(reply)
            if done.removed:
                self._view.count("expired", (place[0], str(place[1])), done.removed)
                expired[place[0]] += done.removed
            return done.more

        try:
            left = yield from run_batched(
                self._store, waiting, self._call, book, ROUNDS_MAX, self._isolate
            )
        finally:
            for topic, count in expired.items():
                logs.event("dead_letters.expired", topic=topic, count=count)
        refusals.raise_first()
        if self._topics.error is not None:
            raise self._topics.error
        return 0.0 if left else None

    def _expires(self, topic: str) -> bool:
        found = self._topics.get(topic)
        return found is not None and found.dlq_retention is not None

    def _call(self, place: TopicPartition) -> Call:
        topic = self._topics.get(place[0])
        assert topic is not None
        assert topic.dlq_retention is not None
        before = f"{max(0, self._view.now_unix_ms() - round(topic.dlq_retention * 1000))}-0"
        required = topic.archive == "required"
        return dead.purge_before(self._store.keys, *place, before, PAGE, archived_only=required)
