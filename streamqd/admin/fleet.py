"""The fleet: which instances live, what they own, and what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from streamqd.admin import partitions, steering
from streamqd.admin.pages import ask, measure
from streamqd.admin.partitions import UnitRow
from streamqd.admin.steering import OrderRow
from streamqd.model import Unit
from streamqd.store import statistics, topics
from streamqd.store.client import Link
from streamqd.store.keys import Keys

ALIKE_MAX = 5  # partitions that are named with the same problem


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


_WAITS = {
    "blocked": "waits for a message that has failed, and lets nothing past it",
    "full": "holds as many messages of held keys as it may, and reads no more",
    "halted": "begins nothing, because what its handler depends on is down",
    "probing": "tries one message at a time, because what its handler depends on was down",
    "flooded": "is stopped by its flood guard, because most messages die",
}


@dataclass(frozen=True, slots=True)
class UnitStatus(UnitRow):
    """A unit as the partitions view shows it, and how its worker is doing.

    `worker` is the state of the owner's worker process (booting, ready, paused, quiet, broken …),
    or what a ready one waits for (blocked, full, halted, probing, flooded), '' when it is not
    known. `held` messages of `held_keys` keys wait there for a message of their key. `in_hand` are
    entries fetched and not handled, `rate` the messages acknowledged per second,
    `longest_run_seconds` the age of the handler run that runs now, `progress_seconds` how long ago
    a handler that runs has called `Message.progress`, if any has.
    """

    worker: str
    in_hand: int | None
    rate: float | None
    longest_run_seconds: float | None
    lag_per_second: float | None
    progress_seconds: float | None
    held: int | None
    held_keys: int | None


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
    `problems` are sentences for people.
    """

    fleet: str
    now_unix_ms: int
    orders: list[OrderRow]
    strange_orders: dict[str, str]
    problems: list[str]
    instances: list[InstanceRow]
    units: list[UnitStatus]
    behind: list[Behind]
    dead_letters: dict[str, int]


def status(link: Link, keys: Keys, fleet: str, *, stale: float) -> StatusView:
    """Look at the fleet. `stale`: seconds after which a silent instance counts as gone."""
    place = steering.Fleet(link, keys, fleet, stale)
    beats, infos, orders = ask(link, steering.stored(place))
    told = {name: steering.document(raw) for name, raw in _pairs(infos)}
    names = [name.decode("utf-8", "replace") for name in beats[::2]]
    summaries = [
        steering.document(raw)
        for raw in ask(link, [("GET", keys.instance(fleet, n)) for n in names])
    ]
    seen = partitions.view(link, keys)
    now = seen.now_unix_ms
    # Counted by leases: an instance that has fallen silent still tells of what it owned.
    owned = Counter(row.owner for row in seen.units if row.state == "owned")
    dead_unix_ms = now - int(stale * 1000)
    instances = [
        _instance(name, int(float(beat)), told.get(name, {}), summary, dead_unix_ms, owned[name])
        for name, beat, summary in zip(names, beats[1::2], summaries, strict=True)
    ]
    workers = {
        (summary.get("instance"), *_unit_of(raw)): raw
        for summary in summaries
        for raw in _list(summary.get("units"))
    }
    units = [
        _unit_status(row, workers.get((row.owner, row.topic, row.partition, row.group), {}))
        for row in seen.units
    ]
    letters = _dead_letters(link, keys)
    sight = steering.sight_of(place, beats, infos, orders, now_unix_ms=now)
    return StatusView(
        fleet=fleet,
        now_unix_ms=now,
        orders=steering.rows(sight),
        strange_orders=sight.control.strange,
        problems=_problems(fleet, instances, units, summaries, letters, now),
        instances=instances,
        units=units,
        behind=_behind(units),
        dead_letters=letters,
    )


def _instance(
    name: str,
    beat: int,
    info: dict[str, Any],
    summary: dict[str, Any],
    stale_unix_ms: int,
    owned: int,
) -> InstanceRow:
    state = str(summary.get("state", "unknown"))
    units = _list(summary.get("units"))
    return InstanceRow(
        instance=name,
        state="silent" if beat < stale_unix_ms else state,
        host=str(info.get("host", "")),
        pid=_number(info.get("pid")),
        version=str(info.get("version", "")),
        started_unix_ms=_number(summary.get("started_unix_ms")),
        beat_unix_ms=beat,
        offers=[f"{topic}/{group}" for topic, group in info.get("offers", ())],
        weight=_number(info.get("weight")) or 1,
        owned=owned,
        rate=round(sum(_rate(unit) or 0.0 for unit in units), 2) if summary else None,
        capacity=_number(info.get("capacity")),
        limit=str(info.get("capacity_problem", ""))[:200],
    )


def _unit_status(row: UnitRow, worker: dict[str, Any]) -> UnitStatus:
    run = worker.get("longest_run_seconds")
    return UnitStatus(
        **{each.name: getattr(row, each.name) for each in fields(row)},
        worker=str(worker.get("state", "")),
        in_hand=_number(worker.get("in_hand")),
        rate=_rate(worker),
        longest_run_seconds=float(run) if run is not None else None,
        lag_per_second=_real(worker.get("lag_per_second")),
        progress_seconds=_real(worker.get("progress_seconds")),
        held=_number(worker.get("held")),
        held_keys=_number(worker.get("held_keys")),
    )


def _behind(units: list[UnitStatus]) -> list[Behind]:
    """The groups that have something unread, the one that has waited for longest first."""
    groups: dict[tuple[str, str], list[UnitStatus]] = {}
    for unit in units:
        if unit.lag != 0:
            groups.setdefault((unit.topic, unit.group), []).append(unit)
    found = []
    for (topic, group), some in groups.items():
        lags = [unit.lag for unit in some if unit.lag is not None]
        slopes = [each.lag_per_second for each in some if each.lag_per_second is not None]
        oldest = [unit.oldest_unread_unix_ms for unit in some]
        found.append(
            Behind(
                topic=topic,
                group=group,
                lag=sum(lags) if len(lags) == len(some) else None,
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
    """One sentence for each unit; of many that have the same problem only the first few."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for unit in units:
        if problem := _unit_problem(unit):
            alike.setdefault((unit.state, unit.worker, unit.owner), []).append(problem)
    found = []
    for (state, _, owner), some in alike.items():
        found += some[:ALIKE_MAX]
        if len(some) > ALIKE_MAX:
            whose = "that nobody owns" if state == "free" else f"of {owner} with the same problem"
            found.append(f"and {len(some) - ALIKE_MAX} more partitions {whose}")
    return found


def _unit_problem(unit: UnitStatus) -> str:
    """What is wrong with a unit, '' for nothing."""
    name = Unit(unit.topic, unit.partition, unit.group)
    if unit.worker == "broken":
        return f"the worker of {name} on {unit.owner} crashes in a loop"
    if unit.worker in _WAITS:
        return f"the worker of {name} on {unit.owner} {_WAITS[unit.worker]}"
    if unit.held:
        keys = "one held key" if unit.held_keys == 1 else f"{unit.held_keys} held keys"
        return f"{unit.held} messages of {keys} of {name} wait on {unit.owner}"
    if unit.state == "expired":
        return f"the owner of {name}, {unit.owner}, does not renew its lease"
    return f"nobody owns {name}" if unit.state == "free" else ""


def _dead_letters(link: Link, keys: Keys) -> dict[str, int]:
    found = {}
    for topic in topics.registered(link, keys):
        meta = topics.meta(link, keys, topic)
        count = meta.partitions if meta else 0
        calls = [statistics.measure_partition(keys, topic, number) for number in range(count)]
        total = sum(statistics.partition_figures(reply).dead for reply in measure(link, calls))
        if total:
            found[topic] = total
    return found


# --- reading what instances have published: they may be of another version ------------------------


def _pairs(raw: list[bytes] | None) -> list[tuple[str, bytes]]:
    flat = raw or []
    return [
        (name.decode("utf-8", "replace"), value)
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    ]


def _list(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _unit_of(raw: dict[str, Any]) -> tuple[Any, Any, Any]:
    return raw.get("topic"), raw.get("partition"), raw.get("group")


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _rate(unit: dict[str, Any]) -> float | None:
    rates = unit.get("rates")
    rate = rates.get("acked") if isinstance(rates, dict) else None
    return float(rate) if isinstance(rate, int | float) else None
