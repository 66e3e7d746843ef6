"""The `streamq` data source for Spark, with batch and streaming reads and writes.

Spark creates these objects in several processes, pickles them and discards them. They therefore
hold only options, and read everything else from Redis each time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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

from streamqd import config
from streamqd.errors import RequestRefusedError, SparkError
from streamqd.model import TopicPartition
from streamqd.paths import store_url
from streamqd.spark import offsets, rows, sink, table
from streamqd.spark.backfill import ArchivedPart, Backfill
from streamqd.spark.location import Location, location
from streamqd.spark.offsets import Id, Loss, Offsets, Position, Span, StreamFacts
from streamqd.spark.options import (
    NO_ARCHIVE,
    ReadOptions,
    WriteOptions,
    read_options,
    refuse_ignored,
    write_options,
)
from streamqd.spark.pushdown import PushedFilters
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog, report_loss

_log = logging.getLogger("streamqd.spark")

PLAN_ATTEMPTS = 5  # attempts to plan a limited batch while trimming overtakes its start


class StreamqSource(DataSource):
    """The data source for topics, and for their dead letters as `TOPIC:dlq`."""

    @classmethod
    def name(cls) -> str:
        return "streamq"

    def schema(self) -> str | StructType:
        """Return the selected columns.

        For CREATE TABLE, the options of the table are stored in the metadata of its columns.
        """
        raw = dict(self.options)
        declared = table.creation_options(raw)
        options = read_options(raw if declared is None else declared, os.environ)
        own = _columns(options)
        if declared is not None and options.columns:
            raise ValueError(
                "streamq: option columns cannot be used in CREATE TABLE; remove it, and select the"
                " columns in the query"
            )
        if declared is not None:
            return table.schema(own, declared)
        return rows.ddl(rows.select_columns(own, options.columns) if options.columns else own)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._read_options(schema, stream=False)
        if options.archive:
            raise ValueError(NO_ARCHIVE)
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
        folder = self._archive_folder(options)
        backfill = None if folder is None else Backfill(folder)
        return TopicStreamReader(options, chosen_columns(schema, options), backfill)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a batch writer. Raises ValueError for any save mode other than append."""
        if overwrite:
            raise ValueError(
                'streamq: a topic cannot be overwritten, only mode("append") is supported'
            )
        return sink.TopicWriter(self._write_options(schema))

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return a streaming writer. Raises ValueError if the output mode is complete."""
        if overwrite:
            raise ValueError(
                "streamq: a topic cannot be overwritten, so the mode complete is not supported"
            )
        return sink.TopicStreamWriter(self._write_options(schema))

    def _archive_folder(self, options: ReadOptions) -> Location | None:
        """Return the archive of a stream, or None if the stream reads only from Redis.

        If the archive is in an object store, its client uses the options in the driver's
        configuration file.
        """
        if not options.archive:
            return None
        stored = None
        if store_url(options.archive) and (file := config.find(os.environ)):
            stored = config.load(file, environ=os.environ).archive.pairs
        return location(options.archive, stored)

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


def archive_source(folder: Location, name: str) -> type[StreamqSource]:
    """Return a data source that reads from one archive and is registered under its own name.

    The directory of the archive is stored in the class and not in an option, because it may contain
    credentials, and Spark shows options in plans and event logs.
    """

    class ArchiveSource(StreamqSource):
        """A data source for streams that may start in a particular archive."""

        @classmethod
        def name(cls) -> str:
            return name

        def _archive_folder(self, options: ReadOptions) -> Location | None:  # noqa: ARG002
            return folder

    return ArchiveSource


def _columns(options: ReadOptions) -> tuple[rows.Column, ...]:
    return rows.columns(dead=options.dead, headers=options.headers, fields=options.fields)


def chosen_columns(schema: StructType, options: ReadOptions) -> list[rows.Column]:
    """Return the columns that a schema contains. A user's schema may omit or reorder columns.

    Raises ValueError if a column does not exist or has the wrong type.
    """
    chosen = rows.select_columns(_columns(options), schema.names)
    for field, column in zip(schema.fields, chosen, strict=True):
        if field.dataType.simpleString() != column.ddl or not field.nullable:
            raise ValueError(f"streamq: the column {field.name} must be a nullable {column.ddl}")
    return list(chosen)


def _check_order(options: ReadOptions, starts: Offsets, ends: Offsets) -> None:
    """Raise RequestRefusedError if a start that the options set is after the end.

    Only bounds that are IDs or times are compared.
    """
    for place, start in starts.items():
        named = [
            options.starting_default if options.starting is None else options.starting[place],
            options.ending_default if options.ending is None else options.ending[place],
        ]
        if all(each and each.kind in ("id", "time") for each in named) and (
            start.id > ends[place].id
        ):
            raise RequestRefusedError(
                f"{place[0]} partition {place[1]} has no entries to read: its start,"
                f" {offsets.write_id(start.id)}, is after its end,"
                f" {offsets.write_id(ends[place].id)}; swap startingOffsets and endingOffsets"
            )


class ArchivedPartition(InputPartition):
    """The part of a read that one task takes from archive files."""

    def __init__(self, part: ArchivedPart) -> None:
        super().__init__(part.place)
        self.part = part


class SpanPartition(InputPartition):
    """The part of a read that one task takes from a stream in Redis."""

    def __init__(self, span: Span) -> None:
        super().__init__(tuple(span))
        self.span = span


class _Reading:
    """The base class of the batch reader and the streaming reader. It reads the rows of a task."""

    def __init__(
        self,
        options: ReadOptions,
        chosen: Sequence[rows.Column],
        backfill: Backfill | None = None,
    ) -> None:
        self.options = options
        self.chosen = chosen
        self.backfill = backfill

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task.

        The partition must be an ArchivedPartition or a SpanPartition.
        """
        if isinstance(partition, SpanPartition):
            yield from self._entries(partition.span)
        elif isinstance(partition, ArchivedPartition) and self.backfill is not None:
            yield from self.backfill.read(partition.part, self.chosen)

    def _entries(self, span: Span) -> Iterator[pa.RecordBatch]:
        made = rows.Table(self.chosen, _columns(self.options), span.place)
        reader = EntryReader(self.options, span, report=self.backfill is None)
        for entries in reader.batches():
            yield made.batch(entries)
        if self.backfill is not None and reader.loss is not None:
            yield from self._refill(self.backfill, span, reader, reader.loss)

    def _refill(
        self, backfill: Backfill, span: Span, reader: EntryReader, loss: Loss
    ) -> Iterator[pa.RecordBatch]:
        """Yield, from the archive, entries that trimming removed from Redis during the read.

        Missing entries after the end of the archive are looked up in Redis. If an entry is in
        neither place, this raises DataLossError or logs the loss, as the options request.
        """
        fail, place = self.options.fail_on_data_loss, span.place
        archived = backfill.open_tables([place[0]]).get(place)
        if loss.kind != "trimmed" or archived is None:
            report_loss(place, span.start, loss, fail=fail)
            return
        found, complete = reader.rows, True
        for after, upto in reader.gaps:
            for part in backfill.parts(place, after, min(upto, archived.id)):
                for batch in backfill.read(part, self.chosen):
                    found += batch.num_rows
                    yield batch
            if upto > archived.id:
                complete = False
                start = archived if archived.id >= after else Position(after)
                yield from self._read_remaining(place, start, upto)
        if complete and span.rows is not None and found < span.rows:
            report_loss(place, span.start, Loss("trimmed", span.rows - found), fail=fail)

    def _read_remaining(
        self, place: TopicPartition, start: Position, upto: Id
    ) -> Iterator[pa.RecordBatch]:
        """Yield the entries after a position that are still in Redis.

        Report missing entries as a loss.
        """
        facts = Catalog(self.options).facts([place])[place]
        if loss := offsets.find_loss(start, facts):
            report_loss(place, start.id, loss, fail=self.options.fail_on_data_loss)
        remaining = offsets.span(
            place, offsets.resume_position(start, facts), Position(upto), facts
        )
        if remaining is not None:
            yield from self._entries(remaining)


class TopicReader(_Reading, DataSourceReader):
    """A batch read of the entries between two offsets, which are fixed when the read is planned."""

    def __init__(self, options: ReadOptions, chosen: Sequence[rows.Column]) -> None:
        super().__init__(options, chosen)
        self.pushed = PushedFilters()

    def partitions(self) -> Sequence[InputPartition]:
        catalog = Catalog(self.options)
        places = [place for place in catalog.places() if self.pushed.may_match(place)]
        facts = catalog.facts(places)
        starts = catalog.starts(facts, offsets.EARLIEST)
        ends = catalog.ends(facts)
        _check_order(self.options, starts, ends)
        spans = self.pushed.spans(catalog.spans(starts, ends, facts).values())
        cut = catalog.cut({span.place: span for span in spans}, facts)
        return [SpanPartition(span) for span in cut]


class FilteringReader(TopicReader):
    """A batch read that applies filters.

    Spark accepts such a reader only if its configuration enables filter pushdown for Python
    sources.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        return self.pushed.push(filters)


REOPEN_INTERVAL_SECONDS = 60.0  # seconds after which a query that reads an archive opens it again
SHOW_SECONDS = 10.0  # seconds between publications of an unchanged position
_NEW = Position(offsets.ZERO, 0)  # start of a new partition, which is read from its first entry


class TopicStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read.

    Spark stores the query's offsets in its checkpoint. If the query has a group, its position is
    also published in Redis, where other commands can see it.
    """

    def __init__(
        self,
        options: ReadOptions,
        chosen: Sequence[rows.Column],
        backfill: Backfill | None = None,
    ) -> None:
        super().__init__(options, chosen, backfill)
        self._initial: dict[str, Any] | None = None
        self._target: Offsets | None = None
        self._end: Offsets = {}  # end of the last planned batch
        self._seen: dict[TopicPartition, int] = {}  # entries ever added, as of the last check
        self._took_at = float("-inf")
        self._shown: Offsets = {}
        self._shown_at = float("-inf")
        self._archived_to: Offsets = {}  # end positions of the opened archive tables
        self._topics: set[str] = set()  # topics whose archive tables were opened
        self._looked_at = float("-inf")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the start of a query that has no checkpoint. Spark calls this more than once."""
        if self._initial is None:
            catalog = Catalog(self.options)
            places = catalog.places()
            if self.backfill is not None:
                self._open_tables(self.backfill, places)
            facts = catalog.facts(places)
            starts = catalog.starts(facts, offsets.LATEST, self._archived_to)
            starts = catalog.add_counts(starts, facts)
            self._initial = offsets.to_json(starts)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._latest()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the latest positions, and the lag of the last planned batch if it is known."""
        latest = self._latest()
        lag = offsets.lag(self._estimate_counts(self._end), latest)
        return offsets.to_json(latest) | ({offsets.LAG: lag} if lag else {})

    def _estimate_counts(self, ends: Offsets) -> Offsets:
        """Return the positions. In the archive, positions without a count get an estimated one."""
        found = dict(ends)
        for place, end in ends.items():
            border = self._archived_to.get(place)
            if self.backfill is None or border is None or border.passed is None:
                continue
            if end.passed is None and end.id < border.id:
                left = self.backfill.count_rows(place, end.id, border.id)
                found[place] = Position(end.id, max(0, border.passed - left))
        return found

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch.

        This is the newest entry of each partition, or an earlier one if the read limit requires it.
        If the query should wait for more entries, return `start`.
        """
        catalog = Catalog(self.options)
        begun = offsets.from_json(start)
        places = catalog.places(begun, strict=self.options.fail_on_data_loss)
        gone = set(catalog.find_vanished(begun, places))
        self._show(catalog, {place: each for place, each in begun.items() if place not in gone})
        if self._target is not None:
            places = [place for place in places if place in self._target]
        hot, facts = self._archive_borders(catalog, begun, [*places, *gone])
        recreated = {p for p in places if p in hot and offsets.is_replaced(hot[p], facts[p])}
        self._seen |= {place: facts[place].added for place in places if place not in recreated}
        # If a stream was deleted or recreated, the rest of its archive is read first. The loss of
        # later entries is reported in a later batch.
        ended = {p for p in gone | recreated if _has_later_end(begun, hot, p)}
        begun = {place: each for place, each in begun.items() if place not in gone - ended}
        facts = {place: facts[place] for place in places if place not in ended}
        facts, _, waiting = self._count_backlog(hot, facts)
        cold = self._count_archived(begun, hot, [*facts, *ended])
        total = sum(waiting.values()) + sum(cold.values())
        if not (gone or recreated) and self._must_wait(total):
            return start
        self._took_at = time.monotonic()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        guessed = self._find_estimated(begun, hot, cold)
        ends = {place: hot[place] for place in ended}
        if most is None or isinstance(limit, ReadAllAvailable) or (total <= most and not guessed):
            ends |= {place: each.latest for place, each in facts.items()}
        else:
            ends = {place: each for place, each in ends.items() if place not in cold}
            ends |= self._limit_ends(catalog, begun, hot, cold, guessed, most, facts)
        self._end = begun | _forward_ends(begun, ends, recreated - ended)
        return offsets.to_json(self._end)

    def _archive_borders(
        self, catalog: Catalog, begun: Offsets, places: Sequence[TopicPartition]
    ) -> tuple[Offsets, dict[TopicPartition, StreamFacts]]:
        """Return the positions at which the query continues in Redis, and the facts about streams.

        A query that has left the archive continues at its own position, and other queries at the
        end of the archive. The archive is opened before the facts are read, so the entries after
        its end should still be in Redis. If some of them have already been trimmed, they may have
        been archived in between, so the archive is opened again. If it has not grown, they are
        lost.
        """
        if self.backfill is None:
            return begun, catalog.facts(places)
        self._open_tables_if_due(self.backfill, begun, places)
        while True:
            facts = catalog.facts(places)
            hot = dict(begun)
            for place in self._archived_to.keys() & facts.keys():
                end = self._archived_to[place]
                target = end if self._target is None else self._target.get(place, end)
                end = min(end, target, key=lambda each: each.id)
                start = begun.get(place, _NEW)
                if end.id > start.id and not self._has_restarted(start, end, facts[place]):
                    hot[place] = end
            lost = [p for p, each in facts.items() if offsets.find_loss(hot.get(p, _NEW), each)]
            known = dict(self._archived_to)
            if lost:
                self._open_tables(self.backfill, lost)
            if known == self._archived_to:
                return hot, facts

    def _open_tables_if_due(
        self, backfill: Backfill, begun: Offsets, places: Sequence[TopicPartition]
    ) -> None:
        """Open the archive tables that the query may be reading, and open them again every minute.

        If a table cannot be opened again, the query continues with the version that it already has,
        and reads later entries from Redis as long as Redis still has them.
        """
        new = [p for p in places if p[0] not in self._topics and not begun.get(p, _NEW).passed]
        if new:
            self._open_tables(backfill, new)
        if time.monotonic() - self._looked_at < REOPEN_INTERVAL_SECONDS:
            return
        late = [place for place in places if _has_later_end(begun, self._archived_to, place)]
        try:
            if late:
                self._open_tables(backfill, late)
        except (RequestRefusedError, SparkError) as error:
            self._looked_at = time.monotonic()
            _log.warning("%s. Continuing with the archive as it was opened before", error)

    def _has_restarted(self, start: Position, end: Position, facts: StreamFacts) -> bool:
        """Return True if the query reads a recreated stream, but the archive has the old one."""
        known = bool(start.passed) and not offsets.is_replaced(start, facts)
        return known and not self.options.fail_on_data_loss and offsets.is_replaced(end, facts)

    def _open_tables(self, backfill: Backfill, places: Iterable[TopicPartition]) -> None:
        """Open the current version of the archive tables of these topics.

        Raises RequestRefusedError or ArchiveError if a table cannot be opened.
        """
        names = {name for name, _ in places}
        self._archived_to |= backfill.open_tables(names)
        self._topics |= names
        self._looked_at = time.monotonic()

    def _count_archived(
        self, begun: Offsets, hot: Offsets, places: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the number of entries that each partition still has to read from the archive.

        Partitions with no such entries are left out.
        """
        if self.backfill is None:
            return {}
        found = {}
        for place in places:
            after, upto = begun.get(place, _NEW).id, hot.get(place, _NEW).id
            found[place] = self.backfill.count_rows(place, after, upto)
        return {place: count for place, count in found.items() if count}

    def _limit_ends(
        self,
        catalog: Catalog,
        begun: Offsets,
        hot: Offsets,
        cold: Mapping[TopicPartition, int],
        guessed: Container[TopicPartition],
        most: int,
        facts: Mapping[TopicPartition, StreamFacts],
    ) -> Offsets:
        """Return the ends of a batch of at most `most` entries, which the partitions share.

        A partition that still has entries in the archive advances only up to the end of the
        archive.
        """
        for _ in range(PLAN_ATTEMPTS):
            facts, starts, waiting = self._count_backlog(hot, facts)
            waiting |= {place: waiting.get(place, 0) + count for place, count in cold.items()}
            oldest = sorted(waiting, key=lambda p: (begun.get(p, starts.get(p, _NEW)).id, p))
            shares = offsets.shares(waiting, most, oldest)
            live = {place: count for place, count in shares.items() if place not in cold}
            walked = catalog.walk({p: (starts[p].id, facts[p].last, n) for p, n in live.items()})
            if not catalog.find_overtaken({p: starts[p] for p in live}, facts):
                break
            facts = catalog.facts(list(facts))
        ends = {
            place: Position(to.id, None if before is None else before + to.passed)
            for place, to in walked.items()
            for before in (starts[place].passed,)
        }
        left = cold.keys() & shares.keys()
        spare = (most - sum(shares.values())) // max(1, sum(each in guessed for each in left))
        for place in left:
            assert self.backfill is not None
            after, border = begun.get(place, _NEW).id, hot[place]
            # The share may be based on an estimate, so the rows are read to find the ID at which it
            # ends.
            count = shares[place] + (spare if place in guessed else 0)
            end = self.backfill.walk(place, after, border.id, count)
            ends[place] = border if end == border.id else Position(end)
        return ends

    def _find_estimated(
        self, begun: Offsets, hot: Offsets, cold: Iterable[TopicPartition]
    ) -> set[TopicPartition]:
        """Return the partitions whose number of archived entries is only an estimate."""
        backfill, places = self.backfill, set(cold)
        if backfill is None:
            return set()
        return {p for p in places if backfill.is_estimated(p, begun.get(p, _NEW).id, hot[p].id)}

    def _count_backlog(
        self, begun: Offsets, facts: Mapping[TopicPartition, StreamFacts]
    ) -> tuple[dict[TopicPartition, StreamFacts], Offsets, dict[TopicPartition, int]]:
        """Return the facts up to the query's target, and each partition's start and backlog."""
        now = {place: self._facts_at_target(place, each) for place, each in facts.items()}
        starts = {}
        for place, each in now.items():
            # A new partition starts at its first entry. If entries were lost, the loss is reported
            # later, when the tasks of the batch are planned.
            new = Position(offsets.ZERO, 0 if each.exact else None)
            starts[place] = offsets.resume_position(begun.get(place, new), each)
        return now, starts, {p: offsets.backlog(starts[p], each) for p, each in now.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a batch.

        Raises DataLossError if entries, streams or topics are missing, unless the options allow
        losses.
        """
        catalog = Catalog(self.options)
        starts, ends = offsets.from_json(start), offsets.from_json(end)
        self._end = ends
        for place in sorted(starts.keys() - ends.keys()):
            entries = offsets.count_unread(starts[place], self._seen.get(place))
            catalog.report_gap(place, starts[place], Loss("vanished", entries))
        hot, facts = self._archive_borders(catalog, starts, sorted(ends))
        # A partition whose batch ends at the end of the archive or before it reads nothing from
        # Redis.
        live = {
            place: end
            for place, end in ends.items()
            if hot.get(place) == starts.get(place) or end.id > hot[place].id
        }
        spans = catalog.spans(hot, live, facts, self._seen)
        return [
            *(ArchivedPartition(each) for each in self._archived_parts(starts, ends, hot)),
            *(SpanPartition(span) for span in catalog.cut(spans, facts)),
        ]

    def _archived_parts(
        self, starts: Offsets, ends: Offsets, hot: Offsets
    ) -> Iterator[ArchivedPart]:
        """Yield the parts of a batch that are read from the archive."""
        if self.backfill is None:
            return
        new = Position(offsets.ZERO)
        for place, end in ends.items():
            after, border = starts.get(place, new).id, hot.get(place, new).id
            yield from self.backfill.parts(place, after, min(end.id, border))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing. Spark may call this late or not at all, so no state may depend on it."""

    def _show(self, catalog: Catalog, begun: Offsets) -> None:
        """Publish the position of the query in Redis.

        This is the start of the next batch, because the query has committed all entries before it.
        """
        late = time.monotonic() - self._shown_at >= SHOW_SECONDS
        if self.options.group and (late or begun != self._shown):
            catalog.show(begun)
            self._shown, self._shown_at = begun, time.monotonic()

    def _latest(self) -> Offsets:
        catalog = Catalog(self.options)
        places = catalog.places(strict=False)
        return {place: facts.latest for place, facts in catalog.facts(places).items()}

    def _facts_at_target(self, place: TopicPartition, facts: StreamFacts) -> StreamFacts:
        """Return the facts as they would be if the stream ended at the target position.

        If the stream was recreated, its latest position becomes the new target. If the query has no
        target, the facts are returned unchanged.
        """
        if self._target is None or place not in self._target:
            return facts
        if offsets.is_replaced(self._target[place], facts):
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

    def _must_wait(self, total: int) -> bool:
        """Return True if too few entries are available for a batch, so the query should wait.

        A query that stops at a target never waits.
        """
        if self._target is not None or total >= self.options.min_per_trigger:
            return False
        return time.monotonic() - self._took_at < self.options.max_trigger_delay


def _has_later_end(begun: Offsets, ends: Offsets, place: TopicPartition) -> bool:
    """Return True if the end of a partition is after its start."""
    return ends.get(place, _NEW).id > begun.get(place, _NEW).id


def _forward_ends(begun: Offsets, ends: Offsets, recreated: set[TopicPartition]) -> Offsets:
    """Return the end positions that are after their start, or that are in a recreated stream.

    Other partitions are left out and keep their start exactly, because Spark compares offsets as
    strings to decide whether there is a batch to run.
    """
    return {
        place: end
        for place, end in ends.items()
        if place in recreated or place not in begun or end.id > begun[place].id
    }
