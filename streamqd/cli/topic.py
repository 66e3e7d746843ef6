"""`streamqd topic`: registering topics, looking at them, changing and deleting them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

import click

from streamqd.admin import directives, topics, topics_deletion, topics_settings
from streamqd.cli.arguments import json_option, retired, yes_option
from streamqd.cli.deeds import remember
from streamqd.cli.growth import grow
from streamqd.cli.output import confirm, count, emit, table, unreadable
from streamqd.cli.renewal import renew
from streamqd.cli.session import Session, pass_session
from streamqd.cli.steering import fleet_of
from streamqd.config import Topic
from streamqd.errors import ConfigError, Refused


@click.group()
def topic() -> None:
    """Create topics, look at them, change and delete them."""


topic.add_command(grow)
topic.add_command(renew)


@topic.command()
@click.argument("name", metavar="TOPIC")
@retired("-p", "--partitions")
@click.option(
    "--partitions",
    type=click.IntRange(1, 4096),
    help="Default: what the configuration says of the topic, else 1.",
)
@json_option
@pass_session
def create(session: Session, name: str, partitions: int | None, as_json: bool) -> None:
    """Register a topic. Its number of partitions can grow, never shrink."""
    wanted = session.settings.topics.get(name, Topic())
    if partitions is not None:
        wanted = dataclasses.replace(wanted, partitions=partitions)
    with session.link() as link:
        done = topics.create(link, session.keys, name, wanted)
    if as_json:
        emit(done)
    else:
        verb = "created with" if done.created else "exists already, with"
        click.echo(f"{name} {verb} {count(done.partitions, 'partition')}")


@topic.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """Show all topics."""
    with session.link() as link:
        rows = topics.listed(link, session.keys)
    if as_json:
        emit(rows)
    elif not rows:
        click.echo("no topics")
    else:
        unreadable([each for row in rows for each in row.unreadable])
        table(
            ("TOPIC", "PARTITIONS", "MESSAGES", "SCHEDULED", "DEAD", "GROUPS"),
            [
                (
                    row.topic,
                    row.partitions,
                    row.messages,
                    row.scheduled,
                    row.dead,
                    ", ".join(row.groups) or "-",
                )
                for row in rows
            ],
        )


@topic.command()
@click.argument("name", metavar="TOPIC")
@json_option
@pass_session
def describe(session: Session, name: str, as_json: bool) -> None:
    """Show one topic: settings, partitions, and how far its groups are behind.

    LAG counts unread messages of each group, in the order of the line `groups`; `+` behind a number
    means at least so many. Settings are those that this configuration leads to.
    """
    configured = session.settings.topics.get(name)
    with session.link() as link:
        detail = topics.describe(link, session.keys, name, configured)
    if as_json:
        emit(detail)
        return
    unreadable(detail.unreadable)
    click.echo(f"topic {name}: {count(len(detail.partitions), 'partition')}")
    if detail.created_unix_ms:
        moment = dt.datetime.fromtimestamp(detail.created_unix_ms / 1000).astimezone()
        click.echo(f"created {moment:%Y-%m-%d %H:%M:%S %z}")
    _print_settings(detail.settings, detail.configured, detail.effective)
    if detail.growing_to:
        click.echo(f"growing to {detail.growing_to} partitions: see `streamqd topic grow`")
    click.echo(f"groups: {', '.join(detail.groups) or 'none'}")
    if detail.totals.scheduled:
        click.echo(f"scheduled: {count(detail.totals.scheduled, 'message')}")
    click.echo()
    totals = detail.totals
    table(
        ("PARTITION", "MESSAGES", "SIZE", "DEAD", "LAG", "FIRST", "LAST"),
        [
            *(
                (
                    str(row.partition),
                    row.messages,
                    _size(row.bytes),
                    row.dead,
                    _lags(row.groups),
                    row.first_id or "-",
                    row.last_id or "-",
                )
                for row in detail.partitions
            ),
            (
                "total",
                totals.messages,
                _size(totals.bytes),
                totals.dead,
                _lags(totals.groups),
                "",
                "",
            ),
        ],
    )


def _print_settings(
    registered: dict[str, Any], configured: dict[str, Any], effective: dict[str, Any]
) -> None:
    """The settings that are not the defaults, and what the file says otherwise than Redis."""
    defaults = {*topics_settings.lines(topics_settings.plain(Topic()))}
    in_file = dict(line.split(" = ", 1) for line in topics_settings.lines(configured))
    in_redis = dict(line.split(" = ", 1) for line in topics_settings.lines(registered))
    for line in topics_settings.lines(effective):
        name, _, value = line.partition(" = ")
        other = in_redis.get(name)
        differs = name in in_file and other not in (None, value)
        if line in defaults and not differs and name != "archive":
            continue
        click.echo(
            f"{line}" + (f"  (by this configuration; registered: {other})" if differs else "")
        )


def _lags(groups: list[topics.GroupLag]) -> str:
    return ", ".join(f"{each.lag:,}{'' if each.lag_exact else '+'}" for each in groups) or "-"


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} B"


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.argument("assignments", metavar="[NAME=VALUE]...", nargs=-1)
@json_option
@pass_session
def settings(session: Session, name: str, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show the settings of a topic, or change those that are registered.

    As in `streamqd topic settings access retention.max_age=24h archive=required`; the value none
    takes a limit away. Registered settings hold for every daemon whose own configuration says
    nothing else of the same setting.
    """
    configured = session.settings.topics.get(name)
    with session.link() as link:
        topics.partition_count(link, session.keys, name)
        if not assignments:
            seen = topics_settings.show(link, session.keys, name, configured)
        else:
            try:
                seen = topics_settings.change(link, session.keys, name, assignments, configured)
            except ConfigError as error:
                raise click.UsageError("; ".join(error.problems)) from None
    if as_json:
        emit(seen)
        return
    unreadable(seen.unreadable)
    stated = dict(line.split(" = ", 1) for line in topics_settings.lines(seen.configured))
    stored = dict(line.split(" = ", 1) for line in topics_settings.lines(seen.registered))
    table(
        ("SETTING", "EFFECTIVE", "REGISTERED", "CONFIGURED"),
        [
            (setting, value, stored.get(setting), stated.get(setting))
            for setting, _, value in (
                line.partition(" = ") for line in topics_settings.lines(seen.effective)
            )
        ],
    )
    if assignments:
        session.note("changed; daemons look every 30 s" if seen.changed else "nothing changed")


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.option("--force", is_flag=True, help="Also while its partitions are owned.")
@click.option(
    "--while-offered", is_flag=True,
    help="Also while live instances offer it, which create it again at once, empty.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@yes_option
@json_option
@pass_session
def delete(
    session: Session,
    name: str,
    force: bool,
    while_offered: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete a topic with its messages, groups, retries and dead letters, for good.

    Refused while an instance owns a partition of it, or lives that has a consumer for it: that
    would create the topic again, empty, as a producer does that goes on (with `create=False` it
    fails). Interrupted, it is finished by the same command. What stays is one entry in the audit
    trail that says who did it: `streamqd dlq audit TOPIC`.
    """
    with session.link() as link:
        doomed = topics_deletion.look(link, session.keys, name)
        if doomed.owned and not force and not dry_run:
            raise Refused(
                f"{doomed.owned[0]}: the topic is being consumed. Stop its consumers first, or say"
                " --force"
            )
        offering = directives.offering(fleet_of(session, link), name)
        if dry_run:
            if as_json:
                emit(doomed)
            else:
                click.echo(f"would delete {_doomed(doomed)}")
                for line in (*doomed.owned, *(f"offered by {each}" for each in offering)):
                    click.echo(f"in use: {line}")
            return
        if offering and not while_offered:
            raise Refused(
                f"{', '.join(offering)} would create the topic again, empty: stop what has a"
                " consumer for it, or take the consumer out and reload; or say --while-offered"
            )
        confirm(f"Delete {_doomed(doomed)}?", yes)
        done = topics_deletion.delete(link, session.keys, name, force=force)
        # The trail was the topic's own, and went with it: this begins a new one.
        remember(
            session, link, name, "topic delete",
            {"groups": doomed.groups, "partitions": done.partitions, "force": force},
            {"messages": doomed.messages, "dead": doomed.dead, "keys": done.keys},
        )  # fmt: skip
    if as_json:
        emit(done)
    else:
        click.echo(f"{name} deleted: {count(done.partitions, 'partition')}, {done.keys:,} keys")


def _doomed(found: topics_deletion.Doomed) -> str:
    groups = f" and the groups {', '.join(found.groups)}" if found.groups else ""
    begun = ", of which a part is gone already," if found.begun else ""
    return (
        f"{found.topic} with {count(found.partitions, 'partition')}{begun},"
        f" {count(found.messages, 'message')}, {count(found.dead, 'dead letter')}{groups}"
    )
