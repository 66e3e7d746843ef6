"""`on_error = "hold-key"`: a message that has failed waits with all of its key; other keys pass.

Held messages stay pending and in this process; nothing goes through the delayed set, so nothing of
a key can overtake. How often the first of a key has failed, and when it is due, is written into
Redis: a new owner waits for what is left. A message without a key has no order to keep, and is set
aside as with requeue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from streamqd.idle_reason import IdleReason, Wait
from streamqd.message import Message
from streamqd.scoreboard import SETTLED, WorkerSlot, now_ns
from streamqd.worker.blocking import NOBODY
from streamqd.worker.key_blocker import KeyBlocker
from streamqd.worker.runs import RELEASE_SECONDS, Runner
from streamqd.worker.settler import Settler, place_of


class HeldMessage:
    """A message that is held, and what a run of it needs."""

    def __init__(self, place: bytes, message: Message, *, retried: bool, crashes: int) -> None:
        self.place = place
        self.message = message
        self.retried = retried
        self.crashes = crashes
        self.size = sum(len(part) for pair in message.fields.items() for part in pair)


class Shelf(Protocol):
    """A runner that holds keys, as those who wait for it see it."""

    slot: WorkerSlot
    settler: Settler

    @property
    def holds(self) -> KeyBlocker[Any]: ...


def tell_held(runner: Shelf) -> None:
    """Say in the slot how much is held, and to the settler how much stays pending."""
    holds = runner.holds
    runner.settler.kept = holds.entries
    IdleReason(runner.slot.words).hold(holds.entries, holds.keys)


def tell_full(waits: IdleReason, due_ns: float | None) -> None:
    """Say that nothing is read until a held key is due; None: that this is over.

    Whatever else keeps the worker from beginning is said first: it lets the held ones wait, too.
    """
    kind = waits.read().kind
    if due_ns is not None and kind is Wait.NOTHING:
        waits.begin(Wait.FULL, int(due_ns))
    elif due_ns is None and kind is Wait.FULL:
        waits.end()


class ReleasesByKey(Runner):
    """Runs messages that wait with their key when they are released."""

    def _leave(self, index: int, message: Message, retried: bool) -> None:
        """Let what was released wait with its key. It costs no attempt."""
        if message.key is None:
            super()._leave(index, message, retried)
        else:
            self._keep(index, message, retried, RELEASE_SECONDS, 0)


class HoldingRunner(ReleasesByKey):
    """Runs messages of keys that are not held, and holds those of the others."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.holds: KeyBlocker[HeldMessage] = KeyBlocker()
        self._crashes = 0  # charged to the entry that runs

    def handle(
        self, index: int, message: Message, retried: bool, crashes: int, charged: bool = False
    ) -> None:
        """Run the handler for the entry at `index` of the batch, unless its key is held."""
        key = message.key if self.holds.keys or message.due_in_place_ns else None
        if key is None or key not in self.holds:
            self._crashes = crashes
            if key is None or (left := message.due_in_place_ns - now_ns()) <= 0:
                super().handle(index, message, retried, crashes, charged)
            else:
                self._keep(index, message, retried, left / 1e9, 0)
            return
        place = place_of(message.id_bytes, retried=retried)
        self.slot.states[index] = SETTLED
        self.holds.behind(key, HeldMessage(place, message, retried=retried, crashes=crashes))
        self._told()

    def handle_kept(self, index: int, kept: HeldMessage) -> bool:
        """Run the first message of a held key. Returns whether its key may go on."""
        key, message = kept.message.key, kept.message
        self._crashes = kept.crashes
        if self.mark:
            self.settler.flush()
            self.mark(kept.place)
        charged = message.failures_in_place > 0
        super().handle(index, message, kept.retried, kept.crashes, charged)
        if self.holds.waits(key):
            return False
        self.holds.done(key)
        if self.mark:
            self.mark(NOBODY)
        return True

    def places(self) -> Iterable[bytes]:
        """The places of what is held."""
        return (kept.place for kept in self.holds)

    def _keep(self, index: int, message: Message, retried: bool, delay: float, spent: int) -> None:
        self.slot.states[index] = SETTLED
        place = place_of(message.id_bytes, retried=retried)
        kept = HeldMessage(place, message, retried=retried, crashes=self._crashes)
        now = now_ns()
        due = now + int(delay * 1e9)
        self.holds.hold(message.key, kept, due)
        if spent:
            message.failures_in_place += spent
            self.settler.note(place, message.failures_in_place, due, now)
        self._told()

    def _told(self) -> None:
        tell_held(self)
        if self.mark:
            self.mark(NOBODY)
