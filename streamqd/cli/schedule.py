"""`streamqd schedule`: list, add, edit, pause, run and remove schedules in Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import click

from streamqd.admin import schedules
from streamqd.admin.schedules import ScheduleChanged, ScheduleRow
from streamqd.cli.arguments import (
    MOMENT,
    Command,
    Parsed,
    dry_run_option,
    page_options,
    unix_ms,
    yes_accepted,
    yes_option,
)
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import ago, confirm, listing, print_unreadable, printable, table
from streamqd.cli.session import Session
from streamqd.config import Schedule
from streamqd.config.setting import Kind, section_settings
from streamqd.errors import RedisUnavailableError
from streamqd.words import age, count

NEXT_MAX = 1_000  # maximum number of ticks that `next` prints


def _payload(value: object) -> Any:
    """Parse a payload as JSON. If it is not JSON, return the string itself."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(str(value), parse_constant=refuse)
    except (ValueError, RecursionError):
        return str(value)


PAYLOAD = Parsed("json", _payload)
_LETTERS = {"topic": ("-t",), "key": ("-k",), "partition": ("-p",)}
_TYPES: dict[Kind, Any] = {Kind.JSON: PAYLOAD, Kind.INTEGER: click.INT}


def _metavar(name: str, kind: Kind) -> str | None:
    """Return the metavar of a setting, or None if its help shows the choices instead."""
    known = {"topic": "TOPIC", "cron": "EXPRESSION", "at": "TIME", "timezone": "ZONE", "key": "KEY"}
    kinds = {Kind.DURATION: "DURATION", Kind.INTEGER: "N", Kind.JSON: "JSON"}
    return known.get(name) or kinds.get(kind) or ("allow|skip:GROUP" if name == "overlap" else None)


def _settings(*, topic_required: bool) -> Callable[[Command], Command]:
    """Add an option for each setting of a schedule except its name."""

    def add(command: Command) -> Command:
        for name, setting in reversed(section_settings(Schedule).items()):
            if name == "name":
                continue
            choices = click.Choice(setting.choices) if setting.choices else click.STRING
            command = click.option(
                *_LETTERS.get(name, ()), f"--{name.replace('_', '-')}", name,
                type=_TYPES.get(setting.kind, choices),
                metavar=_metavar(name, setting.kind),
                required=topic_required and name == "topic",
                help=setting.doc,
            )(command)  # fmt: skip
        return command

    return add


@click.group()
def schedule() -> None:
    """Show, add, edit, pause, run and remove schedules."""


@schedule.command("list")
@click.option(
    "-t", "--topic", metavar="TOPIC", help="Select only schedules that send to this topic."
)
@page_options(50)
@answering
def list_(session: Session, *, topic: str | None, limit: int, cursor: str) -> CommandResult:
    """Show schedules by name, with their state and next due time."""
    seen = schedules.list_schedules(session.store, topic, limit=limit, cursor=cursor)

    def show() -> None:
        print_unreadable(seen.unreadable)
        if not seen.rows:
            click.echo("no more schedules" if cursor else "no schedules")
            return
        _show_rows(seen.rows, seen.now_unix_ms)
        session.print_next_page(seen.cursor)

    return CommandResult(seen, show)


def _show_rows(rows: list[ScheduleRow], now_unix_ms: int) -> None:
    listing(
        "NAME TOPIC WHEN STATE DUE_IN LAST FIRED SKIPPED",
        rows,
        topic=lambda row: f"{row.topic}/{row.partition}",
        when=lambda row: row.when or "-",
        due_in=lambda row: _due_in(row.due_unix_ms, now_unix_ms),
        last=lambda row: row.last_tick or "-",
    )


def _due_in(due_unix_ms: int | None, now_unix_ms: int) -> str:
    return "-" if due_unix_ms is None else age(due_unix_ms - now_unix_ms)


@schedule.command()
@click.argument("name", metavar="SCHEDULE")
@answering
def show(session: Session, *, name: str) -> CommandResult:
    """Show all fields of one schedule."""
    seen = schedules.show(session.store, name)

    def print_it() -> None:
        row, now = seen.row, seen.now_unix_ms
        declared = ago(now, seen.declared_unix_ms)
        late = "" if row.late_ms is None else f", {age(row.late_ms)} late"
        pairs = [
            ("name", row.name),
            ("state", row.state),
            ("sends to", f"{row.topic}/{row.partition}"),
            ("origin", f"{row.origin}, fleet {row.fleet}"),
            ("declared", "-" if declared is None else f"{declared} ago"),
            ("due in", _due_in(row.due_unix_ms, now)),
            ("last tick", "-" if row.last_tick is None else f"{row.last_tick}{late}"),
            ("last message", seen.last_uid or "-"),
            ("fired", f"{row.fired:,}"),
            ("skipped", f"{row.skipped:,}"),
        ]
        for label, value in pairs:
            click.echo(f"{label + ':':<14}{printable(value)}")
        click.echo()
        if seen.problem is not None:
            click.echo(f"The specification cannot be read: {printable(seen.problem)}")
        for setting, value in (seen.specification or {}).items():
            if setting != "name" and value not in ("", "none"):
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                click.echo(f"{setting} = {printable(shown)}")

    return CommandResult(seen, print_it)


@schedule.command("next")
@click.argument("name", metavar="SCHEDULE")
@click.option(
    "--from", "begin", type=MOMENT, metavar="TIME",
    help="Show the ticks from this time on, such as 2026-10-25T00:00 (UTC). Default: now.",
)  # fmt: skip
@click.option(
    "--count", "number", type=click.IntRange(1, NEXT_MAX), default=10, show_default=True,
    help="The number of ticks to print.",
)  # fmt: skip
@answering
def next_(
    session: Session, *, name: str, begin: tuple[float, bool] | None, number: int
) -> CommandResult:
    """Show the next ticks of a schedule.

    \b
      streamqd schedule next nightly --from 2026-10-25T00:00 --count 5

    The command uses the schedule in Redis. If Redis has none, it uses the configuration file, even
    if no instance runs it. The ticks of a paused schedule are shown too.
    """
    configured = session.settings.schedules
    notes = []
    now_unix_ms = round(time.time() * 1000)
    try:
        since = None if begin is None else unix_ms(begin, now_unix_ms)
        seen = schedules.next_ticks(session.store, configured, name, since, number)
    except RedisUnavailableError:
        stated = next((each for each in configured if each.name == name), None)
        if stated is None:
            raise
        notes.append(
            "Redis does not answer, so these ticks are computed from the configuration file"
        )
        first = now_unix_ms + 1 if since is None else since
        seen = schedules.first_ticks(stated, first, number, "configuration")

    def print_it() -> None:
        if not seen.rows:
            click.echo("no further ticks")
            return
        table(("TICK", f"IN {seen.timezone}"), [(row.tick, row.local) for row in seen.rows])

    return CommandResult(seen, print_it, notes=notes)


# --- changing -------------------------------------------------------------------------------------


@schedule.command(short_help="Add a schedule that is not in a file.")
@click.argument("name", metavar="NAME")
@_settings(topic_required=True)
@dry_run_option
@yes_accepted
@answering
def add(session: Session, *, name: str, dry_run: bool, **given: Any) -> CommandResult:
    """Add a schedule that no configuration file declares.

    \b
      streamqd schedule add nightly --topic reports --cron "0 3 * * *"

    The topic must exist. Running the same command again changes nothing. The exit code is 8 if the
    name is in use.
    """
    stated = {key: value for key, value in given.items() if value is not None}
    fleet = session.settings.daemon.fleet
    done = schedules.add(session.store, fleet, {"name": name, **stated}, dry_run=dry_run)
    return _change_result(session, done, "add", "added", given["topic"], stated, name)


@schedule.command(short_help="Change a schedule that was added by `add`.")
@click.argument("name", metavar="SCHEDULE")
@_settings(topic_required=False)
@dry_run_option
@yes_accepted
@answering
def edit(session: Session, *, name: str, dry_run: bool, **given: Any) -> CommandResult:
    """Change a schedule that `streamqd schedule add` created.

    \b
      streamqd schedule edit nightly --cron "0 4 * * *"

    Settings without an option do not change. The new due time is the first tick after this command.
    If a configuration file declares the schedule, the exit code is 8. In this case, edit the file
    and reload instead.
    """
    stated = {key: value for key, value in given.items() if value is not None}
    if not stated:
        raise click.UsageError("nothing to change; pass an option such as --cron")
    topic = schedules.show(session.store, name).row.topic
    done = schedules.edit(session.store, name, stated, dry_run=dry_run)
    return _change_result(session, done, "edit", "changed", topic, stated, name)


@schedule.command(short_help="Pause schedules, which keep their due times.")
@click.argument("names", metavar="SCHEDULE...", nargs=-1, required=True)
@dry_run_option
@yes_accepted
@answering
def pause(session: Session, *, names: tuple[str, ...], dry_run: bool) -> CommandResult:
    """Pause schedules until you run `streamqd schedule resume`.

    A pause survives deploys, and each schedule keeps its due time. If one schedule cannot be
    paused, the command pauses none and exits with code 8.
    """
    done = schedules.pause(session.store, names, dry_run=dry_run)
    return _change_result_of_each(session, done, "pause", "paused")


@schedule.command(short_help="Resume paused schedules.")
@click.argument("names", metavar="SCHEDULE...", nargs=-1, required=True)
@dry_run_option
@yes_accepted
@answering
def resume(session: Session, *, names: tuple[str, ...], dry_run: bool) -> CommandResult:
    """Resume paused schedules.

    The `misfire` setting of a schedule controls which missed ticks are sent. If a schedule is
    inactive for another reason, the command resumes none and exits with code 8.
    """
    done = schedules.resume(session.store, names, dry_run=dry_run)
    return _change_result_of_each(session, done, "resume", "resumed")


@schedule.command(short_help="Send a message of a schedule now.")
@click.argument("name", metavar="SCHEDULE")
@dry_run_option
@yes_accepted
@answering
def run(session: Session, *, name: str, dry_run: bool) -> CommandResult:
    """Send a message of a schedule now.

    This works even while the schedule is paused, and does not change the due time. The
    x-scheduled-for header of the message contains the time of this command. The `overlap` setting
    is ignored.
    """
    done = schedules.run(session.store, name, dry_run=dry_run)
    if dry_run:
        text = f"would send a message of {name} to {done.topic}/{done.partition}"
    else:
        text = f"sent {done.uid}"
        session.record(done.topic, "schedule run", {"schedule": name}, {"sent": 1})
    return CommandResult(done, text)


@schedule.command(short_help="Remove schedules.")
@click.argument("names", metavar="SCHEDULE...", nargs=-1, required=True)
@dry_run_option
@yes_option
@answering
def remove(session: Session, *, names: tuple[str, ...], dry_run: bool, yes: bool) -> CommandResult:
    """Remove schedules and their counts.

    Sent messages are kept. You cannot remove a schedule that an instance declares. Remove it from
    the configuration and reload first. If you pass such a schedule, the command removes none and
    exits with code 8.
    """
    rows = schedules.find_removable(session.store, names)
    return _remove(session, rows, "remove", dry_run, yes)


@schedule.command(short_help="Remove schedules that no instance declares.")
@dry_run_option
@yes_option
@answering
def prune(session: Session, *, dry_run: bool, yes: bool) -> CommandResult:
    """Remove schedules that no instance declares.

    The command removes schedules that no instance has declared for 10 minutes, and schedules of
    deleted topics. It keeps paused schedules, and schedules that an operator added.
    """
    rows = schedules.find_prunable(session.store)
    return _remove(session, rows, "prune", dry_run, yes)


def _remove(
    session: Session, rows: list[ScheduleRow], command: str, dry_run: bool, yes: bool
) -> CommandResult:
    if dry_run:
        foretold = ScheduleChanged({row.name: "removed" for row in rows}, None, True)
        return CommandResult(foretold, lambda: _show_removed(rows))
    if rows:
        confirm(f"Remove {count(len(rows), 'schedule')} permanently?", yes)
    done = schedules.remove(session.store, [row.name for row in rows])
    topics = {row.name: row.topic for row in rows}
    _audit_each(session, topics, done.changed, command)
    return CommandResult(done, f"{count(len(done.changed), 'schedule')} removed")


def _show_removed(rows: list[ScheduleRow]) -> None:
    click.echo(f"would remove {count(len(rows), 'schedule')}")
    for row in rows:
        click.echo(f"{row.name} ({row.state})")


def _change_result(
    session: Session,
    done: ScheduleChanged,
    command: str,
    verb: str,
    topic: str,
    stated: dict[str, Any],
    name: str,
) -> CommandResult:
    if not done.changed:
        return CommandResult(done, f"{name} already has these settings, so nothing was changed")
    due = (
        "; no further ticks"
        if done.due_unix_ms is None
        else f"; due in {age(done.due_unix_ms - round(time.time() * 1000))}"
    )
    if done.dry_run:
        return CommandResult(done, f"{name} would be {verb}{due}")
    session.record(topic, f"schedule {command}", {"schedule": name, **stated}, {"changed": 1})
    return CommandResult(done, f"{name} {verb}{due}")


def _change_result_of_each(
    session: Session, done: ScheduleChanged, command: str, verb: str
) -> CommandResult:
    what = count(len(done.changed), "schedule")
    if done.dry_run:
        return CommandResult(done, f"{what} would be {verb}")
    topics = {name: schedules.show(session.store, name).row.topic for name in done.changed}
    _audit_each(session, topics, done.changed, command)
    return CommandResult(done, f"{what} {verb}")


def _audit_each(
    session: Session, topics: dict[str, str], names: Iterable[str], command: str
) -> None:
    """Record the command in the audit log of each topic, with one entry per topic."""
    by_topic: dict[str, list[str]] = {}
    for name in names:
        by_topic.setdefault(topics[name], []).append(name)
    for topic, some in by_topic.items():
        if topic:
            what = {"schedules": some}
            session.record(topic, f"schedule {command}", what, {"changed": len(some)})
