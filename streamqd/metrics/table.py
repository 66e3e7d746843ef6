"""The table of metrics, with the name, meaning, labels and source of each metric.

If several instances read the same partition, each of them reports the figures of this partition. In
queries, use `max by (topic, partition)` for metrics without a `streamqd_instance` label, and `sum`
for counters of an instance's own housekeeping.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamqd import logs
from streamqd.idle_reason import Wait, Waiting
from streamqd.metrics.view import Labels, MetricsView, longest_run, read_wait, seconds_since
from streamqd.model import Assignment
from streamqd.scoreboard import (
    BUCKETS,
    DELAY_BUCKETS,
    InstanceFlags,
    WorkerCommand,
    WorkerSlot,
    WorkerState,
)
from streamqd.store.outbox import OutboxView
from streamqd.store.statistics import AssignmentFigures, PartitionFigures, QueryFigures, unix_ms
from streamqd.version import __version__

Values = Iterable[tuple[Labels, float]]
# The bounds of the buckets, of which those that are 0 are not shown, the counts by bucket including
# +Inf, and the total time in seconds.
Histograms = Iterable[tuple[Labels, tuple[Sequence[float], list[int], float]]]
# Some bounds are omitted because they add no information: those of run times below 16 us and above
# 5 minutes, and those of delays above two days.
_RUN_BOUNDS = [bound if 4 <= index < 29 else 0.0 for index, bound in enumerate(BUCKETS)]
_DELAY_BOUNDS = [bound if index < 29 else 0.0 for index, bound in enumerate(DELAY_BUCKETS)]

ASSIGNMENT = ("topic", "partition", "group", "streamqd_instance")
GROUP = ("topic", "partition", "group")
CONSUMER = ("topic", "group", "streamqd_instance")
PARTITION = ("topic", "partition")
INSTANCE = ("streamqd_instance",)
TOPIC = ("topic",)
OUTBOX = ("outbox",)


class Source(NamedTuple):
    """A source of values, and the names of their labels."""

    labels: Labels
    read: Callable[[MetricsView], Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    `read` returns pairs of label values and a value. The label values are in the order of `labels`.
    """

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    labels: Labels
    read: Callable[[MetricsView], Any]


# --- sources of values -----------------------------------------------------------------------


def _labels(view: MetricsView, assignment: Assignment) -> Labels:
    return (assignment.topic, str(assignment.partition), assignment.group, view.instance)


def _slots(read: Callable[[WorkerSlot], float]) -> Source:
    """Return a source with a value for each assignment that this instance owns or has owned."""
    return Source(
        ASSIGNMENT,
        lambda view: (
            (_labels(view, assignment), read(slot)) for slot, assignment in view.assigned_slots()
        ),
    )


def _per_assignment(read: Callable[[WorkerSlot], float]) -> Source:
    """Return a source with a value for each assignment that this instance owns."""
    return Source(
        ASSIGNMENT,
        lambda view: (
            (_labels(view, assignment), read(slot)) for slot, assignment in view.owned_slots()
        ),
    )


def _waits(read: Callable[[Waiting], float]) -> Source:
    """Return a source with a figure about the wait of each owned assignment's worker.

    The figure is 0 if there is no worker.
    """
    return _per_assignment(lambda slot: read(read_wait(slot)))


def _slot(name: str) -> Source:
    return _slots(lambda slot: slot.counter(name))


def _partition(read: Callable[[PartitionFigures], float | None]) -> Source:
    return Source(
        PARTITION,
        lambda view: (
            ((topic, str(partition)), value)
            for (topic, partition), figures in view.partitions.items()
            if (value := read(figures)) is not None
        ),
    )


def _group(read: Callable[[MetricsView, AssignmentFigures], float | None]) -> Source:
    return Source(
        GROUP,
        lambda view: (
            ((assignment.topic, str(assignment.partition), assignment.group), value)
            for assignment, figures in view.assignments.items()
            if (value := read(view, figures)) is not None
        ),
    )


def _query(read: Callable[[QueryFigures], float | None]) -> Source:
    """Return a source with a value for each Spark query that publishes its position."""
    return Source(
        GROUP,
        lambda view: (
            ((topic, str(partition), query.group), value)
            for (topic, partition), figures in view.partitions.items()
            for query in figures.queries
            if (value := read(query)) is not None
        ),
    )


def _outbox(read: Callable[[MetricsView, OutboxView], float]) -> Source:
    """Return a source with a value for each configured outbox."""
    return Source(OUTBOX, lambda view: (((each.name,), read(view, each)) for each in view.outboxes))


def _instance(read: Callable[[MetricsView], float]) -> Source:
    return Source(INSTANCE, lambda view: [((view.instance,), read(view))])


def _board(name: str) -> Source:
    return _instance(lambda view: view.board.counter(name))


def _flag(flag: InstanceFlags) -> Source:
    return _instance(lambda view: float(flag in view.board.flags))


def _tally(name: str, labels: Labels) -> Source:
    return Source(labels, lambda view: view.tally(name).items())


def _thousandths(name: str, labels: Labels) -> Source:
    """Return a source that reads a count of milliseconds and converts it to seconds."""
    return Source(
        labels, lambda view: ((each, number / 1000) for each, number in view.tally(name).items())
    )


def _histogram(name: str, bounds: Sequence[float] = _RUN_BOUNDS) -> Source:
    def read(view: MetricsView) -> Histograms:
        merged: dict[Labels, tuple[Sequence[float], list[int], float]] = {}
        for slot, assignment in view.assigned_slots():
            labels = (assignment.topic, assignment.group, view.instance)
            counts, seconds = slot.histogram(name)
            if labels in merged:
                _, others, total = merged[labels]
                counts = [a + b for a, b in zip(counts, others, strict=True)]
                seconds += total
            merged[labels] = (bounds, counts, seconds)
        return merged.items()

    return Source(CONSUMER, read)


def _failures(view: MetricsView) -> Values:
    for slot, assignment in view.assigned_slots():
        timeouts = slot.counter("timeouts")
        yield (*_labels(view, assignment), "error"), slot.counter("failed") - timeouts
        yield (*_labels(view, assignment), "timeout"), timeouts


def _moves(view: MetricsView) -> Values:
    yield (view.instance, "acquired"), view.board.counter("rebalance_acquired")
    yield (view.instance, "shed"), view.board.counter("rebalance_shed")


def _partitions_owned(view: MetricsView) -> Values:
    counts = dict.fromkeys(view.consumers, 0)
    for _, assignment in view.owned_slots():
        counts[assignment.topic, assignment.group] = (
            counts.get((assignment.topic, assignment.group), 0) + 1
        )
    return (((topic, group, view.instance), n) for (topic, group), n in counts.items())


def _longest_run(slot: WorkerSlot) -> float:
    longest = longest_run(slot)
    return seconds_since(longest.started_ns) if longest else 0.0


def _up(slot: WorkerSlot) -> float:
    return float(slot.state in (WorkerState.READY, WorkerState.PAUSED, WorkerState.QUIET))


def _trim_floor(figures: PartitionFigures) -> float | None:
    return unix_ms(figures.trimmed_to) / 1000 if figures.trimmed_to else None


def _held_seconds(view: MetricsView) -> Values:
    for (topic, partition), (holder, since) in view.held.items():
        yield (topic, str(partition), holder), view.age(since)


def _rate_limits(view: MetricsView) -> Values:
    """Return the rate limit of each owned assignment that has one."""
    return (row for row in _per_assignment(lambda slot: slot.rate_micro / 1e6).read(view) if row[1])


def _build(_view: MetricsView) -> Values:
    yield (__version__, platform.python_version()), 1


def _counter(name: str, source: Source, text: str) -> Metric:
    return Metric(f"streamqd_{name}_total", "counter", text, *source)


def _gauge(name: str, source: Source, text: str) -> Metric:
    return Metric(f"streamqd_{name}", "gauge", text, *source)


def _timer(name: str, source: Source, text: str) -> Metric:
    return Metric(f"streamqd_{name}_seconds", "histogram", text, *source)


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Messages and retries": (
        _counter("acked", _slot("acked"), "Entries acknowledged."),
        _counter("consumed", _slot("fetched"), "Entries fetched, including retries."),
        _counter(
            "deferred",
            _slot("deferred"),
            "Failed messages whose retry or dead letter was written late, because Redis rejected"
            " writes.",
        ),
        _counter("expired", _slot("expired"), "Messages that expired before they were handled."),
        _counter(
            "failures",
            Source((*ASSIGNMENT, "result"), _failures),
            "Handler runs that raised an exception (result = error) or exceeded timeout (result ="
            " timeout).",
        ),
        _gauge(
            "in_flight",
            _per_assignment(lambda slot: slot.unfinished),
            "Fetched entries whose handler has not finished.",
        ),
        _gauge(
            "longest_run_seconds",
            _per_assignment(_longest_run),
            "Current run time of the oldest running message.",
        ),
        _counter(
            "missing_entries",
            _slot("missing_entries"),
            "Pending entries that no longer existed, because another client had trimmed them.",
        ),
        _counter("received_bytes", _slot("bytes"), "Approximate size of the fetched entries."),
        _counter(
            "reclaimed", _slot("reclaimed"), "Entries taken over from other clients of the group."
        ),
        _counter(
            "released",
            _slot("released"),
            "Entries that a worker released, because it stopped before it ran them or their"
            " handler raised Release.",
        ),
        _counter(
            "retried", _slot("retried"), "Messages that failed and were scheduled for a retry."
        ),
    ),
    "Run time and latency": (
        _timer(
            "ack_latency",
            _histogram("ack"),
            "Time from the end of a handler run to its acknowledgment.",
        ),
        _timer(
            "delay",
            _histogram("delay", _DELAY_BOUNDS),
            "Time from the write of an entry to the start of its first run, by the clock of"
            " Redis. A delayed send is written when it is due.",
        ),
        _timer("handle", _histogram("handle"), "Run time of the handler."),
    ),
    "Lag, pending messages and waiting retries": (
        _gauge(
            "lag",
            _group(lambda _, u: u.lag),
            "Entries not yet delivered. Absent while Redis cannot count them.",
        ),
        _gauge(
            "oldest_unread_age_seconds",
            _group(lambda v, u: v.age(u.oldest_unread_unix_ms())),
            "Age of the oldest entry not yet delivered, or 0 if there is none.",
        ),
        _gauge(
            "pending", _group(lambda _, u: u.pending), "Entries delivered and not acknowledged."
        ),
        _counter(
            "promoted",
            _tally("promoted", GROUP),
            "Retries that were due, and that this instance wrote to the retry stream.",
        ),
        _gauge("retry_length", _group(lambda _, u: u.retry.length), "Entries in the retry stream."),
        _gauge(
            "waiting_retries",
            _group(lambda _, u: u.waiting_retries),
            "Retries that are not due yet.",
        ),
    ),
    "Partitions and retention": (
        _gauge(
            "delayed_sends",
            _partition(lambda p: p.delayed_sends),
            "Delayed sends that are not due yet.",
        ),
        _counter(
            "delayed_sends_written",
            _tally("sent", PARTITION),
            "Delayed sends that were due, and that this instance wrote to the partition.",
        ),
        _counter(
            "dropped_unacked",
            _tally("dropped", (*GROUP, "result")),
            "Entries that this instance removed (drop_unacked_*) before the group read them"
            " (result = unread) or acknowledged them (result = pending).",
        ),
        _counter(
            "produced",
            _partition(lambda p: p.added),
            "Entries written to the partition since its creation.",
        ),
        _gauge(
            "retention_held_seconds",
            Source(GROUP, _held_seconds),
            "Age of the oldest entry beyond the retention limit that a group, or the archive (group"
            " @archive), still needs. Absent without such an entry.",
        ),
        _gauge("topic_length", _partition(lambda p: p.length), "Entries in the partition."),
        _gauge(
            "trim_floor_timestamp_seconds",
            _partition(_trim_floor),
            "Time of the oldest entry that trimming kept.",
        ),
        _counter(
            "trimmed",
            _tally("trimmed", PARTITION),
            "Entries that this instance trimmed from the partition.",
        ),
    ),
    "Dead letters": (
        _counter(
            "dead_lettered", _slot("dead_lettered"), "Messages moved to the dead-letter stream."
        ),
        _counter(
            "dlq_expired",
            _tally("expired", PARTITION),
            "Dead letters that this instance deleted, because they were older than dlq_retention.",
        ),
        _gauge("dlq_length", _partition(lambda p: p.dead), "Dead letters of the partition."),
        _counter(
            "flood_stops",
            _slots(lambda slot: read_wait(slot).flooded),
            "Number of times that the flood guard paused the partition (setting flood_guard).",
        ),
        _counter(
            "given_up",
            _slot("given_up"),
            "Dead letters that a dead-letter consumer failed to handle. They are kept.",
        ),
    ),
    "Pauses, rate limits and circuit breakers": (
        _gauge(
            "circuit_open",
            _waits(lambda waits: float(waits.kind in (Wait.OPEN, Wait.PROBING))),
            "1 while the circuit of the partition is open or half-open, because a dependency is"
            " down (setting breaker).",
        ),
        _counter(
            "circuit_openings",
            _slots(lambda slot: read_wait(slot).opened),
            "Number of times that the circuit of the partition opened.",
        ),
        _gauge(
            "held_keys",
            _waits(lambda waits: waits.held_keys),
            "Keys whose messages wait, because an earlier message with the key failed (on_error ="
            " hold-key).",
        ),
        _gauge(
            "held_messages",
            _waits(lambda waits: waits.held),
            "Fetched messages that wait, because an earlier message with their key failed"
            " (on_error = hold-key).",
        ),
        _gauge(
            "partition_blocked",
            _waits(lambda waits: float(waits.kind is Wait.BLOCKED)),
            "1 while a failed message blocks the partition (on_error = block).",
        ),
        _gauge(
            "partition_paused",
            _per_assignment(lambda slot: float(slot.command == WorkerCommand.PAUSE)),
            "1 while a signal or a directive pauses the worker of an owned partition.",
        ),
        _gauge(
            "rate_limit",
            Source(ASSIGNMENT, _rate_limits),
            "Runs per second that may start in the partition. Absent without a limit.",
        ),
        _counter(
            "throttled_seconds",
            _slots(lambda slot: slot.counter("throttled_ns") / 1e9),
            "Time for which the rate limit delayed fetched messages.",
        ),
    ),
    "Workers": (
        _counter(
            "assignment_errors",
            _slot("assignment_errors"),
            "Internal errors of the supervisor that made it release the partition.",
        ),
        _counter(
            "charged",
            _slot("charged"),
            "Crashes that were counted against the message that was running.",
        ),
        _counter("crashes", _slot("crashes"), "Worker processes that crashed."),
        _gauge(
            "epoch",
            _per_assignment(lambda slot: slot.epoch),
            "Epoch (fencing number) of the owner.",
        ),
        _counter(
            "fenced",
            _slot("fenced"),
            "Requests of a worker that Redis rejected, because the partition has a newer owner.",
        ),
        _counter(
            "loop_blocked",
            _slot("loop_blocked"),
            "Number of times that a coroutine blocked the event loop of its worker for longer"
            " than loop_blocked_after.",
        ),
        _counter(
            "recycled",
            _slot("recycled"),
            "Workers that were replaced because they reached max_messages, max_rss or max_age.",
        ),
        _counter(
            "restarts",
            _slot("restarts"),
            "Worker processes that were started for the partition, including the first one.",
        ),
        _gauge(
            "worker_crash_loop",
            _slots(lambda slot: float(slot.state == WorkerState.BROKEN)),
            "1 while the partition waits for crash_cooldown, because its worker crashed"
            " repeatedly.",
        ),
        _gauge(
            "worker_resident_memory_bytes",
            _per_assignment(lambda slot: slot.rss),
            "Resident memory of the worker.",
        ),
        _gauge("worker_up", _per_assignment(_up), "1 while the worker of the partition is ready."),
    ),
    "Leases and rebalance": (
        _counter(
            "late_renewals",
            _board("renew_late"),
            "Leases that this instance renewed after they had expired. Their owner did not change.",
        ),
        _counter(
            "leases_lost",
            _board("lease_lost"),
            "Leases of this instance that another instance acquired.",
        ),
        _counter(
            "partitions_given_up",
            _board("unstartable"),
            "Partitions that this instance released, because the operating system refused to"
            " start their worker.",
        ),
        _gauge(
            "partitions_owned",
            Source(CONSUMER, _partitions_owned),
            "Partitions that this instance owns.",
        ),
        _gauge(
            "partitions_unowned",
            _instance(lambda view: view.board.unowned),
            "Partitions of this instance's groups that had no owner at the last check, except"
            " partitions of stopped groups.",
        ),
        _counter(
            "rebalance_moves",
            Source((*INSTANCE, "result"), _moves),
            "Partitions that this instance acquired (result = acquired) or handed over to another"
            " instance (result = shed).",
        ),
    ),
    "Instance and housekeeper": (
        _gauge(
            "drained",
            _flag(InstanceFlags.DRAINED),
            "1 while an operator has drained the instance with streamqd drain.",
        ),
        _gauge(
            "draining",
            _flag(InstanceFlags.DRAINING),
            "1 while the daemon stops and finishes its running messages.",
        ),
        _counter(
            "groups_restored",
            _board("groups_restored"),
            "Missing groups that this instance created again.",
        ),
        _counter(
            "housekeeper_failures",
            _tally("failures", (*INSTANCE, "task")),
            "Failed runs of housekeeping tasks.",
        ),
        _counter(
            "housekeeper_restarts", _board("housekeeper_restarts"), "Restarts of the housekeeper."
        ),
        _gauge(
            "limited",
            _flag(InstanceFlags.LIMITED),
            "1 while the operating system refuses to start more processes, so the instance owns"
            " fewer partitions.",
        ),
        _counter(
            "log_lines_dropped",
            _instance(lambda v: v.board.counter("log_dropped") + logs.count_dropped()),
            "Log lines that were dropped, because the reader of the log was too slow.",
        ),
        _gauge("paused", _flag(InstanceFlags.PAUSED), "1 while a signal pauses the instance."),
    ),
    "Redis": (
        _counter(
            "redis_errors",
            _slot("redis_errors"),
            "Round trips of the workers to Redis that failed.",
        ),
        _counter("redis_round_trips", _slot("round_trips"), "Round trips of the workers to Redis."),
        _gauge(
            "redis_up",
            _instance(lambda v: float(v.redis_up)),
            "1 while Redis answers the housekeeper.",
        ),
        _counter(
            "supervisor_round_trip_errors",
            _board("round_trip_errors"),
            "Round trips of the supervisor to Redis that failed.",
        ),
        _counter(
            "supervisor_round_trips",
            _board("round_trips"),
            "Round trips of the supervisor to Redis.",
        ),
    ),
    "Schedules": (
        _counter(
            "schedules_fired",
            _tally("schedules_fired", TOPIC),
            "Messages that this instance sent for schedules.",
        ),
        _counter(
            "schedules_late_seconds",
            _thousandths("schedules_late_ms", TOPIC),
            "Sum of the delays between the due time of a schedule and the message that this"
            " instance sent.",
        ),
        _counter(
            "schedules_skipped",
            _tally("schedules_skipped", (*TOPIC, "reason")),
            "Ticks for which this instance sent no message. The label contains the reason."
            " misfire: no housekeeper was running, or the schedule was not active. overlap: the"
            " last message of the schedule was not finished.",
        ),
    ),
    "Outbox relays": (
        _counter(
            "outbox_dead",
            _outbox(lambda _, each: each.dead),
            "Rows that the relay moved to the dead-letter table since its start, because it could"
            " not send them.",
        ),
        _gauge(
            "outbox_oldest_age_seconds",
            _outbox(lambda view, each: each.oldest_age(view.now_unix_ms())),
            "Age of the oldest row, or 0 if the table is empty. It grows while no relay runs.",
        ),
        _gauge(
            "outbox_relay_up",
            _outbox(lambda _, each: float(each.relayed)),
            "1 while a relay owns the outbox.",
        ),
        _gauge(
            "outbox_rows",
            _outbox(lambda _, each: each.rows),
            "Rows in the outbox table. The relay counts up to 10,000.",
        ),
        _counter(
            "outbox_sent",
            _outbox(lambda _, each: each.sent),
            "Rows that the relay sent since its start.",
        ),
    ),
    "Spark queries": (
        _gauge(
            "query_idle_seconds",
            _query(lambda q: None if q.idle_ms is None else q.idle_ms / 1000),
            "Time since the query last reported its position.",
        ),
        _gauge(
            "query_lag",
            _query(lambda q: q.lag),
            "Entries after the last position that the query reported. Absent while Redis cannot"
            " count them. Only the 100 queries of a partition with the latest reports are"
            " included.",
        ),
    ),
    "Version": (
        _gauge(
            "build_info",
            Source(("version", "python"), _build),
            "Always 1. The labels are the versions of streamqd and of Python.",
        ),
    ),
}
"""All metrics by their section on the reference page. Within a section, they are sorted."""

METRICS = tuple(metric for metrics in SECTIONS.values() for metric in metrics)
