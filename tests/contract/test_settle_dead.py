"""settle_dead: in-flight -> dead."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.model import Lease
from streamqd.store import leases, messages
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call
from tests.contract.harness import ASSIGNMENT, TTL, Harness, Stream

WHY = {b"originalId": b"1-0", b"group": b"hits", b"reason": b"attempts", b"errorClass": b"E"}
WHY_TEXT = {name.decode(): value for name, value in WHY.items()}


def dead(
    harness: Harness, *items: tuple[bytes, dict[bytes, bytes]], adjacent: bool = False
) -> Call:
    return messages.dead(harness.keys, harness.leased("t1"), items, adjacent=adjacent)


def test_settle_dead_writes_a_dead_letter(harness: Harness) -> None:
    harness.groups()
    harness.add("1-0", "payload", b"\x00\xff\r\n", "key", "k", "reason", "forged", "failedAt", "0")
    harness.fetch()
    harness.own("t1")
    harness.do("HSET", harness.attempts, "m:1-0:c", 3, "m:1-0:last", "x")
    before = harness.state()
    with harness.instant() as now:
        settled = harness.expect_entries("settle_dead", ["MOVED"], dead(harness, (b"m:1-0", WHY)))
    changed = harness.changes(before)
    dead_letter_id = settled.dead_letters[0].decode()
    letter = changed["dlq"].entries[dead_letter_id]
    assert now == letter.pop("failedAt")
    assert changed == {
        "attempts": None,
        "dlq": Stream({dead_letter_id: {"payload": b"\x00\xff\r\n", "key": b"k", **WHY_TEXT}}, {}),
        "stream": Stream(before["stream"].entries, {"hits": ("1-0", {})}),
    }


def test_settle_dead_takes_entries_of_both_streams(harness: Harness) -> None:
    """Entries with the same ID in the two streams become two dead letters."""
    harness.pending("1-0", "2-0")
    harness.pending_retry("1-0")
    harness.own("t1")
    items = [(b"m:1-0", WHY), (b"m:9-0", WHY), (b"r:1-0", WHY)]
    settled = harness.expect_entries(
        "settle_dead", ["MOVED", "GONE", "MOVED"], dead(harness, *items)
    )
    letters = harness.state()["dlq"].entries
    assert [letters[letter.decode()]["payload"] for letter in settled.dead_letters if letter] == [
        b"body of 1-0",
        b"body of 1-0",
    ]
    assert settled.dead_letters[1] == b""
    assert len(letters) == 2


def test_settle_dead_batch_equals_single_calls(harness: Harness) -> None:
    """A batch has the result of single calls.

    It sends common values once, and finds adjacent entries together.
    """
    ids = ("1-0", "2-0", "3-0")
    whys = [
        {b"originalId": each.encode(), b"group": b"hits", b"errorMessage": f"no {each}".encode()}
        for each in ids
    ]
    letters = []
    for together in (False, True):
        harness.do("FLUSHALL")
        harness.groups()
        for each in ids:
            harness.add(each, "payload", f"body of {each}", "group", "forged", "key", each)
        harness.fetch()
        harness.own("t1")
        items = [(f"m:{each}".encode(), why) for each, why in zip(ids, whys, strict=True)]
        for part in [items] if together else [[item] for item in items]:
            harness.link.run(dead(harness, *part, adjacent=together))
        found = [list(letter.items()) for letter in harness.state()["dlq"].entries.values()]
        assert [fields.pop(0)[0] for fields in found] == ["failedAt"] * 3
        letters.append(found)
    assert letters[0] == letters[1]
    assert [name for name, _ in letters[0][0]] == [
        *("payload", "key", "originalId", "group", "errorMessage")
    ]


def test_settle_dead_repeated_changes_nothing(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    call = dead(harness, (b"m:1-0", WHY))
    harness.expect_entries("settle_dead", ["MOVED"], call)
    assert harness.expect_entries("settle_dead", ["GONE"], call).dead_letters == [b""]


def test_settle_dead_ignores_a_duplicate_place(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    item = (b"m:1-0", WHY)
    harness.expect_entries("settle_dead", ["MOVED", "GONE"], dead(harness, item, item))
    assert len(harness.state()["dlq"].entries) == 1


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_settle_dead_uses_the_workers_fields_without_a_body(harness: Harness, how: str) -> None:
    harness.pending("1-0", "2-0")
    if how == "trimmed":
        harness.do("XTRIM", harness.stream, "MINID", "2-0")
    else:
        harness.do("XDEL", harness.stream, "1-0")
    harness.own("t1")
    harness.expect_entries("settle_dead", ["MISSING"], dead(harness, (b"m:1-0", WHY)))
    whole = dead(harness, (b"m:1-0", {b"payload": b"kept", **WHY}))
    dead_letter_id = (
        harness.expect_entries("settle_dead", ["MOVED"], whole).dead_letters[0].decode()
    )
    letter = harness.state()["dlq"].entries[dead_letter_id]
    del letter["failedAt"]
    assert letter == {"payload": b"kept", **WHY_TEXT}


def test_settle_dead_failing_midway_keeps_each_entry_once(
    harness: Harness,
) -> None:
    """A dead-letter stream at the last possible ID takes one more entry instead of two.

    Each entry is still there once.
    """
    harness.pending("1-0", "2-0")
    harness.own("t1")
    harness.add("18446744073709551615-18446744073709551614", stream=harness.dlq)
    call = dead(harness, (b"m:1-0", WHY), (b"m:2-0", WHY))
    with pytest.raises(Exception, match="exhausted"):
        harness.link.run(call)
    state = harness.state()
    assert len(state["dlq"].entries) == 2
    assert state["stream"].groups["hits"] == ("2-0", {"2-0": "w"})


def test_settle_dead_refuses_another_token(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    harness.expect("settle_dead", "FENCED", dead(harness, (b"m:1-0", WHY)))


def test_settle_dead_refuses_an_invalid_place(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    assert "not a place" in str(
        harness.expect_error("ERR", dead(harness, (b"m:1-0", WHY), (b"x:1-0", WHY)))
    )


def test_settle_dead_refuses_too_many_items() -> None:
    with pytest.raises(ContractError, match="257"):
        messages.dead(Keys(), Lease(ASSIGNMENT, "t1"), [(b"m:1-0", WHY)] * 257)
