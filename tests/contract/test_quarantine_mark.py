"""quarantine_mark: inherited entries, one at a time."""

from __future__ import annotations

import pytest

from streamqd.errors import RedisRefused
from streamqd.store import leases, messages
from streamqd.store.scripts import Call
from tests.contract.desk import TTL, Desk, Stream


def mark(desk: Desk, place: bytes, *acked: bytes, session: str = "s1", token: str = "t1") -> Call:
    return messages.quarantine_mark(desk.keys, desk.leased(token), session, place, acked)


def inherit(desk: Desk) -> None:
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1", "quarantine", "1")


def test_quarantine_mark_marks_the_first_entry(desk: Desk) -> None:
    places = desk.pending("1-0")
    inherit(desk)
    before = desk.state()
    assert desk.expect("quarantine_mark", "OK", mark(desk, places[0])) == []
    assert desk.changes(before) == {"fence": {**before["fence"], "mark": b"m:1-0"}}


def test_quarantine_mark_marks_the_next_and_acknowledges_the_last(desk: Desk) -> None:
    main = desk.pending("1-0", "2-0")
    retried = desk.pending_retry("1-0")
    inherit(desk)
    desk.do("HSET", desk.fence, "mark", main[0])
    before = desk.state()
    desk.expect("quarantine_mark", "OK", mark(desk, main[1], main[0], *retried))
    assert desk.changes(before) == {
        "fence": {**before["fence"], "mark": b"m:2-0"},
        "stream": Stream(before["stream"].entries, {"hits": ("2-0", {"2-0": "w"})}),
        "retry": Stream(before["retry"].entries, {"hits": ("1-0", {})}),
    }


def test_quarantine_mark_without_a_place_ends_the_quarantine(desk: Desk) -> None:
    main = desk.pending("1-0")
    inherit(desk)
    desk.do("HSET", desk.fence, "mark", main[0])
    before = desk.state()
    desk.expect("quarantine_mark", "OK", mark(desk, b"", *main))
    changed = desk.changes(before)
    assert changed["stream"].groups["hits"] == ("1-0", {})
    assert changed["fence"] == {
        name: before["fence"][name] for name in ("token", "epoch", "owner", "since", "session")
    }


def test_quarantine_mark_marks_a_round(desk: Desk) -> None:
    places = desk.pending("1-0", "2-0")
    inherit(desk)
    before = desk.state()
    desk.expect("quarantine_mark", "OK", mark(desk, b" ".join(places)))
    assert desk.changes(before) == {"fence": {**before["fence"], "mark": b"m:1-0 m:2-0"}}


def test_quarantine_mark_clears_the_accused_at_the_end(desk: Desk) -> None:
    desk.pending("1-0")
    inherit(desk)
    desk.do("HSET", desk.fence, "accused", "m:1-0 m:2-0")
    desk.expect("quarantine_mark", "OK", mark(desk, b""))
    assert {"quarantine", "accused", "mark"}.isdisjoint(desk.state()["fence"])


@pytest.mark.parametrize("places", [b"m:1-0 ", b" m:1-0", b"m:1-0 x:2-0", b"m:1-0  m:2-0"])
def test_quarantine_mark_refuses_an_invalid_place_in_a_round(desk: Desk, places: bytes) -> None:
    desk.pending("1-0", "2-0")
    inherit(desk)
    before = desk.dump()
    with pytest.raises(RedisRefused, match="not a place"):
        desk.link.run(mark(desk, places))
    assert desk.dump() == before


def test_quarantine_mark_repeated_changes_nothing(desk: Desk) -> None:
    main = desk.pending("1-0", "2-0")
    inherit(desk)
    desk.expect("quarantine_mark", "OK", mark(desk, main[1], main[0]))
    before = desk.dump()
    desk.expect("quarantine_mark", "OK", mark(desk, main[1], main[0]))
    assert desk.dump() == before


def test_quarantine_mark_refuses_an_earlier_connection(desk: Desk) -> None:
    """T15: a late mark would name an entry that does not run."""
    main = desk.pending("1-0", "2-0")
    inherit(desk)
    desk.link.run(messages.recover(desk.keys, desk.leased("t1"), "s2", True, "", "", 10))
    desk.expect("quarantine_mark", "SESSION", mark(desk, main[1], main[0]))
    desk.expect("quarantine_mark", "OK", mark(desk, main[1], main[0], session="s2"))


def test_quarantine_mark_requires_a_session(desk: Desk) -> None:
    main = desk.pending("1-0")
    desk.own("t1")
    desk.expect("quarantine_mark", "SESSION", mark(desk, main[0]))


def test_quarantine_mark_refuses_another_token(desk: Desk) -> None:
    main = desk.pending("1-0")
    inherit(desk)
    desk.link.run(leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", []))
    desk.expect("quarantine_mark", "FENCED", mark(desk, main[0]))


def test_quarantine_mark_refuses_an_invalid_place(desk: Desk) -> None:
    main = desk.pending("1-0")
    inherit(desk)
    assert "not a place" in str(desk.expect_error("ERR", mark(desk, b"1-0", *main)))
    assert "not a place" in str(desk.expect_error("ERR", mark(desk, main[0], b"1-0")))
