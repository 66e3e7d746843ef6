"""Reading an archive's files in tasks: rows as Arrow batches, with the columns of the source.

Knows neither Spark nor Redis. What is to be read was planned by `tiers`; a file that a compaction
has put aside since then is found where it was put.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from streamqd.spark import rows
from streamqd.spark.offsets import Id, Place
from streamqd.spark.pipelines.manifest import ManifestError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 10_000
LONG_MAX = (1 << 63) - 1


class ColdFile(NamedTuple):
    """A file of an archive. `paths` are all places where it can be, the likeliest first."""

    paths: tuple[str, ...]
    rows: int
    size: int
    first: Id
    last: Id


class ColdSpan(NamedTuple):
    """Rows of one partition in `(start, end]`, in files."""

    place: Place
    start: Id
    end: Id
    files: tuple[ColdFile, ...]


def batches(span: ColdSpan, chosen: Sequence[rows.Column]) -> Iterator[pa.RecordBatch]:
    """The rows of a span. Raises ManifestError for a file that is gone or is another."""
    schema = rows.arrow_schema(chosen)
    for file in span.files:
        whole = span.start < file.first and file.last <= span.end
        with _opened(file) as raw:
            for batch in _rows(raw, file, chosen, None if whole else span):
                yield _dressed(batch, schema, span.place)


@contextlib.contextmanager
def _opened(file: ColdFile) -> Iterator[BinaryIO]:
    for path in file.paths:
        try:
            raw = Path(path).open("rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            continue
        with raw:
            yield raw
        return
    raise ManifestError(
        f"{file.paths[0]} is gone: if a compaction has replaced it, read again, and give"
        " compactions a longer --grace"
    )


def _rows(
    raw: BinaryIO, file: ColdFile, chosen: Sequence[rows.Column], within: ColdSpan | None
) -> Iterator[pa.RecordBatch]:
    """What the file holds, as much of it as lies `within` a span, in the columns that it has."""
    from pyarrow import parquet

    opened = parquet.ParquetFile(raw)
    if opened.metadata.num_rows != file.rows:
        raise ManifestError(
            f"{file.paths[0]} has {opened.metadata.num_rows} rows, not {file.rows} as its manifest"
            " says"
        )
    wanted = [column.name for column in chosen if column.name in opened.schema_arrow.names]
    groups = list(range(opened.metadata.num_row_groups))
    if within is not None:
        groups = [number for number in groups if _touches(opened.metadata, number, within)]
        wanted = list(dict.fromkeys((*wanted, "id_ms", "id_seq")))
    if not wanted:
        wanted = ["id_ms"]  # to know how many there are
    # By row group: what is held at a time is one of them, whatever the file's length.
    for number in groups:
        for batch in opened.iter_batches(
            BATCH_ROWS, row_groups=[number], columns=wanted, use_threads=False
        ):
            yield batch if within is None else batch.filter(_inside(batch, within))


def _touches(metadata: Any, number: int, span: ColdSpan) -> bool:
    """Whether a row group can have rows of the span, by its statistics."""
    group = metadata.row_group(number)
    columns = (group.column(at) for at in range(group.num_columns))
    found = next((each.statistics for each in columns if each.path_in_schema == "id_ms"), None)
    if found is None or not found.has_min_max:
        return True
    return bool(span.start[0] <= found.max and found.min <= span.end[0])


def _inside(batch: pa.RecordBatch, span: ColdSpan) -> pa.Array:
    """Which rows have ids in `(start, end]`. Columns hold halves of ids up to 63 bits."""
    from pyarrow import compute

    ms, seq = batch["id_ms"], batch["id_seq"]

    def beyond(bound: Id) -> pa.Array:
        high, low = (min(half, LONG_MAX) for half in bound)
        same = compute.and_(compute.equal(ms, high), compute.greater(seq, low))
        return compute.or_(compute.greater(ms, high), same)

    return compute.and_(beyond(span.start), compute.invert(beyond(span.end)))


def _dressed(batch: pa.RecordBatch, schema: pa.Schema, place: Place) -> pa.RecordBatch:
    """The columns in the order and of the types of the schema; the layout says two of them."""
    import pyarrow as pa

    said = {"topic": place[0], "partition": place[1]}
    names = set(batch.schema.names)
    arrays = []
    for field in schema:
        if field.name in names:
            column = batch[field.name]
            arrays.append(column if column.type == field.type else column.cast(field.type))
        else:
            value = said.get(field.name)
            arrays.append(pa.repeat(pa.scalar(value, field.type), batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def shared_out(files: Iterable[ColdFile], most_bytes: int, most_rows: int) -> list[list[ColdFile]]:
    """Files, in their order, in portions of at most so many bytes and rows; no file is cut."""
    portions: list[list[ColdFile]] = []
    size = count = 0
    for file in files:
        full = size + file.size > most_bytes or count + file.rows > most_rows
        if not portions or full:
            portions.append([])
            size = count = 0
        portions[-1].append(file)
        size, count = size + file.size, count + file.rows
    return portions


def touching(files: Iterable[ColdFile], start: Id, end: Id) -> list[ColdFile]:
    """The files that have rows in `(start, end]`, by what is said of them."""
    return [file for file in files if file.last > start and file.first <= end]
