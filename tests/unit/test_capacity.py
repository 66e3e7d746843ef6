"""An instance offers to serve only as many partitions as it can start workers for."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from streamqd.policy.capacity import TOGETHER_MAX, TRY_SECONDS, Capacity
from streamqd.store import members
from streamqd.store.members import Heartbeat

PROBLEM = "Too many open files"


def test_refused_start_sets_the_limit_to_running_workers():
    """If a start is refused, the limit becomes the number of running workers.

    The instance then does not take partitions again that it cannot start.
    """
    capacity = Capacity()
    assert capacity.room(7) is None
    capacity.record_refusal(10.0, 3, PROBLEM)
    assert (capacity.limit, capacity.problem) == (3, PROBLEM)
    assert [capacity.room(owned) for owned in (0, 3, 5)] == [3, 0, 0]


def test_capacity_backs_off_after_failed_attempts():
    """After each failed attempt, the instance waits longer before it tries again."""
    capacity, now, waits = Capacity(), 0.0, []
    capacity.record_refusal(now, 3, PROBLEM)
    for _ in range(6):
        began = now
        while not capacity.count_to_try(now, 3):
            now += 1.0
        waits.append(now - began)
        capacity.record_refusal(now, 3, PROBLEM)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert capacity.limit == 3


@given(wanted=st.integers(1, 300), running=st.integers(0, 300))
def test_capacity_limit_is_lifted_after_a_successful_start(wanted: int, running: int):
    """After a successful start, the limit is lifted.

    The instance takes back its share, even while it waits for others to hand it over.
    """
    capacity, now = Capacity(), 0.0
    capacity.record_refusal(now, running, PROBLEM)
    while capacity.limit is not None:
        now += 1.0
        assert now < 60.0
        if count := capacity.count_to_try(now, running):
            assert count <= TOGETHER_MAX
            before = capacity.limit
            capacity.record_trial(now, running, count, wanted)
            assert capacity.limit is None or capacity.limit > before
    assert (capacity.problem, capacity.room(running)) == ("", None)
    capacity.record_refusal(now, 1, PROBLEM)
    assert not capacity.count_to_try(now + TRY_SECONDS[0] - 0.1, 1)


def test_member_limit_is_understood_by_older_versions():
    """Older versions understand the limit.

    They read it as a cap, and take a member with a limit of 0 for one that is leaving.
    """
    told = {"offers": [["t", "g"]], "capacity": 3, "capacity_problem": PROBLEM, "cap": 3}
    assert members.to_member_view(Heartbeat("a", 1, told)).member.cap == 3
    nothing = json.loads(json.dumps({**told, "capacity": 0, "cap": 0, "leaving": True}))
    assert members.to_member_view(Heartbeat("a", 1, nothing)).leaving
