"""stream_trim: settled and no longer retained -> gone."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from streamqd.store import retention
from streamqd.store.retention import Trimmed
from streamqd.store.scripts import Reply
from tests.contract.harness import Harness
from tests.contract.scenarios import trim_all

NODE = 100  # entries in a full stream node, by default


def run_trim(harness: Harness, **changed: object) -> Trimmed:
    return Trimmed.parse(
        Reply("OK", harness.expect("stream_trim", "OK", trim_all(harness, **changed)))
    )


class Short(NamedTuple):
    removed: int
    floor: str
    holder: str


def trim_result(harness: Harness, **changed: object) -> Short:
    return Short(*run_trim(harness, **changed)[:3])


def fill(harness: Harness, count: int, *, acked: int, stream: str = "") -> None:
    """Write entries 1-0 to count-0, read all of them, and acknowledge the first."""
    key = stream or harness.stream
    harness.groups()
    harness.link.pipeline([("XADD", key, f"{n}-0", "payload", n) for n in range(1, count + 1)])
    harness.fetch(count, stream=key)
    if acked:
        harness.do("XACK", key, "hits", *(f"{n}-0" for n in range(1, acked + 1)))


def length(harness: Harness) -> int:
    return int(harness.do("XLEN", harness.stream))


def test_stream_trim_removes_acknowledged_entries(harness: Harness) -> None:
    fill(harness, 3, acked=3)
    before = harness.state()
    assert trim_result(harness) == (3, "3-1", "hits")
    changed = harness.changes(before)
    record = {"first": b"3-1", "size": b"0", "floor:hits": b"3-1", "removed": b"3"}
    assert sorted(changed) == ["stream", "trim"]
    assert changed["trim"] == record
    assert changed["stream"].entries == {}
    assert changed["stream"].groups == {"hits": ("3-0", {})}


def test_stream_trim_floor_is_the_smallest_needed_id(harness: Harness) -> None:
    """The floor is the smallest ID that is still needed.

    The last delivered ID would retain an acknowledged entry forever.
    """
    fill(harness, 2, acked=2)
    harness.add("3-0")
    assert trim_result(harness).floor == "2-1"
    harness.fetch()
    assert trim_result(harness).floor == "3-0"
    harness.do("XACK", harness.stream, "hits", "3-0")
    assert trim_result(harness) == (3, "3-1", "hits")
    assert length(harness) == 0


def test_stream_trim_never_removes_pending_entries(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0")
    harness.fetch(350)
    harness.do("XREADGROUP", "GROUP", "audit", "w", "COUNT", 350, "STREAMS", harness.stream, ">")
    harness.do("XACK", harness.stream, "audit", *(f"{n}-0" for n in range(1, 351) if n != 250))
    found = trim_result(harness)
    assert found == (200, "250-0", "audit")
    assert next(iter(harness.state()["stream"].entries)) == "201-0"
    record = harness.state()["trim"]
    assert record["first"] == b"201-0"
    assert record["floor:audit"] == b"250-0"
    assert record["floor:hits"] == b"350-1"
    harness.do("XACK", harness.stream, "audit", "250-0")
    assert trim_result(harness).removed == 150
    assert harness.state()["trim"]["removed"] == b"350"
    assert length(harness) == 0


def test_stream_trim_never_removes_unread_entries(harness: Harness) -> None:
    fill(harness, 250, acked=250)
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0")
    assert trim_result(harness) == (0, "0-1", "audit")
    assert length(harness) == 250


def test_stream_trim_compares_floors_numerically(harness: Harness) -> None:
    """Floors are compared as numbers. As text, 10-0 would come before 9-0."""
    fill(harness, 110, acked=110)
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "9-0")
    assert trim_result(harness)[1:] == ("9-1", "audit")
    harness.do("XGROUP", "SETID", harness.stream, "audit", "109-0")
    assert trim_result(harness) == (100, "109-1", "audit")


def test_stream_trim_by_age_keeps_entries_from_an_id(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    assert trim_result(harness, keep_from="0-0") == (0, "350-1", "hits")
    assert trim_result(harness, keep_from="250-0").removed == 200
    assert trim_result(harness, keep_from="999999999999-0").removed == 150
    assert length(harness) == 0


def test_stream_trim_by_length_keeps_that_many(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    assert trim_result(harness, keep_from="0-0", max_length=1000).removed == 0
    found = trim_result(harness, keep_from="0-0", max_length=150)
    assert found.removed == 2 * NODE  # whole nodes only, so the bound is kept
    assert length(harness) == 150
    assert trim_result(harness, keep_from="0-0", max_length=0).removed == 150
    assert length(harness) == 0


def test_stream_trim_by_length_respects_the_floor(harness: Harness) -> None:
    fill(harness, 350, acked=120)
    assert trim_result(harness, keep_from="0-0", max_length=10) == (100, "121-0", "hits")
    assert length(harness) == 250


def test_stream_trim_works_in_batches(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    assert trim_result(harness, limit=NODE).removed == NODE
    assert trim_result(harness, limit=2 * NODE).removed == 2 * NODE
    assert trim_result(harness, limit=NODE // 4).removed == 50


def test_stream_trim_by_length_works_in_batches(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    assert trim_result(harness, keep_from="150-0", max_length=0, limit=NODE).removed == NODE
    assert trim_result(harness, keep_from="150-0", max_length=0, limit=2 * NODE).removed == 2 * NODE
    assert trim_result(harness, keep_from="150-0", max_length=0, limit=2 * NODE).removed == 50


def test_stream_trim_removes_a_node_above_the_limit(harness: Harness, large_nodes: int) -> None:
    fill(harness, 2 * large_nodes, acked=2 * large_nodes)
    assert trim_result(harness, limit=NODE).removed == large_nodes
    assert trim_result(harness, keep_from="0-0", max_length=0, limit=NODE).removed == large_nodes


def test_stream_trim_keeps_a_partly_needed_large_node(harness: Harness, large_nodes: int) -> None:
    fill(harness, 2 * large_nodes, acked=large_nodes - 1)
    assert trim_result(harness, limit=NODE).removed == 0
    assert (
        trim_result(harness, keep_from="0-0", max_length=large_nodes + 1, limit=NODE).removed == 0
    )
    harness.do("XACK", harness.stream, "hits", f"{large_nodes}-0")
    assert (
        trim_result(harness, keep_from="0-0", max_length=large_nodes + 1, limit=NODE).removed == 0
    )
    assert not run_trim(harness, keep_from="0-0", max_length=large_nodes + 1).held, (
        "less than a node"
    )
    assert (
        trim_result(harness, keep_from="0-0", max_length=large_nodes, limit=NODE).removed
        == large_nodes
    )


def test_stream_trim_keeps_a_partly_needed_node(harness: Harness) -> None:
    """A node that is partly needed is kept, because trimming a part of it would free no memory."""
    fill(harness, 50, acked=49)
    assert trim_result(harness).removed == 0
    harness.do("XACK", harness.stream, "hits", "50-0")
    assert trim_result(harness).removed == 50


def test_stream_trim_respects_the_archive(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    assert trim_result(harness, archive=True) == (0, "0-0", "@archive")
    harness.do("HSET", harness.trim, "archived", "120-0")
    assert trim_result(harness, archive=True) == (100, "120-1", "@archive")
    assert harness.state()["trim"]["archived"] == b"120-0"
    assert trim_result(harness, archive=False).removed == 250


def test_stream_trim_archive_does_not_pass_the_groups(harness: Harness) -> None:
    fill(harness, 350, acked=120)
    harness.do("HSET", harness.trim, "archived", "300-0")
    assert trim_result(harness, archive=True) == (100, "121-0", "hits")


def test_stream_trim_writes_nothing_when_idle(harness: Harness) -> None:
    fill(harness, 3, acked=3)
    trim_result(harness)
    before = harness.dump()
    assert trim_result(harness).removed == 0
    assert harness.dump() == before


def test_stream_trim_refuses_without_groups(harness: Harness) -> None:
    harness.expect("stream_trim", "NO_GROUPS", trim_all(harness))
    harness.add("1-0")
    harness.expect("stream_trim", "NO_GROUPS", trim_all(harness))


def test_stream_trim_refuses_without_an_expected_group(harness: Harness) -> None:
    """If a group is missing, nothing is trimmed, because every group must exist before a trim."""
    fill(harness, 3, acked=3)
    call = trim_all(harness, expected=["hits", "audit"])
    assert harness.expect("stream_trim", "MISSING_GROUP", call) == [b"audit"]


def test_stream_trim_keeps_the_last_floor_of_a_deleted_group(harness: Harness) -> None:
    fill(harness, 5, acked=3)
    trim_result(harness)
    harness.do("XGROUP", "DESTROY", harness.stream, "hits")
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "$")
    trim_result(harness, expected=[], keep_from="0-0")
    assert harness.state()["trim"]["floor:hits"] == b"4-0"
    harness.groups()
    assert harness.fetch() == [b"4-0", b"5-0"]


@pytest.mark.parametrize("expected", [["hits"], []])
def test_stream_trim_accepts_an_empty_partition(harness: Harness, expected: list[str]) -> None:
    harness.groups()
    assert trim_result(harness, expected=expected) == (0, "0-1", "hits")
    assert harness.state()["trim"] == {"first": b"0-1", "size": b"0", "floor:hits": b"0-1"}


def test_stream_trim_of_a_retry_stream_writes_no_record(harness: Harness) -> None:
    """Retry IDs are not written to the partition's record.

    Otherwise, a lost group would skip messages.
    """
    harness.groups()
    fill(harness, 3, acked=2, stream=harness.retry)
    before = harness.state()
    call = retention.trim_retry(harness.keys, harness.assignment, 1000)
    assert harness.expect("stream_trim", "OK", call) == [0, b"3-0", b"hits", b"3-0", 0]
    assert harness.changes(before) == {}
    harness.do("XACK", harness.retry, "hits", "3-0")
    assert harness.expect("stream_trim", "OK", call) == [3, b"3-1", b"hits", b"", 0]
    assert list(harness.changes(before)) == ["retry"]
    harness.do("XGROUP", "DESTROY", harness.retry, "hits")
    harness.expect("stream_trim", "NO_GROUPS", call)


def test_stream_trim_works_with_full_memory(harness: Harness) -> None:
    """With full memory, both the trim and its record are accepted."""
    fill(harness, 350, acked=350)
    with harness.full_memory():
        assert trim_result(harness).removed == 350
    assert harness.state()["trim"]["removed"] == b"350"


def test_stream_trim_by_bytes_keeps_roughly_that_many(harness: Harness) -> None:
    harness.groups()
    bodies = [("XADD", harness.stream, f"{n}-0", "payload", "x" * 1000) for n in range(1, 2001)]
    harness.link.pipeline(bodies)
    harness.fetch(2000)
    harness.do("XACK", harness.stream, "hits", *(f"{n}-0" for n in range(1, 2001)))
    assert trim_result(harness, keep_from="0-0", max_bytes=1 << 30).removed == 0
    used = harness.do("MEMORY", "USAGE", harness.stream, "SAMPLES", 0)
    trim_result(harness, keep_from="0-0", max_bytes=used // 4, limit=10_000)
    left = harness.do("MEMORY", "USAGE", harness.stream, "SAMPLES", 0)
    assert used / 5 < left < used / 3
    assert 400 < length(harness) < 600
    assert trim_result(harness, keep_from="0-0", max_bytes=1, limit=10_000).removed > 0
    assert length(harness) < NODE


def test_stream_trim_by_bytes_respects_the_floor(harness: Harness) -> None:
    fill(harness, 350, acked=120)
    found = run_trim(harness, keep_from="0-0", max_bytes=1)
    assert found == (100, "121-0", "hits", "121-0", False)


def test_stream_trim_applies_the_tighter_of_bytes_and_length(harness: Harness) -> None:
    fill(harness, 350, acked=350)
    assert trim_result(harness, keep_from="0-0", max_bytes=1 << 40, max_length=150).removed == 200
    assert trim_result(harness, keep_from="0-0", max_bytes=1, max_length=1000).removed == 150


def test_stream_trim_shrink_removes_entries_of_the_last_round(harness: Harness) -> None:
    fill(harness, 200, acked=200)
    assert trim_result(harness, keep_from="0-0", shrink_every=0.0).removed == 0
    assert harness.state()["trim"]["shrink_next"] == b"200-1"
    for number in range(201, 401):
        harness.add(f"{number}-0")
    harness.fetch(200)
    harness.do("XACK", harness.stream, "hits", *(f"{n}-0" for n in range(201, 401)))
    assert trim_result(harness, keep_from="0-0", shrink_every=3600.0).removed == 0, "not yet time"
    assert trim_result(harness, keep_from="0-0", shrink_every=0.0).removed == 200
    assert trim_result(harness, keep_from="0-0", shrink_every=0.0).removed == 200
    assert length(harness) == 0


def test_stream_trim_shrink_removes_released_entries_later(harness: Harness) -> None:
    fill(harness, 200, acked=199)
    for _ in range(2):
        assert run_trim(harness, keep_from="0-0", shrink_every=0.0).removed in (0, 100)
    assert run_trim(harness, keep_from="0-0", shrink_every=3600.0).held
    harness.do("XACK", harness.stream, "hits", "200-0")
    assert trim_result(harness, keep_from="0-0", shrink_every=3600.0).removed == 100
    assert length(harness) == 0


def test_stream_trim_shrink_survives_a_clock_set_back(harness: Harness) -> None:
    fill(harness, 100, acked=100)
    ahead = harness.now_unix_ms() + 10**9
    harness.do("HSET", harness.trim, "shrunk", ahead, "shrink_from", "0-0", "shrink_next", "100-1")
    assert trim_result(harness, keep_from="0-0", shrink_every=3600.0).removed == 100


def test_stream_trim_reports_entries_held_only_by_the_floor(harness: Harness) -> None:
    fill(harness, 350, acked=120)
    assert run_trim(harness, keep_from="100-0") == (0, "121-0", "hits", "", False)
    assert run_trim(harness, keep_from="300-0").held
    assert run_trim(harness, keep_from="0-0", max_length=10).held
    assert not run_trim(harness, keep_from="0-0", max_length=1000).held
    harness.do("XACK", harness.stream, "hits", *(f"{n}-0" for n in range(1, 351)))
    assert not run_trim(harness, limit=NODE).held, "there is more to trim, nobody needs it"
    assert not run_trim(harness).held


def test_stream_trim_without_groups_works_on_request(harness: Harness) -> None:
    harness.expect("stream_trim", "NO_GROUPS", trim_all(harness, expected=[], without_groups=True))
    for number in range(1, 351):
        harness.add(f"{number}-0")
    harness.expect("stream_trim", "NO_GROUPS", trim_all(harness, expected=[]))
    alone = {"expected": [], "without_groups": True}
    assert run_trim(harness, archive=True, **alone) == (0, "0-0", "@archive", "1-0", False)
    harness.do("HSET", harness.trim, "archived", "150-0")
    assert trim_result(harness, archive=True, **alone) == (100, "150-1", "@archive")
    assert trim_result(harness, keep_from="0-0", max_length=120, **alone) == (100, "350-1", "")
    assert trim_result(harness, **alone).removed == 150
