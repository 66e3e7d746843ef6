"""lease_release: held -> free; and the view of fence and lease."""

from __future__ import annotations

from streamqd.store import leases
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import OWNER, TTL, Harness
from tests.contract.lease_answers import Holder


def release(harness: Harness, token: str = "t1") -> Call:
    return leases.release(harness.keys, harness.leased(token))


def view(harness: Harness) -> leases.LeaseView:
    return leases.LeaseView.parse(
        *harness.link.pipeline(leases.view_commands(harness.keys, harness.assignment))
    )


def test_lease_release_keeps_the_epoch(harness: Harness) -> None:
    harness.own("t1")
    harness.do("HSET", harness.fence, "mark", "m:1-0", "session", "s1", "quarantine", "1")
    harness.do("HSET", harness.fence, "accused", "m:1-0 m:2-0")
    before = harness.state()
    harness.expect("lease_release", "OK", release(harness))
    kept = {name: before["fence"][name] for name in ("epoch", "since")}
    assert harness.changes(before) == {"fence": kept, "lease": None}


def test_lease_release_repeated_is_refused(harness: Harness) -> None:
    epoch = harness.own("t1")
    harness.expect("lease_release", "OK", release(harness))
    rest = harness.expect("lease_release", "FENCED", release(harness))
    assert Holder.parse(Reply("FENCED", rest)) == (epoch, "")


def test_lease_release_accepts_an_expired_lease(harness: Harness) -> None:
    harness.own("t1")
    harness.do("DEL", harness.lease)
    harness.expect("lease_release", "OK", release(harness))
    assert "token" not in harness.state()["fence"]


def test_lease_release_keeps_the_lease_of_another_token(harness: Harness) -> None:
    harness.own("t1")
    harness.do("SET", harness.lease, "t2")
    harness.expect("lease_release", "OK", release(harness))
    assert harness.state()["lease"] == b"t2"


def test_lease_release_leaves_another_owner_alone(harness: Harness) -> None:
    harness.own("t2")
    harness.expect("lease_release", "FENCED", release(harness))


def test_owner_view_reads_fence_and_lease(harness: Harness) -> None:
    assert view(harness) == ("", 0, "", 0, False, None)
    epoch = harness.own("t1")
    seen = view(harness)
    assert seen[:5] == ("t1", epoch, OWNER, epoch, False)
    assert seen.ttl is not None
    assert 0 < seen.ttl <= TTL
    harness.do("DEL", harness.lease)
    harness.own("t2", seen_epoch=epoch, owner="east-1")
    again = view(harness)
    assert (again.token, again.owner, again.quarantine) == ("t2", "east-1", True)
