"""`streamqd pending`: what was handed out and is not settled."""

from __future__ import annotations

import click

from streamqd.admin import pending as admin
from streamqd.admin import topics
from streamqd.cli.arguments import json_option, limit_option
from streamqd.cli.output import age, count, emit, table, unreadable
from streamqd.cli.session import Session, pass_session
from streamqd.errors import Refused
from streamqd.store.client import Connection


@click.command(short_help="Show what is handed out and not settled.")
@click.argument("topic")
@click.option("-g", "--group", help="Needed when several groups read the topic.")
@click.option(
    "-s",
    "--sort",
    type=click.Choice(admin.ORDERS),
    default="id",
    show_default=True,
    help="id: the oldest first; idle: the longest first; deliveries: the most first.",
)
@limit_option(50)
@click.option("--cursor", default="", help="Go on behind the page that printed this cursor.")
@json_option
@pass_session
def pending(
    session: Session,
    topic: str,
    group: str | None,
    sort: str,
    limit: int,
    cursor: str,
    as_json: bool,
) -> None:
    """Show the messages of a group that are handed out and not settled.

    All partitions are merged. Pages sorted by id fit together exactly; the other orders are a
    ranking of the moment.
    """
    with session.link() as link:
        group = group or _only_group(session, link, topic)
        seen = admin.view(link, session.keys, topic, group, order=sort, limit=limit, cursor=cursor)
    if as_json:
        emit(seen)
        return
    unreadable(seen.unreadable)
    if not seen.rows:
        none = "no more pending messages" if cursor else "no pending messages"
        click.echo(f"{none} in {topic} for {group}")
        return
    table(
        ("PARTITION", "PLACE", "IDLE", "DELIVERIES", "CRASHES", "CONSUMER"),
        [
            (
                str(row.partition),
                row.place,
                None if row.idle_ms is None else age(row.idle_ms),
                row.deliveries,
                row.crashes,
                row.consumer or "(unowned)",
            )
            for row in seen.rows
        ],
    )
    session.note(f"{count(seen.total, 'pending message')} in {topic} for {group}")
    if not seen.complete:
        session.note(f"only the first {admin.SCAN_MAX:,} of each were ranked")
    if seen.cursor:
        session.note(f"more: --cursor {seen.cursor}")


def _only_group(session: Session, link: Connection, topic: str) -> str:
    found = topics.groups(
        link, session.keys, topic, range(topics.partition_count(link, session.keys, topic))
    )
    if not found:
        raise Refused(f"no group reads the topic {topic}")
    if len(found) > 1:
        raise Refused(f"several groups read {topic}; say --group with one of {', '.join(found)}")
    return found[0]
