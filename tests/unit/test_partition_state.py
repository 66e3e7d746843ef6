"""The state machine of an assignment: its next call, the effect of an answer, and charges.

The tests pass in the answers. If there is no answer, the call must be repeated with the same
arguments.
"""

from __future__ import annotations

import json
import signal

import pytest

from streamqd.config import Consumer, Daemon
from streamqd.errors import ContractError, RedisResponseError
from streamqd.model import Assignment, Lease
from streamqd.policy.restart import ExitCause
from streamqd.process import Child, Exit
from streamqd.scoreboard import CLEARED, DONE, FAILED, RUNNING, WAITING, Scoreboard, WorkerState
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.running_worker import Kill, RunningWorker
from streamqd.supervisor.scoreboard_file import ResumableAssignment
from streamqd.worker import ExitCode
from streamqd.worker.dead_letters import crash_fields

ASSIGNMENT = Assignment("access", 0, "hits")
PLACES = [b"m:1-0", b"m:2-0", b"r:2-0", b"m:3-0"]
KILLED = Exit(None, signal.SIGKILL)


class StateDriver:
    """A partition state, together with a source of answers for it."""

    def __init__(self) -> None:
        consumer = Consumer(topic="access", group="hits", handler="h:go")
        self.partition = AssignmentState(
            ASSIGNMENT, consumer, Scoreboard(slots=1).allot(ASSIGNMENT)
        )
        self.slot = self.partition.slot

    def next_call(self) -> Call | None:
        return self.partition.intent(Keys(), 15.0, "west-1")

    def script(self) -> str:
        call = self.next_call()
        return call.script.name if call else ""

    def argument(self, name: str) -> object:
        call = self.next_call()
        assert call is not None
        at = [argument.name for argument in call.script.args].index(name)
        return call.argv[len(call.script.keys) + at]

    def places(self) -> list[object]:
        """Return the list of places at the end of the next call."""
        call = self.next_call()
        assert call is not None
        return list(call.argv[len(call.script.keys) + len(call.script.args) - 1 :])

    def answer(self, word: str, *rest: object) -> str:
        return self.partition.apply_reply(Reply(word, list(rest)), now=100.0)

    def hold(self, epoch: int = 7) -> StateDriver:
        self.partition.acquire(seen_epoch=epoch - 1)
        assert self.answer("OK", str(epoch).encode(), 0, b"") == "acquired"
        self.partition.groups_ready = True
        return self

    def run(self) -> StateDriver:
        """Start a process that works on four entries."""
        child = Child(4711, -1, None, "", -1)  # type: ignore[arg-type]
        self.partition.record_start(child, now=101.0)
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
        assert self.partition.worker is not None
        return self.partition.worker

    def quiet(self) -> StateDriver:
        self.slot.state = WorkerState.QUIET
        return self


@pytest.fixture
def driver() -> StateDriver:
    return StateDriver()


# --- acquire --------------------------------------------------------------------------------------


def test_free_assignment_has_no_next_call(driver: StateDriver):
    assert driver.next_call() is None
    assert not driver.partition.owned
    assert not driver.partition.startable
    assert not driver.partition.wants_exchange


def test_acquire_is_repeated_unchanged_until_a_reply(driver: StateDriver):
    driver.partition.acquire(seen_epoch=5, dead_token="corpse")
    first = driver.next_call()
    assert first is not None
    assert first.script.name == "lease_acquire"
    assert (driver.argument("seen_epoch"), driver.argument("dead_token")) == (5, "corpse")
    assert [driver.next_call() for _ in range(3)] == [first] * 3
    assert driver.partition.apply_reply(RedisResponseError("OOM", "full"), 1.0) == ""
    assert driver.next_call() == first


@pytest.mark.parametrize("word", ["OK", "MINE"])
def test_acquire_succeeds_on_the_replies_ok_and_mine(driver: StateDriver, word: str):
    driver.partition.acquire(seen_epoch=5)
    assert driver.answer(word, b"1763640000000", 0, b"") == "acquired"
    assert driver.partition.phase is Phase.HELD
    assert driver.partition.owned
    assert driver.partition.lease.epoch == driver.slot.epoch == 1763640000000
    assert driver.slot.owned == 1
    assert driver.next_call() is None
    assert not driver.partition.startable, "the groups come first"
    assert driver.partition.wants_exchange


@pytest.mark.parametrize("epoch", [b"x", [b"7"], None])
def test_unreadable_epoch_changes_no_phase(driver: StateDriver, epoch: object):
    """An unreadable epoch counts as no answer: the call is repeated, or the assignment given up."""
    driver.partition.acquire(seen_epoch=5)
    with pytest.raises((ContractError, ValueError, TypeError)):
        driver.answer("OK", epoch, 0, b"")
    assert driver.partition.phase is Phase.ACQUIRING
    driver.answer("OK", b"7", 0, b"")
    driver.run().mark(DONE, RUNNING, WAITING, WAITING).partition.on_exit(KILLED)
    before = driver.next_call()
    with pytest.raises((ContractError, ValueError, TypeError)):
        driver.answer("OK", epoch)
    assert driver.partition.phase is Phase.REFENCING
    assert driver.next_call() == before


@pytest.mark.parametrize(
    ("next_token", "what"),
    [("", "the death of its supervisor"), ("begun", "an unknown cause")],
    ids=["no refence", "a refence in progress"],
)
def test_resumed_charge_names_a_cause_only_if_known(
    driver: StateDriver, next_token: str, what: str
):
    """The cause of a charge is named only if it is known.

    If a worker died before its supervisor, the supervisor's death is not the cause.
    """
    lease = Lease(driver.partition.assignment, "old", 7)
    found = ResumableAssignment(lease, next_token, [], [PLACES[0]])
    driver.partition.resume(found, alone=True)
    assert driver.argument("charged") == PLACES[0]
    context = driver.argument("context")
    assert isinstance(context, bytes)
    assert crash_fields(context)[0] == what


@pytest.mark.parametrize(
    ("word", "rest"), [("HELD", (b"900", b"9", b"east-1")), ("MOVED", (b"9",))]
)
def test_assignment_taken_by_another_instance_is_not_owned(
    driver: StateDriver, word: str, rest: tuple[bytes, ...]
):
    driver.partition.acquire(seen_epoch=5)
    assert driver.answer(word, *rest) == ""
    assert driver.partition.phase is Phase.FREE
    assert driver.next_call() is None


def test_every_acquire_has_a_new_token(driver: StateDriver):
    """Every acquire has a new token, because a token is void as soon as its release is sent."""
    tokens = set()
    for _ in range(5):
        driver.partition.acquire(seen_epoch=5)
        tokens.add(driver.argument("token"))
        driver.partition.release()
        assert driver.script() == "lease_release"
        driver.answer("FENCED", b"5", b"")
    assert len(tokens) == 5


def test_abandoned_acquire_is_released_with_its_token(driver: StateDriver):
    driver.partition.acquire(seen_epoch=5)
    token = driver.argument("token")
    driver.partition.release()
    assert (driver.script(), driver.argument("token")) == ("lease_release", token)


# --- release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["OK", "FENCED"])
def test_release_is_repeated_until_any_reply(driver: StateDriver, word: str):
    driver.hold().partition.release()
    first = driver.next_call()
    assert first is not None
    assert first.script.name == "lease_release"
    assert not driver.partition.owned, "nothing is renewed while it is given back"
    assert driver.next_call() == first
    assert driver.answer(word, b"7", b"") == "released"
    assert driver.partition.phase is Phase.FREE
    assert driver.slot.owned == 0
    assert driver.slot.trusted_until_ns == 0


def test_clean_worker_exit_releases_without_a_refence(driver: StateDriver):
    driver.hold().run().mark(CLEARED, CLEARED).quiet()
    driver.worker.stop_reason = "drain"
    verdict = driver.partition.on_exit(Exit(ExitCode.STOPPED, None))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.script() == "lease_release"


def test_exit_with_unconfirmed_acks_refences_then_releases(driver: StateDriver):
    """The refence repeats the acknowledgments, because the connection may have lost them."""
    driver.hold().run().mark(CLEARED, DONE).quiet()
    driver.worker.stop_reason = "shed"
    driver.partition.on_exit(Exit(ExitCode.STOPPED, None))
    assert driver.script() == "lease_refence"
    assert driver.places() == [PLACES[1]]
    driver.answer("OK", b"8", 0)
    assert driver.script() == "lease_release"


def test_release_during_a_refence_waits_for_its_reply(driver: StateDriver):
    driver.hold().run().mark(RUNNING)
    driver.partition.on_exit(KILLED)
    refence = driver.next_call()
    driver.partition.release()
    assert driver.next_call() == refence
    driver.answer("OK", b"8", 1)
    assert driver.script() == "lease_release"
    assert driver.argument("token") == driver.partition.lease.token


# --- crash accounting -----------------------------------------------------------------------------


@pytest.mark.fault("F1", "F2")
def test_crash_charges_only_the_running_entry(
    driver: StateDriver,
):
    driver.hold().run().mark(DONE, FAILED, RUNNING)
    old = driver.partition.lease.token
    verdict = driver.partition.on_exit(KILLED)
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
    driver.partition.on_exit(KILLED)
    first = driver.next_call()
    assert [driver.next_call() for _ in range(3)] == [first] * 3
    assert driver.partition.owned, "its lease is kept alive"
    assert not driver.partition.startable, "no successor before the answer"
    new = driver.argument("new")
    assert driver.answer("OK", b"8", 1) == "charged"
    assert driver.partition.lease.token == new
    assert driver.partition.lease.epoch == driver.slot.epoch == 8
    assert driver.slot.counter("charged") == 1
    assert driver.partition.startable


def test_fenced_refence_loses_the_assignment(driver: StateDriver):
    driver.hold().run().mark(RUNNING)
    driver.partition.on_exit(KILLED)
    assert driver.answer("FENCED", b"9", b"east-1") == "lost"
    assert driver.partition.phase is Phase.FREE
    assert driver.slot.counter("charged") == 0


@pytest.mark.fault("F1")
def test_several_running_entries_are_not_charged(driver: StateDriver):
    driver.hold().run().mark(RUNNING, RUNNING)
    verdict = driver.partition.on_exit(KILLED)
    assert (verdict.crashed, verdict.charged) == (True, None)
    assert driver.argument("charged") == b""


@pytest.mark.parametrize("reason", ["quit", "deadline"])
def test_kill_by_the_supervisor_charges_nothing(driver: StateDriver, reason: str):
    driver.hold().run().mark(DONE, RUNNING)
    driver.worker.kill = Kill(reason, driver.slot.run_seq, 103.0)
    verdict = driver.partition.on_exit(KILLED)
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.places() == [PLACES[0]]


@pytest.mark.fault("F4")
def test_hard_limit_charges_its_own_run(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.worker.kill = Kill("hard-limit", driver.slot.run_seq, 103.0)
    verdict = driver.partition.on_exit(KILLED)
    assert (verdict.crashed, verdict.charged) == (True, PLACES[1])
    assert json.loads(str(driver.argument("context"), "ascii"))["what"] == "a hard time limit"


def test_late_hard_limit_charges_nothing(driver: StateDriver):
    """A late hard limit charges nothing, because the next entry is already running by then."""
    driver.hold().run().mark(DONE, RUNNING)
    driver.worker.kill = Kill("hard-limit", driver.slot.run_seq, 103.0)
    driver.slot.run_seq += 1
    assert driver.partition.on_exit(KILLED).charged is None


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5, 6, 9, 255])
def test_handler_that_exits_its_process_is_charged(driver: StateDriver, code: int):
    driver.hold().run().mark(DONE, RUNNING)
    verdict = driver.partition.on_exit(Exit(code, None))
    assert (verdict.crashed, verdict.charged) == (True, PLACES[1])
    assert driver.script() == "lease_refence", "the unit stays ours"


@pytest.mark.parametrize("code", [0, 4, 5, 6])
def test_exit_between_two_messages_counts_as_a_crash(driver: StateDriver, code: int):
    driver.hold().run()
    verdict = driver.partition.on_exit(Exit(code, None))
    assert (verdict.crashed, verdict.cause, verdict.charged) == (True, ExitCause.IDLE, None)
    assert driver.script() == "lease_refence"


@pytest.mark.parametrize("code", [ExitCode.STOPPED, ExitCode.RECYCLE, ExitCode.NO_GROUP])
def test_clean_exit_does_not_count_as_a_crash(driver: StateDriver, code: ExitCode):
    driver.hold().run().mark(DONE).quiet()
    verdict = driver.partition.on_exit(Exit(code, None))
    assert (verdict.crashed, verdict.cause, verdict.charged) == (False, ExitCause.ORDERED, None)
    assert driver.script() == "lease_refence", "a successor is to follow"


def test_missing_group_is_recreated_before_the_next_worker(driver: StateDriver):
    driver.hold().run().quiet()
    driver.partition.on_exit(Exit(ExitCode.NO_GROUP, None))
    driver.answer("OK", b"8", 0)
    assert not driver.partition.startable
    assert driver.partition.wants_exchange


def test_fenced_worker_loses_the_assignment(driver: StateDriver):
    driver.hold().run().quiet()
    assert driver.partition.on_exit(Exit(ExitCode.FENCED, None)).lost
    assert driver.partition.phase is Phase.FREE
    assert driver.next_call() is None


def test_assignment_lost_before_the_worker_exit_is_lost_once(driver: StateDriver):
    driver.hold().run().quiet().partition.become_free()
    assert not driver.partition.on_exit(Exit(ExitCode.FENCED, None)).lost


def test_worker_stopped_at_its_limit_is_recycled_once(driver: StateDriver):
    driver.slot.add("recycled", 3)
    driver.hold().run().quiet()
    driver.worker.stop_reason = "recycle"
    driver.slot.add("recycled")  # the worker counts this itself
    driver.partition.on_exit(Exit(ExitCode.RECYCLE, None))
    assert driver.slot.counter("recycled") == 4


def test_crashes_without_a_suspect_are_counted(driver: StateDriver):
    driver.hold()
    for number in range(1, 3):
        driver.run().mark(DONE)
        driver.partition.on_exit(KILLED)
        driver.answer("OK", str(number).encode(), 0)
        assert driver.partition.uncharged == number
    driver.run().mark(RUNNING)
    driver.partition.on_exit(KILLED)
    assert driver.partition.uncharged == 0


# --- loss -----------------------------------------------------------------------------------------


def test_process_exit_after_a_lost_assignment_settles_nothing(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.partition.become_free()
    found = driver.partition.on_exit(KILLED)
    assert (found.crashed, found.charged) == (True, None), "the new owner handles pending entries"
    assert driver.next_call() is None
    assert driver.partition.phase is Phase.FREE


def test_entries_of_a_lost_assignment_are_not_settled_later(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    driver.partition.become_free()
    driver.partition.on_exit(KILLED)
    driver.hold(epoch=12).run().quiet()
    driver.slot.post_batch([])
    driver.worker.kill = Kill("quit", 0, 103.0)
    assert driver.partition.abandon() is not None
    assert driver.script() == "lease_refence"
    assert driver.argument("charged") == b""
    assert driver.places() == []


def test_unkillable_process_is_fenced_and_its_assignment_moves(driver: StateDriver):
    driver.hold().run().mark(DONE, RUNNING)
    child = driver.partition.child
    assert driver.partition.abandon() is child
    assert driver.places() == [], "its slot may still change"
    assert driver.argument("charged") == b""
    driver.answer("OK", b"8", 0)
    assert driver.script() == "lease_release"


def test_lost_assignment_is_no_longer_trusted(driver: StateDriver):
    driver.hold()
    driver.slot.trusted_until_ns = 10**18
    driver.partition.become_free()
    assert (driver.slot.trusted_until_ns, driver.slot.owned) == (0, 0)


def test_logged_refusal_is_not_retried_early(driver: StateDriver):
    driver.partition.acquire(seen_epoch=5)
    assert driver.partition.wants_exchange
    driver.partition.refusal = "WRONGTYPE"
    assert not driver.partition.wants_exchange


def test_settled_count_restarts_with_each_process(driver: StateDriver):
    driver.hold().run()
    driver.slot.add("acked", 3)
    driver.slot.add("failed", 2)
    assert driver.worker.count_settled() == 5
    driver.run()
    assert driver.worker.count_settled() == 0


# --- a worker with a warm successor ---------------------------------------------------------------


def test_quiet_worker_is_replaced_before_its_exit(driver: StateDriver):
    driver.hold().run().mark(DONE, CLEARED, CLEARED, CLEARED)
    driver.worker.stop_reason = "recycle"
    assert not driver.partition.is_quiet
    driver.quiet()
    assert driver.partition.is_quiet
    child, verdict = driver.partition.dismiss()
    assert (child.pid, driver.partition.child) == (4711, None)
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.script() == "lease_refence"
    assert (driver.argument("charged"), driver.places()) == (b"", [b"m:1-0"])
    assert driver.slot.counter("recycled") == 1
    assert not driver.partition.startable, "no token before the fence has it"
    driver.answer("OK", b"8", 0)
    assert driver.partition.startable


def test_acquired_assignment_is_booting(driver: StateDriver):
    driver.hold()
    assert driver.slot.state == WorkerState.BOOTING
    assert not driver.partition.is_ready
    driver.run()
    driver.partition.on_exit(KILLED)
    assert driver.slot.state == WorkerState.GONE, "this worker has exited"


def test_worker_killed_for_a_slow_exit_has_not_crashed(driver: StateDriver):
    """A worker that is killed because it exits too slowly has not crashed.

    The slow part was `on_stop`, so no message is charged.
    """
    driver.hold().run().mark(DONE, CLEARED, CLEARED, CLEARED)
    driver.quiet()
    driver.worker.kill = Kill("on_stop", 0, 103.0)
    verdict = driver.partition.on_exit(Exit(None, signal.SIGKILL))
    assert (verdict.crashed, verdict.charged) == (False, None)
    assert driver.slot.counter("crashes") == 0
    assert (driver.partition.last_exit, driver.partition.uncharged) == ("", 0)
    assert driver.places() == [b"m:1-0"], "the finished entry is acknowledged"


def test_standby_is_warm_after_its_own_report(driver: StateDriver):
    driver.hold().run()
    assert not driver.partition.standby_is_warm
    driver.partition.standby = Child(4712, -1, None, "", -1)  # type: ignore[arg-type]
    driver.slot.warm_pid = 4700  # an earlier standby
    assert not driver.partition.standby_is_warm
    driver.slot.warm_pid = 4712
    assert driver.partition.standby_is_warm


# --- rounds ---------------------------------------------------------------------------------------


def test_crash_suspects_are_kept_until_their_run(driver: StateDriver):
    """Suspects are kept until they run, even if the worker exits in an orderly way."""
    driver.hold().run().mark(RUNNING, RUNNING, RUNNING, RUNNING)
    driver.partition.on_exit(Exit(None, 9))
    assert driver.partition.suspects == dict.fromkeys(PLACES, 2)
    driver.answer("OK", b"8", 0)
    driver.run().mark(WAITING, WAITING, WAITING, WAITING).quiet()
    driver.slot.suspects_left = 4
    driver.partition.on_exit(Exit(ExitCode.STOPPED, None))
    assert driver.partition.suspects == dict.fromkeys(PLACES, 2)
    driver.answer("OK", b"9", 0)
    driver.run().mark(WAITING, WAITING, WAITING, WAITING).quiet()
    driver.slot.suspects_left = 0
    driver.partition.on_exit(Exit(ExitCode.STOPPED, None))
    assert driver.partition.suspects == {}


def test_crashed_round_is_halved_and_restarts_without_delay(driver: StateDriver):
    """A round that crashed is halved.

    Its restart is not delayed, because a search that narrows is progress and not a crash loop.
    """
    driver.hold().run().mark(RUNNING, RUNNING, RUNNING, RUNNING)
    found = driver.partition.on_exit(Exit(None, 9))
    assert not found.narrowed
    assert driver.partition.plan_restart(found, 200.0, Daemon(instance="one"))
    assert len(driver.partition.exits) == 1
    driver.answer("OK", b"8", 0)
    driver.run().mark(RUNNING, RUNNING, WAITING, WAITING)
    driver.slot.suspects_left = 4
    found = driver.partition.on_exit(Exit(None, 9))
    assert (found.narrowed, found.charged) == (True, None)
    assert driver.partition.suspects == dict(zip(PLACES, (1, 1, 2, 2), strict=True))
    assert driver.partition.plan_restart(found, 201.0, Daemon(instance="one"))
    assert len(driver.partition.exits) == 1
    assert driver.partition.start_at == 201.0
