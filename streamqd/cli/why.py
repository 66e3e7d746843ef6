"""`streamqd why`: why a topic or a partition does not move."""

from __future__ import annotations

import math

import click

from streamqd.admin import why as admin
from streamqd.admin.why import WaitCause
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import sentence, unreadable
from streamqd.cli.session import Session
from streamqd.words import spans

EXIT_HELD = 1


@click.command(short_help="Say why a topic or a partition does not move.")
@click.argument("place", metavar="TOPIC[/PARTITION[/GROUP]]")
@answering
def why(session: Session, *, place: str) -> CommandResult:
    """Say why TOPIC, or one partition of it, does not move, and what to do about it.

    Of a topic one sentence for each group and cause, which names the partitions that share it. Of a
    partition one sentence for each group, or for GROUP alone; what else was found stands below it.
    Exit code 0: all moves, or nothing waits; 1: something holds it.

    \b
    Example:
      streamqd why orders
      streamqd why orders/3/billing
    """
    topic, partition, group = _place(place)
    daemon = session.settings.daemon
    answers = admin.answer(
        session.store, daemon.fleet, topic, partition, group, stale=daemon.lease_ttl
    )

    def show() -> None:
        if partition is None:
            _show_topic(answers)
            return
        unreadable(answers[0].unreadable)
        for each in answers:
            _show(each.causes, each.causes[0].sentence)

    return CommandResult(answers, show, 0 if all(each.moves for each in answers) else EXIT_HELD)


def _show(causes: list[WaitCause], said: str) -> None:
    first, *others = causes
    sentence(f"{said}.", hang=2)
    if first.advice:
        sentence(first.advice, "  -> ", 5)
    for other in others:
        sentence(f"also: {other.sentence}", "  ", 4)


def _show_topic(answers: list[admin.Answer]) -> None:
    """One cause of one group once, told of the partition that has waited for longest."""
    alike: dict[tuple[str, str], list[admin.Answer]] = {}
    for each in answers:
        alike.setdefault((each.group, each.causes[0].word), []).append(each)
    # What holds something comes first.
    for some in sorted(alike.values(), key=lambda found: found[0].moves):
        worst = min(some, key=lambda each: each.oldest_unix_ms or math.inf)
        first = worst.causes[0]
        said, same = first.sentence, [each.partition for each in some if each is not worst]
        if first.word == "idle" and same:
            where = spans(each.partition for each in some)
            said = f"nothing waits in {where} of {worst.topic}/{worst.group}"
        elif first.word != "stopped" and same:
            said += f"; the same in {spans(same)}"
        _show(worst.causes, said)


def _place(text: str) -> tuple[str, int | None, str | None]:
    topic, slash, rest = text.partition("/")
    if topic and not slash:
        return topic, None, None
    number, slash, group = rest.partition("/")
    right = number.isascii() and number.isdigit() and len(number) < 10
    if not topic or not right or bool(slash) != bool(group) or "/" in group:
        raise click.UsageError(
            f"{text}: write TOPIC, TOPIC/PARTITION, such as access/3, or access/3/hits"
        )
    return topic, int(number), group or None
