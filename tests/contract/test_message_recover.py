"""message_recover: in-flight -> in-flight on this connection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamqd.store import leases, messages
from streamqd.store.client import Connection
from streamqd.store.messages import PendingEntry, Recovered
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import TTL, Harness


def recover(
    harness: Harness,
    *,
    token: str = "t1",
    session: str = "s1",
    first: bool = True,
    after: tuple[str, str] = ("", ""),
    count: int = 10,
) -> Call:
    return messages.recover(harness.keys, harness.leased(token), session, first, *after, count)


def test_message_recover_opens_a_session(harness: Harness) -> None:
    harness.groups()
    harness.own("t1")
    before = harness.state()
    rest = harness.expect("message_recover", "OK", recover(harness))
    assert Recovered.parse(Reply("OK", rest)) == (
        *(False, b"0-0", b"0-0", [], []),
        *(False, False, frozenset(), []),
    )
    assert harness.changes(before) == {"fence": {**before["fence"], "session": b"s1"}}


def test_message_recover_lists_bodies_and_counters(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0", "payload", b"\x00\xff\r\n")
    harness.add("1-0", "payload", "retried", "retryCount", "2", stream=harness.retry)
    harness.add("2-0")
    harness.fetch()
    harness.fetch(stream=harness.retry)
    harness.add("3-0")
    harness.own("t1")
    harness.do("HSET", harness.fence, "quarantine", "1")
    harness.do("HSET", harness.attempts, "m:1-0:c", "2", "m:1-0:f", "3", "m:1-0:last", b"\xff")
    harness.do("HSET", harness.attempts, "r:1-0:c", "1")
    rest = harness.expect("message_recover", "OK", recover(harness))
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


def test_message_recover_works_in_pages(harness: Harness) -> None:
    harness.pending(*(f"{n}-0" for n in range(1, 6)))
    harness.pending_retry("1-0", "2-0")
    harness.own("t1")
    seen: list[list[bytes]] = []
    after = ("", "")
    while True:
        call = recover(harness, first=not seen, after=after, count=2)
        page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", call)))
        seen.append([entry.id for entry in (*page.main, *page.retry)])
        if not page.main and not page.retry:
            break
        after = (
            page.main[-1].id.decode() if page.main else after[0],
            page.retry[-1].id.decode() if page.retry else after[1],
        )
    assert seen == [[b"1-0", b"2-0", b"1-0", b"2-0"], [b"3-0", b"4-0"], [b"5-0"], []]


def test_message_recover_writes_on_the_first_page_only(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    harness.expect("message_recover", "OK", recover(harness))
    before = harness.dump()
    harness.expect("message_recover", "OK", recover(harness, first=False, session="s2"))
    assert harness.dump() == before


def test_message_recover_repeated_returns_the_same(harness: Harness) -> None:
    harness.pending("1-0", "2-0")
    harness.own("t1")
    rest = harness.expect("message_recover", "OK", recover(harness))
    before = harness.dump()
    assert harness.expect("message_recover", "OK", recover(harness)) == rest
    assert harness.dump() == before


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_message_recover_flags_entries_without_a_body(harness: Harness, how: str) -> None:
    harness.pending("1-0", "2-0")
    if how == "trimmed":
        harness.do("XTRIM", harness.stream, "MINID", "2-0")
    else:
        harness.do("XDEL", harness.stream, "1-0")
    harness.own("t1")
    page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", recover(harness))))
    assert [(entry.id, entry.fields is None) for entry in page.main] == [
        (b"1-0", True),
        (b"2-0", False),
    ]


def test_message_recover_ignores_entries_of_other_clients(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0")
    harness.add("2-0")
    harness.fetch(count=1, consumer="foreign")
    harness.fetch()
    harness.own("t1")
    page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", recover(harness))))
    assert [entry.id for entry in page.main] == [b"2-0"]


def test_message_recover_refuses_a_superseded_token(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    harness.expect("message_recover", "FENCED", recover(harness))
    harness.expect("message_recover", "OK", recover(harness, token="t2"))


@pytest.mark.parametrize("lost", ["stream", "retry"])
def test_message_recover_reports_a_missing_group(harness: Harness, lost: str) -> None:
    harness.groups()
    harness.own("t1")
    harness.do("XGROUP", "DESTROY", getattr(harness, lost), harness.assignment.group)
    harness.expect_error("NOGROUP", recover(harness))
    harness.do("DEL", getattr(harness, lost))
    harness.expect_error("NOGROUP", recover(harness))


def test_message_recover_lists_or_refuses_an_earlier_fetch(
    harness: Harness, new_link: Callable[..., Connection]
) -> None:
    """A fetch that executes late, after the listing, is either listed or refused.

    It never delivers entries unnoticed.
    """
    harness.groups()
    harness.add("1-0")
    harness.own("t1")
    earlier = new_link()
    earlier.execute("WATCH", harness.fence)
    assert earlier.execute("HGET", harness.fence, "token") == b"t1"
    page = Recovered.parse(Reply("OK", harness.expect("message_recover", "OK", recover(harness))))
    assert page.main == []
    read = ("XREADGROUP", "GROUP", "hits", "w", "COUNT", 5, "STREAMS", harness.stream, ">")
    assert earlier.pipeline([("MULTI",), read, ("EXEC",)])[2] is None
    assert harness.state()["stream"].groups == {"hits": ("0-0", {})}
