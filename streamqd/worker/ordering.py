"""Decide in which order fetched entries start if several run at a time. This does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from streamqd.worker.entry import FetchedEntry


class HasKey(Protocol):
    """An entry that may have a key."""

    @property
    def key(self) -> bytes | None: ...


KeyedEntry = TypeVar("KeyedEntry", bound=HasKey)


class Ordering(Protocol[KeyedEntry]):
    """The queue of entries that wait for a lane of the concurrent executor.

    `take` removes entries that may start. They count as taken until `mark_finished`, and may make
    other entries with the same key wait.
    """

    @property
    def waiting(self) -> int:
        """The number of waiting entries."""

    @property
    def ready(self) -> int:
        """The number of waiting entries that could start now."""

    def add(self, entries: Iterable[KeyedEntry]) -> None:
        """Append entries, in the order in which they were read."""

    def take(self, count: int) -> list[KeyedEntry]:
        """Remove and return up to `count` of the oldest entries that may start."""

    def mark_finished(self, entries: Iterable[KeyedEntry]) -> None:
        """Record that taken entries have finished, even if they have failed."""

    def is_key_taken(self, key: bytes | None) -> bool:
        """Return True if a new entry with this key would have to wait for another entry."""

    def take_waiting(self, entry: KeyedEntry) -> list[KeyedEntry]:
        """Remove and return the entries that wait for `entry`, which has the same key."""

    def drop(self) -> list[KeyedEntry]:
        """Remove and return all entries that were not taken yet."""


class Unordered(Generic[KeyedEntry]):
    """An order in which every entry may start at any time."""

    def __init__(self) -> None:
        self._ready: deque[KeyedEntry] = deque()

    @property
    def waiting(self) -> int:
        return len(self._ready)

    ready = waiting

    def add(self, entries: Iterable[KeyedEntry]) -> None:
        self._ready.extend(entries)

    def take(self, count: int) -> list[KeyedEntry]:
        ready = self._ready
        return [ready.popleft() for _ in range(min(count, len(ready)))]

    def mark_finished(self, _entries: Iterable[KeyedEntry]) -> None:
        """Do nothing, because no entry waits for another."""

    def is_key_taken(self, _key: bytes | None) -> bool:
        return False

    def take_waiting(self, _entry: KeyedEntry) -> list[KeyedEntry]:
        return []

    def drop(self) -> list[KeyedEntry]:
        dropped = list(self._ready)
        self._ready.clear()
        return dropped


class ByKey(Generic[KeyedEntry]):
    """An order in which only one entry of each key may run. Entries without a key never wait."""

    def __init__(self) -> None:
        self._ready: deque[KeyedEntry] = deque()
        # Maps each key that has a ready or taken entry to the entries that wait for that entry.
        # Most keys have none, which is stored as None.
        self._queued: dict[bytes, deque[KeyedEntry] | None] = {}
        self.waiting = 0

    @property
    def ready(self) -> int:
        return len(self._ready)

    def add(self, entries: Iterable[KeyedEntry]) -> None:
        ready, queued = self._ready, self._queued
        before, later = len(ready), 0
        for entry in entries:
            key = entry.key
            if key is None:
                ready.append(entry)
            elif key not in queued:
                queued[key] = None
                ready.append(entry)
            else:
                later += 1
                if (line := queued[key]) is None:
                    queued[key] = deque([entry])
                else:
                    line.append(entry)
        self.waiting += len(ready) - before + later

    def take(self, count: int) -> list[KeyedEntry]:
        ready = self._ready
        taken = [ready.popleft() for _ in range(min(count, len(ready)))]
        self.waiting -= len(taken)
        return taken

    def mark_finished(self, entries: Iterable[KeyedEntry]) -> None:
        ready, queued = self._ready, self._queued
        for entry in entries:
            key = entry.key
            if key is not None and (line := queued.pop(key)):
                ready.append(line.popleft())
                queued[key] = line or None

    def is_key_taken(self, key: bytes | None) -> bool:
        return key in self._queued

    def take_waiting(self, entry: KeyedEntry) -> list[KeyedEntry]:
        key = entry.key
        if key is None:
            return []
        queued = list(self._queued[key] or ())
        self._queued[key] = None
        self.waiting -= len(queued)
        return queued

    def drop(self) -> list[KeyedEntry]:
        dropped = list(self._ready)
        for entry in self._ready:
            if entry.key is not None:
                dropped += self._queued.pop(entry.key) or ()
        for key, queued in self._queued.items():
            dropped += queued or ()
            self._queued[key] = None
        self._ready.clear()
        self.waiting = 0
        return dropped


# The class for each value of the setting `order`. With "partition", there is only one lane, so no
# class is needed.
ORDERINGS: dict[str, Callable[[], Ordering[FetchedEntry]]] = {"key": ByKey, "none": Unordered}
