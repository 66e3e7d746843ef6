"""`streamqd reload`: let instances read configuration and code again."""

from __future__ import annotations

import dataclasses

import click

from streamqd.admin import directives
from streamqd.cli.arguments import json_option
from streamqd.cli.output import emit, printable
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import (
    EXIT_WAITING,
    dry_run_option,
    fleet_of,
    reason_option,
    wait_options,
    wait_until_obeyed,
)


@click.command(short_help="Reload one instance, or all in turn.")
@click.argument("instance", required=False)
@reason_option
@wait_options
@dry_run_option
@json_option
@pass_session
def reload(
    session: Session,
    instance: str | None,
    reason: str,
    wait: bool,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Let an instance read its configuration and code again, as SIGHUP does; or all, in turn.

    Each replaces its workers one by one, after the message that runs. An instance that finds a
    mistake changes nothing. With --wait the exit code is 1 when one has found a mistake.
    """
    with session.link() as link:
        fleet = fleet_of(session, link)
        sight = directives.look(fleet)
        who = [instance] if instance else sorted(sight.live)
        silent = [] if instance else sorted(sight.silent)
        done = directives.reload(fleet, instance, reason, dry_run=dry_run)
        at = done.at_unix_ms or 0
        if wait and not dry_run:
            left = wait_until_obeyed(lambda: directives.not_reloaded(fleet, who, at), timeout)
            refused = directives.reload_problems(fleet, who)
            left += [f"{name} refused: {problem}" for name, problem in refused.items()]
            done = dataclasses.replace(done, waiting=left)
    if as_json:
        emit(done)
    else:
        verb = "would reload" if dry_run else "has reloaded" if wait else "shall reload"
        names = ", ".join(who)
        if not done.waiting:
            click.echo(printable(f"{verb}: {names}"))
        for each in silent:
            told = f"{each} is silent: if it lives, it reloads when it is back"
            click.echo(printable(told), err=True)
        for each in done.waiting:
            click.echo(printable(f"not yet: {each}"), err=True)
    return EXIT_WAITING if done.waiting else 0
