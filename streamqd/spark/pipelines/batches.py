"""What one batch of an archive holds of each partition, and up to where it went. Pure.

The manifests are the only book that is kept: a batch begins where they end. A batch that was broken
off is planned anew, and may then hold other entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamqd.spark import offsets
from streamqd.spark.offsets import Offsets, Place, Position, Span, StreamFacts
from streamqd.spark.pipelines.manifest import Range

PIECE_ROWS = 100_000  # of a stream that is divided among several tasks each gets so many at least


class Stretch(NamedTuple):
    """One partition's part of a batch.

    `start` is where the manifests end; `begin` is later when entries behind it are given up. It is
    read in `spans`, none when nothing is there, and goes to `target`; with a `limit`, only as far
    as that many entries go.
    """

    place: Place
    start: Position
    begin: Position
    target: Position
    spans: tuple[Span, ...] = ()
    limit: int | None = None


def plan(
    stretches: Sequence[Stretch], facts: Mapping[Place, StreamFacts], rows_max: int, tasks: int
) -> list[Stretch]:
    """What of the stretches goes into a batch of `rows_max` entries, for so many tasks.

    Whatever is longer than its share gets a limit; the others may be divided.
    """
    spans = {
        each.place: offsets.span(each.place, each.begin, each.target, facts[each.place])
        for each in stretches
    }
    waiting = {
        each.place: _entries(spans[each.place], each.begin, facts[each.place]) for each in stretches
    }
    oldest = [
        each.place for each in sorted(stretches, key=lambda each: (each.begin.id, each.place))
    ]
    shares = offsets.shares(waiting, rows_max, oldest)
    whole = {place: share for place, share in shares.items() if share == waiting[place]}
    counts = offsets.pieces(whole, tasks)
    planned = []
    for each in stretches:
        place, span = each.place, spans[each.place]
        if span is None or not waiting[place]:
            planned.append(each)
        elif place in whole or (place in shares and each.begin.passed is None):
            count = min(counts.get(place, 1), max(1, waiting[place] // PIECE_ROWS))
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


def reached(stretch: Stretch, end: offsets.Id, rows: int) -> Range:
    """The range that was written of a stretch: `rows` of them, reading having ended at `end`."""
    target = stretch.target
    if stretch.limit is not None and end < target.id:
        assert stretch.begin.passed is not None
        target = Position(end, stretch.begin.passed + rows)
    return Range(stretch.start.id, target.id, rows, target.passed)


def starts(ends: Mapping[int, Range], targets: Offsets) -> Offsets:
    """Where each partition stands that is not archived up to its target."""
    found = {}
    for place, target in targets.items():
        held = ends.get(place[1])
        start = Position(held.end, held.passed) if held else Position(offsets.ZERO, 0)
        if start.id < target.id:
            found[place] = start
    return found
