"""`streamqd tail`: watching messages pass by."""

from __future__ import annotations

from collections.abc import Iterable

import click

from streamqd.admin import tail as admin
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import Moment, json_option, unix_ms
from streamqd.cli.output import json_text, printable
from streamqd.cli.session import Session, pass_session


@click.command(short_help="Show the last messages of a topic.")
@click.argument("topic")
@click.option(
    "-n", "--limit", "--lines", "limit", type=click.IntRange(0, 10_000),
    help="Show so many of the last messages. Default: 10, or with --since all.",
)  # fmt: skip
@click.option(
    "--since", type=Moment(), metavar="TIME",
    help="Only those written at this time or later: 10m (ago), or 2026-11-21T08:30 (UTC).",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Then show new ones, until interrupted.")
@click.option("-p", "--partition", type=click.IntRange(0), help="Only this partition.")
@json_option
@pass_session
def tail(
    session: Session,
    topic: str,
    limit: int | None,
    since: tuple[float, bool] | None,
    follow: bool,
    partition: int | None,
    as_json: bool,
) -> None:
    """Show the last messages of a topic, of all partitions together.

    \b
      streamqd tail orders --since 10m --follow

    Nothing is taken from anybody: no group is involved. A line is PARTITION:ID, the key and the
    payload; with --json each line is an object.
    """
    with session.link() as link:
        watched = admin.Tail(link, session.keys, topic, partition)
        if since is None:
            shown = _print(watched.last(10 if limit is None else limit), as_json)
        else:
            now = server_unix_ms(link)
            begin = unix_ms(since, now)
            if begin > now:
                raise click.UsageError("nothing can match: --since lies in the future")
            every = watched.since(begin) if limit is None else watched.last(limit, begin)
            shown = _print(every, as_json)
        if not follow:
            if not shown and limit != 0 and not as_json:
                session.note(f"no messages in {topic}" if since is None else "nothing matches")
            return
        for seen in watched.follow():
            _print(seen, as_json)


def _print(messages: Iterable[admin.TailedEntry], as_json: bool) -> int:
    """Print messages, one a line; return how many."""
    number = 0
    for each in messages:
        number += 1
        if as_json:
            click.echo(json_text(each))
        else:
            key = "-" if each.key is None else printable(each.key) or '""'
            click.echo(f"{each.partition}:{each.id}  {key}  {printable(each.payload)}")
    return number
