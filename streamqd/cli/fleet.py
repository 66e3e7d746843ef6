"""The commands that manage the fleet, such as pause, move, drain, reload and `control`."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import click

from streamqd.admin import as_json as document_of
from streamqd.admin import directives, published
from streamqd.admin.directives import Departure
from streamqd.cli.arguments import dry_run_option, reason_option, yes_option
from streamqd.cli.command import CommandResult, DirectiveResult, answering, directing
from streamqd.cli.output import (
    ago,
    apply_style,
    confirm,
    listing,
    print_unreadable,
    printable,
    table,
)
from streamqd.cli.session import Session
from streamqd.model import Assignment
from streamqd.store.directives import Scope, parse_scope
from streamqd.words import age, count

ALIKE_MAX = 5  # maximum number of partitions listed for each problem
SHOWN_MAX = 20  # maximum number of partitions listed for each new owner (--json lists all)
_WHY_STRANDED = {
    "no-consumer": "no other instance has their consumer",
    "broken": "their workers crash in a loop on all other instances",
    "max-partitions": "the other instances have reached max_partitions",
}


def scoped(command: Callable[..., int]) -> Callable[..., int]:
    """Add the argument and the options that select a scope, and pass the scope to the command.

    A scope is TOPIC, TOPIC/GROUP, TOPIC/PARTITION/GROUP, or the entire fleet with --all.
    """

    @functools.wraps(command)
    def run(
        *, name: str | None, group: str | None, partition: int | None, everything: bool, **more: Any
    ) -> int:
        return command(scope=read_scope(name, group, partition, everything=everything), **more)

    for decorate in (
        click.option(
            "--all", "everything", is_flag=True, help="Select all topics and groups of the fleet."
        ),
        click.option(
            "-p", "--partition", type=click.IntRange(0), help="Select only this partition."
        ),
        click.option("-g", "--group", help="Select only this group."),
        click.argument("name", metavar="[TOPIC[/GROUP] | TOPIC/PARTITION/GROUP]", required=False),
    ):
        run = decorate(run)
    return run


@click.command(short_help="Pause a topic, group or partition.")
@scoped
@reason_option
@directing
def pause(session: Session, *, scope: Scope, reason: str, dry_run: bool) -> DirectiveResult:
    """Stop fetching messages of a topic, group or partition.

    Workers finish their current messages, and the partitions keep their owners. The pause is stored
    in Redis until you run `streamqd resume`, so it survives restarts and also applies to instances
    that start later. `status` shows it at the top.
    """
    fleet = session.fleet
    done = directives.pause(fleet, scope, reason, dry_run=dry_run)
    at = done.at_unix_ms or 0
    return DirectiveResult(
        done, f"{scope} is paused", lambda: directives.not_paused(fleet, scope, at)
    )


@click.command(short_help="Resume a paused topic, group or partition.")
@scoped
@directing
def resume(session: Session, *, scope: Scope, dry_run: bool) -> DirectiveResult:
    """Resume a topic, group or partition.

    The command also removes pauses within it, such as those of a topic's groups and partitions.
    While a topic is paused, you cannot resume only one of its groups or partitions.
    """
    fleet = session.fleet
    done = directives.resume(fleet, scope, dry_run=dry_run)
    at = done.at_unix_ms or 0
    return DirectiveResult(
        done, f"{scope} is resumed", lambda: directives.not_resumed(fleet, scope, at)
    )


def read_scope(
    name: str | None, group: str | None, partition: int | None, *, everything: bool
) -> Scope:
    """Return the scope that the argument and the options select.

    Raises UsageError if they are invalid, or if they contradict each other.
    """
    if everything:
        if name is not None or group is not None or partition is not None:
            raise click.UsageError("--all cannot be used with another argument or option")
        return Scope()
    if name is None:
        raise click.UsageError("pass TOPIC, TOPIC/GROUP or TOPIC/PARTITION/GROUP, or --all")
    parts = name.split("/")
    scope = Scope(parts[0])
    if len(parts) == 2:
        scope = Scope(parts[0], None, parts[1])
    elif len(parts) != 1:
        scope = _scope(name)
    if not all(parts):
        raise click.UsageError(
            f"{name} is not a valid scope; pass TOPIC, TOPIC/GROUP or TOPIC/PARTITION/GROUP"
        )
    if group is not None:
        if scope.group not in (None, group):
            raise click.UsageError(
                f"{name} contains another group than --group {group}; pass the group once"
            )
        scope = scope._replace(group=group)
    if partition is not None:
        if scope.partition not in (None, partition):
            raise click.UsageError(
                f"{name} contains another partition than --partition {partition}; pass it once"
            )
        scope = scope._replace(partition=partition)
    return scope


def read_assignment(name: str) -> Assignment:
    """Parse TOPIC/PARTITION/GROUP. A `*` is not allowed."""
    topic, partition, group = _scope(name)
    if topic is None or partition is None or group is None:
        raise click.UsageError(
            f"{name} is not a valid assignment; pass TOPIC/PARTITION/GROUP, such as orders/3/bill"
        )
    return Assignment(topic, partition, group)


def _scope(name: str) -> Scope:
    try:
        return parse_scope(name)
    except ValueError as error:
        raise click.UsageError(f"{name}: {error}") from None


# --- owners of partitions -------------------------------------------------------------------------


@click.command(short_help="Move a partition to an instance.")
@click.argument("name", metavar="TOPIC/PARTITION/GROUP")
@click.argument("instance")
@reason_option
@directing
def move(
    session: Session, *, name: str, instance: str, reason: str, dry_run: bool
) -> DirectiveResult:
    """Move a partition to an instance, and keep it there.

    \b
      streamqd move orders/3/bill web-2 --wait

    The current owner finishes its message and hands the partition over. The partition stays with
    INSTANCE until you move it again, or until `streamqd rebalance` discards the move. While
    INSTANCE cannot own the partition, any other instance may own it.
    """
    assignment = read_assignment(name)
    fleet = session.fleet
    return DirectiveResult(
        directives.move(fleet, assignment, instance, reason, dry_run=dry_run),
        f"{assignment} is assigned to {instance}",
        lambda: directives.not_moved(fleet, assignment, instance),
    )


@click.command(short_help="Rebalance the fleet now and discard manual moves.")
@reason_option
@directing
def rebalance(session: Session, *, reason: str, dry_run: bool) -> DirectiveResult:
    """Rebalance the fleet now and discard manual moves.

    The command ignores the settings rebalance_delay and rebalance_hold, but at most rebalance_moves
    partitions move at a time. To see which partitions would move, pass --dry-run.
    """
    fleet = session.fleet
    done = directives.rebalance(fleet, reason, dry_run=dry_run)
    return DirectiveResult(
        done, "", lambda: directives.not_rebalanced(fleet), show=_show_rebalanced
    )


def _show_rebalanced(done: directives.Rebalanced, _waited: bool) -> None:
    if done.forgotten:
        verb = "would be discarded" if done.dry_run else "discarded"
        click.echo(f"{count(len(done.forgotten), 'requested move')} {verb}")
    if done.moves:
        table(
            ("PARTITION", "FROM", "TO"),
            [
                (f"{each.topic}/{each.partition}/{each.group}", each.owner or "-", each.to or "-")
                for each in done.moves
            ],
        )
    else:
        click.echo("no partition needs to move")


@click.command(short_help="Move all partitions off an instance.")
@click.argument("instance")
@click.option(
    "--undo", is_flag=True, help="Undo the drain, so that the instance can own partitions again."
)
@reason_option
@directing
def drain(
    session: Session, *, instance: str, undo: bool, reason: str, dry_run: bool
) -> DirectiveResult:
    """Move all partitions off an instance.

    The instance finishes its current messages and releases its partitions. It then stays on
    standby, even after a restart, until you run the command with --undo. If no other instance has a
    consumer for a partition, the partition waits until the drain is undone. To see the new owner of
    each partition, and the partitions that would have no owner, pass --dry-run.

    To stop a daemon, you do not need to drain it, because SIGTERM also releases its partitions.
    """
    fleet = session.fleet
    if undo:
        done = directives.undrain(fleet, instance, dry_run=dry_run)
        return DirectiveResult(done, f"{instance} can own partitions again", list)
    done = directives.drain(fleet, instance, reason, dry_run=dry_run)
    if dry_run:
        planned = directives.departure(fleet, instance)
        return DirectiveResult(
            done,
            "",
            list,
            show=lambda _done, _waited: show_departure(planned),
            more={"departure": document_of(planned)},
        )
    return DirectiveResult(
        done,
        f"{instance} releases its partitions",
        lambda: directives.not_drained(fleet, instance),
    )


def show_departure(departure: Departure) -> None:
    """Print the effects of an instance's departure, first the partitions without a new owner."""
    name = printable(departure.instance)
    if not departure.assignments:
        click.echo(f"{name} owns no partitions, so nothing changes")
        return
    if departure.last:
        click.echo(
            f"{name} is the last instance: its partitions wait until another instance starts"
        )
    stranded: dict[str, list[str]] = defaultdict(list)
    takers: dict[str, list[str]] = defaultdict(list)
    for assignment in departure.assignments:
        place = printable(f"{assignment.topic}/{assignment.partition}/{assignment.group}")
        if assignment.to:
            takers[assignment.to].append(place)
    for assignment in departure.stranded:
        place = printable(f"{assignment.topic}/{assignment.partition}/{assignment.group}")
        stranded[assignment.stranded].append(place)
    for why, places in stranded.items():
        more = [f"and {len(places) - ALIKE_MAX:,} more"] if len(places) > ALIKE_MAX else []
        shown = ", ".join(places[:ALIKE_MAX] + more)
        text = f"! {count(len(places), 'partition')} without a new owner, because"
        click.echo(apply_style(f"{text} {_WHY_STRANDED[why]}: {shown}", "warn"))
    for to, places in sorted(takers.items()):
        more = [f"and {len(places) - SHOWN_MAX:,} more"] if len(places) > SHOWN_MAX else []
        shown = ", ".join(places[:SHOWN_MAX] + more)
        click.echo(f"{printable(to)} takes {count(len(places), 'partition')}: {shown}")
    if departure.longest_run_seconds:
        run = age(departure.longest_run_seconds * 1000)
        click.echo(
            f"the longest running message has been running for {run}, in"
            f" {printable(departure.longest_run)}: a drain waits for it, up to drain_timeout"
        )
    else:
        click.echo("no message was running when it last reported")


@click.command(short_help="Remove a dead instance from the fleet.")
@click.argument("instance")
@dry_run_option
@yes_option
@answering
def forget(session: Session, *, instance: str, dry_run: bool, yes: bool) -> CommandResult:
    """Remove a dead instance from the fleet.

    `status` shows a dead instance as silent until you run this command, or until another instance
    removes it after `20 * lease_ttl`. The command first waits for half of lease_ttl, in case the
    instance sends a heartbeat. It fails if the instance is live or its leases have not expired. The
    next owners of the partitions handle the unfinished messages. If the instance starts again, it
    rejoins the fleet.

    \b
    Example:
      streamqd forget web-7 --dry-run
    """
    fleet = session.fleet
    done = directives.forget(fleet, instance, dry_run=True)
    if not dry_run:
        confirm(f"Forget {instance}, silent for {age(done.silent_seconds * 1000)}?", yes)
        done = directives.forget(fleet, instance)
        for topic in done.topics:
            session.record(topic, "forget", {"instance": instance}, {})

    def show() -> None:
        verb = "would be" if dry_run else "is"
        silence = age(done.silent_seconds * 1000)
        click.echo(printable(f"{instance} {verb} forgotten after it was silent for {silence}"))
        if done.ownerless:
            what = count(done.ownerless, "partition")
            click.echo(
                f"{what} that it owned wait for an owner, and a live instance that offers them"
                " takes over"
            )
        if done.directives:
            names = ", ".join(done.directives)
            click.echo(
                printable(
                    f"its directives are kept (to clear them: `streamqd control clear`): {names}"
                )
            )

    return CommandResult(done, show)


# --- configuration and code -----------------------------------------------------------------------


@click.command(short_help="Reload the configuration and the handlers.")
@click.argument("instance", required=False)
@reason_option
@directing
def reload(
    session: Session, *, instance: str | None, reason: str, dry_run: bool
) -> DirectiveResult:
    """Reload the configuration and the handlers.

    Without INSTANCE, all instances reload, one after the other. The effect is the same as SIGHUP.
    An instance replaces its workers one by one, each after its current message. If it finds an
    error in the new files, it changes nothing. With --wait, the exit code is 1 if an instance
    rejected the reload.
    """
    fleet = session.fleet
    sight = published.fleet_state(fleet)
    who = [instance] if instance else sorted(sight.live)
    silent = [] if instance else sorted(sight.silent)
    done = directives.reload(fleet, instance, reason, dry_run=dry_run)
    at = done.at_unix_ms or 0

    def refusals() -> list[str]:
        found = directives.reload_problems(fleet, who)
        return [f"{name} rejected the reload: {problem}" for name, problem in found.items()]

    def show(done: Any, waited: bool) -> None:
        verb = "would reload" if done.dry_run else "reloaded" if waited else "reload requested"
        if not done.waiting:
            click.echo(printable(f"{verb}: {', '.join(who)}"))
        if not done.dry_run:
            for note in done.notes:
                click.echo(printable(note), err=True)
        for each in silent:
            text = f"{each} is silent, and reloads when it returns"
            click.echo(printable(text), err=True)

    return DirectiveResult(
        done, "", lambda: directives.not_reloaded(fleet, who, at), refusals, show
    )


# --- stored directives ----------------------------------------------------------------------------


@click.group()
def control() -> None:
    """Show and clear pauses, stops, moves and drains."""


@control.command("list")
@click.option("--all", "everything", is_flag=True, help="Show finished directives too.")
@answering
def list_(session: Session, *, everything: bool) -> CommandResult:
    """Show the directives in effect.

    A directive for an instance that is not live is marked `missing`. A reload or rebalance is
    finished when every live instance has applied it. Finished directives are shown only with --all,
    and are marked `done`.

    \b
    Example:
      streamqd control list --all
    """
    seen = directives.view(session.fleet)
    return CommandResult(seen, lambda: _show_directives(seen, everything))


def _show_directives(seen: directives.ControlView, everything: bool) -> None:
    print_unreadable(seen.unreadable)
    shown = [row for row in seen.directives if everything or not row.done]
    if not shown and not seen.unreadable_directives:
        over = "no directive is in effect (--all shows finished directives)"
        click.echo(over if seen.directives else "no directives")
    if shown:
        listing(
            "DIRECTIVE TO AGE BY _ REASON",
            shown,
            directive=lambda row: row.name,
            to=lambda row: row.to or "-",
            age=lambda row: ago(seen.now_unix_ms, row.at_unix_ms),
            _=lambda row: "missing" if row.instance_missing else "done" if row.done else "",
            reason=lambda row: row.why,
        )
    for name, problem in seen.unreadable_directives.items():
        click.echo(printable(f"! {name} cannot be read: {problem}"))


@control.command()
@click.argument("names", metavar="DIRECTIVE...", nargs=-1)
@click.option(
    "--missing", is_flag=True, help="Clear all directives for instances that are not live."
)
@dry_run_option
@yes_option
@answering
def clear(
    session: Session, *, names: tuple[str, ...], missing: bool, dry_run: bool, yes: bool
) -> CommandResult:
    """Clear directives by name.

    To list the names, run `streamqd control list`.
    """
    if not names and not missing:
        raise click.UsageError("pass the names of the directives, or --missing")
    fleet = session.fleet
    chosen = directives.clear(fleet, list(names), missing=missing, dry_run=True)
    if not dry_run and chosen.directives:
        confirm(f"Clear {', '.join(chosen.directives)}?", yes)
        chosen = directives.clear(fleet, chosen.directives)
    verb = "would be cleared" if dry_run else "cleared"

    def show() -> None:
        click.echo(f"{count(len(chosen.directives), 'directive')} {verb}")
        for name in chosen.directives:
            click.echo(f"  {printable(name)}")

    return CommandResult(chosen, show)
