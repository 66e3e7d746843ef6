"""`streamqd group adopt`: take over a group that other clients have read until now."""

from __future__ import annotations

import click

from streamqd.admin import adoption
from streamqd.cli.arguments import json_option, yes_option
from streamqd.cli.output import age, confirm, count, emit, table
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import dry_run_option


@click.command(short_help="Take over what other clients have pending.")
@click.argument("topic")
@click.argument("group")
@dry_run_option
@yes_option
@json_option
@pass_session
def adopt(
    session: Session, topic: str, group: str, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Take over everything that other clients of a group have read and not acknowledged.

    Stop those clients first: what they are handling would be handled twice. Refused while streamqd
    owns a partition of the group. The first owner handles what was taken before anything else.
    """
    with session.link() as link:
        done = adoption.survey(link, session.keys, topic, group)
        if not dry_run and done.entries:
            confirm(f"Take over {count(done.entries, 'message')} of {topic}/{group}?", yes)
        if not dry_run:
            done = adoption.adopt(link, session.keys, topic, group)
    if as_json:
        emit(done)
        return
    if done.consumers:
        table(
            ("PARTITION", "CONSUMER", "PENDING", "IDLE"),
            [
                (str(row.partition), row.consumer, row.pending, age(row.idle_ms))
                for row in done.consumers
            ],
        )
    said = "would be taken over" if dry_run else "taken over"
    click.echo(f"{count(done.entries, 'message')} {said}")
