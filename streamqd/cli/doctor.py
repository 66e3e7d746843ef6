"""`streamqd doctor`: find problems and print their fixes."""

from __future__ import annotations

import click

from streamqd.admin import diagnosis, topics_settings
from streamqd.admin.checks import Check, Finding
from streamqd.admin.diagnosis import DiagnosisReport
from streamqd.admin.diagnosis.facts import DiagnosisFacts
from streamqd.admin.diagnosis.stream import StreamReport, examine
from streamqd.cli.arguments import DURATION, json_option
from streamqd.cli.command import CommandResult, answering, connected
from streamqd.cli.output import (
    LEVELS,
    ago,
    apply_style,
    emit,
    json_text,
    listing,
    print_unreadable,
    printable,
    table,
)
from streamqd.cli.session import Session
from streamqd.errors import RedisUnavailableError
from streamqd.outbox.inspection import inspect_table
from streamqd.words import age, count, memory

EXIT_PROBLEMS = 1
EXIT_REDIS = 4
_NEEDED_BY = {
    "retention": "retention",
    "settings": "no retention",
    "empty": "-",
}


@click.group(invoke_without_command=True)
@click.option(
    "--only",
    metavar="CHECK",
    multiple=True,
    help="Run only this check, or all checks in this area. May be repeated.",
)
@click.option(
    "--unit",
    default="",
    metavar="UNIT",
    help="The daemon's systemd unit, or a path to the unit file. Default: streamqd.service.",
)
@click.option("--list", "as_list", is_flag=True, help="List the checks without running them.")
@json_option
@click.pass_context
@connected
def doctor(
    session: Session,
    ctx: click.Context,
    *,
    only: tuple[str, ...],
    unit: str,
    as_list: bool,
    as_json: bool,
) -> int | None:
    """Find problems and print their fixes.

    Without a subcommand, doctor runs all checks. To list them, pass --list. The checks change
    nothing, but they also connect to the databases of the configured outboxes. The exit code is 1
    if doctor finds a problem or a warning, and 4 if Redis does not reply.
    """
    if ctx.invoked_subcommand is not None:
        if only or unit or as_list or as_json:
            name = ctx.invoked_subcommand
            raise click.UsageError(
                f"options must follow the subcommand; run `streamqd doctor {name} --help`"
            )
        return None
    checks = diagnosis.select_checks(only)
    if as_list:
        _list(checks, as_json)
        return 0
    code = 0
    try:
        report = diagnosis.examine(
            session.link,
            session.settings,
            checks,
            unit=unit,
            read_table=lambda outbox: inspect_table(
                outbox, session.settings.daemon.max_message_bytes
            ),
        )
    except RedisUnavailableError as unavailable:
        error = session.explain(unavailable)
        # A problem on this host may be the reason why Redis cannot be reached.
        report = diagnosis.examine_without_redis(session.settings, checks, str(error), unit=unit)
        click.echo(f"Error: {error}", err=True)
        code = EXIT_REDIS
    if as_json:
        emit(report)
    else:
        _report(report)
    return code or (0 if report.ok else EXIT_PROBLEMS)


def _list(checks: list[Check[DiagnosisFacts]], as_json: bool) -> None:
    if as_json:
        emit(
            [
                {
                    "check": each.id,
                    "area": each.area,
                    "severity": str(each.severity),
                    "looks_for": each.title,
                    "cost": each.cost,
                }
                for each in checks
            ]
        )
    else:
        table(("CHECK", "SEVERITY", "FINDS"), [(c.id, c.severity, c.title) for c in checks])


def _report(report: DiagnosisReport) -> None:
    area = ""
    for each in report.findings:
        if each.area != area:
            area = each.area
            click.echo(f"{area}:")
        _finding(each)
    for text in report.unseen:
        click.echo(f"not checked: {printable(text)}")
    serious = [each for each in report.findings if each.severity == "problem"]
    warned = [each for each in report.findings if each.severity == "warning"]
    summary = f"{count(len(serious), 'problem')}, {count(len(warned), 'warning')}"
    rest = "; some checks did not run" if report.unseen else ""
    click.echo(f"{count(len(report.checks), 'check')}: {summary}{rest}")


def _finding(found: Finding) -> None:
    severity = apply_style(str(found.severity), LEVELS.get(str(found.severity), ""))
    click.echo(f"  {severity} {found.check}: {printable(found.text)}")
    click.echo(f"    fix: {printable(found.fix)}")
    seen = "  ".join(f"{name}={json_text(value)}" for name, value in found.evidence.items())
    if seen:
        click.echo(f"    seen: {printable(seen)}")


@doctor.command()
@click.argument("topic")
@click.option(
    "--abandoned-after",
    type=DURATION,
    default="10m",
    show_default=True,
    help="The time after which a group with messages, but without an owner and a reader, is"
    " reported.",
)
@answering
def stream(session: Session, *, topic: str, abandoned_after: float) -> CommandResult:
    """Show why messages of TOPIC are still in memory.

    The exit code is 1 if there is a problem. These are the columns:

    \b
    - NEEDED BY: group that still needs messages that would otherwise be trimmed.
      `@archive` means that the messages are not archived yet, and `retention`
      that the limits of the retention keep them.
    - NEEDED: number of messages from the oldest needed message on.
    - SINCE: age of the oldest needed message.
    """
    stated = session.settings.topics.get(topic)
    expected = session.settings.message_groups(topic)
    found = examine(session.store, topic, stated, expected, abandoned_after)
    code = EXIT_PROBLEMS if found.problems or found.unreadable else 0
    return CommandResult(found, lambda: _show(found), code)


def _show(found: StreamReport) -> None:
    print_unreadable(found.unreadable)
    bounds = ", ".join(topics_settings.lines({"retention": found.retention}))
    click.echo(f"{found.topic}: {count(found.messages, 'message')}, {memory(found.bytes)}")
    click.echo(bounds or "no retention: acknowledged messages are kept")
    if found.dead_letters or found.retry_bytes:
        dead = f"{count(found.dead_letters, 'dead letter')}, {memory(found.dead_letter_bytes)}"
        click.echo(f"in addition: {dead}; retry streams, {memory(found.retry_bytes)}")
    if found.archive == "required":
        click.echo("nothing is trimmed before it is archived")
    click.echo()
    now = found.now_unix_ms
    listing(
        "PARTITION MESSAGES MEMORY OLDEST NEEDED SINCE NEEDED_BY",
        found.partitions,
        partition=lambda row: str(row.partition),
        memory=lambda row: memory(row.bytes),
        oldest=lambda row: ago(now, row.oldest_unix_ms),
        needed=lambda row: "over 100,000" if row.needed is None else f"{row.needed:,}",
        since=lambda row: ago(now, row.since_unix_ms),
        needed_by=lambda row: _NEEDED_BY.get(row.kept_by, row.holder),
    )
    if any(row.groups for row in found.partitions):
        click.echo()
        _show_groups(found)
    for problem in found.problems:
        click.echo(f"\npartition {problem.partition}: {problem.text}\n  {problem.advice}")


def _show_groups(found: StreamReport) -> None:
    def last_read(seconds: float | None) -> str:
        return "never" if seconds is None else f"{age(seconds * 1000)} ago"

    table(
        ("PARTITION", "GROUP", "OWNER", "UNREAD", "PENDING", "OLDEST", "LAST READ", "DROPPED"),
        [
            (
                *(str(row.partition), group.group, group.owner or "-", group.unread, group.pending),
                *(ago(found.now_unix_ms, group.needs_unix_ms), last_read(group.idle_seconds)),
                group.dropped,
            )
            for row in found.partitions
            for group in row.groups
        ],
    )
