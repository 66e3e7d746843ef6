"""What the last run of the battery has shown: read from its outcomes, row by row. Pure.

    {"outcomes": {server: {test: passed | failed | skipped}}, "on_server": [test, …],
     "full_speed": {server: {test: seconds}}, …}

A row is shown on a server when all of its tests that talk to one have passed there, and none of the
others has failed. Rows without such tests are shown everywhere when one of theirs has passed. A row
with a test that has not been run at all is shown nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORST = ("passed", "skipped", "failed")
SERVERS = ("valkey", "redis7", "redis62")
FULL_SPEED = "full_speed"  # of a test: the seconds from its fault until full speed
Results = Mapping[str, Any]
Outcomes = Mapping[str, Mapping[str, str]]


def shown_on(tests: Sequence[str], results: Results) -> list[str]:
    """The servers on which the last run has shown a row that has these tests."""
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
    """Return by server the seconds after which a row with these tests was at full speed again."""
    found = {}
    for server in SERVERS:
        times = results.get("full_speed", {}).get(server, {})
        if of_row := [times[test] for test in tests if test in times]:
            found[server] = max(of_row)
    return found


def worst(*outcomes: str) -> str:
    """The outcome of several: one that failed is the outcome of all."""
    return max(outcomes, key=_WORST.index)


def joined(one: Outcomes, other: Outcomes) -> dict[str, dict[str, str]]:
    """The outcomes of two runs, the worst of each test on each server."""
    found = {server: dict(tests) for server, tests in one.items()}
    for server, tests in other.items():
        of_server = found.setdefault(server, {})
        for test, outcome in tests.items():
            of_server[test] = worst(of_server.get(test, outcome), outcome)
    return found


def merged(old: Results, new: Results) -> dict[str, Any]:
    """The outcomes of a run of all tests, with those of a later run of some of them."""
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
