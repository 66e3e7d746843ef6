"""Print rows that Spark returned, either for people or for programs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from streamqd.cli.output import json_text, printable, table
from streamqd.errors import RequestRefusedError

FORMATS = ("table", "json", "csv")


def show(names: Sequence[str], rows: Sequence[Sequence[Any]], form: str) -> None:
    """Print rows as a table, as one JSON object per line, or as CSV with a header.

    Raises RequestRefusedError for JSON if two columns have the same name.
    """
    if form == "json":
        for row in rows:
            click.echo(json_text(row_to_dict(names, row)))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerows([_cell(each) for each in row] for row in (names, *rows))
    else:
        headings = [printable(name.upper()) for name in names]
        table(headings, [[to_readable(each) for each in row] for row in rows])
    sys.stdout.flush()


def row_to_dict(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return a row as a dict that can be printed as JSON.

    Raises RequestRefusedError if two columns have the same name.
    """
    refuse_doubles(names)
    return {name: to_readable(value) for name, value in zip(names, values, strict=True)}


def refuse_doubles(names: Sequence[str]) -> None:
    """Raise RequestRefusedError if two columns have the same name, because JSON would lose one."""
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise RequestRefusedError(f"two columns are named {double}; rename one with AS")


def column_check(form: str) -> Callable[[Sequence[str]], None]:
    """Return a function that raises RequestRefusedError for columns that a format cannot show."""
    return refuse_doubles if form == "json" else lambda _: None


def to_readable(value: Any) -> Any:
    """Convert a value of a row to a form that can be printed as text or JSON.

    Raises RequestRefusedError if two columns of a nested row have the same name.
    """
    if isinstance(value, tuple) and (names := getattr(value, "__fields__", None)):  # Spark's Row
        return row_to_dict(names, value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {str(name): to_readable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_readable(each) for each in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _cell(value: Any) -> Any:
    """Return a value as a CSV cell. Control characters are escaped only on a terminal."""
    plain = to_readable(value)
    text = json_text(plain) if isinstance(plain, dict | list) else plain
    return printable(text) if isinstance(text, str) and sys.stdout.isatty() else text
