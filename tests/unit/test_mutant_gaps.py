"""Promises of the supervisor's parts, tested with a child that only records its commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from streamqd.config import Consumer, Settings
from streamqd.model import Unit
from streamqd.notify import Notifier
from streamqd.process import Exit
from streamqd.scoreboard import DONE, RUNNING, Scoreboard, WorkerCommand, WorkerState, now_ns
from streamqd.store.keys import Keys
from streamqd.store.scripts import Reply
from streamqd.supervisor.drain import EXIT_DEADLINE, EXIT_DRAINED, Drain
from streamqd.supervisor.limits import Limits
from streamqd.supervisor.partition import PartitionState
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

UNIT = Unit("access", 0, "hits")


class FakeChild:
    """The part of a child process that the supervisor uses."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # any process that psutil can measure
        self.told: list[bytes] = []
        self.signals: list[int] = []
        self.killed = False
        self.deaf_at = 0.0
        self.peak_rss = 0

    def send(self, word: bytes) -> None:
        self.told.append(word)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill_group(self) -> None:
        self.killed = True


class Scene:
    """One owned unit with a ready worker that holds two messages and runs the first."""

    def __init__(self, **consumer: object) -> None:
        board = Scoreboard(1)
        settled = Consumer(topic="access", group="hits", handler="h:go", **consumer)  # type: ignore[arg-type]
        self.holding = PartitionState(UNIT, settled, board.allot(UNIT))
        self.slot = self.holding.slot
        self.crew = WorkerPool(Settings(), board, [], [])
        self.limits = Limits()
        self.child = FakeChild()
        self.holding.take(seen_epoch=6)
        self.answer(b"7", 0, b"")
        self.holding.started_as(self.child, time.monotonic())  # type: ignore[arg-type]
        self.slot.state = WorkerState.READY
        self.slot.post_batch([b"m:1-0", b"m:2-0"])
        self.begin(0, age=0.0)

    def answer(self, *rest: object) -> None:
        self.holding.answered(Reply("OK", list(rest)), time.monotonic())

    def begin(self, index: int, *, age: float) -> None:
        """Mark an entry as running for `age` seconds."""
        self.slot.run_seq += 1
        self.slot.states[index] = RUNNING
        self.slot.lanes[0], self.slot.lanes[1] = index, now_ns() - int(age * 1e9)

    def look(self, now: float | None = None) -> None:
        """Observe the limits and apply the actions that they return."""
        at = time.monotonic() if now is None else now
        self.apply(self.limits.observe([self.holding], at, boot_timeout=60.0).actions)

    def apply(self, actions: Iterable[Action]) -> None:
        """Apply the actions on processes and leases, as the supervisor does."""
        for action in merge(actions):
            if isinstance(action, KillWorker):
                self.crew.kill(self.holding, action.reason, action.run_seq)
            elif isinstance(action, StopWorker):
                self.crew.stop(self.holding, action.reason)
            elif isinstance(action, ReleaseLease):
                self.holding.give_up()
            else:
                assert isinstance(action, InterruptRun)
                self.crew.interrupt(self.holding, action.run_seq)


# --- the hard limit -------------------------------------------------------------------------------


def test_run_over_its_hard_limit_is_killed_at_the_second_tick() -> None:
    scene = Scene(hard_timeout=5.0)
    scene.begin(0, age=6.0)
    scene.look()
    assert not scene.child.killed, "the run may just be finishing, so the next look decides"
    scene.look()
    assert scene.child.killed


def test_new_run_is_not_killed_for_the_previous_one() -> None:
    """T11: the second observation sees another run."""
    scene = Scene(hard_timeout=5.0)
    scene.begin(0, age=6.0)
    scene.look()
    scene.slot.states[0] = DONE
    scene.begin(1, age=6.0)
    scene.look()
    assert not scene.child.killed


@pytest.mark.parametrize("limit", ["timeout", "hard_timeout"])
def test_worker_keeps_its_limits_after_a_reload(limit: str) -> None:
    """A reload changes the limits of the next worker. This one may be unable to interrupt a run."""
    scene = Scene()
    scene.holding.consumer = replace(scene.holding.consumer, **{limit: 5.0})  # type: ignore[arg-type]
    scene.begin(0, age=6.0)
    scene.look()
    scene.look()
    assert (scene.child.signals, scene.child.killed) == ([], False)
    scene.holding.started_as(scene.child, time.monotonic())  # type: ignore[arg-type]
    scene.look()
    scene.look()
    assert (scene.child.signals, scene.child.killed) != ([], False)


# --- progress -------------------------------------------------------------------------------------


def test_a_worker_between_two_long_runs_is_not_taken_for_stuck() -> None:
    """A worker reports progress once per batch, and this batch has already taken long."""
    scene = Scene()
    assert scene.holding.worker is not None
    scene.holding.worker.ready_at = now = 1_000.0
    scene.look(now + 100)
    scene.slot.states[0] = DONE
    scene.look(now + 101)
    scene.begin(1, age=0.0)
    scene.look(now + 125)
    scene.slot.states[1] = DONE
    scene.look(now + 150)
    assert not scene.child.killed


def test_a_worker_that_does_nothing_at_all_is_replaced() -> None:
    scene = Scene()
    assert scene.holding.worker is not None
    scene.holding.worker.ready_at = now = 1_000.0
    scene.slot.states[0] = DONE
    scene.look(now + 100)
    assert not scene.child.killed
    scene.look(now + 131)
    assert scene.child.killed


# --- the drain ------------------------------------------------------------------------------------


class DrainOf:
    """A drain of one scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.drain = Drain(Notifier({}))
        self.drain.begin(30.0)

    def look(self, now: float | None = None) -> int | None:
        """Make one tick and return the exit code, or None while a process or lease is left."""
        at = time.monotonic() if now is None else now
        self.drain.observe([self.scene.holding], at, ending=0)
        self.scene.apply(self.drain.wishes([self.scene.holding]))
        return self.drain.exit_code([self.scene.holding], at, ending=0, redis_ok=True)


def test_drain_finishes_the_running_message_and_releases() -> None:
    scene = Scene()
    drain = DrainOf(scene)
    assert drain.look() is None
    assert (scene.slot.command, scene.child.told) == (WorkerCommand.STOP, [b"stop"])
    assert drain.look() is None
    assert not scene.child.killed

    scene.slot.post_batch([])
    scene.slot.state = WorkerState.QUIET
    verdict = scene.holding.ended(Exit(ExitCode.STOPPED, None))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert drain.look() is None, "the lease is still to be released"
    scene.answer()
    assert drain.look() == EXIT_DRAINED


@pytest.mark.parametrize(
    ("code", "refused", "ends"),
    [
        ("BADVALUE", "releasing", EXIT_DRAINED),
        ("WRONGTYPE", "releasing", EXIT_DRAINED),
        ("BADVALUE", "group", None),  # the release itself has not been refused
        ("OOM", "releasing", None),
        ("NOPERM", "releasing", None),
    ],
)
def test_drain_waits_only_for_calls_that_may_still_succeed(
    code: str, refused: str, ends: int | None
) -> None:
    """C4: the drain does not wait for a call that was refused because of a bad value."""
    scene = Scene()
    drain = DrainOf(scene)
    assert drain.look() is None
    scene.slot.post_batch([])
    scene.slot.state = WorkerState.QUIET
    scene.holding.ended(Exit(ExitCode.STOPPED, None))
    scene.holding.refusal, scene.holding.refused = code, refused
    assert drain.look() == ends
    assert drain.look(drain.drain.deadline - 0.1) == ends


def test_drain_deadline_kills_without_a_charge() -> None:
    scene = Scene()
    drain = DrainOf(scene)
    assert drain.look() is None
    assert drain.look(drain.drain.deadline + 0.1) is None
    assert scene.child.killed
    verdict = scene.holding.ended(Exit(None, signal.SIGKILL))
    assert (verdict.crashed, verdict.charged) == (False, None)
    scene.answer(b"8", 0)
    scene.answer()
    assert drain.look() == EXIT_DEADLINE


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dies", "is undead"])
def test_successor_gets_a_new_token(how: str) -> None:
    scene = Scene()
    token = scene.holding.lease.token
    if how == "dies":
        scene.holding.ended(Exit(None, signal.SIGKILL))
    else:
        scene.holding.abandon()
    call = scene.holding.intent(Keys(), 15.0, "west-1")
    assert call is not None
    old, new = call.argv[len(call.script.keys) :][:2]
    assert old == token != new
    scene.answer(b"8", 1)
    assert scene.holding.lease.token == new
