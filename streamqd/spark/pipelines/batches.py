"""Plan the batches of an archive run: the entries of each partition, and the positions after them.

A batch starts at the end of the table, because only the table records which entries are archived.
If a batch is interrupted, the next run plans it again, possibly with different entries. This module
does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamqd.model import TopicPartition
from streamqd.spark import offsets
from streamqd.spark.offsets import Id, Offsets, Position, Span, StreamFacts

PIECE_ROWS = 100_000  # minimum entries for each task if several tasks share a stream


class BatchRange(NamedTuple):
    """The part of a batch that comes from one partition.

    It starts at `begin` and ends at `target`, or after `limit` entries if a limit is set. Each span
    in `spans` is read by one task. Without entries to read, `spans` is empty.
    """

    place: TopicPartition
    begin: Position
    target: Position
    spans: tuple[Span, ...] = ()
    limit: int | None = None


class TaskEnd(NamedTuple):
    """The position at which a task stopped, and the number of entries that it read."""

    partition: int
    end: Id
    rows: int


def incomplete_partitions(
    archived: Offsets, targets: Offsets, facts: Mapping[TopicPartition, StreamFacts]
) -> Offsets:
    """Return the archived positions of the partitions that are not archived up to their target."""
    # A partition that was never archived starts before the first entry that it ever had, so that
    # entries that were trimmed before the first run count as lost.
    starts = {place: archived.get(place, Position(offsets.ZERO, 0)) for place in targets}
    return {
        place: start
        for place, start in starts.items()
        if start.id < targets[place].id or offsets.is_replaced(start, facts[place])
    }


def plan(
    ranges: Sequence[BatchRange],
    facts: Mapping[TopicPartition, StreamFacts],
    rows_max: int,
    tasks: int,
) -> list[BatchRange]:
    """Return the stretches of a batch, with at most `rows_max` entries for this number of tasks.

    A stretch with more entries than its share of the batch gets a limit and is read by one task.
    Other stretches may be divided among several tasks.
    """
    spans = {
        each.place: offsets.span(each.place, each.begin, each.target, facts[each.place])
        for each in ranges
    }
    entries = {
        each.place: _entries(spans[each.place], each.begin, facts[each.place]) for each in ranges
    }
    oldest = [each.place for each in sorted(ranges, key=lambda each: (each.begin.id, each.place))]
    shares = offsets.shares(entries, rows_max, oldest)
    whole = {place: share for place, share in shares.items() if share == entries[place]}
    counts = offsets.pieces(whole, tasks)
    planned = []
    for each in ranges:
        place, span = each.place, spans[each.place]
        if span is None or not entries[place]:
            planned.append(each)
        elif place in whole or (place in shares and each.begin.passed is None):
            count = min(counts.get(place, 1), max(1, entries[place] // PIECE_ROWS))
            cut = offsets.split(span, count, facts[place].first) if count > 1 else [span]
            planned.append(each._replace(spans=tuple(cut)))
        elif place in shares:
            # The number of entries in the whole span does not apply, as only a part will be
            # read.
            one = span._replace(rows=None)
            planned.append(each._replace(spans=(one,), limit=shares[place]))
    return planned


def _entries(span: Span | None, begin: Position, facts: StreamFacts) -> int:
    if span is None:
        return 0
    return span.rows if span.rows is not None else offsets.backlog(begin, facts)


def end_positions(begins: Offsets, targets: Offsets, ended: Sequence[TaskEnd]) -> Offsets:
    """Return the position that each partition has reached.

    If a task stopped before the partition's target, this is the furthest position that a task
    reached. Otherwise, it is the target.
    """
    found = {}
    for place, target in targets.items():
        own = [task for task in ended if task.partition == place[1]]
        end = max((task.end for task in own), default=target.id)
        passed, rows = begins[place].passed, sum(task.rows for task in own)
        if end >= target.id:
            found[place] = target
        else:
            found[place] = Position(end, None if passed is None else passed + rows)
    return found
