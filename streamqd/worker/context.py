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
    """Counts a worker's runs, and collects their run times and delays.

    `publish` moves the times and delays into the histograms of the slot, where other processes can
    read them. For speed, the executors may add to `times` directly.
    """

    def __init__(self, clock: ServerClock) -> None:
        self.delays = StartDelays(clock)
        self.handled = 0
        self.failed = 0
        # The number of runs since `publish`, by the bit length of the run time in units of 1,024
        # ns.
        self.times = [0] * 64
        self.times_ns = 0  # sum of the run times since `publish`

    @property
    def succeeded(self) -> int:
        """The number of successful runs."""
        return self.handled - self.failed

    def note_time(self, elapsed_ns: int, runs: int) -> None:
        """Record the duration of a handler call, which counts once for each of its messages."""
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
