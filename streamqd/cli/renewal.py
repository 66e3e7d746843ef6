"""`streamqd topic renew`: a fresh stream for a partition whose last id leaves no room."""

from __future__ import annotations

import click

from streamqd.admin import renewal
from streamqd.cli.arguments import json_option, yes_option
from streamqd.cli.deeds import remember
from streamqd.cli.output import confirm, count, emit
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import fleet_of


@click.command()
@click.argument("name", metavar="TOPIC")
@click.option("-p", "--partition", type=click.IntRange(0), required=True, help="Which one.")
@click.option("--force", is_flag=True, help="Take the partition away from its owners.")
@yes_option
@json_option
@pass_session
def renew(
    session: Session, name: str, partition: int, force: bool, yes: bool, as_json: bool
) -> None:
    """Move a partition to a fresh stream, because its last id leaves no room for more.

    A client that writes an id of its own choice can use up all ids, or most of them: `doctor` names
    such a partition. Messages keep their order and their ids, but for ids that are a day and more
    ahead of the clock. Groups keep their position and what is handed out. Refused while a partition
    is owned; with --force its owners lose it, and what their workers still do is not recorded.
    Interrupted, the same command goes on with it.
    """
    with session.link() as link:
        renewal.check(link, session.keys, name, partition, force=force)
        confirm(f"Move partition {partition} of {name} to a fresh stream?", yes)
        done = renewal.renew(link, session.keys, name, partition, force=force)
        what = {"partition": partition, "force": force, "last_id": done.last_id}
        counts = {"messages": done.messages, "pending": done.pending, "lost": done.lost}
        remember(session, link, name, "topic renew", what, counts)
        # Whoever hears it takes the partition at once, others with their next look.
        link.pipeline([("PUBLISH", session.keys.wake(fleet_of(session, link).name), "renew")])
    if as_json:
        emit(done)
        return
    lost = f", {count(done.lost, 'pending message')} had been trimmed" if done.lost else ""
    click.echo(
        f"partition {partition} of {name} renewed: {count(done.messages, 'message')},"
        f" {done.pending:,} pending, last id {done.last_id}{lost}"
    )
