"""The plan of a tick: for each partition, the wish with the highest rank wins."""

from __future__ import annotations

import itertools

import pytest

from streamqd.model import Unit
from streamqd.supervisor.plan import (
    Acquire,
    Action,
    AdoptStandby,
    DismissStandby,
    DismissWorker,
    ForkStandby,
    ForkWorker,
    InterruptRun,
    KillStandby,
    KillWorker,
    PauseWorker,
    ReleaseLease,
    StopWorker,
    WakeWorker,
    merge,
)

UNIT, OTHER = Unit("access", 0, "hits"), Unit("access", 1, "hits")

IN_ORDER: list[Action] = [
    KillWorker(UNIT, "stalled"),
    StopWorker(UNIT, "drain"),
    StopWorker(UNIT, "lost"),
    StopWorker(UNIT, "shed"),
    DismissWorker(UNIT),
    StopWorker(UNIT, "recycle"),
    ForkStandby(UNIT),
    Acquire(UNIT, 7),
]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(IN_ORDER, 2)))
def test_plan_keeps_the_first_of_two_actions(first: Action, second: Action) -> None:
    assert merge([first, second]) == merge([second, first]) == [first]


def test_a_release_ranks_by_its_reason() -> None:
    assert merge([ForkWorker(UNIT), ReleaseLease(UNIT, "shed"), ReleaseLease(UNIT, "drain")]) == [
        ReleaseLease(UNIT, "drain")
    ]
    assert merge([ForkWorker(UNIT), ReleaseLease(UNIT, "unstartable")]) == [
        ReleaseLease(UNIT, "unstartable")
    ]


def test_partitions_do_not_compete_and_forks_come_last() -> None:
    assert merge([ForkWorker(UNIT), StopWorker(OTHER, "shed")]) == [
        StopWorker(OTHER, "shed"),
        ForkWorker(UNIT),
    ]


@pytest.mark.parametrize(
    "beside", [InterruptRun(UNIT, 3), PauseWorker(UNIT, True), WakeWorker(UNIT, (1, 0))]
)
def test_worker_command_combines_with_any_other_action(beside: Action) -> None:
    assert merge([StopWorker(UNIT, "drain"), beside]) == [beside, StopWorker(UNIT, "drain")]
    assert merge([AdoptStandby(UNIT), beside]) == [beside, AdoptStandby(UNIT)]


@pytest.mark.parametrize("ending", [DismissStandby(UNIT), KillStandby(UNIT)])
def test_standby_that_should_exit_is_not_adopted(ending: Action) -> None:
    assert merge([AdoptStandby(UNIT), ending]) == [ending]
    assert merge([AdoptStandby(OTHER), ending]) == [ending, AdoptStandby(OTHER)]
