"""Choose how many entries to read at a time, limited by number, by bytes and by run time.

Redis can limit a read by number but not by size, so the number is computed from the mean size of
earlier entries. The first read cannot use the mean, and a read after one that was too large does
not rely on it. These reads stay within the limit in bytes even if every entry is as large as
`max_message_bytes` allows.
"""

from __future__ import annotations

from typing import Any

from streamqd.config import Consumer

WORK_IN_FLIGHT_NS = 1_000_000_000  # target for the total run time of the entries in one read
FIRST_COUNT = 16
COUNT_MAX = 1 << 20  # larger than any `prefetch_max`
CAUTIOUS_ENTRIES = 100  # entries that a cautious worker handles before it fetches more


class PrefetchController:
    """Computes how many entries per stream the next read may fetch (`count`).

    It uses the mean size and the mean run time of earlier entries.
    """

    def __init__(
        self,
        consumer: Consumer,
        max_message_bytes: int,
        batch_max: int,
        later_max: int = 0,
        per_second: float = 0.0,
    ) -> None:
        """Limit a read to `batch_max` entries, and later to `later_max`.

        The second limit applies after CAUTIOUS_ENTRIES entries were handled. If it is 0, the first
        one stays in effect. `per_second` is the rate limit of the partition, or 0 if it has none.
        With a rate limit, a read fetches no more entries than may start within a second.
        """
        self._bytes_max = consumer.prefetch_bytes
        # The number of entries that one call of a batch handler or all lanes together need.
        self._count_min = max(consumer.batch or 1, consumer.lanes)
        self.batch_max = batch_max
        self._later_max = later_max or batch_max
        # Entries beyond this number stay in the stream, where another worker may fetch them.
        self.rated = max(consumer.batch or 1, int(per_second)) if per_second else COUNT_MAX
        self._fetched = 0
        self._safe_count = max(1, consumer.prefetch_bytes // max(1, max_message_bytes))
        self._entry_bytes = 0.0  # moving mean of the size of an entry
        self._run_ns = 0.0  # moving mean of the run time
        self.count = min(FIRST_COUNT, batch_max, self._safe_count, self.rated)

    def observe(self, entries: int, size: int, took_ns: int, received: int = 0) -> None:
        """Record the entries of a read or listing, and choose the number for the next read.

        `entries` is their number, `size` is their approximate total size in bytes, and `took_ns` is
        the total time of their runs. `received` is the exact size of the read in bytes, including
        the protocol, or 0 for a listing.
        """
        self._fetched += entries
        if self._fetched >= CAUTIOUS_ENTRIES:
            self.batch_max = self._later_max
        each = size / entries
        self._entry_bytes += (each - self._entry_bytes) / 4 if self._entry_bytes else each
        self._run_ns += (took_ns / entries - self._run_ns) / 4
        by_bytes = self._bytes_max / max(1.0, self._entry_bytes)
        by_work = max(self._count_min, WORK_IN_FLIGHT_NS / max(1.0, self._run_ns))
        count = max(1, int(min(self.batch_max, by_bytes, by_work, self.count * 2, self.rated)))
        # If entries suddenly become large, the mean is still too low. So do not read more than
        # would fit if all entries had the largest size.
        self.count = (
            min(count, self._safe_count) if max(size, received) > self._bytes_max else count
        )


def estimate_bytes(entries: list[Any], total: int) -> int:
    """Estimate the size in bytes of `total` entries from a sample of `entries`."""
    if total == 1:
        return sum(map(len, entries[0][1]))
    sample = entries[:: max(1, len(entries) // 8)]
    return sum(sum(map(len, fields)) for _, fields in sample) * total // len(sample)
