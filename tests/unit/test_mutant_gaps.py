"""Promises of the supervisor's parts, judged with a child that only remembers what it was told."""

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
    """A child process as far as the supervisor talks to it."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # a process that can be measured
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
    """One held unit whose worker is ready and has two messages in hand; the first one runs."""

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
        """Let the run of an entry have begun so many seconds ago."""
        self.slot.run_seq += 1
        self.slot.states[index] = RUNNING
        self.slot.lanes[0], self.slot.lanes[1] = index, now_ns() - int(age * 1e9)

    def look(self, now: float | None = None) -> None:
        """Look at the limits and do what they ask for."""
        at = time.monotonic() if now is None else now
        self.apply(self.limits.observe([self.holding], at, boot_timeout=60.0).actions)

    def apply(self, actions: Iterable[Action]) -> None:
        """Do what concerns processes and leases, as the supervisor does."""
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


def test_a_run_over_its_hard_limit_is_killed_at_the_second_look() -> None:
    scene = Scene(hard_timeout=5.0)
    scene.begin(0, age=6.0)
    scene.look()
    assert not scene.child.killed, "its end may be under way; the next look is a moment later"
    scene.look()
    assert scene.child.killed


def test_a_run_that_begins_between_two_looks_is_not_killed_for_the_one_before() -> None:
    """T11."""
    scene = Scene(hard_timeout=5.0)
    scene.begin(0, age=6.0)
    scene.look()
    scene.slot.states[0] = DONE
    scene.begin(1, age=6.0)
    scene.look()
    assert not scene.child.killed


@pytest.mark.parametrize("limit", ["timeout", "hard_timeout"])
def test_a_worker_keeps_the_limits_that_it_was_started_with(limit: str) -> None:
    """A reload changes them for the next one: this one may be unable to interrupt a run at all."""
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
    """It publishes its progress once per batch; here the batch has lasted long already."""
    scene = Scene()
    scene.holding.ready_at = now = 1_000.0
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
    scene.holding.ready_at = now = 1_000.0
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
        """One tick: the exit code, if everything has ended."""
        at = time.monotonic() if now is None else now
        self.drain.observe([self.scene.holding], at, ending=0)
        self.scene.apply(self.drain.wishes([self.scene.holding]))
        return self.drain.exit_code([self.scene.holding], at, ending=0, redis_ok=True)


def test_a_drain_lets_the_running_message_finish_and_releases() -> None:
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
        ("BADVALUE", "group", None),  # the release itself was not refused yet
        ("OOM", "releasing", None),
        ("NOPERM", "releasing", None),
    ],
)
def test_drain_waits_only_for_calls_that_may_still_succeed(
    code: str, refused: str, ends: int | None
) -> None:
    """C4: a call that is refused for a bad value is not waited for, others are."""
    scene = Scene()
    drain = DrainOf(scene)
    assert drain.look() is None
    scene.slot.post_batch([])
    scene.slot.state = WorkerState.QUIET
    scene.holding.ended(Exit(ExitCode.STOPPED, None))
    scene.holding.refusal, scene.holding.refused = code, refused
    assert drain.look() == ends
    assert drain.look(drain.drain.deadline - 0.1) == ends


def test_only_the_deadline_of_a_drain_kills_and_it_charges_nobody() -> None:
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
def test_a_successor_gets_a_token_that_its_predecessor_never_had(how: str) -> None:
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
