"""`streamqd status`: the fleet at a glance."""

from __future__ import annotations

import click

from streamqd.admin import fleet
from streamqd.cli.arguments import json_option
from streamqd.cli.output import age, count, emit, table
from streamqd.cli.session import Session, pass_session


@click.command()
@json_option
@pass_session
def status(session: Session, as_json: bool) -> None:
    """Show the instances, what they own and what is wrong.

    BEAT is the age of an instance's last sign of life. There is a row for each partition and group;
    MSG/S is an average of about the last 10 seconds, LAG and the others are as in `partitions`.
    """
    with session.link() as link:
        daemon = session.settings.daemon
        seen = fleet.status(link, session.keys, daemon.fleet, stale=daemon.lease_ttl)
    if as_json:
        emit(seen)
        return
    owned = sum(each.state == "owned" for each in seen.units)
    units = f"{owned} of {count(len(seen.units), 'partition')} owned" if seen.units else "no groups"
    click.echo(f"fleet {seen.fleet}: {count(len(seen.instances), 'instance')}, {units}")
    for problem in seen.problems:
        click.echo(f"  ! {problem}")
    if seen.instances:
        click.echo()
        table(
            ("INSTANCE", "STATE", "OWNED", "MSG/S", "BEAT", "UP", "PID", "HOST"),
            [
                (
                    each.instance,
                    each.state,
                    each.owned,
                    each.rate,
                    age(seen.now_unix_ms - each.beat_unix_ms),
                    _since(seen.now_unix_ms, each.started_unix_ms),
                    None if each.pid is None else str(each.pid),
                    each.host,
                )
                for each in seen.instances
            ],
        )
    if seen.units:
        click.echo()
        table(
            ("PARTITION", "OWNER", "WORKER", "MSG/S", "LAG", "PENDING", "DELAYED", "OLDEST"),
            [
                (
                    f"{each.topic}/{each.partition}/{each.group}",
                    each.owner or "-",
                    each.worker or each.state,
                    each.rate,
                    each.lag,
                    each.pending,
                    each.delayed,
                    _since(seen.now_unix_ms, each.oldest_unix_ms),
                )
                for each in seen.units
            ],
        )


def _since(now_unix_ms: int, then_unix_ms: int | None) -> str | None:
    return None if then_unix_ms is None else age(now_unix_ms - then_unix_ms)
