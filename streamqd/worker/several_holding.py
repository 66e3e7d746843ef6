"""`on_error = "hold-key"` where several messages are handled at once.

A held message gives its lane and its index in the slot back, and so do those behind it. When it is
due it comes into hand again as if it had just been read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamqd.idle_reason import IdleReason
from streamqd.message import Message, remembered
from streamqd.scoreboard import SETTLED, now_ns
from streamqd.worker.blocking import NOBODY
from streamqd.worker.holding import ReleasesByKey, tell_full, tell_held
from streamqd.worker.key_blocker import KeyBlocker
from streamqd.worker.lanes import RunningMessage
from streamqd.worker.several import SeveralRunner


class HoldingSeveralRunner(ReleasesByKey, SeveralRunner):
    """Runs messages of keys that are not held, several at a time, and holds those of the others."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.holds: KeyBlocker[RunningMessage] = KeyBlocker()
        self._noting: RunningMessage | None = None  # whose verdict is being noted
        self._waits = IdleReason(self.slot.words)

    # --- what is in hand ---

    def add_all(self, entries: list[RunningMessage]) -> None:
        """Let entries wait for their turn, or for their key."""
        for entry in entries:
            self._add(entry)

    def _add(self, entry: RunningMessage) -> None:
        key, due = entry.key, entry.message.due_in_place_ns
        if key is not None and key in self.holds:
            self.holds.behind(key, entry)
        elif key is not None and due > now_ns() and not self.ordering.knows(key):
            self.holds.hold(key, entry, due)
        else:
            super().add_all([entry])
            return
        self.slot.states[entry.index] = SETTLED
        tell_held(self)
        if self.mark:
            self.mark(NOBODY)

    def forget_waiting(self) -> None:
        """Drop what has not begun, but for what is held. It stays pending."""
        super().forget_waiting()
        self.holds.restart(now_ns(), [entry.key for entry in self.running.values()])

    def places(self) -> Iterable[bytes]:
        """The places of what runs, and of what is held."""
        return [*super().places(), *(entry.place for entry in self.holds)]

    @property
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""
        return min(super().room, (self.consumer.held_max - self._may_be_held) // 2)

    @property
    def _may_be_held(self) -> int:
        # All that waits could be behind the next message that fails.
        return self.holds.entries + self.ordering.waiting

    def wants(self, _count: int) -> bool:
        """The same, but there are lanes for what is due when fewer are ready than lanes free."""
        return self.free_lanes > 0 and self.ordering.ready <= self.consumer.lanes // 2

    def is_full(self) -> bool:
        """Whether nothing more may come into hand."""
        consumer, holds = self.consumer, self.holds
        full = holds.entries >= consumer.held_max or holds.size >= consumer.prefetch_bytes
        tell_full(self._waits, (holds.next_due() or 0) if full else None)
        return full or self._may_be_held >= consumer.held_max or super().is_full()

    def patience(self, seconds: float) -> float:
        """How much of a wait of so many seconds is over before something could begin."""
        due = None if self.alone or not self._wants_due else self.holds.next_due()
        if due is not None:
            seconds = min(seconds, max(0.0, (due - now_ns()) / 1e9))
        return super().patience(seconds)

    # --- running ---

    @property
    def about_to_begin(self) -> int:
        """Nobody knows: what is due comes first."""
        return 0

    def start_ready(self) -> None:
        """Begin with as many entries as there are lanes for, also with what is due."""
        while not self.alone and self._wants_due and self.free_indexes:
            key = self.holds.take(now_ns())
            if key is None:
                break
            (entry,) = self.holds.line(key, 1)
            entry.index = self.admit(entry.place)
            entry.interrupted = False
            super().add_all([entry])
        super().start_ready()

    @property
    def _wants_due(self) -> bool:
        return self.holds.keys > 0 and self.ordering.ready < self.free_lanes

    def _note_end(self, entry: RunningMessage, error: BaseException) -> None:
        self._noting = entry
        super()._note_end(entry, error)

    def _all_over(self, entries: list[RunningMessage]) -> None:
        super()._all_over(entries)
        for entry in entries:
            key = entry.key
            if key is None or key not in self.holds:
                continue
            if self.holds.waits(key):
                if self.mark:
                    self.mark(NOBODY)  # not before: it may fail, and the run is over all the same
            else:
                self.holds.done(key)
                self.holds.go_on(key, now_ns())
                tell_held(self)

    def _keep(self, index: int, message: Message, _retried: bool, delay: float, spent: int) -> None:
        entry = self._noting
        assert entry is not None
        assert entry.key is not None
        self.slot.states[index] = SETTLED
        now = now_ns()
        due = now + int(delay * 1e9)
        self.holds.hold(entry.key, entry, due)
        for other in self.ordering.surrender(entry):
            self.slot.states[other.index] = SETTLED
            self.bytes_in_hand -= other.size
            self.holds.behind(entry.key, other)
        if spent:
            message.failures_in_place += spent
            entry.charged = True
            self.settler.note(entry.place, message.failures_in_place, due, now)
        entry.message, entry.noted = message, remembered(message)  # as no handler has seen it
        tell_held(self)
