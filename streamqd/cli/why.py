"""`streamqd why`: explain why a topic or a partition makes no progress."""

from __future__ import annotations

import time

import click

from streamqd.admin import why as admin
from streamqd.admin.owners import IN_WORDS, OwnerPeriod
from streamqd.admin.why import WaitCause
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import listing, print_unreadable, sentence
from streamqd.cli.session import Session
from streamqd.words import age

EXIT_HELD = 1


@click.command(short_help="Explain why a topic or partition makes no progress.")
@click.argument("place", metavar="TOPIC[/PARTITION[/GROUP]]")
@click.option("--owners", "with_owners", is_flag=True, help="List the last owners of a partition.")
@answering
def why(session: Session, *, place: str, with_owners: bool) -> CommandResult:
    """Explain why a topic or partition makes no progress.

    For a topic, the command prints one sentence for each group and cause, with the affected
    partitions. For a partition, it prints one sentence for each group, and further findings below
    it. To limit the output to one group, pass GROUP. The exit code is 1 if something blocks
    progress, otherwise 0.

    \b
    Examples:
      streamqd why orders
      streamqd why orders/3/billing
      streamqd why orders/3/billing --owners
    """
    topic, partition, group = _place(place)
    if with_owners and partition is None:
        raise click.UsageError("--owners needs TOPIC/PARTITION or TOPIC/PARTITION/GROUP")
    names = [each.name for each in session.settings.outboxes]
    answers = admin.answer(session.fleet, topic, partition, group, names, with_owners=with_owners)

    def show() -> None:
        print_unreadable(answers[0].unreadable)
        if partition is None:
            _show_topic(answers)
            return
        for each in answers:
            _show(each.causes, each.causes[0].sentence)
            if each.owners is not None:
                _show_owners(each.owners)

    moves = all(each.moves for each in answers)
    return CommandResult({"answers": answers}, show, 0 if moves else EXIT_HELD)


def _show(causes: list[WaitCause], text: str) -> None:
    first, *others = causes
    sentence(f"{text}.", hang=2)
    if first.advice:
        sentence(first.advice, "  -> ", 5)
    for other in others:
        sentence(f"also: {other.sentence}", "  ", 4)


def _show_topic(answers: list[admin.Answer]) -> None:
    """Print each cause of a group once. Causes that block progress come first."""
    found = {each.row.assignment: each for each in answers}
    first = (admin.AssignmentCause(each.row, each.causes[0]) for each in answers)
    for worst, text in sorted(admin.summarize(first), key=lambda each: each[0].cause.moves):
        _show(found[worst.row.assignment].causes, text)


def _show_owners(owners: list[OwnerPeriod]) -> None:
    if not owners:
        click.echo("  no owner is recorded")
        return
    listing(
        "SINCE OWNER EPOCH HELD END",
        owners,
        since=lambda row: _clock(row.since_unix_ms),
        held=lambda row: None if row.held_seconds is None else age(row.held_seconds * 1000),
        end=lambda row: IN_WORDS[row.end],
    )


def _clock(unix_ms: int | None) -> str | None:
    if unix_ms is None:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix_ms / 1000))


def _place(text: str) -> tuple[str, int | None, str | None]:
    topic, slash, rest = text.partition("/")
    if topic and not slash:
        return topic, None, None
    number, slash, group = rest.partition("/")
    right = number.isascii() and number.isdigit() and len(number) < 10
    if not topic or not right or bool(slash) != bool(group) or "/" in group:
        raise click.UsageError(f"{text} is not TOPIC, TOPIC/PARTITION or TOPIC/PARTITION/GROUP")
    return topic, int(number), group or None
