"""group_restore: absent -> present, as its owner knows it."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.store import messages
from streamqd.store.scripts import Call
from tests.contract.desk import Desk


def restore(
    desk: Desk, main: str, retry: str, places: Sequence[bytes] = (), token: str = "t1"
) -> Call:
    return messages.restore_group(
        desk.keys, desk.leased(token), main.encode(), retry.encode(), places
    )


def destroy(desk: Desk, stream: str) -> None:
    assert desk.do("XGROUP", "DESTROY", stream, desk.unit.group) == 1


def test_group_restore_restores_pending_entries(desk: Desk) -> None:
    """C4: acknowledged entries are not read again, and the others are pending as before."""
    _, second, third = desk.pending("1-0", "2-0", "3-0")
    retried, _ = desk.pending_retry("1-0", "2-0")
    desk.own("t1")
    desk.do("XACK", desk.stream, desk.unit.group, "1-0")
    desk.do("XACK", desk.retry, desk.unit.group, "2-0")
    desk.add("4-0")
    before = desk.state()
    for stream in (desk.stream, desk.retry):
        destroy(desk, stream)
    rest = desk.expect("group_restore", "OK", restore(desk, "3-0", "2-0", [second, third, retried]))
    assert rest == [b"3-0", b"2-0"]
    assert desk.changes(before) == {}
    assert desk.expect("group_restore", "OK", restore(desk, "3-0", "2-0", [second])) == [b"", b""]
    assert desk.changes(before) == {}
    assert desk.fetch() == [b"4-0"]


def test_group_restore_restores_many_pending_entries(desk: Desk) -> None:
    """C4: more entries than one command can name."""
    places = desk.pending(*(f"{n}-0" for n in range(1, 1_203)))
    desk.own("t1")
    before = desk.state()
    destroy(desk, desk.stream)
    desk.expect("group_restore", "OK", restore(desk, "1202-0", "0-0", places))
    assert desk.changes(before) == {}


def test_group_restore_refuses_a_stale_token(desk: Desk) -> None:
    desk.pending("1-0")
    epoch = desk.own("t1")
    destroy(desk, desk.stream)
    rest = desk.expect("group_restore", "FENCED", restore(desk, "1-0", "0-0", token="t0"))
    assert rest == [str(epoch).encode(), b"west-1"]
    desk.expect_error("ERR", restore(desk, "1-0", "0-0", [b"1-0"]))


def test_group_restore_reads_a_new_stream_from_its_start(desk: Desk) -> None:
    desk.pending("5-0")
    desk.own("t1")
    for again in ((), ("1-0",)):
        desk.do("DEL", desk.stream)
        for entry_id in again:
            desk.add(entry_id)
        rest = desk.expect("group_restore", "OK", restore(desk, "5-0", "0-0"))
        assert rest == [b"0-0", b""]
    assert desk.fetch() == [b"1-0"]


def test_settling_in_a_missing_group_is_an_error(desk: Desk) -> None:
    """C4: the answer was GONE, as for a settled entry, so a failed message was lost."""
    items = desk.pending("1-0", "2-0")
    desk.own("t1")
    destroy(desk, desk.stream)
    for adjacent in (False, True):
        call = messages.retry(
            desk.keys, desk.leased("t1"), [(place, 1.0, {}) for place in items], adjacent=adjacent
        )
        desk.expect_error("NOGROUP", call)
        call = messages.dead(
            desk.keys, desk.leased("t1"), [(place, {}) for place in items], adjacent=adjacent
        )
        desk.expect_error("NOGROUP", call)
