"""The effective settings of topics: those in the configuration file override those in Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from streamqd import config
from streamqd.config import Topic
from streamqd.errors import StreamqdError
from streamqd.store import topics
from streamqd.store.store import Store

REFRESH_SECONDS = 30.0
TOPICS_MAX = 128  # largest number of topics that are read at a time


class Topics:
    """Keeps the effective settings of topics up to date.

    The settings in Redis are read again periodically, for a limited number of topics at a time.
    """

    def __init__(self, store: Store, configured: Mapping[str, Topic]) -> None:
        self._store = store
        self._configured = configured
        self._known: dict[str, tuple[Topic, int]] = {}  # settings and number of partitions
        self._read: dict[str, float] = {}  # monotonic time at which each topic was last read
        self.error: StreamqdError | None = None  # last error if a topic could not be read

    def refresh(self, names: Iterable[str]) -> None:
        """Read the topics that were not read within REFRESH_SECONDS, but no more than TOPICS_MAX.

        Topics that were never read come first, and then those that were read longest ago. If a
        topic cannot be read, its last settings are kept, and `error` is set.
        """
        now = time.monotonic()
        due = sorted(
            (self._read.get(name, 0.0), name)
            for name in {*names}
            if now - self._read.get(name, -REFRESH_SECONDS) >= REFRESH_SECONDS
        )[:TOPICS_MAX]
        if not due:
            return
        self.error = None
        wanted = [name for _, name in due]
        for name, found in zip(wanted, topics.metas(self._store, wanted), strict=True):
            if isinstance(found, StreamqdError):
                self.error = found
                continue
            self._read[name] = now
            configured = self._configured.get(name, Topic())
            if found is None:
                self._known[name] = configured, 0
            else:
                self._known[name] = config.effective(configured, found.settings), found.partitions

    def get(self, name: str) -> Topic | None:
        """Return the effective settings of a topic, or None if they are unknown.

        As long as they are unknown, the caller must not remove any entry of the topic.
        """
        return self._known[name][0] if name in self._known else None

    def partitions(self, name: str) -> int:
        """Return the registered number of partitions, or 0 if it is unknown."""
        return self._known[name][1] if name in self._known else 0
