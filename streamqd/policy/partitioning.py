"""Map keys to partitions.

These functions must never change. Otherwise, messages with the same key could be sent to a
different partition and lose their order. By default, the partition is the CRC-32 of the key (IEEE,
as in zlib) modulo the partition count. This is the same as the `consistent` partitioner of
librdkafka, so that other producers can choose the same partitions. A producer may use the jump hash
instead.
"""

from __future__ import annotations

import hashlib
import zlib

_64_BITS = (1 << 64) - 1


def crc32_partition(key: bytes, count: int) -> int:
    """Return the partition of a key, from 0 to `count` - 1, by its CRC-32."""
    if count < 1:
        raise ValueError(f"partition count must be at least 1, not {count}")
    return zlib.crc32(key) % count


def round_robin_partition(index: int, count: int) -> int:
    """Return the partition of a message without a key.

    `index` is the number of such messages that the producer has sent before.
    """
    if count < 1:
        raise ValueError(f"partition count must be at least 1, not {count}")
    return index % count


def jump_partition(key: bytes, count: int) -> int:
    """Return the partition of a key by its jump hash.

    The key is hashed with BLAKE2b to the 64-bit number that `jump` expects. When a topic grows from
    P to Q partitions, (Q - P) / Q of the keys move, and all of these move to new partitions.
    """
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return jump(int.from_bytes(digest, "big"), count)


def jump(number: int, count: int) -> int:
    """Return the jump hash of a 64-bit number, from 0 to `count` - 1 (Lamping and Veach, 2014)."""
    if count < 1:
        raise ValueError(f"partition count must be at least 1, not {count}")
    found, following = -1, 0
    while following < count:
        found = following
        number = (number * 2862933555777941757 + 1) & _64_BITS
        following = int((found + 1) * ((1 << 31) / ((number >> 33) + 1)))
    return found
