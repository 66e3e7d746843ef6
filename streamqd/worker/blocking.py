"""`on_error = "block"`: a failed message runs again in place, ahead of all later messages.

While it waits, its state byte is WAITING, as before its first run. Time limits therefore do not
count the wait, and if the process exits during the wait, no message is charged. The failure count
and the due time are written to Redis before the wait. The next owner starts with this message,
waits for the remaining time and continues the count.
"""

from __future__ import annotations

from streamqd.idle_reason import Wait
from streamqd.message import Message
from streamqd.scoreboard import WAITING, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.quarantine import Quarantine


class BlockedPartition:
    """Each message runs until it is handled or dead-lettered. Later messages wait."""

    def __init__(self, context: WorkerContext, quarantine: Quarantine) -> None:
        self._slot = context.slot
        self._channel = context.channel
        self._settler = context.settler
        self._quarantine = quarantine

    def count_free(self, _messages: list[Message], _start: int) -> int:
        """Return 0, because each message may have to wait."""
        return 0

    def may_run(self, entry: FetchedEntry) -> bool:
        """Wait until a message that has failed before is due. Then it may run."""
        if entry.due_ns:
            self._wait(entry)
        return True

    def keep(self, entry: FetchedEntry) -> None:
        """Make a failed message wait until it is admitted again."""
        self._slot.states[entry.index] = WAITING

    def forget(self, _entry: FetchedEntry) -> None:
        """Do nothing, because nothing is stored for a message here."""

    def _wait(self, entry: FetchedEntry) -> None:
        self._settler.flush()
        self._quarantine.clear_mark_if_idle()
        # Check even if the message is due: one that always fails immediately must not delay a stop.
        self._channel.check(self._slot.unfinished)
        waits = self._slot.waits
        waits.begin(Wait.BLOCKED, entry.due_ns)
        self._channel.sleep((entry.due_ns - now_ns()) / 1e9, self._slot.unfinished)
        waits.end()
        self._quarantine.begin_rerun(entry.place)
