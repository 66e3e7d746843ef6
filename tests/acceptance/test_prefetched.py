"""Messages that a worker fetched after a slow one run elsewhere as soon as possible.

A partition has one owner, which runs one message at a time. The others wait until the slow message
finishes, or for `drain_timeout` if the instance stops. Then each of them runs once, at the other
instance.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.acceptance.test_rebalance import Fleet
from tests.acceptance.test_steering import CALM, run_command
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]

BEHIND = 20  # messages after the slow one, some of which the worker fetches
DRAINS = "300ms"


@pytest.fixture
def fleet(new_daemon: NewDaemon) -> Fleet:
    """Two instances, of which the first owns the only partition."""
    settings = {**CALM, "drain_timeout": DRAINS}
    one, two = (new_daemon(name=name, daemon=settings) for name in "ab")
    found = Fleet(one)
    found.wait_shares(1)
    found.wait_workers()
    found.add(two)
    return found


def start_stuck_message(one: Daemon) -> tuple[str, list[str], int]:
    """Start a message that waits for a gate.

    Return that message, the messages after it, and its pid.
    """
    slow, *behind = one.send(["await gate", *["ok"] * BEHIND])
    one.wait_run(slow)
    assert one.pending() > 1, "nothing lies behind it in the worker's hands"
    return slow, behind, one.ledger.records_for(slow, "start")[0].pid


def test_prefetched_messages_move_after_a_slow_run(fleet: Fleet):
    one, two = fleet.members["a"], fleet.members["b"]
    slow, behind, pid = start_stuck_message(one)
    run_command(one, "move", f"{TOPIC}/0/{GROUP}", "b")
    one.wait_event("partition.handed_over")
    fleet.wait_heartbeats(3)
    assert fleet.owners() == {0: "a"}, "two workers would break the order of the partition"
    assert [each.uid for each in one.ledger.records("start")] == [slow]

    (one.folder / "gate").touch()
    for uid in behind:
        one.wait_run(uid, "end")
    assert fleet.owners() == {0: "b"}
    [ended] = one.ledger.records_for(slow, "end")
    first, *others = one.ledger.records("start")
    assert (first.uid, first.pid, ended.pid) == (slow, pid, pid)
    assert [each.uid for each in others] == behind
    assert {each.pid for each in others} == set(two.pids().values()), "all run at the other one"
    assert others[0].at > ended.at
    print(f"behind a slow message: at the other instance {others[0].at - ended.at:.3f} s later")
    one.wait_settled()
    assert one.ledger.audit(GROUP) == Audit()
    assert {each.attempt for each in one.ledger.records("start")} == {1}


def test_prefetched_messages_run_once_after_a_failed_drain(fleet: Fleet):
    one, two = fleet.members["a"], fleet.members["b"]
    slow, behind, pid = start_stuck_message(one)
    mark = two.mark()
    assert one.stop() != 0, "it has given up a message that ran"
    two.wait_event("lease.acquired", after=mark)
    one.wait_run(slow, count=2)  # the oldest message runs first, and is slow here as well
    assert {each.uid for each in one.ledger.records("start")} == {slow}

    (one.folder / "gate").touch()
    for uid in behind:
        two.wait_run(uid, "end")
    first, again, *others = one.ledger.records("start")
    assert [first.pid, first.uid, again.uid] == [pid, slow, slow]
    assert [each.uid for each in others] == behind
    assert {each.pid for each in (again, *others)} == set(two.pids().values())
    print(f"after {DRAINS} of drain: at the other instance {again.at - first.at:.3f} s later")
    two.wait_settled()
    assert one.ledger.audit(GROUP) == Audit(repeated={slow: 2})
    assert {each.attempt for each in others} == {1}
