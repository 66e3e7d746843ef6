"""What one batch of an archive takes of each partition, and up to where it came. Pure.

The table is the only book that is kept: a batch begins where it ends. A batch that was broken off
is planned again, and may then hold other entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamqd.model import TopicPartition
from streamqd.spark import offsets
from streamqd.spark.offsets import Id, Offsets, Position, Span, StreamFacts

PIECE_ROWS = 100_000  # of a stream that is divided among several tasks each gets so many at least


class Stretch(NamedTuple):
    """One partition's part of a batch.

    It begins at `begin`, is read in `spans`, none when nothing is there, and goes to `target`; with
    a `limit`, only as far as that many entries go.
    """

    place: TopicPartition
    begin: Position
    target: Position
    spans: tuple[Span, ...] = ()
    limit: int | None = None


class TaskEnd(NamedTuple):
    """Where a task ended, and how many entries it had read."""

    partition: int
    end: Id
    rows: int


def waiting(
    archived: Offsets, targets: Offsets, facts: Mapping[TopicPartition, StreamFacts]
) -> Offsets:
    """Where each partition stands that is not archived up to its target."""
    # One that is not archived yet begins before its first entry: what is trimmed is a loss.
    starts = {place: archived.get(place, Position(offsets.ZERO, 0)) for place in targets}
    return {
        place: start
        for place, start in starts.items()
        if start.id < targets[place].id or offsets.replaced(start, facts[place])
    }


def plan(
    stretches: Sequence[Stretch],
    facts: Mapping[TopicPartition, StreamFacts],
    rows_max: int,
    tasks: int,
) -> list[Stretch]:
    """What of the stretches goes into a batch of `rows_max` entries, for so many tasks.

    Whatever is longer than its share gets a limit; the others may be divided.
    """
    spans = {
        each.place: offsets.span(each.place, each.begin, each.target, facts[each.place])
        for each in stretches
    }
    entries = {
        each.place: _entries(spans[each.place], each.begin, facts[each.place]) for each in stretches
    }
    oldest = [
        each.place for each in sorted(stretches, key=lambda each: (each.begin.id, each.place))
    ]
    shares = offsets.shares(entries, rows_max, oldest)
    whole = {place: share for place, share in shares.items() if share == entries[place]}
    counts = offsets.pieces(whole, tasks)
    planned = []
    for each in stretches:
        place, span = each.place, spans[each.place]
        if span is None or not entries[place]:
            planned.append(each)
        elif place in whole or (place in shares and each.begin.passed is None):
            count = min(counts.get(place, 1), max(1, entries[place] // PIECE_ROWS))
            cut = offsets.split(span, count, facts[place].first) if count > 1 else [span]
            planned.append(each._replace(spans=tuple(cut)))
        elif place in shares:
            # How many rows there are up to the end of the span says nothing about this part of it.
            one = span._replace(rows=None)
            planned.append(each._replace(spans=(one,), limit=shares[place]))
    return planned


def _entries(span: Span | None, begin: Position, facts: StreamFacts) -> int:
    if span is None:
        return 0
    return span.rows if span.rows is not None else offsets.backlog(begin, facts)


def reached(begins: Offsets, targets: Offsets, ended: Sequence[TaskEnd]) -> Offsets:
    """Up to where each partition is read, its tasks having ended there: at the target or before."""
    found = {}
    for place, target in targets.items():
        own = [each for each in ended if each.partition == place[1]]
        end = max((each.end for each in own), default=target.id)
        passed, rows = begins[place].passed, sum(each.rows for each in own)
        if end >= target.id:
            found[place] = target
        else:
            found[place] = Position(end, None if passed is None else passed + rows)
    return found
