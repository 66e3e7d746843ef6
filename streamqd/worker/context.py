"""The objects that the parts of one worker share."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.config import Consumer, Settings
from streamqd.message import Delivery
from streamqd.model import Assignment
from streamqd.scoreboard import BUCKETS, WorkerSlot
from streamqd.worker.control_channel import ControlChannel
from streamqd.worker.delays import StartDelays
from streamqd.worker.server_clock import ServerClock
from streamqd.worker.settler import Settler
from streamqd.worker.soft_limit import SoftLimit


class RunCounts:
    """Counts in the worker's memory. `publish` moves times and delays into the slot's histograms.

    The hot loop adds to `times` itself.
    """

    def __init__(self, clock: ServerClock) -> None:
        self.delays = StartDelays(clock)
        self.handled = 0
        self.failed = 0
        self.times = [0] * 64  # runs since `publish`, by the bits of their microseconds
        self.times_ns = 0  # sum of these run times

    @property
    def succeeded(self) -> int:
        """The number of successful runs."""
        return self.handled - self.failed

    def note_time(self, elapsed_ns: int, runs: int) -> None:
        """Record the duration of a handler call for this many messages."""
        self.times[(elapsed_ns >> 10).bit_length()] += runs
        self.times_ns += elapsed_ns * runs

    def publish(self, slot: WorkerSlot) -> None:
        """Add the run times and delays since the last call to the assignment's histograms."""
        shared, longest = slot.handle_histogram, len(BUCKETS)
        for bits, count in enumerate(self.times):
            if count:
                shared[min(bits, longest)] += count
                self.times[bits] = 0
        shared[longest + 1] += self.times_ns
        self.times_ns = 0
        self.delays.publish(slot)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The assignment of one worker, its settings, and objects such as clock and counters."""

    settings: Settings
    consumer: Consumer
    delivery: Delivery
    slot: WorkerSlot
    channel: ControlChannel
    settler: Settler
    clock: ServerClock
    counts: RunCounts
    limit: SoftLimit

    @property
    def assignment(self) -> Assignment:
        """The assignment: topic, partition and group."""
        return self.delivery.assignment
