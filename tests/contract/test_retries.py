"""retry_page, retry_hasten, retry_cancel: pages of delayed retries, and changes to them."""

from __future__ import annotations

import random

import pytest

from streamqd.errors import ContractError
from streamqd.store import messages, retries
from tests.contract.desk import Desk

CONTEXT = {b"reason": b"cancelled", b"group": b"hits", b"originalId": b"1-0"}


def set_aside(desk: Desk, *ids: str, delay: float = 60.0) -> None:
    """Let entries of the partition fail, as a worker does."""
    desk.pending(*ids)
    if not desk.do("EXISTS", desk.lease):
        desk.own("t1")
    items = [
        (f"m:{each}".encode(), delay, {b"originalId": each.encode(), b"retryCount": b"2"})
        for each in ids
    ]
    desk.expect("settle_retry", "OK", messages.retry(desk.keys, desk.leased("t1"), items))


def page(desk: Desk, after: tuple[int, str] = (0, ""), count: int = 10) -> list[retries.Delayed]:
    call = retries.page(desk.keys, desk.unit, after, count)
    before = desk.dump()
    found, _ = retries.rows(desk.link.run(call))
    assert desk.dump() == before
    return found


def test_retry_page_lists_retries_without_payload(desk: Desk) -> None:
    set_aside(desk, "1-0")
    assert desk.expect("retry_page", "OK", retries.page(desk.keys, desk.unit, (0, ""), 10))
    [row] = page(desk)
    assert row.place == "m:1-0"
    assert row.due_unix_ms == int(desk.do("ZSCORE", desk.delayed, "m:1-0"))
    assert row.payload_bytes == len("body of 1-0")
    assert row.fields == {b"originalId": b"1-0", b"retryCount": b"2"}


def test_retry_page_lists_an_unreadable_item(desk: Desk) -> None:
    desk.do("ZADD", desk.delayed, 5, "m:1-0", 6, "m:2-0")
    desk.do("HSET", desk.items, "m:1-0", b"\xff\xff")
    assert [(row.place, row.payload_bytes, row.fields) for row in page(desk)] == [
        ("m:1-0", -1, {}),
        ("m:2-0", -1, {}),
    ]


@pytest.mark.parametrize("vanish", [False, True], ids=["stays", "goes"])
def test_retry_pages_neither_skip_nor_repeat(desk: Desk, vanish: bool) -> None:
    """Also if many are due at once, and if the last row of a page has been removed since."""
    chance = random.Random(5)
    wanted = sorted((chance.choice((7, 8, 9)), f"m:{number}-0") for number in range(200))
    for due, place in wanted:
        desk.do("ZADD", desk.delayed, due, place)
    seen: list[tuple[int, str]] = []
    after = (0, "")
    while rows := page(desk, after, 7):
        seen += [(row.due_unix_ms, row.place) for row in rows]
        after = seen[-1]
        if vanish:
            desk.do("ZREM", desk.delayed, after[1])
    assert seen == wanted


def test_retry_calls_are_bounded(desk: Desk) -> None:
    with pytest.raises(ContractError, match="257"):
        retries.page(desk.keys, desk.unit, (0, ""), 257)
    with pytest.raises(ContractError, match="0 retries"):
        retries.hasten(desk.keys, desk.unit, [])


def test_retry_hasten_makes_retries_due_now(desk: Desk) -> None:
    set_aside(desk, "1-0", "2-0")
    later = desk.state()["delayed"]["m:2-0"]

    with desk.instant() as now:
        call = retries.hasten(desk.keys, desk.unit, ["m:1-0", "m:9-9"])
        assert desk.expect("retry_hasten", "OK", call) == [1, 1]

    assert desk.state()["delayed"] == {"m:1-0": now, "m:2-0": later}
    desk.expect("message_promote", "OK", messages.promote_retries(desk.keys, desk.unit, 10))
    assert desk.state()["delayed"] == {"m:2-0": later}
    assert len(desk.fetch(stream=desk.retry)) == 1


def test_retry_hasten_keeps_a_due_retry_in_place(desk: Desk) -> None:
    desk.do("ZADD", desk.delayed, 5, "m:1-0")
    before = desk.dump()
    call = retries.hasten(desk.keys, desk.unit, ["m:1-0"])
    assert desk.expect("retry_hasten", "OK", call) == [1, 0]
    assert desk.dump() == before


def test_retry_cancel_writes_dead_letters(desk: Desk) -> None:
    set_aside(desk, "1-0", "2-0")

    with desk.instant() as now:
        call = retries.cancel(desk.keys, desk.unit, [("m:1-0", CONTEXT)], drop=False)
        settled = desk.expect_entries("retry_cancel", ["MOVED"], call)

    state = desk.state()
    assert state["delayed"].keys() == state["items"].keys() == {"m:2-0"}
    [(letter_id, letter)] = state["dlq"].entries.items()
    assert [letter_id.encode()] == settled.letters
    assert now == letter.pop("failedAt")
    assert letter == {
        "payload": b"body of 1-0",
        "originalId": b"1-0",
        "retryCount": b"2",
        "reason": b"cancelled",
        "group": b"hits",
    }


def test_retry_cancel_repeated_writes_one_dead_letter(desk: Desk) -> None:
    set_aside(desk, "1-0")
    call = retries.cancel(desk.keys, desk.unit, [("m:1-0", CONTEXT)] * 2, drop=False)
    desk.expect_entries("retry_cancel", ["MOVED", "GONE"], call)
    desk.expect_entries("retry_cancel", ["GONE", "GONE"], call)
    assert len(desk.state()["dlq"].entries) == 1


def test_retry_cancel_with_drop_deletes_retries(desk: Desk) -> None:
    set_aside(desk, "1-0")
    call = retries.cancel(desk.keys, desk.unit, [("m:1-0", {})], drop=True)
    desk.expect_entries("retry_cancel", ["MOVED"], call)
    assert {"delayed", "items", "dlq"}.isdisjoint(desk.state())


@pytest.mark.parametrize("packed", [b"\xff\xff", b"\xa1x", b"\x91\xa1x", None])
def test_retry_cancel_keeps_unreadable_items_unless_dropped(
    desk: Desk, packed: bytes | None
) -> None:
    desk.do("ZADD", desk.delayed, 5, "m:1-0")
    if packed is not None:
        desk.do("HSET", desk.items, "m:1-0", packed)
    call = retries.cancel(desk.keys, desk.unit, [("m:1-0", CONTEXT)], drop=False)
    desk.expect_entries("retry_cancel", ["UNREADABLE"], call)
    call = retries.cancel(desk.keys, desk.unit, [("m:1-0", {})], drop=True)
    desk.expect_entries("retry_cancel", ["MOVED"], call)
    assert {"delayed", "items"}.isdisjoint(desk.state())
