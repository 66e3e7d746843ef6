"""Maps keys to partitions. Fixed forever: a change would reorder every topic.

The hash is CRC-32 (IEEE, as in zlib) of the key, modulo the partition count: the same as
librdkafka's `consistent` partitioner, so that other producers can agree with ours. A producer may
choose the jump hash instead.
"""

from __future__ import annotations

import hashlib
import zlib

_64_BITS = (1 << 64) - 1


def crc32_partition(key: bytes, count: int) -> int:
    """Return the partition of a key, 0 to `count` - 1. The same in every process and version."""
    if count < 1:
        raise ValueError(f"partition count must be at least 1, not {count}")
    return zlib.crc32(key) % count


def round_robin_partition(index: int, count: int) -> int:
    """Return the partition of the producer's `index`-th message without a key (from 0)."""
    if count < 1:
        raise ValueError(f"partition count must be at least 1, not {count}")
    return index % count


def jump_partition(key: bytes, count: int) -> int:
    """Return the partition of a key: `jump` of the first 8 bytes of its BLAKE2b hash.

    When a topic grows from P to Q partitions, (Q - P) / Q of the keys move, all to new partitions.
    """
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return jump(int.from_bytes(digest, "big"), count)


def jump(number: int, count: int) -> int:
    """Return the jump hash of a 64-bit number, 0 to `count` - 1 (Lamping and Veach, 2014)."""
    if count < 1:
        raise ValueError(f"partition count must be at least 1, not {count}")
    found, following = -1, 0
    while following < count:
        found = following
        number = (number * 2862933555777941757 + 1) & _64_BITS
        following = int((found + 1) * ((1 << 31) / ((number >> 33) + 1)))
    return found
