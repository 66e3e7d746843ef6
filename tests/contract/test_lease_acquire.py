"""lease_acquire: free -> held."""

from __future__ import annotations

import pytest

from streamqd.model import Unit
from streamqd.store import leases, messages
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import OWNER, TTL, Desk
from tests.contract.lease_answers import Holder


def take(desk: Desk, token: str, seen_epoch: int, owner: str = OWNER, dead: str = "") -> Call:
    return leases.acquire(desk.keys, desk.leased(token, seen_epoch), TTL, owner, dead)


def lose(desk: Desk, mark: bytes = b"") -> int:
    """Lose the owner without a release, and let its lease expire."""
    epoch = desk.own("old")
    if mark:
        desk.do("HSET", desk.fence, "mark", mark, "session", "s1")
    desk.do("DEL", desk.lease)
    return epoch


def test_lease_acquire_takes_a_new_unit(desk: Desk) -> None:
    before = desk.state()
    with desk.instant() as now:
        rest = desk.expect("lease_acquire", "OK", take(desk, "t1", 0))
    epoch = rest[0]
    assert leases.Acquired.parse(Reply("OK", rest)) == (int(epoch), False, b"")
    assert epoch == now or now == epoch
    fence = {"token": b"t1", "epoch": epoch, "owner": OWNER.encode(), "since": epoch}
    assert desk.changes(before) == {"fence": fence, "lease": b"t1"}
    assert TTL * 1000 - 1000 < desk.do("PTTL", desk.lease) <= TTL * 1000


def test_takes_a_released_unit_with_a_greater_epoch(desk: Desk) -> None:
    epoch = desk.own("t1")
    desk.link.run(leases.release(desk.keys, desk.leased("t1")))
    ahead = epoch + 10**9  # a fence from before the server's clock was set back
    desk.do("HSET", desk.fence, "epoch", ahead)
    rest = desk.expect("lease_acquire", "OK", take(desk, "t2", ahead))
    assert leases.Acquired.parse(Reply("OK", rest)) == (ahead + 1, False, b"")
    assert desk.state()["fence"]["epoch"] == str(ahead + 1).encode()
    assert "quarantine" not in desk.state()["fence"]


def test_lease_acquire_refuses_while_another_lease_is_valid(desk: Desk) -> None:
    epoch = desk.own("t1", owner="east-1")
    rest = desk.expect("lease_acquire", "HELD", take(desk, "t2", epoch))
    assert 0 < int(rest[0]) <= TTL * 1000
    assert Holder.parse(Reply("HELD", rest)) == (epoch, "east-1")


def test_lease_acquire_refuses_an_outdated_epoch(desk: Desk) -> None:
    epoch = desk.own("t1")
    desk.link.run(leases.release(desk.keys, desk.leased("t1")))
    rest = desk.expect("lease_acquire", "MOVED", take(desk, "t2", 0))
    assert Holder.parse(Reply("MOVED", rest)) == (epoch, "")


def test_lease_acquire_repeated_keeps_the_epoch(desk: Desk) -> None:
    call = take(desk, "t1", 0)
    epoch = desk.expect("lease_acquire", "OK", call)[0]
    desk.do("PEXPIRE", desk.lease, 100_000)
    before = desk.state()
    assert desk.expect("lease_acquire", "MINE", call) == [epoch, 0]
    assert desk.changes(before) == {}
    assert desk.do("PTTL", desk.lease) <= TTL * 1000


def test_lease_acquire_repeated_renews_an_expired_lease(desk: Desk) -> None:
    call = take(desk, "t1", 0)
    epoch = desk.expect("lease_acquire", "OK", call)[0]
    desk.do("DEL", desk.lease)
    before = desk.state()
    assert desk.expect("lease_acquire", "MINE", call) == [epoch, 0]
    assert desk.changes(before) == {"lease": b"t1"}
    assert 0 < desk.do("PTTL", desk.lease) <= TTL * 1000


def test_lease_acquire_after_a_crash_charges_the_accused_once(desk: Desk) -> None:
    places = desk.pending("1-0", "2-0")
    seen = lose(desk, mark=places[1])
    desk.do("HSET", desk.fence, "accused", places[1])
    before = desk.state()
    call = take(desk, "t2", seen, "east-1")
    rest = desk.expect("lease_acquire", "OK", call)
    acquired = leases.Acquired.parse(Reply("OK", rest))
    assert acquired == (acquired.epoch, True, places[1])
    assert acquired.epoch > seen
    number = str(acquired.epoch).encode()
    fence = {"token": b"t2", "epoch": number, "owner": b"east-1", "since": number}
    fence |= {"quarantine": b"1", "accused": places[1]}
    # The clock may stand still between two epochs: `since` is the time, the epoch is one more.
    fence["since"] = desk.state()["fence"]["since"]
    assert desk.changes(before) == {
        "fence": fence,
        "lease": b"t2",
        "attempts": {"m:2-0:c": b"3"},
    }
    assert desk.expect("lease_acquire", "MINE", call) == [number, 1]
    assert desk.state()["attempts"] == {"m:2-0:c": b"3"}


def test_lease_acquire_accuses_a_lost_entry_before_charging(desk: Desk) -> None:
    """Messages of other partitions may have run at the same time."""
    places = desk.pending("1-0", "2-0")
    seen = lose(desk, mark=places[1])
    assert desk.expect("lease_acquire", "OK", take(desk, "t2", seen))[1:] == [1, b""]
    assert desk.state()["fence"]["accused"] == places[1]
    assert desk.do("EXISTS", desk.attempts) == 0


def test_lease_acquire_accuses_all_members_of_a_lost_round(desk: Desk) -> None:
    places = desk.pending("1-0", "2-0", "3-0")
    seen = lose(desk, mark=places[0] + b" " + places[1])
    assert desk.expect("lease_acquire", "OK", take(desk, "t2", seen))[1:] == [1, b""]
    state = desk.state()
    assert state["fence"]["accused"] == places[0] + b" " + places[1]
    assert "mark" not in state["fence"]
    assert desk.do("EXISTS", desk.attempts) == 0


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
    desk: Desk, earlier: bytes, mark: bytes, accused: bytes
) -> None:
    desk.pending(*(f"{n}-0" for n in range(1, 6)))
    seen = lose(desk, mark=mark)
    desk.do("HSET", desk.fence, "accused", earlier)
    assert desk.expect("lease_acquire", "OK", take(desk, "t2", seen))[1:] == [1, b""]
    assert desk.state()["fence"]["accused"] == accused
    assert desk.do("EXISTS", desk.attempts) == 0


@pytest.mark.parametrize("mark", [b"", b"m:1-0", b"m:0-0"], ids=["none", "accused", "nobody"])
def test_lease_acquire_keeps_the_accused_after_another_loss(desk: Desk, mark: bytes) -> None:
    desk.pending("1-0", "2-0", "3-0")
    seen = lose(desk, mark=mark)
    desk.do("HSET", desk.fence, "accused", "m:1-0 m:2-0")
    desk.expect("lease_acquire", "OK", take(desk, "t2", seen))
    assert desk.state()["fence"]["accused"] == b"m:1-0 m:2-0"


@pytest.mark.parametrize(("before", "after"), [(b"0", b"3"), (b"2", b"3")])
def test_lease_acquire_first_charge_counts_three_losses(
    desk: Desk, before: bytes, after: bytes
) -> None:
    places = desk.pending("1-0", "2-0", "3-0")
    seen = lose(desk, mark=places[0])
    desk.do("HSET", desk.fence, "accused", places[0] + b" " + places[1])
    desk.do("HSET", desk.attempts, places[0] + b":c", before)
    assert desk.expect("lease_acquire", "OK", take(desk, "t2", seen))[1:] == [1, places[0]]
    assert desk.do("HGET", desk.attempts, places[0] + b":c") == after
    assert desk.do("HGET", desk.attempts, places[1] + b":c") is None


def test_lease_acquire_distinguishes_marks_of_the_two_streams(desk: Desk) -> None:
    desk.pending("1-0")
    desk.pending_retry("1-0")
    seen = lose(desk, mark=b"r:1-0")
    desk.do("HSET", desk.fence, "accused", "m:1-0 r:1-0")
    desk.expect("lease_acquire", "OK", take(desk, "t2", seen))
    assert desk.state()["attempts"] == {"r:1-0:c": b"3"}


def test_lease_acquire_ignores_a_settled_mark(desk: Desk) -> None:
    places = desk.pending("1-0")
    seen = lose(desk, mark=places[0])
    desk.do("XACK", desk.stream, desk.unit.group, "1-0")
    rest = desk.expect("lease_acquire", "OK", take(desk, "t2", seen))
    assert rest[1:] == [1, b""]
    state = desk.state()
    assert "attempts" not in state
    assert "mark" not in state["fence"]


def test_lease_acquire_ignores_a_mark_without_its_group(desk: Desk) -> None:
    seen = lose(desk, mark=b"m:1-0")
    assert desk.expect("lease_acquire", "OK", take(desk, "t2", seen))[1:] == [1, b""]
    assert sorted(desk.state()) == ["fence", "lease"]


def test_lease_acquire_takes_the_lease_of_a_dead_predecessor(desk: Desk) -> None:
    places = desk.pending("1-0")
    seen = desk.own("old")
    desk.do("HSET", desk.fence, "mark", places[0], "accused", places[0])
    desk.expect("lease_acquire", "HELD", take(desk, "new", seen))
    desk.expect("lease_acquire", "HELD", take(desk, "new", seen, dead="another"))
    desk.expect("lease_acquire", "MOVED", take(desk, "new", seen - 1, dead="old"))
    call = take(desk, "new", seen, dead="old")
    rest = desk.expect("lease_acquire", "OK", call)
    assert rest[1:] == [1, b"m:1-0"]
    state = desk.state()
    assert state["lease"] == b"new"
    assert state["fence"]["quarantine"] == b"1"
    desk.expect("lease_acquire", "MINE", call)


def test_lease_acquire_leaves_other_groups_alone(desk: Desk) -> None:
    other = Desk(desk.link, desk.keys, Unit("access", 0, "audit"))
    other.groups()
    other.own("theirs")
    before = desk.state()
    desk.expect("lease_acquire", "OK", take(desk, "t1", 0))
    assert sorted(desk.changes(before)) == ["fence", "lease"]
    desk.link.run(messages.ensure_group(desk.keys, desk.unit, "0"))


def test_lease_acquire_after_flushall_exceeds_the_old_epoch(desk: Desk) -> None:
    """FLUSHALL: no fence, so the epoch seen is 0, and the next is the time."""
    epoch = desk.own("t1")
    desk.do("FLUSHALL")
    desk.expect("lease_acquire", "MOVED", take(desk, "t2", epoch))
    again = int(desk.expect("lease_acquire", "OK", take(desk, "t2", 0))[0])
    assert again >= epoch
