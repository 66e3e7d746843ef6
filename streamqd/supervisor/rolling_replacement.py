"""Replacing workers without a gap, one at a time: the next one is warm before the old one lets go.

    request ──► standby boots ──► it is warm: the worker is told to stop ──► it is quiet:
    new token ──► the standby gets it, and works ──► the next request

The order matters: a token for the new one before the old one is quiet would run the unfinished
message twice. A standby that dies changes nothing for the worker, which goes on; after too many
deaths in a row it is left in peace for a while. One at a time, so that memory is doubled for one
partition only; but some workers may be quiet and take long to end (`on_stop`), and no partition
waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import random
from typing import NamedTuple

from streamqd import logs
from streamqd.config.schema import Daemon
from streamqd.isolate import Isolate, directly
from streamqd.model import Unit
from streamqd.policy import restart
from streamqd.supervisor.limits import MAX_MESSAGES
from streamqd.supervisor.partition import ON_STOP_SECONDS, PartitionState, Phase
from streamqd.supervisor.plan import (
    Action,
    DismissStandby,
    DismissWorker,
    ForkStandby,
    KillStandby,
    KillWorker,
    StopWorker,
)

LEAVING = ("drain", "shed", "lost")
IDLE_PATIENCE_SECONDS = 10.0  # how long a standby waits for a worker that ends by itself
DISMISSED_MAX = 4  # processes that may be ending when the next replacement begins
QUIET_SECONDS = 1.0  # what the end of a worker may take before its partition goes on without it


@dataclass(frozen=True)
class Circumstances:
    """What decides, beside the partitions, whether a replacement goes on. Times are monotonic."""

    now: float
    daemon: Daemon
    draining: bool
    unwanted: frozenset[Unit]
    ending: int  # processes that are ending beside the work


class RollResult(NamedTuple):
    """The end of a roll: all workers are replaced, or `unit` has shown that they cannot be."""

    unit: Unit | None = None
    problem: str = ""
    remaining: int = 0  # workers that were not replaced


@dataclass
class _Replacing:
    """The replacement under way. Times are monotonic, 0 for not yet."""

    partition: PartitionState
    reason: str
    old_pid: int
    cold: bool  # the next worker is forked when the old one has ended: no standby
    standby_since: float = 0.0
    warm_at: float = 0.0
    retry_at: float = 0.0

    @property
    def old_works(self) -> bool:
        child = self.partition.child
        return child is not None and child.pid == self.old_pid

    @property
    def can_stay(self) -> bool:
        """Whether the old worker works on if nothing more is done."""
        return self.old_works and not self.partition.stop_reason

    @property
    def stops_old(self) -> bool:
        """Whether the old worker should be told to stop: one that is used up stops by itself."""
        return self.cold or (self.partition.standby_is_warm and self.reason != MAX_MESSAGES)


class RollingReplacement:
    """The replacements that are wanted, and the one under way.

    `observe` decides which that is and how far it has come; `wishes` only reads.
    """

    def __init__(self, isolate: Isolate[Unit] = directly) -> None:
        self._isolate = isolate
        self._wanted: dict[Unit, str] = {}  # why, in order
        self._current: _Replacing | None = None
        self._deaths: list[restart.WorkerExit] = []
        self._cooling_down: dict[Unit, float] = {}  # until when nothing replaces its worker
        self._failed: dict[Unit, str] = {}  # whose last replacement was given up, and why
        self._roll: list[Unit] = []  # to be replaced for a reload, after `_rolling`
        self._rolling: Unit | None = None

    def request(self, unit: Unit, reason: str) -> bool:
        """Want a worker replaced. False: it is wanted already, or rests, and all stays as it is."""
        if reason == "reload":
            self._cooling_down.pop(unit, None)
            self._failed.pop(unit, None)
        elif self.is_wanted(unit) or unit in self._cooling_down:
            return False
        self._wanted[unit] = reason
        return True

    def is_wanted(self, unit: Unit, reason: str = "") -> bool:
        """Whether the worker is to be replaced, or is being replaced; for any reason, or this."""
        found = {self._wanted.get(unit)}
        if self._current is not None and self._current.partition.unit == unit:
            found.add(self._current.reason)
        found.discard(None)
        return reason in found if reason else bool(found)

    def forget(self) -> None:
        """Forget what was prepared with the settings and the code of before."""
        if self._current is not None and not self._current.partition.stop_reason:
            self._current = None
        self._wanted.clear()

    def drop(self, unit: Unit) -> None:
        """Forget one worker: its unit was given up."""
        self._wanted.pop(unit, None)
        if self._current is not None and self._current.partition.unit == unit:
            self._current = None

    # --- a roll: all workers, one by one ---

    def roll(self, units: list[Unit]) -> None:
        """Replace these workers for a reload, one after the other."""
        self._roll, self._rolling = units, None

    def rolled(self, partitions: Mapping[Unit, PartitionState]) -> RollResult | None:
        """Go on with a roll: the next worker when the last one's successor works.

        Returns its result when it has ended. What does not start in one partition is not tried in
        the others.
        """
        if self._rolling is not None:
            # A worker that lives for few messages may be wanted replaced again at once.
            if self._isolate(self._rolling, self.is_wanted, self._rolling, "reload"):
                return None
            unit, self._rolling = self._rolling, None
            problem = self._failed.get(unit)
            if problem is not None:
                remaining, self._roll = len(self._roll) + 1, []
                return RollResult(unit, problem, remaining)
        while self._roll:
            unit = self._roll.pop(0)
            if partitions[unit].child is not None:
                self._isolate(unit, self.request, unit, "reload")
                self._rolling = unit
                return None
        return RollResult()

    # --- observe ---

    def observe(self, partitions: Mapping[Unit, PartitionState], given: Circumstances) -> None:
        """See how far the one under way has come, or begin the next."""
        for unit in [unit for unit, until in self._cooling_down.items() if until <= given.now]:
            del self._cooling_down[unit]
        replacing = self._current
        if replacing is None:
            self._begin(partitions, given)
        else:
            self._isolate(replacing.partition.unit, self._go_on, replacing, given)

    def _go_on(self, replacing: _Replacing, given: Circumstances) -> None:
        if _is_over(replacing, given):
            self._current = None
        elif replacing.partition.standby is not None:
            self._follow(replacing, given.now)

    def _begin(self, partitions: Mapping[Unit, PartitionState], given: Circumstances) -> None:
        if given.draining:
            self._wanted.clear()
        # A standby that was made with the code of before: `wishes` sends it away, and its `on_stop`
        # may take a while.
        ready = [unit for unit in self._wanted if not partitions[unit].slot.standby_pid]
        if not ready or given.ending >= DISMISSED_MAX:
            return
        # A reload asks for one at a time: it comes first, or would wait each time for all that are
        # used up.
        unit = next((unit for unit in ready if self._wanted[unit] == "reload"), ready[0])
        partition = partitions[unit]
        reason = self._wanted.pop(unit)
        if partition.child is None or partition.stop_reason or partition.phase is not Phase.HELD:
            return  # it ends anyway, and the next one is what is wanted
        if reason == MAX_MESSAGES and not partition.ready_at:
            return  # this is the next one: the one that was used up has ended by itself
        cold = partition.consumer.handover == "cold" or not partition.ready_at
        self._current = _Replacing(partition, reason, partition.child.pid, cold)
        self._deaths = []
        self._failed.pop(unit, None)

    def _follow(self, replacing: _Replacing, now: float) -> None:
        """Note when the standby is warm; give it up when the old worker has no need to end."""
        partition = replacing.partition
        replacing.standby_since = replacing.standby_since or now
        if not partition.standby_is_warm:
            return
        if not replacing.warm_at:
            replacing.warm_at = now
            child = partition.standby.pid if partition.standby is not None else None
            logs.event("worker.warm", unit=partition.unit, child=child)
        if replacing.reason != MAX_MESSAGES or partition.is_quiet or not replacing.can_stay:
            return
        idle = now - replacing.warm_at > IDLE_PATIENCE_SECONDS
        if idle:
            partition.pace = 0.0  # no messages come: the pace of before is no guide any more
        if idle or "reload" in self._wanted.values():
            self._current = None

    def standby_refused(self, unit: Unit) -> None:
        """Note that the system refuses a standby its process."""
        self._current = None  # it will be asked for again, but for a reload
        self._failed[unit] = "the system refuses another process"

    def standby_died(self, partition: PartitionState, how: str, now: float, daemon: Daemon) -> None:
        """Note that a standby has ended; it is tried again after a while, some times."""
        replacing = self._current
        if replacing is None or replacing.partition is not partition:
            return
        if not replacing.can_stay:
            self._current = None  # nothing is left to go on; the unit gets a worker as usual
            return
        self._deaths.append(restart.WorkerExit(now, restart.ExitCause.BOOT))
        decision = restart.decide(
            self._deaths,
            now,
            backoff=daemon.crash_backoff,
            crash_loop=daemon.crash_loop,
            cooldown=daemon.crash_cooldown,
            max_crashes=partition.consumer.max_crashes,
            jitter=random(),
        )
        if isinstance(decision, restart.Restart):
            replacing.standby_since = replacing.warm_at = 0.0
            replacing.retry_at = now + decision.after
            return
        logs.event(
            "worker.standby_given_up",
            logging.ERROR,
            unit=partition.unit,
            last_exit=how,
            seconds=round(decision.until - now, 1),
        )
        self._cooling_down[partition.unit] = decision.until
        self._failed[partition.unit] = f"it ended with {how}"
        self._current = None

    # --- plan ---

    def wishes(
        self, partitions: Iterable[PartitionState], now: float, boot_timeout: float
    ) -> list[Action]:
        """Return what the one under way needs next, and the end of what nothing needs."""
        current = None if self._current is None else self._current.partition
        actions: list[Action] = []
        for partition in partitions:
            actions += self._isolate(partition.unit, _end_of_quiet, partition, now) or ()
            if partition.standby is not None and partition is not current:
                actions.append(DismissStandby(partition.unit))
        if self._current is not None:
            step = self._isolate(
                self._current.partition.unit, _step, self._current, now, boot_timeout
            )
            actions += step or ()
        return actions


def _step(replacing: _Replacing, now: float, boot_timeout: float) -> list[Action]:
    """Fork the standby; stop the old worker once that is warm; go on once the old one is quiet."""
    partition = replacing.partition
    unit = partition.unit
    if partition.standby is None:
        if replacing.can_stay and not replacing.cold and now >= replacing.retry_at:
            return [ForkStandby(unit)]
    elif not partition.standby_is_warm:
        late = now - replacing.standby_since > boot_timeout
        return [KillStandby(unit)] if late else []
    elif partition.is_quiet:
        return [DismissWorker(unit)]
    if replacing.stops_old and replacing.can_stay:
        return [StopWorker(unit, "reload" if replacing.reason == "reload" else "recycle")]
    return []


def _end_of_quiet(partition: PartitionState, now: float) -> list[Action]:
    """Go on without a worker that is quiet and takes its time to end."""
    if not partition.is_quiet:
        return []
    since = now - partition.quiet_at
    if partition.consumer.handover == "cold" or partition.slot.leaving_pid:
        return [KillWorker(partition.unit, "on_stop")] if since > ON_STOP_SECONDS else []
    if since > QUIET_SECONDS:
        return [DismissWorker(partition.unit, unexplained=not partition.stop_reason)]
    return []


def _is_over(replacing: _Replacing, given: Circumstances) -> bool:
    """Whether the replacement has been done, or is no longer possible or needed."""
    partition = replacing.partition
    if partition.child is not None and not replacing.old_works:
        # `ready_at` and not the live state: first it is logged that one is ready.
        return bool(partition.ready_at)
    leaving = partition.stop_reason in LEAVING or partition.release_after
    free = partition.phase not in (Phase.HELD, Phase.REFENCING)
    return (
        leaving
        or free
        or given.draining
        or partition.broken_until > given.now
        or partition.unit in given.unwanted
    )
