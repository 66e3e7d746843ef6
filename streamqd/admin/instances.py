"""Build the rows of instances from the values that they publish, and check them for problems.

`doctor`, `status` and `top` run these checks on the facts that they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamqd.admin import published, reloads
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.published import FleetState
from streamqd.admin.reloads import PendingReload
from streamqd.model import Assignment
from streamqd.store.members import Heartbeat, to_member_view
from streamqd.words import plural, precise_duration, rough_duration

QUIET_SECONDS = 30.0  # silence after which a housekeeper is reported (it publishes every 2 s)
RELOAD_SECONDS = 60.0  # duration above which a reload is reported
YOUNG_SECONDS = 30.0  # age up to which it is normal that an instance has published nothing


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance of a fleet.

    `state` is one of:

    - starting, working
    - standby: healthy, but owns nothing.
    - limited: serves fewer partitions, because the operating system refuses more processes.
    - paused: paused by a signal.
    - draining: handing over its partitions.
    - drained: owns nothing because of a directive.
    - silent: has sent no heartbeat for longer than a lease lasts.
    - unknown: sends heartbeats, but has no published summary, so `reported` is False.

    `owned` is the number of its assignments, and `cap` is their configured maximum, or 0 if there
    is none. `weight` is its `daemon.weight`, and the fleet divides the partitions in proportion to
    these weights. `acked` is the number of messages that it acknowledges per second. `capacity` is
    the number of partitions that it can serve, or null if the operating system sets no limit.
    `limit` is the reason for that limit, or '' if there is none. `leaving` is true if the instance
    takes no partitions, because its daemon is stopping or cannot start any process.

    `heartbeat_unix_ms` is the time of its last heartbeat, and `at_unix_ms` the time of its last
    summary. `redis_up` is true if Redis answers the instance's housekeeper, and null if that is
    unknown.

    `offers` contains the topics and groups for which the instance has a consumer. `broken` contains
    the assignments whose workers crash in a loop on this instance. `reload` is its unfinished
    reload, if there is one. `rss` is the resident memory of its workers in bytes, in which memory
    that workers share is counted once for each of them. It is null if it is unknown.
    """

    instance: str
    state: str
    host: str
    version: str
    heartbeat_unix_ms: int
    at_unix_ms: int | None
    reported: bool
    redis_up: bool | None
    owned: int
    acked: float
    pid: int | None = None
    started_unix_ms: int | None = None
    capacity: int | None = None
    limit: str = ""
    offers: frozenset[tuple[str, str]] = frozenset()
    broken: frozenset[Assignment] = frozenset()
    weight: int = 1
    cap: int = 0
    leaving: bool = False
    reload: PendingReload | None = None
    rss: int | None = None

    @property
    def rate(self) -> float | None:
        """Messages acknowledged per second, or None if the number is unknown."""
        return self.acked if self.reported else None

    @property
    def full(self) -> bool:
        """True if the instance owns as many partitions as the operating system allows."""
        return self.capacity is not None and self.owned >= self.capacity


def instance_row(state: FleetState, heartbeat: Heartbeat, summary: dict[str, Any]) -> InstanceRow:
    """Build the row of an instance from the values that it has published."""
    info, seen = heartbeat.info, to_member_view(heartbeat)
    assignments = [
        assignment
        for assignment in published.to_tables(summary.get("assignments"))
        if assignment.get("owned")
    ]
    up, began = summary.get("redis_up"), published.read_number(info.get("started"))
    sizes = [
        size
        for assignment in assignments
        if (size := published.read_integer(assignment.get("rss"))) is not None
    ]
    silent = heartbeat.instance in state.silent
    return InstanceRow(
        instance=heartbeat.instance,
        state="silent" if silent else str(summary.get("state") or "unknown"),
        host=str(info.get("host", "")),
        version=str(info.get("version", "")),
        heartbeat_unix_ms=heartbeat.heartbeat_unix_ms,
        at_unix_ms=published.read_integer(summary.get("at_unix_ms")),
        reported=bool(summary),
        redis_up=up if isinstance(up, bool) else None,
        owned=len(assignments),
        acked=round(
            sum(published.rate(assignment, "acked") or 0.0 for assignment in assignments), 2
        ),
        pid=published.read_integer(info.get("pid")),
        # Prefer the time in the heartbeat, because the summary of the previous run remains for a
        # few seconds.
        started_unix_ms=published.read_integer(summary.get("started_unix_ms"))
        if began is None
        else round(began * 1000),
        capacity=published.read_integer(info.get("capacity")),
        limit=str(info.get("capacity_problem", ""))[:200],
        offers=seen.member.offers,
        broken=frozenset(seen.broken),
        weight=seen.member.weight,
        cap=seen.member.cap,
        leaving=seen.leaving,
        reload=reloads.find_pending(state, heartbeat.instance, summary),
        rss=sum(sizes) if sizes else None,
    )


class SeesInstances(Protocol):
    """The facts that the instance checks need. Larger sets of facts provide them as well."""

    @property
    def now_unix_ms(self) -> int:
        """The time on the server's clock."""

    @property
    def instances(self) -> Sequence[InstanceRow]:
        """All known instances, including silent ones."""


def no_instances(fleet: str) -> CheckResult:
    """Return the finding for a fleet that has no live instance."""
    return CheckResult(
        f"no instance of the fleet {fleet} is live, so no message is handled",
        "run `systemctl start streamqd`, or `streamqd --config FILE`. If an instance runs,"
        " compare its daemon.fleet, keys and redis.url with this configuration",
        about=fleet,
    )


@check("fleet.limited", Severity.PROBLEM, Need.FLEET)
def limited(facts: SeesInstances) -> Iterator[CheckResult]:
    """An instance serves fewer partitions because the operating system refuses more processes."""
    for each in facts.instances:
        if each.state == "silent" or each.capacity is None:
            continue
        yield CheckResult(
            f"{each.instance} can run no more than {plural(each.capacity, 'partition')}: the"
            f" operating system refuses another process ({each.limit})",
            f"on {each.host or 'its host'}, raise LimitNOFILE and TasksMax of the service"
            " (`ulimit -n`, `ulimit -u`), or add memory: the instance then takes partitions"
            " automatically. Until then, start another instance",
            about=each.instance,
            evidence={"capacity": each.capacity, "problem": each.limit, "host": each.host or None},
        )


@check("fleet.silent", Severity.WARNING, Need.FLEET)
def silent(facts: SeesInstances) -> Iterator[CheckResult]:
    """An instance disappeared without leaving the fleet."""
    for each in facts.instances:
        if each.state == "silent":
            silence = (facts.now_unix_ms - each.heartbeat_unix_ms) / 1000
            yield CheckResult(
                f"instance {each.instance} has been silent for {rough_duration(silence)} and has"
                " not"
                f" left the fleet",
                f"run `systemctl status streamqd` on {each.host or 'its host'} to see whether it"
                " was killed, is stopped, or cannot reach Redis. If it is gone for good, run"
                f" `streamqd forget {each.instance}`",
                about=each.instance,
                evidence={
                    "silent_seconds": round(silence),
                    "host": each.host or None,
                    "pid": each.pid,
                },
            )


@check("fleet.housekeeper", Severity.PROBLEM, Need.FLEET)
def housekeeper(facts: SeesInstances) -> Iterator[CheckResult]:
    """The housekeeper of a live instance has been silent for 30 s, or cannot reach Redis."""
    now = facts.now_unix_ms
    for each in facts.instances:
        began, at = each.started_unix_ms, each.at_unix_ms
        young = began is not None and now - began < YOUNG_SECONDS * 1000
        quiet = None if at is None else (now - at) / 1000
        heard = quiet is not None and quiet < QUIET_SECONDS
        if each.state == "silent" or young or (heard and each.redis_up is not False):
            continue
        since = f"for {rough_duration(quiet)}" if quiet is not None else "recently"
        what = f"{each.instance} sends heartbeats, but its housekeeper has not reported {since}"
        if heard:
            what = f"the housekeeper of {each.instance} cannot reach Redis"
        yield CheckResult(
            f"{what}, so retries wait and nothing is trimmed",
            f"look for `housekeeper.` in its log. `systemctl restart streamqd` on"
            f" {each.host or 'its host'} starts a new one",
            about=each.instance,
            evidence={
                "quiet_seconds": quiet,
                "host": each.host or None,
                "redis_up": each.redis_up,
            },
        )


@check("fleet.reload-waiting", Severity.WARNING, Need.FLEET)
def reload_waits(facts: SeesInstances) -> Iterator[CheckResult]:
    """A reload that was requested over a minute ago has not finished."""
    for each in facts.instances:
        waiting = each.reload
        if waiting is None:
            continue
        seconds = (facts.now_unix_ms - waiting.asked_unix_ms) / 1000
        if seconds < RELOAD_SECONDS:
            continue
        fix = f"check again in a few seconds, then read `reload.` in the log of {each.instance}"
        if waiting.assignment:
            fix = f"`streamqd why {waiting.assignment}` shows its worker"
        yield CheckResult(
            f"{each.instance} was asked to reload {precise_duration(seconds)} ago"
            f"{f' by {waiting.by}' if waiting.by else ''}, and waits for {waiting.waits_for}",
            fix,
            about=each.instance,
            evidence={
                "asked_unix_ms": waiting.asked_unix_ms,
                "assignment": str(waiting.assignment) if waiting.assignment else None,
            },
            severity=None if waiting.its_turn else Severity.NOTE,
        )
