"""retry_page, retry_make_due, retry_cancel: pages of waiting retries, and changes to them."""

from __future__ import annotations

import random

import pytest

from streamqd.errors import ContractError
from streamqd.store import messages, retries
from tests.contract.harness import Harness

CONTEXT = {b"reason": b"canceled", b"group": b"hits", b"originalId": b"1-0"}


def delay_retries(harness: Harness, *ids: str, delay: float = 60.0) -> None:
    """Let entries of the partition fail in the same way as a worker."""
    harness.pending(*ids)
    if not harness.do("EXISTS", harness.lease):
        harness.own("t1")
    items = [
        (f"m:{each}".encode(), delay, {b"originalId": each.encode(), b"retryCount": b"2"})
        for each in ids
    ]
    harness.expect("settle_retry", "OK", messages.retry(harness.keys, harness.leased("t1"), items))


def page(
    harness: Harness, after: tuple[int, str] = (0, ""), count: int = 10
) -> list[retries.Delayed]:
    call = retries.page(harness.keys, harness.assignment, after, count)
    before = harness.dump()
    found, _ = retries.rows(harness.link.run(call))
    assert harness.dump() == before
    return found


def test_retry_page_lists_retries_without_payload(harness: Harness) -> None:
    delay_retries(harness, "1-0")
    assert harness.expect(
        "retry_page", "OK", retries.page(harness.keys, harness.assignment, (0, ""), 10)
    )
    [row] = page(harness)
    assert row.place == "m:1-0"
    assert row.due_unix_ms == int(harness.do("ZSCORE", harness.delayed, "m:1-0"))
    assert row.payload_bytes == len("body of 1-0")
    assert row.fields == {b"originalId": b"1-0", b"retryCount": b"2"}


def test_retry_page_lists_an_unreadable_item(harness: Harness) -> None:
    harness.do("ZADD", harness.delayed, 5, "m:1-0", 6, "m:2-0")
    harness.do("HSET", harness.items, "m:1-0", b"\xff\xff")
    assert [(row.place, row.payload_bytes, row.fields) for row in page(harness)] == [
        ("m:1-0", -1, {}),
        ("m:2-0", -1, {}),
    ]


@pytest.mark.parametrize("vanish", [False, True], ids=["stays", "goes"])
def test_retry_pages_neither_skip_nor_repeat(harness: Harness, vanish: bool) -> None:
    """No row is skipped or repeated.

    Many are due at the same time, and the last row of a page may have been removed since.
    """
    chance = random.Random(5)
    wanted = sorted((chance.choice((7, 8, 9)), f"m:{number}-0") for number in range(200))
    for due, place in wanted:
        harness.do("ZADD", harness.delayed, due, place)
    seen: list[tuple[int, str]] = []
    after = (0, "")
    while rows := page(harness, after, 7):
        seen += [(row.due_unix_ms, row.place) for row in rows]
        after = seen[-1]
        if vanish:
            harness.do("ZREM", harness.delayed, after[1])
    assert seen == wanted


def test_retry_calls_refuse_too_many_or_no_items(harness: Harness) -> None:
    with pytest.raises(ContractError, match="257"):
        retries.page(harness.keys, harness.assignment, (0, ""), 257)
    with pytest.raises(ContractError, match="0 retries"):
        retries.make_due(harness.keys, harness.assignment, [])


def test_retry_make_due_makes_retries_due_now(harness: Harness) -> None:
    delay_retries(harness, "1-0", "2-0")
    later = harness.state()["delayed"]["m:2-0"]

    with harness.instant() as now:
        call = retries.make_due(harness.keys, harness.assignment, ["m:1-0", "m:9-9"])
        assert harness.expect("retry_make_due", "OK", call) == [1, 1]

    assert harness.state()["delayed"] == {"m:1-0": now, "m:2-0": later}
    harness.expect(
        "message_promote", "OK", messages.promote_retries(harness.keys, harness.assignment, 10)
    )
    assert harness.state()["delayed"] == {"m:2-0": later}
    assert len(harness.fetch(stream=harness.retry)) == 1


def test_retry_make_due_keeps_the_time_of_a_due_retry(harness: Harness) -> None:
    harness.do("ZADD", harness.delayed, 5, "m:1-0")
    before = harness.dump()
    call = retries.make_due(harness.keys, harness.assignment, ["m:1-0"])
    assert harness.expect("retry_make_due", "OK", call) == [1, 0]
    assert harness.dump() == before


def test_retry_cancel_writes_dead_letters(harness: Harness) -> None:
    delay_retries(harness, "1-0", "2-0")

    with harness.instant() as now:
        call = retries.cancel(harness.keys, harness.assignment, [("m:1-0", CONTEXT)], drop=False)
        settled = harness.expect_entries("retry_cancel", ["MOVED"], call)

    state = harness.state()
    assert state["delayed"].keys() == state["items"].keys() == {"m:2-0"}
    [(dead_letter_id, letter)] = state["dlq"].entries.items()
    assert [dead_letter_id.encode()] == settled.dead_letters
    assert now == letter.pop("failedAt")
    assert letter == {
        "payload": b"body of 1-0",
        "originalId": b"1-0",
        "retryCount": b"2",
        "reason": b"canceled",
        "group": b"hits",
    }


def test_retry_cancel_repeated_writes_one_dead_letter(harness: Harness) -> None:
    delay_retries(harness, "1-0")
    call = retries.cancel(harness.keys, harness.assignment, [("m:1-0", CONTEXT)] * 2, drop=False)
    harness.expect_entries("retry_cancel", ["MOVED", "GONE"], call)
    harness.expect_entries("retry_cancel", ["GONE", "GONE"], call)
    assert len(harness.state()["dlq"].entries) == 1


def test_retry_cancel_with_drop_deletes_retries(harness: Harness) -> None:
    delay_retries(harness, "1-0")
    call = retries.cancel(harness.keys, harness.assignment, [("m:1-0", {})], drop=True)
    harness.expect_entries("retry_cancel", ["MOVED"], call)
    assert {"delayed", "items", "dlq"}.isdisjoint(harness.state())


@pytest.mark.parametrize("packed", [b"\xff\xff", b"\xa1x", b"\x91\xa1x", None])
def test_retry_cancel_keeps_unreadable_items_unless_dropped(
    harness: Harness, packed: bytes | None
) -> None:
    harness.do("ZADD", harness.delayed, 5, "m:1-0")
    if packed is not None:
        harness.do("HSET", harness.items, "m:1-0", packed)
    call = retries.cancel(harness.keys, harness.assignment, [("m:1-0", CONTEXT)], drop=False)
    harness.expect_entries("retry_cancel", ["UNREADABLE"], call)
    call = retries.cancel(harness.keys, harness.assignment, [("m:1-0", {})], drop=True)
    harness.expect_entries("retry_cancel", ["MOVED"], call)
    assert {"delayed", "items"}.isdisjoint(harness.state())
