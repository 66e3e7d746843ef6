"""A pytest plugin that records the outcome of each test and the code that was tested.

A mutant is judged in a copy of the repository. If a test imported an installed streamqd instead, or
sent scripts from another folder, its result would be worthless without any sign of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

REPORT = "MUTANT_REPORT"  # environment variable with the file to write
_WORST_LAST = ("passed", "skipped", "error", "failed")

_outcomes: dict[str, str] = {}
_said: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = str(report.outcome)
    if outcome == "failed" and report.when != "call":
        outcome = "error"
    if report.when == "call" or outcome != "passed":
        known = _outcomes.get(report.nodeid, "passed")
        _outcomes[report.nodeid] = max(known, outcome, key=_WORST_LAST.index)
    if outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        _said[report.nodeid] = crash.message if crash else report.longreprtext


def pytest_sessionfinish(session: pytest.Session) -> None:
    from streamqd.store import scripts

    root = Path.cwd().resolve()
    loaded = [
        Path(str(module.__file__)).resolve()
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in ("streamqd", "tests") and getattr(module, "__file__", None)
    ]
    loaded += [scripts._directory() / f"{name}.lua" for name in scripts.load()]
    strangers = [str(path) for path in loaded if not path.is_relative_to(root)]
    report = {
        "outcomes": _outcomes,
        "said": _said,
        "loaded": len(loaded),
        "strangers": strangers,
    }
    Path(os.environ[REPORT]).write_text(json.dumps(report))
