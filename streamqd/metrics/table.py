"""The table of metrics: name, meaning, labels and where the values come from.

Several instances that read one partition (different groups) report the same partition: take
`max by (topic, partition)` of the metrics that have no `consumer` label.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streamqd import logs
from streamqd.metrics.view import Labels, MetricsView
from streamqd.model import Unit
from streamqd.scoreboard import InstanceFlags, WorkerSlot, WorkerState, now_ns
from streamqd.store.statistics import PartitionFigures, UnitFigures, unix_ms
from streamqd.version import __version__

Values = Iterable[tuple[Labels, float]]
Histograms = Iterable[tuple[Labels, tuple[list[int], float]]]

UNIT = ("topic", "partition", "group", "consumer")
GROUP = ("topic", "partition", "group")
CONSUMER = ("topic", "group", "consumer")
PARTITION = ("topic", "partition")
INSTANCE = ("consumer",)


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. `read` yields label values, in the order of `labels`, and a value."""

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    labels: Labels
    read: Callable[[MetricsView], Any]


# --- where values come from -----------------------------------------------------------------------


def _labels(view: MetricsView, unit: Unit) -> Labels:
    return (unit.topic, str(unit.partition), unit.group, view.instance)


def of_slots(read: Callable[[WorkerSlot], float]) -> Callable[[MetricsView], Values]:
    """Read a value of every unit that this instance owns or has owned."""
    return lambda view: ((_labels(view, unit), read(slot)) for slot, unit in view.named())


def of_owned(read: Callable[[WorkerSlot], float]) -> Callable[[MetricsView], Values]:
    """Read a value of every unit that this instance owns."""
    return lambda view: ((_labels(view, unit), read(slot)) for slot, unit in view.owned())


def _slot(name: str) -> Callable[[MetricsView], Values]:
    return of_slots(lambda slot: slot.counter(name))


def _partition(read: Callable[[PartitionFigures], float | None]) -> Callable[[MetricsView], Values]:
    return lambda view: (
        ((topic, str(partition)), value)
        for (topic, partition), figures in view.partitions.items()
        if (value := read(figures)) is not None
    )


def _group(
    read: Callable[[MetricsView, UnitFigures], float | None],
) -> Callable[[MetricsView], Values]:
    return lambda view: (
        ((unit.topic, str(unit.partition), unit.group), value)
        for unit, figures in view.units.items()
        if (value := read(view, figures)) is not None
    )


def _board(name: str) -> Callable[[MetricsView], Values]:
    return lambda view: [((view.instance,), view.board.counter(name))]


def _instance(read: Callable[[MetricsView], float]) -> Callable[[MetricsView], Values]:
    return lambda view: [((view.instance,), read(view))]


def _flag(flag: InstanceFlags) -> Callable[[MetricsView], Values]:
    return _instance(lambda view: float(flag in view.board.flags))


def _tally(name: str) -> Callable[[MetricsView], Values]:
    return lambda view: list(view.tally.get(name, {}).items())


def _histogram(name: str) -> Callable[[MetricsView], Histograms]:
    def read(view: MetricsView) -> Histograms:
        merged: dict[Labels, tuple[list[int], float]] = {}
        for slot, unit in view.named():
            labels = (unit.topic, unit.group, view.instance)
            counts, seconds = slot.histogram(name)
            if labels in merged:
                others, total = merged[labels]
                counts = [a + b for a, b in zip(counts, others, strict=True)]
                seconds += total
            merged[labels] = (counts, seconds)
        return merged.items()

    return read


def _failures(view: MetricsView) -> Values:
    for slot, unit in view.named():
        timeouts = slot.counter("timeouts")
        yield (*_labels(view, unit), "error"), slot.counter("failed") - timeouts
        yield (*_labels(view, unit), "timeout"), timeouts


def _moves(view: MetricsView) -> Values:
    yield (view.instance, "acquired"), view.board.counter("rebalance_acquired")
    yield (view.instance, "shed"), view.board.counter("rebalance_shed")


def _partitions_owned(view: MetricsView) -> Values:
    counts = dict.fromkeys(view.consumers, 0)
    for _, unit in view.owned():
        counts[unit.topic, unit.group] = counts.get((unit.topic, unit.group), 0) + 1
    return (((topic, group, view.instance), n) for (topic, group), n in counts.items())


def longest_run(slot: WorkerSlot) -> float:
    """Return for how many seconds the longest running message of a worker has been running."""
    starts = [entry.started_ns for entry in slot.running if entry.started_ns]
    return max(0.0, (now_ns() - min(starts)) / 1e9) if starts else 0.0


def _up(slot: WorkerSlot) -> float:
    return float(slot.state in (WorkerState.READY, WorkerState.PAUSED, WorkerState.QUIET))


def _trim_floor(figures: PartitionFigures) -> float | None:
    return unix_ms(figures.trimmed_to) / 1000 if figures.trimmed_to else None


def _held(view: MetricsView) -> Values:
    for (topic, partition), (holder, since) in view.held.items():
        yield (topic, str(partition), holder), view.age(since)


def _build(_view: MetricsView) -> Values:
    yield (__version__, platform.python_version()), 1


def _counter(name: str, labels: Labels, read: Callable[[MetricsView], Values], text: str) -> Metric:
    return Metric(f"streamqd_{name}_total", "counter", text, labels, read)


def _gauge(name: str, labels: Labels, read: Callable[[MetricsView], Values], text: str) -> Metric:
    return Metric(f"streamqd_{name}", "gauge", text, labels, read)


def _timer(name: str, read: Callable[[MetricsView], Histograms], text: str) -> Metric:
    return Metric(f"streamqd_{name}_seconds", "histogram", text, CONSUMER, read)


TABLE: tuple[Metric, ...] = (
    _counter(
        "produced",
        PARTITION,
        _partition(lambda p: p.added),
        "Entries ever written to the partition.",
    ),
    _counter("consumed", UNIT, _slot("fetched"), "Entries fetched for handling, retries included."),
    _counter("acked", UNIT, _slot("acked"), "Entries acknowledged."),
    _counter("retried", UNIT, _slot("retried"), "Messages set aside for another attempt."),
    _counter("dead", UNIT, _slot("dead"), "Messages moved to the dead-letter stream."),
    _counter(
        "given_up",
        UNIT,
        _slot("given_up"),
        "Dead letters that their consumer acknowledged without success. They stay dead letters.",
    ),
    _counter(
        "released", UNIT, _slot("released"), "Entries given back unhandled at a drain or hand-over."
    ),
    _counter(
        "failures",
        (*UNIT, "result"),
        _failures,
        "Handler runs that raised (result error) or overran the soft time limit (timeout).",
    ),
    _counter("crashes", UNIT, _slot("crashes"), "Worker processes that died."),
    _counter("charged", UNIT, _slot("charged"), "Crashes charged to the message that was running."),
    _counter(
        "restarts", UNIT, _slot("restarts"), "Worker processes started in place of one that ended."
    ),
    _counter(
        "recycled",
        UNIT,
        _slot("recycled"),
        "Workers replaced because they reached max_messages, max_rss or max_age.",
    ),
    _counter("fenced", UNIT, _slot("fenced"), "Operations refused because a newer owner exists."),
    _counter(
        "ghosts", UNIT, _slot("ghosts"), "Pending entries whose body someone else had trimmed."
    ),
    _counter(
        "expired", UNIT, _slot("expired"), "Messages not handled because their time was over."
    ),
    _counter(
        "reclaimed",
        UNIT,
        _slot("reclaimed"),
        "Entries taken over from foreign consumers of the group.",
    ),
    _counter(
        "parked",
        UNIT,
        _slot("parked"),
        "Messages that had to wait for settlement because the server refused writes.",
    ),
    _counter("received_bytes", UNIT, _slot("bytes"), "Bytes of the entries fetched, about."),
    _counter(
        "redis_round_trips", UNIT, _slot("round_trips"), "Exchanges of the workers with Redis."
    ),
    _counter(
        "redis_errors",
        UNIT,
        _slot("redis_errors"),
        "Exchanges of the workers with Redis that failed.",
    ),
    _counter("exchanges", INSTANCE, _board("exchanges"), "Exchanges of the supervisor with Redis."),
    _counter(
        "exchange_errors",
        INSTANCE,
        _board("exchange_errors"),
        "Exchanges of the supervisor with Redis that failed.",
    ),
    _counter(
        "rebalance_moves",
        (*INSTANCE, "result"),
        _moves,
        "Partitions taken (acquired) or handed over (shed) by rebalancing.",
    ),
    _counter(
        "partitions_given_up",
        INSTANCE,
        _board("unstartable"),
        "Partitions given up because the system refused the process of their worker.",
    ),
    _counter("leases_lost", INSTANCE, _board("lease_lost"), "Leases that another instance took."),
    _counter(
        "late_renewals",
        INSTANCE,
        _board("renew_late"),
        "Leases that had expired and were renewed without a change of owner.",
    ),
    _counter("groups_restored", INSTANCE, _board("groups_restored"), "Missing groups made again."),
    _counter(
        "housekeeper_restarts",
        INSTANCE,
        _board("housekeeper_restarts"),
        "Housekeepers started in place of one that ended.",
    ),
    _counter(
        "housekeeper_failures",
        (*INSTANCE, "task"),
        _tally("failures"),
        "Runs of housekeeping tasks that failed.",
    ),
    _counter(
        "log_lines_dropped",
        INSTANCE,
        _instance(lambda v: v.board.counter("log_dropped") + logs.dropped()),
        "Log lines dropped because nobody read them.",
    ),
    _counter(
        "promoted",
        GROUP,
        _tally("promoted"),
        "Retries that became due and were written to the retry stream.",
    ),
    _counter(
        "scheduled_sent",
        PARTITION,
        _tally("sent"),
        "Scheduled sends that became due and were written to the partition.",
    ),
    _counter(
        "trimmed",
        PARTITION,
        _tally("trimmed"),
        "Entries of the partition that this instance has trimmed.",
    ),
    _counter(
        "dlq_expired",
        PARTITION,
        _tally("expired"),
        "Dead letters that this instance deleted because they were older than dlq_retention.",
    ),
    _counter(
        "dropped_unacked",
        (*GROUP, "result"),
        _tally("dropped"),
        "Entries lost to retention.drop_unacked_*: never read by the group (result unread) or in"
        " its hands (pending).",
    ),
    _gauge("topic_length", PARTITION, _partition(lambda p: p.length), "Entries in the partition."),
    _gauge(
        "dlq_length", PARTITION, _partition(lambda p: p.dead), "Dead letters stored, of all groups."
    ),
    _gauge(
        "scheduled", PARTITION, _partition(lambda p: p.scheduled), "Sends that wait for their time."
    ),
    _gauge(
        "trim_floor_timestamp_seconds",
        PARTITION,
        _partition(_trim_floor),
        "Time part of the first id that trimming kept.",
    ),
    _gauge(
        "retention_held_seconds",
        GROUP,
        _held,
        "Age of the entry that keeps retention from trimming, and who still needs it: a group, or"
        " @archive. Absent while nothing is kept from being trimmed.",
    ),
    _gauge(
        "certificate_end_timestamp_seconds",
        (*INSTANCE, "certificate"),
        lambda view: [((view.instance, name), end) for name, end in view.certificates.items()],
        "When a certificate on the way to Redis ends. Absent without TLS.",
    ),
    _gauge("pending", GROUP, _group(lambda _, u: u.pending), "Entries delivered and not settled."),
    _gauge(
        "lag",
        GROUP,
        _group(lambda _, u: u.lag),
        "Entries not yet delivered. Absent while the server cannot tell.",
    ),
    _gauge(
        "oldest_unread_age_seconds",
        GROUP,
        _group(lambda v, u: v.age(u.oldest_unread_unix_ms())),
        "Age of the oldest entry not yet delivered, 0 when there is none.",
    ),
    _gauge("delayed", GROUP, _group(lambda _, u: u.delayed), "Retries that wait for their time."),
    _gauge(
        "retry_length",
        GROUP,
        _group(lambda _, u: u.retry.length),
        "Entries stored in the retry stream.",
    ),
    _gauge(
        "in_flight",
        UNIT,
        of_owned(lambda slot: slot.unfinished),
        "Entries in the hands of the worker whose handler has not ended.",
    ),
    _gauge(
        "longest_run_seconds",
        UNIT,
        of_owned(longest_run),
        "How long the longest running message has been running.",
    ),
    _gauge("epoch", UNIT, of_owned(lambda slot: slot.epoch), "Fencing number of the ownership."),
    _gauge("worker_up", UNIT, of_owned(_up), "1 while the worker of an owned partition serves."),
    _gauge(
        "worker_crash_loop",
        UNIT,
        of_slots(lambda slot: float(slot.state == WorkerState.BROKEN)),
        "1 while a partition rests after its processes crashed in a loop.",
    ),
    _gauge(
        "worker_resident_memory_bytes",
        UNIT,
        of_owned(lambda slot: slot.rss),
        "Resident memory of the worker.",
    ),
    _gauge("partitions_owned", CONSUMER, _partitions_owned, "Partitions that this instance owns."),
    _gauge(
        "redis_up",
        INSTANCE,
        _instance(lambda v: float(v.redis_up)),
        "1 while Redis answers the housekeeper.",
    ),
    _gauge(
        "limited",
        INSTANCE,
        _flag(InstanceFlags.LIMITED),
        "1 while the system refuses processes, so that the instance serves fewer partitions.",
    ),
    _gauge("draining", INSTANCE, _flag(InstanceFlags.DRAINING), "1 while the instance drains."),
    _gauge(
        "paused",
        INSTANCE,
        _flag(InstanceFlags.PAUSED),
        "1 while the instance is paused by a signal.",
    ),
    _gauge(
        "drained",
        INSTANCE,
        _flag(InstanceFlags.DRAINED),
        "1 while an operator wants the instance to own nothing.",
    ),
    _gauge("build_info", ("version", "python"), _build, "Always 1; the labels say what runs."),
    _timer("handle", _histogram("handle"), "How long the handler ran."),
    _timer(
        "ack_latency", _histogram("ack"), "From the end of a handler run to its acknowledgement."
    ),
)
