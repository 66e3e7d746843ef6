"""Which of the entries in hand may begin. No I/O, and the only place that knows of keys."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Keyed(Protocol):
    """What is put in order: its key, None when it has none."""

    @property
    def key(self) -> bytes | None: ...


Entry = TypeVar("Entry", bound=Keyed)


class Ordering(Generic[Entry]):
    """Entries that wait, in the order in which they came.

    With keys, of those with the same key one at a time is given out: the next one when `ended` is
    told of the one before. What has no key waits for nothing. Without keys nothing waits.
    """

    def __init__(self, *, by_key: bool) -> None:
        self._by_key = by_key
        self._ready: deque[Entry] = deque()
        self._behind: dict[bytes, deque[Entry]] = {}  # of each key that is ready or given out
        self.waiting = 0

    def add(self, entry: Entry) -> None:
        """Put an entry behind those that are there."""
        self.waiting += 1
        key = entry.key if self._by_key else None
        if key is None:
            self._ready.append(entry)
        elif key in self._behind:
            self._behind[key].append(entry)
        else:
            self._behind[key] = deque()
            self._ready.append(entry)

    def knows(self, key: bytes) -> bool:
        """Whether an entry of a key waits, or was given out and has not ended."""
        return key in self._behind

    @property
    def ready(self) -> int:
        """How many could begin now."""
        return len(self._ready)

    def next(self) -> Entry | None:
        """Give out the oldest entry that may begin, None when there is none."""
        if not self._ready:
            return None
        self.waiting -= 1
        return self._ready.popleft()

    def ended(self, entry: Entry) -> None:
        """The run of an entry that was given out is over, however it ended."""
        key = entry.key if self._by_key else None
        if key is None:
            return
        behind = self._behind[key]
        if behind:
            self._ready.append(behind.popleft())
        else:
            del self._behind[key]

    def surrender(self, entry: Entry) -> list[Entry]:
        """Forget and return those that wait behind an entry that was given out."""
        key = entry.key if self._by_key else None
        if key is None:
            return []
        behind = list(self._behind[key])
        self._behind[key].clear()
        self.waiting -= len(behind)
        return behind

    def drop(self) -> list[Entry]:
        """Forget and return all that wait. What was given out keeps its key until it has ended."""
        dropped = list(self._ready)
        for entry in self._ready:
            key = entry.key if self._by_key else None
            if key is not None:
                dropped += self._behind.pop(key)
        for behind in self._behind.values():
            dropped += behind
            behind.clear()
        self._ready.clear()
        self.waiting = 0
        return dropped
