"""Plans are values: planning twice returns the same actions, changes nothing and logs nothing.

The tests need no processes, because they set the states of partitions that the supervisor would
see.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamqd.config import Consumer, Daemon
from streamqd.model import Assignment
from streamqd.policy.capacity import GIVE_UP_SECONDS, Capacity
from streamqd.process import Child
from streamqd.scoreboard import Scoreboard, WorkerState
from streamqd.store.scripts import Reply
from streamqd.supervisor import process_capacity
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.plan import (
    Action,
    DismissStandby,
    DismissWorker,
    ForkStandby,
    KillStandby,
    KillWorker,
    ReleaseLease,
    StopWorker,
    merge,
)
from streamqd.supervisor.rolling_replacement import (
    IDLE_PATIENCE_SECONDS,
    RollConditions,
    RollingReplacement,
)
from tests.support.planned_twice import plan_twice

ASSIGNMENTS = [Assignment("access", number, "hits") for number in range(3)]
STEPS = ["max_rss", "max_messages", "reload", "boot", "warm", "quiet", "die", "wait", "forget"]


class Fleet:
    """Partitions with workers and their replacement. `apply` carries out the actions of a plan."""

    def __init__(self, **consumer: Any) -> None:
        board = Scoreboard(len(ASSIGNMENTS))
        chosen = Consumer(topic="access", group="hits", handler="h:go", **consumer)
        self.partitions = {
            assignment: AssignmentState(assignment, chosen, board.allot(assignment))
            for assignment in ASSIGNMENTS
        }
        self.replacement = RollingReplacement()
        self.daemon = Daemon()
        self.now = 100.0
        self._pid = 1000
        for partition in self.partitions.values():
            partition.acquire(seen_epoch=6)
            partition.apply_reply(Reply("OK", [b"7", 0, b""]), self.now)
            partition.groups_ready = True
            self.start(partition)

    def process(self) -> Child:
        self._pid += 1
        return Child(self._pid, -1, None, "", -1)  # type: ignore[arg-type]

    def start(self, partition: AssignmentState, child: Child | None = None) -> None:
        partition.record_start(child or self.process(), self.now)
        assert partition.worker is not None
        partition.worker.ready_at = self.now
        partition.slot.state = WorkerState.READY

    def tick(self) -> list[Action]:
        """Make one tick. Return its plan."""
        self.now += 0.5
        for partition in self.partitions.values():
            if partition.worker is not None:
                partition.worker.note_quiet(self.now)
        given = RollConditions(self.now, self.daemon, False, frozenset(), 0)
        self.replacement.observe(self.partitions, given)
        return plan_twice(
            lambda: self.replacement.plan_actions(self.partitions.values(), self.now, 60.0),
            self.replacement,
            self.partitions,
        )

    def apply(self, actions: list[Action]) -> None:
        for action in merge(actions):
            partition = self.partitions[action.assignment]
            match action:
                case ForkStandby():
                    partition.standby = self.process()
                    partition.slot.standby_pid = partition.standby.pid
                case DismissStandby():
                    partition.standby_ended()
                case KillStandby():
                    self.strike("die", action.assignment)
                case StopWorker(_, reason):
                    assert partition.worker is not None
                    partition.worker.stop_reason = partition.stop_reason or reason
                case DismissWorker(_, unexplained):
                    assert partition.is_quiet, "two would run one message"
                    partition.dismiss(unexplained=unexplained)
                case _:
                    assert isinstance(action, KillWorker)

    def strike(self, step: str, assignment: Assignment) -> None:
        """Cause one event in a partition."""
        partition = self.partitions[assignment]
        if step in ("max_rss", "max_messages", "reload"):
            self.replacement.request(assignment, step)
        elif step == "boot" and partition.child is None:
            if partition.phase is Phase.REFENCING:
                partition.apply_reply(Reply("OK", [b"8"]), self.now)
            following = partition.standby
            partition.standby_ended()
            self.start(partition, following)
        elif step == "warm" and partition.standby is not None:
            partition.slot.warm_pid = partition.standby.pid
        elif step == "quiet" and partition.child is not None:
            partition.slot.state = WorkerState.QUIET
        elif step == "die" and partition.standby is not None:
            partition.standby_ended()
            self.replacement.on_standby_exit(partition, "exit 1", self.now, self.daemon)
        elif step == "wait":
            self.now += IDLE_PATIENCE_SECONDS
        elif step == "forget":
            self.replacement.forget()


@given(
    handover=st.sampled_from(["warm", "cold"]),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.sampled_from(ASSIGNMENTS), st.booleans()), max_size=60
    ),
)
def test_plan_depends_only_on_the_observed_state(
    handover: str, steps: list[tuple[str, Assignment, bool]]
) -> None:
    """A plan depends only on the observed state, even if the previous plan was not carried out."""
    fleet = Fleet(handover=handover)
    for step, assignment, applied in steps:
        fleet.strike(step, assignment)
        actions = fleet.tick()
        assert sum(isinstance(each, ForkStandby) for each in actions) <= 1
        if applied:
            fleet.apply(actions)
        assert sum(each.standby is not None for each in fleet.partitions.values()) <= 1


def test_stop_is_repeated_until_the_worker_receives_it() -> None:
    fleet = Fleet()
    fleet.replacement.request(ASSIGNMENTS[0], "max_rss")
    fleet.apply(fleet.tick())
    fleet.strike("warm", ASSIGNMENTS[0])
    stop = [StopWorker(ASSIGNMENTS[0], "recycle")]
    assert fleet.tick() == stop
    assert fleet.tick() == stop
    fleet.apply(stop)
    assert fleet.tick() == []


def test_reload_dismisses_the_old_standby_of_an_exited_worker() -> None:
    """The old standby is dismissed.

    It would be adopted otherwise, and the roll skips a partition without a worker.
    """
    fleet = Fleet()
    fleet.replacement.request(ASSIGNMENTS[0], "max_rss")
    fleet.apply(fleet.tick())
    for step in ("warm", "quiet"):
        fleet.strike(step, ASSIGNMENTS[0])
        fleet.apply(fleet.tick())
    assert fleet.partitions[ASSIGNMENTS[0]].child is None
    fleet.replacement.forget()
    assert fleet.tick() == [DismissStandby(ASSIGNMENTS[0])]


def test_reload_does_not_use_a_standby_with_old_code() -> None:
    """A standby with the old code is not used. It would run that code as the reloaded worker."""
    fleet = Fleet()
    fleet.replacement.request(ASSIGNMENTS[0], "max_rss")
    fleet.apply(fleet.tick())
    fleet.strike("warm", ASSIGNMENTS[0])
    fleet.replacement.forget()
    fleet.replacement.request(ASSIGNMENTS[0], "reload")
    assert fleet.tick() == [DismissStandby(ASSIGNMENTS[0])]
    fleet.apply([DismissStandby(ASSIGNMENTS[0])])
    assert fleet.tick() == [ForkStandby(ASSIGNMENTS[0])]


def test_other_workers_do_not_wait_for_an_exiting_standby() -> None:
    """A standby that exits may take as long as its `on_stop`.

    Only its own partition waits for that.
    """
    fleet = Fleet()
    ending = fleet.partitions[ASSIGNMENTS[0]]
    ending.slot.standby_pid = fleet.process().pid
    for assignment in ASSIGNMENTS[:2]:
        fleet.replacement.request(assignment, "max_rss")
    assert fleet.tick() == [ForkStandby(ASSIGNMENTS[1])]
    fleet.replacement.forget()
    fleet.replacement.request(ASSIGNMENTS[0], "max_rss")
    assert fleet.tick() == []
    ending.slot.standby_pid = 0
    assert fleet.tick() == [ForkStandby(ASSIGNMENTS[0])]


def test_idle_worker_is_kept_and_its_pace_is_reset() -> None:
    fleet = Fleet()
    partition = fleet.partitions[ASSIGNMENTS[0]]
    partition.pace = 50.0
    fleet.replacement.request(ASSIGNMENTS[0], "max_messages")
    fleet.apply(fleet.tick())
    fleet.strike("warm", ASSIGNMENTS[0])
    assert fleet.tick() == []
    fleet.strike("wait", ASSIGNMENTS[0])
    assert fleet.tick() == [DismissStandby(ASSIGNMENTS[0])]
    assert partition.pace == 0.0


# --- processes that the operating system refuses --------------------------------------------------


@given(since=st.lists(st.sampled_from([0.0, 50.0, 99.0]), min_size=3, max_size=3))
def test_refused_partitions_are_released_together(since: list[float]) -> None:
    """Once one of the refused partitions has waited long enough, all of them are released."""
    fleet, capacity = Fleet(), Capacity()
    partitions = list(fleet.partitions.values())
    for partition, refused in zip(partitions, since, strict=True):
        partition.refused_since = refused
        partition.worker = None if refused else partition.worker
    now = 50.0 + GIVE_UP_SECONDS
    process_capacity.observe(capacity, now, partitions, "Too many open files")
    actions = plan_twice(
        lambda: list(process_capacity.plan_actions(now, partitions)), capacity, partitions
    )
    refused = [assignment for assignment, at in zip(ASSIGNMENTS, since, strict=True) if at]
    lasting = 50.0 in since
    assert actions == (
        [ReleaseLease(assignment, "unstartable") for assignment in refused] if lasting else []
    )
    assert capacity.limit == (len(ASSIGNMENTS) - len(refused) if lasting else None)
