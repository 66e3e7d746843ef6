"""Decorators that give commands a connection, common options, and an output format.

A decorated command returns a `CommandResult`, or a `DirectiveResult` if it sends a directive to the
fleet. The decorators add options such as `--json`, print the result, and return the exit code. With
`--wait`, they also wait until a directive takes effect.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from streamqd.admin import as_json as document_of
from streamqd.cli.arguments import dry_run_option, json_option, wait_options
from streamqd.cli.output import apply_style, emit, printable
from streamqd.cli.session import Session, pass_session
from streamqd.errors import StreamqdError

EXIT_WAITING = 1
POLL_INTERVAL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    With `--json`, `document` is printed. Otherwise, `show` is printed if it is a sentence, or
    called if it is a function that prints. In both cases, `notes` go to standard error, and `error`
    is raised last.
    """

    document: Any
    show: str | Callable[[], object]
    code: int = 0
    notes: Sequence[str] = ()
    error: StreamqdError | None = None


@dataclass(frozen=True, slots=True)
class DirectiveResult:
    """The result of a command that sent a directive to the fleet.

    `done` is the result from `admin`, and `text` describes it in a sentence. With `--wait`, the
    command polls `missing`. It returns a text for each assignment or instance where the directive
    has not taken effect yet, and the wait ends when there are none. After the wait, `refusals`
    returns texts about instances that rejected the directive.

    If `show` is set, it is called instead of printing `text`. Its arguments are `done`, and True if
    the command waited. `more` contains additional fields for the JSON document.
    """

    done: Any
    text: str
    missing: Callable[[], list[str]]
    refusals: Callable[[], list[str]] = list
    show: Callable[[Any, bool], None] | None = None
    more: dict[str, Any] = field(default_factory=dict)


def connected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the session to a command, and close its connection when the command returns."""

    @pass_session
    @functools.wraps(function)
    def run(session: Session, /, *args: Any, **params: Any) -> Any:
        with session.using_redis():
            return function(session, *args, **params)

    return run


def answering(function: Callable[..., CommandResult | int]) -> Callable[..., int]:
    """Add a session and `--json` to a command, print its result, and return its exit code.

    A command that returns an exit code instead of a result has already printed its output.
    """

    @json_option
    @pass_session
    @functools.wraps(function)
    def run(session: Session, /, *args: Any, as_json: bool, **params: Any) -> int:
        with session.using_redis():
            found = function(session, *args, **params)
        return found if isinstance(found, int) else _print(session, found, as_json)

    return run


def directing(function: Callable[..., DirectiveResult]) -> Callable[..., int]:
    """Add `--wait`, `--timeout`, `--dry-run` and `--json` to a command that sends a directive.

    Of these options, the command itself receives only `dry_run`.
    """

    @wait_options
    @dry_run_option
    @json_option
    @connected
    @functools.wraps(function)
    def run(
        session: Session, /, *args: Any,
        wait: bool, timeout: float, dry_run: bool, as_json: bool, **params: Any,
    ) -> int:  # fmt: skip
        sent = function(session, *args, dry_run=dry_run, **params)
        done, waited = sent.done, wait and not dry_run
        refusals: list[str] = []
        if waited:
            left = wait_until_applied(sent.missing, timeout)
            refusals = sent.refusals()
            done = dataclasses.replace(done, waiting=left + refusals)
        if as_json:
            emit(document_of(done) | sent.more)
        elif sent.show is not None:
            sent.show(done, waited)
        else:
            _show_sent(done, sent.text)
        if not as_json:
            for each in done.waiting:
                text = each if each in refusals else f"not yet: {each}"
                click.echo(apply_style(printable(text), "warn"), err=True)
        return EXIT_WAITING if done.waiting else 0

    return run


def wait_until_applied(missing: Callable[[], list[str]], timeout: float) -> list[str]:
    """Poll `missing` until it returns an empty list, for up to `timeout` seconds.

    Return the last list.
    """
    deadline = time.monotonic() + timeout
    while (waiting := missing()) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_SECONDS)
    return waiting


def _show_sent(done: Any, text: str) -> None:
    if done.changed or done.at_unix_ms is not None:
        click.echo(printable(f"dry run: {text}" if done.dry_run else text))
    for note in done.notes:
        click.echo(printable(note))


def _print(session: Session, found: CommandResult, as_json: bool) -> int:
    if as_json:
        emit(found.document)
    elif isinstance(found.show, str):
        click.echo(printable(found.show))
    else:
        found.show()
    for note in found.notes:
        session.note(note)
    if found.error is not None:
        raise found.error
    return found.code
