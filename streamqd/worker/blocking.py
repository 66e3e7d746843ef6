"""`on_error = "block"`: a failed message runs again in its place, ahead of all later messages.

While the message waits for its next run, its state byte is WAITING, as before its first run. So the
wait does not count towards time limits, and if the process exits during the wait, no message is
charged. The failure count and the due time are written to Redis before the wait. If another owner
takes over, it starts with this message, waits only for the remaining time, and continues the count.
"""

from __future__ import annotations

from streamqd.idle_reason import Wait
from streamqd.message import Message
from streamqd.scoreboard import WAITING, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.quarantine import Quarantine


class BlockedPartition:
    """Makes later messages wait until a failed message is handled or dead-lettered."""

    def __init__(self, context: WorkerContext, quarantine: Quarantine) -> None:
        self._slot = context.slot
        self._channel = context.channel
        self._settler = context.settler
        self._quarantine = quarantine

    def count_free(self, _messages: list[Message], _start: int) -> int:
        """Return 0, because each message may have to run again before the next one may start."""
        return 0

    def may_run(self, entry: FetchedEntry) -> bool:
        """Return True. If the message has failed before, first wait until it is due again."""
        if entry.due_ns:
            self._wait(entry)
        return True

    def keep(self, entry: FetchedEntry) -> None:
        """Mark a failed message as waiting. The next call of `may_run` waits until it is due."""
        self._slot.states[entry.index] = WAITING

    def forget(self, _entry: FetchedEntry) -> None:
        """Do nothing, because this class stores nothing about a message."""

    def _wait(self, entry: FetchedEntry) -> None:
        self._settler.flush()
        self._quarantine.clear_mark_if_idle()
        # Check for a command to stop even if the message is already due. Otherwise, a message that
        # always fails immediately could keep the worker from stopping.
        self._channel.check(self._slot.unfinished)
        waits = self._slot.waits
        waits.begin(Wait.BLOCKED, entry.due_ns)
        self._channel.sleep((entry.due_ns - now_ns()) / 1e9, self._slot.unfinished)
        waits.end()
        self._quarantine.begin_rerun(entry.place)
