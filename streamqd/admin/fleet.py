"""The fleet: which instances live, what they own, and what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from streamqd.admin import directives, live, partitions, published, topics
from streamqd.admin.condition import condition, gravity
from streamqd.admin.directives import DirectiveRow
from streamqd.admin.live import LiveFailure, LiveUnit
from streamqd.admin.partitions import UnitRow, by_group
from streamqd.admin.reading import BadValues, Unreadable
from streamqd.model import Unit
from streamqd.store import members
from streamqd.store.directives import Directives
from streamqd.store.store import Store
from streamqd.words import known_sum, lasting, spans

OWNERS_MAX = 4  # instances that a sentence names
STUCK_SECONDS = 10.0  # one run that lasts longer is a problem
RECENT_SECONDS = 300.0  # a failure that is older says nothing of now
# Conditions that come from failures.
_FAILING = frozenset(
    {"crash-loop", "circuit-open", "circuit-half-open", "flooded", "blocked", "keys-held"}
)


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance of the fleet.

    `state` is starting, working, standby (healthy, owning nothing), limited (the
    system refuses it processes, so it serves fewer partitions), paused (by a signal), draining
    (it hands over what it owns), drained (an operator wants it to own nothing), silent (no beat for
    longer than the lease lasts) or unknown (it beats, but publishes no summary). `owned` counts the
    leases that it holds, `rate` the messages acknowledged per second, null when not known.
    `capacity` is how many partitions it can serve, null when the system sets no limit; `limit` is
    what the system says, '' without one.
    """

    instance: str
    state: str
    host: str
    pid: int | None
    version: str
    started_unix_ms: int | None
    beat_unix_ms: int
    offers: list[str]
    weight: int
    owned: int
    rate: float | None
    capacity: int | None
    limit: str


@dataclass(frozen=True, slots=True)
class UnitStatus(UnitRow):
    """A unit as the partitions view shows it, and how its worker is doing.

    `condition` is one word for all of it: ready, running, starting, stopped, paused, free, expired,
    circuit-open, circuit-half-open, crash-loop, blocked, keys-held, flooded, throttled or unknown
    among them. `worker` is the state of the owner's worker process (booting, ready, paused, quiet,
    broken …), or what a ready one waits for (blocked, full, halted, probing, flooded), '' when it
    is not known; `waits_seconds` is how long it still waits. `held` messages of `held_keys` keys
    wait there for a message of their key. `in_hand` are entries fetched and not handled, `rate` the
    messages acknowledged per second, `longest_run_seconds` the age of the handler run that runs
    now, `progress_seconds` how long ago a handler that runs has called `Message.progress`, if any
    has. `dead_letters` are the group's own, null when they are not counted. `error` is the class of
    the last failure, `error_seconds` ago, '' when none was in the last five minutes.
    """

    condition: str
    worker: str
    in_hand: int | None
    rate: float | None
    longest_run_seconds: float | None
    lag_per_second: float | None
    progress_seconds: float | None
    held: int | None
    held_keys: int | None
    waits_seconds: float | None
    dead_letters: int | None
    error: str
    error_seconds: float | None


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group over all partitions of its topic.

    `condition` is the gravest of its partitions' (see `UnitStatus`), in `condition_partitions` of
    them; `longest_run_seconds` is how long the longest run lasts that runs now. `reason` says why
    it is paused or stopped, or what failed last, '' for nothing. `lag` and `dead_letters` are null
    when they are not known of every partition.
    """

    topic: str
    group: str
    partitions: int
    owned: int
    condition: str
    condition_partitions: int
    longest_run_seconds: float | None
    reason: str
    rate: float | None
    lag: int | None
    pending: int
    delayed: int
    dead_letters: int | None
    oldest_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class Behind:
    """A group that has unread messages: how many, since when, and where that goes.

    `lag` is null when the server cannot count it, `since_unix_ms` when the oldest unread one was
    written. `lag_per_second` is how fast the lag mostly grew in about the
    last 20 seconds, null when not every partition of it is told.
    """

    topic: str
    group: str
    lag: int | None
    since_unix_ms: int | None
    lag_per_second: float | None
    partitions: list[int]


@dataclass(frozen=True, slots=True)
class StatusView:
    """The fleet at a glance.

    `orders` are what operators want of the fleet, pauses first; `strange_orders` those that cannot
    be read, with the problem. `dead_letters` counts them by topic (only topics that have some), and
    `problems` are sentences for people. `unreadable` are values in Redis that cannot be read: they
    count as missing, and nothing else is hidden by them.
    """

    fleet: str
    now_unix_ms: int
    orders: list[DirectiveRow]
    strange_orders: dict[str, str]
    problems: list[str]
    instances: list[InstanceRow]
    groups: list[GroupStatus]
    units: list[UnitStatus]
    behind: list[Behind]
    dead_letters: dict[str, int]
    unreadable: list[Unreadable]


def status(store: Store, fleet: str, *, stale: float, topic: str | None = None) -> StatusView:
    """Look at the fleet, or at what it does with one topic. Raises TopicMissing.

    `stale`: seconds after which a silent instance counts as gone.
    """
    bad = BadValues()
    state = published.fleet_state(store, fleet, stale=stale, bad=bad)
    names = [beat.instance for beat in state.beats]
    summaries = published.summaries(store, fleet, names, bad)
    seen = partitions.view(store, topic)
    # Counted by leases: an instance that has fallen silent still tells of what it owned. Of one
    # topic that would be too few, and the others are not looked at.
    owned = Counter(row.owner for row in seen.units if row.state == "owned")
    if topic is not None:
        owned = Counter({name: each.owned or 0 for name, each in state.live.items()})
    instances = [
        _instance(beat, summary, owned[beat.instance], silent=beat.instance in state.silent)
        for beat, summary in zip(state.beats, summaries, strict=True)
    ]
    workers: dict[tuple[str, Unit], LiveUnit] = {}
    failures: dict[tuple[str, Unit], list[LiveFailure]] = {}
    for name, summary in zip(names, summaries, strict=True):
        workers |= {(name, each.unit): each for each in live.units_of(name, summary)}
        for each in live.failures_of(name, summary):
            failures.setdefault((name, each.unit), []).append(each)
    # A worker that crashes in a loop has given its lease back: its instance tells of it.
    broken = {unit: name for (name, unit), each in workers.items() if each.state == "broken"}
    units = []
    for row in seen.units:
        place = (row.owner or broken.get(row.unit, ""), row.unit)
        units.append(_unit_status(row, workers.get(place), failures.get(place, []), state.control))
    letters = _dead_letters(store, topic, bad)
    for unread in seen.unreadable:
        bad.keep(unread)
    return StatusView(
        fleet=fleet,
        now_unix_ms=seen.now_unix_ms,
        orders=directives.rows(state),
        strange_orders=state.control.strange,
        problems=_problems(fleet, instances, units, summaries, letters, seen.now_unix_ms),
        unreadable=bad.rows,
        instances=instances,
        groups=_groups(units, state.control),
        units=units,
        behind=_behind(units),
        dead_letters=letters,
    )


def _instance(
    seen: members.Heartbeat, summary: dict[str, Any], owned: int, *, silent: bool
) -> InstanceRow:
    name, beat, info = seen[:3]
    return InstanceRow(
        instance=name,
        state="silent" if silent else str(summary.get("state", "unknown")),
        host=str(info.get("host", "")),
        pid=published.whole(info.get("pid")),
        version=str(info.get("version", "")),
        started_unix_ms=published.whole(summary.get("started_unix_ms")),
        beat_unix_ms=beat,
        offers=sorted("/".join(pair) for pair in members.seen_of(seen).member.offers),
        weight=published.whole(info.get("weight")) or 1,
        owned=owned,
        rate=round(sum(each.acked or 0.0 for each in live.units_of(name, summary)), 2)
        if summary
        else None,
        capacity=published.whole(info.get("capacity")),
        limit=str(info.get("capacity_problem", ""))[:200],
    )


def _unit_status(
    row: UnitRow, worker: LiveUnit | None, failures: list[LiveFailure], control: Directives
) -> UnitStatus:
    state = worker.state if worker else ""
    run = worker.longest_run_seconds if worker else None
    recent = [(each.seconds_ago, each.error) for each in failures]
    seconds, error = min((each for each in recent if each[0] <= RECENT_SECONDS), default=(None, ""))
    return UnitStatus(
        **{each.name: getattr(row, each.name) for each in fields(row)},
        condition=condition(
            row.state,
            state,
            run,
            paused=control.pause_of(row.unit) is not None,
            stopped=control.stop_of(row.unit) is not None,
        ),
        worker=state,
        in_hand=worker.in_hand if worker else None,
        rate=worker.acked if worker else None,
        longest_run_seconds=run,
        lag_per_second=worker.lag_per_second if worker else None,
        progress_seconds=worker.progress_seconds if worker else None,
        held=worker.held if worker else None,
        held_keys=worker.held_keys if worker else None,
        waits_seconds=worker.waits_seconds if worker else None,
        dead_letters=worker.dead_letters if worker else None,
        error=error,
        error_seconds=seconds,
    )


def _groups(units: list[UnitStatus], control: Directives) -> list[GroupStatus]:
    """A row for each group, in the order of the units."""
    found = []
    for (topic, group), some in by_group(units).items():
        word = min((unit.condition for unit in some), key=gravity)
        alike = [unit for unit in some if unit.condition == word]
        runs = [unit.longest_run_seconds for unit in some if unit.longest_run_seconds is not None]
        oldest = [unit.oldest_unix_ms for unit in some if unit.oldest_unix_ms is not None]
        rates = [unit.rate for unit in some if unit.rate is not None]
        found.append(
            GroupStatus(
                topic=topic,
                group=group,
                partitions=len(some),
                owned=sum(unit.state == "owned" for unit in some),
                condition=word,
                condition_partitions=len(alike),
                longest_run_seconds=max(runs, default=None),
                reason=_reason(alike, control),
                rate=round(sum(rates), 2) if rates else None,
                lag=known_sum(unit.lag for unit in some),
                pending=sum(unit.pending for unit in some),
                delayed=sum(unit.delayed for unit in some),
                dead_letters=known_sum(unit.dead_letters for unit in some),
                oldest_unix_ms=min(oldest, default=None),
            )
        )
    return found


def _reason(alike: list[UnitStatus], control: Directives) -> str:
    """Why units are in the condition that they share, '' when nothing tells it."""
    first = alike[0]
    stop, pause = control.stop_of(first.unit), control.pause_of(first.unit)
    if first.condition == "stopped" and stop is not None:
        return stop.why
    if first.condition == "paused" and pause is not None:
        return pause[1].why
    if first.condition in _FAILING:
        return _last_error(alike)
    return ""


def _last_error(alike: list[UnitStatus]) -> str:
    known = [unit for unit in alike if unit.error_seconds is not None]
    if not known:
        return ""
    error = min(known, key=lambda unit: unit.error_seconds or 0.0).error
    # The name of a class alone: its module is in the log.
    return error if " " in error else error.rpartition(".")[2]


def _behind(units: list[UnitStatus]) -> list[Behind]:
    """The groups that have something unread, the one that has waited for longest first."""
    found = []
    for (topic, group), some in by_group(unit for unit in units if unit.lag != 0).items():
        slopes = [each.lag_per_second for each in some if each.lag_per_second is not None]
        oldest = [unit.oldest_unread_unix_ms for unit in some]
        found.append(
            Behind(
                topic=topic,
                group=group,
                lag=known_sum(unit.lag for unit in some),
                since_unix_ms=min((each for each in oldest if each is not None), default=None),
                lag_per_second=round(sum(slopes), 2) if len(slopes) == len(some) else None,
                partitions=[unit.partition for unit in some],
            )
        )
    return sorted(found, key=lambda each: each.since_unix_ms or math.inf)


def _problems(
    fleet: str,
    instances: list[InstanceRow],
    units: list[UnitStatus],
    summaries: list[dict[str, Any]],
    letters: dict[str, int],
    now: int,
) -> list[str]:
    problems = []
    if not any(each.state != "silent" for each in instances):
        problems.append(f"no instance of the fleet {fleet} is alive")
    problems += [
        f"{each.instance} can run no more than {capacity} partitions: the system refuses another"
        f" process ({each.limit})"
        for each in instances
        if each.state != "silent" and (capacity := each.capacity) is not None
    ]
    for each, summary in zip(instances, summaries, strict=True):
        if each.state == "silent":
            silence = (now - each.beat_unix_ms) / 1000
            problems.append(f"the instance {each.instance} has been silent for {silence:.0f} s")
        elif each.state == "paused":
            problems.append(f"the instance {each.instance} is paused")
        elif summary.get("redis_up") is False:
            problems.append(f"the housekeeper of {each.instance} does not reach Redis")
    problems += _unit_problems(units)
    for topic, count in letters.items():
        problems.append(
            f"{topic} has {count} dead letters; see `streamqd dlq list {topic}`"
            if count > 1
            else f"{topic} has a dead letter; see `streamqd dlq list {topic}`"
        )
    return problems


def _unit_problems(units: list[UnitStatus]) -> list[str]:
    """One sentence for each group and condition, however many partitions are in it."""
    found = []
    for some in by_group(units).values():
        alike: dict[str, list[UnitStatus]] = {}
        for unit in some:
            alike.setdefault(unit.condition, []).append(unit)
        for word, these in sorted(alike.items(), key=lambda item: gravity(item[0])):
            if word == "running":
                these = [u for u in these if (u.longest_run_seconds or 0.0) >= STUCK_SECONDS]
            if these and (said := _problem(word, these, len(some))):
                found.append(said)
        if holding := [unit for unit in some if unit.held and unit.condition != "keys-held"]:
            found.append(_held(holding, len(some)))
    return found


def _problem(word: str, units: list[UnitStatus], partitions: int) -> str:
    """What is wrong with units of a group that are in the same condition, '' for nothing."""
    name, where = _name(units), _on(units) + _where(units, partitions)
    error = _last_error(units)
    last = f"; last: {error}" if error else ""
    waits = [unit.waits_seconds for unit in units if unit.waits_seconds is not None]
    then = f", next try in {max(0.0, min(waits)):.0f} s" if waits else ""
    if word == "running":
        run = max(unit.longest_run_seconds or 0.0 for unit in units)
        return f"{name} has been running one message for {lasting(run)}{where}"
    said = {
        "crash-loop": f"the worker of {name} crashes in a loop{where}{last}",
        "free": f"no instance owns {name}{where}",
        "expired": f"the owner of {name} does not renew its lease{where}",
        "circuit-open": f"the circuit breaker of {name} is open{where}{then}{last}",
        "circuit-half-open": f"the circuit breaker of {name} is half-open{where}{then}{last}",
        "flooded": f"the flood guard has stopped {name}{where}: most messages die{last}",
        "blocked": (
            f"{name} waits for a message that has failed, and lets nothing past it"
            f"{where}{then}{last}"
        ),
        "keys-held": f"{name} holds as many messages of held keys as it may{where}{then}{last}",
    }
    return said.get(word, "")


def _held(units: list[UnitStatus], partitions: int) -> str:
    held, keys = sum(unit.held or 0 for unit in units), sum(unit.held_keys or 0 for unit in units)
    of = "one held key" if keys == 1 else f"{keys} held keys"
    return f"{held} messages of {of} of {_name(units)} wait{_on(units)}{_where(units, partitions)}"


def _name(units: list[UnitStatus]) -> str:
    """The name of one unit, or of the group of several."""
    first = units[0]
    if len(units) == 1:
        return str(first.unit)
    return f"{first.topic}/{first.group}"


def _where(units: list[UnitStatus], partitions: int) -> str:
    """Which partitions of a group of so many; '' where the name says it."""
    if len(units) == 1:
        return ""
    if len(units) == partitions:
        return f" in all {partitions} partitions"
    return f" in {spans(unit.partition for unit in units)}"


def _on(units: list[UnitStatus]) -> str:
    """The instances that own units, as ` on west, east`; '' for none."""
    owners = sorted({unit.owner for unit in units if unit.owner})
    more = f" and {len(owners) - OWNERS_MAX} more" if len(owners) > OWNERS_MAX else ""
    return f" on {', '.join(owners[:OWNERS_MAX])}{more}" if owners else ""


def _dead_letters(store: Store, only: str | None, bad: BadValues) -> dict[str, int]:
    found = {
        topic: sum(each.dead for each in topics.figures_of(store, topic, count, bad))
        for topic, count in topics.counts_of(store, only, bad).items()
    }
    return {topic: dead for topic, dead in found.items() if dead}
