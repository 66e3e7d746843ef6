"""Summarize the results of the last run of the battery by row. Pure.

The outcomes of a run have this form:

    {"outcomes": {server: {test: passed | failed | skipped}}, "on_server": [test, …],
     "full_speed": {server: {test: seconds}}, …}

The run shows a row on a server if all of the row's tests that use a server passed there, and none
of its other tests failed. If none of the row's tests use a server, the row counts as shown
everywhere as soon as one of them passed. If one of its tests was never run, the row is not shown
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORST = ("passed", "skipped", "failed")
SERVERS = ("valkey", "redis7", "redis62")
FULL_SPEED = "full_speed"  # the key for each test's seconds from its fault until full speed
Results = Mapping[str, Any]
Outcomes = Mapping[str, Mapping[str, str]]


def shown_on(tests: Sequence[str], results: Results) -> list[str]:
    """Return the servers on which the last run showed the required behavior of a row.

    `tests` are the tests of the row.
    """
    outcomes = results.get("outcomes", {})
    there = {test for test in tests if test in results.get("on_server", ())}
    anywhere = any(each.get(test) == "passed" for each in outcomes.values() for test in tests)
    if not {*tests} <= {test for each in outcomes.values() for test in each}:
        return []
    found = []
    for server in SERVERS:
        of_server = outcomes.get(server, {})
        failed = any(of_server.get(test) == "failed" for test in tests)
        if anywhere and not failed and all(of_server.get(test) == "passed" for test in there):
            found.append(server)
    return found


def full_speed_after(tests: Sequence[str], results: Results) -> dict[str, float]:
    """Return, by server, the seconds until a row with these tests was at full speed again."""
    found = {}
    for server in SERVERS:
        times = results.get("full_speed", {}).get(server, {})
        if of_row := [times[test] for test in tests if test in times]:
            found[server] = max(of_row)
    return found


def worst_outcome(*outcomes: str) -> str:
    """Return the combined outcome, which is `failed` if any of the tests failed."""
    return max(outcomes, key=_WORST.index)


def join_outcomes(one: Outcomes, other: Outcomes) -> dict[str, dict[str, str]]:
    """Return the outcomes of two runs, keeping the worse one for each test and server."""
    found = {server: dict(tests) for server, tests in one.items()}
    for server, tests in other.items():
        of_server = found.setdefault(server, {})
        for test, outcome in tests.items():
            of_server[test] = worst_outcome(of_server.get(test, outcome), outcome)
    return found


def merge_results(old: Results, new: Results) -> dict[str, Any]:
    """Return the outcomes of a full run, updated with those of a later partial run."""
    outcomes = {server: dict(found) for server, found in old.get("outcomes", {}).items()}
    for server, found in new["outcomes"].items():
        outcomes.setdefault(server, {}).update(found)
    speeds = {server: dict(found) for server, found in old.get("full_speed", {}).items()}
    for server, found in new.get("full_speed", {}).items():
        speeds.setdefault(server, {}).update(found)
    again = {server: len(found) for server, found in new["outcomes"].items()}
    return {
        **new,
        **old,
        "outcomes": outcomes,
        "full_speed": speeds,
        "on_server": sorted({*old.get("on_server", ()), *new["on_server"]}),
        "again": {"date": new["date"], "tests": again},
    }
