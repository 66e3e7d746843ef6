"""Checks of the fleet: live instances, their offers and summaries, directives, leases."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from streamqd.admin import instances
from streamqd.admin.assignments import by_group, holder
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import AssignmentFacts, DiagnosisFacts
from streamqd.admin.diagnosis.partitions import numbers
from streamqd.admin.instances import YOUNG_SECONDS
from streamqd.admin.why import as_argument
from streamqd.model import Assignment
from streamqd.store.directives import ALL_INSTANCES, Directive, Scope
from streamqd.words import plural, precise_duration, rough_duration, spans

PAUSED_SECONDS = 3_600.0
BLOCKED_SECONDS = 900.0  # seconds for which a past block of an event loop is reported
ROUND_TRIPS = 50  # shortest lease in round trips to the server, 10 for each renewal


@check("fleet.empty", Severity.PROBLEM, Need.FLEET, Need.TOPICS)
def _empty(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """No instance is live, but a consumer is configured or a topic has groups."""
    work = facts.configured or any(topic.groups for topic in facts.topics)
    if work and not facts.live_heartbeats:
        members = [heartbeat.instance for heartbeat in facts.fleet.state.heartbeats][:16]
        found = instances.no_instances(facts.settings.daemon.fleet)
        yield replace(found, evidence={"members": members})


@check("fleet.not-offered", Severity.PROBLEM, Need.FLEET, Need.ASSIGNMENTS)
def _not_offered(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """No live instance runs a consumer that is configured or ran before."""
    if not facts.live_heartbeats:
        return
    for topic in facts.topics:
        if topic.partitions is None:
            continue
        configured = {group for name, group in facts.configured if name == topic.name}
        offered = {
            group for each in facts.partitions if each.topic == topic.name for group in each.groups
        }
        for group in sorted(configured | (topic.groups & offered)):
            if (topic.name, group) in facts.offered:
                continue
            yield CheckResult(
                f"no live instance runs the consumer {topic.name}/{group}, so its"
                f" {plural(topic.partitions, 'partition')} are not handled",
                "run `streamqd reload`, so that instances read their configuration again. Restart"
                " instances that run with --only or an older version. If the group is not needed,"
                f" run `streamqd group delete {topic.name} {group}`",
                about=f"{topic.name}/{group}",
                evidence={"live": [heartbeat.instance for heartbeat in facts.live_heartbeats][:16]},
            )


@check("fleet.duplicate-instances", Severity.PROBLEM, Need.FLEET)
def _duplicate_instances(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Two instances run under the same name."""
    for heartbeat in facts.fleet.state.heartbeats:
        second = facts.fleet.duplicates.get(heartbeat.instance)
        summary = second or facts.fleet.summaries.get(heartbeat.instance, {})
        own = heartbeat.info.get("host"), heartbeat.info.get("pid")
        other = summary.get("host"), summary.get("pid")
        # The summary of the previous process remains for a few seconds after that process has
        # exited.
        began = heartbeat.info.get("started")
        young = isinstance(began, int | float) and facts.now_unix_ms / 1000 - began < YOUNG_SECONDS
        differs = None not in (*own, *other) and own != other and bool(second or not young)
        if differs or heartbeat.instance in facts.fleet.changed:
            yield CheckResult(
                f"two instances have the same name {heartbeat.instance}"
                + (
                    f": on {own[0]} (pid {own[1]}) and {other[0]} (pid {other[1]})"
                    if differs
                    else ": different processes sent its heartbeats during the check"
                ),
                "give each instance its own daemon.instance and daemon.state_dir, and restart the"
                " second one: `systemctl restart streamqd`",
                about=heartbeat.instance,
                evidence={
                    "heartbeat": {
                        "host": own[0],
                        "pid": own[1],
                        "boot": heartbeat.info.get("boot"),
                    },
                    "publishes": {"host": other[0], "pid": other[1]},
                    "changed": heartbeat.instance in facts.fleet.changed,
                },
            )


@check("fleet.directives-for-missing", Severity.WARNING, Need.FLEET)
def _directives_for_missing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A directive is for an instance that is not live."""
    known = {heartbeat.instance for heartbeat in facts.live_heartbeats} | {ALL_INSTANCES}
    directives = facts.fleet.state.control
    gone = {
        f"move:{assignment}": directive.to for assignment, directive in directives.moves.items()
    }
    gone |= {f"drain:{name}": name for name in directives.drains}
    gone |= {f"reload:{name}": name for name in directives.reloads}
    gone = {directive: name for directive, name in gone.items() if name not in known}
    if gone:
        names = sorted(set(gone.values()))
        yield CheckResult(
            f"{plural(len(gone), 'directive')} {'is' if len(gone) == 1 else 'are'} for instances"
            f" that are not live ({', '.join(names[:4])}), and"
            f" {'takes' if len(gone) == 1 else 'take'} effect if such an instance returns",
            "`streamqd control clear --missing --yes`",
            evidence={"directives": sorted(gone)[:16], "instances": names[:16]},
        )


@check("fleet.directives-unreadable", Severity.WARNING, Need.FLEET)
def _unreadable_directives(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A directive cannot be read."""
    for name, problem in facts.fleet.state.control.unreadable.items():
        yield CheckResult(
            f"the directive {name!r} cannot be read ({problem}), so no instance applies it",
            f"`streamqd control clear '{name}' --yes`, unless a later version of streamqd wrote it",
            about=name,
            evidence={"directive": name, "problem": problem},
        )


def _old_directives(
    facts: DiagnosisFacts, directives: Mapping[Scope, Directive]
) -> Iterator[tuple[Scope, str, dict[str, Any]]]:
    """Yield directives older than an hour, with age and author as a clause, and the evidence."""
    for scope, directive in directives.items():
        seconds = (facts.now_unix_ms - directive.at_unix_ms) / 1000
        if seconds > PAUSED_SECONDS:
            why = f" ({directive.why})" if directive.why else ""
            since = f"for {rough_duration(seconds)} by {directive.by or 'an unknown user'}{why}"
            evidence = {
                "at_unix_ms": directive.at_unix_ms,
                "by": directive.by,
                "why": directive.why,
            }
            yield scope, since, evidence


@check("fleet.paused", Severity.WARNING, Need.FLEET)
def _paused(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A pause has been in effect for over an hour."""
    for scope, since, evidence in _old_directives(facts, facts.fleet.state.control.pauses):
        yield CheckResult(
            f"{scope} has been paused {since}",
            f"`streamqd resume {as_argument(str(scope))}`",
            about=str(scope),
            evidence=evidence,
        )


@check("fleet.stopped", Severity.WARNING, Need.FLEET)
def _stopped(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A group has been stopped for over an hour."""
    for scope, since, evidence in _old_directives(facts, facts.fleet.state.control.stops):
        yield CheckResult(
            f"group {scope.group} of {scope.topic} has been stopped {since}",
            f"`streamqd group start {scope.topic} {scope.group}`",
            about=f"{scope.topic}/{scope.group}",
            evidence=evidence,
        )


@check("fleet.crash-loop", Severity.PROBLEM, Need.FLEET)
def _crash_loops(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Workers crash in a loop."""
    broken: dict[tuple[str, str], dict[int, str]] = {}
    failed = _assignments_in_state(facts, "failed")
    crashing = [
        (assignment, name)
        for name, seen in facts.fleet.state.live.items()
        for assignment in seen.broken
        if (assignment, name) not in failed
    ]
    for assignment, name in crashing + _assignments_in_state(facts, "broken"):
        broken.setdefault((assignment.topic, assignment.group), {})[assignment.partition] = name
    for (topic, group), where in broken.items():
        first = min(where)
        yield CheckResult(
            f"the workers of {topic}/{group} crash in a loop on {spans(where)}"
            f" ({', '.join(sorted(set(where.values()))[:4])}) and wait for daemon.crash_cooldown",
            f"fix the handler and run `streamqd reload`. `streamqd why {topic}/{first}/{group}`"
            f" and `worker.` in the log of {where[first]} show the error",
            about=f"{topic}/{group}",
            evidence={"partitions": {str(number): who for number, who in where.items()}},
        )


@check("fleet.assignment-failed", Severity.PROBLEM, Need.FLEET)
def _failed_assignments(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """An internal error stopped an assignment."""
    for assignment, name in _assignments_in_state(facts, "failed"):
        yield CheckResult(
            f"{name} released {assignment} temporarily after an internal error of streamqd; its"
            " other partitions continue",
            f"report the traceback of `assignment.given_up` in the log of {name}. `streamqd drain"
            f" {name}` moves the partition to another instance",
            about=str(assignment),
            evidence={"instance": name, "assignment": list(assignment)},
        )


@check("fleet.scoreboard-refused", Severity.WARNING, Need.FLEET)
def _refused_boards(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """An instance could not use the scoreboard file of a killed supervisor and renamed it."""
    for name, summary in facts.fleet.summaries.items():
        path = summary.get("refused_board")
        if isinstance(path, str) and path:
            yield CheckResult(
                f"{name} could not use the scoreboard file of its killed supervisor, and renamed"
                f" it to {path}: messages that were in flight then are handled again",
                f"on the host of {name}: `rm {shlex.quote(path)}`; attach the file to a bug report"
                " unless `scoreboard.refused` in the log shows that another version wrote it",
                about=name,
                evidence={"file": path},
            )


@check("fleet.loop-blocked", Severity.WARNING, Need.FLEET)
def _blocked_loops(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A coroutine blocks its worker's event loop, or did in the last 15 minutes."""
    for each in facts.published:
        now, ago = each.loop_blocked_seconds or 0.0, each.loop_blocked_seconds_ago
        if not now and (ago is None or ago > BLOCKED_SECONDS):
            continue
        at = f" at {each.loop_blocker}" if each.loop_blocker else ""
        when = (
            f"for {precise_duration(now)}" if now else f"until {precise_duration(ago or 0.0)} ago"
        )
        verb = "has blocked" if now else "blocked"
        yield CheckResult(
            f"a coroutine {verb} the event loop of {each.name} on {each.owner} {when}{at}, which"
            " stops all other coroutines of the partition",
            "await something that does not block, or move that call to a thread with"
            f" asyncio.to_thread. `loop.blocked` in the log of {each.owner} has the stack",
            about=each.name,
            evidence={
                "instance": each.owner,
                "loop_blocked_seconds": now,
                "loop_blocked_seconds_ago": ago,
                "loop_blocker": each.loop_blocker,
            },
        )


def _assignments_in_state(facts: DiagnosisFacts, state: str) -> list[tuple[Assignment, str]]:
    """Return the assignments whose worker is in this state, with the instances that report it."""
    return [(each.assignment, each.owner) for each in facts.published if each.worker == state]


@check("fleet.short-lease", Severity.WARNING, Need.SERVER)
def _short_lease(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """lease_ttl is shorter than 50 round trips to the server."""
    trip, ttl = facts.server.round_trip_ms, facts.settings.daemon.lease_ttl
    if trip is not None and trip * ROUND_TRIPS > ttl * 1000:
        wanted = -(-trip * ROUND_TRIPS // 1000)
        yield CheckResult(
            f"a round trip to the server takes {trip:,.1f} ms, and daemon.lease_ttl is only"
            f" {ttl:g} s: renewals come too late, and partitions change owners",
            f'write `lease_ttl = "{wanted:.0f}s"` or more under [daemon] on every instance, or run'
            " the instances closer to the server",
            evidence={"round_trip_ms": trip, "lease_ttl_seconds": ttl},
        )


QUARANTINE_SECONDS = 300.0


def _is_unfenced(each: AssignmentFacts) -> bool:
    return bool(each.lease_checks) and all(
        lease_check.lease_matches is not None
        and (not lease_check.fence.token or not lease_check.lease_matches)
        for lease_check in each.lease_checks
    )


@check("fleet.lease-without-fence", Severity.PROBLEM, Need.FLEET, Need.ASSIGNMENTS)
def _lease_without_fence(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """In two successive reads, a lease exists, but the fence has no token or a different one."""
    for (topic, group), assignments in by_group(filter(_is_unfenced, facts.assignments)).items():
        names = " ".join(facts.keys.lease(*each.assignment) for each in assignments[:4])
        yield CheckResult(
            f"the lease of {group} on {spans(numbers(assignments))} of {topic} has a token that"
            " is not in the fence, so no instance can acquire the partition before it expires",
            "another client changed keys, or the server lost some. Delete the leases, so that an"
            f" instance can acquire them again: `redis-cli DEL {names}`",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(assignments),
                "ttl_seconds": [each.view.ttl for each in assignments if each.view is not None][
                    :16
                ],
            },
        )


def _is_expired(each: AssignmentFacts) -> bool:
    """Return True if the fence has an owner, but none of the reads found a lease."""
    return bool(each.lease_checks) and all(
        holder(lease_check.fence)[0] == "expired" for lease_check in each.lease_checks
    )


def _owner(each: AssignmentFacts) -> str:
    return each.view.owner if each.view is not None else ""


@check("fleet.owner-silent", Severity.PROBLEM, Need.FLEET, Need.ASSIGNMENTS)
def _owner_silent(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A lease has expired, its owner is gone, and no other instance has taken over."""

    def is_lost(each: AssignmentFacts) -> bool:
        return _is_expired(each) and _owner(each) not in facts.fleet.state.live

    for (topic, group), assignments in by_group(filter(is_lost, facts.assignments)).items():
        owners = sorted({_owner(each) for each in assignments})
        yield CheckResult(
            f"{spans(numbers(assignments))} of {topic}/{group} still belong to"
            f" {', '.join(owners[:4])}, which is gone, and no other instance has taken over",
            f"start an instance that runs {topic}/{group} (`systemctl start streamqd`): it takes"
            " them immediately, with their pending messages",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(assignments),
                "owners": owners[:16],
                "pending": sum(each.pending for each in assignments),
            },
        )


@check("fleet.not-renewed", Severity.PROBLEM, Need.FLEET, Need.ASSIGNMENTS)
def _not_renewed(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A lease has expired although its owner sends heartbeats."""

    def is_stalled(each: AssignmentFacts) -> bool:
        return _is_expired(each) and _owner(each) in facts.fleet.state.live

    for (topic, group), assignments in by_group(filter(is_stalled, facts.assignments)).items():
        owners = sorted({_owner(each) for each in assignments})
        yield CheckResult(
            f"{', '.join(owners[:4])} sends heartbeats, but the leases of"
            f" {spans(numbers(assignments))} of {topic}/{group} expire",
            "check again in a few seconds, as a late renewal fixes it. If it stays, see `lease.` in"
            f" the log of {owners[0]} and `streamqd why"
            f" {topic}/{assignments[0].assignment.partition}/{group}`",
            about=f"{topic}/{group}",
            evidence={"partitions": numbers(assignments), "owners": owners[:16]},
        )


@check("fleet.quarantine-stuck", Severity.WARNING, Need.FLEET, Need.ASSIGNMENTS)
def _quarantine_stuck(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A partition has been in quarantine for 5 minutes with nothing pending."""

    def is_stuck(each: AssignmentFacts) -> bool:
        view = each.view
        return (
            view is not None
            and view.quarantine
            and view.ttl is not None
            and each.figures is not None
            and not each.pending
            and facts.now_unix_ms - view.since_unix_ms > QUARANTINE_SECONDS * 1000
        )

    for (topic, group), assignments in by_group(filter(is_stuck, facts.assignments)).items():
        yield CheckResult(
            f"{spans(numbers(assignments))} of {topic}/{group} are still in quarantine after the"
            f" loss of a host, although no inherited message is left",
            f"run `streamqd reload {_owner(assignments[0])}` to start new workers, which check"
            f" again. `streamqd partitions {topic}` shows their state",
            about=f"{topic}/{group}",
            evidence={
                "partitions": numbers(assignments),
                "since_unix_ms": [each.view.since_unix_ms for each in assignments if each.view][
                    :16
                ],
            },
        )
