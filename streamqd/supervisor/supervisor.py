"""The loop: signals, dead children, one exchange with Redis, moves, forks, limits; again."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from random import random

from streamqd import fork_hygiene, logs, process, startup
from streamqd.config import Consumer, Settings
from streamqd.embedded import EmbeddedServer
from streamqd.errors import StreamqdError
from streamqd.model import Unit
from streamqd.notify import Notifier
from streamqd.policy import restart
from streamqd.scoreboard import HEAD_BYTES, WorkerState
from streamqd.supervisor import report
from streamqd.supervisor.boards import Boards
from streamqd.supervisor.burst import BurstCheck
from streamqd.supervisor.control import Control
from streamqd.supervisor.drain import EXIT_CRASH_LOOP, EXIT_TWIN, Drain
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.limits import Limits
from streamqd.supervisor.oom_monitor import OomMonitor
from streamqd.supervisor.partition import OwnedPartition, Phase
from streamqd.supervisor.rebalance import Rebalance
from streamqd.supervisor.reload import Reload
from streamqd.supervisor.reregister import Reregister
from streamqd.supervisor.resolver import Resolver
from streamqd.supervisor.rolling_replacement import RollingReplacement
from streamqd.supervisor.serving import Serving
from streamqd.supervisor.watcher import Watched, Watcher
from streamqd.supervisor.worker_pool import WorkerPool

TICK_SECONDS = 0.5
CAUSES_MAX = 3  # named when all partitions crash
EMBEDDED_RETRY_SECONDS = 1.0


class Supervisor:
    """Reconciles what should be with what is, tick by tick."""

    def __init__(
        self,
        settings: Settings,
        partitions: dict[str, int],
        lock: startup.InstanceLock,
        embedded: EmbeddedServer | None,
        load: Callable[[], Settings] | None,
        *,
        burst: bool,
        only: frozenset[str],
        signals: process.SignalQueue,
        watched: Watched | None = None,
    ) -> None:
        self.settings = settings
        self.only = only
        self.embedded = embedded
        self.notifier = Notifier()
        boards = Boards(settings.daemon, lock)
        self.board = boards.make(len(_units_of(settings, partitions)))
        self.names = Resolver()
        self.exchange = LeaseManager(settings, self.board, lock.identity, self.names)
        forget = [self.exchange.link.detach, self.exchange.wakes.link.detach]
        if embedded is not None:
            forget.append(embedded.detach)
        self.names.forget = forget
        self.crew = WorkerPool(settings, self.board, forget, [lock.fileno()])
        self.kernel_kills = OomMonitor()
        self.holdings: dict[Unit, OwnedPartition] = {}
        self.unwanted: set[Unit] = set()  # known units that a reload took out
        self.partitions = dict(partitions)  # of each topic; of one that cannot be read, not yet
        self._offer(settings, partitions)
        running = [each for each in boards.left.values() if each.running and not each.following]
        alone = len(running) <= 1
        for unit, left in boards.left.items():
            if unit in self.holdings:
                self.holdings[unit].resume(left, alone=alone)
        boards.publish()
        self._boards = boards
        self.moves = Rebalance(self)
        self.serving = Serving(self)
        self.steering = Control(self)
        self.drain = Drain(self.holdings, self.crew, self.exchange, self.notifier)
        self.succession = RollingReplacement(self)
        self.limits = Limits(self.crew, self.succession.request)
        self.reload = Reload(self, load)
        self.watcher = Watcher(settings.source, watched, self.crew.forget) if watched else None
        self.restore = Reregister(self.exchange, self.crew)
        self.burst = BurstCheck(self.exchange) if burst else None
        self.report = report.StatusReporter(self.board, self.notifier)
        self.signals = signals
        self.paused = False
        self.exit_code: int | None = None
        self._next_look = 0.0
        self._embedded_at = 0.0

    # --- life ---

    def run(self) -> int:
        """Loop until there is an exit code, then leave the fleet."""
        try:
            process.become_subreaper()
            fork_hygiene.freeze()
            logs.event(
                "start",
                instance=self.settings.daemon.instance,
                config=self.settings.source,
                topics=len({unit.topic for unit in self.holdings}),
                units=len(self.holdings),
                redis=self.exchange.link.address,
                python=sys.version.split()[0],
            )
            while True:
                self._tick()
                if self.exit_code is not None:
                    break
                self._wait()
            self.exchange.leave()
            if all(holding.phase is Phase.FREE for holding in self.holdings.values()):
                self._boards.remove()
            logs.event("drained", code=self.exit_code)
            return self.exit_code
        except BaseException:
            for holding in self.holdings.values():
                self.crew.kill(holding, "quit")
            raise
        finally:
            self.crew.stop_housekeeper(2.0)
            if self.watcher is not None:
                self.watcher.close()
            self.exchange.close()

    def _tick(self) -> None:
        now = time.monotonic()
        for number in self.signals.take():
            self._signal(number)
        self._reap(now)
        self.succession.tick(now)
        self.crew.relay(self.holdings.values())
        self.crew.abandon_undead(self.holdings.values(), now)
        self.crew.keep_housekeeper(now)
        self._keep_embedded(now)
        self.exchange.tick(now, self.holdings, self.wanted_units())
        self._take_up(self.restore.tick(now, self.settings, self.partitions))
        self._judge_twin()
        self.steering.tick()
        self.moves.tick(now)
        self._start_workers(now)
        self.serving.tick(now)
        self._next_look = self.limits.watch(self.holdings.values(), time.monotonic())
        if self.watcher is not None and self.watcher.tick(time.monotonic()):
            self.reload.request()
        self.reload.tick()
        self._end_if_done(now)
        self.report.tick(
            self.holdings,
            redis_ok=self.exchange.ok,
            fleet_seen=self.moves.looked,
            draining=self.drain.begun,
            paused=self.paused,
            drained=self.steering.drained,
            capacity=self.serving.capacity.limit,
        )
        logs.flush()
        self.board.add("log_dropped", logs.dropped() - self.board.counter("log_dropped"))

    def _wait(self) -> None:
        """Sleep until something happens or is due."""
        now = time.monotonic()
        due = [now + TICK_SECONDS, self._next_look, self.exchange.next_at()]
        if self.exchange.ok and any(holding.unsaid for holding in self.holdings.values()):
            due.append(now)
        free = [one for one in self.holdings.values() if one.startable and one.standby is None]
        due += [holding.start_at for holding in free]
        children = [holding.child for holding in self.holdings.values() if holding.child]
        children += self.succession.children
        if self.crew.housekeeper is not None:
            children.append(self.crew.housekeeper)
        rings = {child.control.fileno(): child for child in children if not child.deaf_at}
        descriptors = [self.signals.fileno(), *rings, *(child.pidfd for child in children)]
        wake = self.exchange.wakes.link.fileno()
        if wake is not None:
            descriptors.append(wake)
        for descriptor in process.wait_readable(descriptors, min(due) - now):
            if descriptor == wake:
                self.exchange.drain_wakes()
            elif descriptor in rings:
                rings[descriptor].drain()

    # --- what is offered ---

    def _offer(self, settings: Settings, partitions: dict[str, int]) -> None:
        """Make a holding of every unit of every consumer; a known one keeps its state."""
        # A topic that cannot be read just now has the partitions that it had.
        self.partitions |= partitions
        wanted = _units_of(settings, self.partitions)
        for unit, consumer in wanted.items():
            holding = self.holdings.get(unit)
            if holding is None:
                self.holdings[unit] = OwnedPartition(unit, consumer, self.board.allot(unit))
            else:
                holding.consumer = consumer
        self.unwanted = self.holdings.keys() - wanted.keys()

    def adopt(self, settings: Settings, partitions: dict[str, int]) -> None:
        """Use a reloaded configuration from now on; running workers keep what they have."""
        self.settings = self.crew.settings = self.exchange.settings = settings
        self.moves.damp(settings.daemon)
        self.succession.renew()
        self._offer(settings, partitions)
        self.exchange.beat_soon()

    def _take_up(self, partitions: Mapping[str, int]) -> None:
        """Offer the topics that could not be read before."""
        new = {name: count for name, count in partitions.items() if name not in self.partitions}
        if new and self.fits(self.settings, new):
            self._offer(self.settings, new)
            self.exchange.beat_soon()

    def fits(self, settings: Settings, partitions: dict[str, int]) -> bool:
        """Whether the scoreboard has room for all units of a new configuration."""
        new = _units_of(settings, partitions).keys() - self.holdings.keys()
        used = self.board.used
        if used + len(new) > self.board.size:
            return False
        try:
            for index in range(used, used + len(new)):
                self.board.reserve(index, HEAD_BYTES)
        except OSError:
            return False
        return True

    def wanted_units(self) -> list[Unit]:
        """The units of all present consumers."""
        return [unit for unit in self.holdings if unit not in self.unwanted]

    # --- signals ---

    def _signal(self, number: signal.Signals) -> None:
        if number is signal.SIGCHLD:
            return
        logs.event("signal", signal=number.name)
        timeout = self.settings.daemon.drain_timeout
        if number in (signal.SIGTERM, signal.SIGINT):
            self.drain.signalled(number, timeout)
        elif number is signal.SIGQUIT:
            self.drain.kill_all("quit", timeout)
        elif number is signal.SIGHUP:
            self.reload.request()
        elif number is signal.SIGUSR1:
            report.dump(self.holdings)
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            self.paused = number is signal.SIGTSTP
            self.apply_pauses()

    def apply_pauses(self) -> None:
        """Tell the workers to pause or to go on: the signal is for all, orders are for some."""
        for holding in self.holdings.values():
            self.crew.pause(holding, paused=self._is_paused(holding))

    def _is_paused(self, holding: OwnedPartition) -> bool:
        return self.paused or self.steering.is_paused(holding.unit)

    # --- children ---

    def _reap(self, now: float) -> None:
        self.kernel_kills.look(now)
        for holding in self.holdings.values():
            child = holding.child
            exit_ = child.reap() if child is not None else None
            if child is None or exit_ is None:
                continue
            if holding.kill is None:  # else the signal was ours
                exit_ = self.kernel_kills.explain(exit_)
            reason, before = holding.stop_reason, (holding.lived(now), holding.settled())
            verdict = holding.ended(exit_)
            logs.event(
                "worker.crashed" if verdict.crashed else "worker.exited",
                logging.WARNING if verdict.crashed else logging.INFO,
                unit=holding.unit,
                child=child.pid,
                how=str(exit_),
                reason=reason or None,
                charged=verdict.charged.decode() if verdict.charged else None,
            )
            self._follow_up(holding, restart.WorkerExit(now, verdict.cause, *before))
        # Only those that our children left behind: everything that we started is in `known`.
        process.reap_adopted(self._known_pids())

    def retire(self, holding: OwnedPartition) -> None:
        """Go on without a worker that is quiet; its process ends by itself."""
        now, reason = time.monotonic(), holding.stop_reason
        before = holding.lived(now), holding.settled()
        child, verdict = holding.retired()
        self.crew.retire(holding, child, reason)
        self._follow_up(holding, restart.WorkerExit(now, verdict.cause, *before))

    def _follow_up(self, holding: OwnedPartition, end: restart.WorkerExit) -> None:
        self._plan_restart(holding, end.at, end)
        if holding.phase is Phase.FREE:
            self.exchange.unit_lost()
        if self.drain.begun or holding.unit in self.unwanted:
            holding.give_up()

    def _plan_restart(self, holding: OwnedPartition, now: float, end: restart.WorkerExit) -> None:
        """Let the restart policy say when the next process may be forked."""
        daemon, crashes = self.settings.daemon, holding.consumer.max_crashes
        kept = restart.history_max(crash_loop=daemon.crash_loop, max_crashes=crashes)
        holding.exits = [*holding.exits, end][-kept:]
        decision = restart.decide(
            holding.exits,
            now,
            backoff=daemon.crash_backoff,
            crash_loop=daemon.crash_loop,
            cooldown=daemon.crash_cooldown,
            max_crashes=crashes,
            jitter=random(),
        )
        if isinstance(decision, restart.Restart):
            holding.start_at = now + decision.after
            return
        holding.broken_until = holding.start_at = decision.until
        holding.slot.state = WorkerState.BROKEN
        logs.event(
            "worker.crash_loop",
            logging.ERROR,
            unit=holding.unit,
            last_exit=holding.last_exit,
            seconds=round(decision.until - now, 1),
        )
        # Another instance may be able to run it; this one looks again after the cool-down.
        holding.give_up()

    def _start_workers(self, now: float) -> None:
        for holding in self.holdings.values():
            if holding.phase is Phase.FREE and not holding.stop_reason:
                # The unit was lost while its worker ran: whatever it still does is refused.
                self.crew.stop(holding, "lost")
        if self.drain.begun:
            return
        fresh: list[tuple[OwnedPartition, bool]] = []
        for unit, holding in self.holdings.items():
            if holding.startable and now >= holding.start_at and unit not in self.unwanted:
                if holding.broken_until:
                    holding.broken_until = 0.0
                    logs.event("worker.tried_again", unit=unit)
                paused = self._is_paused(holding)
                if holding.standby is None:
                    fresh.append((holding, paused))
                elif holding.standby_is_warm:
                    self.crew.hand_over(holding, paused=paused)
        self.crew.start_workers(fresh)

    def _known_pids(self) -> set[int]:
        known = {holding.child.pid for holding in self.holdings.values() if holding.child}
        known |= {child.pid for child in self.crew.lingering.values()}
        known |= {child.pid for child in self.succession.children}
        if self.crew.housekeeper is not None:
            known.add(self.crew.housekeeper.pid)
        if self.watcher is not None and self.watcher.child is not None:
            known.add(self.watcher.child.pid)
        if self.embedded is not None and self.embedded.pid is not None:
            known.add(self.embedded.pid)
        return known | self.reload.pids | self.restore.pids | self.names.pids

    def _keep_embedded(self, now: float) -> None:
        """Start the embedded server again when it has ended; the data is on disk."""
        if self.embedded is None or self.embedded.running or now < self._embedded_at:
            return
        self._embedded_at = now + EMBEDDED_RETRY_SECONDS
        logs.event("embedded.exited", logging.ERROR, how=self.embedded.ending)
        try:
            self.embedded.start(patience=0.0)
        except (StreamqdError, OSError) as error:
            logs.event("embedded.failed", logging.ERROR, error=str(error))
        else:
            logs.event("embedded.started", child=self.embedded.pid)

    def _judge_twin(self) -> None:
        """Another instance beats under our id, for longer than one ttl: give way."""
        if self.exchange.twin.stays:
            logs.event("twin", logging.ERROR, instance=self.settings.daemon.instance)
            for holding in self.holdings.values():
                self.crew.kill(holding, "quit")
            self.exit_code = EXIT_TWIN

    # --- the end ---

    def _end_if_done(self, now: float) -> None:
        if self.exit_code is not None:
            return
        if self.drain.begun:
            self.exit_code = self.drain.exit_code(now)
            return
        if self.burst is not None:
            self._end_burst(now, self.burst)
        wanted = self.wanted_units()
        broken = [each for unit in wanted if (each := self.holdings[unit]).broken_until > now]
        if broken and len(broken) == len(wanted):
            causes = list(dict.fromkeys(each.last_exit for each in broken))
            more = [f"{len(causes) - CAUSES_MAX} more"] if len(causes) > CAUSES_MAX else []
            error = "; ".join([*causes[:CAUSES_MAX], *more])
            logs.event("crash_loop", logging.CRITICAL, units=len(broken), error=error)
            self.drain.code = EXIT_CRASH_LOOP
            self.drain.begin(0.0)  # no worker is left; the leases are given back

    def _end_burst(self, now: float, burst: BurstCheck) -> None:
        wanted = {unit: self.holdings[unit] for unit in self.wanted_units()}
        verdict = burst.verdict(now, wanted)
        if verdict is None:
            return
        logs.event("burst.settled", broken=verdict.broken or None)
        if verdict.broken:
            self.drain.code = EXIT_CRASH_LOOP
        self.drain.begin(self.settings.daemon.drain_timeout)


def _units_of(settings: Settings, partitions: dict[str, int]) -> dict[Unit, Consumer]:
    """Return every unit of every consumer, with its consumer."""
    return {
        Unit(consumer.topic, partition, consumer.unit_group): consumer
        for consumer in settings.consumers
        for partition in range(partitions.get(consumer.topic, 0))
    }
