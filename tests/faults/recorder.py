"""A pytest plugin that records the outcomes of the marked tests: `-p tests.faults.recorder`.

It writes one object to the file that FAULT_OUTCOMES names:

    outcomes   server -> test id -> passed | failed | skipped, the worst of all parameters
    on_server  ids of tests that use the server of the run, or others of its binary
    full_speed server -> test id -> seconds until full speed, the most of all parameters

If a test starts servers of another binary, as the TLS tests do, its outcome is recorded for that
binary. With FAULT_SCOPE=server, only the tests that use the server of the run are executed, because
the others need not be repeated.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.faults.results import FULL_SPEED, SERVERS, worst_outcome
from tests.support import servers

VARIABLE = "FAULT_OUTCOMES"
SCOPE = "FAULT_SCOPE"
_FIXTURES = ("server", "new_server", "binary")
_PROPERTY = "servers"  # the key in a report that lists the servers the test used
_outcomes: dict[str, dict[str, str]] = {}
_full_speed: dict[str, dict[str, float]] = {}
_on_server: set[str] = set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(SCOPE) == "server":
        config.hook.pytest_deselected(items=[item for item in items if not _of_the_run(item)])
        items[:] = [item for item in items if _of_the_run(item)]


def pytest_runtest_setup() -> None:
    servers.started.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> None:
    kept = [each for each in item.user_properties if each[0] != _PROPERTY]
    item.user_properties[:] = [*kept, (_PROPERTY, " ".join(sorted(_words(item))))]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return  # setup and teardown count only if they fail or skip
    test = report.nodeid.partition("[")[0]
    properties = dict(report.user_properties)
    words = properties[_PROPERTY].split()
    for word in words or [""]:
        of_server = _outcomes.setdefault(word, {})
        of_server[test] = worst_outcome(of_server.get(test, report.outcome), report.outcome)
        if FULL_SPEED in properties:
            times = _full_speed.setdefault(word, {})
            times[test] = max(times.get(test, 0.0), properties[FULL_SPEED])
    if words:
        _on_server.add(test)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        # A test that uses no server is recorded for the server of the run.
        without = _outcomes.pop("", {})
        _outcomes.setdefault(session.config.getoption("--server"), {}).update(without)
        found = {"outcomes": _outcomes, "on_server": sorted(_on_server)}
        found |= {"full_speed": _full_speed}
        Path(os.environ[VARIABLE]).write_text(json.dumps(found))


def _of_the_run(item: pytest.Item) -> bool:
    """Return True if the test uses the run's server, not a fixture of that name in its module."""
    known = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return any(known[name][-1].baseid == "tests" for name in _FIXTURES if name in known)


def _words(item: pytest.Item) -> set[str]:
    """Return the servers that a test started, or the server of the run if it started none."""
    had = getattr(item, "funcargs", {}).values()
    binaries = {each.binary for each in had if isinstance(each, servers.ProcessServer)}
    binaries |= servers.started
    words = {word for binary in binaries for word in SERVERS if binary == _binary(word)}
    if words:
        return words
    return {item.config.getoption("--server")} if _of_the_run(item) else set()


@cache
def _binary(word: str) -> Path | None:
    try:
        return servers.find_binary(word)
    except servers.NoServerError:
        return None
