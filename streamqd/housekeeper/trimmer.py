"""Removing what every group has acknowledged and nothing retains.

Retry streams keep nothing that is acknowledged; partitions what their topic retains.
"""

from __future__ import annotations

import logging

from streamqd import logs
from streamqd.config import Settings, Topic
from streamqd.errors import RedisRefused
from streamqd.housekeeper.batch import Refusals, run_calls
from streamqd.metrics.view import View
from streamqd.model import Unit
from streamqd.store import messages
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.messages import Trimmed
from streamqd.store.scripts import Call, Reply

PAGE = 10_000  # entries removed by one script
ROUNDS_MAX = 20  # scripts for one stream in one run

Place = tuple[str, int]  # topic, partition


class Trimmer:
    """Trims the streams of what this instance owns; the floor is found by the script."""

    def __init__(self, link: Link, view: View, keys: Keys, settings: Settings) -> None:
        self._link = link
        self._view = view
        self._keys = keys
        self._topics = settings.topics
        self._groups: dict[str, list[str]] = {}
        for consumer in settings.consumers:
            self._groups.setdefault(consumer.topic, []).append(consumer.group)
        self._refused: set[Place] = set()

    def run(self) -> float | None:
        """Trim a bounded number of entries; return 0 when there is more to trim at once."""
        waiting = self._streams()
        refusals = Refusals()
        for _ in range(ROUNDS_MAX):
            if not waiting:
                break
            replies = run_calls(self._link, [self._call(stream) for stream in waiting])
            waiting = [
                stream
                for stream, reply in zip(waiting, replies, strict=True)
                if self._book(stream, reply, refusals)
            ]
        refusals.tell()
        return 0.0 if waiting else None

    def _streams(self) -> list[Place | Unit]:
        """Partitions (as places) and retry streams (as units) that may hold something to trim."""
        owned = [unit for _, unit in self._view.owned()]
        places = sorted({(unit.topic, unit.partition) for unit in owned})
        figures = self._view.units
        return [
            *(place for place in places if self._retention_bound(place[0])),
            *(unit for unit in owned if unit in figures and figures[unit].retry.length),
        ]

    def _retention_bound(self, topic: str) -> bool:
        retention = self._topics.get(topic, Topic()).retention
        return retention.max_age is not None or retention.max_length is not None

    def _call(self, stream: Place | Unit) -> Call:
        if isinstance(stream, Unit):
            return messages.trim_retry(self._keys, stream, PAGE)
        topic, partition = stream
        retention = self._topics[topic].retention
        keep_from = "0-0"
        if retention.max_age is not None:
            keep_from = f"{max(0, self._view.now_unix_ms() - round(retention.max_age * 1000))}-0"
        return messages.trim(
            self._keys,
            topic,
            partition,
            keep_from=keep_from,
            max_length=retention.max_length,
            archive=self._topics[topic].archive == "required",
            limit=PAGE,
            expected=self._groups.get(topic, []),
        )

    def _book(self, stream: Place | Unit, reply: Reply | RedisRefused, refusals: Refusals) -> bool:
        """Note one answer; return whether there is more to trim at once."""
        if isinstance(reply, RedisRefused):
            refusals.took(reply)
            return False
        if reply.word != "OK":
            self._say_refused(stream, reply)
            return False
        removed = Trimmed.parse(reply).removed
        if not isinstance(stream, Unit):
            self._refused.discard(stream)
            if removed:
                self._view.count("trimmed", (stream[0], str(stream[1])), removed)
        # Whole nodes go, so a full page is not met to the entry.
        return removed >= PAGE // 2

    def _say_refused(self, stream: Place | Unit, reply: Reply) -> None:
        if isinstance(stream, Unit) or stream in self._refused or reply.word != "MISSING_GROUP":
            return
        self._refused.add(stream)
        logs.event(
            "trim.refused",
            logging.WARNING,
            topic=stream[0],
            partition=stream[1],
            group=reply.rest[0].decode(),
        )
