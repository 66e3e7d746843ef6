"""partition_snapshot: where the messages of a group are."""

from __future__ import annotations

from streamqd.store import messages
from streamqd.store.messages import Snapshot
from streamqd.store.scripts import Reply
from tests.contract.desk import Desk


def snapshot(desk: Desk, limit: int = 1000) -> Snapshot:
    before = desk.dump()
    rest = desk.expect("partition_snapshot", "OK", messages.snapshot(desk.keys, desk.unit, limit))
    assert desk.dump() == before
    found = Snapshot.parse(Reply("OK", rest))
    assert found is not None
    return found


def test_snapshot_of_an_empty_unit_is_zero(desk: Desk) -> None:
    desk.groups()
    assert snapshot(desk) == (0,) * 8


def test_snapshot_counts_every_place(desk: Desk) -> None:
    desk.pending("1-0", "2-0", "3-0")
    desk.do("XACK", desk.stream, "hits", "1-0")
    for n in range(4, 8):
        desk.add(f"{n}-0")
    desk.pending_retry("1-0")
    for n in range(2, 7):
        desk.add(f"{n}-0", stream=desk.retry)
    for n in range(1, 7):
        desk.do("ZADD", desk.delayed, n, f"m:9-{n}")
    for n in range(1, 8):
        desk.add(f"{n}-0", stream=desk.dlq)
    for n in range(1, 9):
        desk.do("ZADD", desk.scheduled, n, f"send-{n}")
    assert snapshot(desk) == Snapshot(
        length=7,
        unread=4,
        pending=2,
        delayed=6,
        retry_unread=5,
        retry_pending=1,
        dead=7,
        scheduled=8,
    )


def test_counts_unread_over_pages_and_up_to_the_limit(desk: Desk) -> None:
    desk.groups()
    desk.link.pipeline([("XADD", desk.stream, f"{n}-0", "payload", n) for n in range(1, 251)])
    assert snapshot(desk, 250).unread == 250
    assert snapshot(desk, 249).unread == -1
    desk.do("XDEL", desk.stream, "7-0")
    assert snapshot(desk, 249).unread == 249


def test_snapshot_reports_a_missing_group(desk: Desk) -> None:
    call = messages.snapshot(desk.keys, desk.unit)
    desk.expect("partition_snapshot", "NOGROUP", call)
    desk.groups()
    desk.do("XGROUP", "DESTROY", desk.retry, "hits")
    assert desk.expect("partition_snapshot", "NOGROUP", call) == []
    assert Snapshot.parse(Reply("NOGROUP", [])) is None
