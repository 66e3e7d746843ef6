"""`streamqd trim`: remove acknowledged entries that exceed the retention now."""

from __future__ import annotations

import dataclasses

import click

from streamqd import config
from streamqd.admin import retention as admin
from streamqd.admin.topics import check_partition
from streamqd.cli.arguments import DURATION, SIZE, yes_option
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import ago, confirm, listing, print_unreadable
from streamqd.cli.session import Session
from streamqd.errors import RequestRefusedError
from streamqd.words import count, memory


@click.command(short_help="Remove acknowledged entries now.")
@click.argument("topic")
@click.option("-p", "--partition", type=click.IntRange(min=0), help="Select only this partition.")
@click.option(
    "--max-age", type=DURATION, help="Keep entries that are younger than this, such as 24h."
)
@click.option(
    "--max-length",
    type=click.IntRange(min=0),
    help="The number of entries to keep in each partition.",
)
@click.option(
    "--max-bytes",
    type=SIZE,
    help="Keep entries up to this memory use per partition, such as 64MiB.",
)
@click.option("--dry-run", is_flag=True, help="Show the effect, but remove nothing.")
@yes_option
@answering
def trim(
    session: Session,
    *,
    topic: str,
    partition: int | None,
    max_age: float | None,
    max_length: int | None,
    max_bytes: int | None,
    dry_run: bool,
    yes: bool,
) -> CommandResult:
    """Remove the oldest entries that are no longer needed.

    Without a limit option, the topic's retention applies. Entries that a group has not acknowledged
    are kept, and so are unarchived entries with archive = "required". The column NEEDED BY contains
    the group (or @archive) that needs the oldest of these entries, and for how long.
    """
    stated = session.settings.topics.get(topic)
    expected = session.settings.message_groups(topic)
    limits = (max_age, max_length, max_bytes)
    holds, partitions = admin.settings(session.store, topic, stated)
    if partition is not None:
        check_partition(topic, partition, partitions)
    if any(each is not None for each in limits):
        alone = config.Retention(*limits, without_groups=holds.retention.without_groups)
        holds = dataclasses.replace(holds, retention=alone)
    if not holds.retention.bounded:
        raise RequestRefusedError(
            f"{topic} has no retention; pass a limit with --max-age, --max-length or --max-bytes"
        )
    if not dry_run:
        confirm(f"Trim {topic}? Removed messages cannot be read or replayed.", yes)
    chosen = range(partitions) if partition is None else [partition]
    done = admin.trim(session.store, topic, holds, chosen, expected, dry_run=dry_run)
    return CommandResult(done, lambda: _show(done))


def _show(done: admin.TrimReport) -> None:
    print_unreadable(done.unreadable)

    def format_removed(row: admin.TrimRow) -> str:
        return "over 100,000" if row.removed is None else f"{row.removed:,}"

    def needed_by(row: admin.TrimRow) -> str:
        since = ago(done.now_unix_ms, row.held_since_unix_ms)
        return "-" if since is None else f"{row.holder}, for {since}"

    listing(
        f"PARTITION {'REMOVABLE' if done.dry_run else 'REMOVED'} MESSAGES MEMORY NEEDED_BY",
        done.partitions,
        partition=lambda row: str(row.partition),
        removable=format_removed,
        removed=format_removed,
        memory=lambda row: memory(row.bytes),
        needed_by=needed_by,
    )
    if not done.dry_run:
        click.echo(f"{count(done.removed, 'message')} removed")
