"""The effective settings of topics: settings in the file override those registered in Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from streamqd import config
from streamqd.config import Topic
from streamqd.errors import StreamqdError
from streamqd.store import topics
from streamqd.store.store import Store

REFRESH_SECONDS = 30.0
TOPICS_MAX = 128  # read at a time


class Topics:
    """Reads registered settings periodically, for a bounded number of topics at a time."""

    def __init__(self, store: Store, stated: Mapping[str, Topic]) -> None:
        self._store = store
        self._stated = stated
        self._known: dict[str, tuple[Topic, int]] = {}  # settings and number of partitions
        self._read: dict[str, float] = {}  # time of the last read of each topic
        self.trouble: StreamqdError | None = None  # error of the last topic that could not be read

    def refresh(self, names: Iterable[str]) -> None:
        """Read the topics that were never read, then those whose last read is oldest."""
        now = time.monotonic()
        due = sorted(
            (self._read.get(name, 0.0), name)
            for name in {*names}
            if now - self._read.get(name, -REFRESH_SECONDS) >= REFRESH_SECONDS
        )[:TOPICS_MAX]
        if not due:
            return
        self.trouble = None
        wanted = [name for _, name in due]
        for name, found in zip(wanted, topics.metas(self._store, wanted), strict=True):
            if isinstance(found, StreamqdError):
                self.trouble = found
                continue
            self._read[name] = now
            stated = self._stated.get(name, Topic())
            if found is None:
                self._known[name] = stated, 0
            else:
                self._known[name] = config.effective(stated, found.settings), found.partitions

    def get(self, name: str) -> Topic | None:
        """Return the effective settings. While unknown (None), no entry may be removed."""
        return self._known[name][0] if name in self._known else None

    def partitions(self, name: str) -> int:
        """Return the registered number of partitions, 0 if the topic does not exist."""
        return self._known[name][1] if name in self._known else 0
