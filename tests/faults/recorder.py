"""A pytest plugin that writes down how the marked tests ended: `-p tests.faults.recorder`.

The file that FAULT_OUTCOMES names gets one object:

    outcomes   test id -> passed | failed | skipped, the worst of all parameters
    on_server  ids of those that talk to the server of the run, or to others of its binary

With FAULT_SCOPE=server only the latter are run: the others need not be shown once more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "FAULT_OUTCOMES"
SCOPE = "FAULT_SCOPE"
_FIXTURES = frozenset({"server", "new_server", "binary"})
_PROPERTY = "on server"
_WORST = ("passed", "skipped", "failed")
_outcomes: dict[str, str] = {}
_on_server: set[str] = set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_server = [item for item in items if _FIXTURES & {*getattr(item, "fixturenames", ())}]
    for item in on_server:
        item.user_properties.append((_PROPERTY, True))
    if os.environ.get(SCOPE) == "server":
        config.hook.pytest_deselected(items=[item for item in items if item not in on_server])
        items[:] = on_server


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return  # set-up and clean-up count when they fail or skip
    test = report.nodeid.partition("[")[0]
    known = _outcomes.get(test, report.outcome)
    _outcomes[test] = max(known, report.outcome, key=_WORST.index)
    if (_PROPERTY, True) in map(tuple, report.user_properties):
        _on_server.add(test)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        found = {"outcomes": _outcomes, "on_server": sorted(_on_server)}
        Path(os.environ[VARIABLE]).write_text(json.dumps(found))
