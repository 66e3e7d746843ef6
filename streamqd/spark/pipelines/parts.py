"""Writing Parquet from Arrow batches, in Spark's Python workers. Knows neither Spark nor Redis.

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

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

DROPPED = ("topic", "partition")  # the layout says them
GROUP_BYTES = 32 << 20  # held back before a row group is written
GROUP_ROWS = 1 << 17
OPEN_MAX = 8  # files that one task holds open
_DAY_MS = 86_400_000


@dataclass
class _Part:
    """A file being written."""

    source: Path
    relative: str
    partition: int
    writer: parquet.ParquetWriter
    held: list[pa.Table] = field(default_factory=list)
    held_bytes: int = 0
    held_rows: int = 0
    rows: int = 0
    first: Id = (0, 0)
    last: Id = (0, 0)


class PartWriter:
    """Writes rows into one file for each (date, partition), or several when they get long."""

    def __init__(
        self, folder: Path, task: int, *, generation: int = 0, rows_max: int = 5_000_000
    ) -> None:
        self._folder = folder
        self._task = task
        self._generation = generation
        self._rows_max = rows_max
        self._count = 0
        self._open: dict[str, _Part] = {}
        self._done: list[dict[str, Any]] = []

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        for folder, partition, rows in _divided(table):
            part = self._open.pop(folder, None)
            if part is None:
                if len(self._open) >= OPEN_MAX:
                    self._close(next(iter(self._open)))
                part = self._begin(folder, partition, rows.schema)
            self._open[folder] = part  # the one used last is closed last
            self._hold(part, rows)
            if part.rows >= self._rows_max:
                self._close(folder)

    def finish(self) -> list[dict[str, Any]]:
        """Close all files; return what is to be known of each."""
        for folder in list(self._open):
            self._close(folder)
        return self._done

    def _begin(self, folder: str, partition: int, schema: pa.Schema) -> _Part:
        from pyarrow import parquet

        relative = f"{folder}/{manifests.file_name(self._task, self._count, self._generation)}"
        self._count += 1
        source = self._folder / relative
        source.parent.mkdir(parents=True, exist_ok=True)
        packed = {"id_ms": "DELTA_BINARY_PACKED", "id_seq": "DELTA_BINARY_PACKED"}
        packed["timestamp"] = "DELTA_BINARY_PACKED"
        packed["id"] = "DELTA_BYTE_ARRAY"
        writer = parquet.ParquetWriter(
            source,
            schema,
            compression="zstd",
            use_dictionary=[name for name in ("key",) if name in schema.names],
            column_encoding={name: how for name, how in packed.items() if name in schema.names},
        )
        return _Part(source, relative, partition, writer)

    def _hold(self, part: _Part, rows: pa.Table) -> None:
        first, last = _edges(rows)
        part.first = first if part.rows == 0 else min(part.first, first)
        part.last = last if part.rows == 0 else max(part.last, last)
        part.rows += rows.num_rows
        part.held.append(rows)
        part.held_rows += rows.num_rows
        part.held_bytes += rows.nbytes
        if part.held_bytes >= GROUP_BYTES or part.held_rows >= GROUP_ROWS:
            self._write_group(part)

    def _write_group(self, part: _Part) -> None:
        import pyarrow as pa

        if part.held:
            part.writer.write_table(pa.concat_tables(part.held), row_group_size=GROUP_ROWS)
        part.held, part.held_bytes, part.held_rows = [], 0, 0

    def _close(self, folder: str) -> None:
        part = self._open.pop(folder)
        self._write_group(part)
        part.writer.close()
        with part.source.open("rb") as file:
            os.fsync(file.fileno())
        self._done.append(
            {
                "source": str(part.source),
                "path": part.relative,
                "partition": part.partition,
                "rows": part.rows,
                "size": part.source.stat().st_size,
                "first_ms": part.first[0],
                "first_seq": part.first[1],
                "last_ms": part.last[0],
                "last_seq": part.last[1],
            }
        )


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


def _divided(table: pa.Table) -> Iterator[tuple[str, int, pa.Table]]:
    """The rows by the folder they belong to, in their order, without the columns it says."""
    import pyarrow as pa
    from pyarrow import compute

    days = compute.divide(table["id_ms"], _DAY_MS)
    both = pa.table({"partition": table["partition"], "day": days})
    rest = table.drop_columns([name for name in DROPPED if name in table.column_names])
    groups = both.group_by(["partition", "day"], use_threads=False).aggregate([]).to_pylist()
    for each in groups:
        partition, day = each["partition"], each["day"]
        rows = rest
        if len(groups) > 1:
            mask = compute.and_(
                compute.equal(both["partition"], partition), compute.equal(both["day"], day)
            )
            rows = rest.filter(mask)
        yield manifests.file_folder(day * _DAY_MS, partition), partition, rows


def _edges(rows: pa.Table) -> tuple[Id, Id]:
    """The smallest and the largest id."""
    from pyarrow import compute

    ms, seq = rows["id_ms"], rows["id_seq"]
    low, high = compute.min_max(ms).as_py().values()
    first = compute.min(seq.filter(compute.equal(ms, low))).as_py()
    last = compute.max(seq.filter(compute.equal(ms, high))).as_py()
    return (low, first), (high, last)
