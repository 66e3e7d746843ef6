"""`streamqd why`: why a partition does not move."""

from __future__ import annotations

import click

from streamqd.admin import why as admin
from streamqd.cli.arguments import json_option
from streamqd.cli.output import emit, printable, unreadable
from streamqd.cli.session import Session, pass_session

EXIT_HELD = 1


@click.command(short_help="Say why a partition does not move.")
@click.argument("place", metavar="TOPIC/PARTITION[/GROUP]")
@json_option
@pass_session
def why(session: Session, place: str, as_json: bool) -> int | None:
    """Say why TOPIC/PARTITION does not move, and what to do about it.

    One sentence for each group, or for GROUP alone; what else was found stands below it. Exit code
    0: it moves, or nothing waits; 1: something holds it.
    """
    topic, partition, group = _place(place)
    daemon = session.settings.daemon
    with session.link() as link:
        answers = admin.answer(
            link, session.keys, daemon.fleet, topic, partition, group, stale=daemon.lease_ttl
        )
    if as_json:
        emit(answers)
    else:
        unreadable(answers[0].unreadable)
        for each in answers:
            first, *others = each.causes
            click.echo(printable(f"{first.sentence}."))
            if first.advice:
                click.echo(printable(f"  -> {first.advice}"))
            for other in others:
                click.echo(printable(f"  also: {other.sentence}"))
    return None if all(each.moves for each in answers) else EXIT_HELD


def _place(text: str) -> tuple[str, int, str | None]:
    topic, _, rest = text.partition("/")
    number, slash, group = rest.partition("/")
    right = number.isascii() and number.isdigit() and len(number) < 10
    if not topic or not right or bool(slash) != bool(group) or "/" in group:
        raise click.UsageError(f"{text}: write TOPIC/PARTITION, such as access/3, or access/3/hits")
    return topic, int(number), group or None
