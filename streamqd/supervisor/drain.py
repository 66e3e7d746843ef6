"""The end: when a burst has settled everything, the drain, and the exit codes.

A drain finishes what runs, releases and leaves; or it is cut short.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from streamqd import logs
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.model import Unit
from streamqd.notify import Notifier
from streamqd.store import messages
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.partition import PartitionState, Phase
from streamqd.supervisor.plan import Action, KillWorker, ReleaseLease, StopWorker

SHORT_DRAIN_SECONDS = 5.0  # what a second Ctrl-C leaves to the messages that run
RELEASE_SECONDS = 5.0  # how long leases are tried to be released when Redis does not answer

CHECK_SECONDS = 0.5  # between two questions whether a burst has settled everything
CHECKS = 2  # in a row; a message may be on its way from one place to another between two looks

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

    def observe(self, partitions: Collection[PartitionState], now: float, ending: int) -> None:
        """Note whether the time is over. `ending` processes end beside the workers."""
        working = ending or any(each.child is not None for each in partitions)
        if self.begun and working and now > self.deadline and not self.kill_reason:
            logs.event("drain.deadline", logging.WARNING)
            self.kill_all("deadline", 0.0)

    def wishes(self, partitions: Collection[PartitionState]) -> list[Action]:
        """Stop, or kill, every worker, and release what has none."""
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
        self, partitions: Collection[PartitionState], now: float, ending: int, *, redis_ok: bool
    ) -> int | None:
        """Return the code when everything has ended, None while something is left to do."""
        if any(each.child is not None for each in partitions) or ending:
            return None
        # What is refused for a bad value stays refused: its lease runs out by itself.
        owed = any(each.phase is not Phase.FREE and not each.is_stuck for each in partitions)
        # While Redis does not answer, waiting longer than the drain was given is of no use: the
        # leases run out by themselves.
        patient = now < self.deadline or (redis_ok and now < self.deadline + RELEASE_SECONDS)
        if owed and patient:
            return None
        if self.code == EXIT_DRAINED and (self.kill_reason or owed):
            return EXIT_DEADLINE
        return self.code


@dataclass
class BurstCheck:
    """`--burst`: asks whether everything is settled, every half second, while no worker boots."""

    leases: LeaseManager
    _next_at: float = 0.0
    _passed: int = 0

    def verdict(self, now: float, partitions: Mapping[Unit, PartitionState]) -> int | None:
        """Tell when nothing is unread, pending, delayed or waiting for a retry any more.

        Returns the number of units that still hold messages but crash in a loop: they are not
        waited for. None while there is something to wait for.
        """
        if now < self._next_at or not self.leases.ok:
            return None
        self._next_at = now + CHECK_SECONDS
        broken = [unit for unit, partition in partitions.items() if partition.broken_until > now]
        busy = any(h.child is not None and not h.ready for h in partitions.values())
        unsettled = None if busy else self._unsettled(list(partitions))
        if unsettled is None or unsettled - set(broken):
            self._passed = 0
            return None
        self._passed += 1
        return len(unsettled) if self._passed >= CHECKS else None

    def _unsettled(self, units: list[Unit]) -> set[Unit] | None:
        """Return the units that are not settled, None when Redis does not say it now."""
        calls = [messages.snapshot(self.leases.keys, unit, limit=1) for unit in units]
        try:
            with self.leases.client.deadline():
                replies = self.leases.link.run_many(calls)
        except RedisUnavailable:
            return None
        unsettled = set()
        for unit, reply in zip(units, replies, strict=True):
            if isinstance(reply, RedisRefused):
                return None
            found = self.leases.isolate(unit, messages.Snapshot.parse, reply)
            if found is None or any(
                (
                    found.unread,
                    found.pending,
                    found.delayed,
                    found.retry_unread,
                    found.retry_pending,
                    found.scheduled,
                )
            ):
                unsettled.add(unit)
        return unsettled
