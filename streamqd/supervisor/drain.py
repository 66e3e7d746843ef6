"""The stop: finish what runs, release, leave; or be cut short. And the exit codes."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from streamqd import logs
from streamqd.model import Unit
from streamqd.notify import Notifier
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.worker_pool import WorkerPool

SHORT_DRAIN_SECONDS = 5.0  # what a second Ctrl-C leaves to the messages that run
RELEASE_SECONDS = 5.0  # how long leases are tried to be released when Redis does not answer

EXIT_DRAINED = 0
EXIT_CONFIG = 3
EXIT_REDIS = 4
EXIT_TWIN = 5
EXIT_DEADLINE = 6
EXIT_CRASH_LOOP = 7


@dataclass
class Drain:
    """One drain, from the first signal to the exit code."""

    holdings: Mapping[Unit, OwnedPartition]
    crew: WorkerPool
    exchange: LeaseManager
    notifier: Notifier
    begun: bool = False
    deadline: float = 0.0
    cut_short: bool = False
    code: int = EXIT_DRAINED  # when nothing goes wrong on the way
    interrupts: int = 0

    def begin(self, timeout: float) -> None:
        """Stop fetching everywhere; workers finish their current message."""
        self.begun = True
        self.exchange.leaving = True
        self.exchange.beat_soon()
        self.deadline = time.monotonic() + timeout
        logs.event("drain.begun", timeout=timeout)
        self.notifier.stopping("draining")
        self.notifier.extend_timeout(timeout + RELEASE_SECONDS)
        for holding in self.holdings.values():
            if holding.child is not None:
                self.crew.stop(holding, "drain")
            else:
                holding.give_up()

    def signalled(self, number: signal.Signals, timeout: float) -> None:
        """TERM or INT: the first begins; a second INT shortens, a third kills; TERM never does."""
        self.interrupts += number is signal.SIGINT
        if not self.begun:
            self.begin(timeout)
        elif number is signal.SIGINT and self.interrupts == 2:
            self.deadline = min(self.deadline, time.monotonic() + SHORT_DRAIN_SECONDS)
        elif number is signal.SIGINT and self.interrupts > 2:
            self.kill_all("quit", timeout)

    def kill_all(self, reason: str, timeout: float) -> None:
        """Kill every worker; what was in hand stays pending and is released."""
        if not self.begun:
            self.begin(timeout)
        self.cut_short = True
        for holding in self.holdings.values():
            self.crew.kill(holding, reason)
        self.crew.kill_retired()

    def exit_code(self, now: float) -> int | None:
        """Return the code when everything has ended, None while something is left to do."""
        holdings = self.holdings.values()
        working = any(holding.child is not None for holding in holdings)
        if working or self.crew.retiring(now):
            if now > self.deadline and not self.cut_short:
                logs.event("drain.deadline", logging.WARNING)
                self.kill_all("deadline", 0.0)
            return None
        owed = any(holding.phase is not Phase.FREE for holding in holdings)
        # While Redis does not answer, waiting longer than the drain was given helps nobody: the
        # leases run out by themselves.
        patient = now < self.deadline or (
            self.exchange.ok and now < self.deadline + RELEASE_SECONDS
        )
        if owed and patient:
            return None
        if self.code == EXIT_DRAINED and (self.cut_short or owed):
            return EXIT_DEADLINE
        return self.code
