"""Limit the rate of runs on one partition of a group, with a single number as the state (GCRA).

The number is the time at which the next run is exactly on time. Each run advances it by the
interval between two runs. Runs are therefore spread evenly, instead of starting in bursts each
second. In any period, no more than rate x seconds + burst runs start. When a worker is replaced,
the next process can continue with the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of `per_second` runs per second.

    After a pause, up to `burst` runs may start together.
    """

    per_second: float
    burst: int = 1

    @property
    def interval_ns(self) -> int:
        """The nanoseconds between two runs, rounded up so that the rate is never exceeded."""
        return -int(-_NS // self.per_second)

    def wait(self, due_ns: int, now_ns: int, runs: int = 1) -> int:
        """Return the nanoseconds until `runs` runs may start together, or 0 if they may start now.

        `runs` must not exceed `burst`. `due_ns` is the state that `next_due` returned last, or 0 at
        the start. It is on the same clock as `now_ns`.
        """
        early_ns = (self.burst - runs) * self.interval_ns
        return max(0, due_ns - early_ns - now_ns)

    def next_due(self, due_ns: int, now_ns: int, runs: int = 1) -> int:
        """Return the state after `runs` runs have started."""
        return max(due_ns, now_ns) + runs * self.interval_ns

    def inherit(self, due_ns: int, now_ns: int) -> int:
        """Return the state for a worker that replaces another one.

        If the other worker had a lower rate, the result is limited, so that the first run does not
        have to wait longer than `interval_ns`.
        """
        return min(due_ns, now_ns + self.burst * self.interval_ns)
