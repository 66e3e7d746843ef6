"""`streamqd status` and `partitions`: show the fleet, and the owner of each partition."""

from __future__ import annotations

import time
from typing import Any

import click

from streamqd.admin import fleet
from streamqd.admin import partitions as admin_partitions
from streamqd.admin.assignments import AssignmentRow
from streamqd.admin.condition import STEADY, describe_condition, recovery
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import (
    ago,
    epoch,
    listing,
    owner,
    print_unreadable,
    printable,
    sentence,
    table,
)
from streamqd.cli.session import Session
from streamqd.words import age, count


@click.command(short_help="Show the fleet, or one topic: groups, states, problems.")
@click.argument("topic", required=False)
@answering
def status(session: Session, *, topic: str | None) -> CommandResult:
    """Show instances, groups and problems.

    With TOPIC, the command shows the groups and partitions of this topic. The row of a group
    contains the totals of its partitions. These are the columns:

    \b
    - MSG/S: messages per second, as an average of about the last 10 seconds.
    - LAG: unread messages.
    - PENDING: messages that were delivered but not acknowledged.
    - RETRIES: messages that wait for their next attempt.
    - DLQ: dead letters of the group, or `-` if they were not counted.
    - OLDEST: age of the oldest unread or pending message.
    - STATE: most severe state of the partitions, and how many are in this state.
      `running 12s` means that one message has been running for 12 seconds.
    - HEARTBEAT: age of the last heartbeat of an instance.
    - UPTIME: time since an instance started.

    \b
    Examples:
      streamqd status
      streamqd status orders
    """
    seen = fleet.status(session.fleet, topic)
    return CommandResult(seen, lambda: _show(seen, topic))


def _show(seen: fleet.StatusView, topic: str | None) -> None:
    print_unreadable(seen.unreadable)
    _show_directives(seen)
    states = [each.lease for each in seen.assignments if each.lease != "query"]
    of = count(len(states), "partition")
    assignments = f"{states.count('owned')} of {of} owned" if states else "no groups"
    if topic is None:
        click.echo(f"fleet {seen.fleet}: {count(len(seen.instances), 'instance')}, {assignments}")
    else:
        click.echo(f"topic {printable(topic)} in the fleet {seen.fleet}: {assignments}")
    for problem in seen.problems:
        sentence(problem, "  ! ", 4)
    if seen.schedules.schedules:
        click.echo(f"  {_schedules(seen)}")
    for group in seen.lagging:
        sentence(_describe_lag(seen.now_unix_ms, group), "  ", 4)
    if seen.instances and topic is None:
        click.echo()
        _show_instances(seen)
    if seen.groups:
        click.echo()
        _show_groups(seen)
    if seen.assignments and topic is not None:
        click.echo()
        _show_assignments(seen)


def _schedules(seen: fleet.StatusView) -> str:
    """Return the number of schedules, the next due time, and the number of paused ones."""
    timed = seen.schedules
    text = count(timed.schedules, "schedule")
    if timed.next_due_unix_ms is not None:
        text += f", next due in {age(timed.next_due_unix_ms - seen.now_unix_ms)}"
    return text + (f", {timed.paused:,} paused" if timed.paused else "")


def _show_instances(seen: fleet.StatusView) -> None:
    listing(
        "INSTANCE STATE OWNED MSG/S HEARTBEAT UPTIME PID HOST",
        seen.instances,
        msg_s=lambda each: each.rate,
        heartbeat=lambda each: ago(seen.now_unix_ms, each.heartbeat_unix_ms),
        uptime=lambda each: ago(seen.now_unix_ms, each.started_unix_ms),
        pid=lambda each: None if each.pid is None else str(each.pid),
    )


def _show_groups(seen: fleet.StatusView) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            f"{each.topic}/{each.group}",
            None if each.condition == "query" else f"{each.owned}/{each.partitions}",
            each.rate,
            each.lag,
            each.pending,
            each.waiting_retries,
            each.dead_letters,
            ago(seen.now_unix_ms, each.oldest_unix_ms),
            _group_state(each),
        )
        for each in seen.groups
    ]
    if len(rows) > 1:
        rows.append(_total(seen))
    columns = ("GROUP", "OWNED", "MSG/S", "LAG", "PENDING", "RETRIES", "DLQ", "OLDEST", "STATE")
    table(columns, rows, last_below=True)


def _total(seen: fleet.StatusView) -> tuple[Any, ...]:
    groups = seen.groups
    owned = [each for each in groups if each.condition != "query"]
    oldest = [each.oldest_unix_ms for each in groups if each.oldest_unix_ms is not None]
    lags = [each.lag for each in groups]
    known = [lag for lag in lags if lag is not None]
    return (
        "total",
        f"{sum(each.owned for each in owned)}/{sum(each.partitions for each in owned)}",
        sum(each.rate or 0.0 for each in groups),
        sum(known) if len(known) == len(lags) else None,
        sum(each.pending for each in groups),
        sum(each.waiting_retries for each in groups),
        # The total of dead letters is always known, and includes groups that no longer exist.
        sum(seen.dead_letters.values()),
        ago(seen.now_unix_ms, min(oldest, default=None)),
        "",
    )


def _group_state(each: fleet.GroupStatus) -> str:
    """Return the most severe state of a group. Its reason is printed above the table."""
    text = _state(each.condition, each.longest_run_seconds, each.reason)
    if each.condition_partitions < each.partitions:
        text += f" ({each.condition_partitions}/{each.partitions})"
    return text


def _state(condition: str, run_seconds: float | None, progress: str) -> str:
    """Return a text for a condition. `progress` is used only if an instance is recovering."""
    if condition == "recovering":
        return f"recovering: {progress}"
    if condition == "running":
        return f"running {age((run_seconds or 0.0) * 1000)}"
    return describe_condition(condition)


def _show_assignments(seen: fleet.StatusView) -> None:
    listing(
        "PARTITION MSG/S LAG PENDING RETRIES OLDEST STATE OWNER",
        seen.assignments,
        partition=lambda each: f"{each.partition}/{each.group}",
        msg_s=lambda each: each.acked,
        retries=lambda each: each.waiting_retries,
        oldest=lambda each: ago(seen.now_unix_ms, each.oldest_unix_ms),
        state=_assignment_state,
        owner=lambda each: each.owner or "-",
    )


def _assignment_state(each: AssignmentRow) -> str:
    progress = recovery(each.suspects_left, each.suspects, each.round_size)
    return _state(each.condition, each.longest_run_seconds, progress)


def _describe_lag(now_unix_ms: int, group: fleet.LaggingGroup) -> str:
    """Return a sentence about the lag of a group, with its start and its trend."""
    lag = "more than 1,000 messages" if group.lag is None else count(group.lag, "message")
    where = (
        f"partition {group.partitions[0]}"
        if len(group.partitions) == 1
        else f"{len(group.partitions)} partitions"
    )
    text = f"{group.topic}/{group.group} lags by {lag} in {where}"
    if group.since_unix_ms is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(group.since_unix_ms / 1000))
        text += f", since {since} ({age(now_unix_ms - group.since_unix_ms)})"
    slope = group.lag_per_second
    if slope is None:
        return f"{text}, trend unknown"
    if abs(slope) < STEADY:
        return f"{text}, steady"
    if slope > 0:
        return f"{text}, growing by {slope:,.1f}/s"
    left = "" if group.lag is None else f", caught up in about {age(group.lag / -slope * 1000)}"
    return f"{text}, shrinking by {-slope:,.1f}/s{left}"


def _show_directives(seen: fleet.StatusView) -> None:
    """Print the directives of operators. They come first, because they explain the other output."""
    for each in seen.directives:
        text = _DIRECTIVES[each.kind].format(target=printable(each.target), to=printable(each.to))
        reason = f": {printable(each.why)}" if each.why else ""
        gone = " (not live)" if each.instance_missing else ""
        since = f"{age(seen.now_unix_ms - each.at_unix_ms)} by {printable(each.by)}"
        if each.kind in ("pause", "stop"):
            click.echo(f"{text} for {since}{reason}")
        elif each.kind in ("drain", "move"):
            click.echo(f"{text}{gone} for {since}{reason}")
    for name, problem in seen.unreadable_directives.items():
        click.echo(f"the directive {printable(name)} cannot be read: {printable(problem)}")


_DIRECTIVES = {
    "pause": "PAUSED {target}",
    "stop": "STOPPED {target}",
    "drain": "DRAINED {target}",
    "move": "{target} is kept on {to}",
    "reload": "",
    "rebalance": "",
    "stack": "",
}


# --- partitions -----------------------------------------------------------------------------------


@click.command(short_help="Show the owner, lag and pending messages of partitions.")
@click.argument("topic", required=False)
@click.option("-g", "--group", help="Select only this group.")
@click.option("-p", "--partition", type=click.IntRange(min=0), help="Select only this partition.")
@answering
def partitions(
    session: Session, *, topic: str | None, group: str | None, partition: int | None
) -> CommandResult:
    """Show the owner, lag and pending messages of each partition.

    There is a row for each partition and group, with these columns:

    \b
    - LAG: unread messages.
    - PENDING: messages that were delivered but not acknowledged.
    - RETRIES: messages that wait for their next attempt.
    - OLDEST: age of the oldest unread or pending message.
    """
    if partition is not None and topic is None:
        raise click.UsageError("--partition requires TOPIC")
    seen = admin_partitions.view(session.store, topic, group, partition)
    return CommandResult(seen, lambda: _show_partitions(seen))


def _show_partitions(seen: admin_partitions.PartitionsView) -> None:
    print_unreadable(seen.unreadable)
    if seen.assignments:
        listing(
            "PARTITION OWNER EPOCH SINCE LAG PENDING RETRIES OLDEST",
            seen.assignments,
            partition=lambda row: str(row.assignment),
            owner=owner,
            epoch=epoch,
            since=lambda row: ago(seen.now_unix_ms, row.since_unix_ms),
            retries=lambda row: row.waiting_retries,
            oldest=lambda row: ago(seen.now_unix_ms, row.oldest_unix_ms),
        )
    for name in seen.idle_topics:
        click.echo(f"no group reads {name}")
    if not seen.assignments and not seen.idle_topics:
        click.echo("no topics")
