"""A worker scans the pending entries of other clients page by page, and reads between pages."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.message import Message
from streamqd.scoreboard import WorkerSlot
from streamqd.worker import ExitCode
from tests.contract.harness import Harness
from tests.support.life import Life

FRESH = 3 * 512 + 100  # several pages of entries that are not idle
UNREAD = 40


@pytest.mark.parametrize("kind", [{}, {"concurrency": 4, "order": "none"}])
def test_worker_reads_during_a_long_reclaim_scan(
    harness: Harness, life: Life, slot: WorkerSlot, kind: dict[str, Any]
):
    """A worker keeps reading during a long scan.

    Only the first and the last of many entries are idle, because their consumer handles the others.
    """
    harness.link.pipeline(
        [("XADD", harness.stream, f"1-{n + 1}", "payload", "x") for n in range(FRESH)]
    )
    harness.fetch(FRESH, consumer="someone")
    group = harness.assignment.group
    idle = ["1-1", f"1-{FRESH}"]
    harness.do("XCLAIM", harness.stream, group, "someone", 0, *idle, "IDLE", 700_000, "JUSTID")
    harness.link.pipeline(
        [("XADD", harness.stream, f"2-{n + 1}", "payload", "x") for n in range(UNREAD)]
    )
    slot.reclaim_requested = 1
    worker = life.worker(
        "t1", max_messages=UNREAD + len(idle), reclaim_idle=600.0, prefetch_max=4, **kind
    )
    ids: list[str] = []

    def work(message: Message) -> None:
        ids.append(message.id)

    assert life.run(worker, work) == ExitCode.RECYCLE
    assert len(ids) == UNREAD + 2
    first, between = map(ids.index, idle)
    assert first < between  # a lane's thread may start after that of a later message
    assert 4 < between < UNREAD, "it was read during the scan"
    assert (slot.counter("reclaimed"), slot.reclaim_done) == (2, 1)
    held = harness.do("XPENDING", harness.stream, group)
    assert held[3] == [[b"someone", str(FRESH - 2).encode()]]
