"""Slots, the map of a cluster, and redirections, as far as they need no server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.config.topology import Address
from streamqd.model import Assignment
from streamqd.store.keys import Keys
from streamqd.store.slots import SLOTS, Redirect, SlotMap, key_slot, parse_redirect, routing_key

A, B, C = (Address("10.0.0.1", 7000 + number) for number in range(3))


@pytest.mark.parametrize(
    ("key", "slot"),
    # These slots are from the cluster specification and from a server's CLUSTER KEYSLOT.
    [("123456789", 12739), ("foo", 12182), ("{foo}bar", 12182), ("a{}b", key_slot(b"a{}b"))],
)
def test_slot_of_matches_redis_cluster(key: str, slot: int) -> None:
    assert key_slot(key) == key_slot(key.encode()) == slot


def test_keys_of_a_partition_and_its_groups_share_a_slot() -> None:
    keys, assignment = Keys(), Assignment("orders", 3, "bill")
    of_assignment = [keys.source, keys.retry_stream, keys.lease, keys.fence, keys.retry]
    of_assignment += [keys.retry_items, keys.attempts]
    of_place = [keys.stream, keys.dlq, keys.moving, keys.delayed_sends, keys.delayed_send_items]
    of_place += [keys.trim]
    named = [each(*assignment) for each in of_assignment] + [
        each(*assignment[:2]) for each in of_place
    ]
    named += [keys.dedup("orders", 3, "x{y}"), keys.staged_rows("orders", 3, "query", "attempt")]
    assert len({key_slot(key) for key in named}) == 1


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "k"), "k"),
        (("xadd", "k", "*", "f", "v"), "k"),
        (("EVALSHA", "0" * 40, 2, "k", "l", "argument"), "k"),
        (("EVAL", "return 1", 1, b"k"), b"k"),
        (("XINFO", "STREAM", "k"), "k"),
        (("XGROUP", "CREATE", "k", "g", "$"), "k"),
        (("MEMORY", "USAGE", "k", "SAMPLES", 20), "k"),
        (("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", "k", "l", "0", "0"), "k"),
        (("XREADGROUP", "GROUP", "STREAMS2", "w", "STREAMS", "k", ">"), "k"),
        (("PUBLISH", "k", "m"), "k"),
        (("TIME",), None),
        (("INFO", "memory"), None),
        (("MULTI",), None),
        (("SCRIPT", "LOAD", "return 1"), None),
    ],
)
def test_key_of_returns_the_key_of_a_command(command: tuple[object, ...], key: object) -> None:
    assert routing_key(command) == key


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MOVED 3999 10.0.0.2:7002", Redirect(Address("10.0.0.2", 7002), asking=False)),
        ("ASK 3999 10.0.0.2:7002", Redirect(Address("10.0.0.2", 7002), asking=True)),
        ("MOVED 3999 :7002", Redirect(Address("10.0.0.1", 7002), asking=False)),
        ("MOVED 3999 fe80::1:7002", Redirect(Address("fe80::1", 7002), asking=False)),
        ("MOVED", None),
        ("TRYAGAIN Multiple keys request during rehashing of slot", None),
        ("ERR MOVED 1 a:1", None),
    ],
)
def test_redirect_of_parses_redirections(text: str, found: Redirect | None) -> None:
    assert parse_redirect(text, A) == found


def test_map_returns_the_master_of_each_slot() -> None:
    reply = [
        [5461, 10922, [b"10.0.0.1", 7001, b"id"], [b"10.0.0.9", 7005, b"id", []]],
        [0, 5460, [b"", 7000, b"id"]],
        [10923, 16000, [None, 7002, b"id", [b"hostname", b"x"]]],
    ]
    found = SlotMap.parse(reply, A)
    assert found.masters == [A, B, C]
    assert [found.master_for_slot(slot) for slot in (0, 5460, 5461, 10922, 16000)] == [
        A,
        A,
        B,
        B,
        C,
    ]
    assert found.master_for_slot(16001) is None
    assert SlotMap([]).master_for_slot(5) is None
    assert SlotMap([]).masters == []


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.sampled_from([A, B, C])), max_size=20))
def test_moved_slot_leaves_other_slots_unchanged(moves: list[tuple[int, Address]]) -> None:
    found = SlotMap([(0, 9999, A), (10_000, SLOTS - 1, B)])
    wanted = {slot: found.master_for_slot(slot) for slot, _ in moves}
    for slot, _ in moves:
        for near in (slot - 1, slot + 1):
            if 0 <= near < SLOTS:
                wanted.setdefault(near, found.master_for_slot(near))
    for slot, to in moves:
        found, wanted[slot] = found.with_redirect(slot, to), to
    assert {slot: found.master_for_slot(slot) for slot in wanted} == wanted
    assert sum(last - first + 1 for first, last, _ in found.ranges) == SLOTS
