"""query_position: the position of a Spark query, and the entries that it retains."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.store import retention, spark
from streamqd.store.retention import PartitionPositions
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness
from tests.contract.scenarios import trim_all


def position(
    harness: Harness, entry_id: str, read: int | None = None, *, hold: bool = False
) -> Call:
    return spark.query_position(
        harness.keys, *harness.assignment[:2], "etl", entry_id, read, hold=hold
    )


def group(harness: Harness) -> dict[str, Any]:
    for flat in harness.do("XINFO", "GROUPS", harness.stream):
        found = dict(zip([name.decode() for name in flat[::2]], flat[1::2], strict=True))
        if found["name"] == b"spark:etl":
            return found
    return {}


def measure_positions(harness: Harness) -> PartitionPositions:
    rest = harness.expect(
        "retention_measure", "OK", retention.measure(harness.keys, *harness.assignment[:2])
    )
    return PartitionPositions.parse(Reply("OK", rest))


def fill(harness: Harness, *entries: str) -> None:
    """Write each entry to its own node, so that a trim removes exactly as much as it may."""
    harness.do("CONFIG", "SET", "stream-node-max-entries", 1)
    try:
        for entry in entries:
            harness.add(entry)
    finally:
        harness.do("CONFIG", "SET", "stream-node-max-entries", 100)


def test_query_position_appears_as_a_group_with_its_lag(harness: Harness) -> None:
    """A query appears in the same way as a group, with its progress and its lag."""
    fill(harness, "1-0", "2-0", "3-0")
    assert harness.expect("query_position", "OK", position(harness, "1-0", 1)) == [b"1-0"]
    assert group(harness)["last-delivered-id"] == b"1-0"
    assert group(harness).get("lag", 2) == 2
    (own,) = measure_positions(harness).groups
    assert (own.name, own.pending, own.needs) == ("spark:etl", 0, "")
    assert own.idle_ms is not None


def test_query_position_may_move_back(harness: Harness) -> None:
    fill(harness, "1-0", "2-0")
    harness.expect("query_position", "OK", position(harness, "2-0", 2))
    harness.expect("query_position", "OK", position(harness, "1-0", 1))
    assert group(harness)["last-delivered-id"] == b"1-0"


def test_query_position_beyond_the_end_counts_new_entries(harness: Harness) -> None:
    """After a failover or in a recreated stream, the position is beyond the end.

    New entries count as unread.
    """
    fill(harness, "5-0")
    assert harness.expect("query_position", "OK", position(harness, "9-0", 7)) == [b"5-0"]
    assert group(harness)["last-delivered-id"] == b"5-0"


def test_query_position_does_not_recreate_a_missing_stream(harness: Harness) -> None:
    assert harness.expect("query_position", "MISSING", position(harness, "1-0", 1, hold=True)) == []
    assert harness.state() == {}


@pytest.mark.parametrize("hold", [True, False])
def test_query_position_retains_unread_entries_on_request(harness: Harness, hold: bool) -> None:
    fill(harness, "1-0", "2-0", "3-0")
    harness.do("XGROUP", "CREATE", harness.stream, harness.assignment.group, "3-0")
    harness.expect("query_position", "OK", position(harness, "1-0", 1, hold=hold))
    rest = harness.expect("stream_trim", "OK", trim_all(harness))
    assert rest[:3] == (
        [1, b"1-1", b"spark:etl"] if hold else [3, b"3-1", harness.assignment.group.encode()]
    )
    assert measure_positions(harness).groups[-1].needs == ("2-0" if hold else "")


def test_query_position_releases_entries_without_a_request(harness: Harness) -> None:
    fill(harness, "1-0", "2-0")
    harness.do("XGROUP", "CREATE", harness.stream, harness.assignment.group, "2-0")
    harness.expect("query_position", "OK", position(harness, "0-0", 0, hold=True))
    assert harness.expect("stream_trim", "OK", trim_all(harness))[0] == 0
    harness.expect("query_position", "OK", position(harness, "0-0", 0))
    assert harness.expect("stream_trim", "OK", trim_all(harness))[0] == 2


def test_query_position_without_hold_is_not_a_group(harness: Harness) -> None:
    """A query that holds no entries is not a group.

    If the topic has no groups, it is still trimmed only on request.
    """
    fill(harness, "1-0", "2-0")
    harness.expect("query_position", "OK", position(harness, "2-0", 2))
    harness.expect("stream_trim", "NO_GROUPS", trim_all(harness, expected=[]))


def test_query_position_with_a_junk_mark_retains_nothing(harness: Harness) -> None:
    fill(harness, "1-0")
    harness.do("XGROUP", "CREATE", harness.stream, harness.assignment.group, "1-0")
    harness.expect("query_position", "OK", position(harness, "0-0", 0))
    harness.do("HSET", harness.trim, "holds:spark:etl", "junk")
    assert harness.expect("stream_trim", "OK", trim_all(harness))[0] == 1
