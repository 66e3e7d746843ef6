"""Compute how fast messages arrive, how fast the lag changes, and how long runs take, right now.

The counters in the scoreboard cover the whole time since the start, but operators need the last
minute. So this module computes moving averages and medians. They exist only in the housekeeper.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from streamqd.isolate import Isolate, run_directly
from streamqd.metrics.view import MetricsView
from streamqd.model import Assignment
from streamqd.scoreboard import BUCKETS, WorkerSlot, now_ns, quantile

TREND_SECONDS = 20.0  # time constant of a trend, which is an exponential average
DRIFT_SAMPLES = 7  # number of observations from which a drift computes the median change
LATENCY_SECONDS = 60.0
QUIET = 0.01  # if fewer runs than this are left after the decay, no durations are reported


class Trend:
    """Computes the change per second of named numbers, as an exponential moving average.

    The change of a number is unknown until the number was observed twice.
    """

    def __init__(self, seconds: float = TREND_SECONDS) -> None:
        self._seconds = seconds
        self._last: dict[Hashable, tuple[float, int]] = {}
        self._slopes: dict[Hashable, float] = {}

    def observe(self, numbers: dict[Hashable, float], now: int) -> None:
        """Record the numbers at `now` (ns), and drop all names that are missing."""
        slopes: dict[Hashable, float] = {}
        for name, number in numbers.items():
            if name not in self._last:
                continue
            before, then = self._last[name]
            seconds = max(1e-3, (now - then) / 1e9)
            slope = (number - before) / seconds
            old = self._slopes.get(name)
            share = 1.0 if old is None else 1 - math.exp(-seconds / self._seconds)
            slopes[name] = slope if old is None else old + share * (slope - old)
        self._slopes = slopes
        self._last = {name: (number, now) for name, number in numbers.items()}

    def get(self, name: Hashable) -> float | None:
        """Return the smoothed change of a number per second, or None if it is unknown."""
        slope = self._slopes.get(name)
        return None if slope is None else round(slope, 2)


class Drift:
    """Computes the typical change per second of named numbers, as the median of the last changes.

    Unlike an average, the median ignores a single burst. The change of a number is unknown until
    the number was observed three times, because the change between two observations may be a burst.
    """

    def __init__(self, samples: int = DRIFT_SAMPLES) -> None:
        self._samples = samples
        self._seen: dict[Hashable, deque[tuple[float, int]]] = {}

    def observe(self, numbers: Mapping[Hashable, float], now: int) -> None:
        """Record the numbers at `now` (ns), and drop all names that are missing."""
        kept: dict[Hashable, deque[tuple[float, int]]] = {}
        for name, number in numbers.items():
            seen = kept[name] = self._seen.get(name) or deque(maxlen=self._samples)
            seen.append((number, now))
        self._seen = kept  # replaced as a whole, because the HTTP thread reads it

    def get(self, name: Hashable) -> float | None:
        """Return the typical change of a number per second, or None if it is unknown.

        For an even number of changes, this is the slower one of the two in the middle.
        """
        seen = list(self._seen.get(name, ()))
        changes = sorted(
            (number - before) / max(1e-3, (now - then) / 1e9)
            for (before, then), (number, now) in itertools.pairwise(seen)
        )
        if len(changes) < 2:
            return None
        middle = changes[(len(changes) - 1) // 2 : len(changes) // 2 + 1]
        slower: float = min(middle, key=abs)
        return round(slower, 2)


class Durations(NamedTuple):
    """How long runs took in approximately the last minute, in seconds.

    `p50` and `p99` are upper bounds of these quantiles, because they are computed from a histogram.
    """

    p50: float
    p99: float
    mean: float


class Latency:
    """Keeps a histogram of run times for each slot, in which old runs count less and less."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[list[int], float, int]] = {}
        self._kept: dict[int, tuple[list[float], float]] = {}
        self._ran: dict[int, int] = {}  # time of the last check at which a slot had new runs

    def observe(self, index: int, counts: list[int], total: float, now: int) -> None:
        """Record the histogram of a slot at `now` (ns).

        `counts` holds the number of runs per bucket since the start, and `total` the sum of their
        run times in seconds.
        """
        before, total_before, then = self._last.get(index, ([0] * len(counts), 0.0, now))
        self._last[index] = counts, total, now
        kept, kept_total = self._kept.get(index, ([0.0] * len(counts), 0.0))
        if counts != before:
            self._ran[index] = now
        elif now - self._ran.get(index, now) > LATENCY_SECONDS * 1e9:
            kept, kept_total = [0.0] * len(counts), 0.0
        keep = math.exp(-max(0, now - then) / 1e9 / LATENCY_SECONDS)
        self._kept[index] = (
            [old * keep + new - past for old, new, past in zip(kept, counts, before, strict=True)],
            kept_total * keep + total - total_before,
        )

    def get(self, index: int) -> Durations | None:
        """Return how long a slot's recent runs took, or None if there were none."""
        kept, total = self._kept.get(index, ([], 0.0))
        runs = math.fsum(kept)
        if runs < QUIET:
            return None
        return Durations(_quantile(kept, 0.5), _quantile(kept, 0.99), round(total / runs, 6))


def _quantile(counts: Sequence[float], share: float) -> float:
    """Return the upper bound of the histogram bucket that contains a quantile of the runs.

    `share` is the quantile, such as 0.99. There must be at least one run.
    """
    return round(quantile(dict(enumerate(counts)), share) or BUCKETS[-1], 6)


class Pace:
    """The current rates and run times of all assignments, for the summary."""

    def __init__(self, isolate: Isolate[Assignment] = run_directly) -> None:
        self._isolate = isolate
        self.arriving = Trend()
        self.lag = Drift()
        self._measured_ns = 0
        self.latency = Latency()

    def observe(self, view: MetricsView) -> None:
        """Update the rates and run times from the view. Call this before each summary."""
        # Skip figures that were not measured again since the last call, because they would look
        # like a change of zero.
        if view.measured_ns != self._measured_ns:
            now = self._measured_ns = view.measured_ns
            added: dict[Hashable, float] = {
                place: each.added for place, each in view.partitions.items()
            }
            self.arriving.observe(added, now)
            lags: dict[Hashable, float] = {
                assignment: each.lag
                for assignment, each in view.assignments.items()
                if each.lag is not None
            }
            self.lag.observe(lags, now)
        now = now_ns()
        for slot, assignment in view.assigned_slots():
            self._isolate(assignment, self._observe_latency, slot, now)

    def _observe_latency(self, slot: WorkerSlot, now: int) -> None:
        self.latency.observe(slot.index, *slot.histogram("handle"), now)

    def document(self, index: int, assignment: Assignment) -> dict[str, float | None]:
        """Return the fields of the summary for an assignment. A field is None if it is unknown."""
        durations = self.latency.get(index)
        return {
            "arriving": self.arriving.get((assignment.topic, assignment.partition)),
            "lag_per_second": self.lag.get(assignment),
            "p50_seconds": durations.p50 if durations else None,
            "p99_seconds": durations.p99 if durations else None,
            "mean_seconds": durations.mean if durations else None,
        }
