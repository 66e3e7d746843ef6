"""`streamqd tail`: watching messages pass by."""

from __future__ import annotations

from collections.abc import Iterable

import click

from streamqd.admin import tail as admin
from streamqd.cli.arguments import json_option
from streamqd.cli.output import json_text, printable
from streamqd.cli.session import Session, pass_session


@click.command()
@click.argument("topic")
@click.option(
    "-n", "--lines", type=click.IntRange(0, 10_000), default=10, show_default=True,
    help="Show so many of the last messages.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Then show new ones, until interrupted.")
@click.option("-p", "--partition", type=click.IntRange(0), help="Only this partition.")
@json_option
@pass_session
def tail(
    session: Session, topic: str, lines: int, follow: bool, partition: int | None, as_json: bool
) -> None:
    """Show the last messages of a topic, of all partitions together.

    Nothing is taken from anybody: no group is involved. A line is PARTITION:ID, the key and the
    payload; with --json each line is an object.
    """
    with session.link() as link:
        watched = admin.Tail(link, session.keys, topic, partition)
        shown = watched.last(lines)
        _print(shown, as_json)
        if not follow:
            if not shown and lines and not as_json:
                session.note(f"no messages in {topic}")
            return
        for seen in watched.follow():
            _print(seen, as_json)


def _print(messages: Iterable[admin.Seen], as_json: bool) -> None:
    for each in messages:
        if as_json:
            click.echo(json_text(each))
        else:
            key = "-" if each.key is None else printable(each.key) or '""'
            click.echo(f"{each.partition}:{each.id}  {key}  {printable(each.payload)}")
