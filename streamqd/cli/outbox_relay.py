"""`streamqd outbox run` and `streamqd outbox status`: relay an outbox, or show its state."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import click

from streamqd import config, logs, process
from streamqd.cli.command import CommandResult, answering, connected
from streamqd.cli.early import stopped
from streamqd.cli.outbox import choose_outbox, open_database, outbox, outbox_options
from streamqd.cli.output import apply_style, printable, table
from streamqd.cli.session import Session
from streamqd.errors import DatabaseUnavailableError, RedisUnavailableError, RequestRefusedError
from streamqd.outbox.relay import COUNTED_MAX
from streamqd.outbox.serving import build_relay
from streamqd.store import outbox as relays

__all__ = ["outbox"]

DEAD_SHOWN = 10  # maximum number of dead-lettered rows that `status` lists


@dataclass(frozen=True, slots=True)
class OutboxState:
    """The state of an outbox, its table and its relay.

    `rows` and `dead` are counted up to 10,000, and `oldest` is the age of the oldest row in
    seconds. While the database is unavailable, all three are None, and `problem` is the reason. If
    no relay owns the outbox, `relay` is '' and `expires` is None. While Redis is unavailable,
    `relay`, `epoch` and `expires` are None.
    """

    name: str
    table: str
    rows: int | None
    oldest: float | None
    dead: int | None
    relay: str | None
    epoch: int | None
    expires: float | None
    sent: int
    error: str
    problem: str
    dead_rows: list[dict[str, object]]


@outbox.command()
@outbox_options
@click.option("--burst", is_flag=True, help="Exit when all rows that can be sent now are sent.")
@connected
def run(
    session: Session, *, name: str | None, database: str | None, table: str | None, burst: bool
) -> int:
    """Relay the messages of one outbox to Redis.

    A daemon does the same for each outbox in its configuration. While another relay owns the
    outbox, this relay waits, and takes over when the other relay stops. It also waits while Redis
    or the database is unavailable. On SIGTERM or Ctrl-C, it finishes the current batch and exits.

    With --burst, the exit code is 1 if rows are left that cannot be sent now, for example because
    of max_backlog, and 4 if the database or Redis returns an error.

    \b
    Examples:
      streamqd outbox run shop
      streamqd outbox run --database sqlite:///shop.db --burst
    """
    found = choose_outbox(session, name, database, table)
    fault = found.fault()
    if fault:
        raise RequestRefusedError(fault)
    settings = config.resolve_url(session.settings)
    signals = process.SignalQueue()
    log = settings.log
    logs.setup(role="outbox", style=log.format, level=log.level)
    try:
        if stopped():
            return 0
        relay = build_relay(
            found,
            settings,
            stop_fd=signals.fileno(),
            stopping=lambda: any(each in process.STOPPING for each in signals.take()),
        )
        code = relay.run(burst=burst)
    finally:
        logs.flush(1.0)
        logs.close()
        signals.close()
    if code:
        click.echo(f"Error: {printable(relay.left)}", err=True)
    return code


@outbox.command()
@outbox_options
@answering
def status(
    session: Session, *, name: str | None, database: str | None, table: str | None
) -> CommandResult:
    """Show the rows of an outbox, its dead-lettered rows and its relay.

    If Redis does not reply, the command shows only the rows, and the exit code is 4.

    \b
    Example:
      streamqd outbox status shop
    """
    found = choose_outbox(session, name, database, table)
    view, away = None, None
    try:
        view = relays.read_view(session.store, found.name)
    except RedisUnavailableError as error:
        away = error
    rows = oldest = dead = None
    problem, shown = "", []
    try:
        with contextlib.closing(open_database(session, found)) as link:
            rows, oldest = link.measure_backlog(COUNTED_MAX)
            dead, shown = link.count_dead(COUNTED_MAX), link.read_dead(DEAD_SHOWN)
    except DatabaseUnavailableError as error:
        problem = str(error)
    state = OutboxState(
        name=found.name,
        table=found.table,
        rows=rows,
        oldest=None if oldest is None else round(oldest, 3),
        dead=dead,
        relay=None if view is None else view.owner if view.relayed else "",
        epoch=None if view is None else view.epoch,
        expires=None if view is None else view.ttl,
        sent=0 if view is None else view.sent,
        error="" if view is None else view.error,
        problem=problem,
        dead_rows=[each._asdict() for each in shown],
    )
    return CommandResult(state, lambda: _show(state), error=away)


def _show(state: OutboxState) -> None:
    lines = [
        ("outbox", f"{state.name} (table {state.table})"),
        ("rows", "unknown" if state.rows is None else _format_count(state.rows)),
        ("oldest", f"{state.oldest:,.1f} s" if state.rows else "none"),
        ("dead", "unknown" if state.dead is None else _format_count(state.dead)),
        ("relay", "unknown" if state.relay is None else state.relay or apply_style("none", "bad")),
        ("epoch", "unknown" if state.epoch is None else str(state.epoch)),
    ]
    for label, text in lines:
        click.echo(f"{label:<8}{text if label == 'relay' and not state.relay else printable(text)}")
    for problem in dict.fromkeys((state.problem, state.error)):
        if problem:
            click.echo(f"{apply_style('problem', 'bad')}: {printable(problem)}")
    if state.dead_rows:
        click.echo()
        table(
            ("DEAD ROW", "TOPIC", "ERROR"),
            [
                [
                    printable(str(each["uid"])),
                    printable(str(each["topic"])),
                    printable(str(each["error"])),
                ]
                for each in state.dead_rows
            ],
        )


def _format_count(number: int) -> str:
    return f"{number:,}" + (" or more" if number >= COUNTED_MAX else "")
