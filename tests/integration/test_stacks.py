"""An operator requests the stack of a worker with a directive, which has bounds and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from streamqd.admin import published, stacks
from streamqd.admin.published import Fleet
from streamqd.admin.reading import ViewReader
from streamqd.errors import RequestRefusedError
from streamqd.model import Assignment
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.stacks import KEPT_SECONDS, PublishedStack, publish
from streamqd.store.store import Store
from tests.integration.test_steering import SendHeartbeat, heartbeat, orders, own, read_directives
from tests.support.commands import Run

__all__ = ["heartbeat", "orders", "own"]

ASSIGNMENT = Assignment("orders", 0, "bill")


@pytest.fixture
def fleet(store: Store, heartbeat: SendHeartbeat, own: Callable[[int, str], None]) -> Fleet:
    """A live instance `a`, which owns partition 0 but never answers. `b` owns partition 1."""
    heartbeat("a")
    own(0, "a")
    own(1, "b")
    return Fleet(store, "default", 60.0)


def write_request(fleet: Fleet, link: Connection, assignment: Assignment, age: float) -> None:
    """Write a request that is some seconds old."""
    at = int(link.execute("TIME")[0]) * 1000 - round(age * 1000)
    body = json.dumps({"version": 1, "at_unix_ms": at, "by": "otto", "why": ""})
    link.execute("HSET", fleet.store.keys.directives("default"), f"stack:{assignment}", body)


def test_stack_requires_a_live_owner(fleet: Fleet, run: Run, link: Connection, keys: Keys) -> None:
    assert "no instance owns orders/2/bill" in run("stack", "orders/2/bill", code=8).stderr
    assert "b is not in this fleet" in run("stack", "orders/1/bill", code=8).stderr
    assert "numbered 0 to 2" in run("stack", "orders/3/bill", code=8).stderr
    assert "is not a valid assignment" in run("stack", "orders/*/bill", code=2).stderr
    assert read_directives(link, keys).stacks == {}


def test_stack_without_an_answer_exits_1(
    fleet: Fleet, run: Run, link: Connection, keys: Keys
) -> None:
    said = run("stack", str(ASSIGNMENT), "--timeout", "200ms", code=1)
    assert f"no stack of {ASSIGNMENT} arrived within 0.2 s" in said.stderr
    assert json.loads(
        run("stack", str(ASSIGNMENT), "--timeout", "0s", "--json", code=1).stdout
    ) == {
        **ASSIGNMENT._asdict(),
        "stack": None,
    }
    assert [*read_directives(link, keys).stacks] == [ASSIGNMENT]
    # Once each live instance has sent another heartbeat, all of them have read the request.
    assert "stack:orders/0/bill" in run("control", "list").stdout
    assert "stack" not in run("status").stdout


def test_stack_dry_run_writes_nothing(fleet: Fleet, link: Connection, keys: Keys) -> None:
    assert stacks.request(fleet, ASSIGNMENT, dry_run=True).notes == ["a owns it"]
    assert read_directives(link, keys).stacks == {}


def test_stack_requests_are_bounded_and_expire(fleet: Fleet, link: Connection, keys: Keys) -> None:
    """Requests are bounded and expire.

    They must not fill the fleet's directives, or a pause would be refused.
    """
    others = [Assignment("orders", number, "other") for number in range(stacks.REQUESTS_MAX)]
    for each in others:
        write_request(fleet, link, each, 1.0)
    write_request(fleet, link, Assignment("orders", 99, "other"), stacks.ANSWER_SECONDS + 1)
    with pytest.raises(RequestRefusedError, match="16 stacks were requested"):
        stacks.request(fleet, ASSIGNMENT)
    write_request(fleet, link, others[0], stacks.ANSWER_SECONDS + 1)
    stacks.request(fleet, ASSIGNMENT)
    assert {*read_directives(link, keys).stacks} == {ASSIGNMENT, *others[1:]}


def test_stack_view_distinguishes_waiting_and_missed_requests(
    fleet: Fleet, link: Connection
) -> None:
    def view() -> tuple[bool, bool, bool]:
        state = published.fleet_state(fleet)
        found = stacks.read(ViewReader(fleet.store), state, ASSIGNMENT, state.now_unix_ms)
        return found.awaited, found.missed, found.published is not None

    assert view() == (False, False, False)
    write_request(fleet, link, ASSIGNMENT, 1.0)
    assert view() == (True, False, False)
    write_request(fleet, link, ASSIGNMENT, stacks.ANSWER_SECONDS + 1)
    assert view() == (False, True, False)
    write_request(fleet, link, ASSIGNMENT, KEPT_SECONDS + 1)
    assert view() == (False, False, False)
    asked = stacks.request(fleet, ASSIGNMENT).at_unix_ms or 0
    old = PublishedStack(asked - 1, asked, "a", 1, 1, "old")
    link.execute(*publish(fleet.store.keys, ASSIGNMENT, old))
    assert view() == (True, False, True)
    link.execute(*publish(fleet.store.keys, ASSIGNMENT, old._replace(requested_unix_ms=asked)))
    assert view() == (False, False, True)
    link.execute("SET", fleet.store.keys.stack(*ASSIGNMENT), "no json")
    assert view() == (True, False, False)
