"""What the verbs that steer have in common: how units are named, waiting, telling."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import click

from streamqd.admin.directives import FleetSnapshot, Steered
from streamqd.cli.arguments import Command, Duration, retired
from streamqd.cli.output import emit, printable, styled
from streamqd.cli.session import Session
from streamqd.model import Unit
from streamqd.store.client import Connection
from streamqd.store.directives import Scope, scope_of

EXIT_WAITING = 1
LOOK_SECONDS = 0.2
Done = TypeVar("Done", bound=Callable[..., object])


def fleet_of(session: Session, link: Connection) -> FleetSnapshot:
    """The fleet that the configuration names."""
    daemon = session.settings.daemon
    return FleetSnapshot(link, session.keys, daemon.fleet, daemon.lease_ttl)


def reason_option(command: Command) -> Command:
    """Give a verb `--reason`."""
    return click.option("-r", "--reason", default="", help="Why; `status` shows it.")(command)


def dry_run_option(command: Command) -> Command:
    """Give a verb `--dry-run`."""
    command = retired("-n", "--dry-run", flag=True)(command)
    return click.option("--dry-run", is_flag=True, help="Change nothing, say what would be.")(
        command
    )


def wait_options(command: Command) -> Command:
    """Give a verb `--wait` and `--timeout`."""
    command = retired("-t", "--timeout")(command)
    command = click.option(
        "--timeout", type=Duration(), default="60s", help="How long --wait waits. [60s]"
    )(command)
    return click.option(
        "-w", "--wait", is_flag=True, help="Return when it is done; exit code 1 if it is not."
    )(command)


def read_scope(
    name: str | None, group: str | None, partition: int | None, *, everything: bool
) -> Scope:
    """Read TOPIC, TOPIC/GROUP or TOPIC/PARTITION/GROUP, with the options that complete it."""
    if everything:
        if name is not None or group is not None or partition is not None:
            raise click.UsageError("--all stands alone")
        return Scope()
    if name is None:
        raise click.UsageError("name TOPIC, TOPIC/GROUP or TOPIC/PARTITION/GROUP, or say --all")
    parts = name.split("/")
    scope = Scope(parts[0])
    if len(parts) == 2:
        scope = Scope(parts[0], None, parts[1])
    elif len(parts) != 1:
        try:
            scope = scope_of(name)
        except ValueError as error:
            raise click.UsageError(f"{name}: {error}") from None
    if not all(parts):
        raise click.UsageError(f"{name}: write TOPIC, TOPIC/GROUP or TOPIC/PARTITION/GROUP")
    if group is not None:
        if scope.group not in (None, group):
            raise click.UsageError(f"{name} and --group {group} name different groups")
        scope = scope._replace(group=group)
    if partition is not None:
        if scope.partition not in (None, partition):
            raise click.UsageError(f"{name} and --partition {partition} name different partitions")
        scope = scope._replace(partition=partition)
    return scope


def read_unit(name: str) -> Unit:
    """Read TOPIC/PARTITION/GROUP."""
    try:
        topic, partition, group = scope_of(name)
    except ValueError as error:
        raise click.UsageError(f"{name}: {error}") from None
    if topic is None or partition is None or group is None:
        raise click.UsageError(f"{name}: name one partition of one group")
    return Unit(topic, partition, group)


def wait_until_obeyed(look: Callable[[], list[str]], timeout: float) -> list[str]:
    """Look again and again until nobody is left, or the time is over; return who is left."""
    deadline = time.monotonic() + timeout
    while (waiting := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return waiting


def finish(
    done: Steered,
    said: str,
    *,
    as_json: bool,
    wait: bool,
    timeout: float,
    look: Callable[[], list[str]],
) -> int:
    """Wait if that is wanted, print, and return the exit code."""
    if wait and not done.dry_run:
        done = dataclasses.replace(done, waiting=wait_until_obeyed(look, timeout))
    code = EXIT_WAITING if done.waiting else 0
    if as_json:
        emit(done)
        return code
    if done.changed or done.at_unix_ms is not None:
        click.echo(printable(f"would be: {said}" if done.dry_run else said))
    for note in done.notes:
        click.echo(printable(note))
    for each in done.waiting:
        click.echo(styled(printable(f"not yet: {each}"), "warn"), err=True)
    return code
