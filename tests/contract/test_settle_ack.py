"""settle_ack: in-flight -> settled."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.store import leases, messages
from streamqd.store.scripts import Call
from tests.contract.harness import TTL, Harness, Stream


def ack(harness: Harness, places: list[bytes], charged: list[bytes] | None = None) -> Call:
    return messages.ack(harness.keys, harness.leased("t1"), places, charged or [])


def test_settle_ack_acknowledges_in_both_streams(harness: Harness) -> None:
    main = harness.pending("1-0", "2-0")
    retried = harness.pending_retry("1-0", "2-0")
    harness.own("t1")
    before = harness.state()
    assert harness.expect("settle_ack", "OK", ack(harness, [main[0], retried[1]])) == [2]
    assert harness.changes(before) == {
        "stream": Stream(before["stream"].entries, {"hits": ("2-0", {"2-0": "w"})}),
        "retry": Stream(before["retry"].entries, {"hits": ("2-0", {"1-0": "w"})}),
    }


def test_settle_ack_distinguishes_equal_ids_of_two_streams(harness: Harness) -> None:
    harness.pending("1-0")
    harness.pending_retry("1-0")
    harness.own("t1")
    assert harness.expect("settle_ack", "OK", ack(harness, [b"r:1-0"])) == [1]
    assert harness.state()["stream"].groups["hits"] == ("1-0", {"1-0": "w"})
    assert harness.state()["retry"].groups["hits"] == ("1-0", {})


def test_settle_ack_repeated_acknowledges_nothing(harness: Harness) -> None:
    main = harness.pending("1-0", "2-0")
    harness.own("t1")
    call = ack(harness, [main[0]], charged=[main[1]])
    assert harness.expect("settle_ack", "OK", call) == [2]
    before = harness.dump()
    assert harness.expect("settle_ack", "OK", call) == [0]
    assert harness.dump() == before


def test_settle_ack_deletes_counters_of_charged_entries(harness: Harness) -> None:
    main = harness.pending("1-0", "2-0", "3-0")
    harness.own("t1")
    for place in ("m:1-0", "m:2-0", "r:1-0"):
        harness.do("HSET", harness.attempts, f"{place}:c", 1, f"{place}:f", 2, f"{place}:last", "x")
    call = ack(harness, main, charged=main[:1])
    assert call.argv[3] == harness.attempts
    assert harness.expect("settle_ack", "OK", call) == [3]
    left = {f"{place}:{what}" for place in ("m:2-0", "r:1-0") for what in ("c", "f", "last")}
    assert set(harness.state()["attempts"]) == left


def test_settle_ack_without_counters_names_no_attempts_key(harness: Harness) -> None:
    """Without counters, the call does not name their key.

    While its slot moves, a missing key would cause TRYAGAIN.
    """
    call = ack(harness, [b"m:1-0"])
    assert harness.attempts not in call.argv
    assert call.argv[3] == call.argv[0] == harness.fence


def test_settle_ack_without_the_group_acknowledges_nothing(harness: Harness) -> None:
    harness.own("t1")
    assert harness.expect("settle_ack", "OK", ack(harness, [b"m:1-0", b"r:1-0"])) == [0]


def test_settle_ack_takes_all_entries_of_a_worker(harness: Harness) -> None:
    harness.groups()
    harness.own("t1")
    main = harness.pending(*(f"{n}-0" for n in range(1, 257)))
    retried = harness.pending_retry(*(f"{n}-0" for n in range(1, 257)))
    assert harness.expect("settle_ack", "OK", ack(harness, [*main, *retried])) == [512]
    with pytest.raises(ContractError):
        ack(harness, [*main, *retried, b"m:999-0"])


def test_settle_ack_refuses_another_token(harness: Harness) -> None:
    main = harness.pending("1-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, "m:1-0:c", 1)
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    harness.expect("settle_ack", "FENCED", ack(harness, [], charged=main))


def test_settle_ack_refuses_a_released_assignment(harness: Harness) -> None:
    main = harness.pending("1-0")
    harness.own("t1")
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    harness.expect("settle_ack", "FENCED", ack(harness, main))


@pytest.mark.parametrize("bad", [b"1-0", b"m:1", b"x:1-0", b"m:1-0 ", b"", b"m:-", b"m:1-0\n"])
def test_settle_ack_refuses_an_invalid_place(harness: Harness, bad: bytes) -> None:
    harness.pending("1-0")
    harness.own("t1")
    error = harness.expect_error("ERR", ack(harness, [b"m:1-0", bad]))
    assert "not a place" in str(error)
