"""Parse the payloads of a topic into a table with columns, and put those that fail in quarantine.

Both tables are derived from the raw table, and can be built again from it. The commit to the parsed
table also records its position and the files that must be added to the quarantine next. If the
process is killed between the two commits, the next run can therefore complete the second one, and
no file is lost or duplicated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.spark import offsets
from streamqd.spark.offsets import Offsets, Position
from streamqd.spark.pipelines import compact, derived, fitting, packed, schemas, tables
from streamqd.spark.pipelines.derived import OWN
from streamqd.spark.pipelines.parts import WrittenFile, last_id
from streamqd.spark.pipelines.queries import to_streamqd_error
from streamqd.spark.pipelines.storage import Archive, ArchiveTable, UnparsedFiles

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

CHUNK = 1 << 30  # bytes of raw files after which parsed rows are committed, at the end of a date
_LONG_MAX = (1 << 63) - 1


@dataclass
class ParseCounts:
    """The number of rows that a run has parsed, and the number that it has put into quarantine."""

    batches: int = 0
    rows: int = 0
    quarantined: int = 0
    case_variants: set[tuple[str, str]] = field(
        default_factory=set
    )  # pairs of a name in payloads and the column from which it differs only in case


def parse(
    archive: Archive,
    raw: ArchiveTable,
    pipeline: config.Pipeline,
    spark: Callable[[], SparkSession],
    check: Callable[[], None],
) -> ParseCounts:
    """Parse the entries of the raw table that were not parsed yet.

    `spark` is called only if there are entries to parse, and must return a session. `check` is
    called before rows are committed, and must raise an error if the lease was lost.

    Raises InvalidRequestError or RequestRefusedError if the schema or the tables cannot be used,
    ArchiveError if a table is damaged, and PipelineError if Spark fails.
    """
    pair, done = derived.open_pair(archive, raw.topic), ParseCounts()
    if not any(True for _ in _chunks(raw, pair and pair.parsed)):
        return done
    session = spark()
    kind, columns = read_columns(pipeline)
    if pair is None:
        archive.derived_table(raw.topic, derived.PARSED, columns)
        pair = derived.open_pair(archive, raw.topic)
        assert pair is not None
    pair.parsed.grow(columns)
    pair.quarantine.grow(derived.quarantine_extra(pipeline.extra))
    for files, ends in _chunks(raw, pair.parsed):
        rows = _read_after(session, raw, files, pair.parsed.positions)
        fit, unfit, _, case_variants = _fit_rows(rows, pair, kind, pipeline)
        check()
        owed = UnparsedFiles(pair.quarantine.note.batch, _without_bounds(unfit))
        pair.parsed.append(fit, ends, owed=owed)
        pair.quarantine.append(unfit, ends, batch=pair.parsed.note.batch)
        done.batches += 1
        done.rows += sum(each.rows for each in fit)
        done.quarantined += sum(each.rows for each in unfit)
        done.case_variants |= case_variants
    for table in pair:
        compact.merge_small_files(table, done.batches)
    return done


def parse_quarantine(
    archive: Archive,
    topic: str,
    pipeline: config.Pipeline,
    spark: Callable[[], SparkSession],
    check: Callable[[], None],
) -> ParseCounts:
    """Validate the rows in quarantine against the current schema, and move those that fit.

    Returns how many rows were moved, and how many remain in quarantine. Raises the same errors as
    `parse`.
    """
    pair = derived.open_pair(archive, topic)
    files = [] if pair is None else pair.quarantine.files()
    if pair is None or not files:
        return ParseCounts()
    session = spark()
    kind, columns = read_columns(pipeline)
    pair.parsed.grow(columns)
    pair.quarantine.grow(derived.quarantine_extra(pipeline.extra))
    rows = tables.read_files(session, pair.quarantine, files)
    fit, unfit, *_ = _fit_rows(rows, pair, kind, pipeline)
    check()
    owed = UnparsedFiles(pair.quarantine.note.batch, _without_bounds(unfit), replaces=True)
    pair.parsed.append(fit, {}, owed=owed)
    pair.quarantine.append(unfit, {}, batch=pair.parsed.note.batch, replace=True)
    return ParseCounts(1, sum(each.rows for each in fit), sum(each.rows for each in unfit))


def parse_again(
    archive: Archive,
    raw: ArchiveTable,
    pipeline: config.Pipeline,
    spark: Callable[[], SparkSession],
    check: Callable[[], None],
) -> ParseCounts:
    """Parse all entries of the raw table again, with the current schema.

    Nothing changes until the first commit to the parsed table. That commit replaces its rows,
    columns and position, and records the files that will replace the rows of the quarantine. If the
    process is killed later, `parse` completes the work. Raises the same errors as `parse`.
    """
    session = spark()
    kind, columns = read_columns(pipeline)
    pair = derived.open_pair_to_replace(archive, raw.topic, columns)
    pair.quarantine.grow(derived.quarantine_extra(pipeline.extra))
    done = ParseCounts(1)
    fit: list[WrittenFile] = []
    unfit: list[WrittenFile] = []
    files, ends = next(_chunks(raw, None), ([], {}))
    if files:
        rows = _read_after(session, raw, files, {})
        fit, unfit, _, done.case_variants = _fit_rows(rows, pair, kind, pipeline, columns)
    check()
    batch = max(each.next_batch for each in pair)
    owed = UnparsedFiles(pair.quarantine.note.batch, _without_bounds(unfit), replaces=True)
    pair.parsed.append(fit, ends, owed=owed, batch=batch, columns=columns)
    pair.quarantine.append(unfit, ends, batch=batch, replace=True)
    rest = parse(archive, raw, pipeline, spark, check)
    done.rows = rest.rows + sum(each.rows for each in fit)
    done.quarantined = rest.quarantined + sum(each.rows for each in unfit)
    return done


def _fit_rows(
    rows: DataFrame,
    pair: derived.TablePair,
    kind: StructType,
    pipeline: config.Pipeline,
    columns: pa.Schema | None = None,
) -> fitting.FittedFiles:
    """Write new files for the two tables, and return them.

    The files of the parsed table get `columns`, or by default the columns that the table already
    has. Raises PipelineError if Spark fails.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    into = fitting.PairFolders(
        _folder_and_columns(pair.parsed, columns),
        _folder_and_columns(pair.quarantine),
        partial(tables.read_files, rows.sparkSession, pair.quarantine),
        pipeline.extra,
    )
    now_us = round(time.time() * 1e6)
    read = packed.reader(pipeline.codec, kind)
    try:
        return fitting.fit_rows(rows, kind, pipeline.event_time or "", now_us, into, read)
    except (Py4JError, PySparkException) as error:
        raise to_streamqd_error(error) from error


def _without_bounds(files: Sequence[WrittenFile]) -> tuple[WrittenFile, ...]:
    return tuple(each._replace(bounds="") for each in files)


def read_columns(pipeline: config.Pipeline) -> tuple[StructType, pa.Schema]:
    """Return the schema of a topic's payloads, and the columns of its parsed table.

    Raises InvalidRequestError or RequestRefusedError if the configuration cannot be used.
    """
    import pyarrow as pa

    kind = schemas.read_schema(pipeline.schema or "", pipeline.times)
    columns = schemas.table_columns(kind)
    taken = [name for name in kind.names if name.lower() in (*OWN, *pipeline.extra)]
    if taken:
        raise RequestRefusedError(
            f"the schema has a column {taken[0]}, but every parsed table already has a column of"
            " this name"
        )
    time_of = pipeline.event_time
    if time_of and (
        time_of not in kind.names or kind[time_of].dataType.typeName() not in ("date", "timestamp")
    ):
        raise RequestRefusedError(
            f"event_time is {time_of}, which is not a timestamp or date column of the schema; set"
            " it to such a column, or remove it to use the time of the entry"
        )
    more = derived.extra_columns(pipeline.extra)
    return kind, pa.schema([*derived.parsed_columns(), *columns, *more])


def _chunks(
    raw: ArchiveTable, parsed: ArchiveTable | None
) -> Iterator[tuple[list[WrittenFile], Offsets]]:
    """Yield the raw files with entries to parse, in chunks, and the positions after each chunk.

    A chunk consists of whole dates. Each ID belongs to exactly one date, so the positions at the
    end of a date separate the files of this chunk from those of the next one. Raises
    RequestRefusedError if the raw table was restored to a version that is older than its parsed
    rows.
    """
    known = {} if parsed is None else parsed.positions
    for place, end in raw.positions.items():
        # The position of a recreated stream is zero as long as the stream is empty, so it is not
        # compared.
        if place in known and offsets.ZERO < end.id < known[place].id:
            raise RequestRefusedError(
                f"{raw.folder} was restored to a version older than its parsed rows; remove the"
                f" directories of {raw.topic} in parsed and quarantine to parse everything again"
            )
    starts = {place: known.get(place, Position(offsets.ZERO)).id for place in raw.positions}
    ends = {place: end.id for place, end in raw.positions.items() if end.id > starts[place]}
    if not ends:
        return
    behind = {place[1]: starts[place] for place in ends}
    files = sorted(
        (each for each in raw.files() if each.last > behind.get(each.partition, each.last)),
        key=lambda each: each.date,
    )
    taken: list[WrittenFile] = []
    dates = [(date, list(group)) for date, group in groupby(files, key=lambda each: each.date)]
    for date, group in dates[:-1]:
        taken += group
        if sum(each.size for each in taken) >= CHUNK:
            last = last_id(date)
            reached = {place: min(end, max(starts[place], last)) for place, end in ends.items()}
            yield taken, {place: Position(end) for place, end in reached.items()}
            taken = []
    taken += dates[-1][1] if dates else []
    yield taken, {place: Position(end) for place, end in ends.items()}


def _read_after(
    spark: SparkSession, raw: ArchiveTable, files: list[WrittenFile], starts: Offsets
) -> DataFrame:
    """Return the rows of these raw files that come after the start positions."""
    from pyspark.sql import functions as f

    frame = tables.read_files(spark, raw, files)
    known = [(place[1], *(min(half, _LONG_MAX) for half in at.id)) for place, at in starts.items()]
    if not known:
        return frame
    before = spark.createDataFrame(known, "partition int, after_ms bigint, after_seq bigint")
    ms, seq = f.col("after_ms"), f.col("after_seq")
    behind = (
        ms.isNull() | (f.col("id_ms") > ms) | ((f.col("id_ms") == ms) & (f.col("id_seq") > seq))
    )
    return frame.join(f.broadcast(before), "partition", "left").where(behind)


def _folder_and_columns(table: ArchiveTable, columns: pa.Schema | None = None) -> tuple[Any, Any]:
    """Return the directory of a table, and the schema of its files."""
    schema = tables.arrow_columns(table) if columns is None else columns
    return table.folder, schema.remove(schema.get_field_index(table.partitioned[0]))
