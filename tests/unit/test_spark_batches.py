"""A batch of an archive has entries of each partition, and defines the position after it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import TopicPartition
from streamqd.spark.offsets import ZERO, Id, Position, StreamFacts
from streamqd.spark.pipelines import batches
from streamqd.spark.pipelines.batches import BatchRange, TaskEnd


def stream(rows: int, removed: int = 0) -> StreamFacts:
    """Return a stream that has the entries (removed + 1)-0 to (removed + rows)-0."""
    first = (removed + 1, 0) if rows else None
    return StreamFacts(rows, rows + removed, first, (rows + removed, 0))


def batch_range(place: TopicPartition, facts: StreamFacts, start: int = 0) -> BatchRange:
    position = Position((start, 0) if start else ZERO, start)
    return BatchRange(place, position, facts.latest)


def end_of_range(each: BatchRange, end: Id, rows: int) -> Position:
    place = each.place
    ended = [TaskEnd(place[1], end, rows)]
    return batches.end_positions({place: each.begin}, {place: each.target}, ended)[place]


def test_batch_plan_reads_everything_that_fits() -> None:
    facts = {("t", 0): stream(30), ("t", 1): stream(10)}
    planned = batches.plan([batch_range(p, f) for p, f in facts.items()], facts, 40, tasks=2)
    assert [(each.limit, [span.rows for span in each.spans]) for each in planned] == [
        (None, [30]),
        (None, [10]),
    ]
    assert end_of_range(planned[0], (30, 0), 30) == Position((30, 0), 30)


def test_plan_splits_the_limit_by_backlog() -> None:
    facts = {("t", 0): stream(300), ("t", 1): stream(100)}
    planned = batches.plan([batch_range(p, f) for p, f in facts.items()], facts, 40, tasks=2)
    assert [(each.limit, [span.rows for span in each.spans]) for each in planned] == [
        (30, [None]),
        (10, [None]),
    ]
    assert end_of_range(planned[0], (30, 0), 30) == Position((30, 0), 30)
    # Trimming overtook the batch. The position continues at the end, where the count is known.
    assert end_of_range(planned[0], (300, 0), 250) == Position((300, 0), 300)


def test_plan_handles_a_limit_below_the_partition_count() -> None:
    facts = {("t", number): stream(5) for number in range(4)}
    planned = batches.plan([batch_range(p, f) for p, f in facts.items()], facts, 2, tasks=2)
    assert [each.place[1] for each in planned] == [0, 1]


def test_fully_removed_entries_are_skipped() -> None:
    """If all entries were removed, nothing is read, and the position counts them only once."""
    facts = {("t", 0): stream(0, removed=9)}
    gone = batch_range(("t", 0), facts["t", 0])._replace(begin=Position((9, 0), 9))
    planned = batches.plan([gone], facts, 100, tasks=2)
    assert [each.spans for each in planned] == [()]
    [one] = planned
    assert batches.end_positions({one.place: one.begin}, {one.place: one.target}, []) == {
        one.place: Position((9, 0), 9)
    }


def test_batch_plan_without_a_count_has_no_limit() -> None:
    """Without a count, a batch has no limit.

    At the end of a limited read, the number of issued entries would be unknown.
    """
    facts = {("t", 0): stream(300)}
    uncounted = batch_range(("t", 0), facts["t", 0])._replace(begin=Position((5, 0)))
    planned = batches.plan([uncounted], facts, 40, tasks=2)
    assert planned[0].limit is None


def test_long_stream_is_split_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PIECE_ROWS", 10)
    facts = {("t", 0): stream(100), ("t", 1): stream(9)}
    planned = batches.plan([batch_range(p, f) for p, f in facts.items()], facts, 1000, tasks=4)
    assert [len(each.spans) for each in planned] == [3, 1]
    ends = [span.end for span in planned[0].spans]
    assert ends == sorted(ends)
    assert ends[-1] == (100, 0)


def test_split_stream_ends_at_its_last_piece() -> None:
    place = ("t", 0)
    ended = [TaskEnd(0, (50, 0), 50), TaskEnd(0, (100, 0), 50), TaskEnd(1, (7, 0), 7)]
    found = batches.end_positions(
        {place: Position(ZERO, 0)}, {place: Position((100, 0), 100)}, ended
    )
    assert found == {place: Position((100, 0), 100)}


def test_waiting_lists_partitions_with_unarchived_entries() -> None:
    facts = {("t", 0): stream(9), ("t", 1): stream(5)}
    targets = {place: each.latest for place, each in facts.items()}
    archived = {("t", 0): Position((4, 0), 4), ("t", 1): Position((5, 0), 5)}
    assert batches.incomplete_partitions(archived, targets, facts) == {
        ("t", 0): Position((4, 0), 4)
    }
    assert batches.incomplete_partitions({}, targets, facts) == dict.fromkeys(
        targets, Position(ZERO, 0)
    )
    # A recreated stream has issued fewer entries than the archive has.
    archived = {("t", 0): Position((20, 0), 20), ("t", 1): Position((5, 0), 5)}
    assert batches.incomplete_partitions(archived, targets, facts) == {
        ("t", 0): Position((20, 0), 20)
    }


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 60), st.integers(1, 4))
def test_successive_batches_read_every_entry_once(
    lengths: list[int], most: int, tasks: int
) -> None:
    facts = {("t", number): stream(rows) for number, rows in enumerate(lengths)}
    targets = {place: each.latest for place, each in facts.items()}
    archived: dict[TopicPartition, Position] = {}
    taken = 0
    for _ in range(1 + sum(lengths)):
        starts = batches.incomplete_partitions(archived, targets, facts)
        ranges = [BatchRange(p, start, targets[p]) for p, start in starts.items()]
        planned = batches.plan(ranges, facts, most, tasks)
        if not planned:
            break
        batch = 0
        for each in planned:
            waiting = each.target.id[0] - each.begin.id[0]
            rows = waiting if each.limit is None else min(each.limit, waiting)
            end = (each.begin.id[0] + rows, 0) if each.limit else each.target.id
            archived[each.place] = end_of_range(each, end, rows)
            batch += rows
        assert 0 < batch <= most
        taken += batch
    assert taken == sum(lengths)
    assert not batches.incomplete_partitions(archived, targets, facts)
