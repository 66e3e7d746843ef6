"""`streamqd control`: the orders that are written down for the fleet."""

from __future__ import annotations

import click

from streamqd.admin import directives
from streamqd.cli.arguments import json_option, yes_option
from streamqd.cli.output import age, confirm, count, emit, printable, table, unreadable
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import dry_run_option, fleet_of


@click.group()
def control() -> None:
    """See and clear the orders to the fleet: pauses, stops, moves, drains."""


@control.command("list")
@click.option("--all", "everything", is_flag=True, help="Also those that all have obeyed.")
@json_option
@pass_session
def list_(session: Session, everything: bool, as_json: bool) -> None:
    """Show the orders that hold.

    A `gone` one names an instance that does not live. A reload or a rebalance that every live
    instance has obeyed is over: only --all shows it, as `done`.

    \b
    Example:
      streamqd control list --all
    """
    with session.link() as link:
        seen = directives.view(fleet_of(session, link))
    if as_json:
        emit(seen)
        return
    unreadable(seen.unreadable)
    shown = [row for row in seen.orders if everything or not row.done]
    if not shown and not seen.strange:
        over = "no order holds; --all shows those that are done"
        click.echo(over if seen.orders else "no orders")
    if shown:
        table(
            ("ORDER", "TO", "AGE", "BY", "", "REASON"),
            [
                (
                    row.name,
                    row.to or "-",
                    age(seen.now_unix_ms - row.at_unix_ms),
                    row.by,
                    "gone" if row.gone else "done" if row.done else "",
                    row.why,
                )
                for row in shown
            ],
        )
    for name, problem in seen.strange.items():
        click.echo(printable(f"! {name} cannot be read: {problem}"))


@control.command()
@click.argument("orders", metavar="ORDER...", nargs=-1)
@click.option("--gone", is_flag=True, help="Those to instances that do not live.")
@dry_run_option
@yes_option
@json_option
@pass_session
def clear(
    session: Session, orders: tuple[str, ...], gone: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Take orders back, by the names that `control list` shows."""
    if not orders and not gone:
        raise click.UsageError("name orders, or say --gone")
    with session.link() as link:
        fleet = fleet_of(session, link)
        chosen = directives.clear(fleet, list(orders), gone=gone, dry_run=True)
        if not dry_run and chosen.orders:
            confirm(f"Take back {', '.join(chosen.orders)}?", yes)
            chosen = directives.clear(fleet, chosen.orders)
    if as_json:
        emit(chosen)
        return
    said = "would be taken back" if dry_run else "taken back"
    click.echo(f"{count(len(chosen.orders), 'order')} {said}")
    for name in chosen.orders:
        click.echo(f"  {printable(name)}")
