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
    """The counts of a worker's runs, kept in its memory.

    `publish` moves the times and delays into the histograms of the slot. For speed, the hot loop
    adds to `times` itself.
    """

    def __init__(self, clock: ServerClock) -> None:
        self.delays = StartDelays(clock)
        self.handled = 0
        self.failed = 0
        # Runs since `publish`, by the bit length of their run time in units of 1,024 ns.
        self.times = [0] * 64
        self.times_ns = 0  # sum of the run times since `publish`

    @property
    def succeeded(self) -> int:
        """The number of successful runs."""
        return self.handled - self.failed

    def note_time(self, elapsed_ns: int, runs: int) -> None:
        """Record the duration of a handler call that handled this many messages."""
        self.times[(elapsed_ns >> 10).bit_length()] += runs
        self.times_ns += elapsed_ns * runs

    def publish(self, slot: WorkerSlot) -> None:
        """Add the run times and delays since the last call to the histograms of the assignment."""
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
    """The objects that the parts of one worker share, such as its settings, clock and counts."""

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
