"""Report the supervisor's status to systemd, to health checks and to operators."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from collections.abc import Mapping

from streamqd import logs
from streamqd.housekeeper.health import HOUSEKEEPER_SECONDS
from streamqd.model import Assignment
from streamqd.notify import Notifier
from streamqd.scoreboard import InstanceFlags, Scoreboard, now_ns
from streamqd.supervisor.isolation import Isolation
from streamqd.supervisor.partition import AssignmentState, Phase

# Number of additional seconds that a start or drain requests from the service manager each time.
EXTEND_SECONDS = 20.0
EXTEND_EVERY = 5.0  # seconds between two requests for such an extension
PINGS = 4  # number of pings per watchdog interval


class StatusReporter:
    """Reports each change once, and progress at the interval that the service manager requires."""

    def __init__(self, board: Scoreboard, notifier: Notifier) -> None:
        self._board = board
        self._notifier = notifier
        self._status = ""
        self._ready = False
        self._ping_at = 0.0
        self._extend_at = 0.0

    def tick(
        self,
        partitions: Mapping[Assignment, AssignmentState],
        *,
        redis_ok: bool,
        fleet_seen: bool,
        draining: bool,
        paused: bool,
        drained: bool = False,
        capacity: int | None = None,
        member: bool = False,
        duplicate: bool = False,
    ) -> None:
        """Publish the state of this instance in the scoreboard, and report it to systemd.

        READY is sent as soon as the worker of each owned partition has booted or has exited at
        least once, because a single broken partition must not delay the start. `fleet_seen` is true
        once the owners of the partitions are known. `drained` is true if an operator drains this
        instance. `capacity` is the number of partitions for which the operating system can start
        processes, or None if there is no such limit. `member` is true if Redis has accepted this
        instance under its name, and `duplicate` if another live process uses the same name.
        """
        owned = [partition for partition in partitions.values() if partition.owned]
        wanted = [
            partition for partition in partitions.values() if partition.phase is not Phase.FREE
        ]
        # Check this before counting the ready workers. Otherwise, a worker that becomes ready in
        # between could be missing in the status that is sent with READY.
        starting = any(not partition.is_ready and not partition.exits for partition in wanted)
        running = sum(1 for partition in owned if partition.is_ready)
        flags = InstanceFlags.STARTED
        for condition, flag in (
            (redis_ok, InstanceFlags.REDIS_OK),
            (draining, InstanceFlags.DRAINING),
            (paused, InstanceFlags.PAUSED),
            (drained, InstanceFlags.DRAINED),
            (capacity is not None, InstanceFlags.LIMITED),
            (fleet_seen and not wanted, InstanceFlags.STANDBY),
            (member, InstanceFlags.MEMBER),
            (duplicate, InstanceFlags.DUPLICATE),
        ):
            if condition:
                flags |= flag
        self._board.flags = flags
        self._board.progress_ns = now_ns()
        self._report_progress(time.monotonic(), waited_for=draining or not self._ready)
        status = f"{running}/{len(owned)} partitions running"
        if draining:
            status = f"draining, {running} partitions left"
        if capacity is not None:
            status += f", no more than {capacity} can be started"
        if drained:
            status += ", drained by an operator"
        if paused:
            status += ", paused"
        if not redis_ok:
            status += ", Redis does not answer"
        standing_by = bool(flags & InstanceFlags.STANDBY)
        if not (self._ready or draining or starting) and (running or standing_by):
            self._ready = True
            self._notifier.ready(status)
            logs.event("daemon.ready", partitions=running)
        if status != self._status:
            self._status = status
            self._notifier.status(status)

    def _report_progress(self, now: float, *, waited_for: bool) -> None:
        """Ping systemd's watchdog, and request more time from it during a start or drain.

        If the housekeeper makes no progress, do neither, so that systemd restarts the daemon.
        Otherwise, retries and trimming would stop unnoticed. An outage of Redis does not count,
        because the housekeeper's rounds continue during an outage.
        """
        began_ns = self._board.housekeeper_progress_ns
        if began_ns and (now_ns() - began_ns) / 1e9 > HOUSEKEEPER_SECONDS:
            return
        interval = self._notifier.watchdog_interval
        if interval is not None and now >= self._ping_at:
            self._ping_at = now + interval / PINGS
            self._notifier.watchdog()
        if waited_for and now >= self._extend_at:
            self._extend_at = now + EXTEND_EVERY
            self._notifier.extend_timeout(EXTEND_SECONDS)


def dump(partitions: Mapping[Assignment, AssignmentState], isolation: Isolation) -> None:
    """Log the state of each assignment and the supervisor's stack, and request the workers' stacks.

    The supervisor calls this on SIGUSR1. The workers' stacks are logged when they arrive.
    """
    isolation.run_for_each(partitions.values(), _log_state)
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        logs.stack(file.read().decode(), child=os.getpid())
    logs.flush(1.0)
    isolation.run_for_each(partitions.values(), _ask_stack)


def _log_state(partition: AssignmentState) -> None:
    logs.event(
        "state.dumped",
        assignment=partition.assignment,
        phase=partition.phase.value,
        epoch=partition.lease.epoch,
        child=partition.child.pid if partition.child else None,
        worker=partition.slot.state,
        in_flight=partition.slot.unfinished,
        last_exit=partition.last_exit or None,
    )


def _ask_stack(partition: AssignmentState) -> None:
    if partition.child is not None:
        partition.child.ask_stacks()
