"""`streamqd pause` and `streamqd resume`: stop fetching somewhere, and go on."""

from __future__ import annotations

import click

from streamqd.admin import directives
from streamqd.cli.arguments import Command, json_option
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import (
    dry_run_option,
    finish,
    fleet_of,
    read_scope,
    reason_option,
    wait_options,
)


def _scope_arguments(command: Command) -> Command:
    for decorate in (
        click.option("--all", "everything", is_flag=True, help="Everything in the fleet."),
        click.option("-p", "--partition", type=click.IntRange(0), help="Only this partition."),
        click.option("-g", "--group", help="Only this group."),
        click.argument("name", metavar="[TOPIC[/GROUP] | TOPIC/PARTITION/GROUP]", required=False),
    ):
        command = decorate(command)
    return command


@click.command(short_help="Stop fetching of a topic, group or partition.")
@_scope_arguments
@reason_option
@wait_options
@dry_run_option
@json_option
@pass_session
def pause(
    session: Session,
    name: str | None,
    group: str | None,
    partition: int | None,
    everything: bool,
    reason: str,
    wait: bool,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Fetch nothing more of a topic, a group or a partition, until it is resumed.

    What runs is finished; the partitions stay owned. The pause is kept in Redis: it survives
    restarts and holds for instances that start later. `status` shows it first.
    """
    scope = read_scope(name, group, partition, everything=everything)
    with session.link() as link:
        fleet = fleet_of(session, link)
        done = directives.pause(fleet, scope, reason, dry_run=dry_run)
        at = done.at_unix_ms or 0
        return finish(
            done,
            f"{scope} is paused",
            as_json=as_json,
            wait=wait,
            timeout=timeout,
            look=lambda: directives.not_paused(fleet, scope, at),
        )


@click.command(short_help="End a pause.")
@_scope_arguments
@wait_options
@dry_run_option
@json_option
@pass_session
def resume(
    session: Session,
    name: str | None,
    group: str | None,
    partition: int | None,
    everything: bool,
    wait: bool,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """End the pause of what is named, and of all its parts.

    A part of something that is paused as a whole cannot be resumed alone.
    """
    scope = read_scope(name, group, partition, everything=everything)
    with session.link() as link:
        fleet = fleet_of(session, link)
        done = directives.resume(fleet, scope, dry_run=dry_run)
        at = done.at_unix_ms or 0
        return finish(
            done,
            f"{scope} is resumed",
            as_json=as_json,
            wait=wait,
            timeout=timeout,
            look=lambda: directives.not_resumed(fleet, scope, at),
        )
