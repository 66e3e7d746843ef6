"""Remove entries that every group has acknowledged, unless a retention setting still retains them.

Entries of partitions are retained as the settings of the topic require. Retry streams do not retain
acknowledged entries. At the end of each run, `retention_enforcer` also drops unacknowledged entries
if the settings allow their loss.
"""

from __future__ import annotations

import logging

from streamqd import logs
from streamqd.config import Settings, Topic
from streamqd.errors import RedisResponseError
from streamqd.housekeeper.batch import Refusals, Steps, TimeSlice, run_batched
from streamqd.housekeeper.retention_enforcer import RetentionEnforcer
from streamqd.housekeeper.topics import Topics
from streamqd.isolate import Isolate, run_directly
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment, TopicPartition
from streamqd.store import retention
from streamqd.store.retention import Trimmed
from streamqd.store.scripts import Call, Reply
from streamqd.store.statistics import unix_ms
from streamqd.store.store import Store

PAGE = 4_000  # largest number of entries that one script removes
ROUNDS_MAX = 50  # number of scripts for one stream before the streams are listed again
SOON = 1.0  # seconds between runs if acknowledged entries must be removed immediately


class Trimmer:
    """Trims this instance's partitions, and the retry streams of its assignments.

    The script that trims a stream finds out which entries must stay.
    """

    def __init__(
        self,
        store: Store,
        view: MetricsView,
        settings: Settings,
        isolate: Isolate[TopicPartition | Assignment] = run_directly,
    ) -> None:
        self._store = store
        self._isolate = isolate
        self._view = view
        self._configured = tuple(settings.topics)
        self._topics = Topics(store, settings.topics)
        self._groups: dict[str, list[str]] = {}
        for consumer in settings.consumers:
            if not consumer.reads_dead_letters:
                self._groups.setdefault(consumer.topic, []).append(consumer.group)
        self._dropper = RetentionEnforcer(store, view, self._groups, isolate)
        self._refused: set[TopicPartition] = set()
        # Maps partitions whose retention settings are exceeded to the holder that still needs old
        # entries, such as a group, and to the time of the first of these entries (unix ms).
        self._held: dict[TopicPartition, tuple[str, int]] = {}
        self._turns = TimeSlice(self._steps)

    def run(self) -> float | None:
        """Trim for one turn. Return 0 if there is more to trim now.

        Otherwise, return the seconds until the next run, or None if the usual interval is enough.
        """
        try:
            return self._turns.run()
        finally:
            self._view.held = dict(self._held)

    def _steps(self) -> Steps:
        owned = [assignment for _, assignment in self._view.owned_slots()]
        self._topics.refresh({*self._configured, *(assignment.topic for assignment in owned)})
        places = self._places(owned)
        self._held = {place: held for place, held in self._held.items() if place in places}
        waiting = self._streams(owned, places)
        refusals = Refusals()
        left = yield from run_batched(
            self._store,
            waiting,
            lambda stream: self._call(stream, places),
            lambda stream, reply: self._record_reply(stream, reply, refusals),
            ROUNDS_MAX,
            self._isolate,
        )
        more = yield from self._dropper.steps(places, refusals)
        refusals.raise_first()
        if self._topics.error is not None:
            raise self._topics.error
        if left or more:
            return 0.0
        at_once = any(topic.retention.ack_policy == "delete" for topic in places.values())
        return SOON if at_once else None

    def _places(self, owned: list[Assignment]) -> dict[TopicPartition, Topic]:
        """Return the partitions that this instance trims, with the settings of their topics."""
        # Leave out groups that read dead letters, because they do not read the partition itself.
        wanted = {
            (assignment.topic, assignment.partition)
            for assignment in owned
            if not assignment.reads_dead_letters
        }
        for name in self._configured:
            topic = self._topics.get(name)
            if topic is not None and topic.retention.without_groups:
                # A partition without groups has no owner, so every instance trims it. This does no
                # harm.
                wanted |= {(name, number) for number in range(self._topics.partitions(name))}
        places = {}
        for place in sorted(wanted):
            topic = self._topics.get(place[0])
            if topic is not None:
                places[place] = topic
        return places

    def _streams(
        self, owned: list[Assignment], places: dict[TopicPartition, Topic]
    ) -> list[TopicPartition | Assignment]:
        """Return the streams that may need trimming.

        A topic and partition number stand for the partition's stream, and an assignment stands for
        its retry stream.
        """
        figures = self._view.assignments
        return [
            *(place for place, topic in places.items() if topic.retention.bounded),
            *(
                assignment
                for assignment in owned
                if assignment in figures and figures[assignment].retry.length
            ),
        ]

    def _call(
        self, stream: TopicPartition | Assignment, places: dict[TopicPartition, Topic]
    ) -> Call:
        if isinstance(stream, Assignment):
            return retention.trim_retry(self._store.keys, stream, PAGE)
        topic = places[stream]
        bounds = topic.retention
        keep_from = "0-0"
        if bounds.ack_policy == "delete":
            keep_from = ""
        elif bounds.max_age is not None:
            keep_from = f"{max(0, self._view.now_unix_ms() - round(bounds.max_age * 1000))}-0"
        return retention.trim(
            self._store.keys,
            *stream,
            keep_from=keep_from,
            max_length=bounds.max_length,
            max_bytes=bounds.max_bytes,
            shrink_every=bounds.shrink_every,
            archive=topic.archive == "required",
            without_groups=bounds.without_groups,
            limit=PAGE,
            expected=self._groups.get(stream[0], []),
        )

    def _record_reply(
        self,
        stream: TopicPartition | Assignment,
        reply: Reply | RedisResponseError,
        refusals: Refusals,
    ) -> bool:
        """Record a reply. Return True if the stream has more to trim now."""
        if isinstance(reply, RedisResponseError):
            refusals.accept(reply)
            return False
        if reply.word != "OK":
            self._log_refused(stream, reply)
            return False
        trimmed = Trimmed.parse(reply)
        if not isinstance(stream, Assignment):
            self._refused.discard(stream)
            self._held.pop(stream, None)
            if trimmed.held:
                self._held[stream] = trimmed.holder, unix_ms(trimmed.held)
            if trimmed.removed:
                self._view.count("trimmed", (stream[0], str(stream[1])), trimmed.removed)
        return trimmed.more

    def _log_refused(self, stream: TopicPartition | Assignment, reply: Reply) -> None:
        if (
            isinstance(stream, Assignment)
            or stream in self._refused
            or reply.word != "MISSING_GROUP"
        ):
            return
        self._refused.add(stream)
        logs.event(
            "trim.refused",
            logging.WARNING,
            topic=stream[0],
            partition=stream[1],
            group=reply.values[0].decode(),
        )
