"""Fork, command and kill the supervisor's child processes. Other modules decide when to do so."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from streamqd import housekeeper, logs, process
from streamqd.config import OutboxSettings, Settings
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment, Lease
from streamqd.process import Child
from streamqd.scoreboard import Scoreboard, WorkerCommand, WorkerState, now_ns
from streamqd.supervisor.helper import Helper
from streamqd.supervisor.partition import ON_STOP_SECONDS, ORDERLY, AssignmentState
from streamqd.supervisor.running_worker import Kill
from streamqd.worker import STOP, Grant, run_worker

UNKILLABLE_SECONDS = 5.0
FORK_RETRY_SECONDS = 1.0
KEPT_DESCRIPTORS = 16  # file descriptors kept free for reconnects, helpers and name resolution
HOUSEKEEPER_SECONDS = 30.0  # time without progress after which the housekeeper is replaced
# Time without progress after which a relay is replaced. It is long, because a relay may have to
# wait for both its database and Redis.
RELAY_SECONDS = 60.0
RELAY_RESTART_SECONDS = 30.0  # longest pause before the restart of a relay that keeps exiting
RELAY_QUIT_SECONDS = 30.0  # time limit for a relay to finish its batch
# Number of consecutive crashes without a running message after which the next worker starts
# cautiously, which means that it first fetches single entries.
CAUTIOUS_AFTER = 2


def _keep_descriptors() -> None:
    """Raise OSError if fewer than KEPT_DESCRIPTORS file descriptors are free.

    The kernel always assigns the lowest free descriptor, so its number shows how many are open.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = os.dup(2)
    os.close(free)
    if limit != resource.RLIM_INFINITY and free + KEPT_DESCRIPTORS > limit:
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: the limit is {limit}")


def _wait_until_exit(control: socket.socket) -> int:
    control.recv(1)
    return 0


@dataclass
class Dismissed:
    """A process that no longer belongs to a partition, and only has to run `on_stop` and exit."""

    child: Child
    partition: AssignmentState
    reason: str
    since: float  # monotonic time of the dismissal
    killed_at: float = 0.0  # monotonic time of its kill, 0 if it was not killed


@dataclass
class WorkerPool:
    """Forks workers and helper processes, and stops, wakes and kills them."""

    settings: Settings
    board: Scoreboard
    # The `detach` methods of the parent's connections, which are called in each child.
    forget: list[Callable[[], None]]
    keep: list[int]  # file descriptors that children keep open, such as the one of the lock file
    refusal: str = ""  # last error of the operating system when it refused a process
    isolate: Isolate[Assignment] = run_directly
    _forks: logs.Episode = field(
        default_factory=lambda: logs.Episode("fork.failed", "fork.recovered")
    )
    unkillable: dict[Assignment, list[Child]] = field(
        default_factory=dict
    )  # processes that were killed but have not exited yet
    dismissed: list[Dismissed] = field(default_factory=list)
    _relays: dict[str, Helper] = field(default_factory=dict)  # relays by the name of their outbox
    _settings_of_relays: dict[str, tuple[object, ...]] = field(
        default_factory=dict
    )  # settings of each relay
    _exiting_relays: list[Helper] = field(default_factory=list)  # relays that must exit

    def __post_init__(self) -> None:
        housekeeper.preload(self.settings)
        self._housekeeper = Helper(
            self._fork_housekeeper,
            silent=lambda _child: (now_ns() - self.board.housekeeper_progress_ns) / 1e9,
            silence_max=HOUSEKEEPER_SECONDS,
            exited="housekeeper.exited",
            outbox=None,
            forks=self._forks,
            retry=FORK_RETRY_SECONDS,
        )

    # --- starting ---

    def start_worker(self, partition: AssignmentState, *, paused: bool) -> bool:
        """Fork the worker of an owned partition.

        Return False if the operating system refuses the process. In that case, the partition's
        `start_at` is set to the time of the next attempt.
        """
        grant = self._grant(partition)
        self._clear_for_next(partition, paused=paused)
        child = self._fork_worker(partition, grant)
        if child is None:
            # The operating system has no process, file descriptor or memory left. The running
            # workers are not affected, so only this fork is tried again later.
            partition.slot.state = WorkerState.GONE
            now = time.monotonic()
            partition.start_at = now + FORK_RETRY_SECONDS
            partition.refused_since = partition.refused_since or now
            return False
        partition.refused_since = 0.0
        partition.record_start(child, time.monotonic())
        partition.slot.add("restarts")
        return True

    def _grant(self, partition: AssignmentState) -> Grant:
        return Grant(
            partition.lease,
            cautious=partition.uncharged >= CAUTIOUS_AFTER,
            suspects=partition.suspects,
            complete=partition.suspects_complete,
        )

    def _clear_for_next(self, partition: AssignmentState, *, paused: bool) -> None:
        slot = partition.slot
        slot.state = WorkerState.BOOTING
        slot.command = WorkerCommand.PAUSE if paused else WorkerCommand.NONE
        slot.rss = slot.rss_baseline = 0
        slot.suspects_left = slot.suspects = len(partition.suspects)
        slot.round_size = 0

    def _fork_worker(self, partition: AssignmentState, grant: Grant) -> Child | None:
        settings, consumer, slot = self.settings, partition.consumer, partition.slot

        def run(control: socket.socket) -> int:
            logs.set_role("worker")
            return run_worker(grant, settings, consumer, slot, control)

        try:
            slot.reserve(consumer.lanes)
            _keep_descriptors()
            child = process.spawn(run, title=grant.title, forget=self.forget, keep=self.keep)
        except OSError as error:
            self.refusal = str(error)
            self._forks.log_failure(error=self.refusal)
            return None
        self._forks.log_recovery()
        return child

    def try_processes(self, count: int, seconds: float) -> int:
        """Test if the operating system starts processes, by forking up to `count` and killing them.

        Return the number of forked processes, or 0 if the operating system refused one of them. At
        least one fork is tried, and after `seconds`, no more.
        """
        children: list[Child] = []
        until = time.monotonic() + seconds
        try:
            while len(children) < count and (not children or time.monotonic() < until):
                _keep_descriptors()
                children.append(
                    process.spawn(_wait_until_exit, title="streamqd: trial", forget=self.forget)
                )
        except OSError as error:
            self.refusal = str(error)
            return 0
        finally:
            for child in children:
                child.kill_group()
            for child in children:
                process.wait_readable([child.pidfd], UNKILLABLE_SECONDS)
                child.reap()
        return len(children)

    # --- replacing a worker ---

    def start_standby(self, partition: AssignmentState) -> bool:
        """Fork a standby, which boots while the worker is still running and will replace it.

        Return False if the operating system refuses the process.
        """
        slot = partition.slot
        slot.warm_pid = 0
        child = self._fork_worker(partition, Grant(Lease(partition.assignment, ""), cautious=False))
        if child is None:
            return False
        partition.standby = child
        slot.standby_pid = child.pid
        logs.event("standby.started", assignment=partition.assignment, child=child.pid)
        return True

    def adopt_standby(self, partition: AssignmentState, *, paused: bool) -> None:
        """Make the warm standby the worker of a partition, by sending it the lease."""
        child, partition.standby = partition.standby, None
        assert child is not None
        self._clear_for_next(partition, paused=paused)
        partition.record_start(child, time.monotonic())
        partition.slot.standby_pid = partition.slot.warm_pid = 0
        partition.slot.add("restarts")
        child.send(self._grant(partition).pack())
        logs.event(
            "worker.handed_over",
            assignment=partition.assignment,
            child=child.pid,
            epoch=partition.lease.epoch,
        )

    def dismiss_standby(self, partition: AssignmentState) -> None:
        """Stop a standby that is no longer needed. It has not fetched any messages."""
        child, warm = partition.standby, partition.standby_is_warm
        if child is None:
            return
        partition.standby = None
        partition.slot.warm_pid = 0
        if warm:
            # Keep its PID in the slot until it has exited. If this process is killed before that,
            # `_kill_orphans` needs the PID.
            child.send(STOP)
        else:
            child.kill_group()
            partition.slot.standby_pid = 0
        self.dismissed.append(Dismissed(child, partition, "unneeded", time.monotonic()))

    def kill_standby(self, partition: AssignmentState) -> None:
        """Kill a standby. The supervisor reaps it later, as if it had exited without a kill."""
        if partition.standby is not None:
            partition.standby.kill_group()

    def dismiss_worker(self, partition: AssignmentState, child: Child, reason: str) -> None:
        """Reap a process later that was a partition's worker, while its successor already works."""
        partition.slot.leaving_pid = child.pid
        self.dismissed.append(Dismissed(child, partition, reason, time.monotonic()))

    def reap_dismissed(self, now: float) -> None:
        """Reap the dismissed processes that have exited, and kill those that take too long."""
        for one in list(self.dismissed):
            self.isolate(one.partition.assignment, self._reap_or_kill, one, now)

    def _reap_or_kill(self, one: Dismissed, now: float) -> None:
        slot, exit_ = one.partition.slot, one.child.reap()
        if slot.standby_pid == one.child.pid and (exit_ is not None or one.killed_at):
            slot.standby_pid = 0
        if exit_ is None:
            if not one.killed_at and now - one.since > ON_STOP_SECONDS:
                one.killed_at = now
                self._log_killed(one.partition, one.child, "on_stop")
                one.child.kill_group()
            return
        self.dismissed.remove(one)
        if slot.leaving_pid == one.child.pid:
            slot.leaving_pid = 0
        well = exit_.code in ORDERLY or one.reason == "unneeded"
        logs.event(
            "worker.exited",
            logging.INFO if well else logging.WARNING,
            assignment=one.partition.assignment,
            child=one.child.pid,
            how=str(exit_),
            reason=one.reason or None,
        )
        logs.stack(exit_.stack, assignment=one.partition.assignment, child=one.child.pid)

    def count_exiting(self, now: float) -> int:
        """Return the number of dismissed processes that are still expected to exit.

        A process that has not exited within UNKILLABLE_SECONDS after its kill does not count.
        """
        return sum(
            not one.killed_at or now - one.killed_at < UNKILLABLE_SECONDS for one in self.dismissed
        )

    def kill_dismissed(self) -> None:
        """Kill the dismissed processes and exiting relays, because the drain is out of time."""
        for one in self.dismissed:
            one.killed_at = one.killed_at or time.monotonic()
            one.child.kill_group()
        for each in self._exiting_relays:
            if each.child is not None:
                each.child.kill_group()

    # --- helpers ---

    def _fork_housekeeper(self) -> Child:
        board, settings = self.board, self.settings

        def run(control: socket.socket) -> int:
            logs.set_role("housekeeper")
            code = housekeeper.run(board, settings, control)
            # The housekeeper may notice that the supervisor has died before it gets the kernel's
            # signal, so `on_parent_death` may not have been called.
            if process.is_orphaned(control):
                self._kill_orphans()
            return code

        child = process.spawn(
            run,
            title="streamqd: housekeeper",
            forget=self.forget,
            keep=self.keep,
            on_parent_death=self._kill_orphans,
        )
        self.board.housekeeper_progress_ns = now_ns()
        return child

    def _kill_orphans(self) -> None:
        """Kill the process groups of all workers, after the supervisor has died.

        This runs in the housekeeper. The kernel kills the workers together with their supervisor,
        but not the processes that handlers have started. A process that a handler has forked would
        keep the instance's lock, so the instance could not start again.
        """
        for slot in self.board.slots():
            for pid in (slot.pid, slot.standby_pid, slot.leaving_pid):
                if pid:
                    process.kill_group(pid)

    @property
    def housekeeper(self) -> Child | None:
        """The housekeeper's process, or None while it is not running."""
        return self._housekeeper.child

    def helpers(self) -> list[Child]:
        """Return the processes that serve no partition: the housekeeper and the relays."""
        kept = (self._housekeeper, *self._relays.values(), *self._exiting_relays)
        return [each.child for each in kept if each.child is not None]

    def keep_helpers(self, now: float) -> None:
        """Keep the housekeeper and the relays running. No lease depends on these processes."""
        before = self._housekeeper.restarts
        self._housekeeper.keep(now)
        self.board.add("housekeeper_restarts", self._housekeeper.restarts - before)
        for each in (*self._relays.values(), *self._exiting_relays):
            each.keep(now)
        self._exiting_relays = [each for each in self._exiting_relays if each.child is not None]

    def replace_helpers(self, now: float) -> None:
        """Restart the housekeeper and those relays whose settings have changed."""
        self._housekeeper.replace(now)
        self.offer_outboxes(now)

    def offer_outboxes(self, now: float = 0.0) -> None:
        """Run one relay for each configured outbox, and dismiss all other relays."""
        offered = {each.name: each for each in self.settings.outboxes}
        for name in [*self._relays]:
            if name not in offered or self._settings_of_relays[name] != self._relay_settings(
                offered[name]
            ):
                exiting_relays = self._relays.pop(name)
                exiting_relays.dismiss(now)
                self._exiting_relays.append(exiting_relays)
        for name, outbox in offered.items():
            if name not in self._relays:
                self._settings_of_relays[name] = self._relay_settings(outbox)
                self._relays[name] = self._relay(outbox)

    def _relay_settings(self, outbox: OutboxSettings) -> tuple[object, ...]:
        """Return the settings on which the relay of an outbox depends.

        If they change, the relay must be replaced.
        """
        settings = self.settings
        return (outbox, settings.redis, settings.keys, settings.topics, settings.daemon)

    def _relay(self, outbox: OutboxSettings) -> Helper:
        # Import this only if an outbox is configured, because every worker is a fork of this
        # process, and the import would cost memory in all of them.
        from streamqd.outbox.serving import serve

        settings = self.settings

        def start() -> Child:
            _keep_descriptors()
            child = process.spawn(
                lambda control: serve(outbox, settings, control),
                title=f"streamqd: outbox {outbox.name}",
                forget=self.forget,
                keep=self.keep,
            )
            child.last_message_at = time.monotonic()
            return child

        return Helper(
            start,
            silent=lambda child: time.monotonic() - child.last_message_at,
            silence_max=RELAY_SECONDS,
            exited="outbox.exited",
            outbox=outbox.name,
            forks=self._forks,
            retry=FORK_RETRY_SECONDS,
            longest=RELAY_RESTART_SECONDS,
            exit_timeout=RELAY_QUIT_SECONDS,
        )

    @property
    def exiting_relays(self) -> int:
        """The number of relays that must exit but are still running."""
        return len(self._exiting_relays)

    def drain_relays(self, now: float) -> None:
        """Ask all relays to finish their batches, release their outboxes, and exit."""
        for each in self._relays.values():
            each.dismiss(now)
        self._exiting_relays += self._relays.values()
        self._relays = {}

    def stop_helpers(self, seconds: float) -> None:
        """Ask the helpers to exit, and kill each one that takes longer than `seconds`."""
        self.drain_relays(time.monotonic())
        for each in (*self._exiting_relays, self._housekeeper):
            each.stop(seconds)

    # --- commands ---

    def stop(self, partition: AssignmentState, reason: str) -> None:
        """Command a worker to finish its current messages and exit. `reason` is stored and logged.

        A worker that has not booted yet is killed instead.
        """
        worker = partition.worker
        if worker is None:
            return
        if not worker.stop_reason or reason in ("drain", "shed"):
            worker.stop_reason = reason
        partition.slot.command = WorkerCommand.STOP
        worker.child.send(b"stop")
        if partition.slot.state == WorkerState.BOOTING:
            # The worker has not booted yet. So it has fetched no messages and can safely be killed.
            self.kill(partition, "unstarted")

    def interrupt(self, partition: AssignmentState, run_seq: int) -> None:
        """Raise SoftTimeout in the handler, for this run and for all runs that started earlier."""
        worker = partition.worker
        if worker is not None:
            worker.soft_limited = partition.slot.soft_kill_seq = run_seq
            worker.child.signal(signal.SIGUSR1)

    def wake(self, partition: AssignmentState, wanted: tuple[int, int]) -> None:
        """Wake a worker, because the housekeeper has written a request for it into the slot.

        `wanted` is the current value of `AssignmentState.housekeeping`. It is stored in `relayed`,
        so that each request wakes the worker only once.
        """
        partition.relayed = wanted
        if partition.child is not None:
            partition.child.send(b"look")

    def pause(self, partition: AssignmentState, *, paused: bool) -> None:
        """Command a worker to pause or to resume."""
        partition.slot.command = WorkerCommand.PAUSE if paused else WorkerCommand.NONE
        if partition.child is not None:
            partition.child.send(b"look")

    def kill(self, partition: AssignmentState, reason: str, run_seq: int | None = None) -> None:
        """Kill a worker and its whole process group, unless it was already killed.

        `run_seq` is the number of the run that caused the kill. If it is None, the worker's last
        run is recorded instead.
        """
        worker = partition.worker
        if worker is None or worker.kill is not None:
            return
        run_seq = partition.slot.run_seq if run_seq is None else run_seq
        worker.kill = Kill(reason, run_seq, time.monotonic())
        if reason != "unstarted":
            self._log_killed(partition, worker.child, reason)
        worker.child.kill_group()

    def _log_killed(self, partition: AssignmentState, child: Child, reason: str) -> None:
        logs.event(
            "worker.killed",
            logging.WARNING,
            assignment=partition.assignment,
            child=child.pid,
            reason=reason,
        )

    def abandon_unkillable(self, partitions: Iterable[AssignmentState], now: float) -> None:
        """Detach workers that have survived SIGKILL for UNKILLABLE_SECONDS.

        Also reap processes that were detached earlier and have exited since.
        """
        for assignment in list(self.unkillable):
            self.isolate(assignment, self._collect_unkillable, assignment)
        for partition in partitions:
            self.isolate(partition.assignment, self._abandon, partition, now)

    def _collect_unkillable(self, assignment: Assignment) -> None:
        left = [child for child in self.unkillable[assignment] if child.reap() is None]
        if left:
            self.unkillable[assignment] = left
        else:
            del self.unkillable[assignment]

    def _abandon(self, partition: AssignmentState, now: float) -> None:
        kill = partition.worker.kill if partition.worker is not None else None
        if kill is None or now - kill.at < UNKILLABLE_SECONDS:
            return
        child = partition.abandon()
        if child is not None:
            self.unkillable.setdefault(partition.assignment, []).append(child)
            logs.event(
                "worker.unkillable", logging.ERROR, assignment=partition.assignment, child=child.pid
            )

    def kill_processes(self, partition: AssignmentState) -> None:
        """Kill and detach the processes of a partition that is given up.

        The partition is not acquired again before they have been reaped, because until then they
        may still write to its slot.
        """
        children = [each for each in (partition.child, partition.standby) if each is not None]
        if children:
            self.unkillable.setdefault(partition.assignment, []).extend(children)
        partition.worker = partition.standby = None
        for child in children:
            with contextlib.suppress(OSError):
                child.kill_group()
