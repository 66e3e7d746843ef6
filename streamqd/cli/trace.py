"""`streamqd trace`: show the state of one message."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from streamqd.admin import as_json as plain
from streamqd.admin import trace as admin
from streamqd.admin.condition import describe_condition
from streamqd.cli.arguments import DIRECTORY
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import printable, sentence
from streamqd.cli.session import Session
from streamqd.errors import RequestRefusedError, SparkError
from streamqd.words import age, count


@click.command()
@click.argument("uid")
@click.option(
    "-a", "--archive", "folder", type=DIRECTORY,
    help="Also search the archive of `pipeline archive` in this directory or at this URL. Does not"
    " need Spark.",
)  # fmt: skip
@answering
def trace(session: Session, *, uid: str, folder: Path | str | None) -> CommandResult:
    """Show the state of one message in every group.

    UID is TOPIC/PARTITION/ID, as returned by the producer, passed to handlers as `message.uid`, and
    shown by `dlq` and `retry`. For a delayed send, pass the uid that the producer returned, even
    after the message was delivered. The uid of an outbox message is TOPIC/outbox/ID, as returned by
    `Outbox.send`. To find the message of a delayed send, the command searches the newest 10,000
    entries of its partition. To find an outbox message, it searches 20,000 entries of each
    partition after the time of the send, and the newest 10,000 entries of the topic.

    In each group, the message is unread, pending, running, waiting for its next attempt, a dead
    letter, or acknowledged. If nothing proves that the message was written, the output is "handled,
    or never written". To find copies, the command searches up to 20,000 later entries of each retry
    and dead-letter stream.

    The exit code is 0 if the message was found or may have been trimmed, 2 for an invalid uid, and
    8 if it was never written.

    \b
    Example:
      streamqd trace orders/3/1700000000000-0
    """
    name = admin.read_name(uid)
    found = admin.trace(session.fleet, name)
    looked = None
    if folder is not None and found.where != "delayed":
        place = (found.topic, found.partition, found.id)
        looked = find_in_archive(folder, *place, session.settings.archive.pairs)
    document = plain(found) | {"archive": plain(looked)}
    return CommandResult(document, lambda: _show(found, folder, looked))


def _show(found: admin.Trace, folder: Path | str | None, looked: Any) -> None:
    click.echo(printable(found.uid))
    for line in (*_describe_message(found), *_describe_archive(found, folder, looked)):
        sentence(line, "  ", 4)
    proven = bool(found.written or (looked is not None and looked.found))
    for each in found.groups:
        sentence(f"{each.group}: {_describe_group(found, each, proven=proven)}", hang=4)
        if each.state == admin.DEAD:
            sentence(f"streamqd dlq show {found.topic} {each.dead_letter_ids[-1]}", "  -> ", 5)
    if not found.groups and found.where != "delayed":
        click.echo(printable(f"no group reads {found.topic}/{found.partition}"))
    if not found.complete:
        click.echo(
            "only the first 20,000 later entries of a stream were searched, so there may be more"
        )


def find_in_archive(
    folder: Path | str, topic: str, partition: int, entry_id: str, options: Mapping[str, str]
) -> Any:
    """Search an archive for an entry. The result has the fields `file` and `found`.

    Raises RequestRefusedError if the archive cannot be read.
    """
    # Imported here because other commands do not need it.
    try:
        from streamqd.spark.pipelines.lookup import find_entry

        return find_entry(folder, topic, partition, entry_id, options)
    except SparkError as error:
        raise RequestRefusedError(f"the archive cannot be read: {error}") from None


def _describe_message(found: admin.Trace) -> list[str]:
    now = found.now_unix_ms
    if found.where == "delayed":
        due = "at a time that cannot be read" if found.due_unix_ms is None else _format_due(found)
        lines = [f"a delayed send: it is written to the partition {due}"]
        return lines + ([f"sent by an outbox as {found.outbox_uid}"] if found.outbox_uid else [])
    written = int(found.id.partition("-")[0])
    clock = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(min(written, now) / 1000))
    when = f"{clock} ({age(now - written)} ago)"
    entry = found.entry
    if entry is None and not found.written:
        gone = "trimmed" if found.where == "trimmed" else "deleted"
        return [f"an ID of {when}, not in the partition: {gone}, or never written"]
    if entry is None:
        gone = "trimmed from" if found.where == "trimmed" else "no longer in"
        return [f"written {when}, {gone} the partition"]
    key = "without a key" if entry.key is None else f"key {printable(entry.key)}"
    lines = [f"written {when}, {key}, {count(entry.payload_bytes, 'byte')}, in the partition"]
    if entry.schedule:
        tick = printable(entry.scheduled_for)
        lines.append(f"sent by schedule {printable(entry.schedule)}, tick {tick}")
    origins = {
        "written again by a replay of": entry.copy_of,
        "sent again by a replay of": entry.replay_of,
        "edited and sent from": entry.edited_from,
        "sent within the trace": entry.trace_id,
    }
    lines += [f"{words} {printable(value)}" for words, value in origins.items() if value]
    if found.send_id:
        lines.append(f"a delayed send until then: {found.topic}/{found.partition}/{found.send_id}")
    if found.outbox_uid:
        lines.append(f"sent by an outbox as {found.outbox_uid}")
    if found.replays:
        lines.append(f"replayed to every group as {', '.join(found.replays)}")
    return lines


def _format_due(found: admin.Trace) -> str:
    left = (found.due_unix_ms or 0) - found.now_unix_ms
    return f"in {age(left)}" if left > 0 else "now, because it is due"


def _describe_archive(found: admin.Trace, folder: Path | str | None, looked: Any) -> list[str]:
    if looked is not None and looked.file:
        if looked.found:
            return [f"archived in {looked.file}"]
        return [f"not in the archive (searched {looked.file})"]
    if looked is not None:
        return [f"not in the archive {folder}"]
    if found.archived:
        return ["archived (pass --archive DIR to find the file)"]
    return ["not archived yet"] if found.archived is False else []


def _describe_group(found: admin.Trace, each: admin.GroupTrace, *, proven: bool) -> str:
    """Return the state of one group as a clause.

    `proven` is True if it is certain that the message was written.
    """
    now, attempt = found.now_unix_ms, f"attempt {each.attempt}" if each.attempt else "its attempt"
    on = f" on {each.owner}" if each.owner else ""
    error = _error(each.error_class, each.error_message)
    crashes = replayed = ""
    if each.crashes:
        crashes = " after a crash" if each.crashes == 1 else f" after {each.crashes:,} crashes"
    if each.replays:
        replayed = ", replayed " + ("once" if each.replays == 1 else f"{each.replays:,} times")
    match each.state:
        case admin.RUNNING:
            run = age((each.running_seconds or 0.0) * 1000)
            return f"running for {run}{on}, {attempt}{crashes}{replayed}"
        case admin.PENDING:
            held = f" by {each.consumer}, another client" if each.consumer else on
            since = f"delivered {age(each.idle_ms)} ago"
            due = ""
            if each.due_unix_ms is not None:
                left = each.due_unix_ms - now
                due = f", which runs in {age(left)}" if left > 0 else ", due now"
            return f"pending, {since}{held}, {attempt}{due}{crashes}{replayed}"
        case admin.READY:
            return f"ready for {attempt}{crashes}{replayed}, not read yet{_describe_obstacle(each)}"
        case admin.DELAYED:
            left = (each.due_unix_ms or 0) - now
            due = f"due in {age(left)}" if left > 0 else "due now"
            return f"waiting for {attempt}, {due}{crashes}{replayed}{error}"
        case admin.DEAD:
            dead_letter = next(
                one for one in found.dead_letters if one.id == each.dead_letter_ids[-1]
            )
            died = dead_letter.failed_unix_ms
            ago = "" if died is None else f" {age(now - died)} ago"
            tries = (dead_letter.attempts or 0) + (dead_letter.crashes or 0)
            runs = f" after {count(tries, 'attempt')}" if tries else ""
            return (
                f"dead letter {dead_letter.id}{runs}{ago} ({dead_letter.reason}){replayed}{error}"
            )
        case admin.UNREAD:
            return f"unread{_describe_obstacle(each)}"
        case admin.DONE | admin.MISSING | admin.MISSED:
            return _describe_done(each.state, proven=proven) + replayed
        case admin.UNREADABLE:
            return f"unknown: {each.problem}"
        case _:
            return "not a dead letter, so not for this group"


def _describe_done(state: str, *, proven: bool) -> str:
    """Return the clause for a group that has no entry for the message."""
    if state == admin.DONE:
        return "acknowledged (no copy is left in Redis)"
    seen = "handled" if state == admin.MISSING else "removed unread"
    return f"{seen} (no copy is left in Redis)" if proven else f"{seen}, or never written"


def _describe_obstacle(each: admin.GroupTrace) -> str:
    """Return a clause about the state of the partition, which may explain why the message waits.

    The clause is '' if the state is unknown.
    """
    on = f" on {each.owner}" if each.owner else ""
    if each.condition == "unknown":
        return ""
    if each.condition == "running":
        return f", another message is running{on}"
    return f", {describe_condition(each.condition)}{on}"


def _error(error_class: str, message: str) -> str:
    # The module of the class is left out, because the dead letter shows it.
    short = error_class.rpartition(".")[2]
    if not short and not message:
        return ""
    return f": {short}: {message}" if short and message else f": {short or message}"
