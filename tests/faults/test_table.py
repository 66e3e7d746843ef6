"""The table of faults is complete, and its page is current."""

from __future__ import annotations

from tests.faults.__main__ import PAGE, current_page
from tests.faults.marked import rows_of_tests
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
