"""An instance's published values show which step an unfinished reload is waiting for."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.admin import reloads
from streamqd.admin.checks import run_checks
from streamqd.admin.instances import instance_row, reload_waits
from streamqd.admin.published import FleetState
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.model import Assignment
from streamqd.store.directives import Directive, Directives
from streamqd.store.members import Heartbeat

NOW = 1_795_000_000_000
ASKED = NOW - 363_000
HUNG = {
    "since_unix_ms": ASKED + 40,
    "directive_unix_ms": ASKED,
    "assignment": ["orders", 0, "bill"],
    "step": "finish",
    "workers": 3,
}
RUNS = {
    "assignments": [
        {"topic": "orders", "partition": 0, "group": "bill", "longest_run_seconds": 400.0}
    ]
}


def fleet(*, asked: str = "", **infos: dict[str, Any]) -> FleetState:
    """Return a fleet of live instances, and a directive to one instance or to `*`."""
    orders = {asked: Directive(ASKED, "ann@west", "prices")} if asked else {}
    heartbeats = [Heartbeat(name, NOW, {"reloaded": 0} | info) for name, info in infos.items()]
    return FleetState(NOW, 15.0, heartbeats, Directives(reloads=orders))


def test_reload_waits_for_the_running_message_of_a_worker() -> None:
    found = reloads.find_pending(fleet(asked="a", a={"reloading": HUNG}), "a", RUNS)

    assert found is not None
    assert (found.asked_unix_ms, found.by, found.reason) == (ASKED, "ann@west", "prices")
    assert found.assignment == Assignment("orders", 0, "bill")
    assert found.waits_for == (
        "the message of orders/0/bill that has been running for 6 min 40 s; then 3 more workers to"
        " replace"
    )


def test_reload_by_a_signal_is_as_old_as_the_signal() -> None:
    raw = HUNG | {"directive_unix_ms": 0, "step": "start", "workers": 0}
    found = reloads.find_pending(fleet(a={"reloading": raw}), "a", RUNS)

    assert found is not None
    assert (found.asked_unix_ms, found.by) == (ASKED + 40, "")
    assert found.waits_for == "the start of the new worker of orders/0/bill"


def test_later_directive_keeps_the_age_of_a_running_reload() -> None:
    raw = HUNG | {"directive_unix_ms": ASKED - 60_000}
    found = reloads.find_pending(fleet(asked="a", a={"reloading": raw}), "a", RUNS)

    assert found is not None
    assert (found.asked_unix_ms, found.by) == (ASKED - 60_000, "")


def test_instance_waits_for_its_turn_to_reload() -> None:
    state = fleet(asked="*", a={"reloading": HUNG}, b={})

    found = reloads.find_pending(state, "b", {})

    assert found is not None
    assert (found.waits_for, found.its_turn) == ("its turn, after a", False)


def test_finished_reload_is_not_pending() -> None:
    state = fleet(asked="*", a={"reloaded": ASKED}, b={})

    assert reloads.find_pending(state, "a", {}) is None
    waiting = reloads.find_pending(state, "b", {})
    assert waiting is not None
    assert waiting.waits_for == "its start"


@pytest.mark.parametrize(
    "raw", [1, "x", [], {}, {"assignment": ["orders", "0", 1], "workers": "many", "step": 9}]
)
def test_invalid_reload_record_is_shown_with_fewer_details(raw: object) -> None:
    found = reloads.find_pending(fleet(a={"reloading": raw}), "a", {})

    assert found is None or found.waits_for == "the check of the new configuration and code"


def test_doctor_and_the_overview_report_a_reload_after_a_minute() -> None:
    state = fleet(asked="a", a={"reloading": HUNG})
    rows = [instance_row(state, each, RUNS) for each in state.heartbeats]

    [found] = run_checks([reload_waits], FleetSnapshot("default", state, instances=rows))

    assert found.text.startswith(
        "a was asked to reload 6 min 3 s ago by ann@west, and waits for the message of orders/0/bi"
    )
    assert found.fix == "`streamqd why orders/0/bill` shows its worker"
    assert found.severity == "warning"
    young = fleet(asked="a", a={"reloading": HUNG | {"directive_unix_ms": NOW - 59_000}})
    rows = [instance_row(young, each, RUNS) for each in young.heartbeats]
    assert run_checks([reload_waits], FleetSnapshot("default", young, instances=rows)) == []
