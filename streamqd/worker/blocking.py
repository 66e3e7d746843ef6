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
from streamqd.worker.runs import RELEASE_SECONDS, Runner
from streamqd.worker.settler import place_of

# In solo mode this is marked while nothing runs. No entry has this id, so nobody is suspected.
NOBODY = b"m:0-0"


class BlockingRunner(Runner):
    """Runs each message until it is done or dead."""

    _again: float | None = None  # seconds until the message in hand runs again
    _kept: Message | None = None  # that message, as no handler has seen it

    def handle(
        self, index: int, message: Message, retried: bool, crashes: int, charged: bool = False
    ) -> None:
        """Run the handler for the entry at `index` of the batch, again and again."""
        place = place_of(message.id_bytes, retried=retried)
        if (left := message.due_in_place_ns - now_ns()) > 0:
            self._wait(place, left / 1e9)
        while True:
            super().handle(index, message, retried, crashes, charged)
            seconds, self._again = self._again, None
            if seconds is None:
                return
            message, self._kept = self._kept or message, None
            charged = message.failures_in_place > 0
            self._wait(place, seconds)

    def _leave(self, index: int, message: Message, retried: bool) -> None:
        """Let what was released wait in its place. It costs no attempt."""
        self._keep(index, message, retried, RELEASE_SECONDS, 0)

    def _keep(self, index: int, message: Message, retried: bool, delay: float, spent: int) -> None:
        self.slot.states[index] = WAITING
        self._again, self._kept = delay, message
        if spent:
            message.failures_in_place += spent
            place = place_of(message.id_bytes, retried=retried)
            now = now_ns()
            self.settler.note(place, message.failures_in_place, now + int(delay * 1e9), now)

    def _wait(self, place: bytes, seconds: float) -> None:
        self.settler.flush()
        if self.mark:
            self.mark(NOBODY)
        waits = IdleReason(self.slot.words)
        waits.begin(Wait.BLOCKED, now_ns() + int(seconds * 1e9))
        self.gate.sleep(seconds, self.slot.unfinished)
        waits.end()
        if self.mark:
            self.mark(place)
