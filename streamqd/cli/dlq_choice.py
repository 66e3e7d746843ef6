"""Convert the options of the `dlq` commands to a filter, and a filter back to a command line."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import click

from streamqd.admin import dead_letters, groups
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import FINGERPRINT, HEADER, MOMENT, Command, unix_ms
from streamqd.cli.session import Session
from streamqd.dead_letter import REASONS

EXIT_INTERRUPTED = 128 + signal.SIGINT
_METER_SECONDS = 0.5

ALL = click.option("--all", "all_", is_flag=True, help="Select all dead letters that exist now.")
IDS = click.option(
    "--id",
    "ids",
    metavar="PARTITION:MS-SEQ",
    multiple=True,
    help="Select only this dead letter. May be repeated.",
)


_FILTERS = (
    click.option("-g", "--group", help="Select only dead letters of this group."),
    click.option(
        "--fingerprint", metavar="HEX", type=FINGERPRINT,
        help="Select only dead letters with this fingerprint, which `dlq stats` shows.",
    ),
    click.option(
        "--class", "error_class", metavar="NAME",
        help="Select only dead letters with this exception class.",
    ),
    click.option(
        "--reason", type=click.Choice(REASONS), metavar="WORD",
        help="Select only dead letters with this reason.",
    ),
    click.option("-k", "--key", help="Select only messages with this key."),
    click.option(
        "-H", "--header", "headers", metavar="NAME=VALUE", type=HEADER, multiple=True,
        help="Select only messages with this header. May be repeated.",
    ),
    click.option(
        "--since", type=MOMENT, metavar="TIME",
        help="Select only dead letters since this time, such as 12h (12 hours ago) or"
        " 2026-11-21T08:30 (UTC).",
    ),
    click.option(
        "--until", type=MOMENT, metavar="TIME", help="Select only dead letters before this time."
    ),
)  # fmt: skip


def filter_options(command: Command) -> Command:
    """Add the filter options for dead letters to a command."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def build_filter(
    session: Session,
    topic: str,
    filters: Mapping[str, Any],
    ids: Sequence[str] = (),
    older_than: float | None = None,
) -> MessageFilter:
    """Return the filter that the options describe. Relative times are based on the clock of Redis.

    Raises RequestRefusedError if the group neither reads the topic nor has dead letters in it.
    """
    now = server_unix_ms(session.link)

    since, until = (
        None if filters[name] is None else unix_ms(filters[name], now)
        for name in ("since", "until")
    )
    if older_than is not None:
        oldest = round(now - older_than * 1000)
        until = oldest if until is None else min(until, oldest)
    if since is not None and until is not None and since >= until:
        raise click.UsageError("no dead letter can match: --since must be before --until")
    _check_group(session, topic, filters["group"])
    key = filters["key"]
    return MessageFilter(
        ids=tuple(ids),
        group=filters["group"],
        fingerprint=filters["fingerprint"],
        error_class=filters["error_class"],
        reason=filters["reason"],
        key=None if key is None else key.encode("utf-8", "surrogateescape"),
        headers=tuple(filters["headers"]),
        since_unix_ms=since,
        until_unix_ms=until,
    )


def require_choice(ids: Sequence[str], all_: bool, others: bool, ways: str) -> None:
    """Raise UsageError unless dead letters are selected by ID, with --all, or with a filter.

    `others` is True if a filter is set, and `ways` lists the possible options for the error
    message. IDs and --all cannot be combined.
    """
    if ids and all_:
        raise click.UsageError("--id cannot be used with --all")
    if not ids and not all_ and not others:
        raise click.UsageError(f"pass {ways}")


def _check_group(session: Session, topic: str, group: str | None) -> None:
    if group is None or group in groups.names(session.store, topic):
        return
    if not dead_letters.count(session.store, topic, MessageFilter(group=group)):
        # Raises RequestRefusedError for an unknown group.
        groups.partition_count(session.store, topic, group)


def any_set(filters: Mapping[str, Any]) -> bool:
    """Return True if any filter is set."""
    return any(value not in (None, ()) for value in filters.values())


def command_line(
    session: Session, verb: str, topic: str, choice: MessageFilter, rest: Sequence[str]
) -> str:
    """Return a command line that selects the same dead letters, for a user to copy.

    `rest` contains further arguments for the end of the command line.
    """
    args = ["streamqd"]
    if session.config_path is not None:
        args += ["--config", str(session.config_path)]
    args += ["dlq", verb, topic]
    for dead_letter_id in choice.ids:
        args += ["--id", dead_letter_id]
    if not choice.has_filters or (choice == MessageFilter(until_unix_ms=choice.until_unix_ms)):
        args.append("--all")
    texts = {
        "--group": choice.group,
        "--fingerprint": choice.fingerprint,
        "--class": choice.error_class,
        "--reason": choice.reason,
        "--key": None if choice.key is None else choice.key.decode("utf-8", "surrogateescape"),
        "--since": _instant(choice.since_unix_ms),
        "--until": _instant(choice.until_unix_ms),
    }
    for option, text in texts.items():
        if text is not None:
            args += [option, text]
    for name, value in choice.headers:
        args += ["--header", f"{name}={value}"]
    return shlex.join([*args, *rest])


def _instant(unix_ms: int | None) -> str | None:
    if unix_ms is None:
        return None
    found = dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Stop after the current batch at the first Ctrl-C, and immediately at the second.

    Yields a function that returns True if the work should stop.
    """
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        # Bypass the buffer, because the signal may have interrupted a write to it.
        os.write(sys.stderr.fileno(), b"\nstopping after this batch (press again to stop now)\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: stopping
    finally:
        signal.signal(signal.SIGINT, before)


class Meter:
    """Counts dead letters on a terminal while they are being replayed or purged."""

    def __init__(self, session: Session) -> None:
        self._shown = sys.stderr.isatty() and not session.quiet
        self._count = 0
        self._next = time.monotonic() + _METER_SECONDS

    def __call__(self, count: int) -> None:
        """Add a number to the count."""
        self._count += count
        if self._shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + _METER_SECONDS
            click.echo(f"\r{self._count:,} dead letters …", nl=False, err=True)

    def end(self) -> None:
        """Clear the line for further output."""
        if self._shown:
            click.echo("\r" + " " * 30 + "\r", nl=False, err=True)
