"""The stop: finish what runs, release, leave; or be cut short. And the exit codes."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

from streamqd import logs
from streamqd.notify import Notifier
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.plan import Action, KillWorker, ReleaseLease, StopWorker

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

    notifier: Notifier
    begun: bool = False
    deadline: float = 0.0
    kill_reason: str = ""  # why all workers are killed, '' while they may finish
    code: int = EXIT_DRAINED  # when nothing goes wrong on the way
    interrupts: int = 0

    def begin(self, timeout: float) -> None:
        """Stop fetching everywhere; workers finish their current message."""
        self.begun = True
        self.deadline = time.monotonic() + timeout
        logs.event("drain.begun", timeout=timeout)
        self.notifier.stopping("draining")
        self.notifier.extend_timeout(timeout + RELEASE_SECONDS)

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
        """Kill every worker; unfinished messages stay pending, and the partitions are released."""
        if not self.begun:
            self.begin(timeout)
        self.kill_reason = self.kill_reason or reason

    def wishes(
        self, partitions: Collection[OwnedPartition], now: float, retiring: int
    ) -> list[Action]:
        """Stop, or kill, every worker, and release what has none. `retiring` processes end."""
        if not self.begun:
            return []
        working = [each for each in partitions if each.child is not None]
        if (working or retiring) and now > self.deadline and not self.kill_reason:
            logs.event("drain.deadline", logging.WARNING)
            self.kill_all("deadline", 0.0)
        actions: list[Action] = []
        for each in partitions:
            if each.releasable:
                actions.append(ReleaseLease(each.unit, "drain"))
            elif each.child is None:
                continue
            elif self.kill_reason:
                actions.append(KillWorker(each.unit, self.kill_reason))
            elif each.stop_reason != "drain":
                actions.append(StopWorker(each.unit, "drain"))
        return actions

    def exit_code(
        self, partitions: Collection[OwnedPartition], now: float, retiring: int, *, redis_ok: bool
    ) -> int | None:
        """Return the code when everything has ended, None while something is left to do."""
        if any(each.child is not None for each in partitions) or retiring:
            return None
        owed = any(each.phase is not Phase.FREE for each in partitions)
        # While Redis does not answer, waiting longer than the drain was given is of no use: the
        # leases run out by themselves.
        patient = now < self.deadline or (redis_ok and now < self.deadline + RELEASE_SECONDS)
        if owed and patient:
            return None
        if self.code == EXIT_DRAINED and (self.kill_reason or owed):
            return EXIT_DEADLINE
        return self.code
