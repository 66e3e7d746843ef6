"""`streamqd topic`: create, show, change, grow and delete topics."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Iterable
from typing import Any

import click

from streamqd.admin import directives, growth, topics, topics_deletion, topics_settings
from streamqd.cli.arguments import retired, yes_option
from streamqd.cli.command import EXIT_WAITING, CommandResult, answering
from streamqd.cli.output import at_least, confirm, listing, print_unreadable, table
from streamqd.cli.session import Session
from streamqd.config import Topic
from streamqd.errors import ConfigError, RequestRefusedError
from streamqd.words import count, memory

POLL_SECONDS = 1.0


@click.group()
def topic() -> None:
    """Create, show, change, grow and delete topics."""


@topic.command()
@click.argument("name", metavar="TOPIC")
@retired("-p", "--partitions")
@click.option(
    "--partitions",
    type=click.IntRange(1, 4096),
    help="The number of partitions. Default: the number configured for the topic, or 1.",
)
@answering
def create(session: Session, *, name: str, partitions: int | None) -> CommandResult:
    """Create a topic.

    The number of partitions can grow later, but it can never shrink.
    """
    wanted = session.settings.topics.get(name, Topic())
    if partitions is not None:
        wanted = dataclasses.replace(wanted, partitions=partitions)
    done = topics.create(session.store, name, wanted)
    verb = "created with" if done.created else "exists already, with"
    return CommandResult(done, f"{name} {verb} {count(done.partitions, 'partition')}")


@topic.command("list")
@answering
def list_(session: Session) -> CommandResult:
    """Show all topics."""
    rows = topics.list_topics(session.store)
    return CommandResult({"rows": rows}, (lambda: _show_topics(rows)) if rows else "no topics")


def _show_topics(rows: list[topics.TopicRow]) -> None:
    print_unreadable([each for row in rows for each in row.unreadable])
    listing(
        "TOPIC PARTITIONS MESSAGES DELAYED DLQ GROUPS",
        rows,
        delayed=lambda row: row.delayed_sends,
        dlq=lambda row: row.dead_letters,
        groups=lambda row: ", ".join(row.groups) or "-",
    )


@topic.command()
@click.argument("name", metavar="TOPIC")
@answering
def describe(session: Session, *, name: str) -> CommandResult:
    """Show the settings, partitions and group lag of a topic.

    LAG is the number of unread messages of each group, in the order of the `groups` line. A `+`
    after a number means at least that many. The settings are those that are in effect for a daemon
    with this configuration.
    """
    configured = session.settings.topics.get(name)
    detail = topics.describe(session.store, name, configured)
    return CommandResult(detail, lambda: _show_topic(detail))


def _show_topic(detail: topics.TopicDetail) -> None:
    print_unreadable(detail.unreadable)
    click.echo(f"topic {detail.topic}: {count(len(detail.partitions), 'partition')}")
    if detail.created_unix_ms:
        moment = dt.datetime.fromtimestamp(detail.created_unix_ms / 1000).astimezone()
        click.echo(f"created {moment:%Y-%m-%d %H:%M:%S %z}")
    _print_settings(detail.settings, detail.configured, detail.effective)
    if detail.growing_to:
        click.echo(f"growing to {detail.growing_to} partitions: see `streamqd topic grow`")
    click.echo(f"groups: {', '.join(detail.groups) or 'none'}")
    totals = detail.totals
    if totals.delayed_sends:
        click.echo(f"delayed sends: {count(totals.delayed_sends, 'message')}")
    click.echo()
    table(
        ("PARTITION", "MESSAGES", "SIZE", "DLQ", "LAG", "FIRST", "LAST"),
        [
            *(
                (
                    *(str(row.partition), row.messages, memory(row.bytes), row.dead_letters),
                    *(_lags(row.groups), row.first_id or "-", row.last_id or "-"),
                )
                for row in detail.partitions
            ),
            (
                *("total", totals.messages, memory(totals.bytes), totals.dead_letters),
                *(_lags(totals.groups), "", ""),
            ),
        ],
    )


def _print_settings(
    registered: dict[str, Any], configured: dict[str, Any], effective: dict[str, Any]
) -> None:
    """Print settings that are not defaults or that differ between the file and Redis."""
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
            f"{line}" + (f"  (from this configuration; registered: {other})" if differs else "")
        )


def _lags(groups: list[topics.GroupLag]) -> str:
    return ", ".join(at_least(each.lag, each.lag_exact) for each in groups) or "-"


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.argument("assignments", metavar="[NAME=VALUE]...", nargs=-1)
@answering
def settings(session: Session, *, name: str, assignments: tuple[str, ...]) -> CommandResult:
    """Show or change the settings of a topic.

    Without NAME=VALUE, the command shows the settings. With NAME=VALUE, it changes the settings
    that are registered in Redis. A registered setting applies to every daemon whose own
    configuration does not contain it. The value `none` removes a limit.

    Example:

    \b
      streamqd topic settings access retention.max_age=24h archive=required
    """
    configured = session.settings.topics.get(name)
    topics.partition_count(session.store, name)
    if not assignments:
        seen = topics_settings.show(session.store, name, configured)
    else:
        try:
            seen = topics_settings.change(session.store, name, assignments, configured)
        except ConfigError as error:
            raise click.UsageError("; ".join(error.problems)) from None

    def show() -> None:
        _show_settings(seen)
        if assignments:
            session.note(
                ("changed (daemons apply it within 30 s)") if seen.changed else "nothing changed"
            )

    return CommandResult(seen, show)


def _show_settings(seen: topics_settings.TopicSettings) -> None:
    print_unreadable(seen.unreadable)
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


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.option("--force", is_flag=True, help="Delete the topic even if its partitions are owned.")
@click.option(
    "--while-consumed", is_flag=True,
    help="Delete the topic even if a live instance has a consumer for it and will create it again.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the effect, but delete nothing.")
@yes_option
@answering
def delete(
    session: Session, *, name: str, force: bool, while_consumed: bool, dry_run: bool, yes: bool
) -> CommandResult:
    """Delete a topic and all its data permanently.

    This includes messages, groups, retries and dead letters. The command fails if an instance owns
    a partition of the topic, or if a live instance has a consumer for it, because that instance
    would create the topic again, empty. A producer that keeps sending also creates it again, unless
    it uses `create=False`. If the deletion is interrupted, run the same command to finish it.
    Afterwards, `streamqd dlq audit TOPIC` shows one entry with the user who deleted the topic.
    """
    extent = topics_deletion.measure_extent(session.store, name)
    if extent.owned and not force and not dry_run:
        raise RequestRefusedError(
            f"topic {name} is in use ({count(len(extent.owned), 'assignment')}, such as"
            f" {extent.owned[0]}); stop its consumers first, or pass --force"
        )
    offering = directives.consuming_instances(session.fleet, name)
    if dry_run:
        return CommandResult(extent, lambda: _show_extent(extent, offering))
    if offering and not while_consumed:
        raise RequestRefusedError(
            f"{', '.join(offering)} would create the topic again, empty; stop these instances,"
            " or remove the consumer and reload, or pass --while-consumed"
        )
    confirm(f"Delete {_describe_deletion(extent)}?", yes)
    done = topics_deletion.delete(session.store, name, force=force)
    # The audit log was deleted with the topic, so this becomes the first entry of a new log.
    session.record(
        name, "topic delete",
        {"groups": extent.groups, "partitions": done.partitions, "force": force},
        {"messages": extent.messages, "dead_letters": extent.dead_letters, "keys": done.keys},
    )  # fmt: skip
    return CommandResult(
        done, f"{name} deleted: {count(done.partitions, 'partition')}, {done.keys:,} keys"
    )


def _show_extent(extent: topics_deletion.DeletionExtent, offering: Iterable[str]) -> None:
    click.echo(f"would delete {_describe_deletion(extent)}")
    for line in (*extent.owned, *(f"offered by {each}" for each in offering)):
        click.echo(f"in use: {line}")


def _describe_deletion(found: topics_deletion.DeletionExtent) -> str:
    groups = f" and the groups {', '.join(found.groups)}" if found.groups else ""
    partly = ", partly deleted already" if found.partly_deleted else ""
    return (
        f"{found.topic} with {count(found.partitions, 'partition')}{partly},"
        f" {count(found.messages, 'message')}, {count(found.dead_letters, 'dead letter')}{groups}"
    )


# --- growing --------------------------------------------------------------------------------------


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.argument("partitions", metavar="N", type=click.IntRange(1, growth.PARTITIONS_MAX))
@click.option(
    "--wait/--no-wait", default=True, show_default=True,
    help="Wait until every group reads the new partitions.",
)  # fmt: skip
@yes_option
@answering
def grow(session: Session, *, name: str, partitions: int, wait: bool, yes: bool) -> CommandResult:
    """Grow a topic to N partitions, and keep each key in order.

    First write the new number into the configuration of the daemons, because the command reloads
    them. N must be a multiple of the current number. Producers use the new partitions immediately.
    Each group reads them only after it has handled all current messages of the old partitions, so
    the growth takes as long as the groups need to catch up. Until then, this command holds the new
    partitions, and `streamqd partitions` shows `topic-grow` as their owner. If the command is
    interrupted, run it again to continue. Once the growth is complete, it changes nothing.
    """
    found = growth.progress(session.store, name, partitions)
    if found is not None and found.done:
        size = count(partitions, "partition")
        return CommandResult(found, f"{name} already has {size}, so nothing was changed")
    configured = session.settings.topics.get(name)
    growth.check_configured(name, partitions, configured, session.settings.source)
    if found is None:
        confirm(f"Grow {name} to {count(partitions, 'partition')}? It cannot shrink again.", yes)
        session.record(name, "topic grow", {"partitions": partitions}, {})
    notify = growth.notifier(session.fleet, name, partitions, session.note)
    done = growth.grow(session.store, name, partitions, notify=notify)
    try:
        while wait and not done.done:
            session.note(f"{name}: {done.left}")
            time.sleep(POLL_SECONDS)
            done = growth.grow(session.store, name, partitions, notify=notify)
    except KeyboardInterrupt:
        session.note("interrupted; run the same command to continue")
        raise
    if done.done:
        return CommandResult(done, f"{name} has {count(partitions, 'partition')}")

    def show() -> None:
        session.note(f"{name}: {done.left}")
        session.note("run the same command to continue")

    return CommandResult(done, show, EXIT_WAITING)
