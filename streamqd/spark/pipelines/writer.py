"""What archiving and compacting have done in Spark's tasks: reading rows and writing their files.

No row leaves the process that reads it: a task reads a range of one stream, or files, as Arrow
batches and writes Parquet into a folder of its own; what comes back is a receipt. Spark places the
tasks, repeats failed ones and takes one receipt for each. A second attempt writes into another
folder, and what has no receipt is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext

from streamqd.spark import cold, rows
from streamqd.spark.cold import ColdSpan
from streamqd.spark.offsets import Id, Place, Span
from streamqd.spark.options import ReadOptions
from streamqd.spark.pipelines.parts import DROPPED, FILE_ROWS_MAX, PartWriter
from streamqd.spark.pipelines.progress import POLL, ProgressMeter
from streamqd.spark.reader import EntryReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext

COLUMNS = rows.columns(dead=False, headers=True, fields=True)
_STORED = tuple(column for column in COLUMNS if column.name not in DROPPED)


@dataclass(frozen=True)
class StreamPart:
    """Entries of one stream, `limit` of them at most."""

    options: ReadOptions
    span: Span
    limit: int | None = None


@dataclass(frozen=True)
class FilePart:
    """Rows of files that are to become one."""

    span: ColdSpan
    generation: int


@dataclass(frozen=True)
class WriteReceipt:
    """What a task did: of which place, up to which id, how many rows, in which files."""

    place: Place
    end: Id
    rows: int
    files: list[dict[str, Any]]


def write_parts(
    context: SparkContext,
    parts: Sequence[StreamPart | FilePart],
    folder: Path,
    *,
    meter: ProgressMeter | None = None,
    rows_max: int = FILE_ROWS_MAX,
) -> list[WriteReceipt]:
    """Have the parts written below `folder`, each by a task; return the receipts in their order.

    Raises what Spark raises when a task has failed too often.
    """
    if not parts:
        return []
    numbered = list(enumerate(parts))
    group = f"streamqd {folder}"

    def job() -> list[WriteReceipt]:
        context.setJobGroup(group, "streamqd writes files")
        tasks = context.parallelize(numbered, len(numbered))
        return tasks.mapPartitions(_Task(folder, rows_max)).collect()

    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(job)
        try:
            while not futures.wait([running], POLL).done:
                if meter is not None:
                    meter.look()
        except BaseException:
            context.cancelJobGroup(group)
            raise
        return running.result()


class _Task:
    """Runs in Spark's Python workers."""

    def __init__(self, folder: Path, rows_max: int) -> None:
        self._folder = folder
        self._rows_max = rows_max

    def __call__(
        self, parts: Iterable[tuple[int, StreamPart | FilePart]]
    ) -> Iterator[WriteReceipt]:
        context = TaskContext.get()
        assert context is not None, "called outside a task"
        own = self._folder / str(context.taskAttemptId())
        for number, part in parts:
            yield write_part(part, own, number, self._rows_max)


def write_part(
    part: StreamPart | FilePart, folder: Path, number: int, rows_max: int = FILE_ROWS_MAX
) -> WriteReceipt:
    """Write one part. Raises DataLossError, ManifestError, RedisUnavailable, RedisRefused."""
    place = part.span.place
    generation = part.generation if isinstance(part, FilePart) else 0
    writer = PartWriter(folder, number, place[1], generation=generation, rows_max=rows_max)
    end = part.span.end
    if isinstance(part, FilePart):
        for batch in cold.batches(part.span, _STORED):
            writer.write(batch)
    else:
        reader = EntryReader(part.options, part.span, part.limit)
        for batch in _batches(reader, place):
            writer.write(batch)
        end = reader.end
    files = writer.finish()
    return WriteReceipt(place, end, sum(each["rows"] for each in files), files)


def _batches(reader: EntryReader, place: Place) -> Iterator[pa.RecordBatch]:
    table = rows.Table(_STORED, COLUMNS, place)
    for entries in reader.batches():
        yield table.batch(entries)
