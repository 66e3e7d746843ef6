"""The table of faults is complete, and its page is current."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import recorder
from tests.faults.__main__ import PAGE, RESULTS, ROOT, current_page, last_results
from tests.faults.marked import rows_of_tests
from tests.faults.results import SERVERS, full_speed_after, join_outcomes, merge_results, shown_on
from tests.faults.table import ROWS, UNTESTED_MAX
from tests.support.servers import find_binary, require

pytestmark = pytest.mark.promise

NAMES = [row.name for row in ROWS]


def test_fault_table_has_unique_rows():
    assert [f"F{number}" for number in range(1, 40)] == NAMES


def test_every_row_has_a_test_or_a_reason():
    shown = {row for rows in rows_of_tests().values() for row in rows}
    untested = {row.name for row in ROWS if row.untested}

    assert sorted(set(NAMES) - shown - untested) == [], "rows without a test"
    assert shown & untested == set(), "rows with tests that say that they have none"
    assert len(untested) <= UNTESTED_MAX


def test_marks_name_existing_rows():
    wrong = {test: rows for test, rows in rows_of_tests().items() if not set(rows) <= set(NAMES)}

    assert wrong == {}


def test_fault_page_is_current():
    """`make verify NAME=faults-page` writes the page, and `… NAME=faults` repeats the battery."""
    assert PAGE.read_text() == current_page()


@pytest.mark.skipif(not RESULTS.exists(), reason="not run: `make verify NAME=faults`")
def test_last_run_passed_every_row_on_every_server():
    """Every row passed on every server that it does not exclude, as the outcomes record."""
    results, tests = last_results(), rows_of_tests()
    wrong = {}
    for row in ROWS:
        of_row = [test for test, rows in tests.items() if row.name in rows]
        left = {*SERVERS} - {*shown_on(of_row, results)}
        if not row.untested and left != {*row.not_on}:
            wrong[row.name] = (sorted(left), sorted(row.not_on))

    assert wrong == {}, "row: servers on which it was not shown, and those that it excepts"


@pytest.mark.skipif(not RESULTS.exists(), reason="not run: `make verify NAME=faults`")
def test_every_row_has_a_full_speed_time_or_a_reason():
    results, tests = last_results(), rows_of_tests()
    measured = {
        row.name
        for row in ROWS
        if full_speed_after([test for test, rows in tests.items() if row.name in rows], results)
    }

    assert measured == {row.name for row in ROWS if not row.no_speed}


def test_longest_full_speed_time_counts_per_server():
    results = {"full_speed": {"redis7": {"a": 1.0, "b": 2.5}, "valkey": {"a": 3.0}}}

    assert full_speed_after(["a", "b"], results) == {"valkey": 3.0, "redis7": 2.5}
    assert full_speed_after(["c"], results) == {}


def outcomes(**of_servers: dict[str, str]) -> dict[str, object]:
    return {"outcomes": of_servers, "on_server": ["there"]}


def test_row_is_proven_if_its_tests_passed_and_none_failed():
    good, bad, none = {"there": "passed"}, {"there": "failed"}, {"there": "skipped"}
    serverless = {"here": "passed"}
    for results, servers in (
        (outcomes(valkey=good | serverless, redis7=good, redis62=good), [*SERVERS]),
        (outcomes(valkey=good | serverless, redis7=bad, redis62=none), ["valkey"]),
        (outcomes(valkey=good, redis7=good, redis62=good), []),
        (outcomes(valkey=good | {"here": "failed"}, redis7=good), ["redis7"]),
        (outcomes(valkey=serverless, redis7=good), ["redis7"]),
        (outcomes(valkey=good, redis7=none | serverless), ["valkey"]),
        ({}, []),
    ):
        assert shown_on(["there", "here"], results) == servers
    assert shown_on(["here"], outcomes(valkey=serverless)) == [*SERVERS]
    assert shown_on(["here"], outcomes(valkey={"here": "skipped"})) == []
    both = {"there": "passed", "other": "passed"}
    results = {
        "outcomes": {"valkey": both, "redis7": both | {"other": "skipped"}, "redis62": good},
        "on_server": ["there", "other"],
    }
    assert shown_on(["there", "other"], results) == ["valkey"]


def test_worst_outcome_of_a_test_per_server_counts():
    """A test that starts its own server is recorded for that server in any run."""
    one = {"valkey": {"a": "passed"}, "redis7": {"tls": "failed", "a": "passed"}}
    other = {"redis7": {"tls": "passed", "a": "skipped", "b": "passed"}}

    assert join_outcomes(one, other) == {
        "valkey": {"a": "passed"},
        "redis7": {"tls": "failed", "a": "skipped", "b": "passed"},
    }


def test_partial_run_keeps_outcomes_of_other_tests():
    old = outcomes(valkey={"one": "failed", "there": "passed"}) | {"date": "1"}
    new = outcomes(valkey={"one": "passed"}) | {"date": "2"}

    found = merge_results(old, new)

    assert found["outcomes"] == {"valkey": {"one": "passed", "there": "passed"}}
    assert (found["date"], found["again"]) == ("1", {"date": "2", "tests": {"valkey": 1}})


OWN = "tests/integration/test_link_tls.py::test_detached_child_does_not_close_the_tls_session"
OF_THE_RUN = (
    "tests/integration/test_link_failures.py::"
    "test_detached_child_leaves_the_parents_connection_alone"
)
RUN = "valkey"
NONE = "tests/unit/test_process.py::test_child_closes_other_file_descriptors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "on_run", "elsewhere"),
    [
        ("", {OF_THE_RUN: "passed", NONE: "passed"}, {"redis7": {OWN: "passed"}}),
        ("server", {OF_THE_RUN: "passed"}, {}),
    ],
    ids=["everything", "what-talks-to-the-server"],
)
def test_test_outcome_records_its_server(
    tmp_path: Path,
    scope: str,
    on_run: dict[str, str],
    elsewhere: dict[str, dict[str, str]],
):
    """A test counts for the server that it starts, or for the run's if it starts none."""
    for word in (RUN, "redis7"):
        require(find_binary, word)
    file = tmp_path / "outcomes.json"
    environment = os.environ | {recorder.VARIABLE: str(file), recorder.SCOPE: scope}
    command = [sys.executable, "-m", "pytest", "-q", "-p", recorder.__name__, "-n0"]
    command += ["-p", "no:cacheprovider", "--server", RUN, OWN, OF_THE_RUN, NONE]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    found = json.loads(file.read_text())

    assert found["outcomes"] == {RUN: on_run, **elsewhere}
    assert found["on_server"] == sorted({OF_THE_RUN} | ({OWN} if elsewhere else set()))
