"""Which partition a key belongs to. Fixed for ever: a change would reorder every topic.

The hash is CRC-32 (IEEE, as in zlib) of the key, modulo the partition count: the same as
librdkafka's `consistent` partitioner, so that other producers can agree with ours.
"""

from __future__ import annotations

import zlib


def crc32_partition(key: bytes, count: int) -> int:
    """Partition of a key among `count` partitions. The same in every process and version."""
    if count < 1:
        raise ValueError("a topic has at least one partition")
    return zlib.crc32(key) % count


def round_robin_partition(index: int, count: int) -> int:
    """Partition of the producer's `index`-th message without a key, counted from 0."""
    if count < 1:
        raise ValueError("a topic has at least one partition")
    return index % count
