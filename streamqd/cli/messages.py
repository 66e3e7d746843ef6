"""`streamqd tail`, `pending`, `delayed` and `retry`: show messages, delayed sends and retries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import click

from streamqd.admin import delayed as sends
from streamqd.admin import pending as admin_pending
from streamqd.admin import retries, topics
from streamqd.admin import tail as admin_tail
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import (
    DURATION,
    MOMENT,
    Command,
    json_option,
    page_options,
    unix_ms,
    yes_accepted,
    yes_option,
)
from streamqd.cli.command import CommandResult, answering, connected
from streamqd.cli.output import (
    NO_MATCH,
    ago,
    confirm,
    json_text,
    listing,
    page_document,
    print_unreadable,
    printable,
)
from streamqd.cli.session import Session
from streamqd.errors import RequestRefusedError
from streamqd.model import DLQ_SUFFIX
from streamqd.words import age, count, plural

EXIT_NOT_ALL = 8
ERROR_CHARS = 80  # maximum length of an error in the table; --json prints the whole stored text


# --- tail and pending -----------------------------------------------------------------------------


@click.command(short_help="Show the last messages of a topic.")
@click.argument("topic")
@click.option(
    "-n", "--limit", "--lines", "limit", type=click.IntRange(0, 10_000),
    help="The number of messages to print. Default: 10, or all with --since.",
)  # fmt: skip
@click.option(
    "--since", type=MOMENT, metavar="TIME",
    help="Print only messages since this time, such as 10m (10 minutes ago) or 2026-11-21T08:30"
    " (UTC).",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Keep printing new messages until Ctrl-C.")
@click.option("-p", "--partition", type=click.IntRange(0), help="Select only this partition.")
@json_option
@connected
def tail(
    session: Session,
    *,
    topic: str,
    limit: int | None,
    since: tuple[float, bool] | None,
    follow: bool,
    partition: int | None,
    as_json: bool,
) -> None:
    """Show the last messages of a topic.

    \b
      streamqd tail orders --since 10m --follow

    The messages of all partitions are merged. The command changes nothing and needs no group. Each
    line contains PARTITION:ID, the key and the payload. With --json, each line is a JSON object.
    """
    watched = admin_tail.Tail(session.store, topic, partition)
    if since is None:
        shown = _print_entries(watched.last(10 if limit is None else limit), as_json)
    else:
        now = server_unix_ms(session.link)
        begin = unix_ms(since, now)
        if begin > now:
            raise click.UsageError("nothing can match: --since is in the future")
        every = watched.since(begin) if limit is None else watched.last(limit, begin)
        shown = _print_entries(every, as_json)
    if follow:
        for seen in watched.follow():
            _print_entries(seen, as_json)
    elif not shown and limit != 0 and not as_json:
        session.note(f"no messages in {topic}" if since is None else NO_MATCH)


def _print_entries(messages: Iterable[admin_tail.TailedEntry], as_json: bool) -> int:
    """Print messages, one per line, and return their number."""
    number = 0
    for each in messages:
        number += 1
        if as_json:
            click.echo(json_text(each))
        else:
            key = "-" if each.key is None else printable(each.key) or '""'
            click.echo(f"{each.partition}:{each.id}  {key}  {printable(each.payload)}")
    return number


@click.command(short_help="Show messages delivered but not acknowledged.")
@click.argument("topic")
@click.option("-g", "--group", help="The group. Required if several groups read the topic.")
@click.option(
    "-s",
    "--sort",
    type=click.Choice(admin_pending.ORDERS),
    default="id",
    show_default=True,
    help="The order of the rows. id: oldest first. idle: longest idle first. deliveries: most"
    " deliveries first.",
)
@page_options(50)
@answering
def pending(
    session: Session, *, topic: str, group: str | None, sort: str, limit: int, cursor: str
) -> CommandResult:
    """Show the delivered, unacknowledged messages of a group.

    The messages of all partitions are merged. With the sort order `id`, pages have no gaps and no
    overlaps. The other orders rank the messages again for each page, so a message can appear twice
    or not at all.
    """
    name = group or _only_group(session, topic)
    listed = admin_pending.messages(session.store, topic, name, sort)
    seen = listed.page(limit=limit, cursor=cursor)

    def show() -> None:
        print_unreadable(seen.unreadable)
        if not seen.rows:
            click.echo(f"no {'more ' if cursor else ''}pending messages in {topic} for {name}")
            return
        listing(
            "PARTITION PLACE IDLE DELIVERIES CRASHES CONSUMER",
            seen.rows,
            partition=lambda row: str(row.partition),
            idle=lambda row: None if row.idle_ms is None else age(row.idle_ms),
            consumer=lambda row: row.consumer or "(unowned)",
        )
        session.note(f"{count(seen.total, 'pending message')} in {topic} for {name}")
        if not seen.complete:
            session.note(f"only the first {admin_pending.SCAN_MAX:,} of each were ranked")
        session.print_next_page(seen.cursor)

    document = page_document(seen, "total rows cursor complete unreadable")
    return CommandResult({"topic": topic, "group": name} | document, show)


def _only_group(session: Session, topic: str) -> str:
    partitions = range(topics.partition_count(session.store, topic))
    found = topics.groups(session.store, topic, partitions)
    if not found:
        raise RequestRefusedError(
            f"no group reads topic {topic}; start a daemon with a consumer for it"
        )
    if len(found) > 1:
        raise RequestRefusedError(
            f"several groups read {topic}; pass --group with one of {', '.join(found)}"
        )
    return found[0]


# --- filters of delayed sends and retries ---------------------------------------------------------

_DUE = "now_unix_ms total rows cursor unreadable"  # fields of a page that --json prints
_ATTEMPT = click.option(
    "--attempt", "attempt_min", type=click.IntRange(1), default=1,
    help="Select only retries whose next attempt has this number or a higher one.",
)  # fmt: skip


def _filters(command: Command) -> Command:
    for option in (
        click.option(
            "-p", "--partition", type=click.IntRange(0), help="Select only this partition."
        ),
        click.option("-k", "--key", help="Select only messages with this key."),
        click.option(
            "--due-within",
            type=DURATION,
            metavar="DURATION",
            help="Select only messages that are due within this time.",
        ),
    ):
        command = option(command)
    return command


def _id_arguments(metavar: str, noun: str) -> Callable[[Command], Command]:
    """Add arguments for IDs to a command, and the options --all and --dry-run.

    `noun` is the plural of the things that --all selects, for its help text.
    """

    def add(command: Command) -> Command:
        help_of_all = f"Select all {noun} that match the filters."
        for option in (
            click.option("--dry-run", is_flag=True, help="Count the messages, but change nothing."),
            click.option("--all", "every", is_flag=True, help=help_of_all),
            click.argument("ids", metavar=metavar, nargs=-1),
        ):
            command = option(command)
        return command

    return add


def _choice(
    session: Session,
    *,
    due_within: float | None,
    key: str | None,
    **filters: Any,
) -> MessageFilter:
    """Return the filter that the options of `_filters` describe."""
    until = None
    if due_within is not None:
        until = server_unix_ms(session.link) + round(due_within * 1000) + 1
    raw = None if key is None else key.encode("utf-8", "surrogateescape")
    return MessageFilter(key=raw, until_unix_ms=until, **filters)


def _require_choice(
    session: Session, ids: tuple[str, ...], every: bool, noun: str, filters: dict[str, Any]
) -> MessageFilter:
    """Return the filter of a command that needs either IDs or --all.

    `noun` names the IDs in error messages. Raises UsageError if there are neither IDs nor --all, or
    if IDs are combined with --all or another filter.
    """
    choice = _choice(session, **filters)
    if ids and (every or choice.has_filters):
        raise click.UsageError(
            f"{noun} cannot be used with --all or filters; pass one or the other"
        )
    if not ids and not every:
        raise click.UsageError(f"pass {noun}, or --all with optional filters")
    return dataclasses.replace(choice, ids=ids)


def _describe_none(choice: MessageFilter, cursor: str, what: str) -> str:
    return NO_MATCH if choice.has_filters else f"no {'more ' if cursor else ''}{what}"


# --- delayed sends --------------------------------------------------------------------------------


@click.group()
def delayed() -> None:
    """Show delayed sends, cancel them, or send them now."""


@delayed.command("list")
@click.argument("topic")
@_filters
@page_options(50)
@answering
def list_sends(
    session: Session, *, topic: str, limit: int, cursor: str, **filters: Any
) -> CommandResult:
    """Show delayed sends of all partitions by due time.

    \b
      streamqd delayed list orders --due-within 1h

    An ID consists of the partition and the send ID, which is the last part of the uid that the
    producer returned. When the message is delivered, it gets another uid.
    """
    choice = _choice(session, **filters)
    seen = sends.messages(session.store, topic).page(choice, limit=limit, cursor=cursor)

    def show() -> None:
        print_unreadable(seen.unreadable)
        if not seen.rows:
            click.echo(_describe_none(choice, cursor, f"delayed sends in {topic}"))
            return
        listing(
            "ID DUE_IN SENT BYTES KEY",
            seen.rows,
            due_in=lambda row: age(row.due_unix_ms - seen.now_unix_ms),
            sent=lambda row: _format_sent(seen.now_unix_ms, row.sent_unix_ms),
            bytes=lambda row: row.payload_bytes,
            key=lambda row: row.key or "-",
        )
        session.note(f"{plural(seen.total, 'delayed send')} in {topic}")
        session.print_next_page(seen.cursor)

    return CommandResult({"topic": topic} | page_document(seen, _DUE), show)


@delayed.command()
@click.argument("topic")
@click.argument("name", metavar="PARTITION:SEND-ID")
@answering
def show(session: Session, *, topic: str, name: str) -> CommandResult:
    """Show all fields of one delayed send.

    \b
      streamqd delayed show orders 3:0f3e9ac1b2d44e58a6c7d8e9f0a1b2c3
    """
    found = sends.show(session.store, topic, name)
    now_unix_ms = server_unix_ms(session.link)
    return CommandResult(found, lambda: _show_send(found, now_unix_ms))


def _show_send(found: sends.DelayedSend, now_unix_ms: int) -> None:
    pairs = [
        ("id", found.id),
        ("topic", found.topic),
        ("due in", age(found.due_unix_ms - now_unix_ms)),
        ("sent", _format_sent(now_unix_ms, found.sent_unix_ms)),
        ("key", "-" if found.key is None else printable(found.key)),
        *((f"header {name}", value) for name, value in (found.headers or {}).items()),
        *found.other.items(),
    ]
    for label, value in pairs:
        click.echo(f"{printable(label) + ':':<13}{printable(value)}")
    click.echo()
    click.echo(f"payload, {len(found.payload):,} bytes:")
    click.echo(printable(found.payload, lines=True))


@delayed.command("now")
@click.argument("topic")
@_id_arguments("[PARTITION:SEND-ID]...", "delayed sends")
@_filters
@yes_accepted
@answering
def send_now(
    session: Session,
    *,
    topic: str,
    ids: tuple[str, ...],
    every: bool,
    dry_run: bool,
    **filters: Any,
) -> CommandResult:
    """Make delayed sends due now.

    \b
      streamqd delayed now orders --all --key customer-7

    Pass the IDs of the delayed sends, or --all with optional filters. The housekeeper of a running
    daemon then delivers the messages within seconds. The exit code is 8 if a send is no longer
    waiting.
    """
    choice = _require_choice(session, ids, every, "delayed sends", filters)
    if dry_run:
        return _preview_sends(session, topic, ids, choice, "would be due now")
    names = ids or sends.select_ids(session.store, topic, choice)
    done = sends.make_due(session.store, topic, names)
    text = f"{count(done.changed, 'delayed send')} due now" if done.changed or ids else NO_MATCH
    return _changed_sends(topic, "due", done, text, ids)


@delayed.command("cancel")
@click.argument("topic")
@_id_arguments("[PARTITION:SEND-ID]...", "delayed sends")
@_filters
@yes_option
@answering
def cancel_sends(
    session: Session,
    *,
    topic: str,
    ids: tuple[str, ...],
    every: bool,
    dry_run: bool,
    yes: bool,
    **filters: Any,
) -> CommandResult:
    """Cancel delayed sends permanently.

    \b
      streamqd delayed cancel orders 3:0f3e9ac1b2d44e58a6c7d8e9f0a1b2c3

    Pass the IDs of the delayed sends, or --all with optional filters. Each message is either
    canceled or delivered, never both. If a message was already delivered, the command prints its
    uid. The exit code is 8 if any send was not canceled. The dedup_id of a canceled send stays in
    use until it expires.
    """
    choice = _require_choice(session, ids, every, "delayed sends", filters)
    if dry_run:
        return _preview_sends(session, topic, ids, choice, "would be canceled")
    names: Iterable[str] = ids
    if every:
        number = sum(1 for _ in sends.select_ids(session.store, topic, choice))
        what = count(number, "delayed send")
        confirm(f"Cancel {what} of {topic} permanently?", yes or not number)
        names = sends.select_ids(session.store, topic, choice)
    done = sends.cancel(session.store, topic, names)
    if done.changed:
        asked = {
            "sends": list(ids) or "--all",
            "key": filters["key"],
            "partition": choice.partition,
        }
        counts = {"canceled": done.changed, "sent": len(done.sent)}
        session.record(topic, "delayed cancel", asked, counts)
    found_any = done.changed or ids
    text = f"{count(done.changed, 'delayed send')} canceled" if found_any else NO_MATCH
    return _changed_sends(topic, "canceled", done, text, ids)


def _changed_sends(
    topic: str, action: str, done: sends.DelayedChanged, text: str, ids: tuple[str, ...]
) -> CommandResult:
    def show() -> None:
        click.echo(text)
        for each in done.sent:
            click.echo(f"{printable(each.id)} was already sent, as {each.uid}", err=True)
        for name in done.unknown:
            click.echo(
                f"{printable(name)} not found: it was sent or canceled, or never existed", err=True
            )

    document = {"topic": topic, action: done.changed, "sent": done.sent, "unknown": done.unknown}
    return CommandResult(document, show, EXIT_NOT_ALL if ids and (done.sent or done.unknown) else 0)


def _preview_sends(
    session: Session, topic: str, ids: tuple[str, ...], choice: MessageFilter, what: str
) -> CommandResult:
    """Return the number of sends that a command would change, for a dry run.

    Raises RequestRefusedError if one of the IDs does not belong to a waiting send.
    """
    if ids:
        names = [sends.show(session.store, topic, each).id for each in ids]
        number = len(dict.fromkeys(names))
    else:
        number = sum(1 for _ in sends.select_ids(session.store, topic, choice))
    text = f"{count(number, 'delayed send')} {what}" if number else NO_MATCH
    return CommandResult({"topic": topic, "would_be": number}, text)


def _format_sent(now_unix_ms: int, sent_unix_ms: int | None) -> str:
    sent = ago(now_unix_ms, sent_unix_ms)
    return "-" if sent is None else f"{sent} ago"


# --- waiting retries ------------------------------------------------------------------------------


@click.group()
def retry() -> None:
    """Show waiting retries, run them now, or cancel them."""


@retry.command("list")
@click.argument("topic")
@click.argument("group")
@_filters
@_ATTEMPT
@page_options(50)
@answering
def list_retries(
    session: Session, *, topic: str, group: str, limit: int, cursor: str, **filters: Any
) -> CommandResult:
    """Show waiting retries of a group by due time.

    The retries of all partitions are merged.
    """
    choice = _choice(session, **filters)
    waiting = retries.messages(session.store, topic, group)
    seen = waiting.page(choice, limit=limit, cursor=cursor)

    def show() -> None:
        print_unreadable(seen.unreadable)
        if not seen.rows:
            click.echo(_describe_none(choice, cursor, f"waiting retries in {topic} for {group}"))
            return
        listing(
            "ID DUE_IN ATTEMPT CRASHES BYTES KEY ERROR",
            seen.rows,
            last_below=True,
            due_in=lambda row: age(row.due_unix_ms - seen.now_unix_ms),
            bytes=lambda row: row.payload_bytes,
            key=lambda row: row.key or "-",
            error=_error,
        )
        session.note(f"{plural(seen.total, 'waiting retry')} in {topic} for {group}")
        session.print_next_page(seen.cursor)

    head = {"topic": topic, "group": group}
    return CommandResult(head | page_document(seen, _DUE), show)


@retry.command("now")
@click.argument("topic")
@click.argument("group")
@_id_arguments("[ID]...", "retries")
@_filters
@_ATTEMPT
@yes_accepted
@answering
def retry_now(
    session: Session,
    *,
    topic: str,
    group: str,
    ids: tuple[str, ...],
    every: bool,
    dry_run: bool,
    **filters: Any,
) -> CommandResult:
    """Run waiting retries now.

    Pass the IDs of the retries, or --all with optional filters.
    """
    choice = _require_choice(session, ids, every, "retry IDs", filters)
    rows = retries.select_rows(session.store, topic, group, choice)
    if dry_run:
        return _preview_retries(rows, "would be due now")
    done = retries.make_due(session.store, topic, group, rows)
    gone = f", {done.missing:,} had already run" if done.missing else ""
    return CommandResult(done, f"{count(done.due, 'retry')} due now{gone}")


@retry.command("cancel")
@click.argument("topic")
@click.argument("group")
@_id_arguments("[ID]...", "retries")
@_filters
@_ATTEMPT
@click.option(
    "--drop", is_flag=True, help="Drop the retries instead of turning them into dead letters."
)
@yes_option
@answering
def cancel_retries(
    session: Session,
    *,
    topic: str,
    group: str,
    ids: tuple[str, ...],
    every: bool,
    drop: bool,
    dry_run: bool,
    yes: bool,
    **filters: Any,
) -> CommandResult:
    """Cancel waiting retries, and turn them into dead letters.

    Pass the IDs of the retries, or --all with optional filters. The dead letters have the reason
    `canceled` and can be replayed like any others. For a group that reads dead letters (NAME@dlq),
    the retries are dropped, because their dead letters still exist.
    """
    drop = drop or group.endswith(DLQ_SUFFIX)
    choice = _require_choice(session, ids, every, "retry IDs", filters)
    rows = retries.select_rows(session.store, topic, group, choice)
    if dry_run:
        return _preview_retries(rows, "would be dropped" if drop else "would become dead letters")
    total = len(rows)
    what = "Drop" if drop else "Dead-letter"
    confirm(f"{what} {count(total, 'retry')} in {topic} for {group}?", yes or not total)
    done = retries.cancel(session.store, topic, group, rows, drop=drop)
    if total:
        asked = {"group": group, "retries": list(ids) or "--all", "drop": drop}
        counts = {
            "dead_letters": done.dead_letters,
            "dropped": done.dropped,
            "missing": done.missing,
        }
        session.record(topic, "retry cancel", asked, counts)

    def show() -> None:
        gone = f", {done.missing:,} had already run" if done.missing else ""
        became = (
            f"{done.dropped:,} lost"
            if drop
            else f"{count(done.dead_letters, 'dead letter')} written"
        )
        click.echo(f"{became}{gone}")
        if done.unreadable:
            session.note(
                f"{done.unreadable:,} kept, because they are unreadable (--drop discards them)"
            )

    return CommandResult(done, show)


def _preview_retries(rows: list[retries.RetryRow], what: str) -> CommandResult:
    return CommandResult(rows, f"{count(len(rows), 'retry')} {what}")


def _error(row: retries.RetryRow) -> str:
    """Return the error of the previous attempt, followed by its location in the code."""
    text = row.error if len(row.error) <= ERROR_CHARS else row.error[: ERROR_CHARS - 1] + "…"
    return (f"{text} ({row.at})" if row.at else text) or "-"
