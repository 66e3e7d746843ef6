"""Measure delays: the time from the write of an entry to the start of its first run.

An entry ID contains the server's time in milliseconds. The start of the run is also expressed in
the server's time, which the worker estimates. A negative delay counts as 0. A delayed send gets its
ID when the housekeeper promotes it, shortly after it becomes due. Retries are not first runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from streamqd.model import RawEntry
from streamqd.scoreboard import DELAY_BUCKETS, WorkerSlot
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.server_clock import ServerClock

_MS = 1_000_000  # ns in a millisecond
_LAST = len(DELAY_BUCKETS)  # index of the bucket for all longer delays
_MOST_MS = 1 << _LAST  # milliseconds that the sum counts for any longer delay
_WORD = (1 << 64) - 1


class StartDelays:
    """The delays of the first runs that a worker has started since the last `publish`.

    Only the main thread may use them.

    The delays are counted in the buckets of a histogram. If the delays of the oldest and the newest
    entry belong to the same bucket, all entries between them are counted together. A backlog
    therefore costs nothing per message. Otherwise, runs that start in the same millisecond are
    assigned to buckets with a binary search in their ordered IDs.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._runs = [0] * (_LAST + 1)
        self._sum_ms = 0

    def note_all(self, entries: Iterable[FetchedEntry], now: int) -> None:
        """Count the first runs among runs that all started at `now` (`now_ns`)."""
        ids = [entry.id for entry in entries if not entry.has_run]
        if ids:
            ms = (now + self._clock.offset_ns) // _MS
            if not self._add_if_same_bucket(len(ids), min(ids), max(ids), ms, ms):
                ids.sort()
                self._add(ids, ms)

    def note_each(self, entries: Sequence[RawEntry], start: int, starts: Sequence[int]) -> None:
        """Count the runs of one stream's entries, starting with `entries[start]`.

        `starts` holds their start times (`now_ns`), in the order of the stream. Entries that have
        no start time did not run.
        """
        ahead, count, first = self._clock.offset_ns, len(starts), 0
        if not count:
            return
        bounds = (starts[0] + ahead) // _MS, (starts[-1] + ahead) // _MS
        oldest, newest = entries[start][0], entries[start + count - 1][0]
        if self._add_if_same_bucket(count, oldest, newest, *bounds):
            return
        ids = [entry_id for entry_id, _ in entries[start : start + count]]
        while first < count:
            ms = (starts[first] + ahead) // _MS
            end = bisect_left(starts, (ms + 1) * _MS - ahead, first)
            self._add(ids[first:end], ms)
            first = end

    def same_bucket_until(self, oldest: bytes, newest: bytes, now: int) -> int:
        """Return the time (`now_ns`) until which all delays are in the same bucket.

        The delays are those of the entries from `oldest` to `newest`. Return 0 if they are already
        in different buckets.
        """
        ahead = self._clock.offset_ns
        ms = (now + ahead) // _MS
        bucket = _delay_ms(oldest, ms).bit_length()
        if bucket != _delay_ms(newest, ms).bit_length():
            return 0
        return (_written_ms(oldest) + (1 << bucket)) * _MS - ahead

    def _add(self, ids: Sequence[bytes], ms: int) -> None:
        """Count runs that started in millisecond `ms` of the server's unix time.

        `ids` holds the IDs of their entries, in order.
        """
        first, count = 0, len(ids)
        while first < count:
            bucket = _delay_ms(ids[first], ms).bit_length()
            # IDs are ordered by time, so the first ID whose delay is too short belongs to another
            # bucket, and so do all later IDs.
            beyond = b"%d" % (ms + 1 - (1 << bucket >> 1)) if bucket else b":"
            end = max(first + 1, bisect_left(ids, beyond, first))
            if not self._add_if_same_bucket(end - first, ids[first], ids[end - 1], ms, ms):
                end = first + 1  # IDs are not in time order, because a client chose other lengths
                self._add_if_same_bucket(1, ids[first], ids[first], ms, ms)
            first = end

    def _add_if_same_bucket(
        self, count: int, oldest: bytes, newest: bytes, low: int, high: int
    ) -> bool:
        """Count this many runs, which started from `low` to `high`, if they share one bucket.

        `low` and `high` are milliseconds of the server's unix time. If the delays belong to
        different buckets, count nothing and return False. Comparing IDs as bytes orders them by
        time, because the times have 13 digits until the year 2286.
        """
        longest, shortest = _delay_ms(oldest, high), _delay_ms(newest, low)
        bucket = longest.bit_length()
        if bucket != shortest.bit_length():
            return False
        self._runs[min(bucket, _LAST)] += count
        # Estimate the sum as if the delays were spread evenly.
        self._sum_ms += count * (min(longest, _MOST_MS) + min(shortest, _MOST_MS)) // 2
        return True

    def publish(self, slot: WorkerSlot) -> None:
        """Add the delays since the last call to the histogram of the assignment."""
        if not any(self._runs):
            return
        shared = slot.delay_histogram
        for bucket, count in enumerate(self._runs):
            if count:
                shared[bucket] += count
                self._runs[bucket] = 0
        shared[_LAST + 1] = (shared[_LAST + 1] + self._sum_ms) & _WORD
        self._sum_ms = 0


def _written_ms(entry_id: bytes) -> int:
    """Return the time in an entry ID (unix ms, server's clock)."""
    return int(entry_id.partition(b"-")[0])


def _delay_ms(entry_id: bytes, ms: int) -> int:
    """Return the delay in ms of a run that started at `ms` (unix ms, server's clock)."""
    return max(0, ms - _written_ms(entry_id))
