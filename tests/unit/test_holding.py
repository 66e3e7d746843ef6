"""The state machine of one unit: its next call, the effect of an answer, and the charged message.

The tests pass answers by hand. Without an answer, the call must be repeated with equal arguments.
"""

from __future__ import annotations

import json
import signal

import pytest

from streamqd.config import Consumer, Daemon
from streamqd.errors import BadValue, RedisRefused
from streamqd.model import Lease, Unit
from streamqd.policy.restart import ExitCause
from streamqd.process import Child, Exit
from streamqd.scoreboard import CLEARED, DONE, FAILED, RUNNING, WAITING, Scoreboard, WorkerState
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.partition import PartitionState, Phase
from streamqd.supervisor.running_worker import Kill, RunningWorker
from streamqd.supervisor.scoreboard_file import ResumablePartition
from streamqd.worker import ExitCode
from streamqd.worker.dead_letters import crash_fields

UNIT = Unit("access", 0, "hits")
PLACES = [b"m:1-0", b"m:2-0", b"r:2-0", b"m:3-0"]
KILLED = Exit(None, signal.SIGKILL)


class StateDriver:
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

    def hold(self, epoch: int = 7) -> StateDriver:
        self.holding.take(seen_epoch=epoch - 1)
        assert self.answer("OK", str(epoch).encode(), 0, b"") == "acquired"
        self.holding.groups_ready = True
        return self

    def run(self) -> StateDriver:
        """Start a process that works on four entries."""
        child = Child(4711, -1, None, "", -1)  # type: ignore[arg-type]
        self.holding.started_as(child, now=101.0)
        self.worker.ready_at = 102.0
        self.slot.state = WorkerState.READY
        self.slot.post_batch(PLACES)
        return self

    def mark(self, *states: int) -> StateDriver:
        for index, state in enumerate(states):
            self.slot.states[index] = state
        return self

    @property
    def worker(self) -> RunningWorker:
        assert self.holding.worker is not None
        return self.holding.worker

    def quiet(self) -> StateDriver:
        self.slot.state = WorkerState.QUIET
        return self


@pytest.fixture
def driver() -> StateDriver:
    return StateDriver()


# --- acquire --------------------------------------------------------------------------------------


def test_free_unit_has_no_next_call(driver: StateDriver):
    assert driver.wish() is None
    assert not driver.holding.owned
    assert not driver.holding.startable
    assert not driver.holding.wants_exchange


def test_acquire_is_repeated_unchanged_until_its_reply(driver: StateDriver):
    driver.holding.take(seen_epoch=5, dead_token="corpse")
    first = driver.wish()
    assert first is not None
    assert first.script.name == "lease_acquire"
    assert (driver.argument("seen_epoch"), driver.argument("dead_token")) == (5, "corpse")
    assert [driver.wish() for _ in range(3)] == [first] * 3
    assert driver.holding.answered(RedisRefused("OOM", "full"), 1.0) == ""
    assert driver.wish() == first


@pytest.mark.parametrize("word", ["OK", "MINE"])
def test_acquire_succeeds_on_ok_and_on_mine(driver: StateDriver, word: str):
    driver.holding.take(seen_epoch=5)
    assert driver.answer(word, b"1763640000000", 0, b"") == "acquired"
    assert driver.holding.phase is Phase.HELD
    assert driver.holding.owned
    assert driver.holding.lease.epoch == driver.slot.epoch == 1763640000000
    assert driver.slot.owned == 1
    assert driver.wish() is None
    assert not driver.holding.startable, "the groups come first"
    assert driver.holding.wants_exchange


@pytest.mark.parametrize("epoch", [b"x", [b"7"], None])
def test_unreadable_epoch_changes_no_phase(driver: StateDriver, epoch: object):
    """The call is repeated, or the assignment given up as if it was not answered."""
    driver.holding.take(seen_epoch=5)
    with pytest.raises((BadValue, ValueError, TypeError)):
        driver.answer("OK", epoch, 0, b"")
    assert driver.holding.phase is Phase.ACQUIRING
    driver.answer("OK", b"7", 0, b"")
    driver.run().mark(DONE, RUNNING, WAITING, WAITING).holding.ended(KILLED)
    before = driver.wish()
    with pytest.raises((BadValue, ValueError, TypeError)):
        driver.answer("OK", epoch)
    assert driver.holding.phase is Phase.REFENCING
    assert driver.wish() == before


@pytest.mark.parametrize(
    ("next_token", "what"),
    [("", "the death of its supervisor"), ("begun", "an unknown cause")],
    ids=["no refence", "a refence in progress"],
)
def test_resumed_charge_names_a_cause_only_if_known(
    driver: StateDriver, next_token: str, what: str
):
    """A worker that died before the supervisor died of something else."""
    lease = Lease(driver.holding.unit, "old", 7)
    found = ResumablePartition(lease, next_token, [], [PLACES[0]])
    driver.holding.resume(found, alone=True)
    assert driver.argument("charged") == PLACES[0]
    context = driver.argument("context")
    assert isinstance(context, bytes)
    assert crash_fields(context)[0] == what


@pytest.mark.parametrize(
    ("word", "rest"), [("HELD", (b"900", b"9", b"east-1")), ("MOVED", (b"9",))]
)
def test_unit_taken_by_another_instance_is_not_owned(
    driver: StateDriver, word: str, rest: tuple[bytes, ...]
):
    driver.holding.take(seen_epoch=5)
    assert driver.answer(word, *rest) == ""
    assert driver.holding.phase is Phase.FREE
    assert driver.wish() is None


def test_every_acquire_has_a_new_token(driver: StateDriver):
    """A token is void as soon as its release is sent."""
    tokens = set()
    for _ in range(5):
        driver.holding.take(seen_epoch=5)
        tokens.add(driver.argument("token"))
        driver.holding.give_up()
        assert driver.script() == "lease_release"
        driver.answer("FENCED", b"5", b"")
    assert len(tokens) == 5


def test_abandoned_acquire_is_released_with_its_token(driver: StateDriver):
    driver.holding.take(seen_epoch=5)
    token = driver.argument("token")
    driver.holding.give_up()
    assert (driver.script(), driver.argument("token")) == ("lease_release", token)


# --- release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["OK", "FENCED"])
def test_release_is_repeated_until_any_reply(driver: StateDriver, word: str):
    driver.hold().holding.give_up()
    first = driver.wish()
    assert first is not None
    assert first.script.name == "lease_release"
    assert not driver.holding.owned, "nothing is renewed while it is given back"
    assert driver.wish() == first
    assert driver.answer(word, b"7", b"") == "released"
    assert driver.holding.phase is Phase.FREE
    assert driver.slot.owned == 0
    assert driver.slot.trusted_until_ns == 0


def test_clean_worker_exit_releases_without_a_refence(driver: StateDriver):
    driver.hold().run().mark(CLEARED, CLEARED).quiet()
    driver.worker.stop_reason = "drain"
    verdict = driver.holding.ended(Exit(ExitCode.STOPPED, None))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.script() == "lease_release"


def test_worker_exit_with_unconfirmed_acks_refences_then_releases(driver: StateDriver):
    """The connection may have lost its acknowledgements, so the refence repeats them."""
    driver.hold().run().mark(CLEARED, DONE).quiet()
    driver.worker.stop_reason = "shed"
    driver.holding.ended(Exit(ExitCode.STOPPED, None))
    assert driver.script() == "lease_refence"
    assert driver.places() == [PLACES[1]]
    driver.answer("OK", b"8", 0)
    assert driver.script() == "lease_release"


def test_release_during_a_refence_waits_for_its_reply(driver: StateDriver):
    driver.hold().run().mark(RUNNING)
    driver.holding.ended(KILLED)
    refence = driver.wish()
    driver.holding.give_up()
    assert driver.wish() == refence
    driver.answer("OK", b"8", 1)
    assert driver.script() == "lease_release"
    assert driver.argument("token") == driver.holding.lease.token


# --- crash accounting -----------------------------------------------------------------------------


@pytest.mark.fault("F1", "F2")
def test_crash_charges_only_the_running_entry(
    driver: StateDriver,
):
    driver.hold().run().mark(DONE, FAILED, RUNNING)
    old = driver.holding.lease.token
    verdict = driver.holding.ended(KILLED)
    assert (verdict.crashed, verdict.cause, verdict.charged) == (
        True,
        ExitCause.HANDLING,
        PLACES[2],
    )
    assert driver.script() == "lease_refence"
    assert (driver.argument("old"), driver.argument("charged")) == (old, PLACES[2])
    assert driver.places() == [PLACES[0]]
    context = json.loads(str(driver.argument("context"), "ascii"))
    assert context["what"] == "signal SIGKILL"
    assert (context["signal"], context["pid"]) == ("SIGKILL", 4711)


def test_repeated_refence_charges_once(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.holding.ended(KILLED)
    first = driver.wish()
    assert [driver.wish() for _ in range(3)] == [first] * 3
    assert driver.holding.owned, "its lease is kept alive"
    assert not driver.holding.startable, "no successor before the answer"
    new = driver.argument("new")
    assert driver.answer("OK", b"8", 1) == "charged"
    assert driver.holding.lease.token == new
    assert driver.holding.lease.epoch == driver.slot.epoch == 8
    assert driver.slot.counter("charged") == 1
    assert driver.holding.startable


def test_a_refence_that_is_fenced_means_the_unit_is_lost(driver: StateDriver):
    driver.hold().run().mark(RUNNING)
    driver.holding.ended(KILLED)
    assert driver.answer("FENCED", b"9", b"east-1") == "lost"
    assert driver.holding.phase is Phase.FREE
    assert driver.slot.counter("charged") == 0


@pytest.mark.fault("F1")
def test_several_running_entries_are_not_charged(driver: StateDriver):
    driver.hold().run().mark(RUNNING, RUNNING)
    verdict = driver.holding.ended(KILLED)
    assert (verdict.crashed, verdict.charged) == (True, None)
    assert driver.argument("charged") == b""


@pytest.mark.parametrize("reason", ["quit", "deadline"])
def test_kill_by_the_supervisor_charges_nothing(driver: StateDriver, reason: str):
    driver.hold().run().mark(DONE, RUNNING)
    driver.worker.kill = Kill(reason, driver.slot.run_seq, 103.0)
    verdict = driver.holding.ended(KILLED)
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.places() == [PLACES[0]]


@pytest.mark.fault("F4")
def test_hard_limit_charges_its_own_run(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.worker.kill = Kill("hard-limit", driver.slot.run_seq, 103.0)
    verdict = driver.holding.ended(KILLED)
    assert (verdict.crashed, verdict.charged) == (True, PLACES[1])
    assert json.loads(str(driver.argument("context"), "ascii"))["what"] == "a hard time limit"


def test_late_hard_limit_charges_nothing(driver: StateDriver):
    """When the signal arrives, the next entry is already running."""
    driver.hold().run().mark(DONE, RUNNING)
    driver.worker.kill = Kill("hard-limit", driver.slot.run_seq, 103.0)
    driver.slot.run_seq += 1
    assert driver.holding.ended(KILLED).charged is None


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5, 6, 9, 255])
def test_handler_that_exits_its_process_is_charged(driver: StateDriver, code: int):
    driver.hold().run().mark(DONE, RUNNING)
    verdict = driver.holding.ended(Exit(code, None))
    assert (verdict.crashed, verdict.charged) == (True, PLACES[1])
    assert driver.script() == "lease_refence", "the unit stays ours"


@pytest.mark.parametrize("code", [0, 4, 5, 6])
def test_a_process_that_vanishes_between_two_messages_has_crashed(driver: StateDriver, code: int):
    driver.hold().run()
    verdict = driver.holding.ended(Exit(code, None))
    assert (verdict.crashed, verdict.cause, verdict.charged) == (True, ExitCause.IDLE, None)
    assert driver.script() == "lease_refence"


@pytest.mark.parametrize("code", [ExitCode.STOPPED, ExitCode.RECYCLE, ExitCode.NO_GROUP])
def test_clean_exit_does_not_count_as_a_crash(driver: StateDriver, code: ExitCode):
    driver.hold().run().mark(DONE).quiet()
    verdict = driver.holding.ended(Exit(code, None))
    assert (verdict.crashed, verdict.cause, verdict.charged) == (False, ExitCause.ORDERED, None)
    assert driver.script() == "lease_refence", "a successor is to follow"


def test_missing_group_is_recreated_before_the_next_worker(driver: StateDriver):
    driver.hold().run().quiet()
    driver.holding.ended(Exit(ExitCode.NO_GROUP, None))
    driver.answer("OK", b"8", 0)
    assert not driver.holding.startable
    assert driver.holding.wants_exchange


def test_fenced_worker_loses_the_unit(driver: StateDriver):
    driver.hold().run().quiet()
    assert driver.holding.ended(Exit(ExitCode.FENCED, None)).lost
    assert driver.holding.phase is Phase.FREE
    assert driver.wish() is None


def test_unit_lost_before_the_worker_exit_is_lost_once(driver: StateDriver):
    driver.hold().run().quiet().holding.become_free()
    assert not driver.holding.ended(Exit(ExitCode.FENCED, None)).lost


def test_stopped_worker_at_its_limit_is_recycled_once(driver: StateDriver):
    driver.slot.add("recycled", 3)
    driver.hold().run().quiet()
    driver.worker.stop_reason = "recycle"
    driver.slot.add("recycled")  # as the worker itself counts it
    driver.holding.ended(Exit(ExitCode.RECYCLE, None))
    assert driver.slot.counter("recycled") == 4


def test_processes_that_die_with_nothing_to_blame_are_counted(driver: StateDriver):
    driver.hold()
    for number in range(1, 3):
        driver.run().mark(DONE)
        driver.holding.ended(KILLED)
        driver.answer("OK", str(number).encode(), 0)
        assert driver.holding.uncharged == number
    driver.run().mark(RUNNING)
    driver.holding.ended(KILLED)
    assert driver.holding.uncharged == 0


# --- loss -----------------------------------------------------------------------------------------


def test_process_exit_after_the_loss_of_its_unit_settles_nothing(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.holding.become_free()
    found = driver.holding.ended(KILLED)
    assert (found.crashed, found.charged) == (True, None), "the new owner handles pending entries"
    assert driver.wish() is None
    assert driver.holding.phase is Phase.FREE


def test_entries_of_a_lost_unit_are_not_settled_later(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.holding.become_free()
    driver.holding.ended(KILLED)
    driver.hold(epoch=12).run().quiet()
    driver.slot.post_batch([])
    driver.worker.kill = Kill("quit", 0, 103.0)
    assert driver.holding.abandon() is not None
    assert driver.script() == "lease_refence"
    assert driver.argument("charged") == b""
    assert driver.places() == []


def test_unkillable_process_is_fenced_and_its_unit_moves(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    child = driver.holding.child
    assert driver.holding.abandon() is child
    assert driver.places() == [], "its slot may still change"
    assert driver.argument("charged") == b""
    driver.answer("OK", b"8", 0)
    assert driver.script() == "lease_release"


def test_lost_unit_is_no_longer_trusted(driver: StateDriver):
    driver.hold()
    driver.slot.trusted_until_ns = 10**18
    driver.holding.become_free()
    assert (driver.slot.trusted_until_ns, driver.slot.owned) == (0, 0)


def test_logged_refusal_is_not_retried_early(driver: StateDriver):
    driver.holding.take(seen_epoch=5)
    assert driver.holding.wants_exchange
    driver.holding.refusal = "WRONGTYPE"
    assert not driver.holding.wants_exchange


def test_settled_counts_the_present_process_only(driver: StateDriver):
    driver.hold().run()
    driver.slot.add("acked", 3)
    driver.slot.add("failed", 2)
    assert driver.worker.settled() == 5
    driver.run()
    assert driver.worker.settled() == 0


# --- a worker with a warm successor ---------------------------------------------------------------


def test_quiet_worker_is_replaced_before_its_exit(driver: StateDriver):
    driver.hold().run().mark(DONE, CLEARED, CLEARED, CLEARED)
    driver.worker.stop_reason = "recycle"
    assert not driver.holding.is_quiet
    driver.quiet()
    assert driver.holding.is_quiet
    child, verdict = driver.holding.dismiss()
    assert (child.pid, driver.holding.child) == (4711, None)
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.script() == "lease_refence"
    assert (driver.argument("charged"), driver.places()) == (b"", [b"m:1-0"])
    assert driver.slot.counter("recycled") == 1
    assert not driver.holding.startable, "no token before the fence has it"
    driver.answer("OK", b"8", 0)
    assert driver.holding.startable


def test_acquired_unit_is_booting(driver: StateDriver):
    driver.hold()
    assert driver.slot.state == WorkerState.BOOTING
    assert not driver.holding.is_ready
    driver.run()
    driver.holding.ended(KILLED)
    assert driver.slot.state == WorkerState.GONE, "this worker has exited"


def test_a_worker_that_does_not_end_is_killed_and_has_not_crashed(driver: StateDriver):
    """Only `on_stop` took too long, so no handler is to blame."""
    driver.hold().run().mark(DONE, CLEARED, CLEARED, CLEARED)
    driver.quiet()
    driver.worker.kill = Kill("on_stop", 0, 103.0)
    verdict = driver.holding.ended(Exit(None, signal.SIGKILL))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.slot.counter("crashes") == 0
    assert (driver.holding.last_exit, driver.holding.uncharged) == ("", 0)
    assert driver.places() == [b"m:1-0"], "the finished entry is acknowledged"


def test_standby_is_warm_after_its_own_report(driver: StateDriver):
    driver.hold().run()
    assert not driver.holding.standby_is_warm
    driver.holding.standby = Child(4712, -1, None, "", -1)  # type: ignore[arg-type]
    driver.slot.warm_pid = 4700  # an earlier standby
    assert not driver.holding.standby_is_warm
    driver.slot.warm_pid = 4712
    assert driver.holding.standby_is_warm


# --- rounds ---------------------------------------------------------------------------------------


def test_crash_suspects_are_kept_until_they_ran(driver: StateDriver):
    """The suspects also survive an orderly exit of the worker, such as a reload."""
    driver.hold().run().mark(RUNNING, RUNNING, RUNNING, RUNNING)
    driver.holding.ended(Exit(None, 9))
    assert driver.holding.suspects == dict.fromkeys(PLACES, 2)
    driver.answer("OK", b"8", 0)
    driver.run().mark(WAITING, WAITING, WAITING, WAITING).quiet()
    driver.slot.suspects_left = 4
    driver.holding.ended(Exit(ExitCode.STOPPED, None))
    assert driver.holding.suspects == dict.fromkeys(PLACES, 2)
    driver.answer("OK", b"9", 0)
    driver.run().mark(WAITING, WAITING, WAITING, WAITING).quiet()
    driver.slot.suspects_left = 0
    driver.holding.ended(Exit(ExitCode.STOPPED, None))
    assert driver.holding.suspects == {}


def test_a_round_that_crashes_is_halved_and_delays_no_restart(driver: StateDriver):
    """The restarts of a narrowing search are progress, not a crash loop."""
    driver.hold().run().mark(RUNNING, RUNNING, RUNNING, RUNNING)
    found = driver.holding.ended(Exit(None, 9))
    assert not found.narrowed
    assert driver.holding.plan_restart(found, 200.0, Daemon(instance="one"))
    assert len(driver.holding.exits) == 1
    driver.answer("OK", b"8", 0)
    driver.run().mark(RUNNING, RUNNING, WAITING, WAITING)
    driver.slot.suspects_left = 4
    found = driver.holding.ended(Exit(None, 9))
    assert (found.narrowed, found.charged) == (True, None)
    assert driver.holding.suspects == dict(zip(PLACES, (1, 1, 2, 2), strict=True))
    assert driver.holding.plan_restart(found, 201.0, Daemon(instance="one"))
    assert len(driver.holding.exits) == 1
    assert driver.holding.start_at == 201.0
