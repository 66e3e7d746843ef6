"""The drain of the daemon, the check whether a burst is complete, and the exit codes.

A drain finishes the running messages, releases the leases and leaves the fleet.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from streamqd import logs
from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError
from streamqd.model import Assignment
from streamqd.notify import Notifier
from streamqd.store import messages
from streamqd.store.replies import check_valid
from streamqd.store.scripts import Reply
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.plan import Action, KillWorker, ReleaseLease, StopWorker

SHORT_DRAIN_SECONDS = 5.0  # time limit for running messages after a second Ctrl-C
RELEASE_SECONDS = 5.0  # time limit for the release of leases after the deadline

CHECK_SECONDS = 0.5  # interval between two checks of a burst
# A burst is complete after this many consecutive checks have found no unsettled message. A single
# check is not enough, because it can miss a message that moves to another key during the check.
CHECKS = 2

EXIT_DRAINED = 0
EXIT_CONFIG = 3
EXIT_REDIS = 4
EXIT_DUPLICATE = 5
EXIT_DEADLINE = 6
EXIT_CRASH_LOOP = 7


@dataclass
class Drain:
    """The orderly shutdown of the daemon, from the first signal to the exit code."""

    notifier: Notifier
    begun: bool = False
    deadline: float = 0.0
    kill_reason: str = ""  # reason for killing all workers, or '' while they may finish
    code: int = EXIT_DRAINED  # exit code if the drain finishes in time
    interrupts: int = 0

    def begin(self, timeout: float) -> None:
        """Start the drain, in which all workers stop fetching and finish their current messages."""
        self.begun = True
        self.deadline = time.monotonic() + timeout
        logs.event("drain.started", timeout=timeout)
        self.notifier.stopping("draining")
        self.notifier.extend_timeout(timeout + RELEASE_SECONDS)

    def on_signal(self, number: signal.Signals, timeout: float) -> None:
        """Handle SIGTERM or SIGINT.

        The first signal starts the drain. A second SIGINT shortens the drain, and a third one kills
        all workers. A repeated SIGTERM changes nothing.
        """
        self.interrupts += number is signal.SIGINT
        if not self.begun:
            self.begin(timeout)
        elif number is signal.SIGINT and self.interrupts == 2:
            self.deadline = min(self.deadline, time.monotonic() + SHORT_DRAIN_SECONDS)
        elif number is signal.SIGINT and self.interrupts > 2:
            self.kill_all("quit", timeout)

    def kill_all(self, reason: str, timeout: float) -> None:
        """Kill all workers in the next tick, and start the drain if it has not started yet.

        Unfinished messages stay pending. `timeout` is used only if this starts the drain.
        """
        if not self.begun:
            self.begin(timeout)
        self.kill_reason = self.kill_reason or reason

    def observe(self, partitions: Collection[AssignmentState], now: float, ending: int) -> None:
        """Kill all workers if the deadline has passed.

        `ending` is the number of dismissed workers and outbox relays that have not exited yet.
        """
        working = ending or any(each.child is not None for each in partitions)
        if self.begun and working and now > self.deadline and not self.kill_reason:
            logs.event("drain.expired", logging.WARNING)
            self.kill_all("deadline", 0.0)

    def plan_actions(self, partitions: Collection[AssignmentState]) -> list[Action]:
        """Return actions that stop or kill the workers, and release partitions without a worker."""
        actions: list[Action] = []
        for each in partitions:
            if each.releasable:
                actions.append(ReleaseLease(each.assignment, "drain"))
            elif each.child is None:
                continue
            elif self.kill_reason:
                actions.append(KillWorker(each.assignment, self.kill_reason))
            elif each.stop_reason != "drain":
                actions.append(StopWorker(each.assignment, "drain"))
        return actions

    def exit_code(
        self, partitions: Collection[AssignmentState], now: float, ending: int, *, redis_ok: bool
    ) -> int | None:
        """Return the exit code, or None if the daemon must still wait before it can exit.

        It waits for processes to exit, and for leases to be released. `ending` is the number of
        dismissed workers and outbox relays that have not exited yet.
        """
        if any(each.child is not None for each in partitions) or ending:
            return None
        # If Redis refuses a release because of an invalid value, a retry would fail too, so do not
        # wait for that release. The lease expires later.
        owed = any(each.phase is not Phase.FREE and not each.is_stuck for each in partitions)
        # While Redis does not answer, do not wait beyond the deadline, because the leases expire
        # anyway.
        patient = now < self.deadline or (redis_ok and now < self.deadline + RELEASE_SECONDS)
        if owed and patient:
            return None
        if self.code == EXIT_DRAINED and (self.kill_reason or owed):
            return EXIT_DEADLINE
        return self.code


@dataclass
class BurstCheck:
    """Decides for `--burst` when all messages are settled, so that the daemon can exit.

    It checks every CHECK_SECONDS, but not while a worker is booting.
    """

    leases: LeaseManager
    _next_at: float = 0.0
    _passed: int = 0

    def result(self, now: float, partitions: Mapping[Assignment, AssignmentState]) -> int | None:
        """Return None while the burst must wait, or the number of assignments it leaves unsettled.

        The burst waits for unread, pending and delayed messages, and for retries. It does not wait
        for assignments that crash in a loop, so the result counts those of them that still have
        messages. It is 0 if all messages are settled.
        """
        if now < self._next_at or not self.leases.ok:
            return None
        self._next_at = now + CHECK_SECONDS
        broken = [
            assignment
            for assignment, partition in partitions.items()
            if partition.broken_until > now
        ]
        busy = any(each.worker and not each.is_ready for each in partitions.values())
        unsettled = None if busy else self._find_unsettled(list(partitions))
        if unsettled is None or unsettled - set(broken):
            self._passed = 0
            return None
        self._passed += 1
        return len(unsettled) if self._passed >= CHECKS else None

    def _find_unsettled(self, assignments: list[Assignment]) -> set[Assignment] | None:
        """Return the assignments with unsettled messages, or None if a call to Redis fails.

        An assignment with an invalid value in Redis counts as unsettled.
        """
        calls = [
            messages.snapshot(self.leases.keys, assignment, limit=1) for assignment in assignments
        ]
        try:
            with self.leases.client.deadline():
                replies = self.leases.link.run_each(calls)
        except RedisUnavailableError:
            return None
        unsettled = set()
        for assignment, reply in zip(assignments, replies, strict=True):
            if isinstance(reply, RedisResponseError | RedisUnavailableError):
                return None
            found = self.leases.isolate(assignment, _snapshot, reply)
            if found is None or any(
                (
                    found.unread,
                    found.pending,
                    found.waiting_retries,
                    found.retry_unread,
                    found.retry_pending,
                    found.delayed_sends,
                )
            ):
                unsettled.add(assignment)
        return unsettled


def _snapshot(reply: Reply | ContractError) -> messages.Snapshot | None:
    return messages.Snapshot.parse(check_valid(reply))
