"""Lay out one screen of `streamqd top` as a list of lines, which are lists of styled cells.

This module does no I/O. From top to bottom, a screen shows the fleet and the age of the data, the
totals, the problems (pauses first), the partitions, slow handlers next to recent failures, and the
keys that the user can press.
"""

from __future__ import annotations

import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streamqd.admin import ranking
from streamqd.admin.assignments import AssignmentRow, error_name
from streamqd.admin.checks import Finding, run_checks
from streamqd.admin.notices import NOTICES, list_directives
from streamqd.admin.ranking import FailureKind, SlowHandler
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.cli.output import printable
from streamqd.cli.screen.columns import NAME_MIN, Cell, fit_columns, number
from streamqd.words import age, short_duration

Line = list[Cell]

PANEL_ROWS = (3, 8)  # maximum number of rows in a panel, on a small screen and on a large one
PANEL_MIN_HEIGHT = 16  # minimum height of the screen, in lines, for the panels to be shown
ISSUES_MAX = 3
KEYS = "q quit s sort / filter p page space freeze ? help"
HELP = (
    "q          quit",
    "s, S       sort by the next or the previous column, r reverses the order",
    "/          filter by partition, owner or state (Enter keeps it, Esc clears it)",
    "p, arrows  next page, one row up or down (Page Up and Down, Home, End)",
    "space      freeze the screen, or continue",
    "",
    "MSG/S    messages acknowledged per second, over about 10 seconds",
    "LAG      unread messages",
    "LAG/S    growth of the lag per second, over about 20 seconds",
    "OLDEST   age of the oldest unread or pending message",
    "PENDING  messages delivered and not acknowledged",
    "RETRIES  messages that wait for their next attempt",
    "P99      99th percentile of the run times in the last minute",
    "RUN      age of the current handler run",
    "DLQ      dead letters of the group",
    "STATE    run 12s: one message has been running for 12 s",
    "         circuit: the circuit breaker is open",
    "",
    "`streamqd why TOPIC/PARTITION` shows why a partition makes no progress.",
)


@dataclass(frozen=True, slots=True)
class ScreenOptions:
    """The choices of the user at the terminal."""

    order: str = "urgency"
    reverse: bool = False
    filter: str = ""
    typing: bool = False  # the user is typing the filter
    top: int = 0  # first visible row
    frozen: bool = False
    help: bool = False


def frame(
    view: FleetSnapshot | None,
    chosen: ScreenOptions,
    width: int,
    height: int | None,
    *,
    error: str = "",
    old: float = 0.0,
) -> list[Line]:
    """Lay out a screen of `height` lines, or all lines if `height` is None.

    If the view is outdated, `error` is the reason and `old` its age in seconds. Otherwise,
    `error` is ''.
    """
    if view is None:
        lines = [[Cell("streamqd top", "bold")], [Cell(error or "looking …")]]
        return _fit(lines, width, height)
    lines = [_head(view, chosen, error, old), _sums(view)]
    lines += [[Cell("! ", "bad"), each] for each in _issue_cells(view, error)]
    if chosen.help:
        lines += [[], *([Cell(text)] for text in HELP)]
        return _fit(lines, width, height)
    panels = _panels(view, width, height)
    rows = select_visible(view, chosen)
    room = None if height is None else max(1, height - len(lines) - len(panels) - 2)
    lines += _table(view, rows, chosen, width, room)
    if height is not None:
        lines += [[] for _ in range(height - len(lines) - len(panels) - 1)]
    lines += panels
    if height is not None:
        lines = [*lines[: max(0, height - 1)], _foot(rows, chosen, room or 1)]
    return _fit(lines, width, height)


def select_visible(view: FleetSnapshot, chosen: ScreenOptions) -> list[AssignmentRow]:
    """Return the assignments that match the filter, in the chosen order."""
    return ranking.select_rows(
        view.assignments, chosen.filter, chosen.order, reverse=chosen.reverse
    )


def count_table_rows(view: FleetSnapshot | None, width: int, height: int, error: str = "") -> int:
    """Return the number of table rows that fit on the screen."""
    if view is None:
        return 1
    panels = len(_panels(view, width, height))
    return max(1, height - 2 - len(_issue_cells(view, error)) - panels - 2)


# --- the head -------------------------------------------------------------------------------------


def _head(view: FleetSnapshot, chosen: ScreenOptions, error: str, old: float) -> Line:
    states = Counter(each.state for each in view.instances)
    counts = ", ".join(f"{count} {word}" for word, count in sorted(states.items()))
    clock = time.strftime("%H:%M:%S", time.gmtime(view.now_unix_ms / 1000))
    line = [Cell(f"streamqd fleet {printable(view.fleet)}", "bold")]
    if error:
        line.append(Cell(f"  REDIS UNAVAILABLE, data {age(old * 1000)} old", "bad"))
    if chosen.frozen:
        line.append(Cell("  FROZEN", "warn"))
    when = "" if error else f"  {clock}Z"
    return [*line, Cell(f"{when}  instances: {counts or 'none'}")]


def _sums(view: FleetSnapshot) -> Line:
    sums = view.totals
    more = "" if sums.lag_exact else "+"
    return [
        Cell(f"in {number(sums.arriving)}/s  out {number(sums.acked)}/s"),
        Cell(f"  fail {number(sums.failed)}/s", "warn" if sums.failed >= 0.05 else ""),
        Cell(f"  lag {number(sums.lag)}{more}  pending {number(sums.pending)}"),
        Cell(f"  retries {number(sums.waiting_retries)}"),
        Cell(f"  dlq {number(sums.dead_letters)}", "bad" if sums.dead_letters else ""),
    ]


_STYLES = {"problem": "bad", "warning": "warn", "note": "warn"}


def _issue_cells(view: FleetSnapshot, error: str) -> list[Cell]:
    found = [Cell(error, "bad")] if error else []
    found = [
        *_cells(run_checks([list_directives], view)),
        *found,
        *_cells(run_checks(NOTICES, view)),
    ]
    if len(found) > ISSUES_MAX:
        left = len(found) - ISSUES_MAX + 1
        found = [*found[: ISSUES_MAX - 1], Cell(f"and {left} more; see `streamqd status`", "bad")]
    return found


def _cells(found: Sequence[Finding]) -> list[Cell]:
    return [Cell(printable(each.text), _STYLES[each.severity]) for each in found]


# --- the table ------------------------------------------------------------------------------------


def _table(
    view: FleetSnapshot,
    rows: Sequence[AssignmentRow],
    chosen: ScreenOptions,
    width: int,
    room: int | None,
) -> list[Line]:
    columns, name_width = fit_columns(width)
    # On a wide screen, the names should not be far away from the figures.
    longest = max((_cut(printable(row.name), width)[1] for row in view.assignments), default=0)
    name_width = min(name_width, max(NAME_MIN, longest + 1))
    mark = "^" if chosen.reverse else "v"
    heading = [Cell(_pad(f"PARTITION{mark if chosen.order == 'name' else ''}", name_width), "head")]
    for column in columns:
        at = column.name == chosen.order or (column.name, chosen.order) == ("state", "urgency")
        text = f"{column.heading[: column.width - at]}{mark if at else ''}"
        heading.append(Cell(" " + _pad(text, column.width, left=column.left), "head"))
    lines: list[Line] = [heading]
    top = min(chosen.top, max(0, len(rows) - 1))
    for row in rows[top : None if room is None else top + room]:
        line = [Cell(_pad(printable(row.name), name_width))]
        for column in columns:
            text, style = column.cell(row, view.now_unix_ms)
            line += [Cell(" "), Cell(_pad(text, column.width, left=column.left), style)]
        lines.append(line)
    if not rows:
        why = f"nothing matches {chosen.filter}" if chosen.filter else "no partition is offered"
        lines.append([Cell(why, "dim")])
    return lines


def _foot(rows: Sequence[AssignmentRow], chosen: ScreenOptions, room: int) -> Line:
    if chosen.typing:
        return [
            Cell("/" + chosen.filter + "_", "bold"),
            Cell("  Enter keeps it, Esc clears it", "dim"),
        ]
    last = min(len(rows), chosen.top + room)
    where = f"{min(chosen.top + 1, len(rows))}-{last} of {len(rows)} by {chosen.order}"
    kept = f"  /{chosen.filter}" if chosen.filter else ""
    return [Cell(f"{where}{kept}  ", "bold"), Cell(KEYS, "dim")]


# --- the panels -----------------------------------------------------------------------------------


def _panels(view: FleetSnapshot, width: int, height: int | None) -> list[Line]:
    if height is not None and height < PANEL_MIN_HEIGHT:
        return []
    most = PANEL_ROWS[1] if height is None else min(PANEL_ROWS[1], max(PANEL_ROWS[0], height // 6))
    slow = [_slow_cell(each) for each in ranking.slowest(view.assignments)[:most]]
    failed = [_failure_cell(each) for each in ranking.recent(view.failures)[:most]]
    count = max(1, len(slow), len(failed))
    half = width // 2
    lines: list[Line] = []
    left = (
        [Cell("SLOWEST HANDLERS", "head"), *slow]
        if slow
        else [Cell("SLOWEST HANDLERS", "head"), Cell("no handler has run lately", "dim")]
    )
    right = (
        [Cell("RECENT FAILURES", "head"), *failed]
        if failed
        else [
            Cell("RECENT FAILURES", "head"),
            Cell(f"none in {age(ranking.RECENT_SECONDS * 1000)}", "dim"),
        ]
    )
    for at in range(count + 1):
        one = left[at] if at < len(left) else Cell("")
        two = right[at] if at < len(right) else Cell("")
        lines.append(
            [
                Cell(_pad(one.text, half - 1), one.style),
                Cell(" "),
                Cell(_pad(two.text, width - half), two.style),
            ]
        )
    return lines


def _slow_cell(each: SlowHandler) -> Cell:
    text = f"{each.topic}/{each.group}  p99 {short_duration(each.p99_seconds or None)}"
    run = each.run_seconds
    return Cell(printable(f"{text}  now {short_duration(run)}" if run >= 1 else text))


def _failure_cell(each: FailureKind) -> Cell:
    return Cell(
        printable(
            f"{error_name(each.error)} x{number(each.count, 5)} {each.topic}/{each.group}"
            f" {age(each.seconds_ago * 1000)} ago"
        )
    )


# --- text -----------------------------------------------------------------------------------------


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(text: str, width: int) -> tuple[str, int]:
    """Return the part of a text that fits into `width` columns, and the number of its columns."""
    if text.isascii():
        return text[:width], min(len(text), width)
    taken, used = [], 0
    for character in text:
        columns = _character_width(character)
        if used + columns > width:
            break
        taken.append(character)
        used += columns
    return "".join(taken), used


def _pad(text: str, width: int, *, left: bool = True) -> str:
    cut, used = _cut(text, width)
    if cut != text and width > 1:
        # A `~` marks text that was cut.
        cut, used = _cut(text, width - 1)
        cut, used = cut + "~", used + 1
    space = " " * (width - used)
    return cut + space if left else space + cut


def _fit(lines: Sequence[Line], width: int, height: int | None) -> list[Line]:
    """Return the lines, cut and padded to the size of the screen."""
    fitted: list[Line] = []
    for line in lines[:height]:
        room = width
        cells: Line = []
        for text, style in line:
            cut, used = _cut(text, room)
            room -= used
            if cut:
                cells.append(Cell(cut, style))
        # Spaces overwrite the previous frame.
        fitted.append([*cells, Cell(" " * room)] if room else cells)
    return fitted + [[Cell(" " * width)] for _ in range((height or 0) - len(fitted))]
