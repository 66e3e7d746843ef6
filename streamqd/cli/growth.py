"""`streamqd topic grow`: more partitions, while producers write and groups read."""

from __future__ import annotations

import time

import click

from streamqd.admin import directives, growth
from streamqd.cli.arguments import json_option, yes_option
from streamqd.cli.output import confirm, count, emit
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import EXIT_WAITING, fleet_of
from streamqd.errors import Refused
from streamqd.store.client import Connection

POLL_SECONDS = 1.0


@click.command()
@click.argument("name", metavar="TOPIC")
@click.argument("partitions", metavar="N", type=click.IntRange(1, growth.PARTITIONS_MAX))
@click.option(
    "--wait/--no-wait", default=True, show_default=True,
    help="Stay until every group reads the new partitions.",
)  # fmt: skip
@yes_option
@json_option
@pass_session
def grow(session: Session, name: str, partitions: int, wait: bool, yes: bool, as_json: bool) -> int:
    """Give a topic N partitions, a multiple of what it has, and keep the order of each key.

    Producers use the new ones at once. A group reads them when it has settled what was in the old
    ones, however long it takes; until then `topic-grow` owns them. Interrupted, the same command
    goes on with it, and ended it changes nothing. Daemons are told to reload. Write the new number
    into their configuration before.
    """
    with session.link() as link:
        under_way = growth.look(link, session.keys, name)
        if under_way is None:
            growth.check(link, session.keys, name, partitions)
        _refuse_smaller_file(session, name, partitions)
        if under_way is None:
            confirm(
                f"Grow {name} to {count(partitions, 'partition')}? It cannot shrink again.", yes
            )
        tell = _Daemons(session, link, f"{name} grows to {partitions} partitions").tell
        done = growth.grow(link, session.keys, name, partitions, tell=tell)
        try:
            while wait and not done.done:
                _tell(session, done)
                time.sleep(POLL_SECONDS)
                done = growth.grow(link, session.keys, name, partitions, tell=tell)
        except KeyboardInterrupt:
            session.note("left; the same command goes on with it")
            raise
    if as_json:
        emit(done)
    elif done.done:
        click.echo(f"{name} has {count(partitions, 'partition')}")
    else:
        _tell(session, done)
        session.note("the same command goes on with it")
    return 0 if done.done else EXIT_WAITING


def _refuse_smaller_file(session: Session, name: str, partitions: int) -> None:
    stated = session.settings.topics.get(name)
    if stated and "partitions" in stated.stated and stated.partitions < partitions:
        raise Refused(
            f"{session.settings.source} says partitions = {stated.partitions} of {name}: write"
            f" {partitions} there, and in the configuration of every daemon that reads it, else"
            " they will not start any more"
        )


class _Daemons:
    """Tells the daemons of a fleet what they should look at."""

    def __init__(self, session: Session, link: Connection, why: str) -> None:
        self._session = session
        self._fleet = fleet_of(session, link)
        self._why = why
        self._told = False

    def tell(self, what: str) -> None:
        """Order one reload, which makes them read the new count; ring when partitions are free."""
        fleet = self._fleet
        if what == growth.RELEASED:
            fleet.link.execute("PUBLISH", fleet.keys.wake(fleet.name), growth.OWNER)
        elif not self._told:
            self._told = True
            try:
                directives.reload(fleet, None, self._why)
            except Refused as refusal:
                self._session.note(f"no daemon was told to reload: {refusal}")


def _tell(session: Session, done: growth.Progress) -> None:
    behind = [
        f"{row.group} has {row.left:,}{'' if row.left_exact else ' or more'} to settle"
        for row in done.groups
        if not row.done
    ]
    session.note(f"{done.topic}: {', '.join(behind)}")
