"""Rate limit for one partition of a group, with a single number as its state (GCRA).

The number is the instant at which the next run is exactly on time. Each run advances it by the
interval between two runs. So runs are spread evenly and do not start in bursts each second, and the
next process can continue with the same state. In any period, at most rate x seconds + burst runs
start.
"""

from __future__ import annotations

from dataclasses import dataclass

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `per_second` runs per second. `burst` runs may start together after a pause."""

    per_second: float
    burst: int = 1

    @property
    def interval_ns(self) -> int:
        """Nanoseconds between two runs, rounded up so that the rate is never exceeded."""
        return -int(-_NS // self.per_second)

    def wait(self, due_ns: int, now_ns: int, runs: int = 1) -> int:
        """Return the nanoseconds until `runs` (at most `burst`) may start together, 0 for now.

        `due_ns` is the state, on the clock of `now_ns`. It is 0 at the start.
        """
        early_ns = (self.burst - runs) * self.interval_ns
        return max(0, due_ns - early_ns - now_ns)

    def next_due(self, due_ns: int, now_ns: int, runs: int = 1) -> int:
        """Return the state after `runs` have started."""
        return max(due_ns, now_ns) + runs * self.interval_ns

    def inherit(self, due_ns: int, now_ns: int) -> int:
        """Return the state to continue with, given another worker's state. Its rate may differ."""
        return min(due_ns, now_ns + self.burst * self.interval_ns)
