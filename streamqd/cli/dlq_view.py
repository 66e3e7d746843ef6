"""Print dead letters, their causes and the audit log."""

from __future__ import annotations

from collections.abc import Sequence

import click

from streamqd.admin.audit import AuditEntry
from streamqd.admin.dead_letters import FailureCause
from streamqd.admin.dead_letters.listing import MASK, DeadLetterDetail, DeadLetterRow
from streamqd.cli.output import BELOW, ago, listing, printable, room
from streamqd.words import age

_TEXT_CHARS = 70  # maximum length of an error message in a list of causes


def print_rows(rows: Sequence[DeadLetterRow], now_unix_ms: int) -> None:
    """Print one line for each dead letter. On a narrow terminal, the error gets a second line."""
    columns = room()
    width = None if columns is None else columns - BELOW
    listing(
        "ID GROUP REASON AGE TRIES KEY ERROR",
        rows,
        last_below=True,
        age=lambda row: ago(now_unix_ms, row.failed_unix_ms),
        tries=_count_runs,
        key=lambda row: None if row.key is None else printable(row.key)[:20],
        error=lambda row: _cause(row, width),
    )


def _count_runs(row: DeadLetterRow) -> int | None:
    """Return the number of failed runs, including crashes, or None if it is unknown."""
    if row.attempts is None and row.crashes is None:
        return None
    return (row.attempts or 0) + (row.crashes or 0)


def _cause(row: DeadLetterRow, width: int | None) -> str:
    """Return the class of the error, without its module, followed by the message.

    If both together are longer than `width`, return only the message.
    """
    name, message = row.error_class.rpartition(".")[2], printable(row.error_message)
    whole = ": ".join(filter(None, (name, message)))
    return message if message and width is not None and len(whole) > width else whole


def print_causes(causes: Sequence[FailureCause], now_unix_ms: int) -> None:
    """Print three lines for each cause.

    The lines show the error and where it occurred, its times and instances, and an example.
    """
    width = max(len(f"{each.count:,}") for each in causes)
    for each in causes:
        where = f" at {each.frame}" if each.frame else ""
        what = (each.error_class or each.error_message or each.reason) + where
        lines = [
            f"{each.fingerprint}  {each.group}  {each.reason}: {what}",
            f"last {age(now_unix_ms - each.last_unix_ms)} ago,"
            f" first {age(now_unix_ms - each.first_unix_ms)} ago"
            + (f", on {', '.join(each.instances)}" if each.instances else "")
            + (f", {each.replayed:,} replayed before" if each.replayed else ""),
            f"example: {each.example}"
            + (f" in {each.handler}" if each.handler else "")
            + (f": {each.error_message[:_TEXT_CHARS]}" if each.error_class else ""),
        ]
        click.echo(f"{each.count:>{width},}  {printable(lines[0])}")
        for line in lines[1:]:
            click.echo(" " * (width + 2) + printable(line))


def print_dead_letter(dead_letter: DeadLetterDetail, now_unix_ms: int) -> None:
    """Print all fields of one dead letter."""
    failed = dead_letter.failed_unix_ms
    pairs: list[tuple[str, object]] = [
        ("id", dead_letter.id),
        ("uid", dead_letter.uid),
        ("topic", f"{dead_letter.topic}, partition {dead_letter.partition}"),
        ("group", dead_letter.group),
        ("reason", dead_letter.reason),
        ("fingerprint", dead_letter.fingerprint),
        ("failed", None if failed is None else f"{age(now_unix_ms - failed)} ago"),
        ("on", dead_letter.instance),
        ("handler", dead_letter.handler),
        ("at", dead_letter.frame),
        ("attempts", dead_letter.attempts),
        ("crashes", dead_letter.crashes),
        ("replays", dead_letter.replays or None),
        ("moving to", dead_letter.moving_to),
        ("trace", dead_letter.trace_id),
        ("span", dead_letter.span_id),
        ("pid", None if dead_letter.pid is None else str(dead_letter.pid)),
        ("signal", dead_letter.signal),
        ("exit code", dead_letter.exit_code),
        ("memory", None if dead_letter.rss is None else f"{dead_letter.rss:,} bytes"),
        ("key", dead_letter.key),
        *((f"header {name}", value) for name, value in (dead_letter.headers or {}).items()),
        *dead_letter.other.items(),
        ("error", ": ".join(filter(None, (dead_letter.error_class, dead_letter.error_message)))),
    ]
    for name, value in pairs:
        if value is not None and value != "":
            shown = printable(value) if isinstance(value, bytes) else printable(str(value))
            click.echo(f"{printable(name) + ':':<13}{shown}")
    if dead_letter.traceback:
        click.echo()
        click.echo(printable(dead_letter.traceback, lines=True).rstrip())
    click.echo()
    if dead_letter.payload == MASK.encode():
        click.echo(f"payload: {MASK}")
    else:
        click.echo(f"payload, {len(dead_letter.payload):,} bytes:")
        click.echo(printable(dead_letter.payload, lines=True))


def print_audit(entries: Sequence[AuditEntry], now_unix_ms: int) -> None:
    """Print one line for each entry of the audit log."""
    listing(
        "AGE WHO COMMAND COUNTS DETAILS",
        entries,
        age=lambda each: ago(now_unix_ms, each.at_unix_ms),
        command=lambda each: each.command,
        counts=lambda each: _pairs(each.counts) or None,
        details=lambda each: "; ".join(filter(None, (_pairs(each.arguments), each.note))) or None,
    )


def _pairs(values: dict[str, int] | dict[str, object]) -> str:
    return ", ".join(
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in values.items()
    )
