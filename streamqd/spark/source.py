"""The data source `streamq` for Spark: `spark.read.format("streamq")` and its three siblings.

Spark makes these objects in several processes, pickles them and throws them away: they hold options
only, what they know of Redis they ask for again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from streamqd.spark import cold, offsets, rows, sink
from streamqd.spark.cold import ColdSpan
from streamqd.spark.offsets import (
    EARLIEST,
    LATEST,
    Loss,
    Offsets,
    Place,
    Position,
    Span,
    StreamFacts,
)
from streamqd.spark.options import ReadOptions, WriteOptions, read_options, write_options
from streamqd.spark.pushdown import Narrowing
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog
from streamqd.spark.tiers import Tiers

if TYPE_CHECKING:
    import pyarrow as pa


class StreamqSource(DataSource):
    """Topics of streamqd, and their dead letters as `TOPIC:dlq`."""

    @classmethod
    def name(cls) -> str:
        return "streamq"

    def schema(self) -> str:
        """The columns that the options ask for, as DDL."""
        return rows.ddl(_columns(self._read_options()))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._read_options()
        kind = FilteringReader if options.pushdown else TopicReader
        return kind(options, chosen_columns(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = self._read_options()
        if options.archive:
            raise ValueError(
                "streamq: tier and archivePath are for batch reads, a stream reads Redis only: read"
                " what is archived as a batch first"
            )
        return TopicStreamReader(options, chosen_columns(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write; the mode must be append."""
        if overwrite:
            raise ValueError('streamq: a topic is never overwritten: use mode("append")')
        return sink.TopicWriter(self._write_options(schema))

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """A streaming write; the output mode must be append."""
        if overwrite:
            raise ValueError("streamq: a topic is never overwritten: the mode complete has no use")
        return sink.TopicStreamWriter(self._write_options(schema))

    def _write_options(self, schema: StructType) -> WriteOptions:
        options = write_options(dict(self.options), os.environ)
        sink.check_schema(schema, options)
        sink.prepare(options)
        return options

    def _read_options(self) -> ReadOptions:
        return read_options(dict(self.options), os.environ)


def _columns(options: ReadOptions) -> tuple[rows.Column, ...]:
    return rows.columns(dead=options.dead, headers=options.headers, fields=options.fields)


def chosen_columns(schema: StructType, options: ReadOptions) -> list[rows.Column]:
    """The columns that a schema names; whoever gives one of his own may leave out and reorder.

    Raises ValueError for a column that there is not, or of another type.
    """
    own = {column.name: column for column in _columns(options)}
    chosen = []
    for field in schema.fields:
        column = own.get(field.name)
        if column is None:
            raise ValueError(
                f"streamq: there is no column {field.name}; there are {', '.join(own)}"
            )
        if field.dataType.simpleString() != column.ddl or not field.nullable:
            raise ValueError(f"streamq: the column {field.name} is a nullable {column.ddl}")
        chosen.append(column)
    return chosen


class SpanPartition(InputPartition):
    """What one task reads."""

    def __init__(self, span: Span) -> None:
        super().__init__(tuple(span))
        self.span = span


class ColdPartition(InputPartition):
    """What one task reads of an archive."""

    def __init__(self, span: ColdSpan) -> None:
        super().__init__(tuple(span))
        self.span = span


class _Reading:
    """What batch and stream have in common: options, columns, and how a task reads."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        self.options = options
        self.chosen = chosen

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Without a span there is nothing to read at all."""
        if isinstance(partition, ColdPartition):
            yield from cold.batches(partition.span, self.chosen)
            return
        if not isinstance(partition, SpanPartition):
            return
        span = partition.span
        table = rows.Table(self.chosen, _columns(self.options), span.place)
        for entries in EntryReader(self.options, span).batches():
            yield table.batch(entries)


class TopicReader(_Reading, DataSourceReader):
    """A batch read: everything between two offsets that are fixed when it is planned.

    With an archive, of two tiers; each entry of one of them.
    """

    def partitions(self) -> Sequence[InputPartition]:
        return self._plan(Narrowing())

    def _plan(self, narrowing: Narrowing) -> list[InputPartition]:
        if self.options.archive:
            planned = Tiers(self.options, narrowing).plan()
            files = [ColdPartition(span) for span in planned.cold]
            return [*files, *(SpanPartition(span) for span in planned.hot)]
        catalog = Catalog(self.options)
        places = [place for place in catalog.places() if narrowing.keeps(place)]
        facts = catalog.facts(places)
        starts = catalog.starts(facts, EARLIEST)
        ends = catalog.ends(facts)
        spans = narrowing.spans(catalog.spans(starts, ends, facts).values())
        cut = catalog.cut({span.place: span for span in spans}, facts)
        return [SpanPartition(span) for span in cut]


class FilteringReader(TopicReader):
    """A batch read that takes filters. Spark refuses such a reader unless its conf allows it."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        super().__init__(options, chosen)
        self._narrowing = Narrowing()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        return self._narrowing.take(filters)

    def partitions(self) -> Sequence[InputPartition]:
        return self._plan(self._narrowing)


class TopicStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Spark keeps the offsets in its checkpoint; Redis is not told."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        super().__init__(options, chosen)
        self._initial: dict[str, Any] | None = None
        self._target: Offsets | None = None
        self._seen: dict[Place, int] = {}  # entries that were ever issued, as far as was looked at
        self._took_at = float("-inf")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a query without a checkpoint begins. Spark asks more than once."""
        if self._initial is None:
            catalog = Catalog(self.options)
            facts = catalog.facts(catalog.places())
            starts = catalog.counted(catalog.starts(facts, LATEST), facts)
            self._initial = offsets.to_json(starts)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._latest()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return offsets.to_json(self._latest())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes: to the end, or as far as the limit lets each partition."""
        catalog = Catalog(self.options)
        begun = offsets.from_json(start)
        places = catalog.places(begun, strict=self.options.fail_on_data_loss)
        gone = catalog.vanished(begun, places)
        begun = {place: each for place, each in begun.items() if place not in gone}
        if self._target is not None:
            places = [place for place in places if place in self._target]
        facts = catalog.facts(places)
        anew = {p for p in places if p in begun and offsets.replaced(begun[p], facts[p])}
        self._seen |= {place: facts[place].added for place in places if place not in anew}
        if self._target is not None:
            facts = {place: self._as_of_target(place, facts[place]) for place in places}
        starts = {place: _readable(begun.get(place), facts[place]) for place in places}
        waiting = {place: offsets.backlog(starts[place], facts[place]) for place in places}
        total = sum(waiting.values())
        if not (gone or anew) and self._holds_back(total):
            return start
        self._took_at = time.monotonic()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if most is None or isinstance(limit, ReadAllAvailable) or total <= most:
            ends = {place: facts[place].latest for place in places}
        else:
            ends = _limited(catalog, starts, waiting, facts, most)
        return offsets.to_json(begun | _forward(begun, ends, anew))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """What the tasks read. Raises DataLossError for entries, streams, topics that are gone."""
        catalog = Catalog(self.options)
        starts, ends = offsets.from_json(start), offsets.from_json(end)
        for place in sorted(starts.keys() - ends.keys()):
            entries = offsets.unread(starts[place], self._seen.get(place))
            catalog.told(place, starts[place], Loss("vanished", entries))
        facts = catalog.facts(sorted(ends))
        spans = catalog.spans(starts, ends, facts, self._seen)
        return [SpanPartition(span) for span in catalog.cut(spans, facts)]

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: Spark calls it late or never, so nobody may rely on it."""

    def _latest(self) -> Offsets:
        catalog = Catalog(self.options)
        places = catalog.places(strict=False)
        return {place: facts.latest for place, facts in catalog.facts(places).items()}

    def _as_of_target(self, place: Place, facts: StreamFacts) -> StreamFacts:
        """The facts as if nothing had come after the target, which is of the same stream."""
        assert self._target is not None
        if offsets.replaced(self._target[place], facts):
            self._target[place] = facts.latest
        return _as_of(facts, self._target[place])

    def _holds_back(self, total: int) -> bool:
        """Whether to wait for more. A query that is to end never waits."""
        if self._target is not None or total >= self.options.min_per_trigger:
            return False
        return time.monotonic() - self._took_at < self.options.max_trigger_delay


def _readable(start: Position | None, facts: StreamFacts) -> Position:
    """Where reading can begin: a new partition at its first entry, else behind what is gone.

    That something is gone is told when the batch is planned in full, not here.
    """
    return offsets.onward(start or Position(offsets.ZERO, 0 if facts.exact else None), facts)


def _as_of(facts: StreamFacts, target: Position) -> StreamFacts:
    """The facts as if nothing had come after the target."""
    newer = facts.added - target.passed if target.passed is not None else 0
    length = max(0, facts.length - newer)
    return facts._replace(
        length=length,
        added=facts.added - newer,
        last=min(facts.last, target.id),
        first=facts.first if length else None,
    )


def _limited(
    catalog: Catalog,
    starts: Offsets,
    waiting: dict[Place, int],
    facts: dict[Place, StreamFacts],
    most: int,
) -> Offsets:
    """Ends that take `most` entries in all, from each partition its share."""
    oldest = sorted(waiting, key=lambda place: (starts[place].id, place))
    shares = offsets.shares(waiting, most, oldest)
    asked = {place: (starts[place].id, facts[place].last, share) for place, share in shares.items()}
    ends = {}
    for place, walked in catalog.walk(asked).items():
        before = starts[place].passed
        passed = None if before is None else before + walked.passed
        ends[place] = Position(walked.id, passed)
    return ends


def _forward(begun: Offsets, ends: Offsets, anew: set[Place]) -> Offsets:
    """The ends that lie beyond their start, or in a stream made anew. The others stay as they are.

    Spark compares offsets as texts to see whether there is anything to do.
    """
    zero = Position(offsets.ZERO)
    return {
        place: end
        for place, end in ends.items()
        if place in anew or end.id > begun.get(place, zero).id or place not in begun
    }
