"""quarantine_mark: inherited entries run one at a time."""

from __future__ import annotations

import pytest

from streamqd.errors import RedisResponseError
from streamqd.store import leases, messages
from streamqd.store.scripts import Call
from tests.contract.harness import TTL, Harness, Stream


def mark(
    harness: Harness, place: bytes, *acked: bytes, session: str = "s1", token: str = "t1"
) -> Call:
    return messages.quarantine_mark(harness.keys, harness.leased(token), session, place, acked)


def inherit(harness: Harness) -> None:
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1", "quarantine", "1")


def test_quarantine_mark_marks_the_first_entry(harness: Harness) -> None:
    places = harness.pending("1-0")
    inherit(harness)
    before = harness.state()
    assert harness.expect("quarantine_mark", "OK", mark(harness, places[0])) == []
    assert harness.changes(before) == {"fence": {**before["fence"], "mark": b"m:1-0"}}


def test_quarantine_mark_marks_next_and_acknowledges_last(harness: Harness) -> None:
    main = harness.pending("1-0", "2-0")
    retried = harness.pending_retry("1-0")
    inherit(harness)
    harness.do("HSET", harness.fence, "mark", main[0])
    before = harness.state()
    harness.expect("quarantine_mark", "OK", mark(harness, main[1], main[0], *retried))
    assert harness.changes(before) == {
        "fence": {**before["fence"], "mark": b"m:2-0"},
        "stream": Stream(before["stream"].entries, {"hits": ("2-0", {"2-0": "w"})}),
        "retry": Stream(before["retry"].entries, {"hits": ("1-0", {})}),
    }


def test_quarantine_mark_without_a_place_stops_the_quarantine(harness: Harness) -> None:
    main = harness.pending("1-0")
    inherit(harness)
    harness.do("HSET", harness.fence, "mark", main[0])
    before = harness.state()
    harness.expect("quarantine_mark", "OK", mark(harness, b"", *main))
    changed = harness.changes(before)
    assert changed["stream"].groups["hits"] == ("1-0", {})
    assert changed["fence"] == {
        name: before["fence"][name] for name in ("token", "epoch", "owner", "since", "session")
    }


def test_quarantine_mark_marks_a_round(harness: Harness) -> None:
    places = harness.pending("1-0", "2-0")
    inherit(harness)
    before = harness.state()
    harness.expect("quarantine_mark", "OK", mark(harness, b" ".join(places)))
    assert harness.changes(before) == {"fence": {**before["fence"], "mark": b"m:1-0 m:2-0"}}


def test_quarantine_mark_clears_the_accused_at_the_end(harness: Harness) -> None:
    harness.pending("1-0")
    inherit(harness)
    harness.do("HSET", harness.fence, "accused", "m:1-0 m:2-0")
    harness.expect("quarantine_mark", "OK", mark(harness, b""))
    assert {"quarantine", "accused", "mark"}.isdisjoint(harness.state()["fence"])


@pytest.mark.parametrize("places", [b"m:1-0 ", b" m:1-0", b"m:1-0 x:2-0", b"m:1-0  m:2-0"])
def test_quarantine_mark_refuses_an_invalid_place_in_a_round(
    harness: Harness, places: bytes
) -> None:
    harness.pending("1-0", "2-0")
    inherit(harness)
    before = harness.dump()
    with pytest.raises(RedisResponseError, match="not a place"):
        harness.link.run(mark(harness, places))
    assert harness.dump() == before


def test_quarantine_mark_repeated_changes_nothing(harness: Harness) -> None:
    main = harness.pending("1-0", "2-0")
    inherit(harness)
    harness.expect("quarantine_mark", "OK", mark(harness, main[1], main[0]))
    before = harness.dump()
    harness.expect("quarantine_mark", "OK", mark(harness, main[1], main[0]))
    assert harness.dump() == before


def test_quarantine_mark_refuses_an_earlier_connection(harness: Harness) -> None:
    """A mark from an earlier connection is refused. It would name an entry that does not run."""
    main = harness.pending("1-0", "2-0")
    inherit(harness)
    harness.link.run(messages.recover(harness.keys, harness.leased("t1"), "s2", True, "", "", 10))
    harness.expect("quarantine_mark", "SESSION", mark(harness, main[1], main[0]))
    harness.expect("quarantine_mark", "OK", mark(harness, main[1], main[0], session="s2"))


def test_quarantine_mark_requires_a_session(harness: Harness) -> None:
    main = harness.pending("1-0")
    harness.own("t1")
    harness.expect("quarantine_mark", "SESSION", mark(harness, main[0]))


def test_quarantine_mark_refuses_another_token(harness: Harness) -> None:
    main = harness.pending("1-0")
    inherit(harness)
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    harness.expect("quarantine_mark", "FENCED", mark(harness, main[0]))


def test_quarantine_mark_refuses_an_invalid_place(harness: Harness) -> None:
    main = harness.pending("1-0")
    inherit(harness)
    assert "not a place" in str(harness.expect_error("ERR", mark(harness, b"1-0", *main)))
    assert "not a place" in str(harness.expect_error("ERR", mark(harness, main[0], b"1-0")))
