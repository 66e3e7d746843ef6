"""lease_renew: held -> held."""

from __future__ import annotations

from streamqd.store import leases
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import OWNER, TTL, Desk
from tests.contract.lease_answers import Holder


def renew(desk: Desk, token: str = "t1", ttl: float = TTL) -> Call:
    return leases.renew(desk.keys, desk.leased(token), ttl)


def test_gives_the_lease_a_new_life(desk: Desk) -> None:
    desk.own("t1")
    before = desk.state()
    desk.expect("lease_renew", "OK", renew(desk, ttl=60.0))
    assert desk.changes(before) == {}
    assert 59_000 < desk.do("PTTL", desk.lease) <= 60_000


def test_lease_renew_restores_an_expired_lease_with_its_epoch(desk: Desk) -> None:
    desk.own("t1")
    desk.do("DEL", desk.lease)
    before = desk.state()
    desk.expect("lease_renew", "LATE", renew(desk))
    assert desk.changes(before) == {"lease": b"t1"}
    assert 0 < desk.do("PTTL", desk.lease) <= TTL * 1000
    desk.expect("lease_renew", "OK", renew(desk))


def test_finds_a_lease_that_contradicts_the_fence(desk: Desk) -> None:
    desk.own("t1")
    desk.do("SET", desk.lease, "t2", "PX", 60_000)
    desk.expect("lease_renew", "LOST", renew(desk))


def test_lease_renew_refuses_a_superseded_token(desk: Desk) -> None:
    desk.own("t1")
    desk.link.run(leases.refence(desk.keys, desk.leased("t1"), "t2", TTL, None, b"", []))
    rest = desk.expect("lease_renew", "FENCED", renew(desk))
    epoch = int(desk.state()["fence"]["epoch"])
    assert Holder.parse(Reply("FENCED", rest)) == (epoch, OWNER)


def test_lease_renew_without_a_fence_is_refused(desk: Desk) -> None:
    assert desk.expect("lease_renew", "FENCED", renew(desk)) == [b"0", b""]
    desk.do("SET", desk.lease, "t1")
    assert desk.expect("lease_renew", "FENCED", renew(desk)) == [b"0", b""]
