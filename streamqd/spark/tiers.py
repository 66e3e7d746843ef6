"""A topic as one whole out of two tiers: files of an archive (cold), and Redis (hot). Plans only.

The manifests are the border. What they hold is read from files, what lies behind them from the
stream: each entry once, whatever Redis has trimmed of the first. The manifests are read before the
streams are asked, so what is archived in between is still taken from Redis; should it be trimmed
already, the manifests have grown, and it is planned again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamqd.errors import Refused
from streamqd.spark import offsets
from streamqd.spark.cold import ColdFile, ColdSpan, shared_out, touching
from streamqd.spark.offsets import (
    EARLIEST,
    LATEST,
    Bound,
    Id,
    Offsets,
    Place,
    Position,
    Span,
    StreamFacts,
)
from streamqd.spark.options import ReadOptions
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import Manifest
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.pushdown import Narrowing
from streamqd.spark.streams import Catalog

TASK_BYTES = 64 << 20  # of files that one task reads, unless one alone is larger
_LAST: Id = (offsets.PART_MAX, offsets.PART_MAX)
Known = Mapping[str, Sequence[Manifest]]  # topic -> manifests that count


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What the tasks read."""

    cold: list[ColdSpan]
    hot: list[Span]


class Tiers:
    """Plans one batch read with an archive."""

    def __init__(self, options: ReadOptions, narrowing: Narrowing) -> None:
        self._options = options
        self._narrowing = narrowing
        self._archive = Archive(Path(options.archive))
        self._catalog = Catalog(options)

    def plan(self) -> TierPlan:
        """What is to be read of each tier that is asked for. Raises Refused, ManifestError."""
        if self._options.tier == "cold":
            return TierPlan(self._cold(self._known(self._archived_topics()), {}, {}), [])
        places = [each for each in self._catalog.places() if self._narrowing.keeps(each)]
        names = sorted({name for name, _ in places})
        known = self._known(names)
        while True:
            facts = self._catalog.facts(places)
            starts = self._catalog.starts(facts, EARLIEST)
            ends = self._catalog.ends(facts)
            behind = {
                place: self._behind(place, starts[place], known[place[0]]) for place in places
            }
            if not any(offsets.lost(behind[place], facts[place]) for place in places):
                break
            newer = self._known(names)
            if newer == known:
                break  # it is gone indeed; told below
            known = newer
        hot = self._hot(behind, ends, facts)
        if self._options.tier == "hot":
            return TierPlan([], hot)
        return TierPlan(self._cold(known, starts, ends), hot)

    # --- hot ---

    def _behind(self, place: Place, start: Position, known: Sequence[Manifest]) -> Position:
        """Where Redis is read from: behind what is archived, or behind what was asked for."""
        held = manifests.ends(known).get(place[1])
        asked = self._edge(place, start, _starting(self._options))
        if held is None or asked >= held.end:
            return start
        return Position(held.end, held.passed)

    def _hot(
        self, starts: Offsets, ends: Offsets, facts: Mapping[Place, StreamFacts]
    ) -> list[Span]:
        spans = self._narrowing.spans(self._catalog.spans(starts, ends, facts).values())
        return self._catalog.cut({span.place: span for span in spans}, facts)

    # --- cold ---

    def _known(self, names: Sequence[str]) -> dict[str, list[Manifest]]:
        return {name: self._archive.current(name) for name in names}

    def _archived_topics(self) -> list[str]:
        """The topics of a read that asks Redis nothing. Raises Refused for one without files."""
        options, there = self._options, self._archive.topics()
        if options.pattern:
            return [name for name in there if re.fullmatch(options.pattern, name)]
        wanted = sorted(options.subscribe or {name for name, _ in options.assign})
        missing = [name for name in wanted if name not in there]
        if missing:
            raise Refused(f"nothing of {missing[0]} is archived in {self._archive.root}")
        return wanted

    def _cold(self, known: Known, starts: Offsets, ends: Offsets) -> list[ColdSpan]:
        options = self._options
        found: list[tuple[Place, Id, Id, list[ColdFile]]] = []
        for name, listed in known.items():
            for place, files in self._files(name, listed).items():
                if not self._narrowing.keeps(place):
                    continue
                if options.assign and place not in options.assign:
                    continue
                start = self._edge(place, starts.get(place), _starting(options))
                end = self._edge(place, ends.get(place), _ending(options))
                start, end = max(start, self._narrowing.low), min(end, self._narrowing.high)
                if kept := touching(files, start, end):
                    found.append((place, start, end, kept))
        total = sum(file.size for *_, files in found for file in files)
        size = min(TASK_BYTES, -(-total // max(1, options.min_partitions)))
        rows = options.max_per_partition or offsets.PART_MAX
        return [
            ColdSpan(place, start, end, tuple(portion))
            for place, start, end, files in found
            for portion in shared_out(files, size, rows)
        ]

    def _files(self, name: str, listed: Sequence[Manifest]) -> dict[Place, list[ColdFile]]:
        files: dict[Place, list[ColdFile]] = {}
        for holder in listed:
            for file in holder.files:
                paths = tuple(str(path) for path in self._archive.places(holder, file))
                cold = ColdFile(paths, file.rows, file.size, file.first, file.last)
                files.setdefault((name, file.partition), []).append(cold)
        return files

    # --- bounds ---

    def _edge(self, place: Place, position: Position | None, bounds: _Bounds) -> Id:
        """A start or an end over both tiers: what is archived is older than what Redis has left.

        `position` is what it means on the stream; None when Redis is not asked.
        """
        bound = bounds.of(place)
        if bound.kind == "earliest":
            return offsets.ZERO
        if bound.kind == "latest" and (bounds.whole or position is None):
            return _LAST
        if bound.kind == "time":
            return offsets.before_time(bound.value)
        if bound.kind == "id":
            asked: Id = bound.value
            return asked
        if bound.kind == "position":
            position = bound.value
        if position is None:
            raise Refused("where a group is only Redis knows: tier=cold reads files only")
        return position.id


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The starts or the ends as options have them."""

    name: str
    single: Mapping[Place, Bound] | None
    default: Bound
    whole: bool  # whether `latest` is behind everything, also behind what Redis does not know

    def of(self, place: Place) -> Bound:
        if self.single is None:
            return self.default
        if place not in self.single:
            raise Refused(f"{self.name} leaves {place[0]} {place[1]} out: all must be named")
        return self.single[place]


def _starting(options: ReadOptions) -> _Bounds:
    return _Bounds("startingOffsets", options.starting, options.starting_default or EARLIEST, False)


def _ending(options: ReadOptions) -> _Bounds:
    return _Bounds("endingOffsets", options.ending, options.ending_default or LATEST, True)
