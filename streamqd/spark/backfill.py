"""Read the first part of a stream from an archive, up to the end of its tables.

A table records, for each partition, the ID up to which it contains all entries. This ID divides
each range of a stream into two parts: earlier entries are read from the table, and later ones from
Redis. When the table grows, the border moves, but the range still has the same entries. A batch
that Spark repeats therefore always contains the same entries.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import compute, parquet

from streamqd.model import TopicPartition
from streamqd.spark import rows
from streamqd.spark.entries import LONG_MAX
from streamqd.spark.location import Location
from streamqd.spark.offsets import PART_MAX, Id, Offsets
from streamqd.spark.pipelines.parts import GROUP_ROWS, WrittenFile
from streamqd.spark.pipelines.storage import RAW, Archive, ArchiveTable, opened_alone

TASK_ROWS = 250_000  # target rows in the files that one task reads
TASK_BYTES = 64 << 20  # target bytes of the files that one task reads
_BATCH_ROWS = 8192
_BATCH_BYTES = 4 << 20
_FOOTERS_MAX = 500  # maximum files whose footers are kept in memory
_HALVES = ("id_ms", "id_seq")
_PLACE = ("topic", "partition")  # columns that the files lack


class FileStripe(NamedTuple):
    """A share of a file for one task: every `of`-th row group, starting with number `at`."""

    path: str
    at: int = 0
    of: int = 1


class ArchivedPart(NamedTuple):
    """The rows that one task reads: those of these file stripes with an ID in `(after, upto]`."""

    place: TopicPartition
    after: Id
    upto: Id
    stripes: tuple[FileStripe, ...]


class RowGroup(NamedTuple):
    """A row group of a file, and the lowest and highest time (Unix ms) in its IDs.

    `clipped` is True if a half of an ID (its milliseconds or its sequence number) may exceed 63
    bits. The column for that half then contains the largest 63-bit number instead.
    """

    number: int
    low_ms: int
    high_ms: int
    clipped: bool

    def overlaps(self, after: Id, upto: Id) -> bool:
        """Return True if the group may contain rows in `(after, upto]`."""
        return self.high_ms >= after[0] and self.low_ms <= upto[0]


class Backfill:
    """The archive tables of one stream.

    The driver opens them with `open_tables` to plan batches. Tasks usually read only the files that
    were planned for them. A task opens a table only if trimming removes entries from Redis that the
    task was about to read, because these entries may be in the archive by then.
    """

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._archive: Archive | None = None
        self._tables: dict[str, ArchiveTable] = {}
        # For each topic, the version of its table, and the table's files by partition.
        self._files: dict[str, tuple[int, dict[int, list[WrittenFile]]]] = {}
        self._footers: dict[tuple[str, str], parquet.FileMetaData] = {}  # by topic and path

    def __reduce__(self) -> tuple[Any, ...]:
        return Backfill, (self._folder,)

    # --- planning ---

    def open_tables(self, topics: Iterable[str]) -> Offsets:
        """Open the current version of the tables of these topics, and return their end positions.

        Topics without a table are left out. Raises RequestRefusedError or ArchiveError if a table
        cannot be opened.
        """
        if self._archive is None:
            self._archive = Archive(self._folder)
        found: Offsets = {}
        for topic in sorted(set(topics)):
            table = self._tables.get(topic)
            if table is not None:
                table.reload()
            else:
                table = self._archive.table(topic)
            if table is not None:
                self._tables[topic] = table
                found |= table.positions
        return found

    def count_rows(self, place: TopicPartition, after: Id, upto: Id) -> int:
        """Return the number of rows in `(after, upto]`.

        If a file is only partly in this range, the number is an estimate.
        """
        return sum(
            _rows_between(each, after, upto) for each in self._files_between(place, after, upto)
        )

    def is_estimated(self, place: TopicPartition, after: Id, upto: Id) -> bool:
        """Return True if `count_rows` returns an estimate for this range.

        This is the case if a file is only partly in the range.
        """
        return any(
            not after < each.first <= each.last <= upto or each.last[0] >= LONG_MAX
            for each in self._files_between(place, after, upto)
        )

    def walk(self, place: TopicPartition, after: Id, upto: Id, count: int) -> Id:
        """Return the ID of the `count`-th row in `(after, upto]`, or `upto` if there are fewer.

        Files may overlap and are not always sorted. Row groups are therefore read in the order of
        their smallest IDs, until the remaining groups cannot contain any of the first `count` rows.
        """
        numbers = itertools.count()
        waiting: list[tuple[int, int, WrittenFile, RowGroup | None]] = [
            (each.first[0], next(numbers), each, None)
            for each in self._files_between(place, after, upto)
        ]
        heapq.heapify(waiting)
        found = pa.table({name: pa.array([], pa.uint64()) for name in _HALVES})
        while waiting:
            _, _, file, group = heapq.heappop(waiting)
            footer = self._footer(place[0], file.path)
            if group is None:
                for each in _row_groups(footer):
                    if each.overlaps(after, upto):
                        heapq.heappush(waiting, (each.low_ms, next(numbers), file, each))
                continue
            with _open_file(self._location(place[0]), file.path, footer) as opened:
                ids = opened.read_row_group(group.number, columns=_id_columns([group]))
                kept = ids.filter(_mask_between(_id_halves(ids, group.clipped), after, upto))
                halves = dict(zip(_HALVES, _id_halves(kept, group.clipped), strict=True))
            found = pa.concat_tables([found, pa.table(halves)])
            if found.num_rows >= count and _count_below(found, waiting) >= count:
                break
        if found.num_rows < count:
            return upto
        order = compute.sort_indices(found, [(name, "ascending") for name in _HALVES])
        last: int = order[count - 1].as_py()
        return found["id_ms"][last].as_py(), found["id_seq"][last].as_py()

    def parts(self, place: TopicPartition, after: Id, upto: Id) -> list[ArchivedPart]:
        """Divide the rows in `(after, upto]` into tasks with about the same amount of data."""
        tasks: list[list[FileStripe]] = []
        room = 0.0
        for file in self._files_between(place, after, upto):
            share = _rows_between(file, after, upto)
            size = max(share / TASK_ROWS, file.size / max(1, file.rows) * share / TASK_BYTES)
            stripes = max(1, min(math.ceil(size), -(-file.rows // GROUP_ROWS)))
            for at in range(stripes):
                if size / stripes > room:
                    tasks.append([])
                    room = 1.0
                tasks[-1].append(FileStripe(file.path, at, stripes))
                room -= size / stripes
        return [ArchivedPart(place, after, upto, tuple(each)) for each in tasks]

    def _files_between(self, place: TopicPartition, after: Id, upto: Id) -> list[WrittenFile]:
        """Return the files that may have rows in `(after, upto]`, sorted by their first IDs."""
        topic, partition = place
        table = self._tables.get(topic)
        if table is None or after >= upto:
            return []
        version, files = self._files.get(topic, (-1, {}))
        if version != table.version:
            files = {}
            for each in sorted(table.files(), key=lambda each: (each.first, each.path)):
                files.setdefault(each.partition, []).append(each)
            self._files[topic] = table.version, files
        return [
            each
            for each in files.get(partition, ())
            if _clip_limit(each.last[0]) >= after[0] and each.first[0] <= upto[0]
        ]

    def _footer(self, topic: str, path: str) -> parquet.FileMetaData:
        if (topic, path) not in self._footers:
            if len(self._footers) >= _FOOTERS_MAX:
                self._footers.clear()
            with _open_file(self._location(topic), path) as opened:
                self._footers[topic, path] = opened.metadata
        return self._footers[topic, path]

    def _location(self, topic: str) -> Location:
        return self._folder.subfolder(RAW.folder, topic)

    # --- reading ---

    def read(self, part: ArchivedPart, chosen: Sequence[rows.Column]) -> Iterator[pa.RecordBatch]:
        """Yield these columns of a part's rows. Raises ArchiveError if a file cannot be read."""
        folder = self._location(part.place[0])
        schema = rows.arrow_schema(chosen)
        stored = [each for each in schema.names if each not in _PLACE]
        for stripe in part.stripes:
            with _open_file(folder, stripe.path) as opened:
                every = _row_groups(opened.metadata)[stripe.at :: stripe.of]
                groups = [each for each in every if each.overlaps(part.after, part.upto)]
                batches = opened.iter_batches(
                    batch_size=_batch_rows(opened.metadata, groups),
                    row_groups=[each.number for each in groups],
                    columns=list(dict.fromkeys([*stored, *_id_columns(groups)])),
                    use_threads=False,
                )
                clipped = any(each.clipped for each in groups)
                for batch in batches if groups else ():
                    found = batch.filter(
                        _mask_between(_id_halves(batch, clipped), part.after, part.upto)
                    )
                    if found.num_rows:
                        yield _cast(schema, found, part.place)


@contextmanager
def _open_file(
    folder: Location, path: str, footer: parquet.FileMetaData | None = None
) -> Iterator[parquet.ParquetFile]:
    with opened_alone(folder, path) as raw:
        yield parquet.ParquetFile(raw, metadata=footer)


def _rows_between(file: WrittenFile, after: Id, upto: Id) -> int:
    """Return the number of rows of a file in `(after, upto]`.

    If the file is only partly in this range, the number is estimated from the times of its first
    and last IDs, and is at least 1.
    """
    low, high = file.first[0], _clip_limit(file.last[0])
    if low > after[0] and high < upto[0]:
        return file.rows
    inside = min(high, upto[0]) - max(low, after[0])
    return max(1, -(-file.rows * inside // max(1, high - low)))


def _clip_limit(ms: int) -> int:
    """Return the highest time that this value of a column can represent.

    A column stores all times above LONG_MAX as LONG_MAX.
    """
    return PART_MAX if ms >= LONG_MAX else ms


def _row_groups(footer: parquet.FileMetaData) -> list[RowGroup]:
    found = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        bounds = dict.fromkeys(_HALVES, (0, LONG_MAX))
        for at in range(group.num_columns):
            column = group.column(at)
            name, seen = column.path_in_schema, column.statistics
            if name in _HALVES and seen is not None and seen.has_min_max:
                bounds[name] = seen.min, seen.max
        clipped = any(high >= LONG_MAX for _, high in bounds.values())
        low, high = bounds["id_ms"]
        found.append(RowGroup(number, low, _clip_limit(high), clipped))
    return found


def _batch_rows(footer: parquet.FileMetaData, groups: Sequence[RowGroup]) -> int:
    """Return the number of rows per batch so that a batch has about `_BATCH_BYTES`."""
    found = [footer.row_group(each.number) for each in groups]
    size = sum(int(each.total_byte_size) for each in found)
    count = sum(int(each.num_rows) for each in found)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * count // max(1, size)))


def _id_columns(groups: Sequence[RowGroup]) -> tuple[str, ...]:
    return ("id",) if any(each.clipped for each in groups) else _HALVES


def _id_halves(found: Any, clipped: bool) -> tuple[Any, Any]:
    """Return the milliseconds and sequence numbers of the IDs, as unsigned integers.

    The columns of numbers cannot hold values above 63 bits. If there may be such values, both
    halves are parsed from the column that holds the IDs as strings.
    """
    if not clipped:
        return found["id_ms"].cast(pa.uint64()), found["id_seq"].cast(pa.uint64())
    split = compute.split_pattern(found["id"].cast(pa.string()), "-")
    low, high = (compute.list_element(split, at).cast(pa.uint64()) for at in (0, 1))
    return low, high


def _mask_between(halves: tuple[Any, Any], after: Id, upto: Id) -> Any:
    """Return a mask that is True for IDs in `(after, upto]`."""
    ms, seq = halves
    (low_ms, low_seq), (high_ms, high_seq) = (
        [pa.scalar(half, pa.uint64()) for half in each] for each in (after, upto)
    )
    later = compute.or_(
        compute.greater(ms, low_ms),
        compute.and_(compute.equal(ms, low_ms), compute.greater(seq, low_seq)),
    )
    earlier = compute.or_(
        compute.less(ms, high_ms),
        compute.and_(compute.equal(ms, high_ms), compute.less_equal(seq, high_seq)),
    )
    return compute.and_(later, earlier)


def _count_below(found: pa.Table, waiting: Sequence[tuple[int, int, WrittenFile, Any]]) -> int:
    """Return the number of rows found so far with smaller IDs than all those still to be read."""
    if not waiting:
        return int(found.num_rows)
    smaller = compute.less(found["id_ms"], pa.scalar(waiting[0][0], pa.uint64()))
    return int(compute.sum(smaller).as_py() or 0)


def _cast(schema: pa.Schema, found: pa.RecordBatch, place: TopicPartition) -> pa.RecordBatch:
    """Convert a batch to exactly the columns and types that Spark expects."""
    columns = []
    for each in schema:
        if each.name in _PLACE:
            value = pa.scalar(place[_PLACE.index(each.name)], each.type)
            columns.append(pa.repeat(value, found.num_rows))
        else:
            column = found.column(each.name)
            columns.append(column if column.type == each.type else column.cast(each.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
