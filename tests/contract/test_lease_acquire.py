"""lease_acquire: free -> held."""

from __future__ import annotations

import pytest

from streamqd.model import Assignment
from streamqd.store import leases, messages
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import OWNER, TTL, Harness
from tests.contract.lease_answers import Holder


def acquire(
    harness: Harness, token: str, seen_epoch: int, owner: str = OWNER, dead: str = ""
) -> Call:
    return leases.acquire(harness.keys, harness.leased(token, seen_epoch), TTL, owner, dead)


def lose_owner(harness: Harness, mark: bytes = b"") -> int:
    """Lose the owner without a release, and let its lease expire."""
    epoch = harness.own("old")
    if mark:
        harness.do("HSET", harness.fence, "mark", mark, "session", "s1")
    harness.do("DEL", harness.lease)
    return epoch


def test_lease_acquire_takes_a_new_assignment(harness: Harness) -> None:
    before = harness.state()
    with harness.instant() as now:
        rest = harness.expect("lease_acquire", "OK", acquire(harness, "t1", 0))
    epoch = rest[0]
    assert leases.Acquired.parse(Reply("OK", rest)) == (int(epoch), False, b"")
    assert epoch == now or now == epoch
    fence = {"token": b"t1", "epoch": epoch, "owner": OWNER.encode(), "since": epoch}
    assert harness.changes(before) == {"fence": fence, "lease": b"t1"}
    assert TTL * 1000 - 1000 < harness.do("PTTL", harness.lease) <= TTL * 1000


def test_lease_acquire_after_a_release_raises_the_epoch(harness: Harness) -> None:
    epoch = harness.own("t1")
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    ahead = epoch + 10**9  # a fence that was written before the server's clock was set back
    harness.do("HSET", harness.fence, "epoch", ahead)
    rest = harness.expect("lease_acquire", "OK", acquire(harness, "t2", ahead))
    assert leases.Acquired.parse(Reply("OK", rest)) == (ahead + 1, False, b"")
    assert harness.state()["fence"]["epoch"] == str(ahead + 1).encode()
    assert "quarantine" not in harness.state()["fence"]


def test_lease_acquire_refuses_while_another_lease_is_valid(harness: Harness) -> None:
    epoch = harness.own("t1", owner="east-1")
    rest = harness.expect("lease_acquire", "HELD", acquire(harness, "t2", epoch))
    assert 0 < int(rest[0]) <= TTL * 1000
    assert Holder.parse(Reply("HELD", rest)) == (epoch, "east-1")


def test_lease_acquire_refuses_an_outdated_epoch(harness: Harness) -> None:
    epoch = harness.own("t1")
    harness.link.run(leases.release(harness.keys, harness.leased("t1")))
    rest = harness.expect("lease_acquire", "MOVED", acquire(harness, "t2", 0))
    assert Holder.parse(Reply("MOVED", rest)) == (epoch, "")


def test_lease_acquire_repeated_keeps_the_epoch(harness: Harness) -> None:
    call = acquire(harness, "t1", 0)
    epoch = harness.expect("lease_acquire", "OK", call)[0]
    harness.do("PEXPIRE", harness.lease, 100_000)
    before = harness.state()
    assert harness.expect("lease_acquire", "MINE", call) == [epoch, 0]
    assert harness.changes(before) == {}
    assert harness.do("PTTL", harness.lease) <= TTL * 1000


def test_lease_acquire_repeated_renews_an_expired_lease(harness: Harness) -> None:
    call = acquire(harness, "t1", 0)
    epoch = harness.expect("lease_acquire", "OK", call)[0]
    harness.do("DEL", harness.lease)
    before = harness.state()
    assert harness.expect("lease_acquire", "MINE", call) == [epoch, 0]
    assert harness.changes(before) == {"lease": b"t1"}
    assert 0 < harness.do("PTTL", harness.lease) <= TTL * 1000


def test_lease_acquire_after_a_crash_charges_the_accused_once(harness: Harness) -> None:
    places = harness.pending("1-0", "2-0")
    seen = lose_owner(harness, mark=places[1])
    harness.do("HSET", harness.fence, "accused", places[1])
    before = harness.state()
    call = acquire(harness, "t2", seen, "east-1")
    rest = harness.expect("lease_acquire", "OK", call)
    acquired = leases.Acquired.parse(Reply("OK", rest))
    assert acquired == (acquired.epoch, True, places[1])
    assert acquired.epoch > seen
    number = str(acquired.epoch).encode()
    fence = {"token": b"t2", "epoch": number, "owner": b"east-1", "since": number}
    fence |= {"quarantine": b"1", "accused": places[1]}
    # The clock may show the same time for two epochs. `since` is that time, while the epoch is one
    # more.
    fence["since"] = harness.state()["fence"]["since"]
    assert harness.changes(before) == {
        "fence": fence,
        "lease": b"t2",
        "attempts": {"m:2-0:c": b"3"},
    }
    assert harness.expect("lease_acquire", "MINE", call) == [number, 1]
    assert harness.state()["attempts"] == {"m:2-0:c": b"3"}


def test_lease_acquire_accuses_a_lost_entry_before_charging(harness: Harness) -> None:
    """A lost entry is only accused at first.

    Messages of other partitions may have run at the same time.
    """
    places = harness.pending("1-0", "2-0")
    seen = lose_owner(harness, mark=places[1])
    assert harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))[1:] == [1, b""]
    assert harness.state()["fence"]["accused"] == places[1]
    assert harness.do("EXISTS", harness.attempts) == 0


def test_lease_acquire_accuses_all_members_of_a_lost_round(harness: Harness) -> None:
    places = harness.pending("1-0", "2-0", "3-0")
    seen = lose_owner(harness, mark=places[0] + b" " + places[1])
    assert harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))[1:] == [1, b""]
    state = harness.state()
    assert state["fence"]["accused"] == places[0] + b" " + places[1]
    assert "mark" not in state["fence"]
    assert harness.do("EXISTS", harness.attempts) == 0


@pytest.mark.parametrize(
    ("earlier", "mark", "accused"),
    [
        (b"m:1-0", b"m:2-0 m:3-0", b"m:1-0 m:2-0 m:3-0"),
        (b"m:1-0 m:2-0 m:3-0", b"m:4-0", b"m:1-0 m:2-0 m:3-0 m:4-0"),
        (b"m:1-0 m:2-0", b"m:3-0 m:4-0", b"m:1-0 m:2-0 m:3-0 m:4-0"),
        (b"m:1-0 m:2-0 m:3-0", b"m:4-0 m:5-0", b"m:4-0 m:5-0"),
    ],
    ids=["shorter", "longer-than-one", "as-long", "longer"],
)
def test_lease_acquire_joins_a_second_lost_round_to_the_accused(
    harness: Harness, earlier: bytes, mark: bytes, accused: bytes
) -> None:
    harness.pending(*(f"{n}-0" for n in range(1, 6)))
    seen = lose_owner(harness, mark=mark)
    harness.do("HSET", harness.fence, "accused", earlier)
    assert harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))[1:] == [1, b""]
    assert harness.state()["fence"]["accused"] == accused
    assert harness.do("EXISTS", harness.attempts) == 0


@pytest.mark.parametrize("mark", [b"", b"m:1-0", b"m:0-0"], ids=["none", "accused", "nobody"])
def test_lease_acquire_keeps_the_accused_after_another_loss(harness: Harness, mark: bytes) -> None:
    harness.pending("1-0", "2-0", "3-0")
    seen = lose_owner(harness, mark=mark)
    harness.do("HSET", harness.fence, "accused", "m:1-0 m:2-0")
    harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))
    assert harness.state()["fence"]["accused"] == b"m:1-0 m:2-0"


@pytest.mark.parametrize(("before", "after"), [(b"0", b"3"), (b"2", b"3")])
def test_lease_acquire_first_charge_counts_three_losses(
    harness: Harness, before: bytes, after: bytes
) -> None:
    places = harness.pending("1-0", "2-0", "3-0")
    seen = lose_owner(harness, mark=places[0])
    harness.do("HSET", harness.fence, "accused", places[0] + b" " + places[1])
    harness.do("HSET", harness.attempts, places[0] + b":c", before)
    assert harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))[1:] == [1, places[0]]
    assert harness.do("HGET", harness.attempts, places[0] + b":c") == after
    assert harness.do("HGET", harness.attempts, places[1] + b":c") is None


def test_lease_acquire_distinguishes_marks_of_the_two_streams(harness: Harness) -> None:
    harness.pending("1-0")
    harness.pending_retry("1-0")
    seen = lose_owner(harness, mark=b"r:1-0")
    harness.do("HSET", harness.fence, "accused", "m:1-0 r:1-0")
    harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))
    assert harness.state()["attempts"] == {"r:1-0:c": b"3"}


def test_lease_acquire_ignores_a_settled_mark(harness: Harness) -> None:
    places = harness.pending("1-0")
    seen = lose_owner(harness, mark=places[0])
    harness.do("XACK", harness.stream, harness.assignment.group, "1-0")
    rest = harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))
    assert rest[1:] == [1, b""]
    state = harness.state()
    assert "attempts" not in state
    assert "mark" not in state["fence"]


def test_lease_acquire_ignores_a_mark_without_its_group(harness: Harness) -> None:
    seen = lose_owner(harness, mark=b"m:1-0")
    assert harness.expect("lease_acquire", "OK", acquire(harness, "t2", seen))[1:] == [1, b""]
    assert sorted(harness.state()) == ["fence", "lease"]


def test_lease_acquire_takes_the_lease_of_a_dead_predecessor(harness: Harness) -> None:
    places = harness.pending("1-0")
    seen = harness.own("old")
    harness.do("HSET", harness.fence, "mark", places[0], "accused", places[0])
    harness.expect("lease_acquire", "HELD", acquire(harness, "new", seen))
    harness.expect("lease_acquire", "HELD", acquire(harness, "new", seen, dead="another"))
    harness.expect("lease_acquire", "MOVED", acquire(harness, "new", seen - 1, dead="old"))
    call = acquire(harness, "new", seen, dead="old")
    rest = harness.expect("lease_acquire", "OK", call)
    assert rest[1:] == [1, b"m:1-0"]
    state = harness.state()
    assert state["lease"] == b"new"
    assert state["fence"]["quarantine"] == b"1"
    harness.expect("lease_acquire", "MINE", call)


def test_lease_acquire_leaves_other_groups_alone(harness: Harness) -> None:
    other = Harness(harness.link, harness.keys, Assignment("access", 0, "audit"))
    other.groups()
    other.own("theirs")
    before = harness.state()
    harness.expect("lease_acquire", "OK", acquire(harness, "t1", 0))
    assert sorted(harness.changes(before)) == ["fence", "lease"]
    harness.link.run(messages.ensure_group(harness.keys, harness.assignment, "0"))


def test_lease_acquire_after_flushall_exceeds_the_old_epoch(harness: Harness) -> None:
    """After FLUSHALL, the new epoch is still greater than the old one.

    The fence is gone, so the script sees epoch 0 and uses the time.
    """
    epoch = harness.own("t1")
    harness.do("FLUSHALL")
    harness.expect("lease_acquire", "MOVED", acquire(harness, "t2", epoch))
    again = int(harness.expect("lease_acquire", "OK", acquire(harness, "t2", 0))[0])
    assert again >= epoch
