"""The fleet's history for the pages: figures per group and minute, summed over all instances.

All pages share one `ConsoleHistory`. It keeps up to 24 hours in memory and reads only new entries
from Redis. After a restart, the console reads the whole history again.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from streamqd.scoreboard import BUCKETS, quantile
from streamqd.store import history
from streamqd.store.history import HistoryRow
from streamqd.store.store import Store

MINUTE_MS = 60_000
DAY_MINUTES = 1_440
SPARK_MINUTES = 60
FRESH_SECONDS = 5.0  # seconds between two reads of new entries
READ_SECONDS = 3.0  # seconds that one call may read for; the next call continues
MINUTES_MAX = 200_000  # limit of stored minutes over all groups, at about 300 bytes each
_ADDED, _ACKED, _FAILED, _LAG, _MEASURED = range(5)
_FIGURES = 5
_MOST = 2**32 - 1

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The figures of a group for the step that starts at `at_unix_ms`. None means unknown.

    Rates are in messages per second. `lag` is the highest lag during the step, in messages. If no
    entry covers the step, all values are unknown. `arriving` is also unknown while no partition of
    the group has an owner, and `lag` while any partition has none. `p95` is the upper bound of a
    histogram bucket in seconds, or None if there were no runs.
    """

    at_unix_ms: int
    arriving: float | None = None
    acked: float | None = None
    failed: float | None = None
    lag: int | None = None
    p95: float | None = None


class ConsoleHistory:
    """The minutes of one fleet. All threads share it, and each passes its own store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[Pair, dict[int, array[int]]] = {}
        self._covered: set[int] = set()  # minutes with an entry from at least one instance
        self._since = 0  # Unix ms from which entries have been read
        self._last = ""  # ID of the newest entry that has been read
        # Older entries that are still to be read: from this time, after this ID, until this time
        # (Unix ms).
        self._earlier: tuple[int, str, int] | None = None
        self._fresh_until = 0.0  # time (monotonic) until which the last read is recent enough

    def sparks(self, store: Store, fleet: str, now_unix_ms: int) -> dict[Pair, list[float | None]]:
        """Return the messages acknowledged in each minute of the last hour, by topic and group.

        The result is empty if there is no history. Raises RedisResponseError and
        RedisUnavailableError.
        """
        with self._lock:
            self._read(store, fleet, now_unix_ms, SPARK_MINUTES)
            last = now_unix_ms // MINUTE_MS
            if last - 1 not in self._covered:  # the last entry may not have been written yet
                last -= 1
            minutes = range(last - SPARK_MINUTES, last)
            return {
                pair: [float(some[each][_ACKED]) if each in some else 0.0 for each in minutes]
                for pair, some in self._groups.items()
            }

    def points(
        self,
        store: Store,
        fleet: str,
        now_unix_ms: int,
        pair: Pair,
        minutes: int,
        step: int,
        partitions: int,
    ) -> Sequence[HistoryPoint]:
        """Return the points of a group for the last minutes, one per step, oldest first.

        `minutes` and `step` are both in minutes. `partitions` is the topic's current partition
        count. Raises RedisResponseError and RedisUnavailableError.
        """
        with self._lock:
            self._read(store, fleet, now_unix_ms, minutes)
            last = now_unix_ms // MINUTE_MS // step * step
            some = self._groups.get(pair, {})
            whole = _measured_minutes(some, partitions)
            return [
                self._point(some, whole, first, step) for first in range(last - minutes, last, step)
            ]

    def runs(self, store: Store, fleet: str, now_unix_ms: int) -> dict[Pair, dict[int, int]]:
        """Return the runs of the last hour, by topic and group and then by handling-time bucket.

        Raises RedisResponseError and RedisUnavailableError.
        """
        with self._lock:
            self._read(store, fleet, now_unix_ms, SPARK_MINUTES)
            first = now_unix_ms // MINUTE_MS - SPARK_MINUTES
            found = {
                pair: _runs([each for minute, each in some.items() if minute >= first])
                for pair, some in self._groups.items()
            }
            return {pair: runs for pair, runs in found.items() if runs}

    # --- reading, while the lock is held ---

    def _read(self, store: Store, fleet: str, now_unix_ms: int, minutes: int) -> None:
        wanted = (now_unix_ms // MINUTE_MS - minutes) * MINUTE_MS
        if time.monotonic() < self._fresh_until and self._since <= wanted and not self._earlier:
            return
        deadline = time.monotonic() + READ_SECONDS
        if not self._since:
            self._since = wanted
        if wanted < self._since and self._earlier is None:
            self._earlier = (wanted, "", self._since)
            self._since = wanted
        for entry in history.read(store, fleet, self._since, self._last):
            self._last = entry.id
            self._add(entry)
            if time.monotonic() > deadline:
                break
        else:
            self._fresh_until = time.monotonic() + FRESH_SECONDS
        self._read_earlier(store, fleet, deadline)
        self._forget(now_unix_ms)

    def _read_earlier(self, store: Store, fleet: str, deadline: float) -> None:
        """Read entries that are older than the known ones. Stop at the deadline."""
        if self._earlier is None:
            return
        since, after, until = self._earlier
        for entry in history.read(store, fleet, since, after):
            if int(entry.id.partition("-")[0]) >= until:
                break
            self._add(entry)
            if time.monotonic() > deadline:
                self._earlier = (since, entry.id, until)
                return
        self._earlier = None

    def _add(self, entry: history.Interval) -> None:
        if entry.bad is not None:
            return
        minutes = entry.minutes
        minute = minutes[-1]
        self._covered.update(minutes)
        # The lag of a minute is the lag at its end, summed over the instances that own partitions
        # at that time. For each instance, at most one entry covers this end.
        for row in entry.rows:
            for at, each in enumerate(minutes):
                _add_figures(self._figures((row.topic, row.group), each), row, at, len(minutes))
        at_end = {(row.topic, row.group): row.lag for row in entry.rows}
        for pair, measured in entry.measured.items() if entry.reaches_end else ():
            figures = self._figures(pair, minute)
            figures[_LAG] = min(_MOST, figures[_LAG] + at_end.get(pair, 0))
            figures[_MEASURED] = min(_MOST, figures[_MEASURED] + measured)

    def _figures(self, pair: Pair, minute: int) -> array[int]:
        """Return the figures of a group in one minute.

        If there are none yet, all of them are zero.
        """
        size = 4 * (_FIGURES + len(BUCKETS))
        return self._groups.setdefault(pair, {}).setdefault(minute, array("I", bytes(size)))

    def _forget(self, now_unix_ms: int) -> None:
        """Drop minutes that are older than a day or in the future.

        If too many remain, drop more.
        """
        last = now_unix_ms // MINUTE_MS + 1
        first = last - DAY_MINUTES - 1
        kept = sum(map(len, self._groups.values()))
        if kept > MINUTES_MAX:
            first += DAY_MINUTES - DAY_MINUTES * MINUTES_MAX // kept
        self._covered = {each for each in self._covered if first <= each <= last}
        for pair, some in list(self._groups.items()):
            for minute in [each for each in some if not first <= each <= last]:
                del some[minute]
            if not some:
                del self._groups[pair]

    def _point(
        self, some: Mapping[int, array[int]], whole: Set[int], first: int, step: int
    ) -> HistoryPoint:
        known = sum(each in self._covered for each in range(first, first + step))
        if not known:
            return HistoryPoint(first * MINUTE_MS)
        rows = [some[each] for each in range(first, first + step) if each in some]
        lags = [some[each][_LAG] for each in range(first, first + step) if each in whole]
        seconds = known * 60.0
        return HistoryPoint(
            first * MINUTE_MS,
            sum(each[_ADDED] for each in rows) / seconds if rows else None,
            sum(each[_ACKED] for each in rows) / seconds,
            sum(each[_FAILED] for each in rows) / seconds,
            max(lags, default=None),
            quantile(_runs(rows), 0.95),
        )


def _add_figures(figures: array[int], row: HistoryRow, at: int, minutes: int) -> None:
    """Add a minute's share of an instance's counts to the figures of the minute."""
    counts = row.counts
    added = {_ADDED: counts["added"], _ACKED: counts["acked"], _FAILED: counts["failed"]}
    for bucket, runs in row.handled.items():
        index = _FIGURES + min(bucket, len(BUCKETS) - 1)
        added[index] = added.get(index, 0) + runs
    for index, each in added.items():
        figures[index] = min(_MOST, figures[index] + history.split_evenly(each, at, minutes))


def _measured_minutes(some: Mapping[int, array[int]], partitions: int) -> frozenset[int]:
    """Return the minutes in which the lag of all partitions was measured.

    A topic only grows. The number of partitions that it had in a minute is therefore at least the
    highest number for which the lag was measured until then.
    """
    most, found = 0, set[int]()
    for minute in sorted(some):
        measured = some[minute][_MEASURED]
        most = max(most, min(measured, partitions))
        if measured and measured >= most:
            found.add(minute)
    return frozenset(found)


def _runs(rows: Sequence[array[int]]) -> dict[int, int]:
    """Sum up the runs in each bucket over these minutes. Empty buckets are left out."""
    sums = (sum(each[_FIGURES + bucket] for each in rows) for bucket in range(len(BUCKETS)))
    return {bucket: runs for bucket, runs in enumerate(sums) if runs}
