"""Replacing workers without a gap, one at a time: the next one is warm before the last lets go.

    request ──► standby boots ──► it is warm: the worker is told to stop ──► it is quiet:
    new token ──► the standby gets it, and works ──► the next request

The order matters: a token for the new one before the old one is quiet would run the message in
hand twice. A standby that dies changes nothing for the worker that goes on; too many deaths in a
row let it rest. One at a time, so that memory is doubled for one partition only; but of those that
are quiet and take long to end (`on_stop`) there may be some, and no partition waits for its own.
"""

from __future__ import annotations

import logging
import time
from random import random
from typing import TYPE_CHECKING

from streamqd import logs
from streamqd.policy import restart
from streamqd.process import Child
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.worker_pool import RETIRE_SECONDS

if TYPE_CHECKING:
    from streamqd.supervisor.supervisor import Supervisor

LEAVING = ("drain", "shed", "lost")
SPENT = "max_messages"  # here the worker stops by itself, and not before it has to
SPENT_PATIENCE_SECONDS = 10.0  # how long a standby waits for that
RETIRED_MAX = 4  # processes that may be ending when the next replacement begins
QUIET_SECONDS = 1.0  # what the end of a worker may take before its partition goes on without it


class RollingReplacement:
    """The replacements that are wanted, and the one under way."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._wanted: dict[int, tuple[OwnedPartition, str]] = {}  # by slot, in order
        self._now: OwnedPartition | None = None
        self._reason = ""
        self._old_pid = 0
        self._stopped = False  # the old worker was told to let go
        self._born = self._warm_at = 0.0  # of the standby
        self._deaths: list[restart.WorkerExit] = []
        self._retry_at = 0.0
        self._resting: dict[int, float] = {}  # slot -> until when nothing replaces its worker
        self.failed: dict[int, str] = {}  # slots whose last replacement was given up, and why

    def request(self, holding: OwnedPartition, reason: str) -> bool:
        """Want a worker replaced. False: it is wanted already, or rests, and all stays as it is."""
        index = holding.slot.index
        if reason == "reload":
            self._resting.pop(index, None)
            self.failed.pop(index, None)
        elif self.wants(holding) or index in self._resting:
            return False
        self._wanted[index] = (holding, reason)
        return True

    def wants(self, holding: OwnedPartition, reason: str = "") -> bool:
        """Whether the worker is to be replaced, or is being replaced; for any reason, or this."""
        found = [why for each, why in self._wanted.values() if each is holding]
        found += [self._reason] if holding is self._now else []
        return reason in found if reason else bool(found)

    def renew(self) -> None:
        """Forget what was prepared with the settings and the code of before."""
        if self._now is not None and not self._stopped:
            self._drop()
        self._wanted.clear()

    @property
    def children(self) -> list[Child]:
        """The processes that belong to replacements: standbys and retired ones."""
        retired = [one.child for one in self._supervisor.crew.retired]
        standby = self._now.standby if self._now is not None else None
        return [*retired, standby] if standby is not None else retired

    # --- one tick ---

    def tick(self, now: float) -> None:
        """Go on with the one under way, or begin the next. Never blocks."""
        self._supervisor.crew.tend_retired(now)
        for each in self._supervisor.holdings.values():
            self._watch_end(each, now)
        for index in [index for index, until in self._resting.items() if until <= now]:
            del self._resting[index]
        holding = self._now
        if holding is None:
            self._begin(now)
            return
        if self._is_over(holding, now):
            self._drop()
        elif holding.standby is not None:
            self._follow(holding, holding.standby, now)
        elif self._old_works(holding) and not self._stopped and now >= self._retry_at:
            self._fork(holding)

    def _watch_end(self, holding: OwnedPartition, now: float) -> None:
        """Go on without a worker that is quiet and takes its time to end."""
        if not holding.is_quiet:
            holding.quiet_at = 0.0
            return
        holding.quiet_at = holding.quiet_at or now
        since = now - holding.quiet_at
        if holding.consumer.handover == "cold" or holding.slot.leaving_pid:
            if since > RETIRE_SECONDS:
                self._supervisor.crew.kill(holding, "on_stop")
        elif since > QUIET_SECONDS:
            if not holding.stop_reason:
                holding.groups_ready = False  # why it has ended is not known: perhaps for that
            self._supervisor.retire(holding)

    def _begin(self, now: float) -> None:
        supervisor = self._supervisor
        if supervisor.drain.begun:
            self._wanted.clear()
        if not self._wanted or supervisor.crew.retiring(now) >= RETIRED_MAX:
            return
        # A reload asks for one at a time: it comes first, or waits for all that are used up, each
        # time anew.
        index = self._reload_waits()
        if index is None:
            index = next(iter(self._wanted))
        holding, reason = self._wanted.pop(index)
        if holding.child is None or holding.stop_reason or holding.phase is not Phase.HELD:
            return  # it ends anyway, and the next one is what is wanted
        if reason == SPENT and not holding.ready_at:
            return  # this is the next one: the one that was used up has ended by itself
        self._now, self._reason, self._old_pid = holding, reason, holding.child.pid
        self._deaths, self._retry_at, self._stopped = [], 0.0, False
        self.failed.pop(index, None)
        if holding.consumer.handover == "cold" or not holding.ready_at:
            self._stop()
        else:
            self._fork(holding)

    def _reload_waits(self) -> int | None:
        """The slot of a worker that a reload wants replaced and that waits for its turn."""
        return next((at for at, (_, why) in self._wanted.items() if why == "reload"), None)

    def _stop(self) -> None:
        assert self._now is not None
        self._stopped = True
        order = "reload" if self._reason == "reload" else "recycle"
        self._supervisor.crew.stop(self._now, order)

    def _fork(self, holding: OwnedPartition) -> None:
        self._born, self._warm_at = time.monotonic(), 0.0
        if not self._supervisor.crew.start_standby(holding):
            self._drop()  # it will be asked for again, but for a reload
            self.failed[holding.slot.index] = "the system refuses another process"

    def _old_works(self, holding: OwnedPartition) -> bool:
        return holding.child is not None and holding.child.pid == self._old_pid

    def _is_over(self, holding: OwnedPartition, now: float) -> bool:
        """Whether the replacement has been done, or is no longer possible or needed."""
        if holding.child is not None and not self._old_works(holding):
            # `ready_at` and not the live state: first it is said that one is ready.
            return bool(holding.ready_at)
        leaving = holding.stop_reason in LEAVING or holding.release_after
        free = holding.phase not in (Phase.HELD, Phase.REFENCING)
        return (
            leaving
            or free
            or self._supervisor.drain.begun
            or holding.broken_until > now
            or holding.unit in self._supervisor.unwanted
        )

    def _drop(self) -> None:
        if self._now is not None:
            self._supervisor.crew.dismiss_standby(self._now)
        self._now = None

    # --- the standby ---

    def _follow(self, holding: OwnedPartition, standby: Child, now: float) -> None:
        """Let the old worker go when its standby is warm, and go on without it when it is quiet."""
        exit_ = standby.reap()
        if exit_ is not None:
            holding.standby = None
            holding.slot.standby_pid = 0
            self._died(holding, standby, str(exit_), now)
            return
        if not holding.standby_is_warm:
            if now - self._born > self._supervisor.settings.daemon.boot_timeout:
                standby.kill_group()
            return
        if not self._warm_at:
            self._warm_at = now
            if self._reason != SPENT:
                self._stop()
            logs.event("worker.warm", unit=holding.unit, child=standby.pid)
        if holding.is_quiet:
            self._supervisor.retire(holding)
        elif not self._stopped and self._reload_waits() is not None:
            self._drop()
        elif not self._stopped and now - self._warm_at > SPENT_PATIENCE_SECONDS:
            holding.pace = 0.0  # nothing comes any more: do not hold memory for it
            self._drop()

    def _died(self, holding: OwnedPartition, standby: Child, how: str, now: float) -> None:
        daemon = self._supervisor.settings.daemon
        logs.event(
            "worker.standby_failed",
            logging.WARNING,
            unit=holding.unit,
            child=standby.pid,
            how=how,
        )
        if holding.child is None or self._stopped:
            self._now = None  # nothing is left to go on; the unit gets a worker as usual
            return
        self._deaths.append(restart.WorkerExit(now, restart.ExitCause.BOOT))
        decision = restart.decide(
            self._deaths,
            now,
            backoff=daemon.crash_backoff,
            crash_loop=daemon.crash_loop,
            cooldown=daemon.crash_cooldown,
            max_crashes=holding.consumer.max_crashes,
            jitter=random(),
        )
        if isinstance(decision, restart.Restart):
            self._retry_at = now + decision.after
            return
        logs.event(
            "worker.standby_given_up",
            logging.ERROR,
            unit=holding.unit,
            last_exit=how,
            seconds=round(decision.until - now, 1),
        )
        self._resting[holding.slot.index] = decision.until
        self.failed[holding.slot.index] = f"it ended with {how}"
        self._now = None
