"""`streamqd pipeline shell`: run SQL statements from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from streamqd.cli import answers
from streamqd.cli.output import printable
from streamqd.errors import StreamqdError
from streamqd.words import count

if TYPE_CHECKING:
    from streamqd.spark.pipelines.prompt import Prompt

SHOWN_MAX = 1000  # maximum number of rows shown in one table on a terminal
_BEGIN, _GO_ON = "streamqd> ", "      ... "


def run_interactively(prompt: Prompt, form: str) -> None:
    """Run the statements that a user types, until Ctrl-D. An error does not end the session."""
    from streamqd.spark.pipelines.statements import SqlSplitter

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - adds line editing and history
    signal.signal(signal.SIGINT, signal.default_int_handler)  # PySpark's handler would call Java
    click.echo("Tables: topic_NAME, dlq_NAME. End a statement with ;  Exit with Ctrl-D.", err=True)
    typed = SqlSplitter()
    while True:
        try:
            for statement in typed.add(input(_GO_ON if typed.begun else _BEGIN) + "\n"):
                _print_answer(prompt, statement, form)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            typed = SqlSplitter()
            click.echo("canceled", err=True)
        except UnicodeDecodeError:
            typed = SqlSplitter()
            click.echo("Error: the statement is not UTF-8; enter it again", err=True)


def run_from_input(prompt: Prompt, form: str) -> None:
    """Run the statements from standard input. Raises the first error."""
    from streamqd.spark.pipelines.statements import SqlSplitter

    piped = SqlSplitter()
    for line in sys.stdin.buffer:
        # Invalid UTF-8 is kept here and reported later, when the statement is checked.
        for statement in piped.add(line.decode("utf-8", "surrogateescape")):
            _print_rows(prompt, statement, form)
    if rest := piped.remainder():
        _print_rows(prompt, rest, form)


def _print_answer(prompt: Prompt, statement: str, form: str) -> None:
    began = time.monotonic()
    try:
        rows = _print_rows(prompt, statement, form)
    except StreamqdError as error:
        click.echo(f"Error: {printable(str(error), lines=True)}", err=True)
    else:
        shown = "the first " if rows > SHOWN_MAX else ""
        rows = min(rows, SHOWN_MAX) if shown else rows
        click.echo(f"{shown}{count(rows, 'row')}, {time.monotonic() - began:.1f} s", err=True)


def _print_rows(prompt: Prompt, statement: str, form: str) -> int:
    """Print the result of a statement, and return the number of its rows.

    The number is SHOWN_MAX + 1 if the table was cut.
    """
    most = SHOWN_MAX + 1 if form == "table" and sys.stdout.isatty() else None
    found = prompt.ask(statement, most, answers.column_check(form))
    if found.columns:
        answers.show(found.columns, found.rows[: most and SHOWN_MAX], form)
    return len(found.rows)
