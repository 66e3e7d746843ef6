"""settle_retry: in-flight -> delayed."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.model import Lease
from streamqd.store import leases, messages
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.desk import TTL, UNIT, Desk, Stream
from tests.support.costs import Meter

CHANGED = {b"originalId": b"1-0", b"retryCount": b"1", b"crashCount": b"0"}


def retry(
    desk: Desk, *items: tuple[bytes, float, dict[bytes, bytes]], adjacent: bool = False
) -> Call:
    return messages.retry(desk.keys, desk.leased("t1"), items, adjacent=adjacent)


def test_moves_the_body_with_changed_fields(desk: Desk) -> None:
    desk.groups()
    desk.add("1-0", "payload", b"\x00\xff\r\n", "key", "k", "retryCount", "7", "own", "field")
    desk.fetch()
    desk.own("t1")
    before = desk.state()
    with desk.instant() as now:
        settled = desk.expect_entries(
            "settle_retry", ["MOVED"], retry(desk, (b"m:1-0", 30.0, CHANGED))
        )
    changed = desk.changes(before)
    body = {"payload": b"\x00\xff\r\n", "key": b"k", "own": b"field"}
    fields = {name.decode(): value for name, value in CHANGED.items()}
    assert changed == {
        "delayed": {"m:1-0": now + 30_000},
        "items": {"m:1-0": {**body, **fields}},
        "stream": Stream(before["stream"].entries, {"hits": ("1-0", {})}),
    }
    assert list(changed["items"]["m:1-0"]) == ["payload", "key", "own", *fields]
    assert settled.next_due_unix_ms == changed["delayed"]["m:1-0"]


def test_settle_retry_takes_entries_of_both_streams(desk: Desk) -> None:
    """T6: equal ids of the two streams are two messages."""
    desk.pending("1-0", "2-0")
    desk.pending_retry("1-0")
    desk.own("t1")
    items = [(b"m:1-0", 9.0, CHANGED), (b"r:1-0", 5.0, CHANGED), (b"m:2-0", 0.0, CHANGED)]
    settled = desk.expect_entries("settle_retry", ["MOVED", "MOVED", "MOVED"], retry(desk, *items))
    state = desk.state()
    assert {member: fields["payload"] for member, fields in state["items"].items()} == {
        "m:1-0": b"body of 1-0",
        "r:1-0": b"body of 1-0",
        "m:2-0": b"body of 2-0",
    }
    assert list(state["delayed"]) == ["m:2-0", "r:1-0", "m:1-0"]
    assert settled.next_due_unix_ms == state["delayed"]["m:2-0"]
    assert state["stream"].groups["hits"] == ("2-0", {})
    assert state["retry"].groups["hits"] == ("1-0", {})


def test_settle_retry_returns_the_earliest_due_time(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    desk.do("ZADD", desk.delayed, 1_700_000_000_123, "m:0-1")
    settled = desk.expect_entries("settle_retry", ["MOVED"], retry(desk, (b"m:1-0", 5.0, CHANGED)))
    assert settled.next_due_unix_ms == 1_700_000_000_123


def test_settle_retry_moves_the_counters_with_the_entry(desk: Desk) -> None:
    """T8: the crash count moves with the fields. A leftover counter would belong to no message."""
    desk.pending("1-0", "2-0")
    desk.own("t1")
    desk.do("HSET", desk.attempts, "m:1-0:c", 1, "m:1-0:f", 1, "m:1-0:last", "x", "m:2-0:c", 1)
    call = retry(desk, (b"m:1-0", 5.0, {**CHANGED, b"crashCount": b"1"}))
    desk.expect_entries("settle_retry", ["MOVED"], call)
    state = desk.state()
    assert state["attempts"] == {"m:2-0:c": b"1"}
    assert state["items"]["m:1-0"]["crashCount"] == b"1"


def test_settle_retry_repeated_changes_nothing(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    call = retry(desk, (b"m:1-0", 5.0, CHANGED))
    desk.expect_entries("settle_retry", ["MOVED"], call)
    settled = desk.expect_entries("settle_retry", ["GONE"], call)
    assert settled.next_due_unix_ms == desk.state()["delayed"]["m:1-0"]


def test_settle_retry_after_the_promotion_changes_nothing(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    call = retry(desk, (b"m:1-0", 0.0, CHANGED))
    desk.expect_entries("settle_retry", ["MOVED"], call)
    desk.link.run(messages.promote_retries(desk.keys, desk.unit, 10))
    assert desk.expect_entries("settle_retry", ["GONE"], call).next_due_unix_ms is None


def test_settle_retry_ignores_a_duplicate_place(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    item = (b"m:1-0", 5.0, CHANGED)
    desk.expect_entries("settle_retry", ["MOVED", "GONE"], retry(desk, item, item))


def test_neighbours_are_found_together(desk: Desk) -> None:
    """In both streams. Separate lookups would each traverse a stream node."""
    ids = [f"{number}-0" for number in range(1, 9)]
    desk.pending(*ids)
    desk.pending_retry("3-0", "4-0")
    desk.own("t1")
    places = [b"r:3-0", b"r:4-0", *(f"m:{each}".encode() for each in ids)]
    call = retry(desk, *((place, 5.0, CHANGED) for place in places), adjacent=True)
    with Meter(desk.link).measuring() as cost:
        settled = messages.SettledReply.parse(desk.link.run(call))
    assert settled.words == ["MOVED"] * 10
    each_stream = ("xpending", "xrange", "xack")
    assert [cost.commands[name] for name in (*each_stream, "hset", "zadd")] == [2, 2, 2, 1, 1]
    bodies = {place.decode(): b"body of " + place[2:] for place in places}
    moved = desk.state()["items"]
    assert {place: fields["payload"] for place, fields in moved.items()} == bodies


def test_settle_retry_finds_entries_that_are_not_adjacent(desk: Desk) -> None:
    """Despite the hint: entries between them, missing, out of order, or named twice."""
    desk.pending("1-0", "2-0", "3-0", "4-0", "5-0", "6-0", "7-0")
    desk.own("t1")
    desk.do("XACK", desk.stream, "hits", "3-0")
    desk.do("XDEL", desk.stream, "5-0")
    order = ("1-0", "4-0", "3-0", "5-0", "4-0", "7-0", "6-0")
    items = [(f"m:{each}".encode(), 5.0, CHANGED) for each in order]
    words = ["MOVED", "MOVED", "GONE", "MISSING", "GONE", "MOVED", "MOVED"]
    settled = messages.SettledReply.parse(desk.link.run(retry(desk, *items, adjacent=True)))
    assert settled.words == words
    state = desk.state()
    assert sorted(state["items"]) == ["m:1-0", "m:4-0", "m:6-0", "m:7-0"]
    assert state["stream"].groups["hits"] == ("7-0", {"2-0": "w", "5-0": "w"})


def test_settle_retry_of_adjacent_entries_needs_the_group(desk: Desk) -> None:
    desk.pending("1-0", "2-0")
    desk.own("t1")
    desk.do("XGROUP", "DESTROY", desk.stream, "hits")
    items = [(b"m:1-0", 5.0, CHANGED), (b"m:2-0", 5.0, CHANGED)]
    desk.expect_error("NOGROUP", retry(desk, *items, adjacent=True))


def test_settle_retry_keeps_different_values_of_shared_fields(desk: Desk) -> None:
    """The first entry sets the values. Others have different values, or fewer or more names."""
    desk.groups()
    for entry_id in ("1-0", "2-0", "3-0"):
        desk.add(entry_id, "payload", f"body of {entry_id}", "own", "field", "more", "of it")
    desk.fetch()
    desk.own("t1")
    changes = [
        {b"originalId": b"1-0", b"retryCount": b"1", b"crashCount": b"0"},
        {b"originalId": b"0-7", b"retryCount": b"1", b"crashCount": b"2", b"more": b"changed"},
        {b"originalId": b"3-0", b"replayCount": b"4", b"crashCount": b"0"},
    ]
    items = [(f"m:{n}-0".encode(), 5.0, each) for n, each in enumerate(changes, 1)]
    desk.expect_entries("settle_retry", ["MOVED", "MOVED", "MOVED"], retry(desk, *items))
    moved = desk.state()["items"]
    for place, _, changed in items:
        found = moved[place.decode()]
        body = {"payload": b"body of " + place[2:], "own": b"field", "more": b"of it"}
        own = {name.decode(): value for name, value in changed.items()}
        assert found == {**body, **own}
        kept = [name for name in body if name not in own]
        assert list(found)[: len(kept) + 1] == [*kept, "originalId"], "what changes comes last"


def test_settle_retry_reports_unknown_entries_as_gone(desk: Desk) -> None:
    desk.groups()
    desk.own("t1")
    desk.add("1-0")
    items = [(b"m:1-0", 5.0, CHANGED), (b"m:7-0", 5.0, CHANGED), (b"r:7-0", 5.0, CHANGED)]
    desk.expect_entries("settle_retry", ["GONE", "GONE", "GONE"], retry(desk, *items))


def test_settle_retry_needs_the_group(desk: Desk) -> None:
    """C4: its owner recreates the group, and then settles it."""
    desk.pending("1-0")
    desk.own("t1")
    desk.do("XGROUP", "DESTROY", desk.stream, "hits")
    desk.expect_error("NOGROUP", retry(desk, (b"m:1-0", 5.0, CHANGED)))


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_settle_retry_uses_the_workers_fields_without_a_body(desk: Desk, how: str) -> None:
    desk.pending("1-0", "2-0")
    if how == "trimmed":
        desk.do("XTRIM", desk.stream, "MINID", "2-0")
    else:
        desk.do("XDEL", desk.stream, "1-0")
    desk.own("t1")
    item = (b"m:1-0", 5.0, CHANGED)
    desk.expect_entries("settle_retry", ["MISSING"], retry(desk, item))
    desk.expect_entries(
        "settle_retry", ["MISSING", "MOVED"], retry(desk, item, (b"m:2-0", 5.0, CHANGED))
    )
    whole = (b"m:1-0", 5.0, {b"payload": b"kept", b"key": b"k", **CHANGED})
    desk.expect_entries("settle_retry", ["MOVED"], retry(desk, whole))
    fields = {name.decode(): value for name, value in CHANGED.items()}
    assert desk.state()["items"]["m:1-0"] == {"payload": b"kept", "key": b"k", **fields}
    assert desk.state()["stream"].groups["hits"] == ("2-0", {})


def test_settle_retry_moves_an_entry_of_4000_fields_in_part(desk: Desk) -> None:
    """A manual XADD with that many fields must not block promotion, which cannot move them."""
    desk.groups()
    desk.add("1-0", "payload", "x", *(part for n in range(4000) for part in (f"f{n}", "v")))
    desk.fetch()
    desk.own("t1")
    desk.expect_entries("settle_retry", ["MISSING"], retry(desk, (b"m:1-0", 0.0, CHANGED)))
    desk.add("2-0")
    desk.fetch()
    both = [(place, 9.0, CHANGED) for place in (b"m:1-0", b"m:2-0")]
    desk.expect_entries("settle_retry", ["MISSING", "MOVED"], retry(desk, *both, adjacent=True))
    whole = (b"m:1-0", 0.0, {b"payload": b"x", **CHANGED})
    desk.expect_entries("settle_retry", ["MOVED"], retry(desk, whole))
    assert desk.link.run(messages.promote_retries(desk.keys, desk.unit, 10)).rest[0] == 1


def test_settle_retry_keeps_1900_fields_up_to_the_dead_letter(desk: Desk) -> None:
    desk.groups()
    desk.add("1-0", "payload", "x", *(part for n in range(1900) for part in (f"f{n}", "v")))
    desk.fetch()
    desk.own("t1")
    desk.expect_entries("settle_retry", ["MOVED"], retry(desk, (b"m:1-0", 0.0, CHANGED)))
    assert desk.link.run(messages.promote_retries(desk.keys, desk.unit, 10)).rest[0] == 1
    desk.fetch(stream=desk.retry)
    place = b"r:" + next(iter(desk.state()["retry"].entries)).encode()
    desk.expect_entries(
        "settle_dead", ["MOVED"], messages.dead(desk.keys, desk.leased("t1"), [(place, CHANGED)])
    )
    assert len(next(iter(desk.state()["dlq"].entries.values()))) == 1 + 1900 + len(CHANGED) + 1


def test_settle_retry_refuses_another_token(desk: Desk) -> None:
    """Q24: a late packet of a dead child changes nothing after the refence."""
    desk.pending("1-0")
    desk.own("t1")
    desk.link.run(leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", []))
    desk.expect("settle_retry", "FENCED", retry(desk, (b"m:1-0", 5.0, CHANGED)))


def test_settle_retry_refuses_an_invalid_place(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    items = [(b"m:1-0", 5.0, CHANGED), (b"1-0", 5.0, CHANGED)]
    assert "not a place" in str(desk.expect_error("ERR", retry(desk, *items)))


def test_settle_retry_accepts_an_empty_call(desk: Desk) -> None:
    desk.own("t1")
    desk.expect_entries("settle_retry", [], retry(desk))


def test_too_many_items_are_refused_here() -> None:
    items = [(b"m:1-0", 5.0, CHANGED)] * 257
    with pytest.raises(ContractError, match="257"):
        messages.retry(Keys(), Lease(UNIT, "t1"), items)
    with pytest.raises(ContractError, match="-1"):
        messages.retry(Keys(), Lease(UNIT, "t1"), [(b"m:1-0", -1.0, CHANGED)])
