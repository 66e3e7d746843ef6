"""`streamqd drain`: an instance hands over everything and stays."""

from __future__ import annotations

import click

from streamqd.admin import as_json as document
from streamqd.admin import directives
from streamqd.cli import departure
from streamqd.cli.arguments import json_option
from streamqd.cli.output import emit
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import dry_run_option, finish, fleet_of, reason_option, wait_options


@click.command(short_help="Let an instance own nothing.")
@click.argument("instance")
@click.option("--undo", is_flag=True, help="Let it own partitions again.")
@reason_option
@wait_options
@dry_run_option
@json_option
@pass_session
def drain(
    session: Session,
    instance: str,
    undo: bool,
    reason: str,
    wait: bool,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Let an instance hand over all its partitions and take none, until --undo.

    It finishes the messages that run and stays as a standby, after a restart too. Partitions that
    nobody else offers wait for it. --dry-run says who would take what, and what nobody would: the
    same happens when the instance is stopped.
    """
    with session.link() as link:
        fleet = fleet_of(session, link)
        if undo:
            done = directives.undrain(fleet, instance, dry_run=dry_run)
            said = f"{instance} may own partitions again"
        else:
            done = directives.drain(fleet, instance, reason, dry_run=dry_run)
            if dry_run:
                planned = directives.departure(fleet, instance)
                if as_json:
                    emit(document(done) | {"departure": planned})
                else:
                    departure.show(planned)
                return 0
            said = f"{instance} hands over what it owns"
        return finish(
            done,
            said,
            as_json=as_json,
            wait=wait and not undo,
            timeout=timeout,
            look=lambda: directives.not_drained(fleet, instance),
        )
