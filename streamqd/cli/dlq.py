"""`streamqd dlq`: dead letters, from looking at them to bringing them back."""

from __future__ import annotations

from typing import Any

import click

from streamqd.admin import audit, dead_letters, topics
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import json_option, limit_option
from streamqd.cli.dlq_act import purge, replay
from streamqd.cli.dlq_choice import NO_MATCH, check_group, chosen, filter_options, stated
from streamqd.cli.dlq_export import export
from streamqd.cli.dlq_view import print_causes, print_deeds, print_letter, print_rows
from streamqd.cli.output import age, count, emit, table, unreadable
from streamqd.cli.session import Session, pass_session
from streamqd.store.client import Connection

LIMIT = limit_option(20)
CURSOR = click.option(
    "--cursor", default="", help="Go on behind the page that printed this cursor."
)


@click.group()
def dlq() -> None:
    """Look at dead letters, bring them back, delete them."""


@dlq.command("list")
@click.argument("topic", required=False)
@filter_options
@LIMIT
@CURSOR
@json_option
@pass_session
def list_(
    session: Session, /, topic: str | None, limit: int, cursor: str, as_json: bool, **filters: Any
) -> None:
    """Show the letters of a topic, the newest first.

    Without TOPIC: how many each topic has.
    """
    with session.link() as link:
        if topic is None:
            if stated(filters):
                raise click.UsageError("say which topic: the filters are for the letters of one")
            _overview(session, link, as_json)
            return
        choice = chosen(link, filters)
        check_group(session, link, topic, choice)
        seen = dead_letters.listed(
            link, session.keys, topic, choice=choice, limit=limit, cursor=cursor
        )
        now = server_unix_ms(link)
    if as_json:
        emit(seen)
        return
    if not seen.rows:
        click.echo(_nothing(topic, filters, "no more" if cursor else "no"))
        return
    print_rows(seen.rows, now)
    session.note(f"{count(seen.total, 'dead letter')} in {topic}")
    if seen.cursor:
        session.note(f"more: --cursor {seen.cursor}")


def _overview(session: Session, link: Connection, as_json: bool) -> None:
    rows = dead_letters.overview(link, session.keys)
    now = server_unix_ms(link)
    if as_json:
        emit(rows)
    elif not rows:
        click.echo("no dead letters")
    else:
        unreadable([each for row in rows for each in row.unreadable])
        table(
            ("TOPIC", "DEAD LETTERS", "NEWEST", "OLDEST"),
            [
                (
                    row.topic,
                    row.total,
                    age(row.newest_unix_ms and now - row.newest_unix_ms),
                    age(row.oldest_unix_ms and now - row.oldest_unix_ms),
                )
                for row in rows
            ],
        )


@dlq.command()
@click.argument("topic")
@filter_options
@click.option(
    "-n", "--limit", "--newest", "newest", type=click.IntRange(1), metavar="N",
    help="Count only the newest N.",
)  # fmt: skip
@json_option
@pass_session
def stats(
    session: Session, /, topic: str, newest: int | None, as_json: bool, **filters: Any
) -> None:
    """Count the letters of a topic by what killed them.

    Letters that died of the same exception, at the same place in your code, in the same handler,
    have the same fingerprint.
    """
    with session.link() as link:
        choice = chosen(link, filters)
        check_group(session, link, topic, choice)
        found = dead_letters.causes(link, session.keys, topic, choice, last=newest)
        now = server_unix_ms(link)
    if as_json:
        emit(found)
        return
    if not found.causes:
        click.echo(_nothing(topic, filters))
        return
    print_causes(found.causes, now)
    if found.others:
        session.note(f"{count(found.others, 'letter')} of still other causes")
    if not found.complete:
        session.note(f"only the newest {found.looked_at:,} were counted")
    session.note(f"{found.looked_at:,} of {count(found.total, 'dead letter')} in {topic}")


@dlq.command()
@click.argument("topic")
@click.argument("letter_id", metavar="PARTITION:MS-SEQ")
@click.option(
    "--mask", is_flag=True, help="Hide what users wrote: payload, key, headers, texts of errors."
)
@json_option
@pass_session
def show(session: Session, topic: str, letter_id: str, mask: bool, as_json: bool) -> None:
    """Show everything that is known of one letter."""
    with session.link() as link:
        letter = dead_letters.show(link, session.keys, topic, letter_id)
        now = server_unix_ms(link)
    if mask:
        letter = dead_letters.masked(letter)
    if as_json:
        emit(letter)
    else:
        print_letter(letter, now)


@dlq.command("audit")
@click.argument("topic")
@LIMIT
@CURSOR
@json_option
@pass_session
def audit_(session: Session, topic: str, limit: int, cursor: str, as_json: bool) -> None:
    """Show who did what to a topic, the latest first.

    Replays, purges and exports of its letters, retries cancelled, groups reset and deleted. The
    trail goes with the topic when that is deleted; who did that is the first entry of a new one.
    """
    with session.link() as link:
        seen = audit.trail(link, session.keys, topic, limit=limit, cursor=cursor)
        if not seen.deeds and not cursor:
            topics.partition_count(link, session.keys, topic)
        now = server_unix_ms(link)
    if as_json:
        emit(seen)
    elif not seen.deeds:
        click.echo(f"nothing {'more ' if cursor else ''}in the audit trail of {topic}")
    else:
        print_deeds(seen.deeds, now)
        if seen.cursor:
            session.note(f"more: --cursor {seen.cursor}")


dlq.add_command(replay)
dlq.add_command(purge)
dlq.add_command(export)


def _nothing(topic: str, filters: dict[str, Any], no: str = "no") -> str:
    """Say that there is nothing to show: none that the filters take, or none at all."""
    if stated({name: value for name, value in filters.items() if name != "group"}):
        return NO_MATCH
    group = filters["group"]
    return f"{no} dead letters in {topic}" + (f" for {group}" if group else "")
