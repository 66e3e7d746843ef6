"""The metrics of workers that wait for a failed message, for a dependency, or for an operator."""

from __future__ import annotations

from collections.abc import Callable

from streamqd.idle_reason import IdleReason, Wait, Waiting
from streamqd.metrics.table import UNIT, Metric, Values, of_owned, of_slots
from streamqd.metrics.view import MetricsView
from streamqd.scoreboard import WorkerCommand


def _owned(read: Callable[[Waiting], float]) -> Callable[[MetricsView], Values]:
    return of_owned(lambda slot: read(IdleReason(slot.words).read()) if slot.pid else 0.0)


def _total(read: Callable[[Waiting], float]) -> Callable[[MetricsView], Values]:
    return of_slots(lambda slot: read(IdleReason(slot.words).read()))


def _limited(view: MetricsView) -> Values:
    """Read the rate of every owned unit that has one."""
    return (each for each in of_owned(lambda slot: slot.rate_micro / 1e6)(view) if each[1])


WAITING: tuple[Metric, ...] = (
    Metric(
        "streamqd_partition_paused",
        "gauge",
        "1 while the worker of an owned partition shall not fetch, by a signal or by an order.",
        UNIT,
        of_owned(lambda slot: float(slot.command == WorkerCommand.PAUSE)),
    ),
    Metric(
        "streamqd_partition_blocked",
        "gauge",
        "1 while a failed message at the head of the line holds the partition (on_error = block).",
        UNIT,
        _owned(lambda waits: float(waits.kind is Wait.BLOCKED)),
    ),
    Metric(
        "streamqd_held_messages",
        "gauge",
        "Messages in the hands of the worker that wait for their key (on_error = hold-key).",
        UNIT,
        _owned(lambda waits: waits.held),
    ),
    Metric(
        "streamqd_held_keys",
        "gauge",
        "Keys that wait for a failed message (on_error = hold-key).",
        UNIT,
        _owned(lambda waits: waits.held_keys),
    ),
    Metric(
        "streamqd_circuit_open",
        "gauge",
        "1 while messages of the partition wait for the open circuit of their group, or one of them"
        " is tried, because a dependency is down (setting breaker).",
        UNIT,
        _owned(lambda waits: float(waits.kind in (Wait.OPEN, Wait.PROBING))),
    ),
    Metric(
        "streamqd_circuit_openings_total",
        "counter",
        "How often the partition was the one that opened the circuit of its group here.",
        UNIT,
        _total(lambda waits: waits.opened),
    ),
    Metric(
        "streamqd_flood_stops_total",
        "counter",
        "How often the flood guard has paused the partition.",
        UNIT,
        _total(lambda waits: waits.flooded),
    ),
    Metric(
        "streamqd_rate_limit",
        "gauge",
        "Runs per second that may begin in the partition. Absent where there is no limit.",
        UNIT,
        _limited,
    ),
    Metric(
        "streamqd_throttled_seconds_total",
        "counter",
        "Time for which the rate has kept messages in hand from beginning.",
        UNIT,
        of_slots(lambda slot: slot.counter("throttled_ns") / 1e9),
    ),
)
