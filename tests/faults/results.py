"""What the last run of the battery has shown: read from its outcomes, row by row. Pure.

    {"outcomes": {server: {test: passed | failed | skipped}}, "on_server": [test, …], …}

A row is shown on a server when none of its tests failed there and one that talks to the server has
passed. Rows without such a test are shown everywhere when one of their tests has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SERVERS = ("valkey", "redis7", "redis62")
Results = Mapping[str, Any]


def shown_on(tests: Sequence[str], results: Results) -> list[str]:
    """The servers on which the last run has shown a row that has these tests."""
    outcomes = results.get("outcomes", {})
    there = {test for test in tests if test in results.get("on_server", ())}
    found = []
    for server in SERVERS:
        of_server = outcomes.get(server, {})
        told = {test: of_server[test] for test in tests if test in of_server}
        if there:
            passed = any(told.get(test) == "passed" for test in there)
        else:
            passed = any(each.get(test) == "passed" for each in outcomes.values() for test in tests)
        if passed and "failed" not in told.values():
            found.append(server)
    return found


def merged(old: Results, new: Results) -> dict[str, Any]:
    """The outcomes of a run of all tests, with those of a later run of some of them."""
    outcomes = {server: dict(found) for server, found in old.get("outcomes", {}).items()}
    for server, found in new["outcomes"].items():
        outcomes.setdefault(server, {}).update(found)
    again = {server: len(found) for server, found in new["outcomes"].items()}
    return {
        **new,
        **old,
        "outcomes": outcomes,
        "on_server": sorted({*old.get("on_server", ()), *new["on_server"]}),
        "again": {"date": new["date"], "tests": again},
    }
