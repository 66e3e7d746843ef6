"""The summary of an instance, which is a JSON document for Redis, `/status` and the status page.

Each instance publishes its summary in Redis, so that the commands `status`, `top` and `partitions`
on any host can show the whole fleet.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import Any

from streamqd import process
from streamqd.config import Settings
from streamqd.housekeeper.pace import Pace
from streamqd.idle_reason import WORDS
from streamqd.isolate import Isolate, run_directly
from streamqd.metrics.view import MetricsView, longest_run, read_wait, seconds_since
from streamqd.model import Assignment
from streamqd.scoreboard import (
    BOARD_COUNTERS,
    COUNTERS,
    InstanceFlags,
    WorkerSlot,
    WorkerState,
    now_ns,
)
from streamqd.store.statistics import DeadLetterCount
from streamqd.version import __version__

RATE_SECONDS = 10.0  # time constant of the exponential average of each rate
FAILURES_MAX = 4  # largest number of kinds of failure for each assignment
RATED = ("fetched", "acked", "retried", "dead_lettered", "failed")
_RATED = [COUNTERS.index(name) for name in RATED]


class Rates:
    """Computes for each slot how fast its counters grow, as exponential averages per second."""

    def __init__(self, isolate: Isolate[Assignment] = run_directly) -> None:
        self._isolate = isolate
        self._seen: dict[int, tuple[list[int], int]] = {}
        self._rates: dict[int, list[float]] = {}

    def observe(self, view: MetricsView) -> None:
        """Sample the current counters of each slot."""
        now = now_ns()
        for slot, assignment in view.assigned_slots():
            self._isolate(assignment, self._take, slot, now)

    def _take(self, slot: WorkerSlot, now: int) -> None:
        counters = slot.counters.tolist()
        values = [counters[index] for index in _RATED]
        if slot.index not in self._seen:
            self._rates[slot.index] = [0.0] * len(RATED)
        else:
            before, then = self._seen[slot.index]
            seconds = max(1e-3, (now - then) / 1e9)
            share = 1 - math.exp(-seconds / RATE_SECONDS)
            self._rates[slot.index] = [
                rate + share * ((value - old) / seconds - rate)
                for rate, value, old in zip(self._rates[slot.index], values, before, strict=True)
            ]
        self._seen[slot.index] = (values, now)

    def get(self, slot: WorkerSlot) -> dict[str, float]:
        """Map the names of a slot's counters to their rates per second."""
        rates = self._rates.get(slot.index, [0.0] * len(RATED))
        return {name: round(rate, 2) for name, rate in zip(RATED, rates, strict=True)}


class Summary:
    """Builds the summary from the figures in the view and from the scoreboard."""

    def __init__(
        self,
        view: MetricsView,
        settings: Settings,
        pid: int,
        isolate: Isolate[Assignment] = run_directly,
        tasks: Callable[[Assignment], list[dict[str, Any]]] = lambda _: [],
    ) -> None:
        """Create the summary of an instance.

        `pid` is the process ID of the supervisor. `tasks` takes an assignment and returns the
        failures of the housekeeper's tasks for it.
        """
        self._isolate = isolate
        self._tasks = tasks
        self._view = view
        self._settings = settings
        self._pid = pid
        self._host = socket.gethostname()
        self._started = round(process.started_at(pid) * 1000)
        self.rates = Rates(isolate)
        self.pace = Pace(isolate)
        self._consumers = {(each.topic, each.assignment_group): each for each in settings.consumers}

    def observe(self) -> None:
        """Sample the counters to compute their rates. Call this before publishing a summary."""
        self.rates.observe(self._view)
        self.pace.observe(self._view)

    def document(self) -> dict[str, Any]:
        """Return the summary as a dictionary that can be converted to JSON."""
        view = self._view
        board = view.board
        shown = [
            self._isolate(assignment, self._assignment, slot, assignment)
            for slot, assignment in view.assigned_slots()
            if slot.owned or slot.state in (WorkerState.BROKEN, WorkerState.FAILED)
        ]
        assignments = [each for each in shown if each is not None]
        assignments.sort(key=lambda each: (each["topic"], each["group"], each["partition"]))
        return {
            "instance": view.instance,
            "fleet": self._settings.daemon.fleet,
            "host": self._host,
            "pid": self._pid,
            "version": __version__,
            "started_unix_ms": self._started,
            "at_unix_ms": view.now_unix_ms() if view.asked_ns else None,
            "state": instance_state(board.flags, owned=any(each["owned"] for each in assignments)),
            "redis_up": view.redis_up,
            "counters": {name: board.counter(name) for name in BOARD_COUNTERS},
            "assignments": assignments,
            "refused_board": self._refused_board(),
        }

    def _refused_board(self) -> str:
        """Return the path of a predecessor's rejected scoreboard file, or '' if none exists."""
        path = self._view.board.refused_file
        return str(path) if path is not None and path.exists() else ""

    def _assignment(self, slot: WorkerSlot, assignment: Assignment) -> dict[str, Any]:
        figures = self._view.assignments.get(assignment)
        partition = self._view.partitions.get((assignment.topic, assignment.partition))
        dead_letters = self._view.dead_letters.get((assignment.topic, assignment.partition))
        if partition is not None and not partition.dead:
            dead_letters = DeadLetterCount(whole=True)
        oldest = figures.oldest_unix_ms() if figures else None
        unread = figures.oldest_unread_unix_ms() if figures else None
        consumer = self._consumers.get((assignment.topic, assignment.group))
        longest = longest_run(slot)
        return {
            "topic": assignment.topic,
            "partition": assignment.partition,
            "group": assignment.group,
            "owned": bool(slot.owned),
            "state": worker_state(slot),
            "pid": slot.pid or None,
            "epoch": slot.epoch,
            "since_unix_ms": slot.since_unix_ms,
            "in_flight": slot.unfinished,
            "longest_run_seconds": round(seconds_since(longest.started_ns), 3) if longest else 0.0,
            "rss": slot.rss or None,
            "lag": figures.lag if figures else None,
            "pending": figures.pending if figures else None,
            "waiting_retries": figures.waiting_retries if figures else None,
            "oldest_seconds": round(self._view.age(oldest), 3) if oldest is not None else None,
            "length": partition.length if partition else None,
            "partition_dead_letters": partition.dead if partition else None,
            "dead_letters": dead_letters.get(assignment.group) if dead_letters else None,
            "oldest_unread_unix_ms": unread,
            "next_due_unix_ms": figures.next_due_unix_ms if figures else None,
            **_waits(slot),
            **_recovery(slot),
            **_loop(slot),
            "handler": consumer.handler if consumer else "",
            "timeout": consumer.timeout if consumer else None,
            "hard_timeout": consumer.hard_timeout if consumer else None,
            "rate": slot.rate_micro / 1e6 or None,
            "rate_per": consumer.rate_per if consumer else None,
            "progress_seconds": _progress(slot, longest.started_ns) if longest else None,
            "running": longest.place.decode("ascii", "replace") if longest else None,
            "failures": [*self._tasks(assignment), *self._failures(slot)],
            **self.pace.document(slot.index, assignment),
            "rates": self.rates.get(slot),
            "counters": dict(zip(COUNTERS, slot.counters.tolist(), strict=False)),
        }

    def _failures(self, slot: WorkerSlot) -> list[dict[str, Any]]:
        """Return the kinds of recent failures, each with its count and the age of the last one."""
        return [
            {
                "error": each.name,
                "count": each.times,
                "seconds_ago": round(seconds_since(each.last_ns), 1),
            }
            for each in slot.failures.recent()[:FAILURES_MAX]
        ]


def worker_state(slot: WorkerSlot) -> str:
    """Return a word for the state of a worker, or for the reason why it waits."""
    try:
        state = WorkerState(slot.state)
    except ValueError:
        return "unknown"
    if state is WorkerState.READY:
        waits = WORDS.get(slot.waits.read().kind)  # valid only for a ready worker
        return waits or ("recovering" if slot.suspects_left else "ready")
    return state.name.lower()


def _progress(slot: WorkerSlot, since_ns: int) -> float | None:
    """Return the seconds since a handler last reported progress (with `heartbeat`).

    Return None if no handler has done so since `since_ns`.
    """
    return round(seconds_since(slot.heartbeat_ns), 1) if slot.heartbeat_ns > since_ns else None


def _waits(slot: WorkerSlot) -> dict[str, Any]:
    """Return the fields about waits: remaining seconds, held entries, and stops by the guards."""
    waits = read_wait(slot)
    seconds = max(0.0, (waits.until_ns - now_ns()) / 1e9) if waits.until_ns else None
    return {
        "waits_seconds": None if seconds is None else round(seconds, 3),
        "held": waits.held,
        "held_keys": waits.held_keys,
        "circuit_openings": waits.opened,
        "flood_stops": waits.flooded,
    }


def _recovery(slot: WorkerSlot) -> dict[str, int]:
    """Return the fields about the search for a message that crashes (see `policy/rounds.py`)."""
    left = slot.suspects_left if slot.pid else 0
    return {
        "suspects_left": left,
        "suspects": max(left, slot.suspects) if left else 0,
        "round_size": slot.round_size if left else 0,
    }


def _loop(slot: WorkerSlot) -> dict[str, Any]:
    """Return the fields about a worker's event loop.

    They show how long it has been blocked now, when it was last blocked, and by which line of code.
    """
    blocked = slot.loop_blocked_ns if slot.pid else 0
    turned = slot.loop_turned_ns
    return {
        "loop_blocked_seconds": round(seconds_since(blocked), 1) if blocked else 0.0,
        "loop_blocked_seconds_ago": round(seconds_since(turned), 1) if turned else None,
        "loop_blocker": slot.blocker if blocked or turned else "",
    }


def instance_state(flags: InstanceFlags, *, owned: bool) -> str:
    """Return a word for the state of the instance, which is the most important one that applies."""
    if InstanceFlags.DRAINING in flags:
        return "draining"
    if InstanceFlags.STARTED not in flags:
        return "starting"
    if InstanceFlags.PAUSED in flags:
        return "paused"
    if InstanceFlags.DRAINED in flags:
        return "draining" if owned else "drained"
    if InstanceFlags.LIMITED in flags:
        return "limited"
    return "working" if owned else "standby"


def supervisor_pid() -> int:
    """Return the process ID of the supervisor, which is the parent of this process."""
    return os.getppid()
