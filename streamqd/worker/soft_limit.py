"""The soft time limit: when the supervisor sends SIGUSR1, SoftTimeout is raised in the handler.

Only user code is interrupted, and never the worker's own steps. User code runs in the handler, and
in the inspection of its error, for example when the text of the error is computed.
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
    """Interrupts the runs of one worker that exceed the soft time limit."""

    def __init__(self, slot: WorkerSlot, seconds: float | None) -> None:
        self.slot = slot
        self._seconds = seconds
        # True while user code is running that may be interrupted.
        self.in_handler = False
        self.inspecting = False  # True while an error is inspected, which runs in the main thread
        # The function that interrupts a run in another thread, or None if the handler runs in the
        # main thread.
        self.interrupt: Callable[[BaseException], None] | None = None

    def listen(self, on_signal: Callable[[int, object], None] | None = None) -> None:
        """Start to handle the supervisor's signal.

        By default, the signal interrupts the current run. If `on_signal` is given, it is called
        instead, with the arguments of a signal handler.
        """
        signal.signal(signal.SIGUSR1, on_signal or self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        # The run that the supervisor wants to interrupt may already be over. So check that the
        # current run is the right one.
        if self.in_handler and self.slot.soft_kill_seq == self.slot.words[WORD_RUN_SEQ]:
            # The caller clears this in a `finally` block. But if the exception is raised at the
            # first instruction of that block, the rest of it is skipped, so also clear it here.
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
        """Return `work(*given)`, which may be interrupted by the run's time limit.

        This is used to inspect the result of a run, which may call user code. If the limit is
        reached, return the SoftTimeout instead. `work` must not change any state of the worker,
        because it can be interrupted anywhere.
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
