"""Partitioners choose the partition of a message. These choices need no Redis."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd import config
from streamqd.policy.partitioning import crc32_partition, jump, jump_partition
from streamqd.producer.routing import Chooser, Partitioner, Router

KEYS = [b"customer-%d" % number for number in range(2000)]


def choose_partitions(
    partitioner: Partitioner, keys: Any, count: int = 4, dedup_id: str | None = None
) -> Any:
    chooser = Chooser(partitioner)
    return [chooser.choose(key, dedup_id, count) for key in keys]


def make_router(partitioner: Any) -> Router:
    """Return a router that has no server."""
    none: Any = None
    return Router(config.Settings(), none, none, partitioner, create=False)


@pytest.mark.parametrize(
    ("number", "count", "partition"),
    [
        (1, 1, 0),
        (42, 57, 43),
        (0xDEAD10CC, 1, 0),
        (0xDEAD10CC, 666, 361),
        (256, 1024, 520),
    ],
)
def test_jump_hash_matches_published_values(number: int, count: int, partition: int) -> None:
    assert jump(number, count) == partition


def test_consistent_choice_never_changes() -> None:
    """The choices equal recorded values, because any other values would reorder existing topics."""
    assert [jump_partition(key, 16) for key in (b"", b"a", b"customer-3")] == [5, 11, 15]


@given(st.binary(max_size=20), st.integers(1, 50), st.integers(0, 50))
def test_jump_hash_moves_keys_only_to_new_partitions(key: bytes, count: int, more: int) -> None:
    before, after = jump_partition(key, count), jump_partition(key, count + more)

    assert after == before or after >= count


@pytest.mark.parametrize("partitioner", ["hash", "consistent"])
def test_keys_spread_evenly(partitioner: Partitioner) -> None:
    shares = Counter(choose_partitions(partitioner, KEYS))

    assert set(shares) == {0, 1, 2, 3}
    assert min(shares.values()) > 400


def test_hash_and_sticky_take_the_crc32_of_a_key() -> None:
    expected = [zlib.crc32(key) % 4 for key in KEYS[:50]]

    assert (
        choose_partitions("hash", KEYS[:50]) == choose_partitions("sticky", KEYS[:50]) == expected
    )


@pytest.mark.parametrize(
    ("partitioner", "keys"),
    [("hash", [None] * 8), ("consistent", [None] * 8), ("round-robin", [b"same"] * 8)],
)
def test_round_robin_visits_every_partition(
    partitioner: Partitioner, keys: list[bytes | None]
) -> None:
    found = choose_partitions(partitioner, keys)

    assert found == [(found[0] + n) % 4 for n in range(8)]


@given(
    st.sampled_from(["hash", "round-robin", "sticky", "consistent"]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7))),
)
def test_bulk_round_robin_equals_single_choices(
    partitioner: Partitioner, batches: list[tuple[int, int]]
) -> None:
    one, many = (Chooser(partitioner) for _ in range(2))
    first = one.choose(None, None, 4)
    while many.turns(1, 4) != [first]:  # both start with a random partition
        many = Chooser(partitioner)
    for number, count in batches:
        for chooser in (one, many):
            chooser.begin_batch()
        assert many.turns(number, count) == [one.choose(None, None, count) for _ in range(number)]


def test_sticky_partitioner_keeps_a_partition_per_batch() -> None:
    chooser = Chooser("sticky")
    found = []
    for _ in range(4):
        chooser.begin_batch()
        found.append({chooser.choose(None, None, 4) for _ in range(10)})

    assert all(len(batch) == 1 for batch in found)
    assert set.union(*found) == {0, 1, 2, 3}


@pytest.mark.parametrize("partitioner", ["hash", "round-robin", "sticky", "consistent"])
def test_equal_dedup_ids_get_the_same_partition(partitioner: Partitioner) -> None:
    choose = jump_partition if partitioner == "consistent" else crc32_partition
    keys = [None, b"k", b"l"] if partitioner == "round-robin" else [None]

    assert set(choose_partitions(partitioner, keys * 3, dedup_id="order-7")) == {
        choose(b"order-7", 4)
    }


def test_custom_partitioner_gets_key_and_partition_count() -> None:
    calls: list[tuple[bytes | None, int]] = []

    def last(key: bytes | None, partitions: int) -> int:
        calls.append((key, partitions))
        return partitions - 1

    assert choose_partitions(last, [b"a", None], 5) == [4, 4]
    assert calls == [(b"a", 5), (None, 5)]


@pytest.mark.parametrize("answer", [4, -1, True, 1.0, None])
def test_partitioner_with_an_invalid_result_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="partitions are numbered 0 to 3"):
        choose_partitions(lambda _key, _count: answer, [b"a"])


def test_partitioner_can_be_set_per_topic() -> None:
    router = make_router({"orders": lambda _key, _count: 3, "logs": "round-robin"})

    assert router.chooser("orders").choose(b"k", None, 4) == 3
    assert router.chooser("logs").takes_turns(b"k", None)
    assert router.chooser("other").choose(b"k", None, 4) == zlib.crc32(b"k") % 4


@pytest.mark.parametrize("wrong", ["murmur", {"orders": "random"}, 7])
def test_unknown_partitioner_name_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="choose one of hash, round-robin, sticky, consistent"):
        make_router(wrong)
