"""group_ensure: absent -> present."""

from __future__ import annotations

import pytest

from streamqd.store import messages
from streamqd.store.scripts import Call
from tests.contract.desk import Desk, Stream


def ensure(desk: Desk, start: str = "0") -> Call:
    return messages.ensure_group(desk.keys, desk.unit, start)


def test_makes_streams_and_groups(desk: Desk) -> None:
    assert desk.expect("group_ensure", "CREATED", ensure(desk)) == [b"0-0"]
    empty = Stream({}, {"hits": ("0-0", {})})
    assert desk.state() == {"stream": empty, "retry": empty}


def test_group_ensure_starts_at_the_requested_position(desk: Desk) -> None:
    desk.add("5-0")
    assert desk.expect("group_ensure", "CREATED", ensure(desk, "$")) == [b"5-0"]
    desk.do("XGROUP", "DESTROY", desk.stream, "hits")
    assert desk.expect("group_ensure", "CREATED", ensure(desk, "0")) == [b"0-0"]
    assert desk.fetch() == [b"5-0"]


def test_group_ensure_repeated_changes_nothing(desk: Desk) -> None:
    desk.expect("group_ensure", "CREATED", ensure(desk))
    desk.add("1-0")
    desk.fetch()
    before = desk.dump()
    assert desk.expect("group_ensure", "OK", ensure(desk, "$")) == []
    assert desk.dump() == before


def test_mends_the_retry_side_alone(desk: Desk) -> None:
    desk.groups()
    desk.do("DEL", desk.retry)
    before = desk.state()
    desk.expect("group_ensure", "OK", ensure(desk))
    assert desk.changes(before) == {"retry": Stream({}, {"hits": ("0-0", {})})}


def test_group_ensure_starts_the_retry_group_at_zero(desk: Desk) -> None:
    """Promotion may have written to the stream before its group was recreated."""
    desk.add("3-0", stream=desk.retry)
    desk.expect("group_ensure", "CREATED", ensure(desk, "$"))
    assert desk.fetch(stream=desk.retry) == [b"3-0"]


@pytest.mark.parametrize(
    ("floor", "at"),
    [
        ("5-1", b"5-0"),
        ("5-0", b"4-18446744073709551615"),
        ("1000-0", b"999-18446744073709551615"),
        ("5-1000", b"5-999"),
        ("5-18446744073709551615", b"5-18446744073709551614"),
        ("0-1", b"0-0"),
        ("0-0", b"0-0"),
    ],
)
def test_group_ensure_restores_a_lost_group_below_its_floor(
    desk: Desk, floor: str, at: bytes
) -> None:
    """T12: created at the floor, it would skip the first unfinished message."""
    desk.add("6-0")
    desk.do("HSET", desk.trim, "floor:hits", floor, "floor:audit", "9-0")
    assert desk.expect("group_ensure", "CREATED", ensure(desk, "$")) == [at]


def test_group_ensure_after_a_lost_group_loses_nothing(desk: Desk) -> None:
    desk.pending("5-0", "5-1", "6-0")
    desk.do("XACK", desk.stream, "hits", "5-0")
    desk.do("HSET", desk.trim, "floor:hits", "5-1")
    desk.do("XGROUP", "DESTROY", desk.stream, "hits")
    desk.expect("group_ensure", "CREATED", ensure(desk, "$"))
    assert desk.fetch() == [b"5-1", b"6-0"]


def test_group_ensure_leaves_other_groups_alone(desk: Desk) -> None:
    desk.add("1-0")
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "$")
    desk.expect("group_ensure", "CREATED", ensure(desk))
    assert desk.state()["stream"].groups == {"audit": ("1-0", {}), "hits": ("0-0", {})}
