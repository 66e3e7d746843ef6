"""missing_settle: in-flight, entry missing -> settled, counted."""

from __future__ import annotations

from streamqd.store import retention
from tests.contract.desk import Desk


def settled(desk: Desk, count: int = 100) -> int:
    call = retention.settle_missing(desk.keys, desk.unit, count)
    return int(desk.expect("missing_settle", "OK", call)[0])


def test_missing_settle_settles_trimmed_entries(desk: Desk) -> None:
    desk.pending("1-0", "2-0", "3-0")
    desk.do("XTRIM", desk.stream, "MINID", "=", "3-0")
    desk.do("HSET", desk.attempts, "m:1-0:c", "2", "m:1-0:last", "x", "m:3-0:c", "1")
    before = desk.state()
    assert settled(desk) == 2
    changed = desk.changes(before)
    assert changed["stream"].groups == {"hits": ("3-0", {"3-0": "w"})}
    assert changed["attempts"] == {"m:3-0:c": b"1"}
    assert changed["trim"] == {"dropped_pending:hits": b"2"}
    assert sorted(changed) == ["attempts", "stream", "trim"]


def test_missing_settle_repeated_changes_nothing(desk: Desk) -> None:
    desk.pending("1-0")
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    assert settled(desk) == 1
    before = desk.dump()
    assert settled(desk) == 0
    assert desk.dump() == before


def test_missing_settle_keeps_existing_entries(desk: Desk) -> None:
    desk.pending("1-0", "2-0")
    before = desk.dump()
    assert settled(desk) == 0
    assert desk.dump() == before


def test_missing_settle_works_in_batches(desk: Desk) -> None:
    """Also more than `unpack` can return at once."""
    count = 1_200
    desk.groups()
    desk.link.pipeline([("XADD", desk.stream, f"{n + 1}-0", "payload", n) for n in range(count)])
    desk.fetch(count)
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    assert [settled(desk, 1_000), settled(desk, 1_000)] == [1_000, 200]
    assert desk.state()["trim"] == {"dropped_pending:hits": b"1200"}


def test_missing_settle_leaves_other_groups_alone(desk: Desk) -> None:
    desk.pending("1-0")
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0")
    desk.do("XREADGROUP", "GROUP", "audit", "w", "COUNT", 1, "STREAMS", desk.stream, ">")
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    assert settled(desk) == 1
    assert desk.state()["stream"].groups["audit"] == ("1-0", {"1-0": "w"})


def test_missing_settle_refuses_a_missing_group(desk: Desk) -> None:
    call = retention.settle_missing(desk.keys, desk.unit, 10)
    desk.expect("missing_settle", "NOGROUP", call)
    desk.add("1-0")
    desk.expect("missing_settle", "NOGROUP", call)


def test_missing_settle_works_with_full_memory(desk: Desk) -> None:
    desk.pending("1-0")
    desk.do("XTRIM", desk.stream, "MAXLEN", 0)
    with desk.full_memory():
        assert settled(desk) == 1
    assert desk.state()["trim"] == {"dropped_pending:hits": b"1"}
