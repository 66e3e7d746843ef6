"""`on_error = "block"`: a message that has failed is run again in place; nothing gets past it.

While it waits, its state byte is WAITING, as before its first run: a process that dies meanwhile
has nobody to blame, and no limit of a run counts the wait. How often it has failed, and when it is
due, is written into Redis first: the next owner begins with this message, waits for what is left
and goes on counting.
"""

from __future__ import annotations

from streamqd.idle_reason import Wait
from streamqd.message import Message
from streamqd.scoreboard import WAITING, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.verdicts import RunAgain


class BlockedOrder:
    """Each message runs until it is done or dead; those behind it wait."""

    def __init__(self, context: WorkerContext, quarantine: Quarantine) -> None:
        self._slot = context.slot
        self._channel = context.channel
        self._settler = context.settler
        self._quarantine = quarantine
        self._place = b""  # of the message that runs
        self.kept: tuple[FetchedEntry, float] | None = None  # and its wait

    def admitted(self, _messages: list[Message], _start: int) -> int:
        """How many new messages may run one after the other: none, for each may have to wait."""
        return 0

    def admits(self, entry: FetchedEntry) -> bool:
        """Wait until a message that has failed before is due. Then it may run."""
        self._place, self.kept = entry.place, None
        if (left := entry.due_ns - now_ns()) > 0:
            self._wait(left / 1e9)
        return True

    def keep(self, entry: FetchedEntry, again: RunAgain) -> None:
        """Let a message whose run has failed wait in its place."""
        self._slot.states[entry.index] = WAITING
        self.kept = entry, again.delay
        entry.keep(again.spent)
        if again.spent:
            now = now_ns()
            due = now + int(again.delay * 1e9)
            self._settler.note(entry.place, entry.message.failures_in_place, due, now)

    def next_run(self) -> FetchedEntry:
        """Wait until the entry that was kept is due, and return it."""
        assert self.kept is not None
        (entry, seconds), self.kept = self.kept, None
        self._wait(seconds)
        return entry

    def _wait(self, seconds: float) -> None:
        self._settler.flush()
        self._quarantine.nothing_runs()
        waits = self._slot.waits
        waits.begin(Wait.BLOCKED, now_ns() + int(seconds * 1e9))
        self._channel.sleep(seconds, self._slot.unfinished)
        waits.end()
        self._quarantine.run_again(self._place)
