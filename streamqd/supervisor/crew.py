"""The supervisor's children: forking, telling and killing them. Decides nothing of leases."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from streamqd import housekeeper, logs, process
from streamqd.config import Settings
from streamqd.model import Unit
from streamqd.process import Child
from streamqd.scoreboard import Command, Scoreboard, WorkerState, now_ns
from streamqd.supervisor.holding import Holding, Kill
from streamqd.worker import Orders, new_worker

UNDEAD_SECONDS = 5.0
FORK_RETRY_SECONDS = 1.0
HOUSEKEEPER_SECONDS = 30.0  # without progress it is replaced
QUIT_SECONDS = 5.0  # what a housekeeper that is told to end may take
CAUTIOUS_AFTER = 2  # processes in a row that died with nothing to blame


@dataclass
class Crew:
    """Forks workers and the housekeeper, and has a hand on each of them."""

    settings: Settings
    board: Scoreboard
    forget: list[Callable[[], None]]  # detach methods of the parent's connections
    keep: list[int]  # descriptors that children keep: the lock
    housekeeper: Child | None = None
    housekeeper_at: float = 0.0
    _forks: logs.Episode = field(default_factory=lambda: logs.Episode("fork.failed", "fork.back"))
    _replaced_at: float = 0.0
    lingering: dict[Unit, Child] = field(default_factory=dict)  # killed, but not dying

    # --- starting ---

    def start_worker(self, holding: Holding, *, paused: bool) -> None:
        """Fork the process that handles a held unit."""
        unit, slot = holding.unit, holding.slot
        orders = Orders(
            unit,
            holding.token,
            holding.epoch,
            cautious=holding.blameless >= CAUTIOUS_AFTER,
            suspects=holding.suspects,
        )
        slot.state = WorkerState.BOOTING
        slot.command = Command.PAUSE if paused else Command.NONE
        slot.rss = slot.rss_baseline = 0
        settings, consumer = self.settings, holding.consumer

        def run(control: socket.socket) -> int:
            logs.assume("worker")
            return new_worker(orders, settings, consumer, slot, control).run()

        title = f"streamqd: worker {unit.topic}/{unit.partition} {unit.group}"
        try:
            child = process.spawn(run, title=title, forget=self.forget, keep=self.keep)
        except OSError as error:
            # No process or descriptor is left: what runs goes on, this one is tried again.
            slot.state = WorkerState.GONE
            holding.start_at = time.monotonic() + FORK_RETRY_SECONDS
            self._forks.failed(error=str(error))
            return
        self._forks.recovered()
        holding.started_as(child, time.monotonic())
        slot.add("restarts")
        logs.event("worker.started", unit=unit, child=child.pid, epoch=holding.epoch)

    def start_housekeeper(self) -> None:
        """Fork the housekeeper, or fork it again."""
        board, settings = self.board, self.settings

        def run(control: socket.socket) -> int:
            logs.assume("housekeeper")
            code = housekeeper.run(board, settings, control)
            # It may notice the supervisor's end before the kernel has sent the signal.
            if process.is_deserted(control):
                self._kill_orphans()
            return code

        try:
            self.housekeeper = process.spawn(
                run,
                title="streamqd: housekeeper",
                forget=self.forget,
                keep=self.keep,
                bereaved=self._kill_orphans,
            )
        except OSError as error:
            self.housekeeper_at = time.monotonic() + FORK_RETRY_SECONDS
            self._forks.failed(error=str(error))
            return
        self.board.housekeeper_progress_ns = now_ns()

    def _kill_orphans(self) -> None:
        """In the housekeeper, when the supervisor was killed: end what the workers have started.

        The workers die with the supervisor by themselves, but not their own children, and a child
        that was forked would go on holding the lock of this instance.
        """
        for slot in self.board.slots():
            if slot.pid:
                process.kill_group(slot.pid)

    def keep_housekeeper(self, now: float) -> None:
        """Collect a dead housekeeper and start the next one. No lease depends on it."""
        child = self.housekeeper
        if child is not None:
            exit_ = child.reap()
            if exit_ is None:
                self._watch_housekeeper(child, now)
                return
            self.housekeeper = None
            self.housekeeper_at = now if self._replaced_at else now + 1.0
            if not self._replaced_at:
                self.board.add("housekeeper_restarts")
                logs.event("housekeeper.exited", logging.WARNING, how=str(exit_))
            self._replaced_at = 0.0
        if now >= self.housekeeper_at:
            self.start_housekeeper()

    def _watch_housekeeper(self, child: Child, now: float) -> None:
        """Kill a housekeeper that makes no progress, or does not end when it is replaced."""
        silent = now_ns() - self.board.housekeeper_progress_ns
        overdue = self._replaced_at and now - self._replaced_at > QUIT_SECONDS
        if silent > HOUSEKEEPER_SECONDS * 1e9 or overdue:
            child.kill_group()

    def replace_housekeeper(self, now: float) -> None:
        """Let the housekeeper end and be forked again, with the present settings."""
        if self.housekeeper is not None and not self._replaced_at:
            self._replaced_at = now
            self.housekeeper.tell(b"quit")

    def stop_housekeeper(self, seconds: float) -> None:
        """Ask the housekeeper to end; kill it when it does not."""
        child, self.housekeeper = self.housekeeper, None
        if child is None:
            return
        child.tell(b"quit")
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if child.reap() is not None:
                return
            process.wait_readable([child.pidfd], left)
        child.kill_group()
        process.wait_readable([child.pidfd], 5.0)
        child.reap()

    # --- telling ---

    def stop(self, holding: Holding, reason: str) -> None:
        """Tell a worker to finish its current message and leave."""
        if holding.child is None:
            return
        if not holding.stop_reason or reason in ("drain", "shed"):
            holding.stop_reason = reason
        holding.slot.command = Command.STOP
        holding.child.tell(b"stop")
        if holding.slot.state == WorkerState.BOOTING:
            # It reads its command before the first message: it has nothing in hand, nor will.
            self.kill(holding, "unstarted")

    def pause(self, holding: Holding, *, paused: bool) -> None:
        """Tell a worker to pause or to go on, unless it knows or was told to leave."""
        wanted = Command.PAUSE if paused else Command.NONE
        if holding.child is not None and holding.slot.command not in (wanted, Command.STOP):
            holding.slot.command = wanted
            holding.child.tell(b"look")

    def kill(self, holding: Holding, reason: str, run_seq: int | None = None) -> None:
        """Kill a worker with everything in its process group, because of the run `run_seq`."""
        if holding.child is None or holding.kill is not None:
            return
        holding.kill = Kill(reason, holding.slot.run_seq if run_seq is None else run_seq)
        holding.killed_at = time.monotonic()
        if reason != "unstarted":
            logs.event(
                "worker.killed",
                logging.WARNING,
                unit=holding.unit,
                child=holding.child.pid,
                reason=reason,
            )
        holding.child.kill_group()

    def abandon_undead(self, holdings: Iterable[Holding], now: float) -> None:
        """Go on without processes that SIGKILL has not ended; collect those that ended since."""
        for unit, killed in list(self.lingering.items()):
            if killed.reap() is not None:
                del self.lingering[unit]
        for holding in holdings:
            if holding.kill is None or now - holding.killed_at < UNDEAD_SECONDS:
                continue
            child = holding.abandon()
            if child is not None:
                self.lingering[holding.unit] = child
                logs.event("worker.undead", logging.ERROR, unit=holding.unit, child=child.pid)
