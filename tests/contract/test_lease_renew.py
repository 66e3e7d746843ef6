"""lease_renew: held -> held."""

from __future__ import annotations

from streamqd.store import leases
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import OWNER, TTL, Harness
from tests.contract.lease_answers import Holder


def renew(harness: Harness, token: str = "t1", ttl: float = TTL) -> Call:
    return leases.renew(harness.keys, harness.leased(token), ttl)


def test_lease_renew_extends_the_lease(harness: Harness) -> None:
    harness.own("t1")
    before = harness.state()
    harness.expect("lease_renew", "OK", renew(harness, ttl=60.0))
    assert harness.changes(before) == {}
    assert 59_000 < harness.do("PTTL", harness.lease) <= 60_000


def test_lease_renew_restores_an_expired_lease_with_its_epoch(harness: Harness) -> None:
    harness.own("t1")
    harness.do("DEL", harness.lease)
    before = harness.state()
    harness.expect("lease_renew", "LATE", renew(harness))
    assert harness.changes(before) == {"lease": b"t1"}
    assert 0 < harness.do("PTTL", harness.lease) <= TTL * 1000
    harness.expect("lease_renew", "OK", renew(harness))


def test_lease_renew_refuses_a_lease_of_another_token(harness: Harness) -> None:
    harness.own("t1")
    harness.do("SET", harness.lease, "t2", "PX", 60_000)
    harness.expect("lease_renew", "LOST", renew(harness))


def test_lease_renew_refuses_a_superseded_token(harness: Harness) -> None:
    harness.own("t1")
    harness.link.run(leases.refence(harness.keys, harness.leased("t1"), "t2", TTL, None, b"", []))
    rest = harness.expect("lease_renew", "FENCED", renew(harness))
    epoch = int(harness.state()["fence"]["epoch"])
    assert Holder.parse(Reply("FENCED", rest)) == (epoch, OWNER)


def test_lease_renew_without_a_fence_is_refused(harness: Harness) -> None:
    assert harness.expect("lease_renew", "FENCED", renew(harness)) == [b"0", b""]
    harness.do("SET", harness.lease, "t1")
    assert harness.expect("lease_renew", "FENCED", renew(harness)) == [b"0", b""]
