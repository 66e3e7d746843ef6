"""`on_error = "hold-key"`: a failed message delays the other messages with its key, and no others.

Messages that have to wait stay pending in Redis, and the worker holds them in memory. They are not
moved to the waiting retries, because the messages of a key must stay in order. The failure count
and the due time of a key's first message are written to Redis, so that a new owner waits only for
the remaining time. A message without a key is retried as with `on_error = "requeue"`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from streamqd.idle_reason import IdleReason, Wait
from streamqd.message import Message
from streamqd.scoreboard import CLEARED, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.quarantine import Quarantine


class HasSize(Protocol):
    """An entry with an approximate size in bytes."""

    @property
    def size(self) -> int: ...


Kept = TypeVar("Kept", bound=HasSize)


class KeyBlocker(Generic[Kept]):
    """Keeps a queue of entries for each held key, and the time at which its first entry is due.

    A key is held after its first message has failed, until no entry of the key is left. While the
    first message runs again, it stays in the queue, so that the later ones keep waiting. It is
    removed when it has finished. The caller may use any clock, if it is the same for all times.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Kept]] = {}
        self._due: dict[Hashable, float] = {}  # only contains keys whose first message waits
        # The heap also contains due times that no longer apply. They are skipped, because they
        # differ from the one in `_due`.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._pushed = 0
        self.entries = 0
        self.size = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._queues

    def __iter__(self) -> Iterator[Kept]:
        """Yield all entries, key by key. The entries of a key are in order."""
        for queue in self._queues.values():
            yield from queue

    @property
    def keys(self) -> int:
        """The number of held keys."""
        return len(self._queues)

    # --- add ---

    def hold(self, key: Hashable, entry: Kept, due: float) -> None:
        """Hold an entry until it is due.

        If its key is already held, the entry replaces the first one of the key, which must be the
        same message before its run.
        """
        queue = self._queues.setdefault(key, deque())
        if queue:
            self._count(queue.popleft(), -1)
        self._count(entry, 1)
        queue.appendleft(entry)
        self._wait(key, due)

    def append(self, key: Hashable, entry: Kept) -> None:
        """Append an entry to the queue of its key, which must be held already."""
        self._queues[key].append(entry)
        self._count(entry, 1)

    # --- take and remove ---

    def next_due(self) -> float | None:
        """Return the earliest due time of all waiting keys, or None if no key is waiting."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due:
                return due
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> Hashable | None:
        """Return a key that is due, or None if there is none.

        The key stays held, but it is not returned again before `hold`, `reschedule` or `restart`.
        """
        due = self.next_due()
        if due is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key

    def first_entries(self, key: Hashable, longest: int) -> list[Kept]:
        """Return up to this many of the key's first entries."""
        queue = self._queues[key]
        return [queue[index] for index in range(min(longest, len(queue)))]

    def first(self, key: Hashable) -> Kept | None:
        """Return the first entry of a key, or None if the key has no entries."""
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def is_waiting(self, key: Hashable) -> bool:
        """Return True if the first entry of a held key waits for its due time."""
        return key in self._due

    def remove_first(self, key: Hashable) -> None:
        """Remove the first entry of a key, because it was handled or dead-lettered."""
        self._count(self._queues[key].popleft(), -1)

    def reschedule(self, key: Hashable, now: float) -> None:
        """After a run, make the key due if it still has entries, or release it if it has none.

        If its first message has failed again, the key is already waiting, and nothing changes.
        """
        if key in self._due:
            return
        if self._queues[key]:
            self._wait(key, now)
        else:
            del self._queues[key]

    def restart(self, now: float, busy: Collection[Hashable] = ()) -> None:
        """Make all keys due that were taken, because their runs will not start now.

        `busy` contains the keys whose messages are running. They are left unchanged.
        """
        for key in list(self._queues):
            if key not in self._due and key not in busy:
                self.reschedule(key, now)

    def _wait(self, key: Hashable, due: float) -> None:
        self._due[key] = due
        self._pushed += 1
        heapq.heappush(self._heap, (due, self._pushed, key))

    def _count(self, entry: Kept, by: int) -> None:
        self.entries += by
        self.size += by * entry.size


class HeldKeys:
    """The held keys of one worker. The executors call these methods before and after each run.

    A new entry comes from a read or a listing. A due entry was held until now.

    | Entry       | Before the run           | After a failed run              | After any     |
    | serial, new | `count_free`, `may_run`  | `keep` if it waits, or `forget` | -             |
    | serial, due | `take`, `may_run`        | the same                        | `reschedule`  |
    | lanes, new  | `may_run` with `queued`  | `keep` if it waits              | `finish_runs` |
    | lanes, due  | `take`, `mark_for_rerun` | the same                        | `finish_runs` |

    Held entries are not in the slot's batch, so no crash is charged to them.
    """

    def __init__(self, context: WorkerContext, quarantine: Quarantine) -> None:
        self._slot = context.slot
        self._consumer = context.consumer
        self._quarantine = quarantine
        self._blocker: KeyBlocker[FetchedEntry] = KeyBlocker()

    # --- before a run ---

    def count_free(self, messages: list[Message], start: int) -> int:
        """Return how many of the new messages may run one after another, starting at `start`.

        The first message whose key is held must wait, and so must the messages after it.
        """
        blocker = self._blocker
        if blocker.keys:
            for position in range(start, len(messages)):
                if messages[position].key in blocker:
                    return position - start
        return len(messages) - start

    def may_run(self, entry: FetchedEntry, *, queued: bool = False) -> bool:
        """Return True if a message may run now. Otherwise, hold it with its key.

        `queued` is true if another message with the same key is running or waiting for a lane.
        """
        key, blocker = entry.key, self._blocker
        if key is None:
            return True
        if key not in blocker:
            if queued or entry.due_ns <= now_ns():
                return True
            self.keep(entry)
        elif blocker.first(key) is not entry:
            blocker.append(key, entry)
            self._remove_from_batch(entry)
        elif not blocker.is_waiting(key):
            self._quarantine.begin_rerun(entry.place)
            return True
        self._quarantine.clear_mark_if_idle()
        return False

    @property
    def one_by_one(self) -> bool:
        """True while only one message may run at a time, because each run is marked in Redis."""
        return self._quarantine.is_open

    def mark_for_rerun(self, entry: FetchedEntry) -> None:
        """In quarantine, wait for a turn and mark a due message that will run in a lane.

        Raises the errors of `Quarantine.begin`. In that case, call `restart`, because the message
        was taken but has not started.
        """
        self._quarantine.begin_rerun(entry.place)

    # --- after a run ---

    def keep(self, entry: FetchedEntry, followers: Iterable[FetchedEntry] = ()) -> None:
        """Hold a failed message until it is due. `followers` are later messages with its key."""
        self._blocker.hold(entry.key, entry, entry.due_ns)
        for other in followers:
            self._blocker.append(entry.key, other)
        self._remove_from_batch(entry, *followers)

    def forget(self, entry: FetchedEntry) -> None:
        """Remove a message that needs no further run from its key, if it is the key's first one."""
        if self._blocker.first(entry.key) is entry:
            self._blocker.remove_first(entry.key)

    def is_done(self, entry: FetchedEntry) -> bool:
        """Return False if a message is waiting for another run.

        Otherwise, `forget` it and return True.
        """
        if self._blocker.is_waiting(entry.key):
            return False
        self.forget(entry)
        return True

    def reschedule(self, key: bytes | None) -> None:
        """After messages of a due key have run, make it due again, or release it if it is empty."""
        self._blocker.reschedule(key, now_ns())
        self._report()
        self._quarantine.clear_mark_if_idle()

    def finish_runs(self, entries: Iterable[FetchedEntry]) -> None:
        """Update the held keys after concurrent runs of their messages have finished."""
        held = False
        for entry in entries:
            if entry.key in self._blocker:
                held = True
                self.is_done(entry)
                self._blocker.reschedule(entry.key, now_ns())
        self._report()
        if held:
            self._quarantine.clear_mark_if_idle()  # last, because it may fail

    # --- held entries ---

    @property
    def keys(self) -> int:
        """The number of held keys."""
        return self._blocker.keys

    @property
    def places(self) -> list[bytes]:
        """The places of the held entries."""
        return [entry.place for entry in self._blocker]

    def room(self, queued: int = 0) -> int:
        """Return how many more entries may be fetched from each of the two streams.

        `queued` is the number of entries that wait for a lane. They also use up room, because they
        would have to be held if a message with the same key failed.
        """
        return (self._consumer.held_max - self._blocker.entries - queued) // 2

    def is_full(self, queued: int = 0) -> bool:
        """Return True if no more entries may be fetched, because too many are held or queued.

        If the held entries alone are too many, this is also shown in the slot.
        """
        blocker, consumer = self._blocker, self._consumer
        full = blocker.entries >= consumer.held_max or blocker.size >= consumer.prefetch_bytes
        report_full(self._slot.waits, (blocker.next_due() or 0) if full else None)
        return full or blocker.entries + queued >= consumer.held_max

    def restart(self, running: Iterable[FetchedEntry] = ()) -> None:
        """Make all keys due that were taken, except those of messages that are running."""
        self._blocker.restart(now_ns(), {entry.key for entry in running})
        self._report()

    # --- due entries ---

    def take(self, longest: int) -> list[FetchedEntry]:
        """Take a due key and return up to `longest` of its first messages, or [] if none is due."""
        key = self._blocker.take(now_ns())
        return [] if key is None else self._blocker.first_entries(key, longest)

    def next_due(self) -> int | None:
        """Return the earliest due time (`now_ns`) of all waiting keys, or None without any."""
        due = self._blocker.next_due()
        return None if due is None else int(due)

    # --- reports ---

    def _remove_from_batch(self, *entries: FetchedEntry) -> None:
        for entry in entries:
            self._slot.states[entry.index] = CLEARED
        self._report()

    def _report(self) -> None:
        """Publish the number of held entries and keys in the slot."""
        self._slot.waits.hold(self._blocker.entries, self._blocker.keys)


def report_full(waits: IdleReason, due_ns: float | None) -> None:
    """Show in the slot that no entries are read before a held key is due at `due_ns`.

    If `due_ns` is None, no longer show this. If the slot shows another reason for a wait, that
    reason stays, because it also delays the held entries.
    """
    kind = waits.read().kind
    if due_ns is not None and kind is Wait.NOTHING:
        waits.begin(Wait.FULL, int(due_ns))
    elif due_ns is None and kind is Wait.FULL:
        waits.end()
