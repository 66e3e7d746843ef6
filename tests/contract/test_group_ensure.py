"""group_ensure: absent -> present."""

from __future__ import annotations

import pytest

from streamqd.store import messages
from streamqd.store.scripts import Call
from tests.contract.harness import Harness, Stream


def ensure(harness: Harness, start: str = "0") -> Call:
    return messages.ensure_group(harness.keys, harness.assignment, start)


def test_group_ensure_creates_streams_and_groups(harness: Harness) -> None:
    assert harness.expect("group_ensure", "CREATED", ensure(harness)) == [b"0-0"]
    empty = Stream({}, {"hits": ("0-0", {})})
    assert harness.state() == {"stream": empty, "retry": empty}


def test_group_ensure_starts_at_the_requested_position(harness: Harness) -> None:
    harness.add("5-0")
    assert harness.expect("group_ensure", "CREATED", ensure(harness, "$")) == [b"5-0"]
    harness.do("XGROUP", "DESTROY", harness.stream, "hits")
    assert harness.expect("group_ensure", "CREATED", ensure(harness, "0")) == [b"0-0"]
    assert harness.fetch() == [b"5-0"]


def test_group_ensure_repeated_changes_nothing(harness: Harness) -> None:
    harness.expect("group_ensure", "CREATED", ensure(harness))
    harness.add("1-0")
    harness.fetch()
    before = harness.dump()
    assert harness.expect("group_ensure", "OK", ensure(harness, "$")) == []
    assert harness.dump() == before


def test_group_ensure_recreates_only_the_retry_group(harness: Harness) -> None:
    harness.groups()
    harness.do("DEL", harness.retry)
    before = harness.state()
    harness.expect("group_ensure", "OK", ensure(harness))
    assert harness.changes(before) == {"retry": Stream({}, {"hits": ("0-0", {})})}


def test_group_ensure_starts_the_retry_group_at_zero(harness: Harness) -> None:
    """The retry group starts at 0.

    A promotion may have written to the stream before the group was recreated.
    """
    harness.add("3-0", stream=harness.retry)
    harness.expect("group_ensure", "CREATED", ensure(harness, "$"))
    assert harness.fetch(stream=harness.retry) == [b"3-0"]


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
    harness: Harness, floor: str, at: bytes
) -> None:
    """A lost group is restored just below its floor.

    At the floor, it would skip the first unfinished message.
    """
    harness.add("6-0")
    harness.do("HSET", harness.trim, "floor:hits", floor, "floor:audit", "9-0")
    assert harness.expect("group_ensure", "CREATED", ensure(harness, "$")) == [at]


def test_group_ensure_after_a_lost_group_loses_nothing(harness: Harness) -> None:
    harness.pending("5-0", "5-1", "6-0")
    harness.do("XACK", harness.stream, "hits", "5-0")
    harness.do("HSET", harness.trim, "floor:hits", "5-1")
    harness.do("XGROUP", "DESTROY", harness.stream, "hits")
    harness.expect("group_ensure", "CREATED", ensure(harness, "$"))
    assert harness.fetch() == [b"5-1", b"6-0"]


def test_group_ensure_leaves_other_groups_alone(harness: Harness) -> None:
    harness.add("1-0")
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "$")
    harness.expect("group_ensure", "CREATED", ensure(harness))
    assert harness.state()["stream"].groups == {"audit": ("1-0", {}), "hits": ("0-0", {})}
