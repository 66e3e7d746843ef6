"""member_heartbeat and member_leave: the live members of a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.store import members
from streamqd.store.members import Heartbeat, Present
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk

STALE = 9.0


def heartbeat(
    desk: Desk,
    instance: str = "west-1",
    nonce: str = "n1",
    weight: int = 1,
    silent: Sequence[str] = (),
) -> Call:
    info = {"weight": weight}
    return members.heartbeat(desk.keys, "default", instance, nonce, info, STALE, silent)


def leave(desk: Desk, instance: str = "west-1", nonce: str = "n1") -> Call:
    return members.leave(desk.keys, "default", instance, nonce)


def present(desk: Desk, call: Call) -> Present:
    return Present.parse(Reply("OK", desk.expect("member_heartbeat", "OK", call)))


def silent_for(desk: Desk, instance: str, seconds: float) -> int:
    """Set back the last heartbeat of an instance. Return it."""
    at = desk.now_unix_ms() - round(seconds * 1000)
    desk.do("ZADD", desk.keys.members("default"), at, instance)
    return at


def test_heartbeat_registers_and_returns_live_members(desk: Desk) -> None:
    with desk.instant() as now:
        found = present(desk, heartbeat(desk))
    assert now == found.now_unix_ms
    info = {"nonce": "n1", "weight": 1}
    assert found.members == [Heartbeat("west-1", found.now_unix_ms, info)]
    assert desk.state() == {
        desk.keys.members("default"): {"west-1": found.now_unix_ms},
        desk.keys.info("default"): {"west-1": b'{"nonce":"n1","weight":1}'},
    }
    again = present(desk, heartbeat(desk, "east-1", "n2"))
    assert sorted(member.instance for member in again.members) == ["east-1", "west-1"]


def test_heartbeat_replaces_the_description(desk: Desk) -> None:
    present(desk, heartbeat(desk))
    assert present(desk, heartbeat(desk, weight=7)).members[0].info["weight"] == 7


def test_heartbeat_returns_only_its_own_fleet(desk: Desk) -> None:
    present(desk, heartbeat(desk))
    call = members.heartbeat(desk.keys, "blue", "west-1", "n9", {}, STALE)
    assert [member.info for member in present(desk, call).members] == [{"nonce": "n9"}]


def test_heartbeat_with_another_nonce_is_a_duplicate(desk: Desk) -> None:
    present(desk, heartbeat(desk))
    rest = desk.expect("member_heartbeat", "DUPLICATE", heartbeat(desk, nonce="n2"))
    found = members.duplicate(Reply("DUPLICATE", rest))
    assert found.info == {"nonce": "n1", "weight": 1}
    assert abs(found.heartbeat_unix_ms - desk.now_unix_ms()) < 60_000


def test_heartbeat_replaces_a_silent_predecessor(desk: Desk) -> None:
    present(desk, heartbeat(desk))
    silent_for(desk, "west-1", STALE + 1)
    assert present(desk, heartbeat(desk, nonce="n2")).members[0].info["nonce"] == "n2"


def test_heartbeat_removes_a_dead_predecessor(desk: Desk) -> None:
    present(desk, heartbeat(desk))
    desk.expect("member_heartbeat", "DUPLICATE", heartbeat(desk, nonce="n2"))
    assert desk.expect("member_leave", "OK", leave(desk)) == []
    assert len(present(desk, heartbeat(desk, nonce="n2")).members) == 1


def test_heartbeat_replaces_an_unreadable_description(desk: Desk) -> None:
    """S6: each heartbeat writes it again. Without that, others took the member for dead."""
    for garbage in ("not json", "7", "[]", "{}", '{"nonce":5}', "[" * 5_000):
        present(desk, heartbeat(desk))
        desk.do("HSET", desk.keys.info("default"), "west-1", garbage)
        desk.expect("member_leave", "OTHER", leave(desk))
        found = present(desk, heartbeat(desk, "east-1"))
        west = next(member for member in found.members if member.instance == "west-1")
        assert west.info.keys() <= {"nonce"}
        found = present(desk, heartbeat(desk))
        west = next(member for member in found.members if member.instance == "west-1")
        assert west.info["nonce"] == "n1"
        desk.do("FLUSHALL")


def test_heartbeat_forgets_members_silent_for_long(desk: Desk) -> None:
    for name in ("old", "older"):
        silent_for(desk, name, 20 * STALE + 1)
        desk.do("HSET", desk.keys.info("default"), name, "{}")
    found = present(desk, heartbeat(desk))
    assert len(found.members) == 3, "the clock alone is no proof: it may have jumped"
    present(desk, heartbeat(desk, "late"))
    at = silent_for(desk, "late", 20 * STALE - 5)
    found = present(desk, heartbeat(desk, silent=("old", "late", "older", "nobody")))
    assert [(member.instance, member.heartbeat_unix_ms) for member in found.members] == [
        ("late", at),
        ("west-1", found.now_unix_ms),
    ]
    assert sorted(desk.state()[desk.keys.info("default")]) == ["late", "west-1"]


def test_member_leave_removes_the_member(desk: Desk) -> None:
    present(desk, heartbeat(desk))
    present(desk, heartbeat(desk, "east-1"))
    desk.expect("member_leave", "OK", leave(desk))
    state = desk.state()
    assert list(state[desk.keys.members("default")]) == ["east-1"]
    assert list(state[desk.keys.info("default")]) == ["east-1"]
    desk.expect("member_leave", "GONE", leave(desk))


def test_member_leave_keeps_another_run(desk: Desk) -> None:
    present(desk, heartbeat(desk, nonce="n2"))
    desk.expect("member_leave", "OTHER", leave(desk))
