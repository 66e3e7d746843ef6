"""message_fetch: unread -> in-flight, by a script, because a transaction needs memory."""

from __future__ import annotations

from streamqd.store import messages
from streamqd.store.scripts import Call
from tests.contract.harness import Harness


def fetch(harness: Harness, token: str = "t1", session: str = "s1", count: int = 10) -> Call:
    return messages.fetch(harness.keys, harness.leased(token), session, count)


def open_session(harness: Harness) -> None:
    harness.groups()
    harness.own("t1")
    harness.do("HSET", harness.fence, "session", "s1")


def test_message_fetch_reads_both_streams(harness: Harness) -> None:
    open_session(harness)
    for entry_id in ("1-0", "2-0", "3-0"):
        harness.add(entry_id)
    harness.add("1-0", "payload", "again", "key", "k", stream=harness.retry)
    before = harness.state()
    retried, main = harness.expect("message_fetch", "OK", fetch(harness, count=2))
    assert retried == [[b"1-0", [b"payload", b"again", b"key", b"k"]]]
    assert main == [
        [b"1-0", [b"payload", b"body of 1-0"]],
        [b"2-0", [b"payload", b"body of 2-0"]],
    ]
    changed = harness.changes(before)
    assert list(changed) == ["retry", "stream"]
    assert changed["stream"].groups["hits"] == ("2-0", {"1-0": "w", "2-0": "w"})
    assert changed["retry"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert harness.expect("message_fetch", "OK", fetch(harness)) == [
        [],
        [[b"3-0", [b"payload", b"body of 3-0"]]],
    ]


def test_message_fetch_with_nothing_to_read_is_empty(harness: Harness) -> None:
    open_session(harness)
    assert harness.expect("message_fetch", "OK", fetch(harness)) == [[], []]


def test_message_fetch_refuses_an_earlier_connection(harness: Harness) -> None:
    """A fetch from an earlier connection is refused.

    If it were executed, no listing would contain its entries.
    """
    open_session(harness)
    harness.add("1-0")
    harness.do("HSET", harness.fence, "session", "s2")
    harness.expect("message_fetch", "SESSION", fetch(harness))


def test_message_fetch_requires_a_session(harness: Harness) -> None:
    harness.groups()
    harness.own("t1")
    harness.add("1-0")
    harness.expect("message_fetch", "SESSION", fetch(harness))


def test_message_fetch_refuses_another_owner(harness: Harness) -> None:
    open_session(harness)
    harness.add("1-0")
    epoch = int(harness.do("HGET", harness.fence, "epoch"))
    rest = harness.expect("message_fetch", "FENCED", fetch(harness, token="t0"))
    assert rest == [str(epoch).encode(), b"west-1"]


def test_message_fetch_reports_a_missing_group(harness: Harness) -> None:
    open_session(harness)
    harness.do("XGROUP", "DESTROY", harness.retry, harness.assignment.group)
    harness.expect_error("NOGROUP", fetch(harness))
