"""`streamqd partitions`: who owns what, and what lies before them."""

from __future__ import annotations

import click

from streamqd.admin import partitions as admin
from streamqd.cli.arguments import json_option
from streamqd.cli.output import age, emit, table, unreadable
from streamqd.cli.session import Session, pass_session


@click.command(short_help="Show who owns what, lag and pending.")
@click.argument("topic", required=False)
@click.option("-g", "--group", help="Only this group.")
@click.option("-p", "--partition", type=click.IntRange(min=0), help="Only this partition.")
@json_option
@pass_session
def partitions(
    session: Session, topic: str | None, group: str | None, partition: int | None, as_json: bool
) -> None:
    """Show owner, epoch, lag and pending of every partition and group.

    LAG counts unread messages, PENDING those handed out and not acknowledged, DELAYED those that
    wait for their next attempt. OLDEST is the age of the oldest that is unread or pending.
    """
    if partition is not None and topic is None:
        raise click.UsageError("--partition needs the topic before it")
    with session.link() as link:
        seen = admin.view(link, session.keys, topic, group, partition)
    if as_json:
        emit(seen)
        return
    unreadable(seen.unreadable)
    if seen.units:
        table(
            ("PARTITION", "OWNER", "EPOCH", "SINCE", "LAG", "PENDING", "DELAYED", "OLDEST"),
            [_cells(seen.now_unix_ms, row) for row in seen.units],
        )
    for name in seen.idle_topics:
        click.echo(f"no group reads {name}")
    if not seen.units and not seen.idle_topics:
        click.echo("no topics")


def _cells(now: int, row: admin.UnitRow) -> tuple[object, ...]:
    owner = row.owner or "-"
    return (
        f"{row.topic}/{row.partition}/{row.group}",
        f"{owner} (expired)" if row.state == "expired" else owner,
        str(row.epoch) if row.epoch else None,
        None if row.since_unix_ms is None else age(now - row.since_unix_ms),
        row.lag,
        row.pending,
        row.delayed,
        None if row.oldest_unix_ms is None else age(now - row.oldest_unix_ms),
    )
