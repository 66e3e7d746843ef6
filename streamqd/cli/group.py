"""`streamqd group`: show, reset, stop, start, adopt and delete the groups of a topic."""

from __future__ import annotations

from collections.abc import Sequence

import click

from streamqd.admin import adoption, directives, groups
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import dry_run_option, reason_option, yes_option
from streamqd.cli.command import CommandResult, DirectiveResult, answering, directing
from streamqd.cli.output import (
    ago,
    at_least,
    confirm,
    epoch,
    listing,
    owner,
    print_unreadable,
    sentence,
)
from streamqd.cli.session import Session
from streamqd.errors import RequestRefusedError
from streamqd.model import QUERY_PREFIX
from streamqd.words import age, count, plural


@click.group()
def group() -> None:
    """Show, stop, start, reset, adopt and delete groups."""


@group.command("list")
@click.argument("topic", required=False)
@answering
def list_(session: Session, *, topic: str | None) -> CommandResult:
    """Show the groups of one topic, or of all topics.

    A `+` after a number means at least that many. These are the columns:

    \b
    - LAG: unread messages.
    - PENDING: messages that were delivered but not acknowledged.
    - RETRIES: messages that wait for their next attempt.
    - OLDEST: age of the oldest unread or pending message.
    """
    rows = groups.list_groups(session.store, topic)
    now = server_unix_ms(session.link)
    if not rows:
        return CommandResult({"rows": rows}, f"no group reads {topic or 'any topic'}")
    return CommandResult({"rows": rows}, lambda: _show_groups(rows, now))


def _show_groups(rows: Sequence[groups.GroupRow], now: int) -> None:
    print_unreadable(list(dict.fromkeys(each for row in rows for each in row.unreadable)))
    listing(
        "TOPIC GROUP OWNED LAG PENDING RETRIES OLDEST OWNERS",
        [row for row in rows if row.group],  # rows without a group only list unreadable values
        owned=lambda row: (
            None if row.group.startswith(QUERY_PREFIX) else f"{row.owned}/{row.partitions}"
        ),
        lag=lambda row: at_least(row.lag, row.lag_exact),
        retries=lambda row: row.waiting_retries,
        oldest=lambda row: ago(now, row.oldest_unix_ms),
        owners=lambda row: ", ".join(row.owners) or "-",
    )


@group.command()
@click.argument("topic")
@click.argument("name", metavar="GROUP")
@answering
def describe(session: Session, *, topic: str, name: str) -> CommandResult:
    """Show one group, partition by partition.

    A `+` after a number means at least that many. These are the columns:

    \b
    - POSITION: ID of the last delivered message. `start` means that no message
      was delivered yet, and `before ID` that an operator set the position.
    - LAG: messages after the position.
    - OLDEST UNREAD: age of the oldest unread message.
    - OLDEST PENDING: age of the oldest pending message.
    """
    detail = groups.describe(session.store, topic, name)
    return CommandResult(detail, lambda: _show_group(detail))


def _show_group(detail: groups.GroupDetail) -> None:
    print_unreadable(detail.unreadable)
    now = detail.now_unix_ms
    click.echo(
        f"group {detail.group} of {detail.topic}: {at_least(detail.lag, detail.lag_exact)} unread,"
        f" {detail.pending:,} pending, {plural(detail.waiting_retries, 'waiting retry')}"
    )
    if detail.missing:
        numbers = ", ".join(map(str, detail.missing))
        click.echo(f"not on partition {numbers} yet (its daemon creates it)")
    click.echo()
    listing(
        "PARTITION OWNER LAG OLDEST_UNREAD PENDING OLDEST_PENDING RETRIES POSITION EPOCH",
        detail.partitions,
        partition=lambda row: str(row.partition),
        owner=owner,
        lag=lambda row: at_least(row.lag_at_least, row.lag is not None),
        oldest_unread=lambda row: ago(now, row.oldest_unread_unix_ms),
        oldest_pending=lambda row: ago(now, row.oldest_pending_unix_ms),
        retries=lambda row: row.waiting_retries,
        position=lambda row: groups.format_position(row.position),
        epoch=epoch,
    )


@group.command()
@click.argument("topic")
@click.argument("name", metavar="GROUP")
@click.option(
    "--to", required=True, metavar="earliest|latest|ID|TIME",
    help="The first message to read: an ID, a time (RFC 3339), or an age such as 2h.",
)  # fmt: skip
@click.option(
    "-p", "--partition", "partitions", type=click.IntRange(0), multiple=True,
    help="Select only this partition. May be repeated.",
)  # fmt: skip
@click.option(
    "--keep-retries/--drop-retries", default=True, show_default=True,
    help="Keep or drop messages that wait for their next attempt.",
)  # fmt: skip
@click.option(
    "--force",
    is_flag=True,
    help="Reset the group even if its partitions are owned. The owners lose them.",
)
@click.option("--dry-run", is_flag=True, help="Show the effect, but change nothing.")
@yes_option
@answering
def reset(
    session: Session,
    *,
    topic: str,
    name: str,
    to: str,
    partitions: tuple[int, ...],
    keep_retries: bool,
    force: bool,
    dry_run: bool,
    yes: bool,
) -> CommandResult:
    """Set the position from which a group reads.

    Pending messages are released. The group then reads all messages after the new position, and
    messages before it count as handled. The command fails if an instance owns a partition of the
    group, so run `streamqd group stop` first. With --force, the owner loses the partition, and its
    worker can no longer record results. --dry-run works at any time.

    The columns BEFORE and NOW contain the old and the new position, each as the ID of the last
    message that counts as read, or as one of these values:

    \b
    - start: no message counts as read.
    - end: all messages count as read.
    - before ID: all messages before this ID count as read.

    \b
    Example:
      streamqd group reset orders billing --to 2026-11-21T09:00:00Z --dry-run
    """

    def run(*, dry_run: bool) -> groups.GroupReset:
        return groups.reset(
            session.store, topic, name, to, partitions=partitions,
            drop_retries=not keep_retries, force=force, dry_run=dry_run,
        )  # fmt: skip

    if not dry_run:
        foreseen = run(dry_run=True)
        if foreseen.obstacle:
            raise RequestRefusedError(foreseen.obstacle)
        where = count(len(foreseen.partitions), "partition")
        confirm(f"Reset {name} to read {topic} from {to}, on {where}?", yes)
    done = run(dry_run=dry_run)
    if not dry_run:
        session.record(topic, "group reset", done.arguments | {"force": force}, done.counts)
    return CommandResult(done, lambda: _show_reset(session, done, dry_run))


def _show_reset(session: Session, done: groups.GroupReset, dry_run: bool) -> None:
    listing(
        "PARTITION BEFORE NOW UNREAD FORGOTTEN DROPPED",
        done.partitions,
        partition=lambda row: str(row.partition),
        before=lambda row: groups.format_position(row.before),
        now=lambda row: row.reached,
        unread=lambda row: at_least(row.unread, row.unread_exact),
        forgotten=lambda row: row.pending,
        dropped=lambda row: row.waiting_retries + row.retried,
    )
    if dry_run:
        if done.obstacle:
            sentence(f"the command would fail now: {done.obstacle}", hang=2)
        session.note("nothing was changed")


@group.command()
@click.argument("topic")
@click.argument("name", metavar="GROUP")
@click.option(
    "--force",
    is_flag=True,
    help="Delete the group even if its partitions are owned, it has unfinished messages, or its"
    " topic is growing.",
)
@yes_option
@answering
def delete(session: Session, *, topic: str, name: str, force: bool, yes: bool) -> CommandResult:
    """Delete a group with its position, retries and counters.

    The group's dead letters are kept. A daemon whose configuration still contains the group creates
    it again, at the position that the consumer's `start` setting defines. If the topic is growing,
    the growth no longer waits for the group.
    """
    if name not in groups.names(session.store, topic):
        # Raises RequestRefusedError for an unknown group.
        groups.partition_count(session.store, topic, name)
    growing = groups.growth_obstacle(session.store, topic, name)
    if growing and not force:
        raise RequestRefusedError(f"{growing}; wait until the growth is complete, or pass --force")
    why = f"{growing}. " if growing else ""
    confirm(f"{why}Delete group {name} of {topic}?", yes)
    done = groups.delete(session.store, topic, name, force=force)
    what = {"group": name, "force": force} | ({"growing": True} if growing else {})
    session.record(topic, "group delete", what, {"partitions": done.partitions})
    return CommandResult(
        done, f"{name} deleted from {count(done.partitions, 'partition')} of {topic}"
    )


@group.command(short_help="Take over pending messages of other clients.")
@click.argument("topic")
@click.argument("name", metavar="GROUP")
@dry_run_option
@yes_option
@answering
def adopt(session: Session, *, topic: str, name: str, dry_run: bool, yes: bool) -> CommandResult:
    """Take over a group's pending messages from other clients.

    Stop those clients first, because messages that they are handling would otherwise be handled
    twice. The command fails if an instance of streamqd owns a partition of the group. When an
    instance later acquires a partition, it handles the adopted messages before all others.
    """
    done = adoption.survey(session.store, topic, name)
    if not dry_run and done.entries:
        confirm(f"Take over {count(done.entries, 'message')} of {topic}/{name}?", yes)
    if not dry_run:
        done = adoption.adopt(session.store, topic, name)

    def show() -> None:
        print_unreadable(done.unreadable)
        if done.consumers:
            listing(
                "PARTITION CONSUMER PENDING IDLE",
                done.consumers,
                partition=lambda row: str(row.partition),
                idle=lambda row: age(row.idle_ms),
            )
        verb = "would be taken over" if dry_run else "taken over"
        click.echo(f"{count(done.entries, 'message')} {verb}")

    return CommandResult(done, show)


@group.command(short_help="Stop handling for one group on all instances.")
@click.argument("topic")
@click.argument("name", metavar="GROUP")
@reason_option
@directing
def stop(session: Session, *, topic: str, name: str, reason: str, dry_run: bool) -> DirectiveResult:
    """Stop handling for one group on all instances.

    The workers of the group finish their current messages and exit, and their partitions are
    released, so that you can run `group reset` or `group delete`. New messages wait in the topic
    until you run `streamqd group start`. The directive is stored in Redis, so it survives restarts
    and also applies to instances that start later. With --wait, the command returns when no
    instance owns a partition of the group, or exits with code 1 after --timeout.

    \b
    Examples:
      streamqd group stop orders billing --wait --reason "wrong prices"
      streamqd group reset orders billing --to 2h
      streamqd group start orders billing --wait
    """
    fleet = session.fleet
    return DirectiveResult(
        directives.stop(fleet, topic, name, reason, dry_run=dry_run),
        f"{topic}/{name} is stopped",
        lambda: directives.not_stopped(fleet, topic, name),
    )


@group.command(short_help="Start a stopped group.")
@click.argument("topic")
@click.argument("name", metavar="GROUP")
@directing
def start(session: Session, *, topic: str, name: str, dry_run: bool) -> DirectiveResult:
    """Start a stopped group.

    Instances acquire its partitions within seconds. With --wait, the command returns when every
    partition has an owner, or exits with code 1 after --timeout.

    \b
    Example:
      streamqd group start orders billing --wait
    """
    fleet = session.fleet
    return DirectiveResult(
        directives.start(fleet, topic, name, dry_run=dry_run),
        f"{topic}/{name} is started",
        lambda: directives.not_started(fleet, topic, name),
    )
