"""Write Parquet files from Arrow batches in Spark's tasks.

Each file gets a unique name in the directory of the table, and becomes part of the table when a
commit lists it. Vacuum eventually removes files that no commit lists. This module uses neither
Spark nor Redis.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import compute, parquet

from streamqd.spark.location import Location
from streamqd.spark.offsets import PART_MAX, Id

FILE_ROWS_MAX = 5_000_000
GROUP_BYTES = 32 << 20  # bytes that are buffered before a row group is written
GROUP_ROWS = 1 << 17
_BOUNDED_COLUMNS = 32  # columns with bounds, as in the default of Delta's own writers
_BOUND_CHARACTERS = 32
_DAY_MS = 86_400_000
_LAST_DAY = 253_402_300_799 // 86_400  # last day of the calendar, also used for all later IDs
# Readers search for IDs and not for content, so statistics about payloads would be useless.
_STATISTICS = ("key", "id", "id_ms", "id_seq", "timestamp")
_ENCODINGS = {
    "id": "DELTA_BYTE_ARRAY",
    "id_ms": "DELTA_BINARY_PACKED",
    "id_seq": "DELTA_BINARY_PACKED",
    "timestamp": "DELTA_BINARY_PACKED",
}


class WrittenFile(NamedTuple):
    """A file of a table.

    `path` is relative to the table's directory. `date` is the date (UTC) of the file's entries, and
    `first` and `last` are the smallest and the largest of their IDs.
    """

    path: str
    date: str
    partition: int
    rows: int
    size: int
    first: Id
    last: Id
    bounds: str = ""  # bounds of the file's columns, as JSON in the format of Delta's statistics


class OpenFile:
    """A Parquet file that is being written. It buffers a limited number of bytes."""

    def __init__(self, folder: Location, within: str, schema: pa.Schema, **options: Any) -> None:
        """Create the file in `within`, a directory of the table.

        The options are passed to pyarrow.
        """
        self.path = str(PurePosixPath(within, f"{uuid.uuid4().hex}.zstd.parquet"))
        self.rows = 0
        self._sink = folder.open_output(self.path)
        self.metadata: list[parquet.FileMetaData] = []  # metadata of the closed file
        self._writer = parquet.ParquetWriter(
            self._sink.target,
            schema,
            compression="zstd",
            metadata_collector=self.metadata,
            **options,
        )
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = self._held_rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows to the file."""
        self.rows += rows.num_rows
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_bytes += rows.nbytes
        if self._held_bytes >= GROUP_BYTES or self._held_rows >= GROUP_ROWS:
            self._write_group()

    def close(self) -> int:
        """Write the buffered rows and make the file durable. Return its size in bytes."""
        self._write_group()
        self._writer.close()
        return self._sink.close()

    def abandon(self) -> None:
        """Close the file, but discard the buffered rows, because writing them might fail again."""
        with suppress(Exception):
            self._writer.close()
        with suppress(Exception):
            self._sink.close()

    def _write_group(self) -> None:
        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held), row_group_size=GROUP_ROWS)
        self._held, self._held_bytes, self._held_rows = [], 0, 0


@dataclass
class _Part:
    """A file that is being written, and the first and last ID in it."""

    file: OpenFile
    date: str
    first: Id
    last: Id = (0, 0)


class PartWriter:
    """Writes rows of one partition, in the order of their IDs, into one file for each date (UTC).

    A date with many rows gets several files. The buffer has a limited number of bytes.
    """

    def __init__(self, folder: Location, partition: int, *, rows_max: int = FILE_ROWS_MAX) -> None:
        self._folder = folder
        self._partition = partition
        self._rows_max = rows_max
        self._part: _Part | None = None
        self._day = -1
        self._last: Id = (0, 0)
        self._done: list[WrittenFile] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows, without the partition columns.

        Raises ValueError if an ID is smaller than that of an earlier row.
        """
        if not rows.num_rows:
            return
        first, last = _id_at(rows, 0), _id_at(rows, rows.num_rows - 1)
        if first < self._last:
            raise ValueError(
                f"partition {self._partition}: the entry {first} follows the later entry"
                f" {self._last}"
            )
        self._last = last
        for day, piece in _by_day(rows, first, last):
            part = self._part
            if part is not None and (day != self._day or part.file.rows >= self._rows_max):
                self._close()
            if self._part is None:
                self._day = day
                self._part = self._begin(piece)
            self._part.last = _id_at(piece, piece.num_rows - 1)
            self._part.file.add(piece)

    def finish(self) -> list[WrittenFile]:
        """Close all files and return their descriptions."""
        if self._part is not None:
            self._close()
        return self._done

    def discard(self) -> None:
        """Remove the written files, because no table will list them."""
        part, self._part = self._part, None
        if part is not None:
            part.file.abandon()
        remove(self._folder, self._done, None if part is None else part.file)
        self._done = []

    def _begin(self, rows: pa.RecordBatch) -> _Part:
        date = partition_date(self._day * _DAY_MS)
        names = rows.schema.names
        file = OpenFile(
            self._folder,
            file_folder(date, self._partition),
            rows.schema,
            use_dictionary=[name for name in ("key",) if name in names],
            column_encoding={name: how for name, how in _ENCODINGS.items() if name in names},
            write_statistics=[name for name in _STATISTICS if name in names],
        )
        return _Part(file, date, _id_at(rows, 0))

    def _close(self) -> None:
        part = self._part
        assert part is not None
        size = part.file.close()
        whole = (part.file.path, part.date, self._partition, part.file.rows, size)
        self._done.append(WrittenFile(*whole, part.first, part.last))
        self._part = None


class DateWriter:
    """Writes rows in the given order, and starts a new file whenever the date changes."""

    def __init__(
        self,
        folder: Location,
        column: str,
        schema: pa.Schema,
        *,
        bounded: Sequence[str] | None = None,
    ) -> None:
        """Prepare to write files with this schema.

        `column` is the partition column of the table, or "" if it has none. `bounded` names the
        columns whose bounds are stored in the files. It defaults to all columns.
        """
        self._folder = folder
        self._column = column
        self._schema = schema
        self._statistics = True if bounded is None else list(bounded)
        self.date = ""  # date of the open file
        self._file: OpenFile | None = None
        self._done: list[WrittenFile] = []

    def write(self, date: str, rows: pa.RecordBatch) -> None:
        """Add rows with this date, without the partition column."""
        if not rows.num_rows:
            return
        if self._file is not None and (date != self.date or self._file.rows >= FILE_ROWS_MAX):
            self._close()
        if self._file is None:
            self.date = date
            within = f"{self._column}={date}" if self._column else ""
            self._file = OpenFile(
                self._folder, within, self._schema, write_statistics=self._statistics
            )
        self._file.add(rows)

    def finish(self) -> list[WrittenFile]:
        """Close all files and return their descriptions."""
        if self._file is not None:
            self._close()
        return self._done

    def discard(self) -> None:
        """Remove the written files, because no table will list them."""
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        remove(self._folder, self._done, file)
        self._done = []

    def _close(self) -> None:
        file = self._file
        assert file is not None
        size, none = file.close(), (0, 0)
        whole = (file.path, self.date, 0, file.rows, size, none, none)
        self._done.append(WrittenFile(*whole, encode_bounds(file.metadata)))
        self._file = None


def remove(folder: Location, files: Sequence[WrittenFile], begun: OpenFile | None = None) -> None:
    """Remove files that no table lists, including a file that was still being written."""
    for path in [each.path for each in files] + ([] if begun is None else [begun.path]):
        with suppress(OSError):  # a purge removes the file later
            folder.remove(path)


def bounded_with_nan(schema: pa.Schema) -> list[str]:
    """Return the columns that may have bounds, in a table that may contain NaN.

    The bounds of a column leave out NaN, although it is the largest value in Spark. A reader that
    uses such bounds to skip files would miss rows with NaN. Columns of floats and nested columns
    therefore have no bounds.
    """
    kinds = pa.types
    return [
        each.name
        for each in schema
        if not (kinds.is_floating(each.type) or kinds.is_nested(each.type))
    ]


def encode_bounds(files: Sequence[parquet.FileMetaData]) -> str:
    """Return the bounds of the first columns in these files, which readers use to skip files.

    The result is JSON in Delta's format, with `minValues`, `maxValues` and `nullCount`. Nested
    columns have no bounds.
    """
    found: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for file in files:
        groups = [file.row_group(group) for group in range(file.num_row_groups)]
        for at in range(min(file.num_columns, _BOUNDED_COLUMNS)):
            parts = [group.column(at) for group in groups]
            seen = [part.statistics for part in parts if part.statistics is not None]
            if not parts or "." in parts[0].path_in_schema or len(seen) < len(parts):
                continue
            name, nulls = parts[0].path_in_schema, [one.null_count for one in seen]
            if None not in nulls:
                found["nullCount"][name] = sum(nulls)
            known = [one for one in seen if one.has_min_max]
            if len(known) + nulls.count(None) < len(seen) or not known:
                continue
            try:
                low = _lower(min(one.min for one in known))
                high = _upper(max(one.max for one in known))
            except OverflowError:  # a time outside Python's calendar, or in its last millisecond
                continue
            if low is not None and high is not None:
                found["minValues"][name], found["maxValues"][name] = low, high
    return json.dumps(found)


def _lower(value: Any) -> Any:
    """Return a lower bound as Delta writes it, or None for a value that has no bound."""
    if isinstance(value, dt.datetime):
        return (
            f"{value.astimezone(dt.UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
        )
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, str):
        return value[:_BOUND_CHARACTERS]
    # JSON has no infinity. If a bound were written as infinity, readers of the log would ignore the
    # bounds of all files.
    return value if type(value) is int or (type(value) is float and math.isfinite(value)) else None


def _upper(value: Any) -> Any:
    """Return an upper bound as Delta writes it, or None for a value that has no bound.

    Times are rounded up to milliseconds. A long string has no upper bound.
    """
    if isinstance(value, dt.datetime) and value.microsecond % 1000:
        value += dt.timedelta(microseconds=1000 - value.microsecond % 1000)
    if isinstance(value, str) and len(value) > _BOUND_CHARACTERS:
        return None
    return _lower(value)


def file_folder(date: str, partition: int) -> str:
    """Return the directory, relative to the table, for files of this date and partition."""
    return f"date={date}/partition={partition}"


def partition_date(unix_ms: int) -> str:
    """Return the date (UTC) of an entry with this time.

    For a time after 9999, return 9999-12-31.
    """
    day = min(unix_ms // _DAY_MS, _LAST_DAY)
    return dt.datetime.fromtimestamp(day * 86_400, dt.UTC).strftime("%Y-%m-%d")


def last_id(date: str) -> Id:
    """Return the largest ID of a date (UTC). Do not call this for the last day of the calendar."""
    day = dt.date.fromisoformat(date) - dt.date(1970, 1, 1)
    return (day.days + 1) * _DAY_MS - 1, PART_MAX


def _by_day(rows: pa.RecordBatch, first: Id, last: Id) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Divide rows by the days of their IDs. Yield each day with its rows, in order."""
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
