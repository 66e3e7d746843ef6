"""The soft time limit: when the supervisor sends SIGUSR1, SoftTimeout is raised in the handler.

Only the handler and the inspection of its error are interrupted, because the inspection can run
user code too. The worker's own steps are never interrupted.
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
    """The soft limit for the runs of one worker."""

    def __init__(self, slot: WorkerSlot, seconds: float | None) -> None:
        self.slot = slot
        self._seconds = seconds
        # True while the handler or the inspection of its error runs, which may be interrupted.
        self.in_handler = False
        self.inspecting = False  # True during the inspection, which runs in the main thread
        # The function that interrupts a run outside the main thread.
        self.interrupt: Callable[[BaseException], None] | None = None

    def listen(self, on_signal: Callable[[int, object], None] | None = None) -> None:
        """Install the handler for the supervisor's signal.

        By default, the signal interrupts the current run. `on_signal` replaces this behavior.
        """
        signal.signal(signal.SIGUSR1, on_signal or self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        # By now, another run or no run may be active, so check that it is the run that the
        # supervisor chose.
        if self.in_handler and self.slot.soft_kill_seq == self.slot.words[WORD_RUN_SEQ]:
            # Clear this here too, because an exception that is raised at the first instruction of
            # `finally` skips the rest of that block.
            self.in_handler = False
            if self.interrupt is None or self.inspecting:
                raise self.error()
            self.interrupt(self.error())

    def error(self) -> handlers.SoftTimeout:
        """Return the exception for a run that has exceeded its soft limit."""
        return handlers.SoftTimeout(
            f"the handler ran longer than its time limit of {self._seconds:g} s"
        )

    def run_bounded(self, work: Callable[..., Found], *given: Any) -> Found | handlers.SoftTimeout:
        """Inspect the result of a run under the time limit, because this may call user code.

        If the limit is reached, return its exception instead. `work` must not change any state of
        the worker, because it can be interrupted anywhere.
        """
        fork_role.end_child()  # if a forked child raised or returned
        try:
            self.inspecting = self.in_handler = True
            try:
                return work(*given)
            finally:
                self.inspecting = self.in_handler = False
        except handlers.SoftTimeout as limit:
            self.inspecting = False
            return limit
