"""stream_trim: settled and no longer retained -> gone."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from streamqd.store import retention
from streamqd.store.retention import Trimmed
from streamqd.store.scripts import Reply
from tests.contract.desk import Desk
from tests.contract.scenarios import trim_all

NODE = 100  # entries of a whole stream node, by the default of the servers


def answered(desk: Desk, **changed: object) -> Trimmed:
    return Trimmed.parse(Reply("OK", desk.expect("stream_trim", "OK", trim_all(desk, **changed))))


class Short(NamedTuple):
    removed: int
    floor: str
    holder: str


def trimmed(desk: Desk, **changed: object) -> Short:
    return Short(*answered(desk, **changed)[:3])


def fill(desk: Desk, count: int, *, acked: int, stream: str = "") -> None:
    """Write entries 1-0 to count-0, read all, and acknowledge the first ones."""
    key = stream or desk.stream
    desk.groups()
    desk.link.pipeline([("XADD", key, f"{n}-0", "payload", n) for n in range(1, count + 1)])
    desk.fetch(count, stream=key)
    if acked:
        desk.do("XACK", key, "hits", *(f"{n}-0" for n in range(1, acked + 1)))


def length(desk: Desk) -> int:
    return int(desk.do("XLEN", desk.stream))


def test_stream_trim_removes_acknowledged_entries(desk: Desk) -> None:
    fill(desk, 3, acked=3)
    before = desk.state()
    assert trimmed(desk) == (3, "3-1", "hits")
    changed = desk.changes(before)
    record = {"first": b"3-1", "size": b"0", "floor:hits": b"3-1", "removed": b"3"}
    assert sorted(changed) == ["stream", "trim"]
    assert changed["trim"] == record
    assert changed["stream"].entries == {}
    assert changed["stream"].groups == {"hits": ("3-0", {})}


def test_stream_trim_floor_is_the_smallest_needed_id(desk: Desk) -> None:
    """T16: not the last delivered id, which would retain an acknowledged entry forever."""
    fill(desk, 2, acked=2)
    desk.add("3-0")
    assert trimmed(desk).floor == "2-1"
    desk.fetch()
    assert trimmed(desk).floor == "3-0"
    desk.do("XACK", desk.stream, "hits", "3-0")
    assert trimmed(desk) == (3, "3-1", "hits")
    assert length(desk) == 0


def test_stream_trim_never_removes_pending_entries(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0")
    desk.fetch(350)
    desk.do("XREADGROUP", "GROUP", "audit", "w", "COUNT", 350, "STREAMS", desk.stream, ">")
    desk.do("XACK", desk.stream, "audit", *(f"{n}-0" for n in range(1, 351) if n != 250))
    found = trimmed(desk)
    assert found == (200, "250-0", "audit")
    assert next(iter(desk.state()["stream"].entries)) == "201-0"
    record = desk.state()["trim"]
    assert record["first"] == b"201-0"
    assert record["floor:audit"] == b"250-0"
    assert record["floor:hits"] == b"350-1"
    desk.do("XACK", desk.stream, "audit", "250-0")
    assert trimmed(desk).removed == 150
    assert desk.state()["trim"]["removed"] == b"350"
    assert length(desk) == 0


def test_stream_trim_never_removes_unread_entries(desk: Desk) -> None:
    fill(desk, 250, acked=250)
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0")
    assert trimmed(desk) == (0, "0-1", "audit")
    assert length(desk) == 250


def test_floors_are_compared_as_numbers(desk: Desk) -> None:
    """As text, 10-0 would come before 9-0."""
    fill(desk, 110, acked=110)
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "9-0")
    assert trimmed(desk)[1:] == ("9-1", "audit")
    desk.do("XGROUP", "SETID", desk.stream, "audit", "109-0")
    assert trimmed(desk) == (100, "109-1", "audit")


def test_age_keeps_entries_from_an_id_on(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    assert trimmed(desk, keep_from="0-0") == (0, "350-1", "hits")
    assert trimmed(desk, keep_from="250-0").removed == 200
    assert trimmed(desk, keep_from="999999999999-0").removed == 150
    assert length(desk) == 0


def test_stream_trim_by_length_keeps_that_many(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    assert trimmed(desk, keep_from="0-0", max_length=1000).removed == 0
    found = trimmed(desk, keep_from="0-0", max_length=150)
    assert found.removed == 2 * NODE  # whole nodes only: never below the bound
    assert length(desk) == 150
    assert trimmed(desk, keep_from="0-0", max_length=0).removed == 150
    assert length(desk) == 0


def test_stream_trim_by_length_respects_the_floor(desk: Desk) -> None:
    fill(desk, 350, acked=120)
    assert trimmed(desk, keep_from="0-0", max_length=10) == (100, "121-0", "hits")
    assert length(desk) == 250


def test_stream_trim_works_in_batches(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    assert trimmed(desk, limit=NODE).removed == NODE
    assert trimmed(desk, limit=2 * NODE).removed == 2 * NODE
    assert trimmed(desk, limit=NODE // 4).removed == 50


def test_stream_trim_by_length_works_in_batches(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    assert trimmed(desk, keep_from="150-0", max_length=0, limit=NODE).removed == NODE
    assert trimmed(desk, keep_from="150-0", max_length=0, limit=2 * NODE).removed == 2 * NODE
    assert trimmed(desk, keep_from="150-0", max_length=0, limit=2 * NODE).removed == 50


def test_stream_trim_removes_a_node_above_the_limit(desk: Desk, large_nodes: int) -> None:
    fill(desk, 2 * large_nodes, acked=2 * large_nodes)
    assert trimmed(desk, limit=NODE).removed == large_nodes
    assert trimmed(desk, keep_from="0-0", max_length=0, limit=NODE).removed == large_nodes


def test_stream_trim_keeps_a_large_node_that_is_needed_in_part(
    desk: Desk, large_nodes: int
) -> None:
    fill(desk, 2 * large_nodes, acked=large_nodes - 1)
    assert trimmed(desk, limit=NODE).removed == 0
    assert trimmed(desk, keep_from="0-0", max_length=large_nodes + 1, limit=NODE).removed == 0
    desk.do("XACK", desk.stream, "hits", f"{large_nodes}-0")
    assert trimmed(desk, keep_from="0-0", max_length=large_nodes + 1, limit=NODE).removed == 0
    assert not answered(desk, keep_from="0-0", max_length=large_nodes + 1).held, "less than a node"
    assert trimmed(desk, keep_from="0-0", max_length=large_nodes, limit=NODE).removed == large_nodes


def test_part_of_a_node_is_not_trimmed(desk: Desk) -> None:
    """It would free nothing."""
    fill(desk, 50, acked=49)
    assert trimmed(desk).removed == 0
    desk.do("XACK", desk.stream, "hits", "50-0")
    assert trimmed(desk).removed == 50


def test_stream_trim_respects_the_archive(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    assert trimmed(desk, archive=True) == (0, "0-0", "@archive")
    desk.do("HSET", desk.trim, "archived", "120-0")
    assert trimmed(desk, archive=True) == (100, "120-1", "@archive")
    assert desk.state()["trim"]["archived"] == b"120-0"
    assert trimmed(desk, archive=False).removed == 250


def test_stream_trim_archive_does_not_pass_the_groups(desk: Desk) -> None:
    fill(desk, 350, acked=120)
    desk.do("HSET", desk.trim, "archived", "300-0")
    assert trimmed(desk, archive=True) == (100, "121-0", "hits")


def test_stream_trim_writes_nothing_when_idle(desk: Desk) -> None:
    fill(desk, 3, acked=3)
    trimmed(desk)
    before = desk.dump()
    assert trimmed(desk).removed == 0
    assert desk.dump() == before


def test_stream_trim_refuses_without_groups(desk: Desk) -> None:
    desk.expect("stream_trim", "NO_GROUPS", trim_all(desk))
    desk.add("1-0")
    desk.expect("stream_trim", "NO_GROUPS", trim_all(desk))


def test_stream_trim_refuses_without_an_expected_group(desk: Desk) -> None:
    """T12: nothing may be trimmed before every group exists."""
    fill(desk, 3, acked=3)
    call = trim_all(desk, expected=["hits", "audit"])
    assert desk.expect("stream_trim", "MISSING_GROUP", call) == [b"audit"]


def test_stream_trim_keeps_the_last_floor_of_a_deleted_group(desk: Desk) -> None:
    fill(desk, 5, acked=3)
    trimmed(desk)
    desk.do("XGROUP", "DESTROY", desk.stream, "hits")
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "$")
    trimmed(desk, expected=[], keep_from="0-0")
    assert desk.state()["trim"]["floor:hits"] == b"4-0"
    desk.groups()
    assert desk.fetch() == [b"4-0", b"5-0"]


@pytest.mark.parametrize("expected", [["hits"], []])
def test_stream_trim_accepts_an_empty_partition(desk: Desk, expected: list[str]) -> None:
    desk.groups()
    assert trimmed(desk, expected=expected) == (0, "0-1", "hits")
    assert desk.state()["trim"] == {"first": b"0-1", "size": b"0", "floor:hits": b"0-1"}


def test_stream_trim_of_a_retry_stream_writes_no_record(desk: Desk) -> None:
    """With its ids in the record of the partition, a lost group would skip messages."""
    desk.groups()
    fill(desk, 3, acked=2, stream=desk.retry)
    before = desk.state()
    call = retention.trim_retry(desk.keys, desk.unit, 1000)
    assert desk.expect("stream_trim", "OK", call) == [0, b"3-0", b"hits", b"3-0", 0]
    assert desk.changes(before) == {}
    desk.do("XACK", desk.retry, "hits", "3-0")
    assert desk.expect("stream_trim", "OK", call) == [3, b"3-1", b"hits", b"", 0]
    assert list(desk.changes(before)) == ["retry"]
    desk.do("XGROUP", "DESTROY", desk.retry, "hits")
    desk.expect("stream_trim", "NO_GROUPS", call)


def test_full_memory_is_freed(desk: Desk) -> None:
    """T14: with full memory, the trim and its record are accepted."""
    fill(desk, 350, acked=350)
    with desk.full_memory():
        assert trimmed(desk).removed == 350
    assert desk.state()["trim"]["removed"] == b"350"


def test_stream_trim_by_bytes_keeps_roughly_that_many(desk: Desk) -> None:
    desk.groups()
    bodies = [("XADD", desk.stream, f"{n}-0", "payload", "x" * 1000) for n in range(1, 2001)]
    desk.link.pipeline(bodies)
    desk.fetch(2000)
    desk.do("XACK", desk.stream, "hits", *(f"{n}-0" for n in range(1, 2001)))
    assert trimmed(desk, keep_from="0-0", max_bytes=1 << 30).removed == 0
    used = desk.do("MEMORY", "USAGE", desk.stream, "SAMPLES", 0)
    trimmed(desk, keep_from="0-0", max_bytes=used // 4, limit=10_000)
    left = desk.do("MEMORY", "USAGE", desk.stream, "SAMPLES", 0)
    assert used / 5 < left < used / 3
    assert 400 < length(desk) < 600
    assert trimmed(desk, keep_from="0-0", max_bytes=1, limit=10_000).removed > 0
    assert length(desk) < NODE


def test_stream_trim_by_bytes_respects_the_floor(desk: Desk) -> None:
    fill(desk, 350, acked=120)
    found = answered(desk, keep_from="0-0", max_bytes=1)
    assert found == (100, "121-0", "hits", "121-0", False)


def test_bytes_and_length_the_narrower_counts(desk: Desk) -> None:
    fill(desk, 350, acked=350)
    assert trimmed(desk, keep_from="0-0", max_bytes=1 << 40, max_length=150).removed == 200
    assert trimmed(desk, keep_from="0-0", max_bytes=1, max_length=1000).removed == 150


def test_stream_trim_shrink_removes_entries_of_the_last_round(desk: Desk) -> None:
    fill(desk, 200, acked=200)
    assert trimmed(desk, keep_from="0-0", shrink_every=0.0).removed == 0
    assert desk.state()["trim"]["shrink_next"] == b"200-1"
    for number in range(201, 401):
        desk.add(f"{number}-0")
    desk.fetch(200)
    desk.do("XACK", desk.stream, "hits", *(f"{n}-0" for n in range(201, 401)))
    assert trimmed(desk, keep_from="0-0", shrink_every=3600.0).removed == 0, "not yet time"
    assert trimmed(desk, keep_from="0-0", shrink_every=0.0).removed == 200
    assert trimmed(desk, keep_from="0-0", shrink_every=0.0).removed == 200
    assert length(desk) == 0


def test_stream_trim_shrink_removes_released_entries_later(desk: Desk) -> None:
    fill(desk, 200, acked=199)
    for _ in range(2):
        assert answered(desk, keep_from="0-0", shrink_every=0.0).removed in (0, 100)
    assert answered(desk, keep_from="0-0", shrink_every=3600.0).held
    desk.do("XACK", desk.stream, "hits", "200-0")
    assert trimmed(desk, keep_from="0-0", shrink_every=3600.0).removed == 100
    assert length(desk) == 0


def test_stream_trim_shrink_survives_a_clock_set_back(desk: Desk) -> None:
    fill(desk, 100, acked=100)
    ahead = desk.now_unix_ms() + 10**9
    desk.do("HSET", desk.trim, "shrunk", ahead, "shrink_from", "0-0", "shrink_next", "100-1")
    assert trimmed(desk, keep_from="0-0", shrink_every=3600.0).removed == 100


def test_stream_trim_reports_entries_held_only_by_the_floor(desk: Desk) -> None:
    fill(desk, 350, acked=120)
    assert answered(desk, keep_from="100-0") == (0, "121-0", "hits", "", False)
    assert answered(desk, keep_from="300-0").held
    assert answered(desk, keep_from="0-0", max_length=10).held
    assert not answered(desk, keep_from="0-0", max_length=1000).held
    desk.do("XACK", desk.stream, "hits", *(f"{n}-0" for n in range(1, 351)))
    assert not answered(desk, limit=NODE).held, "there is more to trim, nobody needs it"
    assert not answered(desk).held


def test_stream_trim_without_groups_works_on_request(desk: Desk) -> None:
    desk.expect("stream_trim", "NO_GROUPS", trim_all(desk, expected=[], without_groups=True))
    for number in range(1, 351):
        desk.add(f"{number}-0")
    desk.expect("stream_trim", "NO_GROUPS", trim_all(desk, expected=[]))
    alone = {"expected": [], "without_groups": True}
    assert answered(desk, archive=True, **alone) == (0, "0-0", "@archive", "1-0", False)
    desk.do("HSET", desk.trim, "archived", "150-0")
    assert trimmed(desk, archive=True, **alone) == (100, "150-1", "@archive")
    assert trimmed(desk, keep_from="0-0", max_length=120, **alone) == (100, "350-1", "")
    assert trimmed(desk, **alone).removed == 150
