"""The heartbeat of a worker's event loop: a time in the slot that shows that the loop is running.

The supervisor watches it (`supervisor/loop_watch.py`). A thread of this process could not do so,
because C code that blocks the loop may hold the interpreter lock. A timer of the loop writes the
time while messages are running. So the heartbeat adds no cost per message, and does not wake an
idle worker.
"""

from __future__ import annotations

import asyncio

from streamqd.scoreboard import LOOP_HEARTBEAT_SECONDS, RUNNING, WorkerSlot, now_ns


class LoopHeartbeat:
    """The heartbeat of one loop. The main thread calls `start` and `close`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, slot: WorkerSlot, thread: int | None
    ) -> None:
        """Prepare the slot, but write no heartbeat yet. `thread` is the loop thread's native ID."""
        self._loop = loop
        self._slot: WorkerSlot | None = slot
        self._timer: asyncio.TimerHandle | None = None
        self._active = False
        slot.loop_thread = thread or 0
        slot.loop_heartbeat_ns = 0

    def start(self) -> None:
        """Start the heartbeat, unless it is already active.

        Call this after a run was marked RUNNING and before it starts.
        """
        if not self._active and self._slot is not None:
            self._active = True
            self._slot.loop_heartbeat_ns = now_ns()
            self._loop.call_soon_threadsafe(self._turn)

    def close(self) -> None:
        """Stop the heartbeat. After this call, nothing is written to the slot."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.loop_heartbeat_ns = 0

    def _turn(self) -> None:
        """Write a heartbeat and schedule the next one, or stop if no message is running.

        This runs in the loop's thread.
        """
        if self._timer is not None:
            self._timer.cancel()  # the last turn set it just when `start` scheduled this turn
            self._timer = None
        slot = self._slot
        if slot is None:
            return
        if not _runs(slot):
            slot.loop_heartbeat_ns = 0
            self._active = False
            if not _runs(slot):  # a run may have started before `_active` was cleared
                return
            self._active = True
        slot.loop_heartbeat_ns = now_ns()
        self._timer = self._loop.call_later(LOOP_HEARTBEAT_SECONDS, self._turn)


def _runs(slot: WorkerSlot) -> bool:
    return RUNNING in bytes(slot.states[: slot.in_flight])
