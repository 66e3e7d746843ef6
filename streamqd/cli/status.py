"""`streamqd status`: the fleet at a glance."""

from __future__ import annotations

import time

import click

from streamqd.admin import fleet
from streamqd.cli.arguments import json_option
from streamqd.cli.output import age, count, emit, printable, table, unreadable
from streamqd.cli.session import Session, pass_session

STEADY = 0.5  # messages per second by which a lag must change to be said to change


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
    unreadable(seen.unreadable)
    _show_orders(seen)
    owned = sum(each.state == "owned" for each in seen.units)
    units = f"{owned} of {count(len(seen.units), 'partition')} owned" if seen.units else "no groups"
    click.echo(f"fleet {seen.fleet}: {count(len(seen.instances), 'instance')}, {units}")
    for problem in seen.problems:
        click.echo(f"  ! {problem}")
    for group in seen.behind:
        click.echo(f"  {_behind(seen.now_unix_ms, group)}")
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


def _behind(now_unix_ms: int, group: fleet.Behind) -> str:
    """How far behind a group is, since when, and where that goes."""
    lag = "more than 1,000" if group.lag is None else f"{group.lag:,}"
    where = (
        f"partition {group.partitions[0]}"
        if len(group.partitions) == 1
        else f"{len(group.partitions)} partitions"
    )
    said = f"{printable(group.topic)}/{printable(group.group)} is {lag} behind in {where}"
    if group.since_unix_ms is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(group.since_unix_ms / 1000))
        said += f", since {since} ({age(now_unix_ms - group.since_unix_ms)})"
    slope = group.lag_per_second
    if slope is None:
        return f"{said}, trend not known"
    if abs(slope) < STEADY:
        return f"{said}, steady"
    if slope > 0:
        return f"{said}, growing by {slope:,.1f}/s"
    left = "" if group.lag is None else f", caught up in about {age(group.lag / -slope * 1000)}"
    return f"{said}, shrinking by {-slope:,.1f}/s{left}"


def _show_orders(seen: fleet.StatusView) -> None:
    """What operators have ordered comes before all else: it explains what follows."""
    for each in seen.orders:
        said = _ORDERS[each.kind].format(target=printable(each.target), to=printable(each.to))
        reason = f": {printable(each.why)}" if each.why else ""
        gone = " (no such instance lives)" if each.gone else ""
        since = f"{age(seen.now_unix_ms - each.at_unix_ms)} by {printable(each.by)}"
        if each.kind == "pause":
            click.echo(f"PAUSED {said} for {since}{reason}")
        elif each.kind in ("drain", "move"):
            click.echo(f"{said}{gone} for {since}{reason}")
    for name, problem in seen.strange_orders.items():
        click.echo(f"the order {printable(name)} cannot be read: {printable(problem)}")


_ORDERS = {
    "pause": "{target}",
    "drain": "DRAINED {target}",
    "move": "{target} is kept on {to}",
    "reload": "",
    "rebalance": "",
}


def _since(now_unix_ms: int, then_unix_ms: int | None) -> str | None:
    return None if then_unix_ms is None else age(now_unix_ms - then_unix_ms)
