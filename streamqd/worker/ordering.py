"""Which of the fetched entries may begin, where several run at once. No I/O.

`Ordering` lets all begin, or of each key one at a time. `KeyBlocker` keeps what has failed, with
all of its key; `HoldingOrdering` puts both together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
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
        # What waits behind each key that is ready or given out. Mostly nothing does.
        self._behind: dict[bytes, deque[Entry] | None] = {}
        self.waiting = 0

    def add(self, entries: Iterable[Entry]) -> None:
        """Put entries behind those that are there, in their order."""
        ready, behind = self._ready, self._behind
        before, later = len(ready), 0
        for entry in entries:
            key = entry.key if self._by_key else None
            if key is None:
                ready.append(entry)
            elif key not in behind:
                behind[key] = None
                ready.append(entry)
            else:
                later += 1
                if (line := behind[key]) is None:
                    behind[key] = deque([entry])
                else:
                    line.append(entry)
        self.waiting += len(ready) - before + later

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

    def take(self, count: int) -> list[Entry]:
        """Give out the oldest entries that may begin, at most `count`."""
        ready = self._ready
        taken = [ready.popleft() for _ in range(min(count, len(ready)))]
        self.waiting -= len(taken)
        return taken

    def ended(self, entries: Iterable[Entry]) -> None:
        """The runs of entries that were given out are over, however they ended."""
        if not self._by_key:
            return
        ready, behind = self._ready, self._behind
        for entry in entries:
            key = entry.key
            if key is not None and (line := behind.pop(key)):
                ready.append(line.popleft())
                behind[key] = line or None

    def surrender(self, entry: Entry) -> list[Entry]:
        """Forget and return those that wait behind an entry that was given out."""
        key = entry.key if self._by_key else None
        if key is None:
            return []
        behind = list(self._behind[key] or ())
        self._behind[key] = None
        self.waiting -= len(behind)
        return behind

    def drop(self) -> list[Entry]:
        """Forget and return all that wait. What was given out keeps its key until it has ended."""
        dropped = list(self._ready)
        for entry in self._ready:
            key = entry.key if self._by_key else None
            if key is not None:
                dropped += self._behind.pop(key) or ()
        for key, behind in self._behind.items():
            dropped += behind or ()
            self._behind[key] = None
        self._ready.clear()
        self.waiting = 0
        return dropped


class Sized(Protocol):
    """What is kept: its size in bytes, about."""

    @property
    def size(self) -> int: ...


Kept = TypeVar("Kept", bound=Sized)


class KeyBlocker(Generic[Kept]):
    """Keys whose first message waits for its next run, and the messages behind it.

    That message stays here while it runs again, and goes when it has ended: so whatever happens in
    between, nothing of its key gets past it. Times are numbers of one clock, passed in.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Kept]] = {}
        self._due: dict[Hashable, float] = {}  # of the keys whose first message waits
        self._heap: list[tuple[float, int, Hashable]] = []  # may hold times that are over
        self._pushed = 0
        self.entries = 0
        self.size = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._queues

    def __iter__(self) -> Iterator[Kept]:
        """All entries, key by key, each in its order."""
        for queue in self._queues.values():
            yield from queue

    @property
    def keys(self) -> int:
        """How many keys are held."""
        return len(self._queues)

    # --- coming ---

    def hold(self, key: Hashable, entry: Kept, due: float) -> None:
        """Let an entry wait until it is due: a new one, or the first of its key once more."""
        queue = self._queues.setdefault(key, deque())
        if queue:
            self._count(queue.popleft(), -1)
        self._count(entry, 1)
        queue.appendleft(entry)
        self._wait(key, due)

    def behind(self, key: Hashable, entry: Kept) -> None:
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

    def line(self, key: Hashable, longest: int) -> list[Kept]:
        """The first entries of a key, at most `longest`."""
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

    def _count(self, entry: Kept, by: int) -> None:
        self.entries += by
        self.size += by * entry.size


class Holdable(Keyed, Sized, Protocol):
    """What may be held: also when it is due, if it has failed before."""

    @property
    def due_ns(self) -> int: ...


Held = TypeVar("Held", bound=Holdable)


class HoldingOrdering(Generic[Held]):
    """What has failed waits beside an ordering by key, and all of its key behind it."""

    def __init__(self, ordering: Ordering[Held]) -> None:
        self._ordering = ordering
        self.holds: KeyBlocker[Held] = KeyBlocker()

    def add(self, entries: Iterable[Held], now: float) -> list[Held]:
        """Put entries into the ordering, but those of held keys. Returns those that are held."""
        return [entry for entry in entries if self._is_held(entry, now)]

    def _is_held(self, entry: Held, now: float) -> bool:
        """Put an entry where it belongs. Whether it is held there."""
        key = entry.key
        if key is not None and key in self.holds:
            self.holds.behind(key, entry)
        elif key is not None and entry.due_ns > now and not self._ordering.knows(key):
            self.holds.hold(key, entry, entry.due_ns)
        else:
            self._ordering.add([entry])
            return False
        return True

    def keep(self, entry: Held, due: float) -> list[Held]:
        """Hold an entry that was given out. Returns those behind it, which are now held too."""
        assert entry.key is not None
        self.holds.hold(entry.key, entry, due)
        behind = self._ordering.surrender(entry)
        for other in behind:
            self.holds.behind(entry.key, other)
        return behind

    def take_due(self, now: float) -> Held | None:
        """Put a held entry that is due into the ordering and return it; None when none is due."""
        key = self.holds.take(now)
        if key is None:
            return None
        (entry,) = self.holds.line(key, 1)
        self._ordering.add([entry])
        return entry

    def ended(self, entries: Iterable[Held], now: float) -> bool:
        """Entries that were given out have ended: held keys go on. Whether any entry was kept."""
        kept = False
        for entry in entries:
            key = entry.key
            if key is None or key not in self.holds:
                continue
            if self.holds.waits(key):
                kept = True
            else:
                self.holds.done(key)
                self.holds.go_on(key, now)
        return kept

    def restart(self, now: float, running: Iterable[Held]) -> None:
        """Let what was about to run be due: the ordering has dropped it."""
        self.holds.restart(now, [entry.key for entry in running])
