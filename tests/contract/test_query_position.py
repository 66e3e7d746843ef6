"""query_position: the position of a Spark query, and the entries that it retains."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.store import retention, spark
from streamqd.store.retention import Stand
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk
from tests.contract.scenarios import trim_all


def position(desk: Desk, entry_id: str, read: int | None = None, *, hold: bool = False) -> Call:
    return spark.query_position(desk.keys, *desk.unit[:2], "etl", entry_id, read, hold=hold)


def group(desk: Desk) -> dict[str, Any]:
    for flat in desk.do("XINFO", "GROUPS", desk.stream):
        found = dict(zip([name.decode() for name in flat[::2]], flat[1::2], strict=True))
        if found["name"] == b"spark:etl":
            return found
    return {}


def stand(desk: Desk) -> Stand:
    rest = desk.expect("retention_measure", "OK", retention.measure(desk.keys, *desk.unit[:2]))
    return Stand.parse(Reply("OK", rest))


def fill(desk: Desk, *entries: str) -> None:
    """Write each entry into its own node, so that a trim removes exactly what it may."""
    desk.do("CONFIG", "SET", "stream-node-max-entries", 1)
    try:
        for entry in entries:
            desk.add(entry)
    finally:
        desk.do("CONFIG", "SET", "stream-node-max-entries", 100)


def test_query_position_appears_as_a_group_with_its_lag(desk: Desk) -> None:
    """P7: its progress and its lag are shown with those of groups."""
    fill(desk, "1-0", "2-0", "3-0")
    assert desk.expect("query_position", "OK", position(desk, "1-0", 1)) == [b"1-0"]
    assert group(desk)["last-delivered-id"] == b"1-0"
    assert group(desk).get("lag", 2) == 2
    (own,) = stand(desk).groups
    assert (own.name, own.pending, own.needs) == ("spark:etl", 0, "")
    assert own.idle_ms is not None


def test_query_position_may_move_back(desk: Desk) -> None:
    fill(desk, "1-0", "2-0")
    desk.expect("query_position", "OK", position(desk, "2-0", 2))
    desk.expect("query_position", "OK", position(desk, "1-0", 1))
    assert group(desk)["last-delivered-id"] == b"1-0"


def test_query_position_beyond_the_end_counts_new_entries(desk: Desk) -> None:
    """After a failover, or in a recreated stream, new entries count as unread."""
    fill(desk, "5-0")
    assert desk.expect("query_position", "OK", position(desk, "9-0", 7)) == [b"5-0"]
    assert group(desk)["last-delivered-id"] == b"5-0"


def test_query_position_does_not_recreate_a_missing_stream(desk: Desk) -> None:
    assert desk.expect("query_position", "ABSENT", position(desk, "1-0", 1, hold=True)) == []
    assert desk.state() == {}


@pytest.mark.parametrize("hold", [True, False])
def test_query_position_retains_unread_entries_on_request(desk: Desk, hold: bool) -> None:
    fill(desk, "1-0", "2-0", "3-0")
    desk.do("XGROUP", "CREATE", desk.stream, desk.unit.group, "3-0")
    desk.expect("query_position", "OK", position(desk, "1-0", 1, hold=hold))
    rest = desk.expect("stream_trim", "OK", trim_all(desk))
    assert rest[:3] == (
        [1, b"1-1", b"spark:etl"] if hold else [3, b"3-1", desk.unit.group.encode()]
    )
    assert stand(desk).groups[-1].needs == ("2-0" if hold else "")


def test_query_position_releases_entries_without_a_request(desk: Desk) -> None:
    fill(desk, "1-0", "2-0")
    desk.do("XGROUP", "CREATE", desk.stream, desk.unit.group, "2-0")
    desk.expect("query_position", "OK", position(desk, "0-0", 0, hold=True))
    assert desk.expect("stream_trim", "OK", trim_all(desk))[0] == 0
    desk.expect("query_position", "OK", position(desk, "0-0", 0))
    assert desk.expect("stream_trim", "OK", trim_all(desk))[0] == 2


def test_query_without_hold_does_not_count_as_a_group(desk: Desk) -> None:
    """A topic without groups is trimmed only on request, also if such a query reads it."""
    fill(desk, "1-0", "2-0")
    desk.expect("query_position", "OK", position(desk, "2-0", 2))
    desk.expect("stream_trim", "NO_GROUPS", trim_all(desk, expected=[]))


def test_query_position_with_a_junk_mark_retains_nothing(desk: Desk) -> None:
    fill(desk, "1-0")
    desk.do("XGROUP", "CREATE", desk.stream, desk.unit.group, "1-0")
    desk.expect("query_position", "OK", position(desk, "0-0", 0))
    desk.do("HSET", desk.trim, "holds:spark:etl", "junk")
    assert desk.expect("stream_trim", "OK", trim_all(desk))[0] == 1
