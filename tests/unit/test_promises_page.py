"""The recovery times page has the measured figures, and docs/internals/evidence.md the tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.benchmarks import bounds
from tests.support.daemon import ROOT

EVIDENCE = (ROOT / "docs" / "internals" / "evidence.md").read_text()
BOUNDS = EVIDENCE.partition("\n## Rebalance")[0]


def test_evidence_page_names_existing_tests() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", EVIDENCE)
    assert len(named) >= 6
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), f"{path}::{test}"


def test_quick_run_includes_every_test_of_the_promises_page() -> None:
    """`make test` runs every test for a promise of the page on one server."""
    named = re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", BOUNDS)
    command = [sys.executable, "-m", "pytest", "--quick", "--collect-only", "-q", "-p"]
    listed = subprocess.run(
        [*command, "no:cacheprovider", *sorted(set(named))],
        cwd=ROOT,
        text=True,
        capture_output=True,
    ).stdout.splitlines()
    assert len(listed) > len(set(named))

    assert [each for each in named if not any(line.startswith(each) for line in listed)] == []


def test_promises_page_shows_the_measured_figures() -> None:
    if not bounds.RESULTS.exists():
        pytest.skip("make bench NAME=bounds has not been run")
    results = json.loads(bounds.RESULTS.read_text())
    assert bounds.PAGE.read_text().partition(bounds.MARK)[2] == bounds.render_tables(results)
