"""group_restore: absent -> present, in the state that its owner knows."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.store import messages
from streamqd.store.scripts import Call
from tests.contract.harness import Harness


def restore(
    harness: Harness, main: str, retry: str, places: Sequence[bytes] = (), token: str = "t1"
) -> Call:
    return messages.restore_group(
        harness.keys, harness.leased(token), main.encode(), retry.encode(), places
    )


def destroy(harness: Harness, stream: str) -> None:
    assert harness.do("XGROUP", "DESTROY", stream, harness.assignment.group) == 1


def test_group_restore_restores_pending_entries(harness: Harness) -> None:
    """Acknowledged entries are not read again, and all others are pending as before."""
    _, second, third = harness.pending("1-0", "2-0", "3-0")
    retried, _ = harness.pending_retry("1-0", "2-0")
    harness.own("t1")
    harness.do("XACK", harness.stream, harness.assignment.group, "1-0")
    harness.do("XACK", harness.retry, harness.assignment.group, "2-0")
    harness.add("4-0")
    before = harness.state()
    for stream in (harness.stream, harness.retry):
        destroy(harness, stream)
    rest = harness.expect(
        "group_restore", "OK", restore(harness, "3-0", "2-0", [second, third, retried])
    )
    assert rest == [b"3-0", b"2-0"]
    assert harness.changes(before) == {}
    assert harness.expect("group_restore", "OK", restore(harness, "3-0", "2-0", [second])) == [
        b"",
        b"",
    ]
    assert harness.changes(before) == {}
    assert harness.fetch() == [b"4-0"]


def test_group_restore_restores_many_pending_entries(harness: Harness) -> None:
    """A restore works for more entries than one command can name."""
    places = harness.pending(*(f"{n}-0" for n in range(1, 1_203)))
    harness.own("t1")
    before = harness.state()
    destroy(harness, harness.stream)
    harness.expect("group_restore", "OK", restore(harness, "1202-0", "0-0", places))
    assert harness.changes(before) == {}


def test_group_restore_refuses_a_stale_token(harness: Harness) -> None:
    harness.pending("1-0")
    epoch = harness.own("t1")
    destroy(harness, harness.stream)
    rest = harness.expect("group_restore", "FENCED", restore(harness, "1-0", "0-0", token="t0"))
    assert rest == [str(epoch).encode(), b"west-1"]
    harness.expect_error("ERR", restore(harness, "1-0", "0-0", [b"1-0"]))


def test_group_restore_reads_a_new_stream_from_its_start(harness: Harness) -> None:
    harness.pending("5-0")
    harness.own("t1")
    for again in ((), ("1-0",)):
        harness.do("DEL", harness.stream)
        for entry_id in again:
            harness.add(entry_id)
        rest = harness.expect("group_restore", "OK", restore(harness, "5-0", "0-0"))
        assert rest == [b"0-0", b""]
    assert harness.fetch() == [b"1-0"]


def test_settling_in_a_missing_group_returns_nogroup(harness: Harness) -> None:
    """The answer is NOGROUP.

    If it were GONE, as for a settled entry, a failed message would be lost.
    """
    items = harness.pending("1-0", "2-0")
    harness.own("t1")
    destroy(harness, harness.stream)
    for adjacent in (False, True):
        call = messages.retry(
            harness.keys,
            harness.leased("t1"),
            [(place, 1.0, {}) for place in items],
            adjacent=adjacent,
        )
        harness.expect_error("NOGROUP", call)
        call = messages.dead(
            harness.keys, harness.leased("t1"), [(place, {}) for place in items], adjacent=adjacent
        )
        harness.expect_error("NOGROUP", call)
