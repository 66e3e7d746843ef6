"""settle_note: in-flight -> in-flight, with one more failure."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import leases, messages
from streamqd.store.scripts import Call
from tests.contract.desk import TTL, Desk

HOUR_MS = 3_600_000


def note(desk: Desk, *notes: tuple[bytes, int], delay: float = 3600.0) -> Call:
    return messages.note(desk.keys, desk.leased("t1"), [(*each, delay) for each in notes])


def counts(desk: Desk) -> dict[str, bytes]:
    """Return the notes without the due times."""
    noted = desk.state().get("attempts", {})
    return {name: value for name, value in noted.items() if not name.endswith(":due")}


def test_settle_note_stores_counts_next_to_crashes(desk: Desk):
    main, retried = desk.pending("1-0", "2-0"), desk.pending_retry("1-0")
    desk.own("t1")
    desk.do("HSET", desk.attempts, "m:1-0:c", 2)
    before = desk.state()
    call = note(desk, (main[0], 1), (retried[0], 3))
    assert desk.expect("settle_note", "OK", call) == [2]
    assert set(desk.changes(before)) == {"attempts"}
    assert counts(desk) == {"m:1-0:c": b"2", "m:1-0:f": b"1", "r:1-0:f": b"3"}


def test_settle_note_sets_a_due_time_only_with_a_new_count(desk: Desk):
    (place,) = desk.pending("1-0")
    desk.own("t1")
    began = desk.now_unix_ms()
    desk.link.run(note(desk, (place, 1)))
    due = int(desk.state()["attempts"]["m:1-0:due"])
    assert began + HOUR_MS <= due <= desk.now_unix_ms() + HOUR_MS
    desk.link.run(note(desk, (place, 1), delay=1.0))
    assert int(desk.state()["attempts"]["m:1-0:due"]) == due, "a repeat changes nothing"
    desk.link.run(note(desk, (place, 2), delay=0.0))
    assert began <= int(desk.state()["attempts"]["m:1-0:due"]) <= desk.now_unix_ms()


def test_settle_note_counts_survive_a_new_owner(desk: Desk):
    """T8."""
    places = desk.pending("1-0", "2-0")
    epoch = desk.own("t1")
    desk.link.run(note(desk, (places[1], 4)))
    desk.link.run(leases.release(desk.keys, desk.leased("t1")))
    desk.own("t2", seen_epoch=epoch)
    call = messages.recover(desk.keys, desk.leased("t2"), "s2", True, "", "", 10)
    page = messages.Recovered.parse(desk.link.run(call))
    assert [(each.id, each.failures) for each in page.main] == [(b"1-0", 0), (b"2-0", 4)]
    assert page.main[0].wait_ms == 0
    assert 0 < page.main[1].wait_ms <= HOUR_MS


def test_settle_note_overdue_retry_does_not_wait(desk: Desk):
    (place,) = desk.pending("1-0")
    desk.own("t1")
    desk.link.run(note(desk, (place, 1)))
    desk.do("HSET", desk.attempts, "m:1-0:due", desk.now_unix_ms() - 1)
    call = messages.recover(desk.keys, desk.leased("t1"), "s1", True, "", "", 10)
    (found,) = messages.Recovered.parse(desk.link.run(call)).main
    assert (found.failures, found.wait_ms) == (1, 0)


def test_settle_note_repeated_or_late_changes_nothing(desk: Desk):
    (place,) = desk.pending("1-0")
    desk.own("t1")
    first, second = note(desk, (place, 1)), note(desk, (place, 2))
    assert desk.expect("settle_note", "OK", first) == [1]
    assert desk.expect("settle_note", "OK", second) == [1]
    before = desk.dump()
    assert desk.expect("settle_note", "OK", second) == [1]
    assert desk.expect("settle_note", "OK", first) == [1]
    assert desk.dump() == before


def test_ten_is_more_than_nine(desk: Desk):
    (place,) = desk.pending("1-0")
    desk.own("t1")
    for failures in (9, 10):
        desk.link.run(note(desk, (place, failures)))
    assert counts(desk) == {"m:1-0:f": b"10"}


def test_settle_note_counts_are_deleted_on_settling(desk: Desk):
    places = desk.pending("1-0", "2-0")
    desk.own("t1")
    call = note(desk, (places[0], 1), (places[1], 1), (b"m:7-0", 1))
    desk.link.run(messages.ack(desk.keys, desk.leased("t1"), [places[0]]))
    assert desk.expect("settle_note", "OK", call) == [1]
    assert set(desk.state()["attempts"]) == {"m:2-0:f", "m:2-0:due"}
    ack = messages.ack(desk.keys, desk.leased("t1"), [], charged=[places[1]])
    assert desk.link.run(ack).rest == [1]
    before = desk.dump()
    assert desk.expect("settle_note", "OK", call) == [0]
    assert desk.dump() == before
    assert "attempts" not in desk.state()


def test_settle_note_refuses_a_superseded_owner(desk: Desk):
    (place,) = desk.pending("1-0")
    desk.own("t1")
    desk.link.run(leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", []))
    desk.expect("settle_note", "FENCED", note(desk, (place, 1)))


@pytest.mark.parametrize("bad", [b"1-0", b"m:1", b"x:1-0", b"", b"m:1-0\n"])
def test_settle_note_refuses_an_invalid_place(desk: Desk, bad: bytes):
    (place,) = desk.pending("1-0")
    desk.own("t1")
    error = desk.expect_error("ERR", note(desk, (place, 1), (bad, 1)))
    assert "not a place" in str(error)


def test_settle_note_accepts_up_to_the_item_limit(desk: Desk):
    desk.groups()
    desk.own("t1")
    places = desk.pending(*(f"{n}-0" for n in range(1, messages.ITEMS_MAX + 1)))
    notes = [(place, 1) for place in places]
    assert desk.expect("settle_note", "OK", note(desk, *notes)) == [messages.ITEMS_MAX]
    with pytest.raises(ContractError):
        note(desk, *notes, (b"m:999-0", 1))
