"""`streamqd rebalance`: level the fleet now."""

from __future__ import annotations

import dataclasses

import click

from streamqd.admin import directives
from streamqd.cli.arguments import json_option
from streamqd.cli.output import count, emit, table
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import (
    EXIT_WAITING,
    dry_run_option,
    fleet_of,
    reason_option,
    wait_options,
    wait_until_obeyed,
)


@click.command(short_help="Level the fleet now, forgetting moves.")
@reason_option
@wait_options
@dry_run_option
@json_option
@pass_session
def rebalance(
    session: Session, reason: str, wait: bool, timeout: float, dry_run: bool, as_json: bool
) -> int:
    """Level the fleet now: forget all ordered moves, and do not wait for delay and hold time.

    --dry-run shows which partitions would change hands. Still only a few move at once
    (rebalance_moves).
    """
    with session.link() as link:
        fleet = fleet_of(session, link)
        done = directives.rebalance(fleet, reason, dry_run=dry_run)
        if wait and not dry_run:
            left = wait_until_obeyed(lambda: directives.not_levelled(fleet), timeout)
            done = dataclasses.replace(done, waiting=left)
    code = EXIT_WAITING if done.waiting else 0
    if as_json:
        emit(done)
        return code
    if done.forgotten:
        verb = "would be forgotten" if dry_run else "forgotten"
        click.echo(f"{count(len(done.forgotten), 'ordered move')} {verb}")
    if done.moves:
        table(
            ("PARTITION", "FROM", "TO"),
            [
                (f"{each.topic}/{each.partition}/{each.group}", each.owner or "-", each.to or "-")
                for each in done.moves
            ],
        )
    else:
        click.echo("nothing has to move")
    for sentence in done.waiting:
        click.echo(f"not yet: {sentence}", err=True)
    return code
