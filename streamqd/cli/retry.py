"""`streamqd retry`: messages that failed and wait for their next attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from streamqd.admin import retries
from streamqd.cli.arguments import Duration, json_option, limit_option, yes_option
from streamqd.cli.deeds import remember
from streamqd.cli.output import age, confirm, count, emit, table, unreadable
from streamqd.cli.session import Session, pass_session
from streamqd.model import LETTERS

ERROR_CHARS = 80  # of an error in the table; --json has all that is kept of it
Command = TypeVar("Command", bound=Callable[..., Any])


def _filters(command: Command) -> Command:
    for option in (
        click.option("-p", "--partition", type=click.IntRange(0), help="Of this partition only."),
        click.option("-k", "--key", help="With this key only."),
        click.option(
            "--attempt", "attempt_min", type=click.IntRange(1), default=1,
            help="Waiting for this attempt or a later one.",
        ),
        click.option(
            "--due-within", type=Duration(), metavar="DURATION", help="Due within this time."
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def _chosen(command: Command) -> Command:
    """What `now` and `cancel` are about: retries by id, or all that pass the filters."""
    command = _filters(command)
    for option in (
        click.option("--all", "every", is_flag=True, help="All that pass the filters."),
        click.argument("ids", metavar="[ID]...", nargs=-1),
        click.argument("group"),
        click.argument("topic"),
    ):
        command = option(command)
    return command


@click.group()
def retry() -> None:
    """Look at delayed retries, run them now, cancel them."""


@retry.command("list")
@click.argument("topic")
@click.argument("group")
@_filters
@limit_option(50)
@click.option("--cursor", default="", help="Go on behind the page that printed this cursor.")
@json_option
@pass_session
def list_(
    session: Session,
    topic: str,
    group: str,
    partition: int | None,
    key: str | None,
    attempt_min: int,
    due_within: float | None,
    limit: int,
    cursor: str,
    as_json: bool,
) -> None:
    """Show the delayed retries of a group, the first due first, over all partitions."""
    choice = _choice((), partition, key, attempt_min, due_within)
    with session.link() as link:
        seen = retries.listed(
            link, session.keys, topic, group, choice=choice, limit=limit, cursor=cursor
        )
    if as_json:
        emit(seen)
        return
    unreadable(seen.unreadable)
    if not seen.rows:
        more = "more " if cursor else ""
        filtered = choice != _choice((), None, None, 1, None)
        click.echo(
            "nothing matches" if filtered else f"no {more}delayed retries in {topic} for {group}"
        )
        return
    table(
        ("ID", "DUE IN", "ATTEMPT", "CRASHES", "BYTES", "KEY", "ERROR"),
        [
            (
                row.id,
                age(row.due_unix_ms - seen.now_unix_ms),
                row.attempt,
                row.crashes,
                row.payload_bytes,
                row.key or "-",
                _error(row),
            )
            for row in seen.rows
        ],
        last_below=True,
    )
    session.note(f"{seen.total:,} delayed in {topic} for {group}")
    if seen.cursor:
        session.note(f"more: --cursor {seen.cursor}")


@retry.command()
@_chosen
@click.option("--dry-run", is_flag=True, help="Only count them.")
@json_option
@pass_session
def now(
    session: Session,
    topic: str,
    group: str,
    ids: tuple[str, ...],
    every: bool,
    partition: int | None,
    key: str | None,
    attempt_min: int,
    due_within: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run delayed retries now: those named, or --all that pass the filters."""
    choice = _asked(ids, every, partition, key, attempt_min, due_within)
    with session.link() as link:
        rows = retries.chosen(link, session.keys, topic, group, choice)
        if dry_run:
            _foretell(rows, as_json, "would be due now")
            return
        done = retries.hasten(link, session.keys, topic, group, rows)
    if as_json:
        emit(done)
        return
    gone = f", {done.gone:,} had run before" if done.gone else ""
    click.echo(f"{_retries(done.due)} due now{gone}")


@retry.command()
@_chosen
@click.option("--drop", is_flag=True, help="Lose them instead of making dead letters.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@yes_option
@json_option
@pass_session
def cancel(
    session: Session,
    topic: str,
    group: str,
    ids: tuple[str, ...],
    every: bool,
    partition: int | None,
    key: str | None,
    attempt_min: int,
    due_within: float | None,
    drop: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make dead letters of delayed retries: those named, or --all that pass the filters.

    The reason of these letters is `cancelled`; they can be replayed as others can. Of a group that
    reads dead letters (NAME@dlq) the retries are dropped: their letters have stayed.
    """
    drop = drop or group.endswith(LETTERS)
    choice = _asked(ids, every, partition, key, attempt_min, due_within)
    with session.link() as link:
        rows = retries.chosen(link, session.keys, topic, group, choice)
        if dry_run:
            _foretell(rows, as_json, "would be lost" if drop else "would become dead letters")
            return
        total = sum(map(len, rows.values()))
        what = "Lose" if drop else "Make dead letters of"
        confirm(f"{what} {_retries(total)} in {topic} for {group}?", yes or not total)
        done = retries.cancel(link, session.keys, topic, group, rows, drop=drop)
        if total:
            asked = {"group": group, "retries": list(ids) or "--all", "drop": drop}
            counts = {"dead": done.dead, "dropped": done.dropped, "gone": done.gone}
            remember(session, link, topic, "retry cancel", asked, counts)
    if as_json:
        emit(done)
        return
    gone = f", {done.gone:,} had run before" if done.gone else ""
    became = f"{done.dropped:,} lost" if drop else f"{count(done.dead, 'dead letter')} made"
    click.echo(f"{became}{gone}")
    if done.unreadable:
        session.note(f"{done.unreadable:,} stay, because they cannot be read: --drop loses them")


def _asked(
    ids: tuple[str, ...],
    every: bool,
    partition: int | None,
    key: str | None,
    attempt_min: int,
    due_within: float | None,
) -> retries.RetryFilter:
    """The choice, which must be one that somebody has made."""
    choice = _choice(ids, partition, key, attempt_min, due_within)
    filtered = choice != retries.RetryFilter(ids=ids, attempt_min=1)
    if ids and (every or filtered):
        raise click.UsageError("name retries, or choose them by --all and filters, not both")
    if not ids and not every:
        raise click.UsageError("name retries by their ids, or say --all (filters may narrow it)")
    return choice


def _choice(
    ids: tuple[str, ...],
    partition: int | None,
    key: str | None,
    attempt_min: int,
    due_within: float | None,
) -> retries.RetryFilter:
    return retries.RetryFilter(
        ids=ids,
        partition=partition,
        key=key,
        attempt_min=attempt_min,
        due_within_ms=None if due_within is None else round(due_within * 1000),
    )


def _foretell(rows: dict[int, list[retries.RetryRow]], as_json: bool, what: str) -> None:
    found = [row for _, page in sorted(rows.items()) for row in page]
    if as_json:
        emit(found)
    else:
        click.echo(f"{_retries(len(found))} {what}")


def _error(row: retries.RetryRow) -> str:
    """What a message waits for another attempt because of, and where in the code."""
    text = row.error if len(row.error) <= ERROR_CHARS else row.error[: ERROR_CHARS - 1] + "…"
    return (f"{text} ({row.at})" if row.at else text) or "-"


def _retries(number: int) -> str:
    shown = "no" if not number else f"{number:,}"
    return f"{shown} {'retry' if number == 1 else 'retries'}"
