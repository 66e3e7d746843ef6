"""`on_error = "hold-key"`: a failed message delays the other messages with its key, and no others.

Held messages stay pending, and this process keeps them in memory. They do not become waiting
retries, so that the messages of a key stay in order. The failure count and the due time of a key's
first message are written to Redis, so that a new owner waits only for the remaining time. A message
without a key is retried as with `on_error = "requeue"`.
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
    """The keys whose first message waits for another run, with their later messages.

    While the first message of a key runs again, it stays in the queue, so that the later messages
    keep waiting. It is removed when it has finished. The caller chooses the clock for all times.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Kept]] = {}
        self._due: dict[Hashable, float] = {}  # only contains keys whose first message waits
        # The heap may also contain due times that no longer apply.
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

        It is either a new entry, or the first one of its key after another failed run.
        """
        queue = self._queues.setdefault(key, deque())
        if queue:
            self._count(queue.popleft(), -1)
        self._count(entry, 1)
        queue.appendleft(entry)
        self._wait(key, due)

    def append(self, key: Hashable, entry: Kept) -> None:
        """Append an entry to the queue of its key, which is held."""
        self._queues[key].append(entry)
        self._count(entry, 1)

    # --- take and remove ---

    def next_due(self) -> float | None:
        """Return the earliest due time of a waiting key, or None if no key waits."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due:
                return due
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> Hashable | None:
        """Return a key that is due, or None if there is none.

        The key no longer waits for a due time, but it is still held.
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
        """Make a key due if it still has entries after a run, or release it otherwise.

        This does nothing if the key is waiting for its due time.
        """
        if key in self._due:
            return
        if self._queues[key]:
            self._wait(key, now)
        else:
            del self._queues[key]

    def restart(self, now: float, busy: Collection[Hashable] = ()) -> None:
        """Make the keys due that were taken but whose runs have not started.

        `busy` contains the keys whose messages are running, which are left unchanged.
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
    """The held keys of one worker. The executors call these methods before and after each run:

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
        """Return how many of the new messages from index `start` on may run one after another."""
        blocker = self._blocker
        if blocker.keys:
            for position in range(start, len(messages)):
                if messages[position].key in blocker:
                    return position - start
        return len(messages) - start

    def may_run(self, entry: FetchedEntry, *, queued: bool = False) -> bool:
        """Return True if a message may run now. Otherwise, it is held with its key.

        `queued` is true if another message with the key is running or waiting for a lane.
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
        """True while only one message may run at a time, because each run needs its own mark."""
        return self._quarantine.is_open

    def mark_for_rerun(self, entry: FetchedEntry) -> None:
        """Wait for a turn for a message that will run in a lane, and write its mark.

        Raises Stop, Fenced, RedisUnavailableError, RedisResponseError. After an error, call
        `restart`, because the message has not started.
        """
        self._quarantine.begin_rerun(entry.place)

    # --- after a run ---

    def keep(self, entry: FetchedEntry, followers: Iterable[FetchedEntry] = ()) -> None:
        """Hold a failed message until it is due, together with the later messages of its key."""
        self._blocker.hold(entry.key, entry, entry.due_ns)
        for other in followers:
            self._blocker.append(entry.key, other)
        self._remove_from_batch(entry, *followers)

    def forget(self, entry: FetchedEntry) -> None:
        """Remove a message that was handled or dead-lettered, if it is the first of a held key."""
        if self._blocker.first(entry.key) is entry:
            self._blocker.remove_first(entry.key)

    def is_done(self, entry: FetchedEntry) -> bool:
        """Return True if a message needs no further run, or False if it waits for another one.

        If it needs no further run and is the first message of a held key, remove it from the key.
        """
        if self._blocker.is_waiting(entry.key):
            return False
        self.forget(entry)
        return True

    def reschedule(self, key: bytes | None) -> None:
        """Make a taken key due after its messages have run, or release it if none is left."""
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
        """Return how many more entries may be fetched from each stream.

        `queued` is the number of entries that wait for a lane. They count too, because they would
        be held if a message with their key failed.
        """
        return (self._consumer.held_max - self._blocker.entries - queued) // 2

    def is_full(self, queued: int = 0) -> bool:
        """Return True if no more entries may be fetched, because too many are held or queued.

        This also publishes in the slot whether the held entries alone are too many.
        """
        blocker, consumer = self._blocker, self._consumer
        full = blocker.entries >= consumer.held_max or blocker.size >= consumer.prefetch_bytes
        report_full(self._slot.waits, (blocker.next_due() or 0) if full else None)
        return full or blocker.entries + queued >= consumer.held_max

    def restart(self, running: Iterable[FetchedEntry] = ()) -> None:
        """Make the keys due whose entries were taken but have not started."""
        self._blocker.restart(now_ns(), {entry.key for entry in running})
        self._report()

    # --- due entries ---

    def take(self, longest: int) -> list[FetchedEntry]:
        """Take a due key and return up to `longest` of its messages, or [] if no key is due."""
        key = self._blocker.take(now_ns())
        return [] if key is None else self._blocker.first_entries(key, longest)

    def next_due(self) -> int | None:
        """Return the earliest due time of a waiting key (`now_ns`), or None if no key waits."""
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
    """Publish in the slot that no entries are read before a held key is due at `due_ns`.

    If `due_ns` is None, this state is withdrawn. If the slot already shows another reason for a
    wait, that reason is kept, because it delays held entries too.
    """
    kind = waits.read().kind
    if due_ns is not None and kind is Wait.NOTHING:
        waits.begin(Wait.FULL, int(due_ns))
    elif due_ns is None and kind is Wait.FULL:
        waits.end()
