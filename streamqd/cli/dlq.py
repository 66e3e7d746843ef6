"""`streamqd dlq`: show, replay, purge and export dead letters."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from streamqd.admin import as_json as document_of
from streamqd.admin import audit, dead_letters, topics
from streamqd.admin.dead_letters import ReplayPlan, ReplayResult, Target
from streamqd.admin.dead_letters.passes import FAILED, STOPPED
from streamqd.admin.dead_letters.replay import Route
from streamqd.admin.messages import MessageFilter
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import DURATION, RATE, page_options, yes_option
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.dlq_choice import (
    ALL,
    EXIT_INTERRUPTED,
    IDS,
    Meter,
    any_set,
    build_filter,
    command_line,
    filter_options,
    interruptible,
    require_choice,
)
from streamqd.cli.dlq_view import print_audit, print_causes, print_dead_letter, print_rows
from streamqd.cli.output import (
    NO_MATCH,
    ago,
    apply_style,
    confirm,
    listing,
    page_document,
    print_unreadable,
    printable,
)
from streamqd.cli.session import NOT_AUDITED, Session
from streamqd.errors import RedisUnavailableError, RequestRefusedError, StreamqdError
from streamqd.words import count


@click.group()
def dlq() -> None:
    """Show, replay, export and delete dead letters."""


# --- showing --------------------------------------------------------------------------------------


@dlq.command("list")
@click.argument("topic", required=False)
@filter_options
@page_options(20)
@answering
def list_(
    session: Session, *, topic: str | None, limit: int, cursor: str, **filters: Any
) -> CommandResult:
    """Show the dead letters of a topic, newest first.

    Without TOPIC, the command shows the number of dead letters of each topic.
    """
    if topic is None:
        if any_set(filters):
            raise click.UsageError(
                "pass TOPIC, because the filters apply to the dead letters of one topic"
            )
        return _overview(session)
    choice = build_filter(session, topic, filters)
    message_list = dead_letters.messages(session.store, topic)
    seen = message_list.page(choice, limit=limit, cursor=cursor)

    def show() -> None:
        print_unreadable(seen.unreadable)
        if not seen.rows:
            click.echo(_describe_nothing(topic, filters, "no more" if cursor else "no"))
            return
        print_rows(seen.rows, seen.now_unix_ms)
        session.note(f"{count(seen.total, 'dead letter')} in {topic}")
        session.print_next_page(seen.cursor)

    document = page_document(seen, "total rows cursor unreadable")
    return CommandResult({"topic": topic} | document, show)


def _overview(session: Session) -> CommandResult:
    rows = dead_letters.overview(session.store)
    now = server_unix_ms(session.link)

    def show() -> None:
        print_unreadable([each for row in rows for each in row.unreadable])
        listing(
            "TOPIC DEAD_LETTERS NEWEST OLDEST",
            rows,
            dead_letters=lambda row: row.total,
            newest=lambda row: ago(now, row.newest_unix_ms),
            oldest=lambda row: ago(now, row.oldest_unix_ms),
        )

    return CommandResult({"rows": rows}, show if rows else "no dead letters")


@dlq.command()
@click.argument("topic")
@filter_options
@click.option(
    "-n", "--limit", "--newest", "newest", type=click.IntRange(1), metavar="N",
    help="Count only the newest N dead letters.",
)  # fmt: skip
@answering
def stats(session: Session, *, topic: str, newest: int | None, **filters: Any) -> CommandResult:
    """Count the dead letters of a topic by cause.

    Dead letters have the same fingerprint if the same handler raised the same exception at the same
    place in your code.
    """
    choice = build_filter(session, topic, filters)
    found = dead_letters.causes(session.store, topic, choice, last=newest)
    now = server_unix_ms(session.link)

    def show() -> None:
        print_unreadable(found.unreadable)
        if not found.causes:
            click.echo(_describe_nothing(topic, filters))
            return
        print_causes(found.causes, now)
        if found.others:
            session.note(f"{count(found.others, 'dead letter')} with other causes")
        if not found.complete:
            session.note(f"only the newest {found.looked_at:,} were counted")
        session.note(f"{found.looked_at:,} of {count(found.total, 'dead letter')} in {topic}")

    return CommandResult(found, show)


@dlq.command()
@click.argument("topic")
@click.argument("dead_letter_id", metavar="PARTITION:MS-SEQ")
@click.option("--mask", is_flag=True, help="Hide user data: payload, key, headers and error texts.")
@answering
def show(session: Session, *, topic: str, dead_letter_id: str, mask: bool) -> CommandResult:
    """Show all fields of one dead letter."""
    dead_letter = dead_letters.show(session.store, topic, dead_letter_id)
    now = server_unix_ms(session.link)
    shown = dead_letters.mask_dead_letter(dead_letter) if mask else dead_letter
    return CommandResult(shown, lambda: print_dead_letter(shown, now))


@dlq.command("audit")
@click.argument("topic")
@page_options(20)
@answering
def audit_(session: Session, *, topic: str, limit: int, cursor: str) -> CommandResult:
    """Show the audit log of a topic, latest entry first.

    The log records replays, purges and exports of dead letters, canceled retries and delayed sends,
    groups that were reset or deleted, growths of the topic, changes of its schedules, forgotten
    instances, and every change in the web console. When a topic is deleted, its log is deleted too,
    and the deletion becomes the first entry of a new log.
    """
    seen = audit.page(session.store, topic, limit=limit, cursor=cursor)
    if not seen.entries:
        if not cursor:
            topics.partition_count(session.store, topic)
        more = "more " if cursor else ""
        return CommandResult(seen, f"nothing {more}in the audit log of {topic}")
    now = server_unix_ms(session.link)

    def show() -> None:
        print_audit(seen.entries, now)
        session.print_next_page(seen.cursor)

    return CommandResult(seen, show)


def _describe_nothing(topic: str, filters: dict[str, Any], no: str = "no") -> str:
    """Return the sentence to print if no dead letter was found."""
    if any_set({name: value for name, value in filters.items() if name != "group"}):
        return NO_MATCH
    group = filters["group"]
    return f"{no} dead letters in {topic}" + (f" for {group}" if group else "")


# --- replaying ------------------------------------------------------------------------------------


@dlq.command()
@click.argument("topic")
@ALL
@IDS
@filter_options
@click.option(
    "--all-groups",
    is_flag=True,
    help="Send each message to every group of the topic, not only to its original group.",
)
@click.option(
    "--to-partition", type=click.IntRange(0), metavar="N", help="Send the messages to partition N."
)
@click.option(
    "--to-topic", metavar="TOPIC", help="Send the messages to all groups of another topic."
)
@click.option(
    "--rate",
    type=RATE,
    metavar="N/s",
    help="The maximum rate, such as 50/s. The messages are spread evenly.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    metavar="N",
    help="The maximum number of dead letters to replay.",
)
@click.option(
    "--max-replays", type=click.IntRange(1), default=dead_letters.MAX_REPLAYS, show_default=True,
    help="Skip dead letters that were already replayed this many times.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="Show the effect and possible problems, but change nothing."
)
@yes_option
@click.pass_context
@answering
def replay(
    session: Session,
    ctx: click.Context,
    *,
    topic: str,
    all_: bool,
    ids: tuple[str, ...],
    all_groups: bool,
    to_partition: int | None,
    to_topic: str | None,
    rate: float | None,
    limit: int | None,
    max_replays: int,
    dry_run: bool,
    yes: bool,
    **filters: Any,
) -> CommandResult | int:
    """Replay dead letters to their original groups.

    By default, only the group that dead-lettered a message receives it again, and its attempts
    start again at 1. Each dead letter is moved atomically, so it cannot be replayed twice. If a
    replay is interrupted, run it again. Messages that are dead-lettered during the replay are not
    included.
    """
    require_choice(ids, all_, any_set(filters), "--id PARTITION:MS-SEQ, a filter, or --all")
    if all_groups and to_topic is not None:
        raise click.UsageError(
            "--to-topic cannot be used with --all-groups; it sends to all groups of that topic"
        )
    target = Target(all_groups, to_partition, to_topic)
    rest = _given_options(
        ctx, "all_groups", "to_partition", "to_topic", "rate", "limit", "max_replays"
    )
    choice = build_filter(session, topic, filters, ids)
    # Refuse a missing target before the operator is asked to confirm.
    Route(session.store, topic, target)
    if dry_run:
        plan = dead_letters.plan(
            session.store,
            topic,
            choice,
            fleet=session.settings.daemon.fleet,
            target=target,
            max_replays=max_replays,
            limit=limit,
        )
        bound = _bound_until(choice, plan.until_unix_ms)
        again = command_line(session, "replay", plan.topic, bound, rest)
        document = document_of(plan) | {"command": again}
        return CommandResult(document, lambda: _show_plan(plan, again, limit))
    question = f"Replay {{}} of {{}}{_format_target(target)}?"
    if not ids and not _confirm(session, topic, choice, question, yes, "replayed"):
        return 0
    meter = Meter(session)
    with interruptible() as stop:
        done = dead_letters.replay(
            session.store,
            topic,
            choice,
            target=target,
            rate=rate,
            limit=limit,
            max_replays=max_replays,
            stop=stop,
            progress=meter,
        )
    meter.end()
    return _replay_result(session, done, choice, target, rest)


def _replay_result(
    session: Session, done: ReplayResult, choice: MessageFilter, target: Target, rest: list[str]
) -> CommandResult:
    """Return the result of a replay. If it was interrupted, include the command to continue."""
    replayed = count(done.replayed, "dead letter")
    lines = [
        f"{replayed} of {done.topic} replayed{_format_group(choice.group)}{_format_target(target)}"
    ]
    if done.missing:
        lines.append(f"{count(done.missing, 'dead letter')} had already been replayed or purged")
    notes = [] if done.audited else [NOT_AUDITED]
    code = 0
    error: StreamqdError | None = None
    if done.refused:
        notes.append(f"not replayed: {_format_reasons(done.refused)}")
        refused = count(sum(done.refused.values()), "dead letter")
        error = RequestRefusedError(f"{refused} not replayed, see above")
    if done.result in (STOPPED, FAILED):
        bound = _bound_until(choice, done.started_unix_ms + 1)
        again = command_line(session, "replay", done.topic, bound, rest)
        if done.unknown:
            notes.append(f"{count(done.unknown, 'dead letter')} may or may not have been replayed")
        notes.append(f"the others were not changed, continue with: {again}")
        code, error = _exit_code_and_error(done.result, f"interrupted: {done.error}")
    return CommandResult(done, lambda: click.echo("\n".join(lines)), code, notes, error)


def _exit_code_and_error(result: str, text: str) -> tuple[int, StreamqdError | None]:
    """Return the exit code and the error for work that is complete, was stopped, or failed."""
    error = RedisUnavailableError(text, sent=False) if result == FAILED else None
    return (EXIT_INTERRUPTED if result == STOPPED else 0), error


def _show_plan(plan: ReplayPlan, again: str, limit: int | None) -> None:
    if plan.dead_letters:
        matches = count(plan.dead_letters, "dead letter")
        click.echo(f"{matches} of {plan.topic} would be replayed to {plan.target}")
    elif not plan.refused:
        click.echo(NO_MATCH)
    if plan.refused:
        click.echo(f"not replayed: {_format_reasons(plan.refused)}")
    if not plan.dead_letters:
        return
    if limit == plan.dead_letters:
        click.echo("limited by --limit, oldest first in each partition")
    if plan.replayed_before:
        most = max(each.replays for each in plan.causes)
        click.echo(f"{plan.replayed_before:,} were replayed before, up to {most} times")
    click.echo()
    print_causes(plan.causes, plan.until_unix_ms)
    if plan.receivers:
        click.echo()
        listing(
            "GROUP DEAD_LETTERS PARTITIONS OWNED PAUSED UNCHANGED_WORKERS OWNERS",
            plan.receivers,
            unchanged_workers=lambda row: row.same_worker,
            owners=lambda row: ", ".join(row.owners) or None,
        )
    click.echo()
    for note in plan.notes:
        click.echo(apply_style(f"! {printable(note)}", "warn"))
    click.echo(f"to replay them, run: {again}")


# --- deleting and exporting -----------------------------------------------------------------------


@dlq.command()
@click.argument("topic")
@ALL
@IDS
@click.option(
    "--older-than",
    type=DURATION,
    metavar="DURATION",
    help="Select only dead letters that are older than this, such as 7d.",
)
@filter_options
@click.option(
    "--unarchived", is_flag=True,
    help='Delete dead letters even if archive = "required" is set and they are not archived yet.',
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="Count the dead letters by cause, but delete nothing."
)
@yes_option
@answering
def purge(
    session: Session,
    *,
    topic: str,
    all_: bool,
    ids: tuple[str, ...],
    older_than: float | None,
    unarchived: bool,
    dry_run: bool,
    yes: bool,
    **filters: Any,
) -> CommandResult | int:
    """Delete dead letters permanently.

    If the topic has archive = "required", dead letters that `streamqd pipeline archive` has not
    stored are kept, and the exit code is 8.
    """
    if ids and older_than is not None:
        raise click.UsageError("--id cannot be used with --older-than; pass one of them")
    ways = "--id PARTITION:MS-SEQ, --older-than DURATION, a filter, or --all"
    require_choice(ids, all_, older_than is not None or any_set(filters), ways)
    choice = build_filter(session, topic, filters, ids, older_than)
    if dry_run:
        found = dead_letters.causes(session.store, topic, choice)
        now = server_unix_ms(session.link)
        text = f"{count(found.looked_at, 'dead letter')} of {topic} would be deleted permanently"

        def show() -> None:
            print_unreadable(found.unreadable)
            if not found.causes:
                click.echo(NO_MATCH)
                return
            click.echo(text)
            click.echo()
            print_causes(found.causes, now)

        return CommandResult(found, show)
    if not _confirm(session, topic, choice, "Delete {} of {} permanently?", yes, "purged"):
        return 0
    meter = Meter(session)
    with interruptible() as stop:
        done = dead_letters.purge(
            session.store,
            topic,
            choice,
            configured=session.settings.topics.get(topic),
            unarchived=unarchived,
            stop=stop,
            progress=meter,
        )
    meter.end()
    notes = [] if done.audited else [NOT_AUDITED]
    if done.unknown:
        notes.append(f"{count(done.unknown, 'dead letter')} may or may not have been purged")
    text = f"{count(done.purged, 'dead letter')} of {topic} purged{_format_group(choice.group)}"
    code, error = _exit_code_and_error(
        done.result, f"interrupted: {done.error} (the others are kept)"
    )
    if done.unarchived and not (code or error):
        error = RequestRefusedError(
            f"{count(done.unarchived, 'dead letter')} of {topic} not archived yet, so not purged;"
            " run `streamqd pipeline archive`, or pass --unarchived"
        )
    return CommandResult(done, text, code, notes, error)


@dlq.command()
@click.argument("topic")
@IDS
@filter_options
@click.option(
    "-o", "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="The output file, which is replaced only when the export is complete. Default: standard"
    " output.",
)  # fmt: skip
@yes_option
@answering
def export(
    session: Session,
    *,
    topic: str,
    ids: tuple[str, ...],
    out: Path | None,
    yes: bool,
    **filters: Any,
) -> CommandResult | int:
    """Write dead letters with all fields as JSON lines.

    Without a filter, the command writes all dead letters of the topic. None of them is removed. A
    field that is not valid UTF-8 is written as `{"base64": …}`. Without --out, standard output
    contains only the exported lines. With --out, you can pass --json to print the result of the
    command.
    """
    if out is not None and out.exists():
        confirm(f"{out} exists. Replace it?", yes)
    with interruptible() as stop:
        choice = build_filter(session, topic, filters, ids)
        work = dead_letters.Export(session.store, topic, choice, stop=stop)
        with _open_output(out) as file:
            for line in work.lines():
                file.write(line + "\n")
            if out is not None and stop():
                raise KeyboardInterrupt
        done = work.finish(f"to {out}" if out is not None else "")
    text = f"{count(done.exported, 'dead letter')} of {topic} exported"
    notes = [] if done.audited else [NOT_AUDITED]
    code = EXIT_INTERRUPTED if done.result == STOPPED else 0
    if out is not None:
        return CommandResult(done, lambda: session.note(f"{text} to {out}"), code, notes)
    for note in (text, *notes):
        session.note(note)
    return code


@contextlib.contextmanager
def _open_output(path: Path | None) -> Iterator[IO[str]]:
    """Open an output file, which appears under its name only when it is complete.

    If `path` is None, use standard output. Raises RequestRefusedError if the file cannot be
    written.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise RequestRefusedError(f"{path} cannot be written: {error.strerror}") from None
    part = Path(name)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise RequestRefusedError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


# --- helpers --------------------------------------------------------------------------------------


def _confirm(
    session: Session, topic: str, choice: MessageFilter, question: str, yes: bool, past: str
) -> bool:
    """Ask the user for confirmation. Return False if no dead letter matches.

    In this case, a message is printed. With --json, the function returns True even if nothing
    matches, so that the caller prints an empty result. Raises RequestRefusedError if the user
    declines.
    """
    if yes:
        return True
    found = dead_letters.count(session.store, topic, choice)
    if found:
        confirm(
            question.format(count(found, "dead letter"), topic + _format_group(choice.group)), yes
        )
    elif not click.get_current_context().params["as_json"]:
        click.echo(f"{NO_MATCH}, nothing {past}")
        return False
    return True


def _given_options(ctx: click.Context, *names: str) -> list[str]:
    """Return the options that the user passed, as arguments for another command line."""
    found = []
    for name in names:
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[name]
        found.append("--" + name.replace("_", "-"))
        if value is not True:
            found.append(f"{value:g}/s" if name == "rate" else str(value))
    return found


def _bound_until(choice: MessageFilter, until_unix_ms: int) -> MessageFilter:
    """Return a copy of the filter that excludes messages dead-lettered at this time or later.

    A filter with IDs is returned unchanged.
    """
    if choice.ids:
        return choice
    until = choice.until_unix_ms
    bound = until_unix_ms if until is None else min(until, until_unix_ms)
    return dataclasses.replace(choice, until_unix_ms=bound)


def _format_reasons(refused: dict[str, int]) -> str:
    return "; ".join(f"{count(number, 'dead letter')}: {why}" for why, number in refused.items())


def _format_group(group: str | None) -> str:
    return f" for {group}" if group else ""


def _format_target(target: Target) -> str:
    return "" if target == dead_letters.DEFAULT_TARGET else f" to {target}"
