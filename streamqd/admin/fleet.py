"""The fleet view: live instances, the assignments they own, and findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from streamqd.admin import directives, live, partitions, published, schedules, topics, why
from streamqd.admin.checks import judged
from streamqd.admin.condition import condition, gravity, recovery
from streamqd.admin.directives import DirectiveRow
from streamqd.admin.instances import InstancesSeen, LiveInstance, instance_of, nobody
from streamqd.admin.live import LiveFailure, LiveUnit
from streamqd.admin.notices import INSTANCE_CHECKS
from streamqd.admin.partitions import UnitRow, by_group
from streamqd.admin.published import Fleet
from streamqd.admin.reading import BadValues, Unreadable, measure_each
from streamqd.admin.schedules import ScheduleTotals
from streamqd.model import Unit
from streamqd.store import statistics
from streamqd.store.directives import Directives
from streamqd.store.statistics import LetterCount
from streamqd.store.store import Store
from streamqd.words import known_sum

LETTERS_MAX = 200_000  # dead letters that one look counts by group
_NO_LETTERS, _NOTHING = LetterCount(whole=True), LetterCount()

# Conditions that come from failures.
_FAILING = frozenset(
    {"crash-loop", "circuit-open", "circuit-half-open", "flooded", "blocked", "keys-held"}
)


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance of the fleet.

    `state` is starting, working, standby (healthy, owning nothing), limited (the operating system
    refuses more processes, so it serves fewer partitions), paused (by a signal), draining (handing
    over its partitions), drained (an operator wants it to own nothing), silent (no heartbeat for
    longer than a lease lasts) or unknown (heartbeats without a published summary). `owned` counts
    its leases. `rate` is the number of messages acknowledged per second, null when unknown.
    `capacity` is the number of partitions it can serve, null without a limit of the operating
    system, and `limit` the reason for that limit, '' without one.
    """

    instance: str
    state: str
    host: str
    pid: int | None
    version: str
    started_unix_ms: int | None
    heartbeat_unix_ms: int
    offers: list[str]
    weight: int
    owned: int
    rate: float | None
    capacity: int | None
    limit: str


@dataclass(frozen=True, slots=True)
class UnitStatus(UnitRow):
    """An assignment as in the partitions view, with the condition of its worker.

    `condition` is one word: ready, running, starting, stopped, paused, free, expired, circuit-open,
    circuit-half-open, crash-loop, failed (given up after an internal error), blocked, keys-held,
    flooded, throttled, recovering or unknown among them. `worker` is the state of the owner's
    worker process (booting, ready, paused, quiet, broken, failed …). For a ready worker it is the
    reason for its wait (blocked, full, halted, probing, flooded, throttled) or recovering. It is ''
    when unknown, and `waits_seconds` is the remaining wait. A recovering worker has `suspects_left`
    of `suspects` messages of a crash or a lost host left to run, and runs `round_size` now.
    `held` messages of `held_keys` keys wait there for an earlier message of their key. `in_flight`
    counts entries fetched and not handled, `rate` messages acknowledged per second.
    `longest_run_seconds` is the age of the oldest handler run, and `progress_seconds` the time
    since a running handler called `Message.progress`, if any did. `dead_letters` belong to the
    group, null when not counted. `error` is the class of the last failure, `error_seconds` ago, ''
    without one in the last five minutes.
    """

    condition: str
    worker: str
    in_flight: int | None
    rate: float | None
    longest_run_seconds: float | None
    lag_per_second: float | None
    progress_seconds: float | None
    held: int | None
    held_keys: int | None
    suspects_left: int | None
    suspects: int | None
    round_size: int | None
    waits_seconds: float | None
    dead_letters: int | None
    error: str
    error_seconds: float | None


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A group over all partitions of its topic.

    `condition` is the most serious of its partitions' (see `UnitStatus`), which
    `condition_partitions` of them share. `longest_run_seconds` is the age of its oldest handler
    run. `reason` is the reason of a pause or stop, the progress of a run in rounds, or the last
    failure, '' without one. `lag` and `dead_letters` are null unless known for every partition.
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
    """A group with unread messages: their number, their age and their trend.

    `lag` is null when the server cannot count it, `since_unix_ms` when the oldest unread one was
    written. `lag_per_second` is how fast the lag mostly grew in about the
    last 20 seconds, null when it is not known of every partition.
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

    `directives` are those of operators, pauses first. `unreadable_directives` maps others to the
    problem. `dead_letters` counts them by topic (only topics with any). `problems` are
    sentences for people. `unreadable` values in Redis count as missing and hide nothing else.
    """

    fleet: str
    now_unix_ms: int
    directives: list[DirectiveRow]
    unreadable_directives: dict[str, str]
    problems: list[str]
    instances: list[InstanceRow]
    groups: list[GroupStatus]
    assignments: list[UnitStatus]
    lagging: list[Behind]
    dead_letters: dict[str, int]
    schedules: ScheduleTotals
    unreadable: list[Unreadable]


def status(fleet: Fleet, topic: str | None = None) -> StatusView:
    """Return the state of the fleet, or of its work on one topic. Raises TopicMissing."""
    store, bad = fleet.store, BadValues()
    state = published.fleet_state(fleet, bad)
    names = [beat.instance for beat in state.beats]
    summaries = published.summaries(fleet, names, bad)
    seen = partitions.view(store, topic)
    # Count by leases, because a silent instance still shows its former number. For one topic this
    # would be too few, as other topics are not read.
    owned = Counter(row.owner for row in seen.assignments if row.state == "owned")
    if topic is not None:
        owned = Counter({name: each.owned or 0 for name, each in state.live.items()})
    found = [
        instance_of(beat, summary, silent=beat.instance in state.silent)
        for beat, summary in zip(state.beats, summaries, strict=True)
    ]
    lives = [replace(each, owned=owned[each.instance]) for each in found]
    known = why.members_of(lives, state)
    instances = [
        _instance(each, known[each.instance].offers, state.infos[each.instance].get("weight"))
        for each in lives
    ]
    workers: dict[tuple[str, Unit], LiveUnit] = {}
    failures: dict[tuple[str, Unit], list[LiveFailure]] = {}
    for name, summary in zip(names, summaries, strict=True):
        workers |= {(name, each.unit): each for each in live.units_of(name, summary)}
        for each in live.failures_of(name, summary):
            failures.setdefault((name, each.unit), []).append(each)
    # A worker in a crash loop has returned its lease, but its instance still reports it.
    resting = ("broken", "failed")
    broken = {unit: name for (name, unit), each in workers.items() if each.state in resting}
    by_topic, letters = _letters(store, topic, bad)
    units, causes = [], []
    for row in seen.assignments:
        place = (row.owner or broken.get(row.unit, ""), row.unit)
        worker, failed = workers.get(place), failures.get(place, [])
        own = letters.get((row.topic, row.partition), _NO_LETTERS).of(row.group)
        units.append(_unit_status(row, worker, failed, state.control, own))
        causes.append(why.problem(why.wait_facts(row, worker, failed, known, state)))
    timed = schedules.totals(store, topic, seen.now_unix_ms, bad)
    for unread in seen.unreadable:
        bad.keep(unread)
    return StatusView(
        fleet=fleet.name,
        now_unix_ms=seen.now_unix_ms,
        directives=directives.rows(state),
        unreadable_directives=state.control.strange,
        problems=[
            *_problems(fleet.name, lives, filter(None, causes), by_topic, state.now_unix_ms),
            *_of_schedules(timed),
        ],
        unreadable=bad.rows,
        instances=instances,
        groups=_groups(units, state.control),
        assignments=units,
        lagging=_behind(units),
        dead_letters=by_topic,
        schedules=timed,
    )


def _instance(each: LiveInstance, offers: frozenset[tuple[str, str]], weight: Any) -> InstanceRow:
    return InstanceRow(
        **{name: getattr(each, name) for name in _OF_INSTANCES},
        offers=sorted("/".join(pair) for pair in offers),
        weight=published.whole(weight) or 1,
        rate=each.acked if each.reported else None,
    )


# Fields that a row copies from its instance under the same name.
_OF_INSTANCES = (
    *("instance", "state", "host", "pid", "version", "started_unix_ms", "heartbeat_unix_ms"),
    *("owned", "capacity", "limit"),
)
# Fields that an assignment copies from its owner's worker under the same name.
_OF_WORKERS = (
    *(
        "in_flight",
        "longest_run_seconds",
        "lag_per_second",
        "progress_seconds",
        "held",
        "held_keys",
    ),
    *("suspects_left", "suspects", "round_size", "waits_seconds"),
)


def _unit_status(
    row: UnitRow,
    worker: LiveUnit | None,
    failures: list[LiveFailure],
    control: Directives,
    dead_letters: int | None,
) -> UnitStatus:
    state = worker.state if worker else ""
    of_worker: dict[str, Any] = {name: getattr(worker, name, None) for name in _OF_WORKERS}
    run = worker.longest_run_seconds if worker else None
    if state in ("halted", "probing"):
        failures = live.of_dependencies(failures)
    recent = [(each.seconds_ago, each.error) for each in failures]
    seconds, error = min(
        (each for each in recent if each[0] <= why.RECENT_SECONDS), default=(None, "")
    )
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
        rate=worker.acked if worker else None,
        **of_worker,
        dead_letters=dead_letters,
        error=error,
        error_seconds=seconds,
    )


def _groups(units: list[UnitStatus], control: Directives) -> list[GroupStatus]:
    """Return a row for each group, in the order of the units."""
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
    """Return the reason for the condition that assignments share, '' when unknown."""
    first = alike[0]
    stop, pause = control.stop_of(first.unit), control.pause_of(first.unit)
    if first.condition == "stopped" and stop is not None:
        return stop.why
    if first.condition == "paused" and pause is not None:
        return pause[1].why
    if first.condition in _FAILING:
        return _last_error(alike)
    if first.condition == "recovering":
        figures = ((each.suspects_left, each.suspects, each.round_size) for each in alike)
        left, of, sizes = zip(*figures, strict=True)
        return recovery(known_sum(left), known_sum(of), max(size or 0 for size in sizes))
    return ""


def _last_error(alike: list[UnitStatus]) -> str:
    known = [(each.error_seconds, each.error) for each in alike if each.error_seconds is not None]
    return live.error_name(min(known)[1]) if known else ""


def _behind(units: list[UnitStatus]) -> list[Behind]:
    """Groups with unread messages, longest wait first."""
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
    instances: list[LiveInstance],
    causes: Iterable[why.UnitCause],
    letters: dict[str, int],
    now: int,
) -> list[str]:
    seen = InstancesSeen(now, instances)
    problems = [
        each.text
        + (
            f"; gone for good: `streamqd forget {each.about}`"
            if each.check == "fleet.silent"
            else ""
        )
        for each in judged(INSTANCE_CHECKS, seen)
        if each.severity != "note"
    ]
    if all(each.state == "silent" for each in instances):
        problems.insert(0, nobody(fleet).text)
    problems += [text for _, text in why.summed_up(causes)]
    for topic, count in letters.items():
        problems.append(
            f"{topic} has {count} dead letters; see `streamqd dlq list {topic}`"
            if count > 1
            else f"{topic} has a dead letter; see `streamqd dlq list {topic}`"
        )
    return problems


def _of_schedules(timed: ScheduleTotals) -> list[str]:
    """Return the problem of schedules that send nothing, if there are any."""
    words = {
        "late": timed.late,
        "unreadable": timed.unreadable,
        "orphaned": timed.orphaned,
        "without a topic": timed.missing,
    }
    found = [f"{number:,} {word}" for word, number in words.items() if number]
    if not found:
        return []
    return [f"schedules: {', '.join(found)}; see `streamqd doctor --only schedules`"]


def _letters(
    store: Store, only: str | None, bad: BadValues
) -> tuple[dict[str, int], dict[tuple[str, int], LetterCount]]:
    """Count dead letters by topic (only topics with any), and by partition and group.

    Reads at most LETTERS_MAX letters. A partition with unread letters left has no counts by group.
    """
    dead: dict[tuple[str, int], int] = {}
    for topic, count in topics.counts_of(store, only, bad).items():
        for number, each in enumerate(topics.figures_of(store, topic, count, bad)):
            dead[topic, number] = each.dead
    by_topic = Counter[str]()
    for (topic, _), number in dead.items():
        by_topic[topic] += number
    counted = {place: LetterCount() for place, number in dead.items() if number}
    left, read = list(counted), 0
    while left and read < LETTERS_MAX:
        calls = [statistics.count_letters(store.keys, *place, counted[place]) for place in left]
        for place, reply in zip(left, measure_each(store, calls, bad), strict=True):
            known = counted[place]
            counted[place] = statistics.letters_counted(known, reply) if reply else _NOTHING
        # A counter that started again lost letters in between: the next status counts them.
        left = [place for place in left if counted[place].after and not counted[place].whole]
        read += len(calls) * statistics.LETTERS_AT_ONCE
    return dict(+by_topic), counted
