"""How many runs a worker has done, and how long they took."""

from __future__ import annotations

from streamqd.scoreboard import BUCKETS, WorkerSlot


class RunCounts:
    """Counts in the worker's own memory; `publish` moves the times into the slot's histogram.

    The hot loop adds to `times` itself.
    """

    def __init__(self) -> None:
        self.handled = 0
        self.failed = 0
        self.times = [0] * 64  # runs since `publish`, by the bits of their microseconds
        self.times_ns = 0  # and all of them together

    @property
    def succeeded(self) -> int:
        """How many runs have ended well."""
        return self.handled - self.failed

    def note_time(self, elapsed_ns: int, runs: int) -> None:
        """Note how long a call of the handler took that handled this many messages."""
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
