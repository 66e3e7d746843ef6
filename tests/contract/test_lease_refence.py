"""lease_refence: held -> held by the successor of a child that has exited."""

from __future__ import annotations

import pytest

from streamqd.errors import ContractError
from streamqd.model import ENTRIES_MAX
from streamqd.store import leases
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import OWNER, TTL, Harness, Stream
from tests.contract.lease_answers import Holder, Refenced


def refence(
    harness: Harness,
    old: str = "t1",
    new: str = "t2",
    charged: bytes | None = None,
    context: bytes = b"",
    done: list[bytes] | None = None,
) -> Call:
    return leases.refence(harness.keys, harness.leased(old), new, TTL, charged, context, done or [])


def test_lease_refence_replaces_the_token_and_the_lease(harness: Harness) -> None:
    epoch = harness.own("t1")
    harness.do("HSET", harness.fence, "mark", "m:1-0", "session", "s1", "quarantine", "1")
    before = harness.state()
    with harness.instant() as now:
        rest = harness.expect("lease_refence", "OK", refence(harness))
    refenced = Refenced.parse(Reply("OK", rest))
    assert refenced.epoch > epoch
    assert refenced.crashes == 0
    number = rest[0]
    changed = harness.changes(before)
    assert now == changed["fence"].pop("since")
    assert changed == {
        "fence": {"token": b"t2", "epoch": number, "owner": OWNER.encode(), "quarantine": b"1"},
        "lease": b"t2",
    }


@pytest.mark.fault("F2")
def test_lease_refence_acknowledges_and_charges_in_one_step(harness: Harness) -> None:
    """In one step, finished entries are acknowledged, and the running one is charged once."""
    main = harness.pending("1-0", "2-0", "3-0")
    retried = harness.pending_retry("1-0", "2-0")
    harness.own("t1")
    harness.do("HSET", harness.attempts, "m:1-0:c", "1", "m:1-0:f", "2", "m:1-0:last", "x")
    harness.do("HSET", harness.attempts, "m:2-0:c", "1")
    before = harness.state()
    context = b"signal 9 \x00\xff"
    call = refence(harness, charged=main[1], context=context, done=[main[0], retried[1]])
    rest = harness.expect("lease_refence", "OK", call)
    assert Refenced.parse(Reply("OK", rest)).crashes == 2
    changed = harness.changes(before)
    assert sorted(changed) == ["attempts", "fence", "lease", "retry", "stream"]
    assert changed["attempts"] == {"m:2-0:c": b"2", "m:2-0:last": context}
    waiting = {"2-0": "w", "3-0": "w"}
    assert changed["stream"] == Stream(before["stream"].entries, {"hits": ("3-0", waiting)})
    assert changed["retry"] == Stream(before["retry"].entries, {"hits": ("2-0", {"1-0": "w"})})


@pytest.mark.fault("F12")
def test_lease_refence_repeated_changes_nothing(harness: Harness) -> None:
    main = harness.pending("1-0", "2-0")
    harness.own("t1")
    call = refence(harness, charged=main[1], context=b"signal 9", done=[main[0]])
    rest = harness.expect("lease_refence", "OK", call)
    before = harness.dump()
    assert harness.expect("lease_refence", "OK", call) == rest
    assert harness.dump() == before


def test_lease_refence_does_not_charge_settled_entries(harness: Harness) -> None:
    main = harness.pending("1-0")
    harness.own("t1")
    harness.do("XACK", harness.stream, harness.assignment.group, "1-0")
    call = refence(harness, charged=main[0], context=b"signal 9")
    assert harness.expect("lease_refence", "OK", call)[1] == 0
    assert "attempts" not in harness.state()


def test_lease_refence_works_without_the_group(harness: Harness) -> None:
    """If a stream or group was deleted, the assignment still gets its next worker."""
    harness.own("t1")
    call = refence(harness, charged=b"m:1-0", context=b"signal 9", done=[b"m:2-0", b"r:2-0"])
    assert harness.expect("lease_refence", "OK", call)[1] == 0
    assert sorted(harness.state()) == ["fence", "lease"]


def test_lease_refence_restores_an_expired_lease(harness: Harness) -> None:
    harness.own("t1")
    harness.do("DEL", harness.lease)
    harness.expect("lease_refence", "OK", refence(harness))
    assert harness.state()["lease"] == b"t2"
    assert 0 < harness.do("PTTL", harness.lease) <= TTL * 1000


def test_lease_refence_refuses_a_third_token(harness: Harness) -> None:
    main = harness.pending("1-0")
    epoch = harness.own("t9", owner="east-1")
    call = refence(harness, charged=main[0], context=b"signal 9", done=main)
    rest = harness.expect("lease_refence", "FENCED", call)
    assert Holder.parse(Reply("FENCED", rest)) == (epoch, "east-1")


def test_lease_refence_refuses_a_released_assignment(harness: Harness) -> None:
    epoch = harness.own("t1")
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    assert harness.expect("lease_refence", "FENCED", refence(harness)) == [str(epoch).encode(), b""]


def test_lease_refence_accepts_many_places(harness: Harness) -> None:
    main = harness.pending(*(f"{n}-0" for n in range(1, 513)))
    harness.own("t1")
    harness.expect("lease_refence", "OK", refence(harness, done=main))
    assert harness.state()["stream"].groups == {"hits": ("512-0", {})}


@pytest.mark.parametrize("others", [0, 1, 600])
def test_lease_refence_deletes_counters_of_done_entries_only(harness: Harness, others: int) -> None:
    """Only the counters of finished entries are deleted.

    Small and large hashes are covered, because a traversal differs between them.
    """
    main = harness.pending(*(f"{n}-0" for n in range(1, 513)))
    harness.own("t1")
    for place in main[:200]:
        for kind in ("c", "f", "due", "last"):
            harness.do("HSET", harness.attempts, place + f":{kind}".encode(), "1")
    kept = {f"m:{n}-9:c": b"2" for n in range(1, others + 1)}
    for field, value in kept.items():
        harness.do("HSET", harness.attempts, field, value)
    harness.expect("lease_refence", "OK", refence(harness, done=main))
    assert harness.state().get("attempts") == (kept or None)


def test_lease_refence_finds_few_counters_for_many_places(harness: Harness) -> None:
    main = harness.pending(*(f"{n}-0" for n in range(1, 513)))
    harness.own("t1")
    for field in (b"m:512-0:f", b"m:1-0:last", b"m:600-0:c"):
        harness.do("HSET", harness.attempts, field, "1")
    harness.expect("lease_refence", "OK", refence(harness, done=main))
    assert harness.state()["attempts"] == {"m:600-0:c": b"1"}


def test_lease_refence_refuses_an_invalid_place(harness: Harness) -> None:
    harness.pending("1-0")
    harness.own("t1")
    assert "not a place" in str(
        harness.expect_error("ERR", refence(harness, done=[b"m:1-0", b"1-0"]))
    )
    assert "not a place" in str(harness.expect_error("ERR", refence(harness, charged=b"x:1-0")))


def test_lease_refence_acknowledges_a_full_table_in_one_call(harness: Harness) -> None:
    """One call acknowledges as many entries as one worker can hold, including their counters."""
    ids = [f"{number}-0" for number in range(1, ENTRIES_MAX + 1)]
    done = harness.pending(*ids)
    harness.own("t1")
    for at in range(0, ENTRIES_MAX, 2):
        harness.do("HSET", harness.attempts, f"m:{ids[at]}:c", "1", f"m:{ids[at]}:f", "2")
    harness.expect("lease_refence", "OK", refence(harness, done=done))
    assert harness.do("XPENDING", harness.stream, harness.assignment.group)[0] == 0
    assert harness.do("EXISTS", harness.attempts) == 0


def test_lease_refence_bounds_the_number_of_places(harness: Harness) -> None:
    with pytest.raises(ContractError, match=f"{ENTRIES_MAX + 1} places"):
        refence(harness, done=[b"m:1-0"] * (ENTRIES_MAX + 1))
