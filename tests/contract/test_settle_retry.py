"""settle_retry: in-flight -> waiting."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.model import Lease
from streamqd.store import leases, messages
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.harness import ASSIGNMENT, TTL, Harness, Stream
from tests.support.costs import Meter

CHANGED = {b"originalId": b"1-0", b"retryCount": b"1", b"crashCount": b"0"}


def retry(
    harness: Harness, *items: tuple[bytes, float, dict[bytes, bytes]], adjacent: bool = False
) -> Call:
    return messages.retry(harness.keys, harness.leased("t1"), items, adjacent=adjacent)


def test_settle_retry_moves_the_body_with_changed_fields(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0", "payload", b"\x00\xff\r\n", "key", "k", "retryCount", "7", "own", "field")
    harness.fetch()
    harness.own("t1")
    before = harness.state()
    with harness.instant() as now:
        settled = harness.expect_entries(
            "settle_retry", ["MOVED"], retry(harness, (b"m:1-0", 30.0, CHANGED))
        )
    changed = harness.changes(before)
    body = {"payload": b"\x00\xff\r\n", "key": b"k", "own": b"field"}
    fields = {name.decode(): value for name, value in CHANGED.items()}
    assert changed == {
        "delayed": {"m:1-0": now + 30_000},
        "items": {"m:1-0": {**body, **fields}},
        "stream": Stream(before["stream"].entries, {"hits": ("1-0", {})}),
    }
    assert list(changed["items"]["m:1-0"]) == ["payload", "key", "own", *fields]
    assert settled.next_due_unix_ms == changed["delayed"]["m:1-0"]


def test_settle_retry_takes_entries_of_both_streams(harness: Harness) -> None:
    """Entries with the same ID in the two streams are two different messages."""
    harness.pending("1-0", "2-0")
    harness.pending_retry("1-0")
    harness.own("t1")
    items = [(b"m:1-0", 9.0, CHANGED), (b"r:1-0", 5.0, CHANGED), (b"m:2-0", 0.0, CHANGED)]
    settled = harness.expect_entries(
        "settle_retry", ["MOVED", "MOVED", "MOVED"], retry(harness, *items)
    )
    state = harness.state()
    assert {member: fields["payload"] for member, fields in state["items"].items()} == {
        "m:1-0": b"body of 1-0",
        "r:1-0": b"body of 1-0",
        "m:2-0": b"body of 2-0",
    }
    assert list(state["delayed"]) == ["m:2-0", "r:1-0", "m:1-0"]
    assert settled.next_due_unix_ms == state["delayed"]["m:2-0"]
    assert state["stream"].groups["hits"] == ("2-0", {})
    assert state["retry"].groups["hits"] == ("1-0", {})


def test_settle_retry_returns_the_earliest_due_time(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    harness.do("ZADD", harness.delayed, 1_700_000_000_123, "m:0-1")
    settled = harness.expect_entries(
        "settle_retry", ["MOVED"], retry(harness, (b"m:1-0", 5.0, CHANGED))
    )
    assert settled.next_due_unix_ms == 1_700_000_000_123


def test_settle_retry_moves_the_counters_with_the_entry(harness: Harness) -> None:
    """The crash count moves together with the fields.

    A counter that is left behind would belong to no message.
    """
    harness.pending("1-0", "2-0")
    harness.own("t1")
    harness.do(
        "HSET", harness.attempts, "m:1-0:c", 1, "m:1-0:f", 1, "m:1-0:last", "x", "m:2-0:c", 1
    )
    call = retry(harness, (b"m:1-0", 5.0, {**CHANGED, b"crashCount": b"1"}))
    harness.expect_entries("settle_retry", ["MOVED"], call)
    state = harness.state()
    assert state["attempts"] == {"m:2-0:c": b"1"}
    assert state["items"]["m:1-0"]["crashCount"] == b"1"


def test_settle_retry_repeated_changes_nothing(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    call = retry(harness, (b"m:1-0", 5.0, CHANGED))
    harness.expect_entries("settle_retry", ["MOVED"], call)
    settled = harness.expect_entries("settle_retry", ["GONE"], call)
    assert settled.next_due_unix_ms == harness.state()["delayed"]["m:1-0"]


def test_settle_retry_after_the_promotion_changes_nothing(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    call = retry(harness, (b"m:1-0", 0.0, CHANGED))
    harness.expect_entries("settle_retry", ["MOVED"], call)
    harness.link.run(messages.promote_retries(harness.keys, harness.assignment, 10))
    assert harness.expect_entries("settle_retry", ["GONE"], call).next_due_unix_ms is None


def test_settle_retry_ignores_a_duplicate_place(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    item = (b"m:1-0", 5.0, CHANGED)
    harness.expect_entries("settle_retry", ["MOVED", "GONE"], retry(harness, item, item))


def test_settle_retry_looks_up_adjacent_entries_together(harness: Harness) -> None:
    """Neighbors in a stream share one lookup, because each lookup has to traverse a node."""
    ids = [f"{number}-0" for number in range(1, 9)]
    harness.pending(*ids)
    harness.pending_retry("3-0", "4-0")
    harness.own("t1")
    places = [b"r:3-0", b"r:4-0", *(f"m:{each}".encode() for each in ids)]
    call = retry(harness, *((place, 5.0, CHANGED) for place in places), adjacent=True)
    with Meter(harness.link).measuring() as cost:
        settled = messages.SettledReply.parse(harness.link.run(call))
    assert settled.words == ["MOVED"] * 10
    each_stream = ("xpending", "xrange", "xack")
    assert [cost.commands[name] for name in (*each_stream, "hset", "zadd")] == [2, 2, 2, 1, 1]
    bodies = {place.decode(): b"body of " + place[2:] for place in places}
    moved = harness.state()["items"]
    assert {place: fields["payload"] for place, fields in moved.items()} == bodies


def test_settle_retry_finds_entries_that_are_not_adjacent(harness: Harness) -> None:
    """Entries are found even if the hint is wrong.

    They may be apart, missing, out of order, or named twice.
    """
    harness.pending("1-0", "2-0", "3-0", "4-0", "5-0", "6-0", "7-0")
    harness.own("t1")
    harness.do("XACK", harness.stream, "hits", "3-0")
    harness.do("XDEL", harness.stream, "5-0")
    order = ("1-0", "4-0", "3-0", "5-0", "4-0", "7-0", "6-0")
    items = [(f"m:{each}".encode(), 5.0, CHANGED) for each in order]
    words = ["MOVED", "MOVED", "GONE", "MISSING", "GONE", "MOVED", "MOVED"]
    settled = messages.SettledReply.parse(harness.link.run(retry(harness, *items, adjacent=True)))
    assert settled.words == words
    state = harness.state()
    assert sorted(state["items"]) == ["m:1-0", "m:4-0", "m:6-0", "m:7-0"]
    assert state["stream"].groups["hits"] == ("7-0", {"2-0": "w", "5-0": "w"})


def test_settle_retry_of_adjacent_entries_requires_the_group(harness: Harness) -> None:
    harness.pending("1-0", "2-0")
    harness.own("t1")
    harness.do("XGROUP", "DESTROY", harness.stream, "hits")
    items = [(b"m:1-0", 5.0, CHANGED), (b"m:2-0", 5.0, CHANGED)]
    harness.expect_error("NOGROUP", retry(harness, *items, adjacent=True))


def test_settle_retry_keeps_different_values_of_shared_fields(harness: Harness) -> None:
    """The first entry sets the shared values.

    Others may have different values, or fewer or more names.
    """
    harness.groups()
    for entry_id in ("1-0", "2-0", "3-0"):
        harness.add(entry_id, "payload", f"body of {entry_id}", "own", "field", "more", "of it")
    harness.fetch()
    harness.own("t1")
    changes = [
        {b"originalId": b"1-0", b"retryCount": b"1", b"crashCount": b"0"},
        {b"originalId": b"0-7", b"retryCount": b"1", b"crashCount": b"2", b"more": b"changed"},
        {b"originalId": b"3-0", b"replayCount": b"4", b"crashCount": b"0"},
    ]
    items = [(f"m:{n}-0".encode(), 5.0, each) for n, each in enumerate(changes, 1)]
    harness.expect_entries("settle_retry", ["MOVED", "MOVED", "MOVED"], retry(harness, *items))
    moved = harness.state()["items"]
    for place, _, changed in items:
        found = moved[place.decode()]
        body = {"payload": b"body of " + place[2:], "own": b"field", "more": b"of it"}
        own = {name.decode(): value for name, value in changed.items()}
        assert found == {**body, **own}
        kept = [name for name in body if name not in own]
        assert list(found)[: len(kept) + 1] == [*kept, "originalId"], "what changes comes last"


def test_settle_retry_reports_unknown_entries_as_gone(harness: Harness) -> None:
    harness.groups()
    harness.own("t1")
    harness.add("1-0")
    items = [(b"m:1-0", 5.0, CHANGED), (b"m:7-0", 5.0, CHANGED), (b"r:7-0", 5.0, CHANGED)]
    harness.expect_entries("settle_retry", ["GONE", "GONE", "GONE"], retry(harness, *items))


def test_settle_retry_requires_the_group(harness: Harness) -> None:
    """If its group is missing, an entry is not settled.

    The owner recreates the group and then settles it.
    """
    harness.pending("1-0")
    harness.own("t1")
    harness.do("XGROUP", "DESTROY", harness.stream, "hits")
    harness.expect_error("NOGROUP", retry(harness, (b"m:1-0", 5.0, CHANGED)))


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_settle_retry_uses_the_workers_fields_without_a_body(harness: Harness, how: str) -> None:
    harness.pending("1-0", "2-0")
    if how == "trimmed":
        harness.do("XTRIM", harness.stream, "MINID", "2-0")
    else:
        harness.do("XDEL", harness.stream, "1-0")
    harness.own("t1")
    item = (b"m:1-0", 5.0, CHANGED)
    harness.expect_entries("settle_retry", ["MISSING"], retry(harness, item))
    harness.expect_entries(
        "settle_retry", ["MISSING", "MOVED"], retry(harness, item, (b"m:2-0", 5.0, CHANGED))
    )
    whole = (b"m:1-0", 5.0, {b"payload": b"kept", b"key": b"k", **CHANGED})
    harness.expect_entries("settle_retry", ["MOVED"], retry(harness, whole))
    fields = {name.decode(): value for name, value in CHANGED.items()}
    assert harness.state()["items"]["m:1-0"] == {"payload": b"kept", "key": b"k", **fields}
    assert harness.state()["stream"].groups["hits"] == ("2-0", {})


def test_settle_retry_moves_an_entry_of_4000_fields_in_part(harness: Harness) -> None:
    """An entry with 4,000 fields is moved only in part.

    A manual XADD of that size must not block promotion, which could not move all of it.
    """
    harness.groups()
    harness.add("1-0", "payload", "x", *(part for n in range(4000) for part in (f"f{n}", "v")))
    harness.fetch()
    harness.own("t1")
    harness.expect_entries("settle_retry", ["MISSING"], retry(harness, (b"m:1-0", 0.0, CHANGED)))
    harness.add("2-0")
    harness.fetch()
    both = [(place, 9.0, CHANGED) for place in (b"m:1-0", b"m:2-0")]
    harness.expect_entries(
        "settle_retry", ["MISSING", "MOVED"], retry(harness, *both, adjacent=True)
    )
    whole = (b"m:1-0", 0.0, {b"payload": b"x", **CHANGED})
    harness.expect_entries("settle_retry", ["MOVED"], retry(harness, whole))
    assert (
        harness.link.run(messages.promote_retries(harness.keys, harness.assignment, 10)).values[0]
        == 1
    )


def test_settle_retry_keeps_1900_fields_up_to_the_dead_letter(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0", "payload", "x", *(part for n in range(1900) for part in (f"f{n}", "v")))
    harness.fetch()
    harness.own("t1")
    harness.expect_entries("settle_retry", ["MOVED"], retry(harness, (b"m:1-0", 0.0, CHANGED)))
    assert (
        harness.link.run(messages.promote_retries(harness.keys, harness.assignment, 10)).values[0]
        == 1
    )
    harness.fetch(stream=harness.retry)
    place = b"r:" + next(iter(harness.state()["retry"].entries)).encode()
    harness.expect_entries(
        "settle_dead",
        ["MOVED"],
        messages.dead(harness.keys, harness.leased("t1"), [(place, CHANGED)]),
    )
    assert len(next(iter(harness.state()["dlq"].entries.values()))) == 1 + 1900 + len(CHANGED) + 1


def test_settle_retry_refuses_another_token(harness: Harness) -> None:
    """A late packet of a dead child changes nothing after the refence."""
    harness.pending("1-0")
    harness.own("t1")
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    harness.expect("settle_retry", "FENCED", retry(harness, (b"m:1-0", 5.0, CHANGED)))


def test_settle_retry_refuses_an_invalid_place(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    items = [(b"m:1-0", 5.0, CHANGED), (b"1-0", 5.0, CHANGED)]
    assert "not a place" in str(harness.expect_error("ERR", retry(harness, *items)))


def test_settle_retry_accepts_an_empty_call(harness: Harness) -> None:
    harness.own("t1")
    harness.expect_entries("settle_retry", [], retry(harness))


def test_settle_retry_refuses_too_many_items() -> None:
    items = [(b"m:1-0", 5.0, CHANGED)] * 257
    with pytest.raises(ContractError, match="257"):
        messages.retry(Keys(), Lease(ASSIGNMENT, "t1"), items)
    with pytest.raises(ContractError, match="-1"):
        messages.retry(Keys(), Lease(ASSIGNMENT, "t1"), [(b"m:1-0", -1.0, CHANGED)])
