"""missing_settle: in-flight with a missing entry -> settled and counted."""

from __future__ import annotations

from streamqd.store import retention
from tests.contract.harness import Harness


def settle_missing(harness: Harness, count: int = 100) -> int:
    call = retention.settle_missing(harness.keys, harness.assignment, count)
    return int(harness.expect("missing_settle", "OK", call)[0])


def test_missing_settle_settles_trimmed_entries(harness: Harness) -> None:
    harness.pending("1-0", "2-0", "3-0")
    harness.do("XTRIM", harness.stream, "MINID", "=", "3-0")
    harness.do("HSET", harness.attempts, "m:1-0:c", "2", "m:1-0:last", "x", "m:3-0:c", "1")
    before = harness.state()
    assert settle_missing(harness) == 2
    changed = harness.changes(before)
    assert changed["stream"].groups == {"hits": ("3-0", {"3-0": "w"})}
    assert changed["attempts"] == {"m:3-0:c": b"1"}
    assert changed["trim"] == {"dropped_pending:hits": b"2"}
    assert sorted(changed) == ["attempts", "stream", "trim"]


def test_missing_settle_repeated_changes_nothing(harness: Harness) -> None:
    harness.pending("1-0")
    harness.do("XTRIM", harness.stream, "MAXLEN", 0)
    assert settle_missing(harness) == 1
    before = harness.dump()
    assert settle_missing(harness) == 0
    assert harness.dump() == before


def test_missing_settle_keeps_existing_entries(harness: Harness) -> None:
    harness.pending("1-0", "2-0")
    before = harness.dump()
    assert settle_missing(harness) == 0
    assert harness.dump() == before


def test_missing_settle_works_in_batches(harness: Harness) -> None:
    """One call can settle more entries than one `unpack` can return."""
    count = 1_200
    harness.groups()
    harness.link.pipeline(
        [("XADD", harness.stream, f"{n + 1}-0", "payload", n) for n in range(count)]
    )
    harness.fetch(count)
    harness.do("XTRIM", harness.stream, "MAXLEN", 0)
    assert [settle_missing(harness, 1_000), settle_missing(harness, 1_000)] == [1_000, 200]
    assert harness.state()["trim"] == {"dropped_pending:hits": b"1200"}


def test_missing_settle_leaves_other_groups_alone(harness: Harness) -> None:
    harness.pending("1-0")
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0")
    harness.do("XREADGROUP", "GROUP", "audit", "w", "COUNT", 1, "STREAMS", harness.stream, ">")
    harness.do("XTRIM", harness.stream, "MAXLEN", 0)
    assert settle_missing(harness) == 1
    assert harness.state()["stream"].groups["audit"] == ("1-0", {"1-0": "w"})


def test_missing_settle_refuses_a_missing_group(harness: Harness) -> None:
    call = retention.settle_missing(harness.keys, harness.assignment, 10)
    harness.expect("missing_settle", "NOGROUP", call)
    harness.add("1-0")
    harness.expect("missing_settle", "NOGROUP", call)


def test_missing_settle_works_with_full_memory(harness: Harness) -> None:
    harness.pending("1-0")
    harness.do("XTRIM", harness.stream, "MAXLEN", 0)
    with harness.full_memory():
        assert settle_missing(harness) == 1
    assert harness.state()["trim"] == {"dropped_pending:hits": b"1"}
