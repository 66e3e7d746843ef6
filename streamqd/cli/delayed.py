"""`streamqd delayed`: messages that were sent with a delay and wait for their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from streamqd.admin import delayed as admin
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import Duration, json_option, limit_option, yes_option
from streamqd.cli.deeds import remember
from streamqd.cli.output import age, confirm, count, emit, printable, table
from streamqd.cli.session import Session, pass_session
from streamqd.store.client import Connection

Command = TypeVar("Command", bound=Callable[..., Any])
EXIT_NOT_ALL = 8
NOTHING = "nothing matches"


def _filters(command: Command) -> Command:
    for option in (
        click.option("-p", "--partition", type=click.IntRange(0), help="Of this partition only."),
        click.option("-k", "--key", help="With this key only."),
        click.option(
            "--due-within", type=Duration(), metavar="DURATION", help="Due within this time."
        ),
    ):
        command = option(command)
    return command


def _chosen(command: Command) -> Command:
    """What `now` and `cancel` are about: delayed sends by name, or all that pass the filters."""
    command = _filters(command)
    for option in (
        click.option("--dry-run", is_flag=True, help="Only count them."),
        click.option("--all", "every", is_flag=True, help="All that pass the filters."),
        click.argument("ids", metavar="[PARTITION:SEND-ID]...", nargs=-1),
        click.argument("topic"),
    ):
        command = option(command)
    return command


@click.group()
def delayed() -> None:
    """Look at delayed sends, cancel them, send them now."""


@delayed.command("list")
@click.argument("topic")
@_filters
@limit_option(50)
@click.option("--cursor", default="", help="Go on behind the page that printed this cursor.")
@json_option
@pass_session
def list_(
    session: Session,
    topic: str,
    partition: int | None,
    key: str | None,
    due_within: float | None,
    limit: int,
    cursor: str,
    as_json: bool,
) -> None:
    """Show what was sent with a delay and waits, the first due first, over all partitions.

    \b
      streamqd delayed list orders --due-within 1h

    The ID is the partition and what the producer's send returned. The message gets its uid when it
    is due.
    """
    choice = _choice(partition, key, due_within)
    with session.link() as link:
        seen = admin.listed(link, session.keys, topic, choice=choice, limit=limit, cursor=cursor)
    if as_json:
        emit(seen)
        return
    if not seen.rows:
        filtered = choice != admin.DelayedFilter()
        more = "more " if cursor else ""
        click.echo(NOTHING if filtered else f"no {more}delayed sends in {topic}")
        return
    table(
        ("ID", "DUE IN", "SENT", "BYTES", "KEY"),
        [
            (
                row.id,
                age(row.due_unix_ms - seen.now_unix_ms),
                "-"
                if row.sent_unix_ms is None
                else f"{age(seen.now_unix_ms - row.sent_unix_ms)} ago",
                row.payload_bytes,
                row.key or "-",
            )
            for row in seen.rows
        ],
    )
    session.note(f"{seen.total:,} delayed in {topic}")
    if seen.cursor:
        session.note(f"more: --cursor {seen.cursor}")


@delayed.command()
@click.argument("topic")
@click.argument("name", metavar="PARTITION:SEND-ID")
@json_option
@pass_session
def show(session: Session, topic: str, name: str, as_json: bool) -> None:
    """Show everything that is known of one delayed send.

    \b
      streamqd delayed show orders 3:0f3e9ac1b2d44e58a6c7d8e9f0a1b2c3
    """
    with session.link() as link:
        found = admin.show(link, session.keys, topic, name)
        now = server_unix_ms(link)
    if as_json:
        emit(found)
        return
    pairs = [
        ("id", found.id),
        ("topic", found.topic),
        ("due in", age(found.due_unix_ms - now)),
        ("sent", "-" if found.sent_unix_ms is None else f"{age(now - found.sent_unix_ms)} ago"),
        ("key", "-" if found.key is None else printable(found.key)),
        *((f"header {name}", value) for name, value in (found.headers or {}).items()),
        *found.other.items(),
    ]
    for label, value in pairs:
        click.echo(f"{printable(label) + ':':<13}{printable(value)}")
    click.echo()
    click.echo(f"payload, {len(found.payload):,} bytes:")
    click.echo(printable(found.payload, lines=True))


@delayed.command()
@_chosen
@json_option
@pass_session
def now(
    session: Session,
    topic: str,
    ids: tuple[str, ...],
    every: bool,
    dry_run: bool,
    partition: int | None,
    key: str | None,
    due_within: float | None,
    as_json: bool,
) -> int:
    """Send now what is delayed: those named, or --all that pass the filters.

    \b
      streamqd delayed now orders --all --key customer-7

    The housekeeper of a running daemon sends them within seconds. Exit code 8 when one that is
    named does not wait any more.
    """
    choice = _asked(ids, every, partition, key, due_within)
    with session.link() as link:
        if dry_run:
            return _foretell(session, link, topic, ids, choice, as_json, "would be due now")
        names = ids or admin.chosen(link, session.keys, topic, choice)
        done = admin.hasten(link, session.keys, topic, names)
    if as_json:
        emit(done)
    else:
        click.echo(f"{count(done.due, 'delayed send')} due now" if done.due or ids else NOTHING)
        _tell_missed(done.sent, done.unknown)
    return EXIT_NOT_ALL if ids and (done.sent or done.unknown) else 0


@delayed.command()
@_chosen
@yes_option
@json_option
@pass_session
def cancel(
    session: Session,
    topic: str,
    ids: tuple[str, ...],
    every: bool,
    dry_run: bool,
    partition: int | None,
    key: str | None,
    due_within: float | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Cancel what is delayed, for good: those named, or --all that pass the filters.

    \b
      streamqd delayed cancel orders 3:0f3e9ac1b2d44e58a6c7d8e9f0a1b2c3

    Each is cancelled or was sent already, never both; of those sent the uid is told. Exit code 8
    when one that is named was not cancelled. A dedup_id stays used for its time.
    """
    choice = _asked(ids, every, partition, key, due_within)
    with session.link() as link:
        if dry_run:
            return _foretell(session, link, topic, ids, choice, as_json, "would be cancelled")
        names: Iterable[str] = ids
        if every:
            number = sum(1 for _ in admin.chosen(link, session.keys, topic, choice))
            what = count(number, "delayed send")
            confirm(f"Cancel {what} of {topic} for good?", yes or not number)
            names = admin.chosen(link, session.keys, topic, choice)
        done = admin.cancel(link, session.keys, topic, names)
        if done.cancelled:
            asked = {"sends": list(ids) or "--all", "key": key, "partition": partition}
            counts = {"cancelled": done.cancelled, "sent": len(done.sent)}
            remember(session, link, topic, "delayed cancel", asked, counts)
    if as_json:
        emit(done)
    else:
        done_any = done.cancelled or ids
        click.echo(f"{count(done.cancelled, 'delayed send')} cancelled" if done_any else NOTHING)
        _tell_missed(done.sent, done.unknown)
    return EXIT_NOT_ALL if ids and (done.sent or done.unknown) else 0


def _tell_missed(sent: list[admin.Sent], unknown: list[str]) -> None:
    for each in sent:
        click.echo(f"{printable(each.id)} has been sent: it is {each.uid}", err=True)
    for name in unknown:
        click.echo(f"{printable(name)} is unknown: it was sent, cancelled or never was", err=True)


def _asked(
    ids: tuple[str, ...],
    every: bool,
    partition: int | None,
    key: str | None,
    due_within: float | None,
) -> admin.DelayedFilter:
    """The choice, which must be one that somebody has made."""
    choice = _choice(partition, key, due_within)
    if ids and (every or choice != admin.DelayedFilter()):
        raise click.UsageError("name delayed sends, or choose them by --all and filters, not both")
    if not ids and not every:
        raise click.UsageError("name delayed sends, or say --all (filters may narrow it)")
    return choice


def _choice(
    partition: int | None, key: str | None, due_within: float | None
) -> admin.DelayedFilter:
    return admin.DelayedFilter(
        partition=partition,
        key=key,
        due_within_ms=None if due_within is None else round(due_within * 1000),
    )


def _foretell(
    session: Session,
    link: Connection,
    topic: str,
    ids: tuple[str, ...],
    choice: admin.DelayedFilter,
    as_json: bool,
    what: str,
) -> int:
    """Say how many it would be; of those named, refuse one that does not wait."""
    if ids:
        names = [admin.show(link, session.keys, topic, each).id for each in ids]
        number = len(dict.fromkeys(names))
    else:
        number = sum(1 for _ in admin.chosen(link, session.keys, topic, choice))
    if as_json:
        emit({"topic": topic, "would_be": number})
    else:
        click.echo(f"{count(number, 'delayed send')} {what}" if number else NOTHING)
    return 0
