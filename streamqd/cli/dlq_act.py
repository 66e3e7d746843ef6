"""`streamqd dlq replay` and `purge`: what changes dead letters."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from streamqd.admin import as_json as document
from streamqd.admin import dead_letters
from streamqd.admin.dead_letters import DeadLetterFilter, ReplayPlan, ReplayResult, Target
from streamqd.admin.dead_letters.passes import FAILED, STOPPED
from streamqd.admin.dead_letters.replay import Route
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.arguments import Duration, json_option, yes_option
from streamqd.cli.deeds import NOT_AUDITED
from streamqd.cli.dlq_choice import (
    ALL,
    EXIT_INTERRUPTED,
    IDS,
    NO_MATCH,
    Meter,
    check_group,
    chosen,
    command_line,
    filter_options,
    interruptible,
    require_choice,
    stated,
)
from streamqd.cli.dlq_view import print_causes
from streamqd.cli.output import confirm, count, emit, printable, styled, table
from streamqd.cli.session import Session, pass_session
from streamqd.errors import RedisUnavailable, Refused
from streamqd.store.client import Connection


class RateParameter(click.ParamType[float]):
    """So many a second: `50` or `50/s`."""

    name = "rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read one."""
        try:
            found = float(str(value).removesuffix("/s"))
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            self.fail(f"{value!r} is not a rate: write so many a second, as 50/s", param, ctx)
        return found


@click.command()
@click.argument("topic")
@ALL
@IDS
@filter_options
@click.option("--everyone", is_flag=True, help="To every group of the topic, not only to its own.")
@click.option("--partition", type=click.IntRange(0), metavar="N", help="To this partition.")
@click.option("--to-topic", metavar="TOPIC", help="To all groups of another topic.")
@click.option(
    "--rate", type=RateParameter(), metavar="N/s", help="At most so many a second, evenly."
)
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Stop after so many.")
@click.option(
    "--max-replays", type=click.IntRange(1), default=dead_letters.MAX_REPLAYS, show_default=True,
    help="Leave letters that were replayed so often already.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would happen, and whether it is wise.")
@yes_option
@json_option
@click.pass_context
@pass_session
def replay(
    session: Session,
    ctx: click.Context,
    /,
    topic: str,
    all_: bool,
    ids: tuple[str, ...],
    everyone: bool,
    partition: int | None,
    to_topic: str | None,
    rate: float | None,
    limit: int | None,
    max_replays: int,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> int:
    """Bring letters back, to the groups that they died in.

    Their attempts begin again at 1, and no other group sees them. Each letter moves in one step and
    cannot be replayed twice. Letters that die meanwhile are not replayed again. An interrupted
    replay can be run again.
    """
    require_choice(ids, all_, stated(filters), "--id PARTITION:MS-SEQ, a filter, or --all")
    if everyone and to_topic is not None:
        raise click.UsageError("--to-topic goes to every group there: leave --everyone out")
    target = Target(everyone, partition, to_topic)
    rest = _said(ctx, "everyone", "partition", "to_topic", "rate", "limit", "max_replays")
    with session.link() as link:
        choice = chosen(link, filters, ids)
        check_group(session, link, topic, choice)
        # A target that is not there is refused before anybody is asked.
        Route(link, session.keys, topic, target)
        if dry_run:
            plan = dead_letters.plan(
                *(link, session.keys, topic, choice),
                fleet=session.settings.daemon.fleet,
                target=target,
                max_replays=max_replays,
                limit=limit,
            )
            _print_plan(session, plan, choice, rest, limit, as_json)
            return 0
        if not ids and _ask(
            link,
            session,
            topic,
            choice,
            f"Replay {{}} of {{}}{_to(target)}?",
            yes,
            "replayed",
            as_json,
        ):
            return 0
        meter = Meter(session)
        with interruptible() as stop:
            done = dead_letters.replay(
                *(link, session.keys, topic, choice),
                target=target,
                rate=rate,
                limit=limit,
                max_replays=max_replays,
                stop=stop,
                progress=meter,
            )
        meter.end()
    return _told(session, done, choice, target, rest, as_json)


def _told(
    session: Session,
    done: ReplayResult,
    choice: DeadLetterFilter,
    target: Target,
    rest: list[str],
    as_json: bool,
) -> int:
    """Print what a replay did; return the exit code, or raise what it ended by."""
    if as_json:
        emit(done)
    else:
        letters = count(done.replayed, "dead letter")
        click.echo(f"{letters} of {done.topic} replayed{_for(choice.group)}{_to(target)}")
        if done.gone:
            click.echo(f"{count(done.gone, 'letter')} had been replayed or purged meanwhile")
    if not done.audited:
        session.note(NOT_AUDITED)
    if done.refused:
        session.note(f"not replayed: {_reasons(done.refused)}")
    if done.ended in (STOPPED, FAILED):
        bound = _bounded(choice, done.began_unix_ms + 1)
        again = command_line(session, "replay", done.topic, bound, rest)
        if done.unknown:
            session.note(f"{count(done.unknown, 'letter')} may have been replayed or not")
        session.note(f"the others were not touched; go on with: {again}")
        if done.ended == STOPPED:
            return EXIT_INTERRUPTED
        raise RedisUnavailable(f"interrupted: {done.error}", sent=False)
    if done.refused:
        raise Refused(f"{count(sum(done.refused.values()), 'letter')} not replayed, see above")
    return 0


def _print_plan(
    session: Session,
    plan: ReplayPlan,
    choice: DeadLetterFilter,
    rest: list[str],
    limit: int | None,
    as_json: bool,
) -> None:
    bound = _bounded(choice, plan.until_unix_ms)
    again = command_line(session, "replay", plan.topic, bound, rest)
    if as_json:
        emit(document(plan) | {"command": again})
        return
    if plan.letters:
        letters = count(plan.letters, "dead letter")
        click.echo(f"{letters} of {plan.topic} would go to {plan.target}")
    elif not plan.refused:
        click.echo(NO_MATCH)
    if plan.refused:
        click.echo(f"not replayed: {_reasons(plan.refused)}")
    if not plan.letters:
        return
    if limit == plan.letters:
        click.echo("no more because of --limit, the oldest of each partition first")
    if plan.replayed_before:
        most = max(each.replays for each in plan.causes)
        click.echo(f"{plan.replayed_before:,} of them were replayed before, up to {most} times")
    click.echo()
    print_causes(plan.causes, plan.until_unix_ms)
    if plan.receivers:
        click.echo()
        table(
            ("GROUP", "LETTERS", "PARTITIONS", "OWNED", "PAUSED", "SAME WORKER", "OWNERS"),
            [
                (
                    *(row.group, row.letters, row.partitions, row.owned, row.paused),
                    *(row.same_worker, ", ".join(row.owners) or None),
                )
                for row in plan.receivers
            ],
        )
    click.echo()
    for note in plan.notes:
        click.echo(styled(f"! {printable(note)}", "warn"))
    click.echo(f"to do it: {again}")


@click.command()
@click.argument("topic")
@ALL
@IDS
@click.option("--older-than", type=Duration(), metavar="DURATION", help="Died longer ago, as 7d.")
@filter_options
@click.option("--dry-run", is_flag=True, help="Say how many would go, and what they died of.")
@yes_option
@json_option
@pass_session
def purge(
    session: Session,
    /,
    topic: str,
    all_: bool,
    ids: tuple[str, ...],
    older_than: float | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> int:
    """Delete letters for good."""
    if ids and older_than is not None:
        raise click.UsageError("--id names letters; --older-than chooses among all of them")
    ways = "--id PARTITION:MS-SEQ, --older-than DURATION, a filter, or --all"
    require_choice(ids, all_, older_than is not None or stated(filters), ways)
    with session.link() as link:
        choice = chosen(link, filters, ids, older_than)
        check_group(session, link, topic, choice)
        if dry_run:
            _print_loss(link, session, topic, choice, as_json)
            return 0
        question = "Delete {} of {} for good?"
        if _ask(link, session, topic, choice, question, yes, "purged", as_json):
            return 0
        meter = Meter(session)
        with interruptible() as stop:
            done = dead_letters.purge(link, session.keys, topic, choice, stop=stop, progress=meter)
        meter.end()
    if as_json:
        emit(done)
    else:
        click.echo(f"{count(done.purged, 'dead letter')} of {topic} purged{_for(choice.group)}")
    if not done.audited:
        session.note(NOT_AUDITED)
    if done.unknown:
        session.note(f"{count(done.unknown, 'letter')} may have been purged or not")
    if done.ended == FAILED:
        raise RedisUnavailable(f"interrupted: {done.error}; the others stay", sent=False)
    return EXIT_INTERRUPTED if done.ended == STOPPED else 0


def _print_loss(
    link: Connection, session: Session, topic: str, choice: DeadLetterFilter, as_json: bool
) -> None:
    found = dead_letters.causes(link, session.keys, topic, choice)
    if as_json:
        emit(found)
        return
    if not found.looked_at:
        click.echo(NO_MATCH)
        return
    click.echo(f"{count(found.looked_at, 'dead letter')} of {topic} would be deleted for good")
    if found.causes:
        click.echo()
        print_causes(found.causes, server_unix_ms(link))


# --- words ----------------------------------------------------------------------------------------


def _ask(
    link: Connection,
    session: Session,
    topic: str,
    choice: DeadLetterFilter,
    question: str,
    yes: bool,
    nothing: str,
    as_json: bool,
) -> bool:
    """Confirm what would happen. Returns whether there is nothing to do."""
    if yes:
        return False
    found = dead_letters.count(link, session.keys, topic, choice)
    if not found and not as_json:
        click.echo(f"{NO_MATCH}, nothing {nothing}")
        return True
    if found:
        confirm(question.format(count(found, "dead letter"), topic + _for(choice.group)), yes)
    return False


def _said(ctx: click.Context, *names: str) -> list[str]:
    """Those of the options that were given, as they would be given again."""
    found = []
    for name in names:
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[name]
        found.append("--" + name.replace("_", "-"))
        if value is not True:
            found.append(f"{value:g}/s" if name == "rate" else str(value))
    return found


def _bounded(choice: DeadLetterFilter, until_unix_ms: int) -> DeadLetterFilter:
    """The same letters, and none that died later."""
    if choice.letter_ids:
        return choice
    until = choice.until_unix_ms
    bound = until_unix_ms if until is None else min(until, until_unix_ms)
    return dataclasses.replace(choice, until_unix_ms=bound)


def _reasons(refused: dict[str, int]) -> str:
    return "; ".join(f"{count(number, 'letter')}: {why}" for why, number in refused.items())


def _for(group: str | None) -> str:
    return f" for {group}" if group else ""


def _to(target: Target) -> str:
    return "" if target == dead_letters.HOME else f" to {target}"
