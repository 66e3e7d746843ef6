"""settle_note: in-flight -> in-flight, with one more failure."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import leases, messages
from streamqd.store.scripts import Call
from tests.contract.harness import TTL, Harness

HOUR_MS = 3_600_000


def note(harness: Harness, *notes: tuple[bytes, int], delay: float = 3600.0) -> Call:
    return messages.note(harness.keys, harness.leased("t1"), [(*each, delay) for each in notes])


def counts(harness: Harness) -> dict[str, bytes]:
    """Return the noted failures without their due times."""
    noted = harness.state().get("attempts", {})
    return {name: value for name, value in noted.items() if not name.endswith(":due")}


def test_settle_note_stores_counts_next_to_crashes(harness: Harness):
    main, retried = harness.pending("1-0", "2-0"), harness.pending_retry("1-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, "m:1-0:c", 2)
    before = harness.state()
    call = note(harness, (main[0], 1), (retried[0], 3))
    assert harness.expect("settle_note", "OK", call) == [2]
    assert set(harness.changes(before)) == {"attempts"}
    assert counts(harness) == {"m:1-0:c": b"2", "m:1-0:f": b"1", "r:1-0:f": b"3"}


def test_settle_note_sets_a_due_time_only_with_a_new_count(harness: Harness):
    (place,) = harness.pending("1-0")
    harness.own("t1")
    began = harness.now_unix_ms()
    harness.link.run(note(harness, (place, 1)))
    due = int(harness.state()["attempts"]["m:1-0:due"])
    assert began + HOUR_MS <= due <= harness.now_unix_ms() + HOUR_MS
    harness.link.run(note(harness, (place, 1), delay=1.0))
    assert int(harness.state()["attempts"]["m:1-0:due"]) == due, "a repeat changes nothing"
    harness.link.run(note(harness, (place, 2), delay=0.0))
    assert began <= int(harness.state()["attempts"]["m:1-0:due"]) <= harness.now_unix_ms()


def test_settle_note_counts_survive_a_new_owner(harness: Harness):
    places = harness.pending("1-0", "2-0")
    epoch = harness.own("t1")
    harness.link.run(note(harness, (places[1], 4)))
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    harness.own("t2", seen_epoch=epoch)
    call = messages.recover(harness.keys, harness.leased("t2"), "s2", True, "", "", 10)
    page = messages.Recovered.parse(harness.link.run(call))
    assert [(each.id, each.failures) for each in page.main] == [(b"1-0", 0), (b"2-0", 4)]
    assert page.main[0].wait_ms == 0
    assert 0 < page.main[1].wait_ms <= HOUR_MS


def test_settle_note_overdue_retry_does_not_wait(harness: Harness):
    (place,) = harness.pending("1-0")
    harness.own("t1")
    harness.link.run(note(harness, (place, 1)))
    harness.do("HSET", harness.attempts, "m:1-0:due", harness.now_unix_ms() - 1)
    call = messages.recover(harness.keys, harness.leased("t1"), "s1", True, "", "", 10)
    (found,) = messages.Recovered.parse(harness.link.run(call)).main
    assert (found.failures, found.wait_ms) == (1, 0)


def test_settle_note_repeated_or_late_changes_nothing(harness: Harness):
    (place,) = harness.pending("1-0")
    harness.own("t1")
    first, second = note(harness, (place, 1)), note(harness, (place, 2))
    assert harness.expect("settle_note", "OK", first) == [1]
    assert harness.expect("settle_note", "OK", second) == [1]
    before = harness.dump()
    assert harness.expect("settle_note", "OK", second) == [1]
    assert harness.expect("settle_note", "OK", first) == [1]
    assert harness.dump() == before


def test_settle_note_compares_counts_numerically(harness: Harness):
    (place,) = harness.pending("1-0")
    harness.own("t1")
    for failures in (9, 10):
        harness.link.run(note(harness, (place, failures)))
    assert counts(harness) == {"m:1-0:f": b"10"}


def test_settle_note_counts_are_deleted_on_settling(harness: Harness):
    places = harness.pending("1-0", "2-0")
    harness.own("t1")
    call = note(harness, (places[0], 1), (places[1], 1), (b"m:7-0", 1))
    harness.link.run(messages.ack(harness.keys, harness.leased("t1"), [places[0]]))
    assert harness.expect("settle_note", "OK", call) == [1]
    assert set(harness.state()["attempts"]) == {"m:2-0:f", "m:2-0:due"}
    ack = messages.ack(harness.keys, harness.leased("t1"), [], charged=[places[1]])
    assert harness.link.run(ack).values == [1]
    before = harness.dump()
    assert harness.expect("settle_note", "OK", call) == [0]
    assert harness.dump() == before
    assert "attempts" not in harness.state()


def test_settle_note_refuses_a_superseded_owner(harness: Harness):
    (place,) = harness.pending("1-0")
    harness.own("t1")
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    harness.expect("settle_note", "FENCED", note(harness, (place, 1)))


@pytest.mark.parametrize("bad", [b"1-0", b"m:1", b"x:1-0", b"", b"m:1-0\n"])
def test_settle_note_refuses_an_invalid_place(harness: Harness, bad: bytes):
    (place,) = harness.pending("1-0")
    harness.own("t1")
    error = harness.expect_error("ERR", note(harness, (place, 1), (bad, 1)))
    assert "not a place" in str(error)


def test_settle_note_accepts_up_to_the_item_limit(harness: Harness):
    harness.groups()
    harness.own("t1")
    places = harness.pending(*(f"{n}-0" for n in range(1, messages.ITEMS_MAX + 1)))
    notes = [(place, 1) for place in places]
    assert harness.expect("settle_note", "OK", note(harness, *notes)) == [messages.ITEMS_MAX]
    with pytest.raises(ContractError):
        note(harness, *notes, (b"m:999-0", 1))
