"""Measure delays: the time from the write of an entry to the start of its first run.

The time of the write is part of the entry ID, in milliseconds of the server's clock. The worker
estimates the server's time at the start of the run. A negative delay counts as 0. For a delayed
send, the delay starts when the housekeeper writes the entry, shortly after the send becomes due.
Retries do not count, because they are not first runs.
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
_MOST_MS = 1 << _LAST  # largest delay in milliseconds that is added to the sum
_WORD = (1 << 64) - 1


class StartDelays:
    """The delays of the first runs that a worker has started since the last `publish`.

    Only the main thread may use them.

    The delays are counted in the buckets of a histogram. If the delays of the oldest and the newest
    entry belong to the same bucket, all entries between them are counted in a single step. So while
    a worker catches up with a backlog, counting costs nothing per message. Otherwise, the entries
    are assigned to buckets through a binary search in their ordered IDs.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._runs = [0] * (_LAST + 1)
        self._sum_ms = 0

    def note_all(self, entries: Iterable[FetchedEntry], now: int) -> None:
        """Count runs that all started at `now` (`now_ns`), except those that are not first runs."""
        ids = [entry.id for entry in entries if not entry.has_run]
        if ids:
            ms = (now + self._clock.offset_ns) // _MS
            if not self._add_if_same_bucket(len(ids), min(ids), max(ids), ms, ms):
                ids.sort()
                self._add(ids, ms)

    def note_each(self, entries: Sequence[RawEntry], start: int, starts: Sequence[int]) -> None:
        """Count the runs of entries from one stream, starting with `entries[start]`.

        `starts` holds the start times of these runs (`now_ns`), in the order of the entries. If it
        is shorter than the list of entries, the remaining entries have not run.
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
        """Return until when (`now_ns`) these entries could start and share one histogram bucket.

        `oldest` and `newest` are the IDs of the first and the last entry. Return 0 if their delays
        already belong to different buckets.
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
            # IDs are ordered by time, so delays become shorter from one ID to the next. Find the
            # first ID whose delay is too short for this bucket.
            beyond = b"%d" % (ms + 1 - (1 << bucket >> 1)) if bucket else b":"
            end = max(first + 1, bisect_left(ids, beyond, first))
            if not self._add_if_same_bucket(end - first, ids[first], ids[end - 1], ms, ms):
                end = first + 1  # IDs of other lengths, which a client chose, are not in time order
                self._add_if_same_bucket(1, ids[first], ids[first], ms, ms)
            first = end

    def _add_if_same_bucket(
        self, count: int, oldest: bytes, newest: bytes, low: int, high: int
    ) -> bool:
        """Count these runs if all their delays belong to the same bucket, or else return False.

        `oldest` and `newest` are the first and the last ID of their entries. The runs started from
        `low` to `high`, in milliseconds of the server's unix time. Comparing IDs as bytes orders
        them by time, because the times have 13 digits until the year 2286.
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
