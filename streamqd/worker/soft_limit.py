"""The soft time limit: the supervisor sends SIGUSR1, and the handler gets a SoftTimeout.

Only user code is interrupted: the handler, and the inspection of its error, which can run user
code too. The worker's own steps are never interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, TypeVar

from streamqd import handlers
from streamqd.scoreboard import WORD_RUN_SEQ, WorkerSlot
from streamqd.worker.forks import fork_role

Found = TypeVar("Found")


class SoftLimit:
    """The limit of one worker's runs."""

    def __init__(self, slot: WorkerSlot, seconds: float | None) -> None:
        self.slot = slot
        self._seconds = seconds
        # Interruptible code runs now: the handler, or the inspection of its error.
        self.in_handler = False
        self.inspecting = False  # that code is the inspection, which runs in the main thread
        # Interrupts a run outside the main thread.
        self.interrupt: Callable[[BaseException], None] | None = None

    def listen(self, on_signal: Callable[[int, object], None] | None = None) -> None:
        """On the supervisor's signal, interrupt the run in the main thread or call `on_signal`."""
        signal.signal(signal.SIGUSR1, on_signal or self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        # By now, another run or no run may be active, so compare the run that the supervisor chose.
        if self.in_handler and self.slot.soft_kill_seq == self.slot.words[WORD_RUN_SEQ]:
            # Clear this here too: an exception raised at the first instruction of `finally` skips
            # the rest of that block.
            self.in_handler = False
            if self.interrupt is None or self.inspecting:
                raise self.error()
            self.interrupt(self.error())

    def error(self) -> handlers.SoftTimeout:
        """Return the exception of a run that is over its soft limit."""
        return handlers.SoftTimeout(
            f"the handler ran longer than its time limit of {self._seconds:g} s"
        )

    def run_bounded(self, work: Callable[..., Found], *given: Any) -> Found | handlers.SoftTimeout:
        """Inspect a run's result under the time limit, because the inspection may call user code.

        Returns the exception of the soft limit if the limit is reached. `work` must not change any
        state, because it can be interrupted anywhere.
        """
        fork_role.end_child()  # a forked child that raised or returned
        try:
            self.inspecting = self.in_handler = True
            try:
                return work(*given)
            finally:
                self.inspecting = self.in_handler = False
        except handlers.SoftTimeout as limit:
            self.inspecting = False
            return limit
