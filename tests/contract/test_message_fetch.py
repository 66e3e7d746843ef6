"""message_fetch: unread -> in-flight, by a script, because a transaction needs memory."""

from __future__ import annotations

from streamqd.store import messages
from streamqd.store.scripts import Call
from tests.contract.desk import Desk


def fetch(desk: Desk, token: str = "t1", session: str = "s1", count: int = 10) -> Call:
    return messages.fetch(desk.keys, desk.leased(token), session, count)


def open_session(desk: Desk) -> None:
    desk.groups()
    desk.own("t1")
    desk.do("HSET", desk.fence, "session", "s1")


def test_message_fetch_reads_both_streams(desk: Desk) -> None:
    open_session(desk)
    for entry_id in ("1-0", "2-0", "3-0"):
        desk.add(entry_id)
    desk.add("1-0", "payload", "again", "key", "k", stream=desk.retry)
    before = desk.state()
    retried, main = desk.expect("message_fetch", "OK", fetch(desk, count=2))
    assert retried == [[b"1-0", [b"payload", b"again", b"key", b"k"]]]
    assert main == [
        [b"1-0", [b"payload", b"body of 1-0"]],
        [b"2-0", [b"payload", b"body of 2-0"]],
    ]
    changed = desk.changes(before)
    assert list(changed) == ["retry", "stream"]
    assert changed["stream"].groups["hits"] == ("2-0", {"1-0": "w", "2-0": "w"})
    assert changed["retry"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert desk.expect("message_fetch", "OK", fetch(desk)) == [
        [],
        [[b"3-0", [b"payload", b"body of 3-0"]]],
    ]


def test_message_fetch_with_nothing_to_read_is_empty(desk: Desk) -> None:
    open_session(desk)
    assert desk.expect("message_fetch", "OK", fetch(desk)) == [[], []]


def test_message_fetch_refuses_an_earlier_connection(desk: Desk) -> None:
    """T1: it would deliver entries that no listing finds any more."""
    open_session(desk)
    desk.add("1-0")
    desk.do("HSET", desk.fence, "session", "s2")
    desk.expect("message_fetch", "SESSION", fetch(desk))


def test_without_a_session_nothing_is_read(desk: Desk) -> None:
    desk.groups()
    desk.own("t1")
    desk.add("1-0")
    desk.expect("message_fetch", "SESSION", fetch(desk))


def test_message_fetch_refuses_another_owner(desk: Desk) -> None:
    open_session(desk)
    desk.add("1-0")
    epoch = int(desk.do("HGET", desk.fence, "epoch"))
    rest = desk.expect("message_fetch", "FENCED", fetch(desk, token="t0"))
    assert rest == [str(epoch).encode(), b"west-1"]


def test_message_fetch_reports_a_missing_group(desk: Desk) -> None:
    open_session(desk)
    desk.do("XGROUP", "DESTROY", desk.retry, desk.unit.group)
    desk.expect_error("NOGROUP", fetch(desk))
