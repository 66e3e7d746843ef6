"""A pytest plugin that writes down how the marked tests ended: `-p tests.faults.recorder`.

The file that FAULT_OUTCOMES names gets one object: test id -> passed | failed | skipped, the worst
of all parameters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "FAULT_OUTCOMES"
_WORST = ("passed", "skipped", "failed")
_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return  # set-up and clean-up count when they fail or skip
    test = report.nodeid.partition("[")[0]
    known = _outcomes.get(test, report.outcome)
    _outcomes[test] = max(known, report.outcome, key=_WORST.index)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[VARIABLE]).write_text(json.dumps(_outcomes))
