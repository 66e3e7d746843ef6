"""`on_error = "hold-key"`: a failed message delays all messages of its key, and no others.

Held messages stay pending, and in the memory of this process. They do not become waiting retries,
so the messages of a key stay in order. The failure count and due time of a key's first message are
written to Redis, so a new owner waits only for the remaining time. A message without a key is
retried as with `on_error = "requeue"`.
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
    """Keys whose first message waits for a retry, with their later messages.

    While the first message runs again, it stays here, so later messages of its key wait. It is
    removed when it has finished. All times come from one clock, which the caller chooses.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Kept]] = {}
        self._due: dict[Hashable, float] = {}  # due times, only of keys whose first message waits
        # May contain due times that no longer apply.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._pushed = 0
        self.entries = 0
        self.size = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._queues

    def __iter__(self) -> Iterator[Kept]:
        """Yield all entries, key by key, each in its order."""
        for queue in self._queues.values():
            yield from queue

    @property
    def keys(self) -> int:
        """The number of held keys."""
        return len(self._queues)

    # --- add ---

    def hold(self, key: Hashable, entry: Kept, due: float) -> None:
        """Hold an entry until it is due: a new one, or the first of its key after another run."""
        queue = self._queues.setdefault(key, deque())
        if queue:
            self._count(queue.popleft(), -1)
        self._count(entry, 1)
        queue.appendleft(entry)
        self._wait(key, due)

    def append(self, key: Hashable, entry: Kept) -> None:
        """Append an entry to the queue of its held key."""
        self._queues[key].append(entry)
        self._count(entry, 1)

    # --- take and remove ---

    def next_due(self) -> float | None:
        """Return the due time of the next key, None if no key waits."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due:
                return due
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> Hashable | None:
        """Return a due key, None if there is none. The key no longer waits, but is still held."""
        due = self.next_due()
        if due is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key

    def first_entries(self, key: Hashable, longest: int) -> list[Kept]:
        """Return the first entries of a key, at most `longest` entries."""
        queue = self._queues[key]
        return [queue[index] for index in range(min(longest, len(queue)))]

    def first(self, key: Hashable) -> Kept | None:
        """Return the first entry of a key, None if it has no entry."""
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def is_waiting(self, key: Hashable) -> bool:
        """Return True if the first entry of a held key waits for its due time."""
        return key in self._due

    def remove_first(self, key: Hashable) -> None:
        """Remove the first entry of a key after it finished, successfully or not."""
        self._count(self._queues[key].popleft(), -1)

    def reschedule(self, key: Hashable, now: float) -> None:
        """After a run, make the key due. If it has no more entries, release it."""
        if key in self._due:
            return
        if self._queues[key]:
            self._wait(key, now)
        else:
            del self._queues[key]

    def restart(self, now: float, busy: Collection[Hashable] = ()) -> None:
        """Make the keys due that were taken and whose runs did not start.

        `busy` keys are running.
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
    """The held keys of one worker. Each executor consults it before a run and after the run.

    | Entry       | Before the run           | After a failed run              | After any     |
    | serial, new | `count_free`, `may_run`  | `keep` if it waits, or `forget` | -             |
    | serial, due | `take`, `may_run`        | the same                        | `reschedule`  |
    | lanes, new  | `may_run` with `queued`  | `keep` if it waits              | `finish_runs` |
    | lanes, due  | `take`, `mark_for_rerun` | the same                        | `finish_runs` |

    While entries are held, they are in no batch, so a crash is never charged to them.
    """

    def __init__(self, context: WorkerContext, quarantine: Quarantine) -> None:
        self._slot = context.slot
        self._consumer = context.consumer
        self._quarantine = quarantine
        self._blocker: KeyBlocker[FetchedEntry] = KeyBlocker()

    # --- before a run ---

    def count_free(self, messages: list[Message], start: int) -> int:
        """Return how many new messages, from `start` on, may run one after the other."""
        blocker = self._blocker
        if blocker.keys:
            for position in range(start, len(messages)):
                if messages[position].key in blocker:
                    return position - start
        return len(messages) - start

    def may_run(self, entry: FetchedEntry, *, queued: bool = False) -> bool:
        """Return True if a message may run now. Otherwise it waits with its key.

        `queued`: another message of the key waits for a lane or is running.
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
        """True while each run needs its own mark, so only one message may run at a time."""
        return self._quarantine.is_open

    def mark_for_rerun(self, entry: FetchedEntry) -> None:
        """Wait for the turn of a message that has a lane, and write its mark before it starts.

        Raises Stop, Fenced, RedisUnavailableError, RedisResponseError. After an error, the message
        has not started: call `restart`.
        """
        self._quarantine.begin_rerun(entry.place)

    # --- after a run ---

    def keep(self, entry: FetchedEntry, followers: Iterable[FetchedEntry] = ()) -> None:
        """Hold a failed message until it is due, and the later messages of its key."""
        self._blocker.hold(entry.key, entry, entry.due_ns)
        for other in followers:
            self._blocker.append(entry.key, other)
        self._remove_from_batch(entry, *followers)

    def forget(self, entry: FetchedEntry) -> None:
        """Remove a finished message, successful or not, if it was held."""
        if self._blocker.first(entry.key) is entry:
            self._blocker.remove_first(entry.key)

    def is_done(self, entry: FetchedEntry) -> bool:
        """Remove the first message of a held key after its run. Return False if it waits again."""
        if self._blocker.is_waiting(entry.key):
            return False
        self.forget(entry)
        return True

    def reschedule(self, key: bytes | None) -> None:
        """Reschedule or release a taken key after its messages have run."""
        self._blocker.reschedule(key, now_ns())
        self._report()
        self._quarantine.clear_mark_if_idle()

    def finish_runs(self, entries: Iterable[FetchedEntry]) -> None:
        """Remove or reschedule the messages of concurrent runs that belong to held keys."""
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
        """Return how many more entries of each stream may be fetched.

        `queued` is the number of entries that wait for a lane. If their key fails, they are held
        too.
        """
        return (self._consumer.held_max - self._blocker.entries - queued) // 2

    def is_full(self, queued: int = 0) -> bool:
        """Return True if too many entries are held or queued to fetch more."""
        blocker, consumer = self._blocker, self._consumer
        full = blocker.entries >= consumer.held_max or blocker.size >= consumer.prefetch_bytes
        report_full(self._slot.waits, (blocker.next_due() or 0) if full else None)
        return full or blocker.entries + queued >= consumer.held_max

    def restart(self, running: Iterable[FetchedEntry] = ()) -> None:
        """Make all keys due whose entries were taken but did not start."""
        self._blocker.restart(now_ns(), {entry.key for entry in running})
        self._report()

    # --- due entries ---

    def take(self, longest: int) -> list[FetchedEntry]:
        """Take a due key and return its first messages, [] if no key is due."""
        key = self._blocker.take(now_ns())
        return [] if key is None else self._blocker.first_entries(key, longest)

    def next_due(self) -> int | None:
        """Return the due time of the next key (`now_ns`), None if no key waits."""
        due = self._blocker.next_due()
        return None if due is None else int(due)

    # --- reports ---

    def _remove_from_batch(self, *entries: FetchedEntry) -> None:
        for entry in entries:
            self._slot.states[entry.index] = CLEARED
        self._report()

    def _report(self) -> None:
        """Show the held entries in the slot."""
        self._slot.waits.hold(self._blocker.entries, self._blocker.keys)


def report_full(waits: IdleReason, due_ns: float | None) -> None:
    """Publish in the slot that no entry is read until a held key is due. None ends this state.

    A different reason for waiting stays published, because it delays held entries too.
    """
    kind = waits.read().kind
    if due_ns is not None and kind is Wait.NOTHING:
        waits.begin(Wait.FULL, int(due_ns))
    elif due_ns is None and kind is Wait.FULL:
        waits.end()
