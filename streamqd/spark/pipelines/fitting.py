"""Payloads into columns: Spark's conversion, and the tasks that write the rows or the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd.spark.pipelines.derived import OWN
from streamqd.spark.pipelines.parts import DateWriter, WrittenFile
from streamqd.spark.pipelines.reasons import DAY_US, FIRST_DAY, last_day
from streamqd.spark.pipelines.schemas import BAD, derails
from streamqd.spark.pipelines.strict import faults

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

REASON_MAX = 1000  # characters
# A row describes a file. `bad` files belong to the quarantine.
FILE_DDL = "path string, date string, rows bigint, size bigint, bad boolean"
_OPTIONS = {
    "columnNameOfCorruptRecord": BAD,
    "timeZone": "UTC",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
_KEPT = ("partition", "id", "timestamp", "date", "key", "value")  # of the raw table
LATE_BYTES = 32 << 20  # of rows for the quarantine in one task


def judged(rows: DataFrame, kind: StructType, event_time: str, now_us: int) -> DataFrame:
    """Return converted rows of a raw table, ordered by the dates that fitting rows will have.

    `Reasons` returns what does not fit. `alone` exists for columns that derail Spark, such as maps:
    a wrong row is converted again, without these columns and with each one alone.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    rows = converted(rows, kind)
    date = f.col("date")
    if event_time:
        at = f.col("row").getField(event_time)
        day, last = _day(at, kind[event_time].dataType), last_day(now_us)
        date = f.date_from_unix_date(f.when((day >= 0) & (day <= last), day))
    dated = rows.withColumn("event_date", f.when(~f.col("wrong"), date))
    found = [*_KEPT, "event_date", "fault", "wrong", "row"]
    apart = [each for each in kind.fields if derails(each.dataType)]
    if apart:
        bad = StructField(BAD, StringType())
        rest = StructType([*(each for each in kind.fields if each not in apart), bad])
        parts = {"rest": rest} | {each.name: StructType([each, bad]) for each in apart}
        alone = f.struct(
            *(
                f.from_json("text", part, _OPTIONS).alias(f"{number}")
                for number, part in enumerate(parts.values())
            )
        )
        dated = dated.withColumn("alone", f.when(f.col("wrong") & f.col("fault").isNull(), alone))
        found.append("alone")
    # One file after the other: a task holds one open, however many dates there are.
    return dated.select(*found).sortWithinPartitions("event_date", "date")


def converted(rows: DataFrame, kind: StructType) -> DataFrame:
    """Return rows with a payload as `value`, and its columns of the schema as `row`.

    `fault` is the reason why Spark must not convert a payload. `text` is then null, otherwise the
    text to convert. `wrong` rows do not match the schema, with a fault or without.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    rows = rows.withColumn("fault", faults(f.col("value"), kind))
    text = f.when(f.col("fault").isNull(), f.col("value").cast("string"))
    whole = StructType([*kind.fields, StructField(BAD, StringType())])
    row = f.col("row")
    wrong = row.isNull() | row.getField(BAD).isNotNull()
    rows = rows.withColumn("text", text).withColumn("row", f.from_json("text", whole, _OPTIONS))
    return rows.withColumn("wrong", wrong)


def _day(value: Column, kind: DataType) -> Column:
    """Return the number of a value's day (UTC), in any time zone of the session."""
    from pyspark.sql import functions as f

    if kind.typeName() == "date":
        return f.unix_date(value)
    # Below the first year any day is fine. Near the smallest bigint, subtraction would overflow.
    us, floor = f.unix_micros(value), f.lit((FIRST_DAY - 1) * DAY_US)
    us = f.when(us < floor, floor).otherwise(us)
    return ((us - f.pmod(us, f.lit(DAY_US))) / DAY_US).cast("int")


class Plain:
    """Writes rows of a frame into files of a table without partition columns."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        """Open the writer. `schema` has the frame's columns."""
        self._schema = schema
        self._files = DateWriter(folder, "", schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self._files.write("", _as(self._schema, batch.columns))

    def finish(self) -> pa.RecordBatch:
        """Close the files. Return a row for each."""
        return _listing((self._files.finish(), False))

    def discard(self) -> None:
        """Remove them."""
        self._files.discard()


class Fitter:
    """Writes rows of `judged` into files of the parsed table and the quarantine.

    Rows for the quarantine come in the order of other dates than its own: they are held, up to
    LATE_BYTES, and written date by date.
    """

    def __init__(
        self,
        parsed: tuple[Path, pa.Schema],
        quarantine: tuple[Path, pa.Schema],
        reasons: Callable[[pa.RecordBatch], pa.Array],
    ) -> None:
        """Open the writer. Each schema is that of the files, without the partition column."""
        self._good = DateWriter(parsed[0], OWN[0], parsed[1])
        self._bad = DateWriter(quarantine[0], "date", quarantine[1])
        self._schemas = parsed[1], quarantine[1]
        self._reasons = reasons
        self._late: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        import pyarrow as pa

        reasons = self._reasons(batch)
        fitting, unfitting = self._schemas
        good = batch if reasons.null_count == len(batch) else batch.filter(reasons.is_null())
        for date, rows in _by_date(good, "event_date"):
            row = rows["row"]
            # A column that the schema has no longer stays in the table.
            has = {field.name for field in row.type}
            fields = [
                row.field(each.name) if each.name in has else pa.nulls(len(row), each.type)
                for each in list(fitting)[len(OWN) - 1 :]
            ]
            self._good.write(
                date, _as(fitting, [rows["partition"], rows["id"], rows["timestamp"], *fields])
            )
        if good is batch:
            return
        unfit = pa.RecordBatch.from_pydict(
            {
                "date": batch["date"],
                **{name: batch[name] for name in unfitting.names if name != "reason"},
                "reason": _short(reasons),
            }
        )
        self._late.append(unfit.filter(reasons.is_valid()))
        if sum(each.nbytes for each in self._late) >= LATE_BYTES:
            self._write_late()

    def _write_late(self) -> None:
        import pyarrow as pa

        late, self._late = self._late, []
        if not late:
            return
        unfitting = self._schemas[1]
        for batch in pa.Table.from_batches(late).sort_by("date").combine_chunks().to_batches():
            for date, rows in _by_date(batch, "date"):
                self._bad.write(date, _as(unfitting, [rows[name] for name in unfitting.names]))

    def finish(self) -> pa.RecordBatch:
        """Close the files. Return a row for each."""
        self._write_late()
        return _listing((self._good.finish(), False), (self._bad.finish(), True))

    def discard(self) -> None:
        """Remove them."""
        self._good.discard()
        self._bad.discard()


def written(
    frame: DataFrame, begin: Callable[[], Plain | Fitter]
) -> tuple[list[WrittenFile], list[WrittenFile]]:
    """Make Spark's tasks write a frame. Return the files of the table, and of the quarantine.

    A table function needs only pyarrow. `mapInArrow` would need pandas too.
    """
    from pyspark.sql.functions import arrow_udtf

    class Files:
        def __init__(self) -> None:
            self._writer = begin()

        def eval(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
            try:
                self._writer.write(batch)
            except BaseException:
                self._writer.discard()
                raise
            return iter(())

        def terminate(self) -> Iterator[pa.RecordBatch]:
            yield self._writer.finish()

    function: Any = arrow_udtf(Files, returnType=FILE_DDL)
    files: tuple[list[WrittenFile], list[WrittenFile]] = ([], [])
    for row in function(frame.asTable()).collect():
        none = (0, 0)
        file = WrittenFile(row["path"], row["date"], 0, row["rows"], row["size"], none, none)
        files[row["bad"]].append(file)
    return files


def _listing(*written: tuple[Sequence[WrittenFile], bool]) -> pa.RecordBatch:
    import pyarrow as pa

    rows = [(*file[:2], *file[3:5], bad) for files, bad in written for file in files]
    kinds = (pa.string(), pa.string(), pa.int64(), pa.int64(), pa.bool_())
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, ["path", "date", "rows", "size", "bad"])


def _by_date(rows: pa.RecordBatch, column: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    from pyarrow import compute

    dates = rows[column].unique()
    for date in dates:
        some = rows if len(dates) == 1 else rows.filter(compute.equal(rows[column], date))
        yield str(date.as_py()), some


def _as(schema: pa.Schema, arrays: Sequence[pa.Array]) -> pa.RecordBatch:
    """Return arrays as a file's columns: Spark names some types differently (time zone)."""
    import pyarrow as pa

    cast = [
        each if each.type == field.type else each.cast(field.type)
        for each, field in zip(arrays, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def _short(reasons: pa.Array) -> pa.Array:
    from pyarrow import compute

    return compute.utf8_slice_codeunits(reasons, 0, REASON_MAX)
