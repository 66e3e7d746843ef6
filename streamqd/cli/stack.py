"""`streamqd stack`: print the stack of a worker that runs on any host."""

from __future__ import annotations

import click

from streamqd.admin import published, stacks
from streamqd.admin.published import Fleet
from streamqd.admin.reading import ViewReader
from streamqd.admin.stacks import ANSWER_SECONDS
from streamqd.cli.arguments import DURATION
from streamqd.cli.command import CommandResult, answering, wait_until_applied
from streamqd.cli.fleet import read_assignment
from streamqd.cli.output import print_unreadable, printable
from streamqd.cli.session import Session
from streamqd.model import Assignment
from streamqd.store.stacks import PublishedStack
from streamqd.words import count

EXIT_NO_STACK = 1


@click.command(short_help="Print the stack of a worker.")
@click.argument("name", metavar="TOPIC/PARTITION/GROUP")
@click.option(
    "--timeout", type=DURATION, default=f"{ANSWER_SECONDS:.0f}s",
    help=f"The maximum time to wait for the trace. Default: {ANSWER_SECONDS:.0f}s.",
)  # fmt: skip
@answering
def stack(session: Session, *, name: str, timeout: float) -> CommandResult:
    """Print the stack trace of a partition's worker.

    \b
      streamqd stack orders/3/bill

    The worker keeps running. The trace contains the stacks of all threads, innermost frame first.
    It shows files, lines and functions, but no values. If C code holds the GIL, the trace contains
    only the main thread and the thread of the event loop. The owner also logs the trace
    (`stack.dumped`) and stores up to 32 KiB of it in Redis for 5 minutes. The exit code is 1 if no
    trace arrives, for example because the owner runs an older version.
    """
    assignment, fleet, reader = read_assignment(name), session.fleet, ViewReader(session.store)
    at = stacks.request(fleet, assignment).at_unix_ms or 0
    found: list[PublishedStack] = []

    def missing() -> list[str]:
        found[:] = [
            each for each in [_read_published(fleet, reader, assignment)] if each is not None
        ]
        return [] if found and found[0].requested_unix_ms >= at else [name]

    wait_until_applied(missing, timeout)
    answer = found[0] if found and found[0].requested_unix_ms >= at else None

    def show() -> None:
        print_unreadable(reader.rows)
        if answer is None:
            click.echo(f"no stack of {assignment} arrived within {timeout:g} s", err=True)
        else:
            _show(assignment, answer)

    document = assignment._asdict() | {"stack": None if answer is None else answer._asdict()}
    code = 0 if answer is not None and answer.stack else EXIT_NO_STACK
    return CommandResult(document, show, code)


def _read_published(
    fleet: Fleet, reader: ViewReader, assignment: Assignment
) -> PublishedStack | None:
    state = published.fleet_state(fleet)
    return stacks.read(reader, state, assignment, state.now_unix_ms).published


def _show(assignment: Assignment, answer: PublishedStack) -> None:
    process = f", pid {answer.pid}" if answer.pid else ""
    click.echo(f"{assignment} on {printable(answer.instance)}, epoch {answer.epoch}{process}")
    if answer.problem:
        click.echo(printable(answer.problem), err=True)
    if answer.stack:
        click.echo(printable(answer.stack, lines=True))
    if answer.lines_left_out:
        click.echo(f"{count(answer.lines_left_out, 'more line')} in the log of the instance")
