"""`on_error = "hold-key"`: a message that has failed waits with all of its key; other keys pass.

Held messages stay pending and in this process; nothing goes through the delayed set, so nothing of
a key can overtake. How often the first of a key has failed, and when it is due, is written into
Redis: a new owner waits for what is left. A message without a key has no order to keep, and is set
aside as with requeue.

`HeldKeys` is the order where messages run one after the other. Where several run at once it is
`HoldingOrdering`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from streamqd.idle_reason import IdleReason, Wait
from streamqd.message import Message
from streamqd.scoreboard import SETTLED, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.ordering import KeyBlocker
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.settler import Settler
from streamqd.worker.verdicts import RunAgain

DUE_MAX = 128  # held messages that come into hand at once, and of one key


class HeldKeys:
    """Runs messages of keys that are not held, and holds those of the others."""

    kept = None  # what has failed waits with its key, and the others may run

    def __init__(self, context: WorkerContext, quarantine: Quarantine) -> None:
        self._slot = context.slot
        self._settler = context.settler
        self._consumer = context.consumer
        self._quarantine = quarantine
        self._waits = context.slot.waits
        self._holds: KeyBlocker[FetchedEntry] = KeyBlocker()
        self._begun: FetchedEntry | None = None  # the first of a held key, which runs now

    # --- the order of runs ---

    def admitted(self, messages: list[Message], start: int) -> int:
        """How many new messages, from `start` on, may run one after the other."""
        holds = self._holds
        if holds.keys:
            for position in range(start, len(messages)):
                if messages[position].key in holds:
                    return position - start
        return len(messages) - start

    def admits(self, entry: FetchedEntry) -> bool:
        """Whether the message may run; else it waits with its key from now on."""
        holds, key = self._holds, entry.key
        if key is None or entry is self._begun:
            return True
        if key in holds:
            self._slot.states[entry.index] = SETTLED
            holds.behind(key, entry)
            self.report()
            self._quarantine.nothing_runs()
        elif (left := entry.due_ns - now_ns()) > 0:
            self.keep(entry, RunAgain(left / 1e9, 0))
        else:
            return True
        return False

    def keep(self, entry: FetchedEntry, again: RunAgain) -> None:
        """Let a message whose run has failed wait with its key."""
        self._slot.states[entry.index] = SETTLED
        now = now_ns()
        due = now + int(again.delay * 1e9)
        self._holds.hold(entry.key, entry, due)
        entry.keep(again.spent)
        if again.spent:
            self._settler.note(entry.place, entry.message.failures_in_place, due, now)
        self.report()
        self._quarantine.nothing_runs()

    # --- what is held ---

    @property
    def places(self) -> Iterable[bytes]:
        """The places of what is held."""
        return (kept.place for kept in self._holds)

    @property
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""
        return (self._consumer.held_max - self._holds.entries) // 2

    def is_full(self) -> bool:
        """Whether nothing more may come into hand: what comes could be of held keys."""
        holds, consumer = self._holds, self._consumer
        full = holds.entries >= consumer.held_max or holds.size >= consumer.prefetch_bytes
        report_full(self._waits, (holds.next_due() or 0) if full else None)
        return full

    def report(self) -> None:
        """Show in the slot how much is held, and the settler how much stays pending."""
        report_held(self._waits, self._settler, self._holds)

    def restart(self) -> None:
        """Let all that was about to run be due: it has not begun."""
        self._holds.restart(now_ns())

    # --- what is due ---

    def next_due(self) -> float | None:
        """When the next key is due, None when none waits."""
        return self._holds.next_due()

    def take_due(self) -> list[tuple[Hashable, list[FetchedEntry]]]:
        """Take keys that are due, each with its first messages, not too many at once.

        What is due again meanwhile waits until something was read: it must not starve other keys.
        """
        lines: list[tuple[Hashable, list[FetchedEntry]]] = []
        count = 0
        while count < DUE_MAX and (key := self._holds.take(now_ns())) is not None:
            line = self._holds.line(key, DUE_MAX)
            lines.append((key, line))
            count += len(line)
        return lines

    def begin(self, kept: FetchedEntry) -> None:
        """The first message of a key that was taken runs now."""
        self._quarantine.run_again(kept.place)
        self._begun = kept

    def ended(self, key: Hashable) -> bool:
        """The run of that message is over. Returns whether the next one of its key may run."""
        self._begun = None
        if self._holds.waits(key):
            return False
        self._holds.done(key)
        self._quarantine.nothing_runs()
        return True

    def go_on(self, key: Hashable) -> None:
        """All that may run now of a key that was taken has run."""
        self._holds.go_on(key, now_ns())


def report_held(waits: IdleReason, settler: Settler, holds: KeyBlocker[Any]) -> None:
    """Show in the slot how much is held, and tell the settler how much stays pending."""
    settler.kept = holds.entries
    waits.hold(holds.entries, holds.keys)


def report_full(waits: IdleReason, due_ns: float | None) -> None:
    """Show that nothing is read until a held key is due; None: that this is over.

    Whatever else keeps the worker from beginning is shown first: it lets the held ones wait, too.
    """
    kind = waits.read().kind
    if due_ns is not None and kind is Wait.NOTHING:
        waits.begin(Wait.FULL, int(due_ns))
    elif due_ns is None and kind is Wait.FULL:
        waits.end()
