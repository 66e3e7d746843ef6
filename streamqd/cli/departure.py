"""Printing what happens when an instance goes: what `drain --dry-run` answers."""

from __future__ import annotations

from collections import defaultdict

import click

from streamqd.admin.directives import Departure
from streamqd.cli.output import age, count, printable, styled

ALIKE_MAX = 5  # partitions that are named with the same problem
SHOWN_MAX = 20  # partitions that one instance takes; --json names all
_WHY = {
    "no-offer": "no other instance offers it",
    "broken": "its worker crashes in a loop everywhere else",
    "caps-full": "the others own as many partitions as they may",
}


def show(departure: Departure) -> None:
    """Say it in sentences, what is left behind first."""
    name = printable(departure.instance)
    if not departure.units:
        click.echo(f"{name} owns nothing: nothing happens")
        return
    if departure.last:
        click.echo(f"{name} is the last instance: everything it owns waits until one starts")
    stranded: dict[str, list[str]] = defaultdict(list)
    for unit in departure.stranded:
        place = printable(f"{unit.topic}/{unit.partition}/{unit.group}")
        stranded[unit.stranded].append(place)
    for why, places in stranded.items():
        for place in places[:ALIKE_MAX]:
            click.echo(styled(f"! nobody takes {place}: {_WHY[why]}", "warn"))
        if len(places) > ALIKE_MAX:
            others = f"{len(places) - ALIKE_MAX:,} more"
            click.echo(styled(f"! nobody takes {others}: {_WHY[why]}", "warn"))
    takers: dict[str, list[str]] = defaultdict(list)
    for unit in departure.units:
        if unit.to:
            takers[unit.to].append(printable(f"{unit.topic}/{unit.partition}/{unit.group}"))
    for to, places in sorted(takers.items()):
        more = [f"and {len(places) - SHOWN_MAX:,} more"] if len(places) > SHOWN_MAX else []
        shown = ", ".join(places[:SHOWN_MAX] + more)
        click.echo(f"{printable(to)} takes {count(len(places), 'partition')}: {shown}")
    if departure.longest_run_seconds:
        run = age(departure.longest_run_seconds * 1000)
        click.echo(
            f"the longest running message has been running for {run}, in"
            f" {printable(departure.longest_run)}: a drain waits for it, up to drain_timeout"
        )
    else:
        click.echo("no message was running when it last told")
