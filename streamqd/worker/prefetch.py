"""How many entries a worker asks for at once: bounded by number, by bytes and by work in hand.

A read takes a number and no size, so the number follows from what entries were like before. The
first read, and the one after a read that was too large, trust no mean: they ask for what stays
within the bound even if every entry is as large as an entry may be.
"""

from __future__ import annotations

from typing import Any

from streamqd.config import Consumer

WORK_IN_HAND_NS = 1_000_000_000  # entries fetched at once are worth at most this much work
FIRST_COUNT = 16
COUNT_MAX = 1 << 20  # more than any consumer asks for
CAUTIOUS_ENTRIES = 100  # after so many that did no harm there may be more at once


class PrefetchController:
    """`count` entries of each stream come next; `observe` tells it how the last ones were."""

    def __init__(
        self, consumer: Consumer, max_message_bytes: int, batch_max: int, later_max: int = 0
    ) -> None:
        """Begin with at most `batch_max` at once, and allow `later_max` when that went well."""
        self._bytes_max = consumer.prefetch_bytes
        self._least = max(consumer.batch or 1, consumer.lanes)  # what one call, or all lanes, take
        self.batch_max = batch_max
        self._later_max = later_max or batch_max
        self._rated = rated(consumer)
        self._eaten = 0
        self._safe = max(1, consumer.prefetch_bytes // max(1, max_message_bytes))
        self._entry_bytes = 0.0  # moving mean
        self._run_ns = 0.0  # moving mean
        self.count = min(FIRST_COUNT, batch_max, self._safe, self._rated)

    def observe(self, entries: int, size: int, took_ns: int, received: int = 0) -> None:
        """Learn from this many entries, of about `size` bytes, that took `took_ns` to handle.

        `received` is what the read brought, in bytes: exact, but with all that is around entries.
        """
        self._eaten += entries
        if self._eaten >= CAUTIOUS_ENTRIES:
            self.batch_max = self._later_max
        each = size / entries
        self._entry_bytes += (each - self._entry_bytes) / 4 if self._entry_bytes else each
        self._run_ns += (took_ns / entries - self._run_ns) / 4
        by_bytes = self._bytes_max / max(1.0, self._entry_bytes)
        by_work = max(self._least, WORK_IN_HAND_NS / max(1.0, self._run_ns))
        count = max(1, int(min(self.batch_max, by_bytes, by_work, self.count * 2, self._rated)))
        # The mean forgets slowly that entries were small; one read of large ones is too many.
        self.count = min(count, self._safe) if max(size, received) > self._bytes_max else count


def rated(consumer: Consumer) -> int:
    """Return how many entries the rate of a consumer lets begin soon: within a second, or one call.

    What it lets wait is better off in the stream: another worker may get it first.
    """
    rate = consumer.rate_per_second
    return max(consumer.batch or 1, int(rate)) if rate else COUNT_MAX


def bytes_of(entries: list[Any], total: int) -> int:
    """Return the bytes of a batch of `total`, about: some of its entries stand for all."""
    if total == 1:
        return sum(map(len, entries[0][1]))
    sample = entries[:: max(1, len(entries) // 8)]
    return sum(sum(map(len, fields)) for _, fields in sample) * total // len(sample)
