"""control_change: directives of operators are stored, and read with each heartbeat."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from streamqd.model import Unit
from streamqd.store import directives, members
from streamqd.store.directives import Directive, DirectiveChange, Directives, Scope
from streamqd.store.members import Present
from streamqd.store.scripts import Call, Reply
from tests.contract.desk import Desk


def change(desk: Desk, name: str = "", **rest: object) -> Call:
    return directives.change(desk.keys, "default", name, by="ops@west", **rest)  # type: ignore[arg-type]


def changed(desk: Desk, call: Call) -> DirectiveChange:
    return DirectiveChange.parse(Reply("OK", desk.expect("control_change", "OK", call)))


def found(desk: Desk) -> Directives:
    return directives.read(desk.do("HGETALL", desk.keys.orders("default")))


def test_directive_is_written_with_its_time(desk: Desk) -> None:
    with desk.instant() as now:
        at = changed(desk, change(desk, "pause:access/3/*", why='disk "full"')).at_unix_ms
    assert now == at
    assert found(desk) == Directives(
        pauses={Scope("access", 3): Directive(at, "ops@west", 'disk "full"')}
    )


def test_times_grow_also_when_the_clock_does_not(desk: Desk) -> None:
    ahead = desk.now_unix_ms() + 3_600_000
    desk.do("HSET", desk.keys.orders("default"), "last", ahead)
    assert changed(desk, change(desk, "rebalance")).at_unix_ms == ahead + 1
    assert changed(desk, change(desk, "rebalance")).at_unix_ms == ahead + 2
    for odd in ("garbage", 1 << 52):
        desk.do("HSET", desk.keys.orders("default"), "last", odd)
        with desk.instant() as now:
            at = changed(desk, change(desk, "rebalance")).at_unix_ms
        assert now == at, odd


def test_obsolete_directives_are_removed(desk: Desk) -> None:
    for name in ("drain:a", "drain:b", "drain:c"):
        changed(desk, change(desk, name))
    assert changed(desk, change(desk, remove=["drain:a", "drain:b", "drain:x"])).removed == 2
    assert list(found(desk).drains) == ["c"]
    assert changed(desk, change(desk, "drain:c", remove=["drain:c"])).removed == 0
    assert list(found(desk).drains) == ["c"]


@pytest.fixture
def packed(desk: Desk) -> Iterator[None]:
    """Hashes of some hundred fields have one form: else a server may dump them in any order."""
    # All servers know these names, the older ones.
    settings = ("hash-max-ziplist-entries", "hash-max-ziplist-value")
    before = {setting: desk.do("CONFIG", "GET", setting)[1] for setting in settings}
    for setting in settings:
        desk.do("CONFIG", "SET", setting, 2 * directives.ORDERS_MAX)
    yield
    for setting, value in before.items():
        desk.do("CONFIG", "SET", setting, value)


@pytest.mark.usefixtures("packed")
def test_number_of_directives_is_bounded(desk: Desk) -> None:
    names = [f"drain:web-{number}" for number in range(directives.ORDERS_MAX)]
    for name in names:
        changed(desk, change(desk, name))
    rest = desk.expect("control_change", "FULL", change(desk, "drain:one-more"))
    assert int(rest[0]) == directives.ORDERS_MAX
    changed(desk, change(desk, names[0]))  # that one is not new
    changed(desk, change(desk, remove=names[:1]))
    changed(desk, change(desk, "drain:one-more"))


def test_heartbeat_returns_the_directives(desk: Desk) -> None:
    heartbeat = members.heartbeat(desk.keys, "default", "a", "n1", {}, 9.0)
    assert Present.parse(desk.link.run(heartbeat)).orders == []
    at = changed(desk, change(desk, "move:access/0/hits", to="b")).at_unix_ms
    seen = directives.read(Present.parse(desk.link.run(heartbeat)).orders)
    assert seen.moves == {Unit("access", 0, "hits"): Directive(at, "ops@west", "", "b")}
    other = members.heartbeat(desk.keys, "blue", "a", "n1", {}, 9.0)
    assert Present.parse(desk.link.run(other)).orders == []


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


def test_widest_pause_wins() -> None:
    order = Directive(1, "ops", "")
    pauses = {Scope("a", 0, "g"): order, Scope("a", None, "g"): order}
    seen = Directives(pauses=pauses)
    assert seen.pause_of(Unit("a", 0, "g")) == (Scope("a", None, "g"), order)
    assert seen.pause_of(Unit("a", 1, "g")) is not None
    assert seen.pause_of(Unit("a", 1, "h")) is None
    assert seen.pause_of(Unit("b", 0, "g")) is None
    assert Directives(pauses={Scope(): order}).pause_of(Unit("b", 0, "g")) == (Scope(), order)
