"""Rows of assignments, each of which shows one group on one partition to operators.

`published_rows` builds the rows from the summary that an instance has published.
`measure_assignments` reads the assignments in Redis itself, and adds the values that their owners
have published. Neither function writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from streamqd.admin import backlog, published
from streamqd.admin.condition import condition
from streamqd.admin.reading import ViewReader, lease_views
from streamqd.model import Assignment
from streamqd.store import spark, statistics
from streamqd.store.leases import LeaseView
from streamqd.store.statistics import AssignmentFigures, Backlog

COUNT_MAX = 1_000  # unread messages counted one by one if the server keeps no count
RECENT_SECONDS = 300.0  # age up to which a failure counts as recent
# Worker states in which the instance has released the lease, but still publishes the assignment.
_RELEASED_STATES = ("broken", "failed")
# An assignment, and the values of its row that an instance has published.
Report = tuple[Assignment, dict[str, Any]]
_VERDICT_CLASSES = (
    "streamqd.handlers.Retry",
    "streamqd.handlers.Dead",
    "streamqd.handlers.Undecodable",
)


@dataclass(frozen=True, slots=True)
class RecentFailure:
    """One kind of failure of one assignment on one instance.

    `count` is the number of such failures since the instance first owned the assignment.
    """

    error: str
    count: int
    seconds_ago: float
    topic: str
    partition: int
    group: str
    instance: str


@dataclass(frozen=True, slots=True)
class AssignmentRow:
    """One group on one partition. None means unknown.

    The first fields are read from Redis. The fields from `worker` to `hard_timeout` are published
    by the instance `reporter`. This is the owner. If the worker crashed in a loop, so that the
    assignment was released, it is the last owner. If no instance reports on the assignment,
    `reporter` is ''. `paused` and `stopped` are true as soon as the directive is stored, even if no
    instance has applied it yet.
    """

    topic: str
    partition: int
    group: str
    #: One of owned, expired (not renewed in time, and not taken over yet), free, or query. A query
    #: has no owning instance, because the group only shows the position of a Spark query.
    lease: str = "free"
    owner: str = ""  #: owning instance, '' if there is none
    epoch: int = 0  #: number that grows with each change of owner
    since_unix_ms: int | None = None  #: start of the ownership, None if there is no owner
    quarantine: bool = False  #: True while messages of a lost owner run in rounds
    exists: bool = True  #: False if the group does not exist on the partition
    position: str = ""  #: ID that was delivered last, '' if it was not read
    #: Unread messages, including `retry_unread`. None if the server keeps no count and there are
    #: too many to count. In that case, `lag_at_least` is a lower bound.
    lag: int | None = None
    lag_at_least: int = 0
    retry_unread: int = 0  #: unread messages in the group's retry stream
    pending: int | None = None  #: messages that were delivered and not acknowledged
    waiting_retries: int | None = None  #: messages that wait for their next attempt
    oldest_unix_ms: int | None = None  #: write time of the oldest unread or pending message
    oldest_unread_unix_ms: int | None = None  #: write time of the oldest unread message
    oldest_pending_unix_ms: int | None = None  #: write time of the oldest pending message
    oldest_seconds: float | None = None  #: age of the oldest unread or pending message
    next_due_unix_ms: int | None = None  #: due time of the first waiting retry
    dead_letters: int | None = None  #: dead letters of the group
    partition_dead_letters: int | None = None  #: dead letters of all groups of the partition
    reporter: str = ""
    #: State of the worker process: booting, ready, paused, quiet, broken, failed or gone. Instead
    #: of ready, it can be the reason why the worker waits (blocked, full, halted, probing, flooded
    #: or throttled), or recovering.
    worker: str = ""
    pid: int | None = None  #: process ID of the worker
    rss: int | None = None  #: resident memory of the worker, in bytes
    handler: str = ""
    in_flight: int | None = None  #: entries that were fetched and not handled yet
    held: int | None = None  #: messages that wait for an earlier message of their key
    held_keys: int | None = None  #: keys of the held messages
    suspects_left: int | None = None  #: `suspects` that have not run in a round yet
    suspects: int | None = None  #: messages of a crash or a lost host that run in rounds
    round_size: int | None = None  #: suspects in the round that runs now
    acked: float | None = None  #: messages per second, averaged over 10 s
    failed: float | None = None  #: messages per second, averaged over 10 s
    dead_lettered: float | None = None  #: messages per second, averaged over 10 s
    arriving: float | None = None  #: entries written to the partition per second, over 20 s
    lag_per_second: float | None = None  #: median change of the lag per second, over 20 s
    p50_seconds: float | None = None  #: median duration of a handler run in the last minute
    p99_seconds: float | None = None  #: 99th percentile of these durations
    mean_seconds: float | None = None  #: mean duration of a handler run in the last minute
    longest_run_seconds: float | None = None  #: age of the oldest current handler run
    progress_seconds: float | None = None  #: time since a handler called `Message.progress`
    waits_seconds: float | None = None  #: time until the wait of the worker is over
    rate: float | None = None  #: maximum number of runs per second on the partition
    rate_per: str = ""  #: group if `rate` is the partition's share of a limit for the group
    #: Time for which the event loop has been blocked, 0 if it is running.
    loop_blocked_seconds: float | None = None
    loop_blocked_seconds_ago: float | None = None  #: time since the last block ended
    loop_blocker: str = ""  #: code that blocks it or blocked it last, FILE:LINE in FUNCTION
    running: str = ""  #: place of the message whose handler has been running longest
    timeout: float | None = None  #: seconds
    hard_timeout: float | None = None  #: seconds
    paused: bool = False
    stopped: bool = False
    failures: tuple[RecentFailure, ...] = ()  #: kinds of failure on any instance, latest first

    @property
    def assignment(self) -> Assignment:
        """The assignment that this row describes."""
        return Assignment(self.topic, self.partition, self.group)

    @property
    def name(self) -> str:
        """The name of the assignment, `topic/partition/group`."""
        return str(self.assignment)

    @property
    def state(self) -> str:
        """The state of the worker, or that of the lease if it is free or expired.

        The state is `unknown` if no instance reports on a worker. This is always so for a query.
        """
        return self.lease if self.lease in ("free", "expired") else self.worker or "unknown"

    @property
    def condition(self) -> str:
        """The condition of the assignment, as defined by the function `condition`."""
        run = self.longest_run_seconds
        return condition(self.lease, self.worker, run, paused=self.paused, stopped=self.stopped)

    @property
    def last_failure(self) -> RecentFailure | None:
        """The last failure, or None if there was none in the last 5 minutes.

        While the circuit breaker is open or half open, only failures that can open it count.
        """
        found = self.failures
        if self.worker in ("halted", "probing"):
            found = dependency_failures(found)
        return found[0] if found and found[0].seconds_ago <= RECENT_SECONDS else None


class HasAssignment(Protocol):
    """An object that describes one assignment."""

    @property
    def assignment(self) -> Assignment:
        """The described assignment."""


AnyAssignment = TypeVar("AnyAssignment", bound=HasAssignment)


def by_group(rows: Iterable[AnyAssignment]) -> dict[tuple[str, str], list[AnyAssignment]]:
    """Return the rows grouped by topic and group."""
    found: dict[tuple[str, str], list[AnyAssignment]] = {}
    for row in rows:
        found.setdefault((row.assignment.topic, row.assignment.group), []).append(row)
    return found


def dependency_failures(failures: Iterable[RecentFailure]) -> tuple[RecentFailure, ...]:
    """Return the failures that can open a circuit breaker.

    If a handler raises `Dead` or `Retry`, or if a payload cannot be decoded, the failure does not
    count toward opening it.
    """
    return tuple(each for each in failures if each.error not in _VERDICT_CLASSES)


def error_name(error: str) -> str:
    """Return the name of an error class without its module. A sentence is returned unchanged."""
    return error if " " in error else error.rpartition(".")[2]


# --- published ------------------------------------------------------------------------------------


def published_rows(instance: str, summary: dict[str, Any]) -> list[AssignmentRow]:
    """Return the assignments in an instance's summary, as if the instance owned them all."""
    return [
        AssignmentRow(*assignment, **values)
        for assignment, values in parse_reports(instance, summary)
    ]


def parse_reports(instance: str, summary: dict[str, Any]) -> list[Report]:
    """Return each assignment in a summary with its published values.

    The values are keyword arguments of AssignmentRow, so that a caller can add values from Redis
    before it builds the row.
    """
    tables = published.to_tables(summary.get("assignments"))
    return [(_parse_assignment(raw), _published_values(instance, raw)) for raw in tables]


_WHOLE = (
    *(
        "since_unix_ms",
        "lag",
        "pending",
        "waiting_retries",
        "oldest_unread_unix_ms",
        "next_due_unix_ms",
    ),
    *("in_flight", "dead_letters", "partition_dead_letters", "held", "held_keys"),
    *("suspects_left", "suspects", "round_size", "pid", "rss"),
)
_REAL = (
    *("oldest_seconds", "arriving", "lag_per_second", "p50_seconds", "p99_seconds"),
    *("mean_seconds", "longest_run_seconds", "progress_seconds", "waits_seconds", "rate"),
    *("timeout", "hard_timeout", "loop_blocked_seconds", "loop_blocked_seconds_ago"),
)
_TEXT = ("handler", "rate_per", "loop_blocker", "running")


def _published_values(instance: str, raw: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {name: published.read_integer(raw.get(name)) for name in _WHOLE}
    values |= {name: published.read_number(raw.get(name)) for name in _REAL}
    values |= {name: str(raw.get(name) or "") for name in _TEXT}
    values |= {name: published.rate(raw, name) for name in ("acked", "failed", "dead_lettered")}
    epoch, worker = published.read_integer(raw.get("epoch")) or 0, str(raw.get("state", "unknown"))
    return values | {
        "lease": "owned",
        "owner": instance,
        "epoch": epoch,
        "reporter": instance,
        "worker": worker,
    }


def _parse_assignment(raw: dict[str, Any]) -> Assignment:
    number = published.read_integer(raw.get("partition")) or 0
    return Assignment(str(raw.get("topic", "")), number, str(raw.get("group", "")))


def parse_failures(instance: str, summary: dict[str, Any]) -> list[RecentFailure]:
    """Return the failures in an instance's summary."""
    return [
        RecentFailure(
            str(each.get("error", "")),
            published.read_integer(each.get("count")) or 0,
            published.read_number(each.get("seconds_ago")) or 0.0,
            *_parse_assignment(raw),
            instance=instance,
        )
        for raw in published.to_tables(summary.get("assignments"))
        for each in published.to_tables(raw.get("failures"))
    ]


# --- measured -------------------------------------------------------------------------------------


def measure_assignments(
    reader: ViewReader,
    assignments: Sequence[Assignment],
    now_unix_ms: int,
    reports: Sequence[Report] = (),
    shared_values: Callable[[Assignment], dict[str, Any]] = lambda _: {},
    *,
    count_max: int = COUNT_MAX,
) -> list[AssignmentRow]:
    """Return a row for each assignment, from Redis and from the values that its owner published.

    `reports` contains the values from `parse_reports`, and `shared_values` returns additional
    values for the row of an assignment. If the server does not count unread messages, this function
    counts them one by one, up to `count_max`.
    """
    known = {(values["owner"], assignment): values for assignment, values in reports}
    known |= {
        ("", assignment): values
        for assignment, values in reports
        if values["worker"] in _RELEASED_STATES
    }
    views = lease_views(reader, assignments)
    calls = [statistics.measure_assignment(reader.keys, assignment) for assignment in assignments]
    replies = reader.measure(calls)
    figures = {
        assignment: each
        for assignment, reply in zip(assignments, replies, strict=True)
        if (each := backlog.parse_figures(reader, assignment, reply)) is not None
    }
    unread, uncounted = _count_unread(reader, figures, count_max)
    rows = []
    for assignment, view, reply in zip(assignments, views, replies, strict=True):
        lease, owner, since = holder(view)
        each, retry = figures.get(assignment, _NO_FIGURES), unread[assignment, RETRY]
        lag, oldest = unread[assignment, MAIN] + retry, each.oldest_unix_ms()
        values = {
            "lease": "query" if assignment.is_of_query else lease,
            "owner": owner,
            "epoch": view.epoch,
            "since_unix_ms": since,
            "quarantine": view.quarantine,
            "exists": reply is None or reply.word != "NOGROUP",
            "lag": lag
            if assignment in figures and assignment not in uncounted and lag <= count_max
            else None,
            "lag_at_least": lag,
            "retry_unread": retry,
            "pending": each.pending,
            "waiting_retries": each.waiting_retries,
            "oldest_unix_ms": oldest,
            "oldest_unread_unix_ms": each.oldest_unread_unix_ms(),
            "oldest_pending_unix_ms": each.oldest_pending_unix_ms(),
            "oldest_seconds": None if oldest is None else max(0, now_unix_ms - oldest) / 1000,
            "next_due_unix_ms": each.next_due_unix_ms,
        }
        rows.append(
            AssignmentRow(
                *assignment,
                **known.get((owner, assignment), {}) | values | shared_values(assignment),
            )
        )
    return rows


_NO_BACKLOG = Backlog(0, "", None, "", 0)
_NO_FIGURES = AssignmentFigures(_NO_BACKLOG, _NO_BACKLOG, 0, None)


def holder(lease: LeaseView) -> tuple[str, str, int | None]:
    """Return a lease's state (owned, expired or free), its owner, and the start of ownership."""
    if not lease.token:
        return "free", "", None
    return "expired" if lease.ttl is None else "owned", lease.owner, lease.since_unix_ms


MAIN, RETRY = 0, 1  # the partition's stream, and the retry stream of the group


def _count_unread(
    reader: ViewReader, figures: Mapping[Assignment, AssignmentFigures], most: int
) -> tuple[Counter[tuple[Assignment, int]], set[Assignment]]:
    """Count the unread messages of each assignment, separately for MAIN and RETRY.

    If the server does not count them, this function counts them one by one, up to `most` or a few
    more. The streams take turns, because a call counts only as many messages as its byte limit
    allows. Also return the assignments whose streams could not be read to the end.
    """
    keys, found, uncounted = reader.keys, Counter[tuple[Assignment, int]](), set[Assignment]()
    # Streams that are not fully counted yet, with the ID after which to continue counting.
    left: list[tuple[tuple[Assignment, int], str, str]] = []
    for assignment, each in figures.items():
        streams = {keys.source(*assignment): each.main, keys.retry_stream(*assignment): each.retry}
        for at, (stream, behind) in enumerate(streams.items()):
            found[assignment, at] = 1 if behind.unread is None else behind.unread
            if behind.unread is None:
                left.append(((assignment, at), stream, behind.oldest_unread_id))
    while left:
        steps = [spark.step(stream, after, "+", spark.STEP_MAX) for _, stream, after in left]
        before, left = left, []
        for (place, stream, _), reply in zip(before, reader.measure(steps), strict=True):
            step = reader.figures(spark.StreamStep.parse, reply, stream)
            if step is None:
                uncounted.add(place[0])
                continue
            found[place] += step.passed
            if step.more and found[place] <= most:
                left.append((place, stream, step.last))
    return found, uncounted
