"""The objects that the parts of one worker share."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.config import Consumer, Settings
from streamqd.message import Delivery
from streamqd.model import Unit
from streamqd.scoreboard import BUCKETS, WorkerSlot, now_ns
from streamqd.store.client import Connection
from streamqd.worker.control_channel import ControlChannel
from streamqd.worker.settler import Settler
from streamqd.worker.soft_limit import SoftLimit

AGE_NS = 60_000_000_000  # age at which the server's clock is read again


class ServerClock:
    """The server's clock, which is also in the IDs of messages. Clocks of hosts can differ."""

    def __init__(self) -> None:
        self._ahead_ns = 0  # the server's unix time minus `now_ns`
        self._read_ns = 0  # 0 = not read yet

    def read(self, link: Connection) -> None:
        """Ask the server. Raises RedisUnavailable, RedisRefused."""
        seconds, micros = link.execute("TIME")
        self._read_ns = now_ns()
        self._ahead_ns = (int(seconds) * 1_000_000 + int(micros)) * 1000 - self._read_ns

    def is_old(self, now: int) -> bool:
        """Return True if `read` should be called again."""
        return bool(self._read_ns) and now - self._read_ns > AGE_NS

    def time(self) -> float:
        """Return the server's unix time, computed from the last reading."""
        return (now_ns() + self._ahead_ns) / 1e9


class RunCounts:
    """Counts in the worker's memory. `publish` moves the times into the slot's histogram.

    The hot loop adds to `times` itself.
    """

    def __init__(self) -> None:
        self.handled = 0
        self.failed = 0
        self.times = [0] * 64  # runs since `publish`, by the bits of their microseconds
        self.times_ns = 0  # the sum of all times

    @property
    def succeeded(self) -> int:
        """The number of successful runs."""
        return self.handled - self.failed

    def note_time(self, elapsed_ns: int, runs: int) -> None:
        """Record the duration of a handler call for this many messages."""
        self.times[(elapsed_ns >> 10).bit_length()] += runs
        self.times_ns += elapsed_ns * runs

    def publish(self, slot: WorkerSlot) -> None:
        """Add the run times since the last call to the unit's histogram."""
        shared, longest = slot.handle_histogram, len(BUCKETS)
        for bits, count in enumerate(self.times):
            if count:
                shared[min(bits, longest)] += count
                self.times[bits] = 0
        shared[longest + 1] += self.times_ns
        self.times_ns = 0


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The unit of one worker, its settings, and its single objects such as clock and counters."""

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
    def unit(self) -> Unit:
        """The assignment: topic, partition and group."""
        return self.delivery.unit
