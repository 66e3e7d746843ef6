"""control_change: directives of operators are stored, and read with each heartbeat."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from streamqd.model import Assignment
from streamqd.store import directives, members
from streamqd.store.directives import Directive, DirectiveChange, Directives, Scope
from streamqd.store.members import HeartbeatReply
from streamqd.store.scripts import Call, Reply
from tests.contract.harness import Harness


def change(harness: Harness, name: str = "", **rest: object) -> Call:
    return directives.change(harness.keys, "default", name, by="ops@west", **rest)  # type: ignore[arg-type]


def apply_change(harness: Harness, call: Call) -> DirectiveChange:
    return DirectiveChange.parse(Reply("OK", harness.expect("control_change", "OK", call)))


def read_directives(harness: Harness) -> Directives:
    return directives.read(harness.do("HGETALL", harness.keys.directives("default")))


def test_control_change_stores_the_directive_with_its_time(harness: Harness) -> None:
    with harness.instant() as now:
        at = apply_change(
            harness, change(harness, "pause:access/3/*", why='disk "full"')
        ).at_unix_ms
    assert now == at
    assert read_directives(harness) == Directives(
        pauses={Scope("access", 3): Directive(at, "ops@west", 'disk "full"')}
    )


def test_directive_times_increase_despite_the_clock(harness: Harness) -> None:
    ahead = harness.now_unix_ms() + 3_600_000
    harness.do("HSET", harness.keys.directives("default"), "last", ahead)
    assert apply_change(harness, change(harness, "rebalance")).at_unix_ms == ahead + 1
    assert apply_change(harness, change(harness, "rebalance")).at_unix_ms == ahead + 2
    for odd in ("garbage", 1 << 52):
        harness.do("HSET", harness.keys.directives("default"), "last", odd)
        with harness.instant() as now:
            at = apply_change(harness, change(harness, "rebalance")).at_unix_ms
        assert now == at, odd


def test_control_change_removes_obsolete_directives(harness: Harness) -> None:
    for name in ("drain:a", "drain:b", "drain:c"):
        apply_change(harness, change(harness, name))
    assert (
        apply_change(harness, change(harness, remove=["drain:a", "drain:b", "drain:x"])).removed
        == 2
    )
    assert list(read_directives(harness).drains) == ["c"]
    assert apply_change(harness, change(harness, "drain:c", remove=["drain:c"])).removed == 0
    assert list(read_directives(harness).drains) == ["c"]


@pytest.fixture
def list_encoded_hashes(harness: Harness) -> Iterator[None]:
    """Make the server store large hashes as lists, because it dumps a table in any order."""
    # All servers accept these older names of the settings.
    settings = ("hash-max-ziplist-entries", "hash-max-ziplist-value")
    before = {setting: harness.do("CONFIG", "GET", setting)[1] for setting in settings}
    for setting in settings:
        harness.do("CONFIG", "SET", setting, 2 * directives.DIRECTIVES_MAX)
    yield
    for setting, value in before.items():
        harness.do("CONFIG", "SET", setting, value)


@pytest.mark.usefixtures("list_encoded_hashes")
def test_number_of_directives_is_bounded(harness: Harness) -> None:
    names = [f"drain:web-{number}" for number in range(directives.DIRECTIVES_MAX)]
    for name in names:
        apply_change(harness, change(harness, name))
    rest = harness.expect("control_change", "FULL", change(harness, "drain:one-more"))
    assert int(rest[0]) == directives.DIRECTIVES_MAX
    apply_change(harness, change(harness, names[0]))  # this directive already exists
    apply_change(harness, change(harness, remove=names[:1]))
    apply_change(harness, change(harness, "drain:one-more"))


def test_heartbeat_returns_the_directives(harness: Harness) -> None:
    heartbeat = members.heartbeat(harness.keys, "default", "a", "n1", {}, 9.0)
    assert HeartbeatReply.parse(harness.link.run(heartbeat)).directives == []
    at = apply_change(harness, change(harness, "move:access/0/hits", to="b")).at_unix_ms
    seen = directives.read(HeartbeatReply.parse(harness.link.run(heartbeat)).directives)
    assert seen.moves == {Assignment("access", 0, "hits"): Directive(at, "ops@west", "", "b")}
    other = members.heartbeat(harness.keys, "blue", "a", "n1", {}, 9.0)
    assert HeartbeatReply.parse(harness.link.run(other)).directives == []


GOOD = {"version": 1, "at_unix_ms": 5, "by": "ops", "why": ""}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pause:access", GOOD),
        ("pause:a/b/c", GOOD),
        ("pause:a//c", GOOD),
        ("move:a/1/c", GOOD),
        ("move:a/*/c", GOOD | {"to": "b"}),
        ("drain:", GOOD),
        ("sing", GOOD),
        ("rebalance", GOOD | {"version": 2}),
        ("rebalance", GOOD | {"at_unix_ms": "soon"}),
        ("rebalance", GOOD | {"at_unix_ms": 1 << 52}),
        ("rebalance", []),
        ("rebalance", None),
        ("\x00\x1b", GOOD),
    ],
)
def test_unreadable_directive_is_reported_and_kept(name: str, value: object) -> None:
    raw = json.dumps(value).encode() if value is not None else b"\xff{"
    flat = [name.encode(), raw, b"drain:a", json.dumps(GOOD).encode(), b"last", b"5"]
    seen = directives.read(flat)
    assert list(seen.unreadable) == [name]
    assert list(seen.drains) == ["a"]


def test_pause_of_returns_the_widest_pause() -> None:
    order = Directive(1, "ops", "")
    pauses = {Scope("a", 0, "g"): order, Scope("a", None, "g"): order}
    seen = Directives(pauses=pauses)
    assert seen.find_pause(Assignment("a", 0, "g")) == (Scope("a", None, "g"), order)
    assert seen.find_pause(Assignment("a", 1, "g")) is not None
    assert seen.find_pause(Assignment("a", 1, "h")) is None
    assert seen.find_pause(Assignment("b", 0, "g")) is None
    assert Directives(pauses={Scope(): order}).find_pause(Assignment("b", 0, "g")) == (
        Scope(),
        order,
    )
