"""`on_error = "block"`: a message that has failed is run again in place; nothing gets past it.

While it waits, its state byte is WAITING, as before its first run: a process that dies meanwhile
has nobody to blame, and no limit of a run counts the wait. How often it has failed, and when it is
due, is written into Redis first: the next owner begins with this message, waits for what is left
and goes on counting.
"""

from __future__ import annotations

from streamqd.idle_reason import IdleReason, Wait
from streamqd.message import Message
from streamqd.scoreboard import WAITING, now_ns
from streamqd.store.messages import place_of
from streamqd.worker.context import WorkerContext
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
        self.kept: tuple[Message, float] | None = None  # and its wait, as no handler has seen it

    def admits(self, _index: int, message: Message, retried: bool, _crashes: int) -> bool:
        """Wait until a message that has failed before is due. Then it may run."""
        self._place, self.kept = place_of(message.id_bytes, retried=retried), None
        if (left := message.due_in_place_ns - now_ns()) > 0:
            self._wait(left / 1e9)
        return True

    def keep(
        self, index: int, message: Message, _retried: bool, _crashes: int, again: RunAgain
    ) -> None:
        """Let a message whose run has failed wait in its place."""
        self._slot.states[index] = WAITING
        self.kept = message, again.delay
        if again.spent:
            message.failures_in_place += again.spent
            now = now_ns()
            due = now + int(again.delay * 1e9)
            self._settler.note(self._place, message.failures_in_place, due, now)

    def next_run(self) -> Message:
        """Wait until the message that was kept is due, and return it."""
        assert self.kept is not None
        (message, seconds), self.kept = self.kept, None
        self._wait(seconds)
        return message

    def _wait(self, seconds: float) -> None:
        self._settler.flush()
        self._quarantine.nothing_runs()
        waits = IdleReason(self._slot.words)
        waits.begin(Wait.BLOCKED, now_ns() + int(seconds * 1e9))
        self._channel.sleep(seconds, self._slot.unfinished)
        waits.end()
        self._quarantine.run_again(self._place)
