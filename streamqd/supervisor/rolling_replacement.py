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
from collections.abc import Mapping
from dataclasses import dataclass
from random import random
from typing import NamedTuple

from streamqd import logs
from streamqd.config.schema import Daemon
from streamqd.model import Unit
from streamqd.policy import restart
from streamqd.supervisor.limits import SPENT
from streamqd.supervisor.partition import RETIRE_SECONDS, OwnedPartition, Phase
from streamqd.supervisor.plan import (
    Action,
    DismissStandby,
    ForkStandby,
    KillStandby,
    KillWorker,
    RotateToken,
    StopWorker,
)

LEAVING = ("drain", "shed", "lost")
SPENT_PATIENCE_SECONDS = 10.0  # how long a standby waits for a worker that ends by itself
RETIRED_MAX = 4  # processes that may be ending when the next replacement begins
QUIET_SECONDS = 1.0  # what the end of a worker may take before its partition goes on without it


@dataclass(frozen=True)
class Circumstances:
    """What decides, beside the partitions, whether a replacement goes on. Times are monotonic."""

    now: float
    daemon: Daemon
    draining: bool
    unwanted: frozenset[Unit]
    retiring: int  # processes that are ending beside the work


class RollResult(NamedTuple):
    """The end of a roll: all workers are replaced, or `unit` has shown that they cannot be."""

    unit: Unit | None = None
    problem: str = ""
    left: int = 0  # workers that were not replaced


@dataclass
class _Replacing:
    """The replacement under way."""

    partition: OwnedPartition
    reason: str
    old_pid: int
    stopped: bool = False  # the old worker was asked to stop
    forked_at: float = 0.0  # the standby
    warm_at: float = 0.0
    retry_at: float = 0.0

    @property
    def old_works(self) -> bool:
        child = self.partition.child
        return child is not None and child.pid == self.old_pid

    def stop(self) -> StopWorker:
        self.stopped = True
        return StopWorker(self.partition.unit, "reload" if self.reason == "reload" else "recycle")


class RollingReplacement:
    """The replacements that are wanted, and the one under way."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[OwnedPartition, str]] = {}  # by slot, in order
        self._now: _Replacing | None = None
        self._deaths: list[restart.WorkerExit] = []
        self._resting: dict[int, float] = {}  # slot -> until when nothing replaces its worker
        self._failed: dict[int, str] = {}  # slots whose last replacement was given up, and why
        self._roll: list[Unit] = []  # to be replaced for a reload, after `_rolling`
        self._rolling: Unit | None = None
        self._discarded: OwnedPartition | None = None  # its standby is of no use any more

    def request(self, partition: OwnedPartition, reason: str) -> bool:
        """Want a worker replaced. False: it is wanted already, or rests, and all stays as it is."""
        index = partition.slot.index
        if reason == "reload":
            self._resting.pop(index, None)
            self._failed.pop(index, None)
        elif self.wants(partition) or index in self._resting:
            return False
        self._wanted[index] = (partition, reason)
        return True

    def wants(self, partition: OwnedPartition, reason: str = "") -> bool:
        """Whether the worker is to be replaced, or is being replaced; for any reason, or this."""
        found = [why for each, why in self._wanted.values() if each is partition]
        if self._now is not None and self._now.partition is partition:
            found.append(self._now.reason)
        return reason in found if reason else bool(found)

    def forget(self) -> None:
        """Forget what was prepared with the settings and the code of before."""
        if self._now is not None and not self._now.stopped:
            self._discarded, self._now = self._now.partition, None
        self._wanted.clear()

    # --- a roll: all workers, one by one ---

    def roll(self, units: list[Unit]) -> None:
        """Replace these workers for a reload, one after the other."""
        self._roll, self._rolling = units, None

    def rolled(self, partitions: Mapping[Unit, OwnedPartition]) -> RollResult | None:
        """Go on with a roll: the next worker when the last one's successor works.

        Returns its result when it has ended. What does not start in one partition is not tried in
        the others.
        """
        if self._rolling is not None:
            partition = partitions[self._rolling]
            # A worker that lives for few messages may be wanted replaced again at once.
            if self.wants(partition, "reload"):
                return None
            unit, self._rolling = self._rolling, None
            why = self._failed.get(partition.slot.index)
            if why is not None:
                left, self._roll = len(self._roll) + 1, []
                return RollResult(unit, why, left)
        while self._roll:
            unit = self._roll.pop(0)
            if partitions[unit].child is not None:
                self.request(partitions[unit], "reload")
                self._rolling = unit
                return None
        return RollResult()

    # --- one tick ---

    def wishes(
        self, partitions: Mapping[Unit, OwnedPartition], given: Circumstances
    ) -> list[Action]:
        """Go on with the one under way, or begin the next."""
        actions: list[Action] = []
        for partition in partitions.values():
            actions += _end_of_quiet(partition, given.now)
        if self._discarded is not None:
            actions.append(DismissStandby(self._discarded.unit))
            self._discarded = None
        for index in [index for index, until in self._resting.items() if until <= given.now]:
            del self._resting[index]
        replacing = self._now
        if replacing is None:
            return actions + self._begin(given)
        if _is_over(replacing, given):
            return actions + self._drop(replacing)
        if replacing.partition.standby is not None:
            return actions + self._follow(replacing, given)
        if replacing.old_works and not replacing.stopped and given.now >= replacing.retry_at:
            return [*actions, _fork(replacing, given.now)]
        return actions

    def _begin(self, given: Circumstances) -> list[Action]:
        if given.draining:
            self._wanted.clear()
        if not self._wanted or given.retiring >= RETIRED_MAX:
            return []
        # A reload asks for one at a time: it comes first, or would wait each time for all that are
        # used up.
        index = self._reload_waits()
        if index is None:
            index = next(iter(self._wanted))
        partition, reason = self._wanted.pop(index)
        if partition.child is None or partition.stop_reason or partition.phase is not Phase.HELD:
            return []  # it ends anyway, and the next one is what is wanted
        if reason == SPENT and not partition.ready_at:
            return []  # this is the next one: the one that was used up has ended by itself
        replacing = self._now = _Replacing(partition, reason, partition.child.pid)
        self._deaths = []
        self._failed.pop(index, None)
        if partition.consumer.handover == "cold" or not partition.ready_at:
            return [replacing.stop()]
        return [_fork(replacing, given.now)]

    def _reload_waits(self) -> int | None:
        """The slot of a worker that a reload wants replaced and that waits for its turn."""
        return next((at for at, (_, why) in self._wanted.items() if why == "reload"), None)

    def _drop(self, replacing: _Replacing, *, idle: bool = False) -> list[Action]:
        self._now = None
        return [DismissStandby(replacing.partition.unit, idle)]

    # --- the standby ---

    def _follow(self, replacing: _Replacing, given: Circumstances) -> list[Action]:
        """Let the old worker go when its standby is warm, and go on without it when it is quiet."""
        partition, now = replacing.partition, given.now
        if not partition.standby_is_warm:
            late = now - replacing.forked_at > given.daemon.boot_timeout
            return [KillStandby(partition.unit)] if late else []
        actions: list[Action] = []
        if not replacing.warm_at:
            replacing.warm_at = now
            child = partition.standby.pid if partition.standby is not None else None
            logs.event("worker.warm", unit=partition.unit, child=child)
            if replacing.reason != SPENT:
                actions.append(replacing.stop())
        if partition.is_quiet:
            return [RotateToken(partition.unit)]
        if not replacing.stopped and self._reload_waits() is not None:
            return self._drop(replacing)
        if not replacing.stopped and now - replacing.warm_at > SPENT_PATIENCE_SECONDS:
            return self._drop(replacing, idle=True)
        return actions

    def standby_refused(self, partition: OwnedPartition) -> None:
        """Note that the system refuses a standby its process."""
        self._now = None  # it will be asked for again, but for a reload
        self._failed[partition.slot.index] = "the system refuses another process"

    def standby_died(self, partition: OwnedPartition, how: str, now: float, daemon: Daemon) -> None:
        """Note that a standby has ended; it is tried again after a while, some times."""
        replacing = self._now
        if replacing is None or replacing.partition is not partition:
            return
        if partition.child is None or replacing.stopped:
            self._now = None  # nothing is left to go on; the unit gets a worker as usual
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
            replacing.retry_at = now + decision.after
            return
        logs.event(
            "worker.standby_given_up",
            logging.ERROR,
            unit=partition.unit,
            last_exit=how,
            seconds=round(decision.until - now, 1),
        )
        self._resting[partition.slot.index] = decision.until
        self._failed[partition.slot.index] = f"it ended with {how}"
        self._now = None


def _end_of_quiet(partition: OwnedPartition, now: float) -> list[Action]:
    """Go on without a worker that is quiet and takes its time to end."""
    if not partition.is_quiet:
        return []
    since = now - partition.quiet_at
    if partition.consumer.handover == "cold" or partition.slot.leaving_pid:
        return [KillWorker(partition.unit, "on_stop")] if since > RETIRE_SECONDS else []
    if since > QUIET_SECONDS:
        return [RotateToken(partition.unit, unexplained=not partition.stop_reason)]
    return []


def _fork(replacing: _Replacing, now: float) -> ForkStandby:
    replacing.forked_at, replacing.warm_at = now, 0.0
    return ForkStandby(replacing.partition.unit)


def _is_over(replacing: _Replacing, given: Circumstances) -> bool:
    """Whether the replacement has been done, or is no longer possible or needed."""
    partition = replacing.partition
    if partition.child is not None and not replacing.old_works:
        # `ready_at` and not the live state: first it is said that one is ready.
        return bool(partition.ready_at)
    leaving = partition.stop_reason in LEAVING or partition.release_after
    free = partition.phase not in (Phase.HELD, Phase.ROTATING)
    return (
        leaving
        or free
        or given.draining
        or partition.broken_until > given.now
        or partition.unit in given.unwanted
    )
