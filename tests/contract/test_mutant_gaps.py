"""Promises of the scripts that need more messages, or more groups, than the other tests have."""

from __future__ import annotations

from streamqd.store import leases, messages
from tests.contract.desk import TTL, Desk

WHY = {b"group": b"hits", b"reason": b"attempts"}


def test_dead_letters_are_never_trimmed(desk: Desk) -> None:
    """T9: only a purge or a replay removes one."""
    desk.groups()
    desk.own("t1")
    total, batch = 2560, 256
    for first in range(0, total, batch):
        numbers = range(first + 1, first + batch + 1)
        adds = [("XADD", desk.stream, f"{number}-0", "payload", "x") for number in numbers]
        desk.link.pipeline(adds)
        ids = desk.fetch(batch)
        items = [(b"m:" + entry_id, WHY) for entry_id in ids]
        call = messages.dead(desk.keys, desk.leased("t1"), items)
        desk.link.run(call)
    assert desk.do("XLEN", desk.dlq) == total


def test_death_charges_one_of_many_pending_messages(desk: Desk) -> None:
    places = desk.pending("1-0", "2-0", "3-0")
    retried = desk.pending_retry("1-0")
    desk.own("t1")
    call = leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, places[1], b"{}", retried)
    desk.expect("lease_refence", "OK", call)
    assert desk.state()["attempts"] == {"m:2-0:c": b"1", "m:2-0:last": b"{}"}
