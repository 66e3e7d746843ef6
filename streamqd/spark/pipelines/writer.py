"""Archive a topic with a streaming data source: its tasks write files, and its rows describe them.

Entries do not pass through Java. The Python task that reads a range of a topic also writes its
Parquet files, and returns a row for each file. If a task is repeated, it writes new files. The rows
describe only the files of the attempt that Spark accepts, so no table lists the other files.

An offset of this stream is only the number of a batch. The start of a batch is read from the table,
so no entry is archived twice or skipped, whatever the checkpoint contains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import Row, StructType

from streamqd.model import TopicPartition
from streamqd.spark import offsets, rows
from streamqd.spark.location import Location
from streamqd.spark.offsets import Offsets, Span, StreamFacts
from streamqd.spark.options import ReadOptions, read_options
from streamqd.spark.pipelines import batches
from streamqd.spark.pipelines.batches import BatchRange, TaskEnd
from streamqd.spark.pipelines.parts import PartWriter, WrittenFile
from streamqd.spark.pipelines.storage import ArchiveTable
from streamqd.spark.reader import EntryReader
from streamqd.spark.streams import Catalog, report_loss

FORMAT = "streamq_files"
COLUMNS = rows.columns(dead=False, headers=True, fields=True)
STORED = tuple(column for column in COLUMNS if column.name not in ("topic", "partition"))
# A row describes a file. In a row without a path, the other columns contain either the position at
# which a task stopped (`last`) or the plan of the batch (`planned`).
_DDL = (
    "path string, date string, partition int, rows bigint, size bigint, first string, last string,"
    " planned string"
)


def file_source(folder: Location, name: str) -> type[DataSource]:
    """Return a data source with this name, whose tasks write files of the table in `folder`.

    The directory of the table is stored in the class and not in an option, because it may contain
    credentials, and Spark shows options in plans and event logs.
    """

    class FileSource(DataSource):
        """A data source that writes entries of a topic to files, and has a row for each file.

        Only the archive uses it.
        """

        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> str:
            return _DDL

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002
            return FileStreamReader(read_options(dict(self.options), {}), folder)

    return FileSource


class PlanPartition(InputPartition):
    """The input of a task that only returns the plan of the batch.

    Each batch has exactly one such task, even if there are no entries.
    """

    def __init__(self, planned: str) -> None:
        super().__init__(planned)
        self.planned = planned


class PartPartition(InputPartition):
    """The input of a task that reads a span and writes its entries to files, up to a limit."""

    def __init__(self, span: Span, limit: int | None) -> None:
        super().__init__((tuple(span), limit))
        self.span = span
        self.limit = limit


class FileStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches until the table contains all entries that existed when the query started."""

    def __init__(self, options: ReadOptions, folder: Location) -> None:
        self.options = options
        self.folder = folder
        self._target: Offsets = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"batch": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {place: each.latest for place, each in self._facts().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802, ARG002
        """Return the number of the next batch. If there are no more entries, return `start`."""
        table = self._table()
        if not batches.incomplete_partitions(table.positions, self._target, self._facts()):
            return start
        return {"batch": table.note.batch + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002
        """Return the tasks of a batch.

        Raises DataLossError if entries were lost, unless the options allow losses.
        """
        facts = self._facts()
        starts = batches.incomplete_partitions(self._table().positions, self._target, facts)
        ranges = []
        for place, begin in starts.items():
            if loss := offsets.find_loss(begin, facts[place]):
                report_loss(place, begin.id, loss, fail=self.options.fail_on_data_loss)
            ranges.append(
                BatchRange(place, offsets.resume_position(begin, facts[place]), self._target[place])
            )
        options = self.options
        found = batches.plan(ranges, facts, options.max_per_trigger, options.min_partitions)
        ends = {
            "begins": offsets.to_json({each.place: each.begin for each in found}),
            "targets": offsets.to_json({each.place: each.target for each in found}),
        }
        parts = [PartPartition(span, each.limit) for each in found for span in each.spans]
        return [PlanPartition(json.dumps(ends)), *parts]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Write the files of one task, and yield the rows that describe them.

        Raises DataLossError, RedisUnavailableError, RedisResponseError or OSError.
        """
        if isinstance(partition, PlanPartition):
            yield (*(None,) * 7, partition.planned)
        elif isinstance(partition, PartPartition):
            reader = EntryReader(self.options, partition.span, partition.limit)
            number = partition.span.place[1]
            for file in self._write(reader, partition.span.place):
                bounds = (offsets.write_id(file.first), offsets.write_id(file.last))
                yield (*file[:5], *bounds, None)
            yield (None, None, number, reader.rows, None, None, offsets.write_id(reader.end), None)

    def _write(self, reader: EntryReader, place: TopicPartition) -> list[WrittenFile]:
        writer = PartWriter(self.folder, place[1])
        table = rows.Table(STORED, COLUMNS, place)
        try:
            for entries in reader.batches():
                writer.write(table.batch(entries))
            return writer.finish()
        except BaseException:
            writer.discard()
            raise

    def _table(self) -> ArchiveTable:
        return ArchiveTable(self.folder, self.options.subscribe[0])

    def _facts(self) -> dict[TopicPartition, StreamFacts]:
        catalog = Catalog(self.options)
        return catalog.facts(catalog.places())


def parse_rows(found: Sequence[Row]) -> tuple[list[WrittenFile], Offsets]:
    """Return the files of a batch and the positions that it reached, from the rows of its tasks."""
    files, ended, plans = [], [], []
    for row in found:
        if row["planned"] is not None:
            plans.append(json.loads(row["planned"]))
        elif row["path"] is None:
            ended.append(TaskEnd(row["partition"], offsets.read_id(row["last"]), row["rows"]))
        else:
            whole = (row["path"], row["date"], row["partition"], row["rows"], row["size"])
            first, last = (offsets.read_id(row[name]) for name in ("first", "last"))
            files.append(WrittenFile(*whole, first, last))
    if len(plans) != 1:
        raise ValueError(f"a batch has {len(plans)} plans")
    begins, targets = (offsets.from_json(plans[0][name]) for name in ("begins", "targets"))
    return files, batches.end_positions(begins, targets, ended)
