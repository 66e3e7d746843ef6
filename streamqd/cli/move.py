"""`streamqd move`: a partition belongs on an instance."""

from __future__ import annotations

import click

from streamqd.admin import directives
from streamqd.cli.arguments import json_option
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import (
    dry_run_option,
    finish,
    fleet_of,
    read_unit,
    reason_option,
    wait_options,
)


@click.command(short_help="Move a partition to an instance.")
@click.argument("name", metavar="TOPIC/PARTITION/GROUP")
@click.argument("instance", required=False)
@click.option("--to", metavar="INSTANCE", help="The same as the second argument.")
@reason_option
@wait_options
@dry_run_option
@json_option
@pass_session
def move(
    session: Session,
    name: str,
    instance: str | None,
    to: str | None,
    reason: str,
    wait: bool,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Move a partition to an instance, and keep it there.

    \b
      streamqd move orders/3/bill web-2 --wait

    The owner finishes the message that runs and hands over. The partition stays with the instance
    until it is moved again or `rebalance` forgets it; while the instance cannot have it, it is
    placed like any other.
    """
    unit = read_unit(name)
    if instance is not None and to is not None:
        raise click.UsageError("name the instance once, behind the partition or with --to")
    owner = instance if instance is not None else to
    if owner is None:
        raise click.UsageError(f"name the instance that is to own {unit}")
    with session.link() as link:
        fleet = fleet_of(session, link)
        done = directives.move(fleet, unit, owner, reason, dry_run=dry_run)
        return finish(
            done,
            f"{unit} belongs on {owner}",
            as_json=as_json,
            wait=wait,
            timeout=timeout,
            look=lambda: directives.not_moved(fleet, unit, owner),
        )
