"""Promises of the scripts for which other tests have too few messages or groups."""

from __future__ import annotations

from streamqd.store import leases, messages
from tests.contract.harness import TTL, Harness

WHY = {b"group": b"hits", b"reason": b"attempts"}


def test_stream_trim_never_trims_dead_letters(harness: Harness) -> None:
    """Trimming never removes a dead letter, because only a purge or a replay may do that."""
    harness.groups()
    harness.own("t1")
    total, batch = 2560, 256
    for first in range(0, total, batch):
        numbers = range(first + 1, first + batch + 1)
        adds = [("XADD", harness.stream, f"{number}-0", "payload", "x") for number in numbers]
        harness.link.pipeline(adds)
        ids = harness.fetch(batch)
        items = [(b"m:" + entry_id, WHY) for entry_id in ids]
        call = messages.dead(harness.keys, harness.leased("t1"), items)
        harness.link.run(call)
    assert harness.do("XLEN", harness.dlq) == total


def test_lease_refence_charges_one_of_many_pending(harness: Harness) -> None:
    places = harness.pending("1-0", "2-0", "3-0")
    retried = harness.pending_retry("1-0")
    harness.own("t1")
    call = leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, places[1], b"{}", retried)
    harness.expect("lease_refence", "OK", call)
    assert harness.state()["attempts"] == {"m:2-0:c": b"1", "m:2-0:last": b"{}"}
