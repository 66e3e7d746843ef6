"""Functions that print tables, ages, text that is safe for a terminal, and JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamqd.admin import as_json
from streamqd.errors import RequestRefusedError
from streamqd.words import HIDING_JOINERS, INVISIBLE, age

if TYPE_CHECKING:  # the daemon does not need these modules, and should start quickly
    from streamqd.admin.assignments import AssignmentRow
    from streamqd.admin.messages import MessagePage
    from streamqd.admin.reading import Unreadable

Row = TypeVar("Row")

WIDTH = 80  # width in columns if the size of the terminal is unknown
NO_MATCH = "nothing matches"
BELOW = 4  # number of columns by which a line below a row is indented
LEVELS = {"problem": "bad", "warning": "warn", "ok": "good"}  # level of a finding -> style
_STYLES: dict[str, dict[str, Any]] = {
    "heading": {"bold": True},
    "bad": {"fg": "red", "bold": True},
    "warn": {"fg": "yellow"},
    "good": {"fg": "green"},
}
# Characters that are escaped in addition to ASCII control characters. They include Unicode line
# breaks, invisible characters (some of which change the writing direction), and halves of surrogate
# pairs, which cannot be encoded.
_HARMFUL = f"\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff{INVISIBLE}"
_CONTROLS = re.compile(f"[\\x00-\\x1f{_HARMFUL}]|{HIDING_JOINERS}")
_CONTROLS_OF_TEXT = re.compile(f"[\\x00-\\x08\\x0b-\\x1f{_HARMFUL}]|{HIDING_JOINERS}")
_CONTROLS_OF_JSON = re.compile(f"[{_HARMFUL}]|{HIDING_JOINERS}")
_NAMED_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def emit(document: Any) -> None:
    """Print a result as one JSON document."""
    click.echo(json_text(document, indent=2))


def json_text(document: Any, indent: int | None = None) -> str:
    """Return a result as JSON, on one line unless `indent` is set."""
    ascii_only = "utf" not in (getattr(sys.stdout, "encoding", None) or "").lower()
    text = json.dumps(as_json(document), ensure_ascii=ascii_only, indent=indent)
    # JSON allows control characters that some terminals interpret as the start of a command.
    return _CONTROLS_OF_JSON.sub(lambda found: json.dumps(found[0])[1:-1], text)


def page_document(page: MessagePage[Any], names: str) -> dict[str, Any]:
    """Return some fields of a page as a dict for `--json`.

    `names` contains the names of the fields, separated by spaces and in the order of the output.
    """
    return {name: getattr(page, name) for name in names.split()}


def print_unreadable(rows: Sequence[Unreadable]) -> None:
    """Print the values that could not be read on standard error."""
    for row in rows:
        click.echo(f"! {printable(str(row))}", err=True)
    if rows:
        click.echo("! run `streamqd doctor` for the fix", err=True)


def apply_style(text: str, style: str) -> str:
    """Return text in the style heading, bad, warn or good. Any other style leaves it unchanged.

    Print the text with `click.echo`, which removes the colors if the output is not a terminal.
    """
    found = _STYLES.get(style)
    return click.style(text, **found) if found and text else text


def printable(text: str | bytes | None, *, lines: bool = False) -> str:
    """Escape the control and invisible characters in a text, so that a terminal can show it safely.

    Use this for all text that comes from messages. If `lines` is True, line breaks and tabs are
    kept.
    """
    if text is None:
        return ""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return (_CONTROLS_OF_TEXT if lines else _CONTROLS).sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return _NAMED_CONTROLS.get(found[0]) or found[0].encode("unicode_escape").decode()


def room() -> int | None:
    """Return the number of columns of the terminal, or None if the output is not a terminal."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else None


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], *, last_below: bool = False
) -> None:
    """Print rows under headings.

    Numbers are right-aligned, None is shown as `-`, and text is escaped with `printable`. On a
    terminal, lines are cut to its width. If `last_below` is True and the table is too wide, the
    last column is moved to a separate line below each row. Without a terminal, nothing is cut.
    """
    cells = [["-" if cell is None else _cell(cell) for cell in row] for row in rows]
    numeric = [
        all(isinstance(row[at], int | float) or row[at] is None for row in rows)
        for at in range(len(headings))
    ]
    widths = [
        max(len(heading), *(len(row[at]) for row in cells)) if cells else len(heading)
        for at, heading in enumerate(headings)
    ]
    columns = room()
    below = last_below and columns is not None and sum(widths) + 2 * (len(widths) - 1) > columns
    for number, row in enumerate((list(headings), *cells)):
        texts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines = ["  ".join(texts[:-1] if below else texts).rstrip()]
        if below and number and row[-1]:
            lines.append(" " * BELOW + row[-1])
        for line in lines:
            shown = line
            if columns is not None and len(line) > columns:
                shown = line[: columns - 1] + "…"
            click.echo(shown if number else apply_style(shown, "heading"))


def listing(
    headings: str, rows: Sequence[Row], *, last_below: bool = False, **cells: Callable[[Row], Any]
) -> None:
    """Print a table with one row for each object.

    `headings` contains the headings, separated by spaces. A `_` stands for a space in a heading.
    `cells` maps a heading in lower case to a function that returns the cell for an object. For any
    other heading, the cell is the attribute with the same name.
    """
    names = [re.sub(r"\W", "_", heading.lower()) for heading in headings.split()]
    table(
        [heading.replace("_", " ") for heading in headings.split()],
        [[cells[n](row) if n in cells else getattr(row, n) for n in names] for row in rows],
        last_below=last_below,
    )


def _cell(cell: Any) -> str:
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.1f}" if isinstance(cell, float) else printable(str(cell))


def sentence(text: str, begin: str = "", hang: int = 0) -> None:
    """Print the escaped text on one line, preceded by `begin`.

    On a terminal, the line is wrapped between words, and further lines are indented by `hang`
    columns. Without a terminal, it remains one line, so that programs can search it.
    """
    line = begin + printable(text)
    if sys.stdout.isatty():
        room = shutil.get_terminal_size((WIDTH, 24)).columns
        line = textwrap.fill(
            line, max(room, hang + 20), subsequent_indent=" " * hang,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    click.echo(line)


def ago(now_unix_ms: int, then_unix_ms: int | None) -> str | None:
    """Return the age of an instant for a table cell, or None if the instant is unknown."""
    return None if then_unix_ms is None else age(now_unix_ms - then_unix_ms)


def at_least(number: int, exact: bool) -> str:
    """Return a number, followed by `+` if it is a lower bound."""
    return f"{number:,}{'' if exact else '+'}"


def owner(row: AssignmentRow) -> str:
    """Return the owner of a row for a table cell, with a mark if its lease has expired."""
    return f"{row.owner} (expired)" if row.state == "expired" else row.owner or "-"


def epoch(row: AssignmentRow) -> str | None:
    """Return the epoch of the owner without commas, or None if there was never an owner."""
    return str(row.epoch) if row.epoch else None


def confirm(question: str, yes: bool) -> None:
    """Ask the user to confirm an irreversible action, unless `yes` is True.

    Raises RequestRefusedError if the user declines, or if standard input is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise RequestRefusedError(f"{question} Standard input is not a terminal; pass --yes")
    if not click.confirm(question, err=True):
        raise RequestRefusedError("nothing was done")
