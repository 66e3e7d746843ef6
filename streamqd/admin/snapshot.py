"""Read a snapshot of the fleet, with a row for each assignment.

`read` reads each assignment in Redis itself. `read_published` uses the summaries that instances
publish every 2 s, and reads only assignments that no summary contains. If an instance hangs, its
last summary is used until it expires, which takes up to 10 s. Neither function writes. `status`,
`top`, `why`, `trace` and the plan of a drain are views of the result. An invalid value is treated
as missing and listed in `unreadable`. It does not affect other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamqd.admin import named_fields, published, topics
from streamqd.admin.assignments import (
    AssignmentRow,
    RecentFailure,
    Report,
    measure_assignments,
    parse_failures,
    parse_reports,
)
from streamqd.admin.instances import InstanceRow, instance_row
from streamqd.admin.published import Fleet, FleetState
from streamqd.admin.reading import Unreadable, ViewReader
from streamqd.errors import RequestRefusedError
from streamqd.model import Assignment
from streamqd.store import members, statistics
from streamqd.store import topics as registry
from streamqd.store.directives import Directive, Directives
from streamqd.store.scripts import Reply
from streamqd.store.statistics import DeadLetterCount, PartitionFigures

DEAD_LETTERS_MAX = 200_000  # maximum number of dead letters that one `read` counts by group
STRAYS_MAX = 64  # maximum number of assignments that one `read_published` measures
TOPICS_MAX = 256


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """Sums over the whole fleet.

    Rates are per second. `arriving` counts each partition once, even if several groups read it. If
    `lag_exact` is False, the lag of at least one assignment is unknown, and `lag` is a lower bound.
    """

    arriving: float
    acked: float
    failed: float
    lag: int
    lag_exact: bool
    pending: int
    waiting_retries: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The state of the fleet at one point in time, by the server's clock."""

    fleet: str
    state: FleetState
    instances: Sequence[InstanceRow] = ()
    #: The rows of the assignments, sorted by topic, group and partition.
    assignments: Sequence[AssignmentRow] = ()
    #: The failures of all assignments, latest first.
    failures: Sequence[RecentFailure] = ()
    #: The partition count of each topic that was read, even if no group reads it.
    topics: Mapping[str, int] = field(default_factory=dict)
    #: The figures of partitions, if the caller requested them.
    partitions: Mapping[tuple[str, int], PartitionFigures] = field(default_factory=dict)
    #: The number of unowned assignments that were not measured.
    unseen: int = 0
    #: Invalid values in Redis, which are treated as missing.
    unreadable: Sequence[Unreadable] = ()

    @property
    def now_unix_ms(self) -> int:
        """The time on the server's clock."""
        return self.state.now_unix_ms

    @property
    def directives(self) -> list[tuple[str, str, Directive]]:
        """The kind (pause, stop or drain), scope and content of each directive in effect."""
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
            waiting_retries=sum(row.waiting_retries or 0 for row in rows),
            dead_letters=int(sum(_by_partition(rows, lambda row: row.partition_dead_letters))),
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON document of `top`."""
        return {
            "fleet": self.fleet,
            "now_unix_ms": self.now_unix_ms,
            "directives": [
                {"kind": kind, "scope": scope} | named_fields(each, "at_unix_ms by why")
                for kind, scope, each in self.directives
            ],
            "instances": [named_fields(each, _TOP_INSTANCE) for each in self.instances],
            "assignments": [named_fields(each, _TOP_ASSIGNMENT) for each in self.assignments],
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
    "topic partition group owner state epoch since_unix_ms handler lag pending"
    " waiting_retries in_flight dead_letters partition_dead_letters oldest_seconds"
    " oldest_unread_unix_ms next_due_unix_ms acked failed arriving lag_per_second p50_seconds"
    " p99_seconds mean_seconds longest_run_seconds progress_seconds waits_seconds rate"
    " rate_per held held_keys suspects_left suspects round_size loop_blocked_seconds"
    " loop_blocked_seconds_ago loop_blocker running timeout hard_timeout paused stopped"
)


def _by_partition(
    rows: Iterable[AssignmentRow], of: Callable[[AssignmentRow], float | None]
) -> Iterable[float]:
    """Return one value for each partition: the maximum of the values in the rows of its groups."""
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
    reader: ViewReader | None = None,
) -> FleetSnapshot:
    """Read the fleet and the assignments of a topic, group and partition, each None for all.

    To select a partition, also select a topic. For every 256 assignments, this takes about 10
    pipelines of at most 256 commands or scripts. If `dead_letters` is True, also measure the
    partitions, and count up to DEAD_LETTERS_MAX dead letters by group. Raises TopicNotFoundError
    and RequestRefusedError.
    """
    reader = reader or ViewReader(fleet.store)
    state = published.fleet_state(fleet, reader)
    names = [heartbeat.instance for heartbeat in state.heartbeats]
    instances, reports, failures = _parse_summaries(
        state, published.read_summaries(reader, fleet.name, names)
    )
    counts, _, assignments = select_assignments(reader, topic, group, partition)
    figures = topics.read_figures(reader, counts) if dead_letters else {}
    counted = _count_dead_letters(reader, figures)
    shared_values = _make_shared_values(state.control, failures, figures, counted)
    return FleetSnapshot(
        fleet=fleet.name,
        state=state,
        instances=instances,
        assignments=measure_assignments(
            reader, assignments, state.now_unix_ms, reports, shared_values
        ),
        failures=failures,
        topics=counts,
        partitions=figures,
        unreadable=reader.rows,
    )


def read_published(fleet: Fleet) -> FleetSnapshot:
    """Read the summaries of all instances, in two pipelines however many assignments there are.

    If assignments have a consumer but are in no summary, up to STRAYS_MAX of them are measured in
    Redis.
    """
    store, reader = fleet.store, ViewReader(fleet.store)
    state = published.fleet_state(fleet, reader)
    names = [heartbeat.instance for heartbeat in state.heartbeats]
    offers = {
        pair
        for heartbeat in state.heartbeats
        for pair in members.to_member_view(heartbeat).member.offers
    }
    offered = sorted({topic for topic, _ in offers})[:TOPICS_MAX]
    # Single GETs are sent in a pipeline, because a Redis user with the permission for GET may lack
    # the one for MGET.
    replies = reader.ask(
        [
            *(("HGET", store.keys.meta(topic), "partitionCount") for topic in offered),
            *(("GET", store.keys.instance(fleet.name, name)) for name in names),
        ],
    )
    counts = {
        topic: reader.read(registry.parse_partition_count, topic, raw, store.keys.meta(topic)) or 0
        for topic, raw in zip(offered, replies, strict=False)
        if raw
    }
    instances, reports, failures = _parse_summaries(
        state,
        [
            published.parse_summary(reader, raw, store.keys.instance(fleet.name, name))
            for name, raw in zip(names, replies[len(offered) :], strict=True)
        ],
    )
    # During a move, two instances may publish the same assignment. The one with the newer epoch
    # owns it.
    owned = dict[Assignment, dict[str, Any]]()
    for assignment, values in sorted(reports, key=lambda each: each[1]["epoch"], reverse=True):
        owned.setdefault(assignment, values)
    strays = [
        assignment
        for topic, group in sorted(offers)
        for number in range(counts.get(topic, 0))
        if (assignment := Assignment(topic, number, group)) not in owned
    ]
    shared_values = _make_shared_values(state.control, failures)
    rows = [
        AssignmentRow(*assignment, **values | shared_values(assignment))
        for assignment, values in owned.items()
    ]
    rows += measure_assignments(
        reader, strays[:STRAYS_MAX], state.now_unix_ms, shared_values=shared_values
    )
    rows.sort(key=lambda row: (row.topic, row.group, row.partition))
    return FleetSnapshot(
        fleet=fleet.name,
        state=state,
        instances=instances,
        assignments=rows,
        failures=failures,
        topics=counts,
        unseen=max(0, len(strays) - STRAYS_MAX),
        unreadable=reader.rows,
    )


def _parse_summaries(
    state: FleetState, summaries: Sequence[dict[str, Any]]
) -> tuple[list[InstanceRow], list[Report], list[RecentFailure]]:
    """Return the instances, their assignments, and all failures, with the latest failure first."""
    both = list(zip(state.heartbeats, summaries, strict=True))
    failures = [
        failure
        for heartbeat, summary in both
        for failure in parse_failures(heartbeat.instance, summary)
    ]
    return (
        [instance_row(state, heartbeat, summary) for heartbeat, summary in both],
        [
            report
            for heartbeat, summary in both
            for report in parse_reports(heartbeat.instance, summary)
        ],
        sorted(failures, key=lambda failure: failure.seconds_ago),
    )


def _make_shared_values(
    control: Directives,
    failures: Iterable[RecentFailure],
    figures: Mapping[tuple[str, int], PartitionFigures] = {},
    dead_letters: Mapping[tuple[str, int], DeadLetterCount] = {},
) -> Callable[[Assignment], dict[str, Any]]:
    """Return a function that supplies the values of a row that are stored outside its assignment.

    These are values of the partition or of the whole fleet, such as directives. The owner of the
    assignment does not publish them, and the assignment's keys do not contain them.
    """
    by_assignment: dict[Assignment, list[RecentFailure]] = {}
    for each in failures:
        by_assignment.setdefault(Assignment(each.topic, each.partition, each.group), []).append(
            each
        )

    def shared_values(assignment: Assignment) -> dict[str, Any]:
        found: dict[str, Any] = {
            "paused": control.find_pause(assignment) is not None,
            "stopped": control.find_stop(assignment) is not None,
            "failures": tuple(by_assignment.get(assignment, ())),
        }
        place = (assignment.topic, assignment.partition)
        if place in dead_letters:
            found["dead_letters"] = dead_letters[place].get(assignment.group)
            found["partition_dead_letters"] = figures[place].dead
        return found

    return shared_values


# --- measuring ------------------------------------------------------------------------------------


def select_assignments(
    reader: ViewReader,
    topic: str | None,
    group: str | None,
    partition: int | None,
) -> tuple[dict[str, int], dict[str, list[str]], list[Assignment]]:
    """Return the selected topics with their partition counts and groups, and the assignments.

    None selects all. A partition requires a topic. Raises TopicNotFoundError and
    RequestRefusedError.
    """
    counts = topics.read_partition_counts(reader, topic)
    if partition is not None:
        topics.check_partition(topic or "", partition, counts.get(topic or "", 0))
    groups = topics.read_groups(reader, counts)
    assignments = [
        Assignment(each, number, name)
        for each, count in counts.items()
        for name in groups[each]
        if group in (None, name)
        for number in (range(count) if partition is None else (partition,))
    ]
    if group is not None and not assignments:
        where = f"topic {topic}" if topic else "any topic"
        raise RequestRefusedError(f"no group {group} reads {where}; run `streamqd group list`")
    return counts, groups, assignments


def _count_dead_letters(
    reader: ViewReader, figures: Mapping[tuple[str, int], PartitionFigures]
) -> dict[tuple[str, int], DeadLetterCount]:
    """Count the dead letters of each partition by group, at most DEAD_LETTERS_MAX in total."""
    found = {place: DeadLetterCount(whole=not each.dead) for place, each in figures.items()}
    left, read = [place for place, each in figures.items() if each.dead], 0
    while left and read < DEAD_LETTERS_MAX:
        calls = [statistics.count_dead_letters(reader.keys, *place, found[place]) for place in left]
        for place, reply in zip(left, reader.measure(calls), strict=True):
            counted = reader.figures(
                partial(_add_dead_letters, found[place]), reply, reader.keys.dlq(*place)
            )
            found[place] = counted or DeadLetterCount()
        # If dead letters were removed during a count, it has to start again. Do not do so here, so
        # that this function does not run for too long. The next read counts them again.
        left = [place for place in left if found[place].after and not found[place].whole]
        read += len(calls) * statistics.DEAD_LETTERS_AT_ONCE
    return found


def _add_dead_letters(known: DeadLetterCount, reply: Reply, _key: str) -> DeadLetterCount:
    return statistics.merge_dead_letter_count(known, reply)
