"""`streamqd why`: why a topic or a partition does not move."""

from __future__ import annotations

import click

from streamqd.admin import why as admin
from streamqd.admin.why import WaitCause
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import sentence, unreadable
from streamqd.cli.session import Session

EXIT_HELD = 1


@click.command(short_help="Explain why a topic or partition makes no progress.")
@click.argument("place", metavar="TOPIC[/PARTITION[/GROUP]]")
@answering
def why(session: Session, *, place: str) -> CommandResult:
    """Explain why a topic or partition makes no progress.

    For a topic, the command prints one sentence for each group and cause, with the affected
    partitions. For a partition, it prints one sentence for each group, or only for GROUP, and
    further findings below it. The exit code is 1 if something blocks progress, otherwise 0.

    \b
    Examples:
      streamqd why orders
      streamqd why orders/3/billing
    """
    topic, partition, group = _place(place)
    names = [each.name for each in session.settings.outboxes]
    answers = admin.answer(session.fleet, topic, partition, group, names)

    def show() -> None:
        unreadable(answers[0].unreadable)
        if partition is None:
            _show_topic(answers)
            return
        for each in answers:
            _show(each.causes, each.causes[0].sentence)

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
    found = {each.row.unit: each for each in answers}
    first = (admin.UnitCause(each.row, each.causes[0]) for each in answers)
    for worst, text in sorted(admin.summed_up(first), key=lambda each: each[0].cause.moves):
        _show(found[worst.row.unit].causes, text)


def _place(text: str) -> tuple[str, int | None, str | None]:
    topic, slash, rest = text.partition("/")
    if topic and not slash:
        return topic, None, None
    number, slash, group = rest.partition("/")
    right = number.isascii() and number.isdigit() and len(number) < 10
    if not topic or not right or bool(slash) != bool(group) or "/" in group:
        raise click.UsageError(f"{text} is not TOPIC, TOPIC/PARTITION or TOPIC/PARTITION/GROUP")
    return topic, int(number), group or None
