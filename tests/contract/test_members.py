"""member_heartbeat and member_leave: the live members of a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.store import members
from streamqd.store.members import Heartbeat, HeartbeatReply
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness

STALE = 9.0


def heartbeat(
    harness: Harness,
    instance: str = "west-1",
    nonce: str = "n1",
    weight: int = 1,
    silent: Sequence[str] = (),
) -> Call:
    info = {"weight": weight}
    return members.heartbeat(harness.keys, "default", instance, nonce, info, STALE, silent)


def leave(harness: Harness, instance: str = "west-1", nonce: str = "n1") -> Call:
    return members.leave(harness.keys, "default", instance, nonce)


def parse_present(harness: Harness, call: Call) -> HeartbeatReply:
    return HeartbeatReply.parse(Reply("OK", harness.expect("member_heartbeat", "OK", call)))


def set_last_heartbeat(harness: Harness, instance: str, seconds: float) -> int:
    """Move the last heartbeat of an instance into the past. Return its new time."""
    at = harness.now_unix_ms() - round(seconds * 1000)
    harness.do("ZADD", harness.keys.members("default"), at, instance)
    return at


def test_heartbeat_registers_and_returns_live_members(harness: Harness) -> None:
    with harness.instant() as now:
        found = parse_present(harness, heartbeat(harness))
    assert now == found.now_unix_ms
    info = {"nonce": "n1", "weight": 1}
    assert found.members == [Heartbeat("west-1", found.now_unix_ms, info)]
    assert harness.state() == {
        harness.keys.members("default"): {"west-1": found.now_unix_ms},
        harness.keys.info("default"): {"west-1": b'{"nonce":"n1","weight":1}'},
    }
    again = parse_present(harness, heartbeat(harness, "east-1", "n2"))
    assert sorted(member.instance for member in again.members) == ["east-1", "west-1"]


def test_heartbeat_replaces_the_description(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness))
    assert parse_present(harness, heartbeat(harness, weight=7)).members[0].info["weight"] == 7


def test_heartbeat_returns_only_its_own_fleet(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness))
    call = members.heartbeat(harness.keys, "blue", "west-1", "n9", {}, STALE)
    assert [member.info for member in parse_present(harness, call).members] == [{"nonce": "n9"}]


def test_heartbeat_with_another_nonce_is_a_duplicate(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness))
    rest = harness.expect("member_heartbeat", "DUPLICATE", heartbeat(harness, nonce="n2"))
    found = members.parse_duplicate(Reply("DUPLICATE", rest))
    assert found.info == {"nonce": "n1", "weight": 1}
    assert abs(found.heartbeat_unix_ms - harness.now_unix_ms()) < 60_000


def test_heartbeat_replaces_a_silent_predecessor(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness))
    set_last_heartbeat(harness, "west-1", STALE + 1)
    assert parse_present(harness, heartbeat(harness, nonce="n2")).members[0].info["nonce"] == "n2"


def test_heartbeat_removes_a_dead_predecessor(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness))
    harness.expect("member_heartbeat", "DUPLICATE", heartbeat(harness, nonce="n2"))
    assert harness.expect("member_leave", "OK", leave(harness)) == []
    assert len(parse_present(harness, heartbeat(harness, nonce="n2")).members) == 1


def test_heartbeat_replaces_an_unreadable_description(harness: Harness) -> None:
    """Each heartbeat writes the description again.

    Otherwise, an unreadable one would make others take the member for dead.
    """
    for garbage in ("not json", "7", "[]", "{}", '{"nonce":5}', "[" * 5_000):
        parse_present(harness, heartbeat(harness))
        harness.do("HSET", harness.keys.info("default"), "west-1", garbage)
        harness.expect("member_leave", "OTHER", leave(harness))
        found = parse_present(harness, heartbeat(harness, "east-1"))
        west = next(member for member in found.members if member.instance == "west-1")
        assert west.info.keys() <= {"nonce"}
        found = parse_present(harness, heartbeat(harness))
        west = next(member for member in found.members if member.instance == "west-1")
        assert west.info["nonce"] == "n1"
        harness.do("FLUSHALL")


def test_heartbeat_removes_members_silent_for_long(harness: Harness) -> None:
    for name in ("old", "older"):
        set_last_heartbeat(harness, name, 20 * STALE + 1)
        harness.do("HSET", harness.keys.info("default"), name, "{}")
    found = parse_present(harness, heartbeat(harness))
    assert len(found.members) == 3, "the clock alone is no proof: it may have jumped"
    parse_present(harness, heartbeat(harness, "late"))
    at = set_last_heartbeat(harness, "late", 20 * STALE - 5)
    found = parse_present(harness, heartbeat(harness, silent=("old", "late", "older", "nobody")))
    assert [(member.instance, member.heartbeat_unix_ms) for member in found.members] == [
        ("late", at),
        ("west-1", found.now_unix_ms),
    ]
    assert sorted(harness.state()[harness.keys.info("default")]) == ["late", "west-1"]


def test_member_leave_removes_the_member(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness))
    parse_present(harness, heartbeat(harness, "east-1"))
    harness.expect("member_leave", "OK", leave(harness))
    state = harness.state()
    assert list(state[harness.keys.members("default")]) == ["east-1"]
    assert list(state[harness.keys.info("default")]) == ["east-1"]
    harness.expect("member_leave", "GONE", leave(harness))


def test_member_leave_keeps_another_run(harness: Harness) -> None:
    parse_present(harness, heartbeat(harness, nonce="n2"))
    harness.expect("member_leave", "OTHER", leave(harness))
