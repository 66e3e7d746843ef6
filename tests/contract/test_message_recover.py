"""message_recover: in-flight -> in-flight on this connection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamqd.store import leases, messages
from streamqd.store.client import Connection
from streamqd.store.messages import PendingEntry, Recovered
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import TTL, Desk


def recover(
    desk: Desk,
    *,
    token: str = "t1",
    session: str = "s1",
    first: bool = True,
    after: tuple[str, str] = ("", ""),
    count: int = 10,
) -> Call:
    return messages.recover(desk.keys, desk.leased(token), session, first, *after, count)


def test_opens_a_session_and_lists_nothing(desk: Desk) -> None:
    desk.groups()
    desk.own("t1")
    before = desk.state()
    rest = desk.expect("message_recover", "OK", recover(desk))
    assert Recovered.parse(Reply("OK", rest)) == (
        *(False, b"0-0", b"0-0", [], []),
        *(False, False, frozenset(), []),
    )
    assert desk.changes(before) == {"fence": {**before["fence"], "session": b"s1"}}


def test_message_recover_lists_bodies_and_counters(desk: Desk) -> None:
    desk.groups()
    desk.add("1-0", "payload", b"\x00\xff\r\n")
    desk.add("1-0", "payload", "retried", "retryCount", "2", stream=desk.retry)
    desk.add("2-0")
    desk.fetch()
    desk.fetch(stream=desk.retry)
    desk.add("3-0")
    desk.own("t1")
    desk.do("HSET", desk.fence, "quarantine", "1")
    desk.do("HSET", desk.attempts, "m:1-0:c", "2", "m:1-0:f", "3", "m:1-0:last", b"\xff")
    desk.do("HSET", desk.attempts, "r:1-0:c", "1")
    rest = desk.expect("message_recover", "OK", recover(desk))
    assert Recovered.parse(Reply("OK", rest)) == Recovered(
        quarantine=True,
        last_main=b"2-0",
        last_retry=b"1-0",
        main=[
            PendingEntry(False, b"1-0", [b"payload", b"\x00\xff\r\n"], 2, b"\xff", 3),
            PendingEntry(False, b"2-0", [b"payload", b"body of 2-0"]),
        ],
        retry=[PendingEntry(True, b"1-0", [b"payload", b"retried", b"retryCount", b"2"], 1)],
    )


def test_message_recover_works_in_pages(desk: Desk) -> None:
    desk.pending(*(f"{n}-0" for n in range(1, 6)))
    desk.pending_retry("1-0", "2-0")
    desk.own("t1")
    seen: list[list[bytes]] = []
    after = ("", "")
    while True:
        call = recover(desk, first=not seen, after=after, count=2)
        page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", call)))
        seen.append([entry.id for entry in (*page.main, *page.retry)])
        if not page.main and not page.retry:
            break
        after = (
            page.main[-1].id.decode() if page.main else after[0],
            page.retry[-1].id.decode() if page.retry else after[1],
        )
    assert seen == [[b"1-0", b"2-0", b"1-0", b"2-0"], [b"3-0", b"4-0"], [b"5-0"], []]


def test_later_pages_write_nothing(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    desk.expect("message_recover", "OK", recover(desk))
    before = desk.dump()
    desk.expect("message_recover", "OK", recover(desk, first=False, session="s2"))
    assert desk.dump() == before


def test_message_recover_repeated_returns_the_same(desk: Desk) -> None:
    desk.pending("1-0", "2-0")
    desk.own("t1")
    rest = desk.expect("message_recover", "OK", recover(desk))
    before = desk.dump()
    assert desk.expect("message_recover", "OK", recover(desk)) == rest
    assert desk.dump() == before


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_message_recover_flags_entries_without_a_body(desk: Desk, how: str) -> None:
    desk.pending("1-0", "2-0")
    if how == "trimmed":
        desk.do("XTRIM", desk.stream, "MINID", "2-0")
    else:
        desk.do("XDEL", desk.stream, "1-0")
    desk.own("t1")
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", recover(desk))))
    assert [(entry.id, entry.fields is None) for entry in page.main] == [
        (b"1-0", True),
        (b"2-0", False),
    ]


def test_message_recover_ignores_entries_of_other_clients(desk: Desk) -> None:
    desk.groups()
    desk.add("1-0")
    desk.add("2-0")
    desk.fetch(count=1, consumer="foreign")
    desk.fetch()
    desk.own("t1")
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", recover(desk))))
    assert [entry.id for entry in page.main] == [b"2-0"]


def test_message_recover_refuses_a_superseded_token(desk: Desk) -> None:
    desk.pending("1-0")
    desk.own("t1")
    desk.link.run(leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", []))
    desk.expect("message_recover", "FENCED", recover(desk))
    desk.expect("message_recover", "OK", recover(desk, token="t2"))


@pytest.mark.parametrize("lost", ["stream", "retry"])
def test_message_recover_reports_a_missing_group(desk: Desk, lost: str) -> None:
    desk.groups()
    desk.own("t1")
    desk.do("XGROUP", "DESTROY", getattr(desk, lost), desk.unit.group)
    desk.expect_error("NOGROUP", recover(desk))
    desk.do("DEL", getattr(desk, lost))
    desk.expect_error("NOGROUP", recover(desk))


def test_earlier_fetch_is_refused_or_listed_by_recover(
    desk: Desk, new_link: Callable[..., Connection]
) -> None:
    """T1: a read that executes late, after the listing, delivers nothing unnoticed."""
    desk.groups()
    desk.add("1-0")
    desk.own("t1")
    earlier = new_link()
    earlier.execute("WATCH", desk.fence)
    assert earlier.execute("HGET", desk.fence, "token") == b"t1"
    page = Recovered.parse(Reply("OK", desk.expect("message_recover", "OK", recover(desk))))
    assert page.main == []
    read = ("XREADGROUP", "GROUP", "hits", "w", "COUNT", 5, "STREAMS", desk.stream, ">")
    assert earlier.pipeline([("MULTI",), read, ("EXEC",)])[2] is None
    assert desk.state()["stream"].groups == {"hits": ("0-0", {})}
