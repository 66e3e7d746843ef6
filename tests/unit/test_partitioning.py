"""The partition of a key never changes.

Published check values and a second implementation prove it.
"""

from __future__ import annotations

import binascii

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.policy.partitioning import crc32_partition, round_robin_partition

# CRC-32/ISO-HDLC, which zlib, gzip and PNG use. "123456789" is the check value in the catalogue of
# parametrized CRC algorithms, and the others are published with descriptions of the algorithm.
PUBLISHED = {
    b"": 0x00000000,
    b"123456789": 0xCBF43926,
    b"a": 0xE8B7BE43,
    b"abc": 0x352441C2,
    b"message digest": 0x20159D7F,
    b"abcdefghijklmnopqrstuvwxyz": 0x4C2750BD,
    b"The quick brown fox jumps over the lazy dog": 0x414FA339,
}


def bitwise_crc32(data: bytes) -> int:
    """Compute the CRC bit by bit, as it is defined (reflected polynomial 0xEDB88320)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(("key", "crc"), PUBLISHED.items())
def test_crc32_partition_matches_published_check_values(key: bytes, crc: int) -> None:
    assert crc32_partition(key, 1 << 32) == crc
    for count in (1, 2, 3, 4, 7, 12, 64, 1000):
        assert crc32_partition(key, count) == crc % count


# librdkafka's own test derives the partitions of its `consistent` partitioner from these CRCs, for
# 7 and 17 partitions.
LIBRDKAFKA = {
    b"": 0x0,
    b"23456": 0xB1B451D7,
    b"this is another string with more length to it perhaps": 0xB0150DF7,
    b"hejsan": 0xD077037E,
}


@pytest.mark.parametrize(("key", "crc"), LIBRDKAFKA.items())
@pytest.mark.parametrize("count", [7, 17])
def test_crc32_partition_matches_librdkafka(key: bytes, crc: int, count: int) -> None:
    assert crc32_partition(key, count) == crc % count


# These numbers are fixed, so that a change of both the code and the test is noticed.
@pytest.mark.parametrize(
    ("key", "count", "partition"),
    [
        (b"123456789", 100, 62),
        (b"123456789", 12, 2),
        (b"a", 100, 7),
        (b"abc", 100, 78),
        (b"user-1", 12, 8),
        ("Grüße".encode(), 16, 1),
    ],
)
def test_crc32_partition_matches_fixed_vectors(key: bytes, count: int, partition: int) -> None:
    assert crc32_partition(key, count) == partition


@given(st.binary(max_size=64), st.integers(1, 4096))
def test_crc32_partition_equals_two_other_implementations(key: bytes, count: int) -> None:
    assert crc32_partition(key, count) == (binascii.crc32(key) & 0xFFFFFFFF) % count
    assert crc32_partition(key, count) == bitwise_crc32(key) % count


def test_crc32_partition_spreads_keys() -> None:
    counts = [0] * 16
    for number in range(16_000):
        counts[crc32_partition(f"user-{number}".encode(), 16)] += 1
    assert min(counts) > 800
    assert max(counts) < 1200


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_round_robin_visits_all_partitions_in_turn(index: int, count: int) -> None:
    assert round_robin_partition(index, count) == index % count
    assert round_robin_partition(index + count, count) == round_robin_partition(index, count)


@pytest.mark.parametrize("count", [0, -1])
def test_no_partitions_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match="partition count must be at least 1"):
        crc32_partition(b"key", count)
    with pytest.raises(ValueError, match="partition count must be at least 1"):
        round_robin_partition(0, count)
