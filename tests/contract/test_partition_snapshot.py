"""partition_snapshot: where the messages of a group are."""

from __future__ import annotations

from streamqd.store import messages
from streamqd.store.messages import Snapshot
from streamqd.store.scripts import Reply
from tests.contract.harness import Harness


def snapshot(harness: Harness, limit: int = 1000) -> Snapshot:
    before = harness.dump()
    rest = harness.expect(
        "partition_snapshot", "OK", messages.snapshot(harness.keys, harness.assignment, limit)
    )
    assert harness.dump() == before
    found = Snapshot.parse(Reply("OK", rest))
    assert found is not None
    return found


def test_partition_snapshot_of_an_empty_assignment_is_zero(harness: Harness) -> None:
    harness.groups()
    assert snapshot(harness) == (0,) * 8


def test_partition_snapshot_counts_every_place(harness: Harness) -> None:
    harness.pending("1-0", "2-0", "3-0")
    harness.do("XACK", harness.stream, "hits", "1-0")
    for n in range(4, 8):
        harness.add(f"{n}-0")
    harness.pending_retry("1-0")
    for n in range(2, 7):
        harness.add(f"{n}-0", stream=harness.retry)
    for n in range(1, 7):
        harness.do("ZADD", harness.delayed, n, f"m:9-{n}")
    for n in range(1, 8):
        harness.add(f"{n}-0", stream=harness.dlq)
    for n in range(1, 9):
        harness.do("ZADD", harness.delayed_sends, n, f"send-{n}")
    assert snapshot(harness) == Snapshot(
        length=7,
        unread=4,
        pending=2,
        waiting_retries=6,
        retry_unread=5,
        retry_pending=1,
        dead=7,
        delayed_sends=8,
    )


def test_partition_snapshot_counts_unread_up_to_a_limit(harness: Harness) -> None:
    harness.groups()
    harness.link.pipeline([("XADD", harness.stream, f"{n}-0", "payload", n) for n in range(1, 251)])
    assert snapshot(harness, 250).unread == 250
    assert snapshot(harness, 249).unread == -1
    harness.do("XDEL", harness.stream, "7-0")
    assert snapshot(harness, 249).unread == 249


def test_partition_snapshot_reports_a_missing_group(harness: Harness) -> None:
    call = messages.snapshot(harness.keys, harness.assignment)
    harness.expect("partition_snapshot", "NOGROUP", call)
    harness.groups()
    harness.do("XGROUP", "DESTROY", harness.retry, "hits")
    assert harness.expect("partition_snapshot", "NOGROUP", call) == []
    assert Snapshot.parse(Reply("NOGROUP", [])) is None
