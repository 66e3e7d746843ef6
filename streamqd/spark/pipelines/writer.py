"""How pipelines write files through Spark: a data source of their own, for rows as Arrow batches.

Spark hands the commit only what successful attempts of tasks reported; it goes to the driver in a
file, because the commit runs in a process of Spark's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from streamqd.spark.pipelines.parts import PartWriter

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_REPORTS = "reports.json"


def register(spark: SparkSession) -> None:
    """Make the data source known to a session."""
    spark.dataSource.register(PartsSource)


def write_parts(
    frame: DataFrame, folder: Path, *, generation: int = 0, rows_max: int
) -> list[dict[str, Any]]:
    """Write the rows as files below `folder`, which is new; return what is to be known of each."""
    folder.mkdir(parents=True)
    options = {"folder": str(folder), "generation": str(generation), "rowsMax": str(rows_max)}
    frame.write.format(PartsSource.name()).options(**options).mode("append").save()
    found: list[dict[str, Any]] = json.loads((folder / _REPORTS).read_bytes())
    return found


class PartsSource(DataSource):
    """Writes only."""

    @classmethod
    def name(cls) -> str:
        return "streamq_parts"

    def writer(self, schema: StructType, overwrite: bool) -> PartsWriter:  # noqa: ARG002
        options = self.options
        return PartsWriter(
            Path(options["folder"]), int(options["generation"]), int(options["rowsMax"])
        )


@dataclass(frozen=True)
class _Reported(WriterCommitMessage):
    files: list[dict[str, Any]]


class PartsWriter(DataSourceArrowWriter):
    """One write."""

    def __init__(self, folder: Path, generation: int, rows_max: int) -> None:
        self._folder = folder
        self._generation = generation
        self._rows_max = rows_max

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        import pyarrow as pa

        context = TaskContext.get()
        assert context is not None, "called outside a task"
        writer = PartWriter(
            self._folder / str(context.taskAttemptId()),
            context.partitionId(),
            generation=self._generation,
            rows_max=self._rows_max,
        )
        for batch in iterator:
            if batch.num_rows:
                writer.write(pa.Table.from_batches([batch]))
        return _Reported(writer.finish())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Tell the driver."""
        found = [file for each in messages if isinstance(each, _Reported) for file in each.files]
        (self._folder / _REPORTS).write_text(json.dumps(found), "utf-8")
