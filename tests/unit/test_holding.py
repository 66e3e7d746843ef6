"""The state machine of one unit: its next call, the effect of an answer, and the charged message.

The tests pass answers by hand. Without an answer, the call must be repeated with equal arguments.
"""

from __future__ import annotations

import json
import signal

import pytest

from streamqd.config import Consumer, Daemon
from streamqd.errors import RedisRefused
from streamqd.model import Unit
from streamqd.policy.restart import ExitCause
from streamqd.process import Child, Exit
from streamqd.scoreboard import CLEARED, DONE, FAILED, RUNNING, WAITING, Scoreboard, WorkerState
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.partition import PartitionState, Phase
from streamqd.supervisor.running_worker import Kill, RunningWorker
from streamqd.worker import ExitCode

UNIT = Unit("access", 0, "hits")
PLACES = [b"m:1-0", b"m:2-0", b"r:2-0", b"m:3-0"]
KILLED = Exit(None, signal.SIGKILL)


class Desk:
    """A partition state together with the source of its answers."""

    def __init__(self) -> None:
        consumer = Consumer(topic="access", group="hits", handler="h:go")
        self.holding = PartitionState(UNIT, consumer, Scoreboard(slots=1).allot(UNIT))
        self.slot = self.holding.slot

    def wish(self) -> Call | None:
        return self.holding.intent(Keys(), 15.0, "west-1")

    def script(self) -> str:
        call = self.wish()
        return call.script.name if call else ""

    def argument(self, name: str) -> object:
        call = self.wish()
        assert call is not None
        at = [argument.name for argument in call.script.args].index(name)
        return call.argv[len(call.script.keys) + at]

    def places(self) -> list[object]:
        """Return the list at the end of the next call."""
        call = self.wish()
        assert call is not None
        return list(call.argv[len(call.script.keys) + len(call.script.args) - 1 :])

    def answer(self, word: str, *rest: object) -> str:
        return self.holding.answered(Reply(word, list(rest)), now=100.0)

    def hold(self, epoch: int = 7) -> Desk:
        self.holding.take(seen_epoch=epoch - 1)
        assert self.answer("OK", str(epoch).encode(), 0, b"") == "acquired"
        self.holding.groups_ready = True
        return self

    def run(self) -> Desk:
        """Start a process that works on four entries."""
        child = Child(4711, -1, None, "", -1)  # type: ignore[arg-type]
        self.holding.started_as(child, now=101.0)
        self.worker.ready_at = 102.0
        self.slot.state = WorkerState.READY
        self.slot.post_batch(PLACES)
        return self

    def mark(self, *states: int) -> Desk:
        for index, state in enumerate(states):
            self.slot.states[index] = state
        return self

    @property
    def worker(self) -> RunningWorker:
        assert self.holding.worker is not None
        return self.holding.worker

    def quiet(self) -> Desk:
        self.slot.state = WorkerState.QUIET
        return self


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- taking ---------------------------------------------------------------------------------------


def test_free_unit_has_no_wish(desk: Desk):
    assert desk.wish() is None
    assert not desk.holding.owned
    assert not desk.holding.startable
    assert not desk.holding.wants_exchange


def test_acquire_is_repeated_unchanged_until_its_reply(desk: Desk):
    desk.holding.take(seen_epoch=5, dead_token="corpse")
    first = desk.wish()
    assert first is not None
    assert first.script.name == "lease_acquire"
    assert (desk.argument("seen_epoch"), desk.argument("dead_token")) == (5, "corpse")
    assert [desk.wish() for _ in range(3)] == [first] * 3
    assert desk.holding.answered(RedisRefused("OOM", "full"), 1.0) == ""
    assert desk.wish() == first


@pytest.mark.parametrize("word", ["OK", "MINE"])
def test_taken_now_or_by_a_call_whose_reply_was_lost(desk: Desk, word: str):
    desk.holding.take(seen_epoch=5)
    assert desk.answer(word, b"1763640000000", 0) == "acquired"
    assert desk.holding.phase is Phase.HELD
    assert desk.holding.owned
    assert desk.holding.lease.epoch == desk.slot.epoch == 1763640000000
    assert desk.slot.owned == 1
    assert desk.wish() is None
    assert not desk.holding.startable, "the groups come first"
    assert desk.holding.wants_exchange


@pytest.mark.parametrize(
    ("word", "rest"), [("HELD", (b"900", b"9", b"east-1")), ("MOVED", (b"9",))]
)
def test_unit_taken_by_another_instance_is_not_owned(
    desk: Desk, word: str, rest: tuple[bytes, ...]
):
    desk.holding.take(seen_epoch=5)
    assert desk.answer(word, *rest) == ""
    assert desk.holding.phase is Phase.FREE
    assert desk.wish() is None


def test_every_acquire_has_a_new_token(desk: Desk):
    """T13: a token is void as soon as its release is sent."""
    tokens = set()
    for _ in range(5):
        desk.holding.take(seen_epoch=5)
        tokens.add(desk.argument("token"))
        desk.holding.give_up()
        assert desk.script() == "lease_release"
        desk.answer("FENCED", b"5", b"")
    assert len(tokens) == 5


def test_abandoned_acquire_is_released_with_its_token(desk: Desk):
    desk.holding.take(seen_epoch=5)
    token = desk.argument("token")
    desk.holding.give_up()
    assert (desk.script(), desk.argument("token")) == ("lease_release", token)


# --- giving back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["OK", "FENCED"])
def test_release_is_repeated_until_any_reply(desk: Desk, word: str):
    desk.hold().holding.give_up()
    first = desk.wish()
    assert first is not None
    assert first.script.name == "lease_release"
    assert not desk.holding.owned, "nothing is renewed while it is given back"
    assert desk.wish() == first
    assert desk.answer(word, b"7", b"") == "released"
    assert desk.holding.phase is Phase.FREE
    assert desk.slot.owned == 0
    assert desk.slot.trusted_until_ns == 0


def test_a_worker_that_leaves_clean_is_released_without_a_refence(desk: Desk):
    desk.hold().run().mark(CLEARED, CLEARED).quiet()
    desk.worker.stop_reason = "drain"
    verdict = desk.holding.ended(Exit(ExitCode.STOPPED, None))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert desk.script() == "lease_release"


def test_a_worker_that_leaves_with_unconfirmed_acks_is_refenced_then_released(desk: Desk):
    """The connection may have lost its acknowledgements, so the refence repeats them."""
    desk.hold().run().mark(CLEARED, DONE).quiet()
    desk.worker.stop_reason = "shed"
    desk.holding.ended(Exit(ExitCode.STOPPED, None))
    assert desk.script() == "lease_refence"
    assert desk.places() == [PLACES[1]]
    desk.answer("OK", b"8", 0)
    assert desk.script() == "lease_release"


def test_release_during_a_refence_waits_for_its_reply(desk: Desk):
    desk.hold().run().mark(RUNNING)
    desk.holding.ended(KILLED)
    refence = desk.wish()
    desk.holding.give_up()
    assert desk.wish() == refence
    desk.answer("OK", b"8", 1)
    assert desk.script() == "lease_release"
    assert desk.argument("token") == desk.holding.lease.token


# --- blame ----------------------------------------------------------------------------------------


@pytest.mark.fault("F1", "F2")
def test_the_running_entry_is_charged_the_done_are_acknowledged_the_rest_is_left(desk: Desk):
    desk.hold().run().mark(DONE, FAILED, RUNNING)
    old = desk.holding.lease.token
    verdict = desk.holding.ended(KILLED)
    assert (verdict.crashed, verdict.cause, verdict.charged) == (
        True,
        ExitCause.HANDLING,
        PLACES[2],
    )
    assert desk.script() == "lease_refence"
    assert (desk.argument("old"), desk.argument("charged")) == (old, PLACES[2])
    assert desk.places() == [PLACES[0]]
    context = json.loads(str(desk.argument("context"), "ascii"))
    assert context["what"] == "signal SIGKILL"
    assert (context["signal"], context["pid"]) == ("SIGKILL", 4711)


def test_repeated_refence_charges_once(desk: Desk):
    desk.hold().run().mark(DONE, RUNNING)
    desk.holding.ended(KILLED)
    first = desk.wish()
    assert [desk.wish() for _ in range(3)] == [first] * 3
    assert desk.holding.owned, "its lease is kept alive"
    assert not desk.holding.startable, "no successor before the answer"
    new = desk.argument("new")
    assert desk.answer("OK", b"8", 1) == "charged"
    assert desk.holding.lease.token == new
    assert desk.holding.lease.epoch == desk.slot.epoch == 8
    assert desk.slot.counter("charged") == 1
    assert desk.holding.startable


def test_a_refence_that_is_fenced_means_the_unit_is_lost(desk: Desk):
    desk.hold().run().mark(RUNNING)
    desk.holding.ended(KILLED)
    assert desk.answer("FENCED", b"9", b"east-1") == "lost"
    assert desk.holding.phase is Phase.FREE
    assert desk.slot.counter("charged") == 0


@pytest.mark.fault("F1")
def test_several_running_entries_are_not_charged(desk: Desk):
    desk.hold().run().mark(RUNNING, RUNNING)
    verdict = desk.holding.ended(KILLED)
    assert (verdict.crashed, verdict.charged) == (True, None)
    assert desk.argument("charged") == b""


@pytest.mark.parametrize("reason", ["quit", "deadline"])
def test_ordered_kill_charges_nothing(desk: Desk, reason: str):
    desk.hold().run().mark(DONE, RUNNING)
    desk.worker.kill = Kill(reason, desk.slot.run_seq, 103.0)
    verdict = desk.holding.ended(KILLED)
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert desk.places() == [PLACES[0]]


@pytest.mark.fault("F4")
def test_hard_limit_charges_its_own_run(desk: Desk):
    desk.hold().run().mark(DONE, RUNNING)
    desk.worker.kill = Kill("hard-limit", desk.slot.run_seq, 103.0)
    verdict = desk.holding.ended(KILLED)
    assert (verdict.crashed, verdict.charged) == (True, PLACES[1])
    assert json.loads(str(desk.argument("context"), "ascii"))["what"] == "a hard time limit"


def test_late_hard_limit_charges_nothing(desk: Desk):
    """T11: when the signal arrives, the next entry is already running."""
    desk.hold().run().mark(DONE, RUNNING)
    desk.worker.kill = Kill("hard-limit", desk.slot.run_seq, 103.0)
    desk.slot.run_seq += 1
    assert desk.holding.ended(KILLED).charged is None


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5, 6, 9, 255])
def test_handler_that_exits_its_process_is_charged(desk: Desk, code: int):
    desk.hold().run().mark(DONE, RUNNING)
    verdict = desk.holding.ended(Exit(code, None))
    assert (verdict.crashed, verdict.charged) == (True, PLACES[1])
    assert desk.script() == "lease_refence", "the unit stays ours"


@pytest.mark.parametrize("code", [0, 4, 5, 6])
def test_a_process_that_vanishes_between_two_messages_has_crashed(desk: Desk, code: int):
    desk.hold().run()
    verdict = desk.holding.ended(Exit(code, None))
    assert (verdict.crashed, verdict.cause, verdict.charged) == (True, ExitCause.IDLE, None)
    assert desk.script() == "lease_refence"


@pytest.mark.parametrize("code", [ExitCode.STOPPED, ExitCode.RECYCLE, ExitCode.NO_GROUP])
def test_orderly_exit_is_no_crash(desk: Desk, code: ExitCode):
    desk.hold().run().mark(DONE).quiet()
    verdict = desk.holding.ended(Exit(code, None))
    assert (verdict.crashed, verdict.cause, verdict.charged) == (False, ExitCause.ORDERED, None)
    assert desk.script() == "lease_refence", "a successor is to follow"


def test_missing_group_is_recreated_before_the_next_worker(desk: Desk):
    desk.hold().run().quiet()
    desk.holding.ended(Exit(ExitCode.NO_GROUP, None))
    desk.answer("OK", b"8", 0)
    assert not desk.holding.startable
    assert desk.holding.wants_exchange


def test_fenced_worker_loses_the_unit(desk: Desk):
    desk.hold().run().quiet()
    assert desk.holding.ended(Exit(ExitCode.FENCED, None)).lost
    assert desk.holding.phase is Phase.FREE
    assert desk.wish() is None


def test_unit_lost_before_the_worker_exit_is_lost_once(desk: Desk):
    desk.hold().run().quiet().holding.become_free()
    assert not desk.holding.ended(Exit(ExitCode.FENCED, None)).lost


def test_stopped_worker_at_its_limit_is_recycled_once(desk: Desk):
    desk.slot.add("recycled", 3)
    desk.hold().run().quiet()
    desk.worker.stop_reason = "recycle"
    desk.slot.add("recycled")  # as the worker itself counts it
    desk.holding.ended(Exit(ExitCode.RECYCLE, None))
    assert desk.slot.counter("recycled") == 4


def test_processes_that_die_with_nothing_to_blame_are_counted(desk: Desk):
    desk.hold()
    for number in range(1, 3):
        desk.run().mark(DONE)
        desk.holding.ended(KILLED)
        desk.answer("OK", str(number).encode(), 0)
        assert desk.holding.uncharged == number
    desk.run().mark(RUNNING)
    desk.holding.ended(KILLED)
    assert desk.holding.uncharged == 0


# --- losing ---------------------------------------------------------------------------------------


def test_the_end_of_a_process_of_a_lost_unit_settles_nothing(desk: Desk):
    desk.hold().run().mark(DONE, RUNNING)
    desk.holding.become_free()
    found = desk.holding.ended(KILLED)
    assert (found.crashed, found.charged) == (True, None), "the new owner handles pending entries"
    assert desk.wish() is None
    assert desk.holding.phase is Phase.FREE


def test_entries_of_a_lost_unit_are_not_settled_later(desk: Desk):
    desk.hold().run().mark(DONE, RUNNING)
    desk.holding.become_free()
    desk.holding.ended(KILLED)
    desk.hold(epoch=12).run().quiet()
    desk.slot.post_batch([])
    desk.worker.kill = Kill("quit", 0, 103.0)
    assert desk.holding.abandon() is not None
    assert desk.script() == "lease_refence"
    assert desk.argument("charged") == b""
    assert desk.places() == []


def test_unkillable_process_is_fenced_and_its_unit_moves(desk: Desk):
    desk.hold().run().mark(DONE, RUNNING)
    child = desk.holding.child
    assert desk.holding.abandon() is child
    assert desk.places() == [], "its slot may still change"
    assert desk.argument("charged") == b""
    desk.answer("OK", b"8", 0)
    assert desk.script() == "lease_release"


def test_lost_unit_is_no_longer_trusted(desk: Desk):
    desk.hold()
    desk.slot.trusted_until_ns = 10**18
    desk.holding.become_free()
    assert (desk.slot.trusted_until_ns, desk.slot.owned) == (0, 0)


def test_a_refusal_that_was_logged_does_not_hurry(desk: Desk):
    desk.holding.take(seen_epoch=5)
    assert desk.holding.wants_exchange
    desk.holding.refusal = "WRONGTYPE"
    assert not desk.holding.wants_exchange


def test_settled_counts_the_present_process_only(desk: Desk):
    desk.hold().run()
    desk.slot.add("acked", 3)
    desk.slot.add("failed", 2)
    assert desk.worker.settled() == 5
    desk.run()
    assert desk.worker.settled() == 0


# --- a worker with a warm successor ---------------------------------------------------------------


def test_quiet_worker_is_replaced_before_its_exit(desk: Desk):
    desk.hold().run().mark(DONE, CLEARED, CLEARED, CLEARED)
    desk.worker.stop_reason = "recycle"
    assert not desk.holding.is_quiet
    desk.quiet()
    assert desk.holding.is_quiet
    child, verdict = desk.holding.dismiss()
    assert (child.pid, desk.holding.child) == (4711, None)
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert desk.script() == "lease_refence"
    assert (desk.argument("charged"), desk.places()) == (b"", [b"m:1-0"])
    assert desk.slot.counter("recycled") == 1
    assert not desk.holding.startable, "no token before the fence has it"
    desk.answer("OK", b"8", 0)
    assert desk.holding.startable


def test_acquired_unit_is_booting(desk: Desk):
    desk.hold()
    assert desk.slot.state == WorkerState.BOOTING
    assert not desk.holding.is_ready
    desk.run()
    desk.holding.ended(KILLED)
    assert desk.slot.state == WorkerState.GONE, "this worker has exited"


def test_a_worker_that_does_not_end_is_killed_and_has_not_crashed(desk: Desk):
    """Only `on_stop` took too long, so no handler is to blame."""
    desk.hold().run().mark(DONE, CLEARED, CLEARED, CLEARED)
    desk.quiet()
    desk.worker.kill = Kill("on_stop", 0, 103.0)
    verdict = desk.holding.ended(Exit(None, signal.SIGKILL))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert desk.slot.counter("crashes") == 0
    assert (desk.holding.last_exit, desk.holding.uncharged) == ("", 0)
    assert desk.places() == [b"m:1-0"], "the finished entry is acknowledged"


def test_standby_is_warm_after_its_own_report(desk: Desk):
    desk.hold().run()
    assert not desk.holding.standby_is_warm
    desk.holding.standby = Child(4712, -1, None, "", -1)  # type: ignore[arg-type]
    desk.slot.warm_pid = 4700  # an earlier standby
    assert not desk.holding.standby_is_warm
    desk.slot.warm_pid = 4712
    assert desk.holding.standby_is_warm


# --- rounds ---------------------------------------------------------------------------------------


def test_crash_suspects_are_kept_until_they_ran(desk: Desk):
    """The suspects also survive an orderly exit of the worker, such as a reload."""
    desk.hold().run().mark(RUNNING, RUNNING, RUNNING, RUNNING)
    desk.holding.ended(Exit(None, 9))
    assert desk.holding.suspects == dict.fromkeys(PLACES, 2)
    desk.answer("OK", b"8", 0)
    desk.run().mark(WAITING, WAITING, WAITING, WAITING).quiet()
    desk.slot.suspects_left = 4
    desk.holding.ended(Exit(ExitCode.STOPPED, None))
    assert desk.holding.suspects == dict.fromkeys(PLACES, 2)
    desk.answer("OK", b"9", 0)
    desk.run().mark(WAITING, WAITING, WAITING, WAITING).quiet()
    desk.slot.suspects_left = 0
    desk.holding.ended(Exit(ExitCode.STOPPED, None))
    assert desk.holding.suspects == {}


def test_a_round_that_crashes_is_halved_and_delays_no_restart(desk: Desk):
    """The restarts of a narrowing search are progress, not a crash loop."""
    desk.hold().run().mark(RUNNING, RUNNING, RUNNING, RUNNING)
    found = desk.holding.ended(Exit(None, 9))
    assert not found.narrowed
    assert desk.holding.plan_restart(found, 200.0, Daemon(instance="one"))
    assert len(desk.holding.exits) == 1
    desk.answer("OK", b"8", 0)
    desk.run().mark(RUNNING, RUNNING, WAITING, WAITING)
    desk.slot.suspects_left = 4
    found = desk.holding.ended(Exit(None, 9))
    assert (found.narrowed, found.charged) == (True, None)
    assert desk.holding.suspects == dict(zip(PLACES, (1, 1, 2, 2), strict=True))
    assert desk.holding.plan_restart(found, 201.0, Daemon(instance="one"))
    assert len(desk.holding.exits) == 1
    assert desk.holding.start_at == 201.0
