"""Promises of the supervisor's parts, tested with a child that only records its commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from streamqd.config import Consumer, Settings
from streamqd.model import Assignment
from streamqd.notify import Notifier
from streamqd.process import Exit
from streamqd.scoreboard import DONE, RUNNING, Scoreboard, WorkerCommand, WorkerState, now_ns
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.supervisor.drain import EXIT_DEADLINE, EXIT_DRAINED, Drain
from streamqd.supervisor.limits import Limits
from streamqd.supervisor.partition import AssignmentState
from streamqd.supervisor.plan import (
    Action,
    InterruptRun,
    KillWorker,
    ReleaseLease,
    StopWorker,
    merge,
)
from streamqd.supervisor.worker_pool import WorkerPool
from streamqd.worker import ExitCode

ASSIGNMENT = Assignment("access", 0, "hits")


class FakeChild:
    """The part of a child process that the supervisor uses."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # the pid of any process that psutil can measure
        self.told: list[bytes] = []
        self.signals: list[int] = []
        self.killed = False
        self.control_closed_at = 0.0
        self.peak_rss = 0

    def send(self, word: bytes) -> None:
        self.told.append(word)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill_group(self) -> None:
        self.killed = True


class Scenario:
    """An assignment whose ready worker holds two messages and is running the first one."""

    def __init__(self, **consumer: object) -> None:
        board = Scoreboard(1)
        settled = Consumer(topic="access", group="hits", handler="h:go", **consumer)  # type: ignore[arg-type]
        self.holding = AssignmentState(ASSIGNMENT, settled, board.allot(ASSIGNMENT))
        self.slot = self.holding.slot
        self.crew = WorkerPool(Settings(), board, [], [])
        self.limits = Limits()
        self.child = FakeChild()
        self.holding.acquire(seen_epoch=6)
        self.answer(b"7", 0, b"")
        self.holding.record_start(self.child, time.monotonic())  # type: ignore[arg-type]
        self.slot.state = WorkerState.READY
        self.slot.post_batch([b"m:1-0", b"m:2-0"])
        self.begin(0, age=0.0)

    def answer(self, *rest: object) -> None:
        self.holding.apply_reply(Reply("OK", list(rest)), time.monotonic())

    def begin(self, index: int, *, age: float) -> None:
        """Mark an entry as one that has been running for `age` seconds."""
        self.slot.run_seq += 1
        self.slot.states[index] = RUNNING
        self.slot.lanes[0], self.slot.lanes[1] = index, now_ns() - int(age * 1e9)

    def look(self, now: float | None = None) -> None:
        """Observe the limits, and apply the actions that they return."""
        at = time.monotonic() if now is None else now
        self.apply(self.limits.observe([self.holding], at, boot_timeout=60.0).actions)

    def apply(self, actions: Iterable[Action]) -> None:
        """Apply the actions to processes and leases in the same way as the supervisor."""
        for action in merge(actions):
            if isinstance(action, KillWorker):
                self.crew.kill(self.holding, action.reason, action.run_seq)
            elif isinstance(action, StopWorker):
                self.crew.stop(self.holding, action.reason)
            elif isinstance(action, ReleaseLease):
                self.holding.release()
            else:
                assert isinstance(action, InterruptRun)
                self.crew.interrupt(self.holding, action.run_seq)


# --- the hard limit -------------------------------------------------------------------------------


def test_run_over_its_hard_limit_is_killed_at_the_second_tick() -> None:
    scenario = Scenario(hard_timeout=5.0)
    scenario.begin(0, age=6.0)
    scenario.look()
    assert not scenario.child.killed, "the run may just be finishing, so the next look decides"
    scenario.look()
    assert scenario.child.killed


def test_new_run_is_not_killed_for_the_previous_one() -> None:
    """A run that starts between two observations is not killed for the age of the previous run."""
    scenario = Scenario(hard_timeout=5.0)
    scenario.begin(0, age=6.0)
    scenario.look()
    scenario.slot.states[0] = DONE
    scenario.begin(1, age=6.0)
    scenario.look()
    assert not scenario.child.killed


@pytest.mark.parametrize("limit", ["timeout", "hard_timeout"])
def test_worker_keeps_its_limits_after_a_reload(limit: str) -> None:
    """A reload changes only the next worker's limits. This one may be unable to interrupt a run."""
    scenario = Scenario()
    scenario.holding.consumer = replace(scenario.holding.consumer, **{limit: 5.0})  # type: ignore[arg-type]
    scenario.begin(0, age=6.0)
    scenario.look()
    scenario.look()
    assert (scenario.child.signals, scenario.child.killed) == ([], False)
    scenario.holding.record_start(scenario.child, time.monotonic())  # type: ignore[arg-type]
    scenario.look()
    scenario.look()
    assert (scenario.child.signals, scenario.child.killed) != ([], False)


# --- progress -------------------------------------------------------------------------------------


def test_worker_between_two_long_runs_is_not_stuck() -> None:
    """A worker reports progress once per batch, so it is not stuck during a slow batch."""
    scenario = Scenario()
    assert scenario.holding.worker is not None
    scenario.holding.worker.ready_at = now = 1_000.0
    scenario.look(now + 100)
    scenario.slot.states[0] = DONE
    scenario.look(now + 101)
    scenario.begin(1, age=0.0)
    scenario.look(now + 125)
    scenario.slot.states[1] = DONE
    scenario.look(now + 150)
    assert not scenario.child.killed


def test_worker_without_any_progress_is_replaced() -> None:
    scenario = Scenario()
    assert scenario.holding.worker is not None
    scenario.holding.worker.ready_at = now = 1_000.0
    scenario.slot.states[0] = DONE
    scenario.look(now + 100)
    assert not scenario.child.killed
    scenario.look(now + 131)
    assert scenario.child.killed


# --- the drain ------------------------------------------------------------------------------------


class DrainOf:
    """The drain of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.drain = Drain(Notifier({}))
        self.drain.begin(30.0)

    def look(self, now: float | None = None) -> int | None:
        """Make one tick. Return the exit code, or None as long as a process or lease is left."""
        at = time.monotonic() if now is None else now
        self.drain.observe([self.scenario.holding], at, ending=0)
        self.scenario.apply(self.drain.plan_actions([self.scenario.holding]))
        return self.drain.exit_code([self.scenario.holding], at, ending=0, redis_ok=True)


def test_drain_finishes_the_running_message_and_releases() -> None:
    scenario = Scenario()
    drain = DrainOf(scenario)
    assert drain.look() is None
    assert (scenario.slot.command, scenario.child.told) == (WorkerCommand.STOP, [b"stop"])
    assert drain.look() is None
    assert not scenario.child.killed

    scenario.slot.post_batch([])
    scenario.slot.state = WorkerState.QUIET
    blame = scenario.holding.on_exit(Exit(ExitCode.STOPPED, None))
    assert (blame.crashed, blame.charged) == (False, None)
    assert drain.look() is None, "the lease is still to be released"
    scenario.answer()
    assert drain.look() == EXIT_DRAINED


@pytest.mark.parametrize(
    ("code", "refused", "ends"),
    [
        ("BADVALUE", "releasing", EXIT_DRAINED),
        ("WRONGTYPE", "releasing", EXIT_DRAINED),
        ("BADVALUE", "group", None),  # this refusal is not about the release itself
        ("OOM", "releasing", None),
        ("NOPERM", "releasing", None),
    ],
)
def test_drain_waits_only_for_calls_that_may_succeed(
    code: str, refused: str, ends: int | None
) -> None:
    """The drain does not wait for a call that was refused because of a bad value."""
    scenario = Scenario()
    drain = DrainOf(scenario)
    assert drain.look() is None
    scenario.slot.post_batch([])
    scenario.slot.state = WorkerState.QUIET
    scenario.holding.on_exit(Exit(ExitCode.STOPPED, None))
    scenario.holding.refusal, scenario.holding.refused = code, refused
    assert drain.look() == ends
    assert drain.look(drain.drain.deadline - 0.1) == ends


def test_drain_deadline_kills_without_a_charge() -> None:
    scenario = Scenario()
    drain = DrainOf(scenario)
    assert drain.look() is None
    assert drain.look(drain.drain.deadline + 0.1) is None
    assert scenario.child.killed
    blame = scenario.holding.on_exit(Exit(None, signal.SIGKILL))
    assert (blame.crashed, blame.charged) == (False, None)
    scenario.answer(b"8", 0)
    scenario.answer()
    assert drain.look() == EXIT_DEADLINE


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dies", "is undead"])
def test_successor_gets_a_new_token(how: str) -> None:
    scenario = Scenario()
    token = scenario.holding.lease.token
    if how == "dies":
        scenario.holding.on_exit(Exit(None, signal.SIGKILL))
    else:
        scenario.holding.abandon()
    call = scenario.holding.intent(Keys(), 15.0, "west-1")
    assert call is not None
    old, new = call.argv[len(call.script.keys) :][:2]
    assert old == token != new
    scenario.answer(b"8", 1)
    assert scenario.holding.lease.token == new
