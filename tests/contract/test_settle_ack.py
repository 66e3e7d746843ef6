"""settle_ack: in-flight -> settled."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import leases, messages
from streamqd.store.scripts import Call
from tests.contract.desk import TTL, Desk, Stream


def ack(desk: Desk, places: list[bytes], charged: list[bytes] | None = None) -> Call:
    return messages.ack(desk.keys, desk.leased("t1"), places, charged or [])


def test_settle_ack_acknowledges_in_both_streams(desk: Desk) -> None:
    main = desk.pending("1-0", "2-0")
    retried = desk.pending_retry("1-0", "2-0")
    desk.own("t1")
    before = desk.state()
    assert desk.expect("settle_ack", "OK", ack(desk, [main[0], retried[1]])) == [2]
    assert desk.changes(before) == {
        "stream": Stream(before["stream"].entries, {"hits": ("2-0", {"2-0": "w"})}),
        "retry": Stream(before["retry"].entries, {"hits": ("2-0", {"1-0": "w"})}),
    }


def test_equal_ids_of_the_two_streams_are_two_entries(desk: Desk) -> None:
    """T6."""
    desk.pending("1-0")
    desk.pending_retry("1-0")
    desk.own("t1")
    assert desk.expect("settle_ack", "OK", ack(desk, [b"r:1-0"])) == [1]
    assert desk.state()["stream"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert desk.state()["retry"].groups["hits"] == ("1-0", {})


def test_settle_ack_repeated_acknowledges_nothing(desk: Desk) -> None:
    main = desk.pending("1-0", "2-0")
    desk.own("t1")
    call = ack(desk, [main[0]], charged=[main[1]])
    assert desk.expect("settle_ack", "OK", call) == [2]
    before = desk.dump()
    assert desk.expect("settle_ack", "OK", call) == [0]
    assert desk.dump() == before


def test_settle_ack_deletes_counters_of_charged_entries(desk: Desk) -> None:
    main = desk.pending("1-0", "2-0", "3-0")
    desk.own("t1")
    for place in ("m:1-0", "m:2-0", "r:1-0"):
        desk.do("HSET", desk.attempts, f"{place}:c", 1, f"{place}:f", 2, f"{place}:last", "x")
    call = ack(desk, main, charged=main[:1])
    assert call.argv[3] == desk.attempts
    assert desk.expect("settle_ack", "OK", call) == [3]
    left = {f"{place}:{what}" for place in ("m:2-0", "r:1-0") for what in ("c", "f", "last")}
    assert set(desk.state()["attempts"]) == left


def test_without_counters_the_attempts_key_is_not_named(desk: Desk) -> None:
    """While its slot moves, a missing key causes TRYAGAIN."""
    call = ack(desk, [b"m:1-0"])
    assert desk.attempts not in call.argv
    assert call.argv[3] == call.argv[0] == desk.fence


def test_settle_ack_without_the_group_acknowledges_nothing(desk: Desk) -> None:
    desk.own("t1")
    assert desk.expect("settle_ack", "OK", ack(desk, [b"m:1-0", b"r:1-0"])) == [0]


def test_settle_ack_takes_all_entries_of_a_worker(desk: Desk) -> None:
    desk.groups()
    desk.own("t1")
    main = desk.pending(*(f"{n}-0" for n in range(1, 257)))
    retried = desk.pending_retry(*(f"{n}-0" for n in range(1, 257)))
    assert desk.expect("settle_ack", "OK", ack(desk, [*main, *retried])) == [512]
    with pytest.raises(ContractError):
        ack(desk, [*main, *retried, b"m:999-0"])


def test_settle_ack_refuses_another_token(desk: Desk) -> None:
    main = desk.pending("1-0")
    desk.own("t1")
    desk.do("HSET", desk.attempts, "m:1-0:c", 1)
    desk.link.run(leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", []))
    desk.expect("settle_ack", "FENCED", ack(desk, [], charged=main))


def test_settle_ack_refuses_a_released_unit(desk: Desk) -> None:
    main = desk.pending("1-0")
    desk.own("t1")
    desk.link.run(leases.release(desk.keys, desk.leased("t1")))
    desk.expect("settle_ack", "FENCED", ack(desk, main))


@pytest.mark.parametrize("bad", [b"1-0", b"m:1", b"x:1-0", b"m:1-0 ", b"", b"m:-", b"m:1-0\n"])
def test_settle_ack_refuses_an_invalid_place(desk: Desk, bad: bytes) -> None:
    desk.pending("1-0")
    desk.own("t1")
    error = desk.expect_error("ERR", ack(desk, [b"m:1-0", bad]))
    assert "not a place" in str(error)
