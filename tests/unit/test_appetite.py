"""A worker's appetite: the number of entries that it requests with one read."""

from __future__ import annotations

from streamqd.config import Consumer
from streamqd.worker.prefetch import PrefetchController

MIB = 1 << 20
CONSUMER = Consumer(topic="t", group="g", handler="h:go", prefetch_bytes=4 * MIB)


def controller_after(size: int, spent_ns: int = 1000) -> PrefetchController:
    """Return an appetite after many reads of entries that have this size and duration."""
    prefetch = PrefetchController(CONSUMER, MIB, 256)
    for _ in range(50):
        prefetch.observe(prefetch.count, size * prefetch.count, spent_ns * prefetch.count)
    return prefetch


def test_first_prefetch_is_small():
    assert PrefetchController(CONSUMER, MIB, 256).count == 4
    assert PrefetchController(CONSUMER, 64 * MIB, 256).count == 1
    assert PrefetchController(CONSUMER, 1024, 256).count == 16
    assert PrefetchController(CONSUMER, 1024, 1).count == 1


def test_prefetch_doubles_up_to_its_bound():
    prefetch = PrefetchController(CONSUMER, MIB, 100)
    counts = []
    for _ in range(6):
        prefetch.observe(prefetch.count, prefetch.count, 0)
        counts.append(prefetch.count)
    assert counts == [8, 16, 32, 64, 100, 100]


def test_prefetch_is_bounded_by_bytes_and_run_time():
    assert controller_after(64 * 1024).count == 64
    assert controller_after(1, spent_ns=100_000_000).count == 10
    assert controller_after(100 * MIB).count == 1


def test_prefetch_is_small_after_an_oversized_read():
    """After an oversized read, the next one is small, although the mean size is still small."""
    prefetch = controller_after(100)
    assert prefetch.count == 256
    prefetch.observe(256, 100 * 256, 0, received=5 * MIB)
    assert prefetch.count == 4
    prefetch.observe(4, 400, 0, received=500)
    assert prefetch.count == 8
