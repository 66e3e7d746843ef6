"""message_reclaim: in-flight at a foreign client -> in-flight at the owner."""

from __future__ import annotations

import pytest

from streamqd.store import messages
from streamqd.store.messages import Reclaimed
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk


def reclaim(desk: Desk, source: str = "m", idle: float = 0.0, count: int = 10) -> Call:
    return messages.reclaim(desk.keys, desk.unit, "t1", "s1", source, idle, count)


def own(desk: Desk, token: str = "t1", session: str = "s1") -> None:
    desk.own(token)
    desk.do("HSET", desk.fence, "session", session)


def left_by(desk: Desk, consumer: str, *ids: str, stream: str = "") -> None:
    for entry_id in ids:
        desk.add(entry_id, stream=stream)
    desk.fetch(len(ids), consumer, stream)


def reclaimed(desk: Desk, call: Call) -> Reclaimed:
    return Reclaimed.parse(Reply("OK", desk.expect("message_reclaim", "OK", call)))


def test_takes_what_foreign_consumers_left(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "w", "1-0")
    left_by(desk, "foreign-b", "2-0")
    left_by(desk, "foreign-a", "3-0")
    own(desk)
    before = desk.state()
    found = reclaimed(desk, reclaim(desk))
    assert found.ghosts == 0
    assert sorted(found.entries) == [
        (b"2-0", [b"payload", b"body of 2-0"]),
        (b"3-0", [b"payload", b"body of 3-0"]),
    ]
    changed = desk.changes(before)
    assert list(changed) == ["stream"]
    assert changed["stream"].groups["hits"] == ("3-0", {"1-0": "w", "2-0": "w", "3-0": "w"})


def test_leaves_the_owners_own_entries(desk: Desk) -> None:
    """T5: they are idle too, and a handler is at work on them."""
    desk.pending("1-0")
    own(desk)
    before = desk.dump()
    assert reclaimed(desk, reclaim(desk)) == ([], 0)
    assert desk.dump() == before


def test_leaves_what_is_not_idle(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk)
    before = desk.dump()
    assert reclaimed(desk, reclaim(desk, idle=600.0)) == ([], 0)
    assert desk.dump() == before


def test_takes_so_many_at_a_time_and_the_rest_next(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign-a", "1-0", "2-0")
    left_by(desk, "foreign-b", "3-0", "4-0")
    own(desk)
    assert len(reclaimed(desk, reclaim(desk, count=3)).entries) == 3
    assert len(reclaimed(desk, reclaim(desk, count=3)).entries) == 1
    assert reclaimed(desk, reclaim(desk, count=3)) == ([], 0)


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_settles_ghosts(desk: Desk, how: str) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0", "2-0")
    if how == "trimmed":
        desk.do("XTRIM", desk.stream, "MINID", "2-0")
    else:
        desk.do("XDEL", desk.stream, "1-0")
    own(desk)
    found = reclaimed(desk, reclaim(desk))
    assert [entry_id for entry_id, _ in found.entries] == [b"2-0"]
    assert found.ghosts == 1
    assert desk.state()["stream"].groups["hits"] == ("2-0", {"2-0": "w"})


def test_takes_from_the_retry_stream(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0", stream=desk.retry)
    left_by(desk, "foreign", "1-0")
    own(desk)
    found = reclaimed(desk, reclaim(desk, "r"))
    assert [entry_id for entry_id, _ in found.entries] == [b"1-0"]
    assert desk.state()["retry"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert desk.state()["stream"].groups["hits"] == ("1-0", {"1-0": "foreign"})


def test_does_not_count_as_a_delivery(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk)
    reclaimed(desk, reclaim(desk))
    assert desk.do("XPENDING", desk.stream, "hits", "-", "+", 1)[0][3] == 1


def test_another_token_is_refused(desk: Desk) -> None:
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk, "t2")
    desk.expect("message_reclaim", "FENCED", reclaim(desk))


def test_another_session_is_refused(desk: Desk) -> None:
    """A late copy would take entries that nobody lists any more: they would be stuck."""
    desk.groups()
    left_by(desk, "foreign", "1-0")
    own(desk, session="s2")
    desk.expect("message_reclaim", "SESSION", reclaim(desk))


def test_a_missing_group_is_the_servers_error(desk: Desk) -> None:
    own(desk)
    desk.expect_error("NOGROUP", reclaim(desk))
