"""The columns of the table of partitions, with their texts and the screen width that they need.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from streamqd.admin.assignments import AssignmentRow
from streamqd.admin.condition import ALARMING, STEADY, STUCK_SECONDS
from streamqd.admin.ranking import CALM
from streamqd.cli.output import printable
from streamqd.words import age, short_duration

NAME_MIN = 15  # minimum width of the partition's name
GAP = 1
Figure = Callable[[AssignmentRow], float | None]


class Cell(NamedTuple):
    """The text of a cell and its style ('', bold, dim, good, warn or bad)."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class ScreenColumn:
    """A column of the table. It is shown on screens that are at least `from_width` columns wide."""

    name: str
    heading: str
    width: int
    from_width: int
    cell: Callable[[AssignmentRow, int], Cell]
    left: bool = False


def number(value: float | None, width: int = 7) -> str:
    """Format a number in up to `width` characters, such as 1,204, 12.3k or 4.5M.

    None is shown as `-`.
    """
    if value is None:
        return "-"
    if abs(value) < 10 and value != int(value):
        return f"{value:.1f}"
    whole = f"{value:,.0f}"
    if len(whole) <= width:
        return whole
    for size, row in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            short = f"{value / size:.1f}{row}"
            return short if len(short) <= width else f"{value / size:.0f}{row}"
    return whole


def state_cell(row: AssignmentRow) -> Cell:
    """Return a cell with the condition of an assignment.

    A condition that needs attention is in capitals, so that it stands out even without color.
    """
    word, run = row.condition, row.longest_run_seconds or 0
    if word == "running":
        long = run >= STUCK_SECONDS
        return Cell(f"{'RUN' if long else 'run'} {age(run * 1000)}", "warn" if long else "")
    short_word = _SHORT.get(word, word)
    if word in ("paused", "stopped"):
        return Cell(short_word.upper(), "warn")
    if word in ALARMING:
        return Cell(short_word.upper(), "bad")
    return Cell(short_word, "" if word in CALM else "warn")


# Short names of conditions, which fit into the column.
_SHORT = {
    "circuit-open": "circuit",
    "circuit-half-open": "half-open",
    "crash-loop": "crashloop",
    "keys-held": "keys held",
    "booting": "starting",
    "quiet": "stopping",
}


def _run_cell(row: AssignmentRow) -> Cell:
    run = row.longest_run_seconds or 0
    return Cell(short_duration(run or None), "warn" if run >= STUCK_SECONDS else "")


def _owned_for(row: AssignmentRow, now: int) -> str:
    return "-" if not row.since_unix_ms else age(now - row.since_unix_ms)


def _slope(row: AssignmentRow) -> Cell:
    slope = row.lag_per_second
    if slope is None:
        return Cell("-")
    if abs(slope) < STEADY:
        return Cell("steady", "dim")
    return Cell(f"{'+' if slope > 0 else '-'}{number(abs(slope), 5)}", "warn" if slope > 0 else "")


def _numeric_column(
    name: str, heading: str, width: int, from_width: int, value: Figure
) -> ScreenColumn:
    return ScreenColumn(
        name,
        heading,
        width,
        from_width,
        lambda row, _now: Cell(number(value(row), width)),
    )


def _seconds_column(name: str, heading: str, from_width: int, value: Figure) -> ScreenColumn:
    return ScreenColumn(
        name,
        heading,
        6,
        from_width,
        lambda row, _now: Cell(short_duration(value(row))),
    )


COLUMNS = (
    ScreenColumn(
        "owner", "OWNER", 10, 0,
        lambda row, _now: Cell(printable(row.owner) or "-", "" if row.owner else "bad"),
        left=True,
    ),
    ScreenColumn("state", "STATE", 9, 0, lambda row, _now: state_cell(row), left=True),
    ScreenColumn(
        "epoch", "EPOCH", 14, 160,
        lambda row, _now: Cell(str(row.epoch or "-")),
    ),
    ScreenColumn(
        "since", "SINCE", 6, 110,
        lambda row, now: Cell(_owned_for(row, now)),
    ),
    _numeric_column("rate", "MSG/S", 6, 0, lambda row: row.acked),
    _numeric_column("fails", "FAIL/S", 6, 110, lambda row: row.failed),
    _numeric_column("lag", "LAG", 6, 0, lambda row: row.lag),
    ScreenColumn(
        "trend", "LAG/S", 7, 110,
        lambda row, _now: _slope(row),
    ),
    _seconds_column("oldest", "OLDEST", 0, lambda row: row.oldest_seconds),
    _numeric_column("pending", "PENDING", 7, 0, lambda row: row.pending),
    _numeric_column("retries", "RETRIES", 7, 0, lambda row: row.waiting_retries),
    _seconds_column("p99", "P99", 0, lambda row: row.p99_seconds),
    ScreenColumn(
        "run", "RUN", 6, 110,
        lambda row, _now: _run_cell(row),
    ),
    _numeric_column("dlq", "DLQ", 5, 110, lambda row: row.dead_letters),
)  # fmt: skip


def fit_columns(width: int) -> tuple[list[ScreenColumn], int]:
    """Return the columns that fit on the screen, and the remaining width for the name."""
    fit = [column for column in COLUMNS if column.from_width <= width]
    while len(fit) > 1:
        name = width - sum(column.width + GAP for column in fit)
        if name >= NAME_MIN:
            return fit, name
        # A very narrow screen drops the last columns, but keeps the owner and the state.
        fit.pop()
    return fit, max(1, width - sum(column.width + GAP for column in fit))
