"""The fleet as it published itself: the data of `top`. Writes nothing, scans nothing.

A look takes two pipelines for any number of keys: the members, then their summaries together with
the partition counts of their topics. Only partitions without an owner in the summaries are measured
in Redis, at most `STRAYS_MAX`. A summary may come from another version, so every field may
be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from streamqd.admin import partitions, published
from streamqd.admin.condition import condition
from streamqd.admin.instances import LiveInstance, instance_of
from streamqd.admin.published import Fleet, FleetState
from streamqd.admin.reading import BadValues, Unreadable, ask
from streamqd.model import Unit
from streamqd.store import directives, topics
from streamqd.store import members as beating

STRAYS_MAX = 64
TOPICS_MAX = 256


@dataclass(frozen=True, slots=True)
class LiveFailure:
    """One kind of failure on one unit. `count` since the instance first owned it."""

    error: str
    count: int
    seconds_ago: float
    topic: str
    partition: int
    group: str
    instance: str

    @property
    def unit(self) -> Unit:
        """The unit that failed."""
        return Unit(self.topic, self.partition, self.group)


def of_dependencies(failures: Iterable[LiveFailure]) -> list[LiveFailure]:
    """Return the failures that can open a circuit: a verdict of a handler never does."""
    return [each for each in failures if each.error not in _VERDICTS]


_VERDICTS = ("streamqd.handlers.Retry", "streamqd.handlers.Dead", "streamqd.handlers.Undecodable")


def error_name(error: str) -> str:
    """Return the name of an error's class alone, or a sentence: its module is in the log."""
    return error if " " in error else error.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class LiveUnit:
    """One group on one partition.

    `state` is that of the owner's worker (booting, ready, paused, quiet, broken, failed, gone), the
    reason for the wait of a ready one (blocked, full, halted, probing, flooded, throttled),
    recovering while it runs suspects, or free or expired when no instance reports that it owns it.
    `waits_seconds` is the remaining wait. `held` messages of `held_keys` keys wait for an earlier
    message of their key. Rates are per second, averaged over 10 seconds, and `arriving` (entries
    written to the partition) over 20. `lag_per_second` is the median of its changes in that time.
    `p50_seconds` and `p99_seconds` cover the handler runs of the last minute. `dead_letters` belong
    to the group, null when its owner has not counted them. `partition_dead_letters` belong to all
    groups on the partition. `suspects_left` of `suspects` messages of a crash or a lost host are
    left to run in rounds, and a round of `round_size` runs now. The event loop of the worker is
    blocked for `loop_blocked_seconds`, 0 while it turns, or was until `loop_blocked_seconds_ago`,
    by the code `loop_blocker` (FILE:LINE in FUNCTION). `longest_run_seconds` is the age of the
    oldest handler run, `running` the place of its message, and `progress_seconds` the time since a
    running handler called `Message.progress`, if any did.
    """

    topic: str
    partition: int
    group: str
    owner: str
    state: str
    epoch: int
    since_unix_ms: int | None
    handler: str
    lag: int | None
    pending: int | None
    delayed: int | None
    in_flight: int | None
    dead_letters: int | None
    partition_dead_letters: int | None
    oldest_seconds: float | None
    oldest_unread_unix_ms: int | None
    next_due_unix_ms: int | None
    acked: float | None
    failed: float | None
    arriving: float | None
    lag_per_second: float | None
    p50_seconds: float | None
    p99_seconds: float | None
    mean_seconds: float | None
    longest_run_seconds: float | None
    progress_seconds: float | None
    waits_seconds: float | None
    rate: float | None  # runs that may start per second, null without a limit
    rate_per: str  # "partition", or "group" where the rate is a share, '' when unknown
    held: int | None
    held_keys: int | None
    suspects_left: int | None
    suspects: int | None
    round_size: int | None
    loop_blocked_seconds: float | None
    loop_blocked_seconds_ago: float | None
    loop_blocker: str
    running: str
    timeout: float | None
    hard_timeout: float | None
    paused: bool  # by a directive, applied or not yet
    stopped: bool  # its group, in the same way

    @property
    def condition(self) -> str:
        """The condition, as `condition` names it."""
        lease = self.state if self.state in ("free", "expired") else "owned"
        worker = "" if self.state in ("free", "expired", "unknown") else self.state
        run = self.longest_run_seconds
        return condition(lease, worker, run, paused=self.paused, stopped=self.stopped)

    @property
    def unit(self) -> Unit:
        """Its unit."""
        return Unit(self.topic, self.partition, self.group)

    @property
    def name(self) -> str:
        """`topic/partition/group`."""
        return str(self.unit)


@dataclass(frozen=True, slots=True)
class LiveDirective:
    """A directive in effect. `scope` is TOPIC/PARTITION/GROUP with `*`, or an instance."""

    kind: str  # pause | stop | drain
    scope: str
    at_unix_ms: int
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class LiveTotals:
    """Sums over the fleet. Rates per second. `arriving` counts each partition once.

    `lag_exact` is false when the lag of an assignment is unknown, so that `lag` is a lower bound.
    """

    arriving: float
    acked: float
    failed: float
    lag: int
    lag_exact: bool
    pending: int
    delayed: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class LiveView:
    """The fleet at one instant of the server's clock. `unseen` counts strays not looked at.

    `unreadable` are values in Redis that cannot be read: they count as missing.
    """

    fleet: str
    now_unix_ms: int
    directives: list[LiveDirective]
    instances: list[LiveInstance]
    assignments: list[LiveUnit]
    failures: list[LiveFailure]
    totals: LiveTotals
    unseen: int
    unreadable: list[Unreadable]


def look(fleet: Fleet, state: FleetState | None = None) -> LiveView:
    """Look once. `state` is what the caller has read of the fleet already."""
    store, bad = fleet.store, BadValues()
    state = state or published.fleet_state(fleet, bad)
    now, beats, orders = state.now_unix_ms, state.beats, state.control
    names = [beat.instance for beat in beats]
    offers = {pair for beat in beats for pair in beating.seen_of(beat).member.offers}
    offered = sorted({topic for topic, _ in offers})[:TOPICS_MAX]
    commands: list[tuple[object, ...]] = [
        ("HGET", store.keys.meta(topic), "partitionCount") for topic in offered
    ]
    # Single GETs in one pipeline: a user with GET may lack MGET.
    commands += [("GET", store.keys.instance(fleet.name, name)) for name in names]
    replies = ask(store, commands, bad)
    summaries = [
        published.summary(raw, store.keys.instance(fleet.name, name), bad)
        for name, raw in zip(names, replies[len(offered) :], strict=True)
    ]
    counts = {
        topic: bad.read(topics.count_of, topic, raw, store.keys.meta(topic)) or 0
        for topic, raw in zip(offered, replies, strict=False)
        if raw
    }
    instances = [
        instance_of(beat, each, silent=beat.instance in state.silent)
        for beat, each in zip(beats, summaries, strict=True)
    ]
    # During a move, two instances may claim one unit: the newer epoch wins.
    owned, failures = dict[Unit, LiveUnit](), list[LiveFailure]()
    for name, each in zip(names, summaries, strict=True):
        failures += failures_of(name, each)
        for found in units_of(name, each):
            known = owned.get(found.unit)
            if known is None or found.epoch > known.epoch:
                owned[found.unit] = found
    wanted = [
        Unit(t, number, group) for t, group in sorted(offers) for number in range(counts.get(t, 0))
    ]
    strays = [unit for unit in wanted if unit not in owned]
    seen = partitions.rows(store, strays[:STRAYS_MAX], bad)
    units = sorted(
        (_ordered(one, orders) for one in (*owned.values(), *(_stray(row, now) for row in seen))),
        key=lambda one: (one.topic, one.group, one.partition),
    )
    return LiveView(
        fleet=fleet.name,
        now_unix_ms=now,
        directives=[
            *(order_of("pause", str(scope), each) for scope, each in orders.pauses.items()),
            *(order_of("stop", str(scope), each) for scope, each in orders.stops.items()),
            *(order_of("drain", name, each) for name, each in orders.drains.items()),
        ],
        instances=instances,
        assignments=units,
        failures=sorted(failures, key=lambda one: one.seconds_ago),
        totals=_totals(units),
        unseen=max(0, len(strays) - STRAYS_MAX),
        unreadable=bad.rows,
    )


def _ordered(unit: LiveUnit, orders: directives.Directives) -> LiveUnit:
    """Return a row with the directives that apply to it."""
    paused = orders.pause_of(unit.unit) is not None
    stopped = orders.stop_of(unit.unit) is not None
    return replace(unit, paused=paused, stopped=stopped) if paused or stopped else unit


def order_of(kind: str, scope: str, order: directives.Directive) -> LiveDirective:
    """Return a directive in effect, in words."""
    return LiveDirective(kind, scope, order.at_unix_ms, order.by, order.why)


def units_of(owner: str, summary: dict[str, Any]) -> list[LiveUnit]:
    """Read what an instance has published of its units."""
    return [unit_of(owner, raw) for raw in tables(summary.get("assignments"))]


def unit_of(owner: str, raw: dict[str, Any]) -> LiveUnit:
    """Read what an instance has published of one unit."""
    numbers: dict[str, Any] = {name: _whole(raw.get(name)) for name in _WHOLE}
    numbers |= {name: _real(raw.get(name)) for name in _REAL}
    return LiveUnit(
        topic=str(raw.get("topic", "")),
        partition=_whole(raw.get("partition")) or 0,
        group=str(raw.get("group", "")),
        owner=owner,
        state=str(raw.get("state", "unknown")),
        epoch=_whole(raw.get("epoch")) or 0,
        since_unix_ms=_whole(raw.get("since_unix_ms")),
        handler=str(raw.get("handler", "")),
        paused=False,
        stopped=False,
        loop_blocker=str(raw.get("loop_blocker") or ""),
        running=str(raw.get("running") or ""),
        rate_per=str(raw.get("rate_per") or ""),
        in_flight=_whole(raw.get("in_flight")),
        acked=published.rate(raw, "acked"),
        failed=published.rate(raw, "failed"),
        **numbers,
    )


_WHOLE = (
    *("lag", "pending", "delayed", "dead_letters", "partition_dead_letters"),
    *("oldest_unread_unix_ms", "next_due_unix_ms", "held", "held_keys"),
    *("suspects_left", "suspects", "round_size"),
)
_REAL = (
    *("oldest_seconds", "arriving", "lag_per_second", "p50_seconds", "p99_seconds"),
    *("mean_seconds", "longest_run_seconds", "progress_seconds", "waits_seconds", "rate"),
    *("timeout", "hard_timeout", "loop_blocked_seconds", "loop_blocked_seconds_ago"),
)


def _stray(row: partitions.UnitRow, now: int) -> LiveUnit:
    """Return a unit without an owner in the summaries, as stored in Redis."""
    oldest = row.oldest_unix_ms
    raw = {
        "topic": row.topic,
        "partition": row.partition,
        "group": row.group,
        # Owned by the fence, but not in a summary yet: its owner publishes it next.
        "state": "unknown" if row.state == "owned" else row.state,
        "epoch": row.epoch,
        "since_unix_ms": row.since_unix_ms,
        "lag": row.lag,
        "pending": row.pending,
        "delayed": row.delayed,
        "oldest_seconds": None if oldest is None else max(0, now - oldest) / 1000,
    }
    return unit_of(row.owner, raw)


def failures_of(owner: str, summary: dict[str, Any]) -> list[LiveFailure]:
    """Read what an instance has published of the failures of its units."""
    return [
        LiveFailure(
            error=str(each.get("error", "")),
            count=_whole(each.get("count")) or 0,
            seconds_ago=_real(each.get("seconds_ago")) or 0.0,
            topic=str(raw.get("topic", "")),
            partition=_whole(raw.get("partition")) or 0,
            group=str(raw.get("group", "")),
            instance=owner,
        )
        for raw in tables(summary.get("assignments"))
        for each in tables(raw.get("failures"))
    ]


def _totals(units: list[LiveUnit]) -> LiveTotals:
    def of_partitions(of: Callable[[LiveUnit], float | None]) -> float:
        """Return the sum over partitions: owners of different groups publish the same figure."""
        found: dict[tuple[str, int], float] = {}
        for unit in units:
            place = (unit.topic, unit.partition)
            found[place] = max(found.get(place, 0), of(unit) or 0)
        return sum(found.values())

    def total(of: Callable[[LiveUnit], float | None]) -> float:
        return sum(of(unit) or 0 for unit in units)

    return LiveTotals(
        arriving=round(of_partitions(lambda u: u.arriving), 2),
        acked=round(total(lambda u: u.acked), 2),
        failed=round(total(lambda u: u.failed), 2),
        lag=int(total(lambda u: u.lag)),
        lag_exact=all(unit.lag is not None for unit in units),
        pending=int(total(lambda u: u.pending)),
        delayed=int(total(lambda u: u.delayed)),
        dead_letters=int(of_partitions(lambda u: u.partition_dead_letters)),
    )


_real, _whole, tables = published.real, published.whole, published.tables
