"""`streamqd outbox`: create and check the tables of outboxes."""

from __future__ import annotations

import dataclasses
import hashlib
import re

import click

from streamqd.cli.arguments import Command
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import apply_style, printable
from streamqd.cli.session import Session
from streamqd.config import OutboxSettings
from streamqd.config.outboxes import inline_password, table_location
from streamqd.config.setting import section_settings
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.outbox import schema
from streamqd.outbox.database import Database, connect
from streamqd.outbox.schema import OutboxCheck
from streamqd.outbox.table import DIALECTS, OutboxTable

EXIT_PROBLEMS = 1


def outbox_options(command: Command) -> Command:
    """Add NAME, `--database` and `--table` to a command. They select one outbox."""
    for add in (
        click.option(
            "--table", metavar="NAME",
            help="The table with the messages. Default: the outbox's table, or streamqd_outbox.",
        ),
        click.option(
            "--database", metavar="URL",
            help="The address of a database, instead of a configured outbox. Pass its password as"
            " '${VARIABLE}'.",
        ),
        click.argument("name", metavar="[NAME]", required=False),
    ):  # fmt: skip
        command = add(command)
    return command


def choose_outbox(
    session: Session, name: str | None, database: str | None, table: str | None
) -> OutboxSettings:
    """Return the outbox that the arguments select.

    Raises InvalidRequestError, RequestRefusedError and ConfigError.
    """
    if database is not None:
        if name is not None:
            raise InvalidRequestError("NAME cannot be used with --database; pass one of them")
        found = OutboxSettings("outbox", database)
        if inline_password(found):
            raise InvalidRequestError(
                "other users can see a password in a command line; pass it as '${VARIABLE}'"
            )
    else:
        found = _select_outbox(session.settings.outboxes, name)
    if table is not None:
        shape = section_settings(OutboxSettings)["table"].shape
        if shape is not None and not re.fullmatch(shape.pattern, table):
            raise InvalidRequestError(f"{table!r} is not a valid table name; {shape.hint}")
        found = dataclasses.replace(found, table=table)
    return found if database is None else _name_by_table(session, found)


def _name_by_table(session: Session, found: OutboxSettings) -> OutboxSettings:
    """Return an outbox from the command line with a name that depends only on its table.

    If a configured outbox has the same table, return that outbox. The name determines the lease and
    the records, so if one table had two names, its rows would be sent twice.
    """
    where = table_location(found)
    for each in session.settings.outboxes:
        if where is not None and table_location(each) == where:
            return each
    digest = hashlib.sha256(repr(where).encode()).hexdigest()[:12]
    return dataclasses.replace(found, name=f"outbox-{digest}")


def _select_outbox(outboxes: tuple[OutboxSettings, ...], name: str | None) -> OutboxSettings:
    known = {each.name: each for each in outboxes}
    if not known:
        raise RequestRefusedError(
            "the configuration has no [[outboxes]]; add one, or pass --database URL"
        )
    names = ", ".join(known)
    if name is None and len(known) > 1:
        raise InvalidRequestError(f"the configuration has several outboxes; pass one of {names}")
    if name is None:
        return outboxes[0]
    if name not in known:
        raise RequestRefusedError(f"outbox {name} was not found; pass one of {names}")
    return known[name]


def open_database(session: Session, outbox: OutboxSettings, *, create: bool = False) -> Database:
    """Connect to the database of an outbox.

    Raises RequestRefusedError, DatabaseUnavailableError, ConfigError.
    """
    fault = outbox.fault()
    if fault:
        raise RequestRefusedError(fault)
    return connect(
        outbox.url(),
        table=outbox.table,
        password=outbox.password(),
        max_message_bytes=session.settings.daemon.max_message_bytes,
        create=create,
    )


@click.group()
def outbox() -> None:
    """Create and check the table of messages in your database.

    Your application inserts messages into the table in its own transaction, and a relay sends them
    to Redis after the commit.
    """


@outbox.command()
@outbox_options
@click.option(
    "--sql", is_flag=True, help="Print the SQL statements without connecting to a database."
)
@click.option(
    "--no-notify", is_flag=True,
    help="Do not create the PostgreSQL trigger that notifies the relay of each commit.",
)  # fmt: skip
@answering
def create(
    session: Session,
    *,
    name: str | None,
    database: str | None,
    table: str | None,
    sql: bool,
    no_notify: bool,
) -> CommandResult:
    """Create the table of an outbox and its dead-letter table.

    Tables that already exist are checked, but not changed. The exit code is 1 if the relay cannot
    use them.

    \b
    Examples:
      streamqd outbox create --database sqlite:///shop.db
      streamqd outbox create shop --sql | psql shop
    """
    found = choose_outbox(session, name, database, table)
    if sql:
        return _statements_result(found, notify=not no_notify)
    with open_database(session, found, create=True) as link:
        schema.create(link, notify=not no_notify)
        seen = schema.check(link)
    return _check_result(seen, f"the tables {seen.table} and {seen.table}_dead exist")


def _statements_result(found: OutboxSettings, *, notify: bool) -> CommandResult:
    fault = found.fault()
    if fault:
        raise RequestRefusedError(fault)
    made = OutboxTable(found.table, DIALECTS[found.dialect()]).create(notify=notify)

    def show() -> None:
        for statement in made:
            click.echo(f"{statement};\n")

    return CommandResult({"statements": made}, show)


@outbox.command()
@outbox_options
@answering
def check(
    session: Session, *, name: str | None, database: str | None, table: str | None
) -> CommandResult:
    """Check the tables, columns and permissions of an outbox.

    The command runs the same statements as the relay, but on no rows, so it changes nothing. The
    exit code is 1 if the relay cannot use the outbox.

    \b
    Example:
      streamqd outbox check shop
    """
    found = choose_outbox(session, name, database, table)
    with open_database(session, found) as link:
        seen = schema.check(link)
    return _check_result(seen, f"the relay can use the tables {seen.table} and {seen.table}_dead")


def _check_result(seen: OutboxCheck, text: str) -> CommandResult:
    def show() -> None:
        for problem in seen.problems:
            click.echo(f"{apply_style('problem', 'bad')}: {printable(problem)}")
        for line in [] if seen.problems else [text, *seen.notes]:
            click.echo(printable(line))

    return CommandResult(seen, show, EXIT_PROBLEMS if seen.problems else 0)
