"""In the plan of a tick, the action with the highest rank wins in each partition."""

from __future__ import annotations

import itertools

import pytest

from streamqd.model import Assignment
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

ASSIGNMENT, OTHER = Assignment("access", 0, "hits"), Assignment("access", 1, "hits")

IN_ORDER: list[Action] = [
    KillWorker(ASSIGNMENT, "stalled"),
    StopWorker(ASSIGNMENT, "drain"),
    StopWorker(ASSIGNMENT, "lost"),
    StopWorker(ASSIGNMENT, "shed"),
    DismissWorker(ASSIGNMENT),
    StopWorker(ASSIGNMENT, "recycle"),
    ForkStandby(ASSIGNMENT),
    Acquire(ASSIGNMENT, 7),
]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(IN_ORDER, 2)))
def test_plan_keeps_the_first_of_two_equal_actions(first: Action, second: Action) -> None:
    assert merge([first, second]) == merge([second, first]) == [first]


def test_release_is_ranked_by_its_reason() -> None:
    assert merge(
        [
            ForkWorker(ASSIGNMENT),
            ReleaseLease(ASSIGNMENT, "shed"),
            ReleaseLease(ASSIGNMENT, "drain"),
        ]
    ) == [ReleaseLease(ASSIGNMENT, "drain")]
    assert merge([ForkWorker(ASSIGNMENT), ReleaseLease(ASSIGNMENT, "unstartable")]) == [
        ReleaseLease(ASSIGNMENT, "unstartable")
    ]


def test_plan_orders_forks_last() -> None:
    assert merge([ForkWorker(ASSIGNMENT), StopWorker(OTHER, "shed")]) == [
        StopWorker(OTHER, "shed"),
        ForkWorker(ASSIGNMENT),
    ]


@pytest.mark.parametrize(
    "beside",
    [InterruptRun(ASSIGNMENT, 3), PauseWorker(ASSIGNMENT, True), WakeWorker(ASSIGNMENT, (1, 0))],
)
def test_worker_command_combines_with_any_other_action(beside: Action) -> None:
    assert merge([StopWorker(ASSIGNMENT, "drain"), beside]) == [
        beside,
        StopWorker(ASSIGNMENT, "drain"),
    ]
    assert merge([AdoptStandby(ASSIGNMENT), beside]) == [beside, AdoptStandby(ASSIGNMENT)]


@pytest.mark.parametrize("ending", [DismissStandby(ASSIGNMENT), KillStandby(ASSIGNMENT)])
def test_standby_that_should_exit_is_not_adopted(ending: Action) -> None:
    assert merge([AdoptStandby(ASSIGNMENT), ending]) == [ending]
    assert merge([AdoptStandby(OTHER), ending]) == [ending, AdoptStandby(OTHER)]
