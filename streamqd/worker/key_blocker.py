"""Keys whose first message waits for its next run, and the messages behind it. No I/O.

The first message of a held key stays here while it runs again, and goes when it has ended: so
whatever happens in between, nothing of its key gets past it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class KeyedEntry(Protocol):
    """What is held: its size in bytes, about."""

    @property
    def size(self) -> int: ...


Entry = TypeVar("Entry", bound=KeyedEntry)


class KeyBlocker(Generic[Entry]):
    """The held keys. Times are numbers of one clock, passed in."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Entry]] = {}
        self._due: dict[Hashable, float] = {}  # of the keys whose first message waits
        self._heap: list[tuple[float, int, Hashable]] = []  # may hold times that are over
        self._pushed = 0
        self.entries = 0
        self.size = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._queues

    def __iter__(self) -> Iterator[Entry]:
        """All entries, key by key, each in its order."""
        for queue in self._queues.values():
            yield from queue

    @property
    def keys(self) -> int:
        """How many keys are held."""
        return len(self._queues)

    # --- coming ---

    def hold(self, key: Hashable, entry: Entry, due: float) -> None:
        """Let an entry wait until it is due: a new one, or the first of its key once more."""
        queue = self._queues.setdefault(key, deque())
        if queue:
            self._count(queue.popleft(), -1)
        self._count(entry, 1)
        queue.appendleft(entry)
        self._wait(key, due)

    def behind(self, key: Hashable, entry: Entry) -> None:
        """Put an entry behind those of its key, which is held."""
        self._queues[key].append(entry)
        self._count(entry, 1)

    # --- going ---

    def next_due(self) -> float | None:
        """When the next key is due, None when none waits."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due:
                return due
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> Hashable | None:
        """Return a key that is due, None when none is. It waits no more, but stays held."""
        due = self.next_due()
        if due is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key

    def line(self, key: Hashable, longest: int) -> list[Entry]:
        """The first entries of a key, at most `count`."""
        queue = self._queues[key]
        return [queue[index] for index in range(min(longest, len(queue)))]

    def waits(self, key: Hashable) -> bool:
        """Whether the first entry of a held key waits for its time."""
        return key in self._due

    def done(self, key: Hashable) -> None:
        """The first entry of a key has ended, well or not: it is held no more."""
        self._count(self._queues[key].popleft(), -1)

    def go_on(self, key: Hashable, now: float) -> None:
        """After its first entries have run: free a key with nothing behind, else it is due."""
        if key in self._due:
            return
        if self._queues[key]:
            self._wait(key, now)
        else:
            del self._queues[key]

    def restart(self, now: float, busy: Collection[Hashable] = ()) -> None:
        """Let all keys that neither wait nor run be due: what was about to run has not begun."""
        for key in list(self._queues):
            if key not in self._due and key not in busy:
                self.go_on(key, now)

    def _wait(self, key: Hashable, due: float) -> None:
        self._due[key] = due
        self._pushed += 1
        heapq.heappush(self._heap, (due, self._pushed, key))

    def _count(self, entry: Entry, by: int) -> None:
        self.entries += by
        self.size += by * entry.size
