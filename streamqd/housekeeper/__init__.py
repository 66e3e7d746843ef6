"""The housekeeper: one process per instance that maintains the data of the owned partitions.

It runs the tasks that are due in a loop, and limits the time of each turn of a task. It exits when
the supervisor commands it, or if the supervisor has exited. It owns neither leases nor messages. So
while it is not running, no message is lost, but retries have to wait. It continues after any outage
of Redis. A separate thread serves HTTP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from streamqd import logs, process
from streamqd.config import Settings
from streamqd.errors import (
    InvalidValueError,
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
    SilentConnectionError,
)
from streamqd.housekeeper.batch import TimeSlice
from streamqd.housekeeper.dead_letter_expirer import DeadLetterExpirer
from streamqd.housekeeper.figures import ask_time, measure
from streamqd.housekeeper.history import MINUTE, HistoryWriter
from streamqd.housekeeper.isolation import TaskIsolation
from streamqd.housekeeper.listener import LISTENER_INTERVAL_SECONDS, Listener
from streamqd.housekeeper.outboxes import measure_outboxes
from streamqd.housekeeper.promoter import HINT_INTERVAL_SECONDS, retry_promoter, send_promoter
from streamqd.housekeeper.reclaimer import Reclaimer
from streamqd.housekeeper.scheduler import MOVES_SECONDS, RECONCILE_SECONDS, Scheduler
from streamqd.housekeeper.script_loader import ScriptLoader
from streamqd.housekeeper.summary import Summary, supervisor_pid
from streamqd.housekeeper.trimmer import Trimmer
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import InstanceFlags, Scoreboard, WorkerState, now_ns
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from streamqd.telemetry import killed

if TYPE_CHECKING:
    from streamqd.http import HttpServer

LINK_TIMEOUT = 5.0
PROBE_AFTER_SECONDS = 0.3  # silence after which a connection is probed
AWAY_FIRST, AWAY_LONGEST = 0.5, 5.0  # first and longest wait in seconds while Redis is unavailable
MESSAGE_BYTES_MAX = 512  # longest message from the supervisor
SPANS_SECONDS = 1.0  # longest time that an export of spans may delay the exit
SUMMARY_LIFE = 10.0  # seconds until a published summary expires, five times the publish interval
INACTIVE_STATES = (WorkerState.GONE, WorkerState.BOOTING)
# Refusals which mean that the whole server is unavailable for a time. Other refusals affect only a
# single key, or only writes.
_UNAVAILABLE = (RefusalKind.NOT_READY, RefusalKind.BUSY, RefusalKind.LOGIN)


class Task:
    """A task that runs every `every` seconds, or sooner if it asks for that.

    `run` executes one turn of the task. It may return a number of seconds after which the task must
    run again, which only matters if it is less than `every`. Otherwise, it returns None.
    """

    def __init__(self, name: str, every: float, run: Callable[[], float | None]) -> None:
        self.name = name
        self.every = every
        self.run = run
        self.due = 0.0
        self.episode = logs.Episode("housekeeper.failed", "housekeeper.recovered")


class Housekeeper:
    """Runs the tasks when they are due, and handles their failures."""

    def __init__(self, board: Scoreboard, settings: Settings, control: socket.socket) -> None:
        self._board = board
        self._settings = settings
        self._control = control
        daemon = settings.daemon
        link = connect(
            settings.redis,
            timeout=LINK_TIMEOUT,
            name=f"streamqd:{daemon.instance}:housekeeper",
            probe_after=PROBE_AFTER_SECONDS,
        )
        self._store = Store(link, Keys(settings.keys.control, settings.keys.streams))
        self.view = MetricsView(
            instance=daemon.instance,
            board=board,
            consumers=tuple((each.topic, each.assignment_group) for each in settings.consumers),
        )
        self._isolation = TaskIsolation(self.view)
        self.summary = Summary(
            self.view,
            settings,
            supervisor_pid(),
            self._isolation.isolate_task("publish"),
            self._isolation.failures,
        )
        self._redis_episode = logs.Episode("redis.lost", "redis.recovered")
        bad = logs.bad_values()
        self._figures = TimeSlice(
            lambda: measure(self._store, self.view, bad, self._isolation.isolate_task("measure"))
        )
        self._killed_runs = killed.KilledRuns(settings) if settings.telemetry.traces else None
        self._history = None
        if daemon.history:
            isolate = self._isolation.isolate_task("history")
            self._history = HistoryWriter(self._store, self.view, settings, isolate)
        self._tasks = self._all_tasks()
        self._owned: list[Assignment] = []
        self._idle: list[bool] = []
        self._identity_flags = (
            InstanceFlags.NONE
        )  # MEMBER or DUPLICATE, if one applies to the instance
        self._check_at = 0.0  # monotonic time of the next check of the slots

    def _all_tasks(self) -> list[Task]:
        store, view = self._store, self.view
        isolate = self._isolation.isolate_task
        retries = retry_promoter(store, view, isolate("promote_retries"))
        sends = send_promoter(store, view, isolate("promote_delayed"))
        reclaimer = Reclaimer(store, self._settings.consumers, isolate("reclaim"))
        listener = Listener(store, self._wake_supervisor, isolate("listen"))
        trimmer = Trimmer(store, view, self._settings, isolate("trim"))
        expirer = DeadLetterExpirer(store, view, self._settings, isolate("expire_dead_letters"))

        def promote_retries() -> float:
            return retries.turn(
                lambda: {
                    assignment: slot.next_due_unix_ms for slot, assignment in view.owned_slots()
                }
            )

        def promote_delayed() -> float:
            return sends.turn(
                lambda: {
                    (assignment.topic, assignment.partition): 0
                    for _, assignment in view.owned_slots()
                }
            )

        scheduler = Scheduler(store, view, self._settings, isolate)
        return [
            # This task comes first, because due times are compared with the clock that it reads.
            Task("probe", 2.0, self._probe),
            Task("listen", LISTENER_INTERVAL_SECONDS, lambda: listener.run(view.owned_slots())),
            # These tasks return the time of their next turn, which is usually sooner.
            Task("promote_retries", 1.0, promote_retries),
            Task("promote_delayed", 2.0, promote_delayed),
            Task("declare_schedules", RECONCILE_SECONDS, scheduler.declare),
            Task("move_schedules", MOVES_SECONDS, scheduler.finish_moves),
            Task("fire_schedules", 1.0, scheduler.fire),
            Task("measure", 3.0, self._measure),
            Task("publish", 2.0, self._publish),
            Task("trim", 5.0, trimmer.run),
            Task("expire_dead_letters", 30.0, expirer.run),
            Task("load_scripts", 2.0, ScriptLoader(store.connection).run),
            Task("reclaim", reclaimer.every, lambda: reclaimer.run(view.owned_slots())),
            *self._enabled_tasks(),
        ]

    def _enabled_tasks(self) -> Iterator[Task]:
        """Yield the tasks that run only if the settings enable them."""
        if self._history is not None:
            yield Task("history", MINUTE, self._history.run)
        if self._killed_runs is not None:
            yield Task("export_spans", killed.CHECK_INTERVAL_SECONDS, self._killed_runs.run)
        names, bad = [each.name for each in self._settings.outboxes], logs.bad_values()
        if names:
            yield Task(
                "measure_outboxes",
                3.0,
                lambda: measure_outboxes(self._store, self.view, names, bad),
            )

    def run(self) -> int:
        """Run the tasks until the housekeeper must stop, and return the exit code."""
        logs.event("housekeeper.started")
        server = self._serve()
        try:
            while not self._stop_requested(self._wait()):
                self._board.housekeeper_progress_ns = now_ns()
                self._round()
                logs.flush()
                if server is not None and not server.alive:
                    logs.event("housekeeper.failed", logging.ERROR, task="http")
                    return 1
            self._end_history()
        finally:
            if server is not None:
                server.stop()
            self._store.connection.close()
            if self._killed_runs is not None:
                self._killed_runs.stop(SPANS_SECONDS)
        logs.event("housekeeper.stopped")
        return 0

    def _end_history(self) -> None:
        """Write the history of the unfinished minute, because the next process starts from zero."""
        if self._history is not None and self.view.redis_up:
            with contextlib.suppress(RedisResponseError, RedisUnavailableError):
                self._history.write()

    def _record_assignments(self) -> None:
        """Check which assignments are owned and which workers are running.

        If that has changed, make the tasks that publish it due now.
        """
        slots = self.view.owned_slots()
        owned = [assignment for _, assignment in slots]
        idle = [slot.state in INACTIVE_STATES for slot, _ in slots]
        named = self._board.flags & (InstanceFlags.MEMBER | InstanceFlags.DUPLICATE)
        seen = (owned, idle, named)
        if seen != (self._owned, self._idle, self._identity_flags) and not self._redis_episode.open:
            # Operators should see a new partition, or the start or exit of a worker, immediately
            # and not only after the next regular turn of these tasks.
            shown = ("measure", "publish") if owned != self._owned else ("publish",)
            self._owned, self._idle, self._identity_flags = seen
            for task in self._tasks:
                if task.name in shown:
                    task.due = 0.0

    def _round(self) -> None:
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + HINT_INTERVAL_SECONDS
            self._record_assignments()
            self._isolation.observe()
        for task in self._tasks:
            if task.due > time.monotonic():
                continue
            # Report progress before each task. A turn takes no longer than TURN_SECONDS, so a
            # healthy housekeeper reports often enough.
            self._board.housekeeper_progress_ns = now_ns()
            try:
                sooner = task.run()
            except SilentConnectionError as error:
                self._delay_tasks(error, away=False)
                return
            except RedisUnavailableError as error:
                self._delay_tasks(error)
                return
            except RedisResponseError as error:
                if error.kind in _UNAVAILABLE:
                    self._delay_tasks(error)
                    return
                self._note_failure(task, error)
            except Exception as error:  # noqa: BLE001 - a fault in one task must not end the others
                self._note_failure(task, error)
            else:
                task.episode.log_recovery(task=task.name)
                every = task.every * random.uniform(0.9, 1.0)
                task.due = time.monotonic() + (every if sooner is None else min(every, sooner))

    def _probe(self) -> None:
        """Read the server's time, and record that Redis is available.

        After an outage, Redis counts as available again only when this task succeeds.
        """
        ask_time(self._store.connection, self.view, self._store.keys.registry())
        self._redis_episode.log_recovery(address=self._store.connection.address)
        self.view.redis_up = True

    def _measure(self) -> float | None:
        """Read the figures, and make the tasks due that promote messages.

        The new figures may show messages that are due and were unknown until now.
        """
        sooner = self._figures.run()
        for task in self._tasks:
            if task.name.startswith("promote_"):
                task.due = 0.0
        return sooner

    def _delay_tasks(self, error: Exception, *, away: bool = True) -> None:
        """Delay all tasks because of an error, for longer after each failure in a row.

        `away` is false if only the connection has failed. In that case, nothing is delayed, because
        Redis will answer on a new connection.
        """
        self.view.redis_up = False
        self._redis_episode.log_failure(address=self._store.connection.address, error=str(error))
        if not away:
            self._tasks[0].due = 0.0  # this task detects that Redis is available again
            return
        wait = min(AWAY_LONGEST, AWAY_FIRST * 2 ** min(self._redis_episode.failures - 1, 8))
        again = time.monotonic() + wait * random.uniform(0.5, 1.0)
        for task in self._tasks:
            task.due = max(task.due, again)

    def _note_failure(self, task: Task, error: Exception) -> None:
        self.view.count("failures", (self.view.instance, task.name))
        known = isinstance(error, RedisResponseError | InvalidValueError)
        task.episode.log_failure(
            logging.WARNING if known else logging.ERROR,
            exc=None if known else error,
            task=task.name,
            error=str(error),
        )
        task.due = time.monotonic() + max(1.0, task.every)

    def _publish(self) -> None:
        self.summary.observe()
        daemon, keys, flags = self._settings.daemon, self._store.keys, self._board.flags
        if InstanceFlags.MEMBER in flags:
            key = keys.instance(daemon.fleet, daemon.instance)
        elif InstanceFlags.DUPLICATE in flags:
            key = keys.duplicate(daemon.fleet, daemon.instance)  # for `doctor`
        else:
            return  # another process may be using the name of this instance
        document = json.dumps(self.summary.document(), separators=(",", ":"))
        self._store.connection.execute("SET", key, document, "PX", round(SUMMARY_LIFE * 1000))

    def _wake_supervisor(self) -> None:
        """Wake the supervisor, because a slot contains a request for its worker."""
        with contextlib.suppress(OSError):
            self._control.send(b"!", socket.MSG_DONTWAIT)

    def _wait(self) -> float:
        return max(0.0, min(task.due for task in self._tasks) - time.monotonic())

    def _stop_requested(self, seconds: float) -> bool:
        """Wait for a command from the supervisor. Return True if the housekeeper must stop.

        A closed socket counts as a command to stop.
        """
        if not process.wait_readable([self._control.fileno()], seconds):
            return False
        try:
            message = self._control.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if message.startswith(killed.PREFIX) and self._killed_runs is not None:
            self._killed_runs.note(message)
            self._task("export_spans").due = 0.0
        return message in (b"", b"quit")

    def _task(self, name: str) -> Task:
        return next(task for task in self._tasks if task.name == name)

    def _serve(self) -> HttpServer | None:
        if self._settings.http.address is None:
            return None
        # `preload` has already imported this module, unless a reload enabled HTTP.
        from streamqd.housekeeper.serving import serve

        return serve(self._settings, self.view, self.summary)


def preload(settings: Settings) -> None:
    """Import the modules that the housekeeper needs with these settings.

    The supervisor calls this before it forks, because its children then share the memory of the
    modules. Other modules are not imported, because they would delay the start and cost memory in
    every worker, which is also a fork of the supervisor.
    """
    if settings.http.address is not None:
        from streamqd.housekeeper import serving  # noqa: F401


def run(board: Scoreboard, settings: Settings, control: socket.socket) -> int:
    """Run the housekeeper in a forked child, and return its exit code.

    It runs until the control socket is closed or receives `quit`, and then returns 0. It returns 1
    if the HTTP server has died.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal or service manager sends these signals to all processes. Ignore them, because
        # the supervisor decides when the housekeeper stops.
        signal.signal(number, signal.SIG_IGN)
    return Housekeeper(board, settings, control).run()
