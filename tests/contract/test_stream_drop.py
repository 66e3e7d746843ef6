"""stream_drop: not settled, beyond a limit that allows the loss -> gone, counted."""

from __future__ import annotations

import random

import pytest

from streamqd.store.retention import Dropped
from streamqd.store.scripts import Reply
from tests.contract.harness import Harness
from tests.contract.scenarios import drop_all, trim_all
from tests.support.costs import Meter

NODE = 100  # entries in a full stream node, by default


def run_drop(harness: Harness, **changed: object) -> Dropped:
    return Dropped.parse(
        Reply("OK", harness.expect("stream_drop", "OK", drop_all(harness, **changed)))
    )


def fill(harness: Harness, count: int, *, read: int = 0) -> None:
    """Write entries 1-0 to count-0. The group reads the first of them."""
    harness.groups()
    harness.link.pipeline(
        [("XADD", harness.stream, f"{n}-0", "payload", n) for n in range(1, count + 1)]
    )
    if read:
        harness.fetch(read)


def length(harness: Harness) -> int:
    return int(harness.do("XLEN", harness.stream))


def test_stream_drop_by_age_drops_unread_entries(harness: Harness) -> None:
    fill(harness, 350)
    before = harness.state()
    assert run_drop(harness, drop_before="250-0") == (200, {"hits": 200})
    changed = harness.changes(before)
    assert sorted(changed) == ["stream", "trim"]
    assert changed["trim"] == {
        "first": b"201-0",
        "size": b"150",
        "removed": b"200",
        "floor:hits": b"0-1",
        "dropped_unread:hits": b"200",
    }
    assert harness.fetch(1) == [b"201-0"]


def test_stream_drop_by_length_keeps_that_many(harness: Harness) -> None:
    fill(harness, 350)
    assert run_drop(harness, drop_before="0-0", max_length=400) == (0, {"hits": 0})
    assert run_drop(harness, drop_before="0-0", max_length=120) == (200, {"hits": 200})
    assert length(harness) == 150, "whole nodes only: never below the bound"


def test_stream_drop_within_the_limits_writes_nothing(harness: Harness) -> None:
    fill(harness, 350)
    before = harness.dump()
    assert run_drop(harness, drop_before="1-0", max_length=350).removed == 0
    assert harness.dump() == before


def test_stream_drop_counts_unread_entries_per_group(harness: Harness) -> None:
    fill(harness, 350, read=130)
    harness.do("XGROUP", "CREATE", harness.stream, "audit", "0")
    harness.do("XGROUP", "CREATE", harness.stream, "late", "345-0")
    assert run_drop(harness, max_length=None) == (350, {"audit": 350, "hits": 220, "late": 5})
    record = harness.state()["trim"]
    assert record["dropped_unread:audit"] == b"350"
    assert record["dropped_unread:late"] == b"5"
    assert run_drop(harness, max_length=0) == (0, {"audit": 0, "hits": 0, "late": 0})


@pytest.mark.parametrize("seed", range(12))
def test_stream_drop_counts_exactly_for_any_position(harness: Harness, seed: int) -> None:
    """Drops count exactly, by age, by length and in pages, no matter how far groups have read."""
    chance = random.Random(seed)
    total = chance.randrange(150, 900)
    fill(harness, total)
    marks = {"hits": chance.randrange(total + 1)}
    harness.do("XGROUP", "SETID", harness.stream, "hits", f"{marks['hits']}-0")
    for number in range(chance.randrange(4)):
        marks[f"g{number}"] = chance.randrange(total + 1)
        harness.do("XGROUP", "CREATE", harness.stream, f"g{number}", f"{marks[f'g{number}']}-0")
    lost = dict.fromkeys(marks, 0)
    for _ in range(chance.randrange(1, 5)):
        before = length(harness)
        found = run_drop(
            harness,
            drop_before=f"{chance.randrange(total)}-0",
            max_length=chance.choice([None, chance.randrange(total)]),
            limit=chance.choice([100, 250, 1000]),
        )
        assert before - length(harness) == found.removed
        gone = range(total - before + 1, total - before + found.removed + 1)
        assert found.unread == {
            name: sum(number > mark for number in gone) for name, mark in marks.items()
        }
        lost = {name: lost[name] + found.unread[name] for name in marks}
    record = harness.state().get("trim", {})
    assert {name: int(record.get(f"dropped_unread:{name}", 0)) for name in marks} == lost


@pytest.mark.parametrize("seed", range(8))
def test_stream_drop_counts_large_nodes_exactly(
    harness: Harness, large_nodes: int, seed: int
) -> None:
    """A large node is removed in bounded parts, and counted exactly for any position of a group."""
    chance = random.Random(seed)
    total = chance.randrange(400, large_nodes)
    harness.groups()
    harness.link.pipeline(
        [("XADD", harness.stream, f"{n}-0", "payload", "x" * 3000) for n in range(1, total + 1)]
    )
    marks = {"hits": total - chance.randrange(100), "audit": chance.randrange(200, total)}
    harness.do("XGROUP", "SETID", harness.stream, "hits", f"{marks['hits']}-0")
    harness.do("XGROUP", "CREATE", harness.stream, "audit", f"{marks['audit']}-0")
    kept = chance.choice([0, chance.randrange(total)])
    bounds = chance.choice(
        [
            {"max_length": kept, "drop_before": "0-0"},
            {"max_length": None, "drop_before": f"{total - kept + 1}-0"},
        ]
    )
    archived = chance.choice([None, chance.randrange(total)])
    if archived is not None:
        harness.do("HSET", harness.trim, "archived", f"{archived}-0")
        kept = max(kept, total - archived)

    lost = dict.fromkeys(marks, 0)
    while (found := run_drop(harness, archive=archived is not None, **bounds)).removed:
        lost = {name: lost[name] + found.unread[name] for name in marks}
    gone = total - length(harness)
    assert 0 < gone <= total - kept or total == kept
    assert lost == {name: max(0, gone - mark) for name, mark in marks.items()}
    if kept == 0:
        assert gone == total, "what must go goes"


@pytest.mark.parametrize(
    "bounds", [{"max_length": 1950, "drop_before": "0-0"}, {"drop_before": "51-0"}]
)
def test_stream_drop_does_not_recount_a_partial_node(
    harness: Harness, bounds: dict[str, object]
) -> None:
    """If a part of a node remains, a second call counts only entries near that part."""
    fill(harness, 2000, read=2000)
    call = drop_all(harness, **{"max_length": None, **bounds})
    harness.link.run(call)
    with Meter(harness.link).measuring() as cost:
        assert harness.expect("stream_drop", "OK", call) == [0, [b"hits", 0]]
    assert cost.commands["xrange"] <= 20, "some fifty entries, four at a time"


def test_stream_drop_drops_bodies_of_pending_entries(harness: Harness) -> None:
    fill(harness, 300, read=150)
    assert run_drop(harness, max_length=None) == (300, {"hits": 150})
    assert len(harness.state()["stream"].groups["hits"][1]) == 150
    assert harness.state()["trim"]["floor:hits"] == b"1-0"


def test_stream_drop_works_in_batches(harness: Harness) -> None:
    fill(harness, 350)
    assert run_drop(harness, limit=NODE).removed == NODE
    assert run_drop(harness, drop_before="0-0", max_length=0, limit=2 * NODE).removed == 2 * NODE


def test_stream_drop_drops_a_node_above_the_limit(harness: Harness, large_nodes: int) -> None:
    fill(harness, 3 * large_nodes, read=large_nodes // 2)
    unread = large_nodes - large_nodes // 2
    assert run_drop(harness, limit=NODE) == (large_nodes, {"hits": unread})
    within = {"drop_before": "0-0", "limit": NODE}
    assert run_drop(harness, max_length=large_nodes + 1, **within).removed == 0, "keeps its bound"
    assert run_drop(harness, max_length=large_nodes, **within) == (
        large_nodes,
        {"hits": large_nodes},
    )
    assert length(harness) == large_nodes


def test_stream_drop_keeps_unarchived_entries(harness: Harness) -> None:
    fill(harness, 350)
    assert run_drop(harness, archive=True, max_length=0).removed == 0
    harness.do("HSET", harness.trim, "archived", "220-0")
    assert run_drop(harness, archive=True, max_length=0) == (200, {"hits": 200})


def test_stream_drop_and_stream_trim_may_alternate(harness: Harness) -> None:
    fill(harness, 350)
    run_drop(harness, drop_before="150-0")
    harness.link.run(trim_all(harness))
    assert length(harness) == 250
    assert harness.state()["trim"]["first"] == b"101-0"


def test_stream_drop_refuses_without_groups(harness: Harness) -> None:
    harness.expect("stream_drop", "NO_GROUPS", drop_all(harness))
    harness.add("1-0")
    harness.expect("stream_drop", "NO_GROUPS", drop_all(harness))


def test_stream_drop_refuses_without_an_expected_group(harness: Harness) -> None:
    fill(harness, 3)
    call = drop_all(harness, expected=["hits", "audit"])
    assert harness.expect("stream_drop", "MISSING_GROUP", call) == [b"audit"]


def test_stream_drop_works_with_full_memory(harness: Harness) -> None:
    fill(harness, 350)
    with harness.full_memory():
        assert run_drop(harness).removed == 350
    assert harness.state()["trim"]["dropped_unread:hits"] == b"350"
