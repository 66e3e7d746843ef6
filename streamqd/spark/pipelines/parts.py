"""Writing Parquet from Arrow batches, in Spark's tasks. Knows neither Spark nor Redis.

Each attempt of a task writes into a folder of its own; the driver takes what the successful ones
report.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd.spark.offsets import Id
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import ManifestError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

DROPPED = ("topic", "partition")  # the layout says them
FILE_ROWS_MAX = 5_000_000
GROUP_BYTES = 32 << 20  # held back before a row group is written
GROUP_ROWS = 1 << 17
_DAY_MS = 86_400_000
# Ids are looked for, what a message says is not: statistics of bodies cost and help nobody.
_STATISTICS = ("key", "id", "id_ms", "id_seq", "timestamp")
_ENCODINGS = {
    "id": "DELTA_BYTE_ARRAY",
    "id_ms": "DELTA_BINARY_PACKED",
    "id_seq": "DELTA_BINARY_PACKED",
    "timestamp": "DELTA_BINARY_PACKED",
}


@dataclass
class _Part:
    """A file being written."""

    source: Path
    relative: str
    writer: parquet.ParquetWriter
    first: Id
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_bytes: int = 0
    held_rows: int = 0
    rows: int = 0
    last: Id = (0, 0)


class PartWriter:
    """Writes rows of one partition, in the order of their ids, into one file for each date (UTC).

    Or into several when they get long. What it holds is bounded by bytes, however much is written.
    """

    def __init__(
        self,
        folder: Path,
        task: int,
        partition: int,
        *,
        generation: int = 0,
        rows_max: int = FILE_ROWS_MAX,
    ) -> None:
        self._folder = folder
        self._task = task
        self._partition = partition
        self._generation = generation
        self._rows_max = rows_max
        self._count = 0
        self._part: _Part | None = None
        self._day = -1
        self._last: Id = (0, 0)
        self._done: list[dict[str, Any]] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows, without the columns that the layout says. Raises ManifestError for disorder."""
        if not rows.num_rows:
            return
        first, last = _id_at(rows, 0), _id_at(rows, rows.num_rows - 1)
        if first < self._last:
            raise ManifestError(
                f"partition {self._partition}: the entry {first} comes behind {self._last}"
            )
        self._last = last
        for day, piece in _by_day(rows, first, last):
            if self._part is not None and (day != self._day or self._part.rows >= self._rows_max):
                self._close()
            if self._part is None:
                self._day = day
                self._part = self._begin(piece)
            self._hold(self._part, piece)

    def finish(self) -> list[dict[str, Any]]:
        """Close all files; return what is to be known of each."""
        if self._part is not None:
            self._close()
        return self._done

    def _begin(self, rows: pa.RecordBatch) -> _Part:
        from pyarrow import parquet

        folder = manifests.file_folder(self._day * _DAY_MS, self._partition)
        relative = f"{folder}/{manifests.file_name(self._task, self._count, self._generation)}"
        self._count += 1
        source = self._folder / relative
        source.parent.mkdir(parents=True, exist_ok=True)
        names = rows.schema.names
        writer = parquet.ParquetWriter(
            source,
            rows.schema,
            compression="zstd",
            use_dictionary=[name for name in ("key",) if name in names],
            column_encoding={name: how for name, how in _ENCODINGS.items() if name in names},
            write_statistics=[name for name in _STATISTICS if name in names],
        )
        return _Part(source, relative, writer, _id_at(rows, 0))

    def _hold(self, part: _Part, rows: pa.RecordBatch) -> None:
        part.last = _id_at(rows, rows.num_rows - 1)
        part.rows += rows.num_rows
        part.held.append(rows)
        part.held_rows += rows.num_rows
        part.held_bytes += rows.nbytes
        if part.held_bytes >= GROUP_BYTES or part.held_rows >= GROUP_ROWS:
            _write_group(part)

    def _close(self) -> None:
        part, self._part = self._part, None
        assert part is not None
        _write_group(part)
        part.writer.close()
        with part.source.open("rb") as file:
            os.fsync(file.fileno())
        self._done.append(
            {
                "source": str(part.source),
                "path": part.relative,
                "partition": self._partition,
                "rows": part.rows,
                "size": part.source.stat().st_size,
                "first_ms": part.first[0],
                "first_seq": part.first[1],
                "last_ms": part.last[0],
                "last_seq": part.last[1],
            }
        )


def _write_group(part: _Part) -> None:
    import pyarrow as pa

    if part.held:
        part.writer.write_table(pa.Table.from_batches(part.held), row_group_size=GROUP_ROWS)
    part.held, part.held_bytes, part.held_rows = [], 0, 0


def files_of(reports: Sequence[Any]) -> tuple[manifests.File, ...]:
    """The files that tasks reported."""
    return tuple(
        manifests.File(
            path=each["path"],
            partition=each["partition"],
            rows=each["rows"],
            size=each["size"],
            first=(each["first_ms"], each["first_seq"]),
            last=(each["last_ms"], each["last_seq"]),
        )
        for each in reports
    )


def _by_day(rows: pa.RecordBatch, first: Id, last: Id) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows by the day of their ids, in their order."""
    from pyarrow import compute

    if first[0] // _DAY_MS == last[0] // _DAY_MS:
        yield first[0] // _DAY_MS, rows
        return
    days = compute.divide(rows["id_ms"], _DAY_MS)
    at = 0
    for each in compute.value_counts(days):
        count = each["counts"].as_py()
        yield each["values"].as_py(), rows.slice(at, count)
        at += count


def _id_at(rows: pa.RecordBatch, number: int) -> Id:
    return rows["id_ms"][number].as_py(), rows["id_seq"][number].as_py()
