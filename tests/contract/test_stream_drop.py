"""stream_drop: not settled, beyond a limit that allows the loss -> gone, counted."""

from __future__ import annotations

import random

import pytest

from streamqd.store.retention import Dropped
from streamqd.store.scripts import Reply
from tests.contract.desk import Desk
from tests.contract.scenarios import drop_all, trim_all
from tests.support.costs import Meter

NODE = 100  # entries of a whole stream node, by the default of the servers


def dropped(desk: Desk, **changed: object) -> Dropped:
    return Dropped.parse(Reply("OK", desk.expect("stream_drop", "OK", drop_all(desk, **changed))))


def fill(desk: Desk, count: int, *, read: int = 0) -> None:
    """Write entries 1-0 to count-0, and let the group read the first ones."""
    desk.groups()
    desk.link.pipeline([("XADD", desk.stream, f"{n}-0", "payload", n) for n in range(1, count + 1)])
    if read:
        desk.fetch(read)


def length(desk: Desk) -> int:
    return int(desk.do("XLEN", desk.stream))


def test_stream_drop_by_age_drops_unread_entries(desk: Desk) -> None:
    fill(desk, 350)
    before = desk.state()
    assert dropped(desk, drop_before="250-0") == (200, {"hits": 200})
    changed = desk.changes(before)
    assert sorted(changed) == ["stream", "trim"]
    assert changed["trim"] == {
        "first": b"201-0",
        "size": b"150",
        "removed": b"200",
        "floor:hits": b"0-1",
        "dropped_unread:hits": b"200",
    }
    assert desk.fetch(1) == [b"201-0"]


def test_length_drops_the_oldest_and_keeps_the_bound(desk: Desk) -> None:
    fill(desk, 350)
    assert dropped(desk, drop_before="0-0", max_length=400) == (0, {"hits": 0})
    assert dropped(desk, drop_before="0-0", max_length=120) == (200, {"hits": 200})
    assert length(desk) == 150, "whole nodes only: never below the bound"


def test_nothing_beyond_the_limits_writes_nothing(desk: Desk) -> None:
    fill(desk, 350)
    before = desk.dump()
    assert dropped(desk, drop_before="1-0", max_length=350).removed == 0
    assert desk.dump() == before


def test_stream_drop_counts_unread_entries_per_group(desk: Desk) -> None:
    fill(desk, 350, read=130)
    desk.do("XGROUP", "CREATE", desk.stream, "audit", "0")
    desk.do("XGROUP", "CREATE", desk.stream, "late", "345-0")
    assert dropped(desk, max_length=None) == (350, {"audit": 350, "hits": 220, "late": 5})
    record = desk.state()["trim"]
    assert record["dropped_unread:audit"] == b"350"
    assert record["dropped_unread:late"] == b"5"
    assert dropped(desk, max_length=0) == (0, {"audit": 0, "hits": 0, "late": 0})


@pytest.mark.parametrize("seed", range(12))
def test_stream_drop_counts_exactly_for_any_position(desk: Desk, seed: int) -> None:
    """By age, by length and in pages, with groups that have read to any point of a node."""
    chance = random.Random(seed)
    total = chance.randrange(150, 900)
    fill(desk, total)
    marks = {"hits": chance.randrange(total + 1)}
    desk.do("XGROUP", "SETID", desk.stream, "hits", f"{marks['hits']}-0")
    for number in range(chance.randrange(4)):
        marks[f"g{number}"] = chance.randrange(total + 1)
        desk.do("XGROUP", "CREATE", desk.stream, f"g{number}", f"{marks[f'g{number}']}-0")
    lost = dict.fromkeys(marks, 0)
    for _ in range(chance.randrange(1, 5)):
        before = length(desk)
        found = dropped(
            desk,
            drop_before=f"{chance.randrange(total)}-0",
            max_length=chance.choice([None, chance.randrange(total)]),
            limit=chance.choice([100, 250, 1000]),
        )
        assert before - length(desk) == found.removed
        gone = range(total - before + 1, total - before + found.removed + 1)
        assert found.unread == {
            name: sum(number > mark for number in gone) for name, mark in marks.items()
        }
        lost = {name: lost[name] + found.unread[name] for name in marks}
    record = desk.state().get("trim", {})
    assert {name: int(record.get(f"dropped_unread:{name}", 0)) for name in marks} == lost


@pytest.mark.parametrize("seed", range(8))
def test_stream_drop_counts_large_nodes_exactly(desk: Desk, large_nodes: int, seed: int) -> None:
    """Groups have read to any point of the node, and it is removed in bounded parts."""
    chance = random.Random(seed)
    total = chance.randrange(400, large_nodes)
    desk.groups()
    desk.link.pipeline(
        [("XADD", desk.stream, f"{n}-0", "payload", "x" * 3000) for n in range(1, total + 1)]
    )
    marks = {"hits": total - chance.randrange(100), "audit": chance.randrange(200, total)}
    desk.do("XGROUP", "SETID", desk.stream, "hits", f"{marks['hits']}-0")
    desk.do("XGROUP", "CREATE", desk.stream, "audit", f"{marks['audit']}-0")
    kept = chance.choice([0, chance.randrange(total)])
    bounds = chance.choice(
        [
            {"max_length": kept, "drop_before": "0-0"},
            {"max_length": None, "drop_before": f"{total - kept + 1}-0"},
        ]
    )
    archived = chance.choice([None, chance.randrange(total)])
    if archived is not None:
        desk.do("HSET", desk.trim, "archived", f"{archived}-0")
        kept = max(kept, total - archived)

    lost = dict.fromkeys(marks, 0)
    while (found := dropped(desk, archive=archived is not None, **bounds)).removed:
        lost = {name: lost[name] + found.unread[name] for name in marks}
    gone = total - length(desk)
    assert 0 < gone <= total - kept or total == kept
    assert lost == {name: max(0, gone - mark) for name, mark in marks.items()}
    if kept == 0:
        assert gone == total, "what must go goes"


@pytest.mark.parametrize(
    "bounds", [{"max_length": 1950, "drop_before": "0-0"}, {"drop_before": "51-0"}]
)
def test_stream_drop_does_not_recount_a_partial_node(desk: Desk, bounds: dict[str, object]) -> None:
    """Part of a node stays, and a group has read far beyond it."""
    fill(desk, 2000, read=2000)
    call = drop_all(desk, **{"max_length": None, **bounds})
    desk.link.run(call)
    with Meter(desk.link).measuring() as cost:
        assert desk.expect("stream_drop", "OK", call) == [0, [b"hits", 0]]
    assert cost.commands["xrange"] <= 20, "some fifty entries, four at a time"


def test_stream_drop_drops_bodies_of_pending_entries(desk: Desk) -> None:
    fill(desk, 300, read=150)
    assert dropped(desk, max_length=None) == (300, {"hits": 150})
    assert len(desk.state()["stream"].groups["hits"][1]) == 150
    assert desk.state()["trim"]["floor:hits"] == b"1-0"


def test_stream_drop_works_in_batches(desk: Desk) -> None:
    fill(desk, 350)
    assert dropped(desk, limit=NODE).removed == NODE
    assert dropped(desk, drop_before="0-0", max_length=0, limit=2 * NODE).removed == 2 * NODE


def test_stream_drop_drops_a_node_above_the_limit(desk: Desk, large_nodes: int) -> None:
    fill(desk, 3 * large_nodes, read=large_nodes // 2)
    unread = large_nodes - large_nodes // 2
    assert dropped(desk, limit=NODE) == (large_nodes, {"hits": unread})
    within = {"drop_before": "0-0", "limit": NODE}
    assert dropped(desk, max_length=large_nodes + 1, **within).removed == 0, "keeps its bound"
    assert dropped(desk, max_length=large_nodes, **within) == (large_nodes, {"hits": large_nodes})
    assert length(desk) == large_nodes


def test_stream_drop_keeps_unarchived_entries(desk: Desk) -> None:
    fill(desk, 350)
    assert dropped(desk, archive=True, max_length=0).removed == 0
    desk.do("HSET", desk.trim, "archived", "220-0")
    assert dropped(desk, archive=True, max_length=0) == (200, {"hits": 200})


def test_stream_drop_and_stream_trim_may_alternate(desk: Desk) -> None:
    fill(desk, 350)
    dropped(desk, drop_before="150-0")
    desk.link.run(trim_all(desk))
    assert length(desk) == 250
    assert desk.state()["trim"]["first"] == b"101-0"


def test_stream_drop_refuses_without_groups(desk: Desk) -> None:
    desk.expect("stream_drop", "NO_GROUPS", drop_all(desk))
    desk.add("1-0")
    desk.expect("stream_drop", "NO_GROUPS", drop_all(desk))


def test_stream_drop_refuses_without_an_expected_group(desk: Desk) -> None:
    fill(desk, 3)
    call = drop_all(desk, expected=["hits", "audit"])
    assert desk.expect("stream_drop", "MISSING_GROUP", call) == [b"audit"]


def test_full_memory_is_freed(desk: Desk) -> None:
    fill(desk, 350)
    with desk.full_memory():
        assert dropped(desk).removed == 350
    assert desk.state()["trim"]["dropped_unread:hits"] == b"350"
