"""The data source `streamq` for Spark: `spark.read.format("streamq")` and its three siblings.

Spark makes these objects in several processes, pickles them and throws them away: they hold options
only, and read everything else from Redis again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
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

from streamqd.errors import Refused
from streamqd.model import TopicPartition
from streamqd.spark import offsets, rows, sink, table
from streamqd.spark.offsets import Loss, Offsets, Position, Span, StreamFacts
from streamqd.spark.options import (
    ReadOptions,
    WriteOptions,
    read_options,
    refuse_ignored,
    write_options,
)
from streamqd.spark.pushdown import Narrowing
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog

LOOKS = 5  # at a stream that is trimmed while it is counted


class StreamqSource(DataSource):
    """Topics of streamqd, and their dead letters as `TOPIC:dlq`."""

    @classmethod
    def name(cls) -> str:
        return "streamq"

    def schema(self) -> str | StructType:
        """Return the selected columns. The columns of a CREATE TABLE carry its options."""
        raw = dict(self.options)
        declared = table.declared(raw)
        options = read_options(raw if declared is None else declared, os.environ)
        own = _columns(options)
        if declared is not None and options.columns:
            raise ValueError("streamq: a table has all columns; remove columns, and select some")
        if declared is not None:
            return table.schema(own, declared)
        return rows.ddl(rows.named(own, options.columns) if options.columns else own)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._read_options(schema, stream=False)
        kind = FilteringReader if options.pushdown else TopicReader
        return kind(options, chosen_columns(schema, options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = self._read_options(schema, stream=True)
        if options.ending is not None or options.ending_default is not None:
            raise ValueError(
                "streamq: a stream has no end; remove endingOffsets, endingTimestamp and"
                " endingOffsetsByTimestamp, and read a batch or use the trigger availableNow,"
                " which stops at the newest entry"
            )
        return TopicStreamReader(options, chosen_columns(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a batch writer. The mode must be append."""
        if overwrite:
            raise ValueError(
                'streamq: a topic cannot be overwritten, only mode("append") is supported'
            )
        return sink.TopicWriter(self._write_options(schema))

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return a streaming writer. The output mode must be append."""
        if overwrite:
            raise ValueError(
                "streamq: a topic cannot be overwritten, so the mode complete is not supported"
            )
        return sink.TopicStreamWriter(self._write_options(schema))

    def _write_options(self, schema: StructType) -> WriteOptions:
        options = write_options(table.write_options(schema, dict(self.options)), os.environ)
        sink.check_schema(schema, options)
        sink.prepare(options)
        return options

    def _read_options(self, schema: StructType, *, stream: bool) -> ReadOptions:
        given = dict(self.options)
        found = read_options(table.read_options(schema, given), os.environ)
        refuse_ignored(given, stream=stream)
        return found


def _columns(options: ReadOptions) -> tuple[rows.Column, ...]:
    return rows.columns(dead=options.dead, headers=options.headers, fields=options.fields)


def chosen_columns(schema: StructType, options: ReadOptions) -> list[rows.Column]:
    """Return the columns that a schema names. A user's schema may omit and reorder columns.

    Raises ValueError for an unknown column, or a column of another type.
    """
    chosen = rows.named(_columns(options), schema.names)
    for field, column in zip(schema.fields, chosen, strict=True):
        if field.dataType.simpleString() != column.ddl or not field.nullable:
            raise ValueError(f"streamq: the column {field.name} must be a nullable {column.ddl}")
    return list(chosen)


def _check_order(options: ReadOptions, starts: Offsets, ends: Offsets) -> None:
    """Raise Refused for a partition whose options name a start after its end."""
    for place, start in starts.items():
        named = [
            options.starting_default if options.starting is None else options.starting[place],
            options.ending_default if options.ending is None else options.ending[place],
        ]
        if all(each and each.kind in ("id", "time") for each in named) and (
            start.id > ends[place].id
        ):
            raise Refused(
                f"{place[0]} partition {place[1]} has no entries to read: its start,"
                f" {offsets.write_id(start.id)}, is after its end,"
                f" {offsets.write_id(ends[place].id)}; swap startingOffsets and endingOffsets"
            )


class SpanPartition(InputPartition):
    """The part of a read for one task."""

    def __init__(self, span: Span) -> None:
        super().__init__(tuple(span))
        self.span = span


class _Reading:
    """The common part of batch and stream: options, columns, and the reading of a task."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        self.options = options
        self.chosen = chosen

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task. Without a span, there are no rows."""
        if not isinstance(partition, SpanPartition):
            return
        span = partition.span
        made = rows.Table(self.chosen, _columns(self.options), span.place)
        for entries in EntryReader(self.options, span).batches():
            yield made.batch(entries)


class TopicReader(_Reading, DataSourceReader):
    """A batch read: everything between two offsets that are fixed when it is planned."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        super().__init__(options, chosen)
        self.narrowing = Narrowing()

    def partitions(self) -> Sequence[InputPartition]:
        catalog = Catalog(self.options)
        places = [place for place in catalog.places() if self.narrowing.keeps(place)]
        facts = catalog.facts(places)
        starts = catalog.starts(facts, offsets.EARLIEST)
        ends = catalog.ends(facts)
        _check_order(self.options, starts, ends)
        spans = self.narrowing.spans(catalog.spans(starts, ends, facts).values())
        cut = catalog.cut({span.place: span for span in spans}, facts)
        return [SpanPartition(span) for span in cut]


class FilteringReader(TopicReader):
    """A batch read that takes filters. Spark refuses such a reader unless its conf allows it."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        return self.narrowing.take(filters)


SHOW_SECONDS = 10.0  # seconds between two reports of a waiting query


class TopicStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Spark keeps the offsets in its checkpoint. Redis may show them too."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        super().__init__(options, chosen)
        self._initial: dict[str, Any] | None = None
        self._target: Offsets | None = None
        self._end: Offsets = {}  # end of the batch that was planned last
        self._seen: dict[TopicPartition, int] = {}  # entries ever created, at the last check
        self._took_at = float("-inf")
        self._shown: Offsets = {}
        self._shown_at = float("-inf")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the start of a query without a checkpoint. Spark calls it more than once."""
        if self._initial is None:
            catalog = Catalog(self.options)
            facts = catalog.facts(catalog.places())
            starts = catalog.counted(catalog.starts(facts, offsets.LATEST), facts)
            self._initial = offsets.to_json(starts)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._latest()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the newest entries, and how many come after the batch that was planned last."""
        latest = self._latest()
        lag = offsets.lag(self._end, latest)
        return offsets.to_json(latest) | ({offsets.LAG: lag} if lag else {})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch: the newest entries, or the limit of each partition."""
        catalog = Catalog(self.options)
        begun = offsets.from_json(start)
        places = catalog.places(begun, strict=self.options.fail_on_data_loss)
        gone = catalog.vanished(begun, places)
        begun = {place: each for place, each in begun.items() if place not in gone}
        self._show(catalog, begun)
        if self._target is not None:
            places = [place for place in places if place in self._target]
        facts = catalog.facts(places)
        recreated = {p for p in places if p in begun and offsets.replaced(begun[p], facts[p])}
        self._seen |= {place: facts[place].added for place in places if place not in recreated}
        facts, _, waiting = self._waiting(begun, facts)
        total = sum(waiting.values())
        if not (gone or recreated) and self._holds_back(total):
            return start
        self._took_at = time.monotonic()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if most is None or isinstance(limit, ReadAllAvailable) or total <= most:
            ends = {place: facts[place].latest for place in places}
        else:
            ends = self._limited(catalog, begun, most, facts)
        self._end = begun | _forward(begun, ends, recreated)
        return offsets.to_json(self._end)

    def _limited(
        self,
        catalog: Catalog,
        begun: Offsets,
        most: int,
        facts: Mapping[TopicPartition, StreamFacts],
    ) -> Offsets:
        """Return end positions for `most` entries in total, with a share for each partition."""
        for _ in range(LOOKS):
            facts, starts, waiting = self._waiting(begun, facts)
            oldest = sorted(waiting, key=lambda place: (starts[place].id, place))
            shares = offsets.shares(waiting, most, oldest)
            walked = catalog.walk({p: (starts[p].id, facts[p].last, n) for p, n in shares.items()})
            if not catalog.overtaken({p: starts[p] for p in shares}, facts):
                break
            facts = catalog.facts(list(facts))
        return {
            place: Position(to.id, None if before is None else before + to.passed)
            for place, to in walked.items()
            for before in (starts[place].passed,)
        }

    def _waiting(
        self, begun: Offsets, facts: Mapping[TopicPartition, StreamFacts]
    ) -> tuple[dict[TopicPartition, StreamFacts], Offsets, dict[TopicPartition, int]]:
        """Return the facts up to the target, the start of the query, and its backlog."""
        now = {place: self._as_of_target(place, each) for place, each in facts.items()}
        starts = {}
        for place, each in now.items():
            # A new partition starts at its first entry. A loss is reported when the batch is
            # planned in full, not here.
            new = Position(offsets.ZERO, 0 if each.exact else None)
            starts[place] = offsets.onward(begun.get(place, new), each)
        return now, starts, {p: offsets.backlog(starts[p], each) for p, each in now.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks. Raises DataLossError for missing entries, streams or topics."""
        catalog = Catalog(self.options)
        starts, ends = offsets.from_json(start), offsets.from_json(end)
        self._end = ends
        for place in sorted(starts.keys() - ends.keys()):
            entries = offsets.unread(starts[place], self._seen.get(place))
            catalog.report_gap(place, starts[place], Loss("vanished", entries))
        facts = catalog.facts(sorted(ends))
        spans = catalog.spans(starts, ends, facts, self._seen)
        return [SpanPartition(span) for span in catalog.cut(spans, facts)]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark calls it late or never, so no state may depend on it."""

    def _show(self, catalog: Catalog, begun: Offsets) -> None:
        """Show the position: the query has committed all before the start of its next batch."""
        late = time.monotonic() - self._shown_at >= SHOW_SECONDS
        if self.options.group and (late or begun != self._shown):
            catalog.show(begun)
            self._shown, self._shown_at = begun, time.monotonic()

    def _latest(self) -> Offsets:
        catalog = Catalog(self.options)
        places = catalog.places(strict=False)
        return {place: facts.latest for place, facts in catalog.facts(places).items()}

    def _as_of_target(self, place: TopicPartition, facts: StreamFacts) -> StreamFacts:
        """Return the facts as of the target, without later entries. The stream is the same."""
        if self._target is None:
            return facts
        if offsets.replaced(self._target[place], facts):
            self._target[place] = facts.latest
        target = self._target[place]
        newer = facts.added - target.passed if target.passed is not None else 0
        length = max(0, facts.length - newer)
        return facts._replace(
            length=length,
            added=facts.added - newer,
            last=min(facts.last, target.id),
            first=facts.first if length else None,
        )

    def _holds_back(self, total: int) -> bool:
        """Return True to wait for more entries. A query with an end never waits."""
        if self._target is not None or total >= self.options.min_per_trigger:
            return False
        return time.monotonic() - self._took_at < self.options.max_trigger_delay


def _forward(begun: Offsets, ends: Offsets, recreated: set[TopicPartition]) -> Offsets:
    """Return the end positions after their start, or in a new stream. The others stay as they are.

    Spark compares offsets as texts to decide whether there is work to do.
    """
    return {
        place: end
        for place, end in ends.items()
        if place in recreated or place not in begun or end.id > begun[place].id
    }
