"""The table of faults is complete, and its page is current."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import PAGE, RESULTS, current_page, last_results
from tests.faults.marked import rows_of_tests
from tests.faults.results import SERVERS, merged, shown_on
from tests.faults.table import ROWS, UNTESTED_MAX

NAMES = [row.name for row in ROWS]


def test_the_table_has_every_row_once():
    assert [f"F{number}" for number in range(1, 38)] == NAMES


def test_every_row_is_shown_by_a_test_or_says_why_not():
    shown = {row for rows in rows_of_tests().values() for row in rows}
    untested = {row.name for row in ROWS if row.untested}

    assert sorted(set(NAMES) - shown - untested) == [], "rows without a test"
    assert shown & untested == set(), "rows with tests that say that they have none"
    assert len(untested) <= UNTESTED_MAX


def test_marks_name_rows_of_the_table():
    wrong = {test: rows for test, rows in rows_of_tests().items() if not set(rows) <= set(NAMES)}

    assert wrong == {}


def test_the_page_is_current():
    """Mend it with `make faults-page`, or run the battery anew with `make faults`."""
    assert PAGE.read_text() == current_page()


@pytest.mark.skipif(not RESULTS.exists(), reason="the battery has not been run: `make faults`")
def test_the_last_run_has_shown_every_row_on_every_server():
    """It looks at the outcomes that were recorded, and runs nothing."""
    results, tests = last_results(), rows_of_tests()
    missing = {}
    for row in ROWS:
        of_row = [test for test, rows in tests.items() if row.name in rows]
        if not row.untested and (left := {*SERVERS} - {*shown_on(of_row, results)}):
            missing[row.name] = sorted(left)

    assert missing == {}


def outcomes(**of_servers: dict[str, str]) -> dict[str, object]:
    return {"outcomes": of_servers, "on_server": ["there"]}


def test_a_row_is_shown_where_what_talks_to_the_server_has_passed_and_nothing_failed():
    good, bad, none = {"there": "passed"}, {"there": "failed"}, {"there": "skipped"}
    serverless = {"here": "passed"}
    for results, servers in (
        (outcomes(valkey=good, redis7=good, redis62=good), [*SERVERS]),
        (outcomes(valkey=good, redis7=bad, redis62=none), ["valkey"]),
        (outcomes(valkey=good | {"here": "failed"}, redis7=good), ["redis7"]),
        (outcomes(valkey=serverless, redis7=good), ["redis7"]),
        ({}, []),
    ):
        assert shown_on(["there", "here"], results) == servers
    assert shown_on(["here"], outcomes(valkey=serverless)) == [*SERVERS]
    assert shown_on(["here"], outcomes(valkey={"here": "skipped"})) == []


def test_a_run_of_some_tests_keeps_the_outcomes_of_the_others():
    old = outcomes(valkey={"one": "failed", "there": "passed"}) | {"date": "1"}
    new = outcomes(valkey={"one": "passed"}) | {"date": "2"}

    found = merged(old, new)

    assert found["outcomes"] == {"valkey": {"one": "passed", "there": "passed"}}
    assert (found["date"], found["again"]) == ("1", {"date": "2", "tests": {"valkey": 1}})
