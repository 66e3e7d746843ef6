"""The fleet as operators see it: one value, with a row for each group on each partition.

`read` measures the rows in Redis. `read_published` takes them from the summaries of the instances,
which are up to 2 s old, and measures only assignments that no summary contains. Neither function
writes. `status`, `top`, `why`, `trace` and the plan of a drain are views of the result. An
unreadable value counts as missing, is named in `unreadable`, and affects no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamqd.admin import fields_of, published, topics
from streamqd.admin.assignments import (
    AssignmentRow,
    RecentFailure,
    failures_of,
    measured,
    published_rows,
)
from streamqd.admin.instances import InstanceRow, instance_row
from streamqd.admin.published import Fleet, FleetState
from streamqd.admin.reading import BadValues, Unreadable, ask, measure_each
from streamqd.errors import Refused
from streamqd.model import Unit
from streamqd.store import members, statistics
from streamqd.store import topics as registry
from streamqd.store.directives import Directive, Directives
from streamqd.store.statistics import LetterCount, PartitionFigures
from streamqd.store.store import Store

LETTERS_MAX = 200_000  # dead letters that one read counts by group
STRAYS_MAX = 64  # assignments without an owner that `read_published` measures
TOPICS_MAX = 256


@dataclass(frozen=True, slots=True)
class FleetTotals:
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
class FleetSnapshot:
    """The fleet at one instant of the server's clock.

    `assignments` are sorted by topic, group and partition. `topics` has the partition count of each
    topic that was read, also without a group. `partitions` has the figures of partitions, if they
    were asked for. `failures` are those of all assignments, the latest first. `unseen` counts
    assignments without an owner that were not measured. `unreadable` are values in Redis that
    cannot be read: they count as missing.
    """

    fleet: str
    state: FleetState
    instances: Sequence[InstanceRow] = ()
    assignments: Sequence[AssignmentRow] = ()
    failures: Sequence[RecentFailure] = ()
    topics: Mapping[str, int] = field(default_factory=dict)
    partitions: Mapping[tuple[str, int], PartitionFigures] = field(default_factory=dict)
    unseen: int = 0
    unreadable: Sequence[Unreadable] = ()

    @property
    def now_unix_ms(self) -> int:
        """The server's clock."""
        return self.state.now_unix_ms

    @property
    def directives(self) -> list[tuple[str, str, Directive]]:
        """Kind (pause, stop or drain), scope and text of each directive in effect."""
        control = self.state.control
        kinds: dict[str, Mapping[Any, Directive]] = {
            "pause": control.pauses,
            "stop": control.stops,
            "drain": control.drains,
        }
        return [(kind, str(to), each) for kind, some in kinds.items() for to, each in some.items()]

    @property
    def totals(self) -> FleetTotals:
        """The sums over the assignments."""
        rows = self.assignments
        return FleetTotals(
            arriving=round(sum(_by_partition(rows, lambda row: row.arriving)), 2),
            acked=round(sum(row.acked or 0 for row in rows), 2),
            failed=round(sum(row.failed or 0 for row in rows), 2),
            lag=sum(row.lag or 0 for row in rows),
            lag_exact=all(row.lag is not None for row in rows),
            pending=sum(row.pending or 0 for row in rows),
            delayed=sum(row.delayed or 0 for row in rows),
            dead_letters=int(sum(_by_partition(rows, lambda row: row.partition_dead_letters))),
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON of `top`."""
        return {
            "fleet": self.fleet,
            "now_unix_ms": self.now_unix_ms,
            "directives": [
                {"kind": kind, "scope": scope} | fields_of(each, "at_unix_ms by why")
                for kind, scope, each in self.directives
            ],
            "instances": [fields_of(each, _TOP_INSTANCE) for each in self.instances],
            "assignments": [fields_of(each, _TOP_ASSIGNMENT) for each in self.assignments],
            "failures": self.failures,
            "totals": self.totals,
            "unseen": self.unseen,
            "unreadable": self.unreadable,
        }


_TOP_INSTANCE = (
    "instance state host version heartbeat_unix_ms at_unix_ms reported redis_up owned acked pid"
    " started_unix_ms capacity limit"
)
_TOP_ASSIGNMENT = (
    "topic partition group owner state epoch since_unix_ms handler lag pending delayed in_flight"
    " dead_letters partition_dead_letters oldest_seconds oldest_unread_unix_ms next_due_unix_ms"
    " acked failed arriving lag_per_second p50_seconds p99_seconds mean_seconds longest_run_seconds"
    " progress_seconds waits_seconds rate rate_per held held_keys suspects_left suspects round_size"
    " loop_blocked_seconds loop_blocked_seconds_ago loop_blocker running timeout hard_timeout"
    " paused stopped"
)


def _by_partition(
    rows: Iterable[AssignmentRow], of: Callable[[AssignmentRow], float | None]
) -> Iterable[float]:
    """Return a figure of each partition: owners of different groups publish the same one."""
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        place = (row.topic, row.partition)
        found[place] = max(found.get(place, 0), of(row) or 0)
    return found.values()


# --- reading --------------------------------------------------------------------------------------


def read(
    fleet: Fleet,
    topic: str | None = None,
    group: str | None = None,
    partition: int | None = None,
    *,
    dead_letters: bool = False,
    bad: BadValues | None = None,
) -> FleetSnapshot:
    """Read the fleet, and measure the assignments of one topic or all, one group or all, and so on.

    A partition needs its topic. Takes about 10 pipelines of at most 256 commands or scripts each
    for every 256 assignments. `dead_letters` also measures the partitions and counts dead letters
    by group, at most LETTERS_MAX. Raises TopicMissing, Refused.
    """
    store, bad = fleet.store, bad or BadValues()
    state = published.fleet_state(fleet, bad)
    names = [beat.instance for beat in state.beats]
    instances, reports, failures = _published(state, published.summaries(fleet, names, bad))
    counts, _, units = chosen(store, topic, group, partition, bad)
    rows = measured(store, units, state.now_unix_ms, bad, reports)
    figures: dict[tuple[str, int], PartitionFigures] = {}
    if dead_letters:
        figures = _partitions(store, counts, bad)
        letters = _letters(store, figures, bad)
        rows = [
            replace(
                row,
                dead_letters=letters[row.topic, row.partition].of(row.group),
                partition_dead_letters=figures[row.topic, row.partition].dead,
            )
            for row in rows
        ]
    return FleetSnapshot(
        fleet=fleet.name,
        state=state,
        instances=instances,
        assignments=_completed(rows, state.control, failures),
        failures=failures,
        topics=counts,
        partitions=figures,
        unreadable=bad.rows,
    )


def read_published(fleet: Fleet) -> FleetSnapshot:
    """Read what the instances have published, in two pipelines for any number of assignments.

    Assignments that are offered and in no summary are measured, at most STRAYS_MAX.
    """
    store, bad = fleet.store, BadValues()
    state = published.fleet_state(fleet, bad)
    names = [beat.instance for beat in state.beats]
    offers = {pair for beat in state.beats for pair in members.seen_of(beat).member.offers}
    offered = sorted({topic for topic, _ in offers})[:TOPICS_MAX]
    # Single GETs in one pipeline: a user with GET may lack MGET.
    replies = ask(
        store,
        [
            *(("HGET", store.keys.meta(topic), "partitionCount") for topic in offered),
            *(("GET", store.keys.instance(fleet.name, name)) for name in names),
        ],
        bad,
    )
    counts = {
        topic: bad.read(registry.count_of, topic, raw, store.keys.meta(topic)) or 0
        for topic, raw in zip(offered, replies, strict=False)
        if raw
    }
    instances, reports, failures = _published(
        state,
        [
            published.summary(raw, store.keys.instance(fleet.name, name), bad)
            for name, raw in zip(names, replies[len(offered) :], strict=True)
        ],
    )
    # During a move, two instances may claim one assignment: the newer epoch wins.
    owned = dict[Unit, AssignmentRow]()
    for row in sorted(reports, key=lambda row: row.epoch, reverse=True):
        owned.setdefault(row.unit, row)
    strays = [
        unit
        for topic, group in sorted(offers)
        for number in range(counts.get(topic, 0))
        if (unit := Unit(topic, number, group)) not in owned
    ]
    rows = [*owned.values(), *measured(store, strays[:STRAYS_MAX], state.now_unix_ms, bad)]
    rows.sort(key=lambda row: (row.topic, row.group, row.partition))
    return FleetSnapshot(
        fleet=fleet.name,
        state=state,
        instances=instances,
        assignments=_completed(rows, state.control, failures),
        failures=failures,
        topics=counts,
        unseen=max(0, len(strays) - STRAYS_MAX),
        unreadable=bad.rows,
    )


def _published(
    state: FleetState, summaries: Sequence[dict[str, Any]]
) -> tuple[list[InstanceRow], list[AssignmentRow], list[RecentFailure]]:
    """Return the instances, their assignments, and the failures, the latest first."""
    both = list(zip(state.beats, summaries, strict=True))
    failures = [each for beat, summary in both for each in failures_of(beat.instance, summary)]
    return (
        [instance_row(state, beat, summary) for beat, summary in both],
        [row for beat, summary in both for row in published_rows(beat.instance, summary)],
        sorted(failures, key=lambda each: each.seconds_ago),
    )


def _completed(
    rows: Iterable[AssignmentRow], control: Directives, failures: Iterable[RecentFailure]
) -> list[AssignmentRow]:
    """Return the rows with the directives that apply to them, and with their failures."""
    by_unit: dict[Unit, list[RecentFailure]] = {}
    for each in failures:
        by_unit.setdefault(Unit(each.topic, each.partition, each.group), []).append(each)
    found = []
    for row in rows:
        paused, stopped = control.pause_of(row.unit), control.stop_of(row.unit)
        failed = tuple(by_unit.get(row.unit, ()))
        if paused or stopped or failed:
            row = replace(
                row, paused=paused is not None, stopped=stopped is not None, failures=failed
            )
        found.append(row)
    return found


# --- measuring ------------------------------------------------------------------------------------


def chosen(
    store: Store,
    topic: str | None,
    group: str | None,
    partition: int | None,
    bad: BadValues,
) -> tuple[dict[str, int], dict[str, list[str]], list[Unit]]:
    """Return the partition count and the groups of each chosen topic, and the chosen assignments.

    None chooses all. A partition needs its topic. Raises TopicMissing, Refused.
    """
    counts = topics.counts_of(store, topic, bad)
    if partition is not None:
        topics.check_partition(topic or "", partition, counts.get(topic or "", 0))
    groups = topics.groups_of(store, counts, bad)
    units = [
        Unit(each, number, name)
        for each, count in counts.items()
        for name in groups[each]
        if group in (None, name)
        for number in (range(count) if partition is None else (partition,))
    ]
    if group is not None and not units:
        raise Refused(f"no group {group} reads {f'the topic {topic}' if topic else 'any topic'}")
    return counts, groups, units


def _partitions(
    store: Store, counts: Mapping[str, int], bad: BadValues
) -> dict[tuple[str, int], PartitionFigures]:
    """Measure all partitions of the topics, zeros where they cannot be measured."""
    places = [(topic, number) for topic, count in counts.items() for number in range(count)]
    calls = [statistics.measure_partition(store.keys, *place) for place in places]
    return {
        place: topics.partition_figures_of(reply, store.keys.trim(*place), bad)
        for place, reply in zip(places, measure_each(store, calls, bad), strict=True)
    }


def _letters(
    store: Store, figures: Mapping[tuple[str, int], PartitionFigures], bad: BadValues
) -> dict[tuple[str, int], LetterCount]:
    """Count the dead letters of each partition by group, until LETTERS_MAX are read in all."""
    found = {place: LetterCount(whole=not each.dead) for place, each in figures.items()}
    left, read = [place for place, each in figures.items() if each.dead], 0
    while left and read < LETTERS_MAX:
        calls = [statistics.count_letters(store.keys, *place, found[place]) for place in left]
        for place, reply in zip(left, measure_each(store, calls, bad), strict=True):
            known = found[place]
            found[place] = statistics.letters_counted(known, reply) if reply else LetterCount()
        # A counter that started again lost letters in between: the next read counts them.
        left = [place for place in left if found[place].after and not found[place].whole]
        read += len(calls) * statistics.LETTERS_AT_ONCE
    return found
