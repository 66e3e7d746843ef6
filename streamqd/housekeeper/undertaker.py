"""Deleting dead letters that are older than their topic keeps them.

Without `dlq_retention` none ever goes by itself. The stream of dead letters is never trimmed: the
oldest are deleted one by one, a bounded number at a time.
"""

from __future__ import annotations

from collections import Counter

from streamqd import logs
from streamqd.config import Settings
from streamqd.errors import RedisRefused
from streamqd.housekeeper.batch import Refusals, run_calls
from streamqd.housekeeper.topics import Topics
from streamqd.metrics.view import View
from streamqd.store import dead
from streamqd.store.client import Link
from streamqd.store.keys import Keys
from streamqd.store.messages import ITEMS_MAX
from streamqd.store.scripts import Call

ROUNDS_MAX = 20  # scripts for one partition in one run

Place = tuple[str, int]  # topic, partition


class Undertaker:
    """Deletes expired letters of the partitions of which this instance owns anything."""

    def __init__(self, link: Link, view: View, keys: Keys, settings: Settings) -> None:
        self._link = link
        self._view = view
        self._keys = keys
        self._topics = Topics(link, keys, settings.topics)

    def run(self) -> float | None:
        """Delete a bounded number of letters; return 0 when there are more to delete at once."""
        places = {(unit.topic, unit.partition) for _, unit in self._view.owned()}
        self._topics.refresh({topic for topic, _ in places})
        waiting = sorted(place for place in places if self._kept(place[0]) is not None)
        refusals = Refusals()
        expired: Counter[str] = Counter()
        for _ in range(ROUNDS_MAX):
            if not waiting:
                break
            more = []
            replies = run_calls(self._link, [self._call(place) for place in waiting])
            for place, reply in zip(waiting, replies, strict=True):
                if isinstance(reply, RedisRefused):
                    refusals.took(reply)
                    continue
                removed = int(reply.rest[0])
                if removed:
                    self._view.count("expired", (place[0], str(place[1])), removed)
                    expired[place[0]] += removed
                if reply.rest[1]:
                    more.append(place)
            waiting = more
        for topic, count in expired.items():
            logs.event("letters.expired", topic=topic, count=count)
        refusals.tell()
        if self._topics.trouble is not None:
            raise self._topics.trouble
        return 0.0 if waiting else None

    def _kept(self, topic: str) -> float | None:
        found = self._topics.get(topic)
        return None if found is None else found.dlq_retention

    def _call(self, place: Place) -> Call:
        kept = self._kept(place[0])
        assert kept is not None
        before = f"{max(0, self._view.now_unix_ms() - round(kept * 1000))}-0"
        return dead.purge_before(self._keys, *place, before, ITEMS_MAX)
