"""lease_release: held -> free; and the view of fence and lease."""

from __future__ import annotations

from streamqd.store import leases
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import OWNER, TTL, Desk
from tests.contract.lease_answers import Holder


def release(desk: Desk, token: str = "t1") -> Call:
    return leases.release(desk.keys, desk.leased(token))


def view(desk: Desk) -> leases.LeaseView:
    return leases.LeaseView.parse(*desk.link.pipeline(leases.view(desk.keys, desk.unit)))


def test_frees_the_unit_and_keeps_the_epoch(desk: Desk) -> None:
    desk.own("t1")
    desk.do("HSET", desk.fence, "mark", "m:1-0", "session", "s1", "quarantine", "1")
    desk.do("HSET", desk.fence, "accused", "m:1-0 m:2-0")
    before = desk.state()
    desk.expect("lease_release", "OK", release(desk))
    kept = {name: before["fence"][name] for name in ("epoch", "since")}
    assert desk.changes(before) == {"fence": kept, "lease": None}


def test_lease_release_repeated_is_refused(desk: Desk) -> None:
    epoch = desk.own("t1")
    desk.expect("lease_release", "OK", release(desk))
    rest = desk.expect("lease_release", "FENCED", release(desk))
    assert Holder.parse(Reply("FENCED", rest)) == (epoch, "")


def test_frees_a_unit_whose_lease_has_expired(desk: Desk) -> None:
    desk.own("t1")
    desk.do("DEL", desk.lease)
    desk.expect("lease_release", "OK", release(desk))
    assert "token" not in desk.state()["fence"]


def test_lease_release_keeps_the_lease_of_another_token(desk: Desk) -> None:
    desk.own("t1")
    desk.do("SET", desk.lease, "t2")
    desk.expect("lease_release", "OK", release(desk))
    assert desk.state()["lease"] == b"t2"


def test_lease_release_leaves_another_owner_alone(desk: Desk) -> None:
    desk.own("t2")
    desk.expect("lease_release", "FENCED", release(desk))


def test_view_reads_fence_and_lease(desk: Desk) -> None:
    assert view(desk) == ("", 0, "", 0, False, None)
    epoch = desk.own("t1")
    seen = view(desk)
    assert seen[:5] == ("t1", epoch, OWNER, epoch, False)
    assert seen.ttl is not None
    assert 0 < seen.ttl <= TTL
    desk.do("DEL", desk.lease)
    desk.own("t2", seen_epoch=epoch, owner="east-1")
    again = view(desk)
    assert (again.token, again.owner, again.quarantine) == ("t2", "east-1", True)
