"""The supervisor's loop, in which each tick observes, plans and applies.

A tick observes signals, exited children and replies from Redis. It then merges the actions of all
parts into one list (see `plan`) and applies them. Workers are started only by such actions. But
they are also removed elsewhere: after an internal error (`_give_up`), after an exit (`_reap`), and
if they survive a kill (`WorkerPool.abandon_unkillable`). `_keep_processes` keeps the housekeeper
running, and a reload replaces it.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from streamqd import fork_hygiene, logs, process, startup
from streamqd.config import Consumer, Settings
from streamqd.embedded import EmbeddedServer
from streamqd.errors import StreamqdError
from streamqd.model import Assignment
from streamqd.notify import Notifier
from streamqd.policy.capacity import Capacity
from streamqd.policy.rebalance import MORE_SECONDS, Rebalancer
from streamqd.process import Child
from streamqd.scoreboard import HEAD_BYTES, WorkerCommand
from streamqd.supervisor import plan, process_capacity, rebalance, report
from streamqd.supervisor.control import Control
from streamqd.supervisor.drain import EXIT_CRASH_LOOP, EXIT_DUPLICATE, BurstCheck, Drain
from streamqd.supervisor.isolation import Isolation
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.limits import MAX_MESSAGES, Limits, OomMonitor, Replacement
from streamqd.supervisor.loop_watch import LoopWatch
from streamqd.supervisor.partition import AssignmentState, ExitAssessment, Phase
from streamqd.supervisor.plan import Action
from streamqd.supervisor.reload import Reload, Validated
from streamqd.supervisor.reregister import Reregister
from streamqd.supervisor.resolver import Resolver
from streamqd.supervisor.rolling_replacement import RollConditions, RollingReplacement
from streamqd.supervisor.scoreboard_file import ScoreboardFile
from streamqd.supervisor.stack_requests import StackRequests
from streamqd.supervisor.watcher import Watched, Watcher
from streamqd.supervisor.worker_pool import WorkerPool
from streamqd.telemetry.killed import exit_message

TICK_SECONDS = 0.5
FORK_SECONDS = 0.25  # time limit for forks in one tick, after which they wait for the next tick
CAUSES_MAX = 3  # number of causes that are logged when all partitions crash
STACKS_SECONDS = 0.5  # interval between checks for stacks that children have written
EMBEDDED_RETRY_SECONDS = 1.0


class Observation(NamedTuple):
    """The actions that follow directly from the observations of a tick."""

    now: float  # monotonic seconds
    moves: list[Action]  # actions that follow from a new view of the fleet
    exceeded: list[Action]  # actions for workers that have exceeded their limits


class Supervisor:
    """Owns all state of the parent process, and runs its ticks.

    Each tick starts, stops and replaces processes, and acquires and releases leases, so that they
    match the configuration, the directives of operators, and the state of the fleet.
    """

    def __init__(
        self,
        settings: Settings,
        counts: dict[str, int],
        lock: startup.InstanceLock,
        embedded: EmbeddedServer | None,
        load: Callable[[], Settings] | None,
        *,
        burst: bool,
        only: frozenset[str],
        signals: process.SignalQueue,
        watched: Watched | None = None,
    ) -> None:
        """Create all parts, and take over the partitions of a predecessor that was killed."""
        self.settings = settings
        self.embedded = embedded
        self.notifier = Notifier()
        file = ScoreboardFile(settings.daemon, lock)
        self.board = file.make(len(_list_assignments(settings, counts)))
        self.resolver = Resolver()
        self.partitions: dict[Assignment, AssignmentState] = {}
        self.isolation = Isolation(self.partitions, settings.daemon.crash_backoff, self._give_up)
        isolate = self.isolation.run
        self.leases = LeaseManager(settings, self.board, lock.identity, self.resolver, isolate)
        forget = [self.leases.link.detach, self.leases.wakes.link.detach]
        if embedded is not None:
            forget.append(embedded.detach)
        self.resolver.forget = forget
        self.pool = WorkerPool(settings, self.board, forget, [lock.fileno()], isolate=isolate)
        self.pool.offer_outboxes()
        self.oom_monitor = OomMonitor()
        self.replacement = RollingReplacement(isolate)
        self.removed_assignments: frozenset[Assignment] = (
            frozenset()
        )  # known assignments that a reload removed
        # Maps each topic to its partition count, except topics that were never readable.
        self.counts = dict(counts)
        self._create_assignments(settings, counts)
        self._resume(file)
        file.publish()
        self._scoreboard_file = file
        daemon = settings.daemon
        self.rebalancer = Rebalancer(
            daemon.instance,
            daemon.rebalance_delay,
            daemon.rebalance_hold,
            daemon.rebalance_moves,
            grace_seconds=2 * self.leases.interval,
        )
        self.capacity = Capacity()
        self.control = Control(daemon.instance)
        self.drain = Drain(self.notifier)
        self.limits = Limits(isolate)
        self.loop_watch = LoopWatch(isolate)
        self.stack_requests = StackRequests(self.leases, self.loop_watch, isolate)
        self.reload = Reload(load, only, forget, self.notifier)
        self.watcher = Watcher(settings.source, watched, forget) if watched else None
        self.reregister = Reregister(forget)
        self.burst = BurstCheck(self.leases) if burst else None
        self.report = report.StatusReporter(self.board, self.notifier)
        self.signals = signals
        self.paused = False
        self.exit_code: int | None = None
        self._fleet_seen = False
        self._forks_wait = False  # True if the last tick has left forks for the next one
        self._announced: Mapping[str, object] = {}  # the capacity that was last announced
        self._next_check = 0.0
        self._exchanged_at = 0.0
        self._embedded_at = 0.0
        self._stacks_at = 0.0

    def _resume(self, file: ScoreboardFile) -> None:
        """Plan to take over the partitions that a killed predecessor owned."""
        running = [each for each in file.resumable.values() if each.running and not each.next_token]
        alone = len(running) <= 1
        for assignment, found in file.resumable.items():
            if assignment in self.partitions:
                self.isolation.run(
                    assignment, self.partitions[assignment].resume, found, alone=alone
                )

    def _give_up(self, partition: AssignmentState) -> None:
        """Kill the processes and drop the replacement of an assignment after an internal error."""
        self.pool.kill_processes(partition)
        self.replacement.drop(partition.assignment)

    # --- life ---

    def run(self) -> int:
        """Run ticks until the daemon must exit, leave the fleet, and return the exit code."""
        try:
            process.become_subreaper()
            fork_hygiene.freeze()
            logs.event(
                "daemon.started",
                instance=self.settings.daemon.instance,
                config=self.settings.source,
                topics=len({assignment.topic for assignment in self.partitions}),
                assignments=len(self.partitions),
                redis=self.leases.link.address,
                python=sys.version.split()[0],
            )
            while True:
                self._tick()
                if self.exit_code is not None:
                    break
                self._wait()
            self.leases.leave()
            if all(each.phase is Phase.FREE for each in self.partitions.values()):
                self._scoreboard_file.remove()
            logs.event("drain.finished", code=self.exit_code)
            return self.exit_code
        except BaseException:
            for partition in self.partitions.values():
                self.pool.kill(partition, "quit")
            raise
        finally:
            self.pool.stop_helpers(2.0)
            if self.watcher is not None:
                self.watcher.close()
            self.leases.close()

    def _tick(self) -> None:
        now = time.monotonic()
        seen = self._observe(now)
        self._apply(plan.merge(self._plan_actions(seen), self.isolation.run))
        self._keep_processes(now)
        self._exchange()
        if self.drain.begun and self.exit_code is None:
            self.exit_code = self.drain.exit_code(
                self.partitions.values(),
                now,
                self.pool.count_exiting(now) + self.pool.exiting_relays,
                redis_ok=self.leases.ok,
            )
        self._report()

    def _observe(self, now: float) -> Observation:
        """Process signals, exited children, and the replies of the last round trip."""
        for number in self.signals.take():
            self._signal(number)
        self.isolation.observe(now)
        self._reap(now)
        partitions = self.partitions.values()
        self.pool.abandon_unkillable(partitions, now)
        self._check_duplicate()
        self._follow_directives()
        self._reload()
        self._check_end(now)
        self.drain.observe(partitions, now, self.pool.count_exiting(now) + self.pool.exiting_relays)
        return self._check_parts(now)

    def _check_parts(self, now: float) -> Observation:
        """Make each part observe the current state, and return the actions that they propose."""
        daemon, partitions = self.settings.daemon, self.partitions.values()
        exceeded = self.limits.observe(partitions, now, daemon.boot_timeout)
        loops_at = self.loop_watch.observe(partitions, now, daemon.loop_blocked_after)
        stacks_at = self.stack_requests.observe(self.partitions, now)
        self._next_check = min(exceeded.next_at, loops_at, stacks_at)
        for found in exceeded.replacements:
            self.isolation.run(found.partition.assignment, self._request_replacement, found)
        moves: list[Action] = []
        if not self.drain.begun:
            process_capacity.observe(self.capacity, now, partitions, self.pool.refusal)
            moves = self._rebalance(now)
        conditions = RollConditions(
            now, daemon, self.drain.begun, self.removed_assignments, self.pool.count_exiting(now)
        )
        self.replacement.observe(self.partitions, conditions)
        return Observation(now, moves, exceeded.actions)

    def _rebalance(self, now: float) -> list[Action]:
        """If the state of the fleet was read again, return the actions that follow, or else []."""
        view = self.leases.take_view()
        if view is None:
            return []
        self._fleet_seen = True
        owned = sum(each.phase is not Phase.FREE for each in self.partitions.values())
        room = (self.settings.daemon.max_partitions or len(self.partitions)) - owned
        possible = self.capacity.room(owned)
        if possible is not None:  # never negative, so this hands over no running partition
            room = min(room, possible)
        wanted, constraints = self.wanted_assignments(), self.control.constraints()
        self.board.unowned = rebalance.count_unowned(view, self.partitions, wanted, constraints)
        moves, more = rebalance.decide(
            self.rebalancer,
            now,
            view,
            self.partitions,
            wanted,
            blocked=self.pool.unkillable,
            room=room,
            constraints=constraints,
            isolate=self.isolation.run,
        )
        if more:
            self.leases.membership.schedule_heartbeat(now + MORE_SECONDS)
        return moves

    def _request_replacement(self, found: Replacement) -> None:
        """Request the replacement of a worker that has reached a limit, and log this."""
        partition = found.partition
        wanted = self.replacement.request(partition.assignment, found.reason)
        if not wanted or found.reason == MAX_MESSAGES:
            return
        logs.event(
            "worker.recycled",
            assignment=partition.assignment,
            child=partition.child.pid if partition.child else None,
            reason=found.reason,
            rss=found.rss,
        )
        worker = partition.worker
        if found.rss is not None and worker is not None and worker.count_settled() == 0:
            logs.event(
                "worker.limit_exceeded",
                logging.WARNING,
                assignment=partition.assignment,
                rss=found.rss,
                baseline=partition.slot.rss_baseline,
                max_rss=partition.consumer.max_rss,
            )

    # --- plan ---

    def _plan_actions(self, seen: Observation) -> list[Action]:
        """Collect the actions of all parts without changing anything."""
        now, partitions = seen.now, self.partitions.values()
        actions: list[Action] = []
        if self.exit_code == EXIT_DUPLICATE:
            actions += [plan.KillWorker(assignment, "quit") for assignment in self.partitions]
        if self.drain.begun:
            actions += self.drain.plan_actions(partitions)
        else:
            actions += seen.moves
            actions += process_capacity.plan_actions(now, partitions)
            actions += self._plan_starts(now)
            for assignment in self.removed_assignments:
                actions += (
                    self.isolation.run(assignment, rebalance.shed, self.partitions[assignment])
                    or ()
                )
            # Release these partitions, because another instance may be able to run them. This one
            # tries again after the cooldown.
            broken = [each for each in partitions if each.broken_until > now and each.releasable]
            actions += [plan.ReleaseLease(each.assignment, "broken") for each in broken]
        for each in partitions:
            if each.phase is Phase.FREE and each.child is not None and not each.stop_reason:
                # The lease was lost while its worker was running. From now on, Redis rejects the
                # worker's writes.
                actions.append(plan.StopWorker(each.assignment, "lost"))
        actions += self.replacement.plan_actions(partitions, now, self.settings.daemon.boot_timeout)
        for each in partitions:
            actions += self.isolation.run(each.assignment, self._commands, each) or ()
        return actions + seen.exceeded

    def _plan_starts(self, now: float) -> list[Action]:
        """Return the actions that start a process for each owned partition that needs one now."""
        starts: list[Action] = []
        for assignment, partition in self.partitions.items():
            if (
                partition.startable
                and now >= partition.start_at
                and assignment not in self.removed_assignments
            ):
                if partition.standby is None:
                    starts.append(plan.ForkWorker(assignment))
                elif partition.standby_is_warm:
                    starts.append(plan.AdoptStandby(assignment))
        return starts

    def _commands(self, partition: AssignmentState) -> list[Action]:
        """Return the actions that make a worker pause, resume or wake up."""
        commands: list[Action] = []
        if partition.child is None:
            return commands
        paused, assignment = self._is_paused(partition), partition.assignment
        if partition.slot.command == (WorkerCommand.NONE if paused else WorkerCommand.PAUSE):
            commands.append(plan.PauseWorker(assignment, paused))
        if partition.housekeeping != partition.relayed:
            commands.append(plan.WakeWorker(assignment, partition.housekeeping))
        return commands

    # --- apply ---

    def _apply(self, actions: list[Action]) -> None:
        forked: list[AssignmentState] = []
        until = 0.0  # monotonic time after which forks wait for the next tick
        self._forks_wait = False
        for action in actions:
            if isinstance(action, plan.ForkWorker | plan.ForkStandby):
                until = until or time.monotonic() + self._fork_seconds()
                if time.monotonic() > until:
                    self._forks_wait = True  # the next tick plans the fork again
                    continue
            partition = self.partitions[action.assignment]
            self.isolation.run(action.assignment, self._apply_action, action, partition)
            if isinstance(action, plan.ForkWorker):
                forked.append(partition)
        # Log after all forks, because writing memory between two forks is expensive (see
        # `plan.merge`).
        self.isolation.run_for_each(forked, _log_started)
        if self.drain.kill_reason:
            self.pool.kill_dismissed()

    def _fork_seconds(self) -> float:
        """Return how many seconds the forks of one tick may take.

        The time is limited, because lease renewals have to wait until the forks are done.
        """
        return min(FORK_SECONDS, self.leases.interval / 2)

    def _apply_action(self, action: Action, partition: AssignmentState) -> None:
        """Apply one action of the plan."""
        match action:
            case plan.Acquire(_, epoch, dead_token):
                partition.acquire(epoch, dead_token)
            case plan.ReleaseLease(_, reason):
                self._count_release(partition, reason)
                partition.release(reason)
            case plan.DismissWorker(_, unexplained):
                self._dismiss_worker(partition, unexplained=unexplained)
            case plan.StopWorker(_, reason):
                self._count_release(partition, reason)
                self.pool.stop(partition, reason)
            case plan.KillWorker(_, reason, run_seq):
                self.pool.kill(partition, reason, run_seq)
            case _:
                self._apply_to_process(action, partition)

    def _apply_to_process(self, action: Action, partition: AssignmentState) -> None:
        match action:
            case plan.ForkWorker():
                self._end_cooldown(partition)
                self.pool.start_worker(partition, paused=self._is_paused(partition))
            case plan.AdoptStandby():
                self._end_cooldown(partition)
                self.pool.adopt_standby(partition, paused=self._is_paused(partition))
            case plan.ForkStandby():
                if not self.pool.start_standby(partition):
                    self.replacement.on_standby_refused(partition.assignment)
            case plan.KillStandby():
                self.pool.kill_standby(partition)
            case plan.DismissStandby():
                self.pool.dismiss_standby(partition)
            case plan.InterruptRun(_, run_seq):
                self.pool.interrupt(partition, run_seq)
            case plan.PauseWorker(_, paused):
                self.pool.pause(partition, paused=paused)
            case plan.WakeWorker(_, wanted):
                self.pool.wake(partition, wanted)

    def _count_release(self, partition: AssignmentState, reason: str) -> None:
        if reason == "shed":
            self.board.add("rebalance_shed")
            logs.event(
                "partition.handed_over",
                assignment=partition.assignment,
                epoch=partition.lease.epoch,
            )
        elif reason == "unstartable":
            self.board.add("unstartable")

    def _end_cooldown(self, partition: AssignmentState) -> None:
        if partition.broken_until:
            partition.broken_until = 0.0
            logs.event("worker.retried", assignment=partition.assignment)

    def _exchange(self) -> None:
        """Update the fields of the heartbeat, and send the calls that are due to Redis."""
        daemon, now = self.settings.daemon, time.monotonic()
        capacity = process_capacity.announcement(self.capacity, daemon.max_partitions)
        if capacity != self._announced:
            self._announced = capacity
            self.leases.membership.heartbeat_soon()
            self.leases.wake_fleet()
        self.leases.membership.announcement = {
            **self.control.announcement,
            **capacity,
            **self._running_reload(),
        }
        if self.drain.begun:
            self.leases.membership.depart()
        before, self._exchanged_at = self._exchanged_at, now
        if any(before < each.broken_until <= now for each in self.partitions.values()):
            self.leases.membership.heartbeat_soon()  # to check whether the partition is still free
        self.leases.tick(now, self.partitions, self.wanted_assignments())

    def _keep_processes(self, now: float) -> None:
        """Keep the helper processes running, and restore what was lost: topics, and capacity."""
        if self.drain.begun:
            self.pool.drain_relays(now)
        self.pool.keep_helpers(now)
        self._keep_embedded(now)
        self._register_again(now)
        self._try_capacity(now)

    def _try_capacity(self, now: float) -> None:
        """If the operating system has refused to start processes, test if it starts them again."""
        running = sum(each.child is not None for each in self.partitions.values())
        count = 0 if self.drain.begun else self.capacity.count_to_try(now, running)
        if not count:
            return
        before = self.capacity.limit
        tried = self.pool.try_processes(count, self._fork_seconds())
        if tried:
            self.capacity.record_trial(now, running, tried, len(self.wanted_assignments()))
        else:
            self.capacity.record_refusal(now, before or 0, self.pool.refusal)
        if before != self.capacity.limit:
            logs.event("capacity.raised", partitions=self.capacity.limit)

    def _wait(self) -> None:
        """Sleep until something happens, such as a signal or an exit, or until a step is due."""
        now = time.monotonic()
        due = [now + TICK_SECONDS, self._next_check, self.leases.next_at()]
        partitions = self.partitions.values()
        if self._forks_wait:
            due.append(now)
        if self.leases.has_changes or (
            self.leases.ok and any(each.wants_exchange for each in partitions)
        ):
            due.append(now)
        free = [one for one in partitions if one.startable and one.standby is None]
        due += [partition.start_at for partition in free]
        children: list[tuple[Child, Assignment | None]] = [*self._children()]
        children += [(child, None) for child in self.pool.helpers()]
        channels = {
            child.control.fileno(): (child, assignment)
            for child, assignment in children
            if not child.control_closed_at
        }
        descriptors = [self.signals.fileno(), *channels, *(child.pidfd for child, _ in children)]
        wake = self.leases.wakes.link.node.fileno()
        if wake is not None:
            descriptors.append(wake)
        for descriptor in process.wait_readable(descriptors, min(due) - now):
            if descriptor == wake:
                self.leases.drain_wakes()
            elif descriptor in channels:
                child, assignment = channels[descriptor]
                if assignment is None:
                    child.drain()
                else:
                    self.isolation.run(assignment, child.drain)

    # --- offered assignments ---

    def _create_assignments(self, settings: Settings, counts: Mapping[str, int]) -> None:
        """Create the state of each assignment that is not known yet, and update the others."""
        # A topic that cannot be read now keeps its last known number of partitions.
        self.counts |= counts
        wanted = _list_assignments(settings, self.counts)
        for assignment, consumer in wanted.items():
            partition = self.partitions.get(assignment)
            if partition is None:
                partition = AssignmentState(assignment, consumer, self.board.allot(assignment))
                self.partitions[assignment] = partition
            partition.consumer = consumer
            partition.slot.partitions = self.counts[assignment.topic]
        self.removed_assignments = frozenset(self.partitions.keys() - wanted.keys())

    def _use_configuration(self, settings: Settings, counts: Mapping[str, int]) -> None:
        """Use a reloaded configuration. Workers that are already running keep the old one."""
        self.settings = self.pool.settings = settings
        self.isolation.policy = settings.daemon.crash_backoff
        self.leases.configure(settings)
        self.rebalancer.delay = settings.daemon.rebalance_delay
        self.rebalancer.hold = settings.daemon.rebalance_hold
        self.rebalancer.moves_max = settings.daemon.rebalance_moves
        self.replacement.forget()
        self._create_assignments(settings, counts)
        self.leases.membership.heartbeat_soon()

    def _has_room_for(self, settings: Settings, counts: Mapping[str, int]) -> bool:
        """Return True if the scoreboard has room for all assignments of a new configuration.

        This reserves the memory for them. If the memory is not sufficient, return False.
        """
        new = _list_assignments(settings, counts).keys() - self.partitions.keys()
        used = self.board.used
        if used + len(new) > self.board.size:
            return False
        try:
            for index in range(used, used + len(new)):
                self.board.reserve(index, HEAD_BYTES)
        except OSError:
            return False
        return True

    def wanted_assignments(self) -> list[Assignment]:
        """Return the assignments of all consumers in the current configuration."""
        return [
            assignment
            for assignment in self.partitions
            if assignment not in self.removed_assignments
        ]

    def _register_again(self, now: float) -> None:
        """Register topics again if a fence or topic was missing or a topic can be read again.

        This also creates the assignments of topics that could not be read before.
        """
        done = self.reregister.collect(now)
        self.board.add("groups_restored", done.groups_restored)
        if done.complete:
            self.leases.must_check_topics = False
        if self.leases.must_check_topics and self.leases.ok:
            self.reregister.begin(now, self.settings, self.counts)
        new = {name: count for name, count in done.partitions.items() if name not in self.counts}
        if new and self._has_room_for(self.settings, new):
            self._create_assignments(self.settings, new)
            self.leases.membership.heartbeat_soon()

    # --- signals, directives, reload ---

    def _signal(self, number: signal.Signals) -> None:
        if number is signal.SIGCHLD:
            return
        logs.event("signal.received", signal=number.name)
        timeout = self.settings.daemon.drain_timeout
        if number in (signal.SIGTERM, signal.SIGINT):
            self.drain.on_signal(number, timeout)
        elif number is signal.SIGQUIT:
            self.drain.kill_all("quit", timeout)
        elif number is signal.SIGHUP:
            self.reload.request()
        elif number is signal.SIGUSR1:
            report.dump(self.partitions, self.isolation)
        elif number in (signal.SIGTSTP, signal.SIGCONT):
            self.paused = number is signal.SIGTSTP

    def _is_paused(self, partition: AssignmentState) -> bool:
        """Return True if a signal has paused all partitions, or a directive has paused this one."""
        return self.paused or self.control.is_paused(partition.assignment)

    def _follow_directives(self) -> None:
        if self.control.read(self.leases.membership.directives):
            self.rebalancer.skip_delay_once()
        self.stack_requests.add(self.control.take_stacks(), time.monotonic())
        if not self.reload.idle:
            return
        if self.control.finish_reload(self.reload.problem):
            # Wake the instances that are waiting for their turn to reload.
            self.leases.membership.heartbeat_soon()
            self.leases.wake_fleet()
        elif self.control.wants_reload(self.leases.view.live):
            self.reload.request()

    def _running_reload(self) -> dict[str, object]:
        """Return the heartbeat field that reports the progress of a reload, or {} without one."""
        since = self.reload.since_unix_ms
        if not since:
            return {}
        assignment, step, workers = self.replacement.progress
        return {
            "reloading": {
                "since_unix_ms": since,
                "directive_unix_ms": self.control.reloading_unix_ms,
                "assignment": None if assignment is None else [*assignment],
                "step": step,
                "workers": workers,
            }
        }

    def _reload(self) -> None:
        if self.watcher is not None and self.watcher.tick(time.monotonic()):
            self.reload.request()
        if self.drain.begun:
            return
        if self.reload.rolling:
            result = self.replacement.continue_roll(self.partitions)
            if result is not None:
                self.reload.finish_roll(result)
            return
        found = self.reload.tick(self.settings)
        if found is not None:
            self._apply_reload(found)

    def _apply_reload(self, found: Validated) -> None:
        """Start to use a validated configuration, and to replace all workers.

        If the configuration is invalid or its partitions do not fit, the old one stays in use.
        """
        self.board.add("groups_restored", found.groups_restored)
        if self.watcher is not None:
            self.watcher.watch(found.sources, found.since_unix_ns)
        if found.settings is None:
            return
        if not self._has_room_for(found.settings, found.partitions):
            # Slots are not reused: an assignment keeps its slot until the supervisor exits, even if
            # the configuration no longer contains it.
            self.reload.refuse(["no slot is left for the new partitions; restart the daemon"])
            return
        self._use_configuration(found.settings, found.partitions)
        self.pool.replace_helpers(time.monotonic())
        assignments = [
            assignment for assignment, one in self.partitions.items() if one.child is not None
        ]
        self.replacement.roll(assignments)
        self.reload.start_roll(len(assignments))

    # --- children ---

    def _reap(self, now: float) -> None:
        """Reap exited children, and process the exits of workers and standbys."""
        self.oom_monitor.count_kills(now)
        self.isolation.run_for_each(self.partitions.values(), self._reap_children, now)
        self.pool.reap_dismissed(now)
        self._log_stacks(now)
        # Reap the orphans that exited children have left behind, but none of our own children,
        # whose exits are processed elsewhere.
        process.reap_adopted(self._known_pids())

    def _log_stacks(self, now: float) -> None:
        """Log stacks that children have written, unless another part has requested them.

        A child writes its stack after the supervisor got SIGUSR1, or when a process that a handler
        has forked crashes.
        """
        if now < self._stacks_at:
            return
        self._stacks_at = now + STACKS_SECONDS
        for child, assignment in self._children():
            self.isolation.run(assignment, self._log_stack, assignment, child)

    def _log_stack(self, assignment: Assignment, child: Child) -> None:
        if not (self.loop_watch.is_asked(assignment) or self.stack_requests.is_asked(assignment)):
            logs.stack(child.poll_stack(), child=child.pid, about=child.title)

    def _reap_children(self, partition: AssignmentState, now: float) -> None:
        self._reap_worker(partition, now)
        self._reap_standby(partition, now)
        if partition.worker is not None:
            partition.worker.note_quiet(now)

    def _reap_worker(self, partition: AssignmentState, now: float) -> None:
        worker = partition.worker
        exit_ = worker.child.reap() if worker is not None else None
        if worker is None or exit_ is None:
            return
        if worker.kill is None:  # otherwise, the supervisor itself sent the signal
            exit_ = self.oom_monitor.explain(exit_)
        found = partition.on_exit(exit_)
        logs.event(
            "worker.crashed" if found.crashed else "worker.exited",
            logging.WARNING if found.crashed else logging.INFO,
            assignment=partition.assignment,
            child=worker.child.pid,
            how=str(exit_),
            reason=worker.stop_reason or None,
            charged=found.charged.decode() if found.charged else None,
        )
        logs.stack(exit_.stack, assignment=partition.assignment, child=worker.child.pid)
        unplanned = found.crashed or worker.kill is not None
        if unplanned and self.settings.telemetry.traces and self.pool.housekeeper is not None:
            limited = worker.kill is not None and worker.kill.reason == "hard-limit"
            kind = "timeout" if limited else exit_.signal_name or f"exit {exit_.code}"
            self.pool.housekeeper.send(exit_message(worker.child.pid, kind, str(exit_)))
        self._follow_up(partition, now, found)

    def _reap_standby(self, partition: AssignmentState, now: float) -> None:
        standby = partition.standby
        exit_ = standby.reap() if standby is not None else None
        if standby is None or exit_ is None:
            return
        partition.standby_ended()
        logs.event(
            "standby.failed",
            logging.WARNING,
            assignment=partition.assignment,
            child=standby.pid,
            how=str(exit_),
        )
        logs.stack(exit_.stack, assignment=partition.assignment, child=standby.pid)
        self.replacement.on_standby_exit(partition, str(exit_), now, self.settings.daemon)

    def _dismiss_worker(self, partition: AssignmentState, *, unexplained: bool) -> None:
        """Detach a worker that handles no more messages but has not exited yet."""
        reason = partition.stop_reason
        child, found = partition.dismiss(unexplained=unexplained)
        self.pool.dismiss_worker(partition, child, reason)
        self._follow_up(partition, time.monotonic(), found)

    def _follow_up(self, partition: AssignmentState, now: float, found: ExitAssessment) -> None:
        if not partition.plan_restart(found, now, self.settings.daemon):
            logs.event(
                "worker.crash_looped",
                logging.ERROR,
                assignment=partition.assignment,
                last_exit=partition.last_exit,
                seconds=round(partition.broken_until - now, 1),
            )
        if found.lost:
            self.leases.report_lost(partition)
        elif partition.phase is Phase.FREE:
            self.leases.reread_fleet()

    def _children(self) -> list[tuple[Child, Assignment]]:
        """Return all workers, standbys and dismissed processes, each with its assignment."""
        partitions = self.partitions.values()
        found = [(each.child, each.assignment) for each in partitions if each.child is not None]
        found += [
            (each.standby, each.assignment) for each in partitions if each.standby is not None
        ]
        return found + [(one.child, one.partition.assignment) for one in self.pool.dismissed]

    def _known_pids(self) -> set[int]:
        known = {child.pid for child, _ in self._children()}
        known |= {child.pid for children in self.pool.unkillable.values() for child in children}
        known |= {child.pid for child in self.pool.helpers()}
        if self.watcher is not None and self.watcher.child is not None:
            known.add(self.watcher.child.pid)
        if self.embedded is not None and self.embedded.pid is not None:
            known.add(self.embedded.pid)
        return known | self.reload.pids | self.reregister.pids | self.resolver.pids

    def _keep_embedded(self, now: float) -> None:
        """Restart the embedded server if it has exited. Its data is on disk."""
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

    def _check_duplicate(self) -> None:
        """Exit if another process is certainly alive under the same instance name."""
        member = self.leases.membership
        if member.silence.is_duplicate_lasting:
            logs.event(
                "duplicate_instance.exited",
                logging.ERROR,
                instance=self.settings.daemon.instance,
                **member.duplicate,
            )
            self.exit_code = EXIT_DUPLICATE

    # --- finishing ---

    def _check_end(self, now: float) -> None:
        """Start the drain if a burst is complete, or if every partition crashes in a loop."""
        if self.drain.begun or self.exit_code is not None:
            return
        if self.burst is not None:
            self._end_burst(now, self.burst)
        wanted = self.wanted_assignments()
        rested = [self.partitions[assignment] for assignment in wanted]
        broken = [each for each in rested if each.broken_until > now and each.crashed]
        if broken and len(broken) == len(wanted):
            causes = list(dict.fromkeys(each.last_exit for each in broken))
            more = [f"{len(causes) - CAUSES_MAX} more"] if len(causes) > CAUSES_MAX else []
            error = "; ".join([*causes[:CAUSES_MAX], *more])
            logs.event(
                "instance.crash_looped", logging.CRITICAL, assignments=len(broken), error=error
            )
            self.drain.code = EXIT_CRASH_LOOP
            self.drain.begin(0.0)  # no worker is left, so the drain only has to release the leases

    def _end_burst(self, now: float, burst: BurstCheck) -> None:
        wanted = {
            assignment: self.partitions[assignment] for assignment in self.wanted_assignments()
        }
        broken = burst.result(now, wanted)
        if broken is None:
            return
        logs.event("burst.finished", broken=broken or None)
        if broken:
            self.drain.code = EXIT_CRASH_LOOP
        self.drain.begin(self.settings.daemon.drain_timeout)

    def _report(self) -> None:
        self.report.tick(
            self.partitions,
            redis_ok=self.leases.ok,
            fleet_seen=self._fleet_seen,
            draining=self.drain.begun,
            paused=self.paused,
            drained=self.control.is_drained,
            capacity=self.capacity.limit,
            member=self.leases.membership.accepted,
            duplicate=self.leases.membership.silence.is_duplicate_live,
        )
        logs.flush()
        self.board.add("log_dropped", logs.count_dropped() - self.board.counter("log_dropped"))


def _log_started(partition: AssignmentState) -> None:
    if partition.child is not None:
        logs.event(
            "worker.started",
            assignment=partition.assignment,
            child=partition.child.pid,
            epoch=partition.lease.epoch,
        )


def _list_assignments(settings: Settings, counts: Mapping[str, int]) -> dict[Assignment, Consumer]:
    """Return the assignments of all consumers, each mapped to its consumer.

    `counts` maps topics to partition counts. Consumers of other topics have no assignments.
    """
    return {
        Assignment(consumer.topic, partition, consumer.assignment_group): consumer
        for consumer in settings.consumers
        for partition in range(counts.get(consumer.topic, 0))
    }
