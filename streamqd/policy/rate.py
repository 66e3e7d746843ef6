"""How fast one partition of a group is handled: a limiter whose state is one number.

The number is the instant at which the next run would come exactly in time; each run moves it on by
the interval between two (the generic cell rate algorithm). So runs are spread evenly instead of
coming in bursts at the turn of a second, and the state passes from one process to the next as it
is. The runs that begin in any stretch of time are at most rate x seconds + burst.
"""

from __future__ import annotations

from dataclasses import dataclass

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """So many runs per second, of which `burst` may begin at once after a rest."""

    per_second: float
    burst: int = 1

    @property
    def interval_ns(self) -> int:
        """Between two runs. Rounded up: never faster than what was asked for."""
        return -int(-_NS // self.per_second)

    def wait(self, due_ns: int, now_ns: int, runs: int = 1) -> int:
        """Nanoseconds until `runs` may begin together, at most `burst` of them; 0: now.

        `due_ns` is the state, on the clock of `now_ns`; 0 in the beginning.
        """
        early_ns = (self.burst - runs) * self.interval_ns
        return max(0, due_ns - early_ns - now_ns)

    def after(self, due_ns: int, now_ns: int, runs: int = 1) -> int:
        """Return the state after `runs` have begun."""
        return max(due_ns, now_ns) + runs * self.interval_ns

    def inherited(self, due_ns: int, now_ns: int) -> int:
        """Return the state that another worker has left, perhaps under another rate."""
        return min(due_ns, now_ns + self.burst * self.interval_ns)
