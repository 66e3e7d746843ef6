"""Convert payloads to columns.

Write rows that fit the schema, and rejected rows with the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from streamqd.spark.location import Location
from streamqd.spark.pipelines.conversion import BEYOND_US
from streamqd.spark.pipelines.derived import HEADERS, KEY, OWN, RESCUED
from streamqd.spark.pipelines.packed import Reader, json_texts, texts
from streamqd.spark.pipelines.parts import DateWriter, WrittenFile, bounded_with_nan, remove
from streamqd.spark.pipelines.proofs import Prover
from streamqd.spark.pipelines.reasons import DAY_US, FIRST_DAY, CheckedRows, Reasons, last_day
from streamqd.spark.pipelines.schemas import BAD, UNITS, misaligns_columns, time_format
from streamqd.spark.pipelines.strict import faults, rescue_fields

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

REASON_MAX = 1000  # maximum characters of a reason
# A task returns a row for each file, in which `rows_are` is FIT, UNFIT or UNDECIDED. A row with
# ALIKE reports no file, but a name in payloads (stored in `path`) that differs from a column
# (stored in `date`) only in case.
FILE_DDL = "path string, date string, rows bigint, size bigint, bounds string, rows_are string"
FIT, UNFIT, UNDECIDED, ALIKE = "fit", "unfit", "undecided", "alike"
_OPTIONS = {
    "columnNameOfCorruptRecord": BAD,
    "timeZone": "UTC",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
KEPT = ("partition", "id", "timestamp", "date", "key", "value")  # columns of the raw table to keep
LATE_BYTES = 32 << 20  # maximum bytes of out-of-order rows that one task buffers


class PairFolders(NamedTuple):
    """The directories of a topic's parsed table and quarantine, and the columns of their files.

    `read` returns the rows of files in the directory of the quarantine. `extra` contains the names
    of the columns that the configuration adds to the parsed table.
    """

    parsed: tuple[Location, pa.Schema]
    quarantine: tuple[Location, pa.Schema]
    read: Callable[[Sequence[WrittenFile]], DataFrame]
    extra: Sequence[str] = ()


def fit_rows(
    rows: DataFrame,
    kind: StructType,
    event_time: str,
    now_us: int,
    into: PairFolders,
    read: Reader = json_texts,
) -> FittedFiles:
    """Write new files with the rows that fit the schema, and others with those that do not.

    A first pass decides most rows without Spark's JSON reader, and writes the undecided rows to
    temporary files. A second pass then uses that reader to decide them. If the process is killed,
    the temporary files are purged like all files that no commit lists.
    """
    begin = partial(CheckingWriter, into.parsed, into.quarantine, extra=into.extra, read=read)
    prover = Prover(kind, event_time, now_us, read)
    kept = [*KEPT, *(name for name in ("headers",) if name in into.quarantine[1].names)]
    first = write_frame(rows.select(*kept), partial(begin, prover))
    if not first.undecided:
        return first
    try:
        rest = check_rows(into.read(first.undecided), kind, event_time, now_us, kept, read)
        second = write_frame(rest, partial(begin, Reasons(kind, event_time, now_us, read)))
    finally:
        remove(into.quarantine[0], first.undecided)
    return FittedFiles(first.fit + second.fit, first.unfit + second.unfit, [], first.case_variants)


def check_rows(
    rows: DataFrame,
    kind: StructType,
    event_time: str,
    now_us: int,
    kept: Sequence[str] = KEPT,
    read: Reader = json_texts,
) -> DataFrame:
    """Convert rows of a raw table. Return them in the order of their dates, for `Reasons` to check.

    The result has the columns of the raw table that are listed in `kept`, the event's date, and
    columns of `convert_rows`.

    Some columns, such as maps, can make Spark misread the columns after them. If the schema has
    any, a row that does not fit is converted again, once without these columns and once with each
    of them alone. The column `alone` contains these conversions, which show which column is really
    wrong.
    """
    from pyspark.sql import functions as f

    rows = convert_rows(rows, kind, read)
    date = f.col("date")
    if event_time:
        at = f.col("row").getField(event_time)
        day, last = _day(at, kind[event_time].dataType), last_day(now_us)
        date = f.date_from_unix_date(f.when((day >= 0) & (day <= last), day))
    dated = rows.withColumn("event_date", f.when(~f.col("wrong"), date))
    found = [*kept, "event_date", "fault", "wrong", "row"]
    misaligned = [each for each in kind.fields if misaligns_columns(each.dataType)]
    if misaligned:
        parts = [
            [each for each in kind.fields if each not in misaligned],
            *([each] for each in misaligned),
        ]
        alone = f.struct(
            *(_from_json("text", part).alias(f"{number}") for number, part in enumerate(parts))
        )
        dated = dated.withColumn("alone", f.when(f.col("wrong") & f.col("fault").isNull(), alone))
        found.append("alone")
    # Rows are sorted by date, so that a task has only one open file at a time.
    return dated.select(*found).sortWithinPartitions("event_date", "date")


def convert_rows(rows: DataFrame, kind: StructType, read: Reader = json_texts) -> DataFrame:
    """Convert the payloads in the column `value` to the columns of the schema.

    These columns are added to the rows:

    - `fault` is the reason why Spark must not convert a payload, or null.
    - `text` is the JSON to convert, or null if there is a fault.
    - `row` contains the columns of the schema.
    - `wrong` is true if the row does not match the schema, either because of a fault or because the
      conversion failed.
    """
    from pyspark.sql import functions as f

    json = f.col("value")
    if read is json_texts:
        rows = rows.withColumn("fault", faults(json, kind))
    else:
        rows, json = rows.withColumn("json", texts(f.col("value"), read)), f.col("json.text")
        rows = rows.withColumn("fault", f.coalesce("json.fault", faults(json, kind)))
    text = f.when(f.col("fault").isNull(), json.cast("string"))
    row = f.col("row")
    rows = rows.withColumn("text", text).withColumn("row", _from_json("text", kind.fields))
    return rows.withColumn("wrong", row.isNull() | row.getField(BAD).isNotNull())


def _from_json(text: str, fields: Sequence[StructField]) -> Column:
    """Read the columns from a JSON text. Add the column BAD, which is null if all of them fit."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import DecimalType, StringType, StructField, StructType

    forms = {each.name: form for each in fields if (form := time_format(each))}
    read = [
        StructField(
            each.name,
            each.dataType
            if each.name not in forms
            else (DecimalType(38, 9) if forms[each.name] in UNITS else StringType()),
        )
        for each in fields
    ]
    bad = StructField(BAD, StringType())
    row = found = f.from_json(text, StructType([*read, bad]), _OPTIONS)
    why = row.getField(BAD)
    for each in fields:
        if each.name not in forms:
            continue
        raw, form = row.getField(each.name), forms[each.name]
        if form in UNITS:
            time = _parse_unit(raw, UNITS[form])
        else:
            time = _parse_pattern(raw, form, each.dataType)
            why = f.coalesce(why, f.when(raw.isNotNull() & time.isNull(), raw))
        found = found.withField(f"`{each.name}`", time)
    return found.withField(BAD, why) if forms else found


def _parse_pattern(text: Column, pattern: str, kind: DataType) -> Column:
    """Return the time in a string that matches a pattern, or null if the string does not match.

    The string is read with Spark's JSON reader, because it has an option for the time zone. Other
    functions would use the time zone of the session.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructField, StructType, TimestampType

    options = {"timestampFormat": pattern, "timeZone": "UTC"}
    one = StructType([StructField("at", TimestampType())])
    time = f.from_json(f.to_json(f.struct(text.alias("at"))), one, options).getField("at")
    if kind.typeName() == "date":
        return f.date_from_unix_date(_day(time, TimestampType()))
    return time


def _parse_unit(number: Column, factor: int) -> Column:
    """Return the time for a number whose unit is `factor` microseconds.

    A number that is out of range becomes a time beyond the calendar, so that it is rejected later.
    """
    from pyspark.sql import functions as f

    limit = BEYOND_US // factor
    us = number.try_cast("decimal(27,9)") * f.lit(factor).cast("decimal(7,0)")
    beyond = f.signum(number.cast("double")).cast("bigint") * f.lit(BEYOND_US)
    return f.timestamp_micros(f.when(f.abs(number) < limit, us.cast("bigint")).otherwise(beyond))


def _day(value: Column, kind: DataType) -> Column:
    """Return the day (UTC) of a value as a number. The time zone of the session has no effect."""
    from pyspark.sql import functions as f

    if kind.typeName() == "date":
        return f.unix_date(value)
    # Times before the first valid day are replaced by one day before it, which is rejected as well.
    # Otherwise, the subtraction would overflow for times near the smallest bigint.
    us, floor = f.unix_micros(value), f.lit((FIRST_DAY - 1) * DAY_US)
    us = f.when(us < floor, floor).otherwise(us)
    return ((us - f.pmod(us, f.lit(DAY_US))) / DAY_US).cast("int")


class PlainWriter:
    """Writes the rows of a DataFrame to files of a table without partition columns."""

    def __init__(self, folder: Location, schema: pa.Schema) -> None:
        """Prepare to write files. `schema` contains the columns of the DataFrame."""
        self._schema = schema
        self._files = DateWriter(folder, "", schema, bounded=bounded_with_nan(schema))

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows to the files."""
        self._files.write("", _to_batch(self._schema, batch.columns))

    def finish(self) -> pa.RecordBatch:
        """Close the files, and return a row for each file."""
        return _listing((self._files.finish(), FIT))

    def discard(self) -> None:
        """Remove the written files."""
        self._files.discard()


class CheckingWriter:
    """Checks rows, and writes them to files of the parsed table or of the quarantine.

    Undecided rows are written to separate files, which are like those of the quarantine but have no
    reasons. These files are never committed.
    """

    def __init__(
        self,
        parsed: tuple[Location, pa.Schema],
        quarantine: tuple[Location, pa.Schema],
        check: Callable[[pa.RecordBatch], CheckedRows],
        extra: Sequence[str] = (),
        read: Reader = json_texts,
    ) -> None:
        """Prepare to write files.

        Each table is given as its directory and the schema of its files, in which the partition
        column is left out. `extra` contains the names of the columns that the configuration adds to
        the parsed table, as in `derived.extra_columns`.
        """
        self._extra, self._read = extra, read
        self._good = _DateFiles(DateWriter(parsed[0], OWN[0], parsed[1]))
        self._bad, self._undecided = (
            _DateFiles(DateWriter(quarantine[0], "date", quarantine[1])) for _ in range(2)
        )
        self._schemas = parsed[1], quarantine[1]
        self._check = check
        self._case_variants: dict[str, str] = {}  # column -> name that differs only in case

    def write(self, batch: pa.RecordBatch) -> None:
        """Check rows, and add them to the files of the right table."""
        import pyarrow as pa

        rows, reasons, undecided, case_variants = self._check(batch)
        self._case_variants |= {column: name for name, column in case_variants}
        if undecided:
            rest = rows.take(pa.array(undecided, pa.int64()))
            self._undecided.add(rest["date"], self._unfit_batch(rest, [None] * len(undecided)))
            others = sorted(set(range(len(rows))).difference(undecided))
            decided = pa.array(others, pa.int64())
            rows, reasons = rows.take(decided), reasons.take(decided)
        if reasons.null_count == len(rows):
            good = rows
        else:
            good, bad = rows.filter(reasons.is_null()), rows.filter(reasons.is_valid())
            self._bad.add(bad["date"], self._unfit_batch(bad, _shorten(reasons.drop_null())))
        self._good.add(good["event_date"], self._fit(good))

    def _fit(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa

        row, schema = rows["row"], self._schemas[0]
        has = {field.name for field in row.type}
        own = dict(zip(OWN[1:], (rows["partition"], rows["id"], rows["timestamp"]), strict=True))
        if KEY in self._extra:
            own[KEY] = rows["key"]
        if HEADERS in self._extra:
            own[HEADERS] = rows["headers"]
        if RESCUED in self._extra:
            values = self._read(rows["value"].to_pylist()).texts
            found = [each and rescue_fields(each, has) for each in values]
            own[RESCUED] = pa.array(found, pa.string())
        # A column that was removed from the schema remains in the table and is filled with nulls.
        return _to_batch(
            schema,
            [
                own[each.name]
                if each.name in own
                else row.field(each.name)
                if each.name in has
                else pa.nulls(len(row), each.type)
                for each in schema
            ],
        )

    def _unfit_batch(self, rows: pa.RecordBatch, reasons: Any) -> pa.RecordBatch:
        import pyarrow as pa

        own = {"reason": pa.array(reasons, pa.string())}
        schema = self._schemas[1]
        return _to_batch(
            schema, [own[name] if name in own else rows[name] for name in schema.names]
        )

    def finish(self) -> pa.RecordBatch:
        """Close the files.

        Return a row for each file, and for each name that differs only in case.
        """
        writers = {FIT: self._good, UNFIT: self._bad, UNDECIDED: self._undecided}
        none = (0, 0)
        case_variants = self._case_variants.items()
        names = [WrittenFile(name, column, 0, 0, 0, none, none) for column, name in case_variants]
        files = ((writer.finish(), what) for what, writer in writers.items())
        return _listing(*files, (names, ALIKE))

    def discard(self) -> None:
        """Remove the written files."""
        for writer in (self._good, self._bad, self._undecided):
            writer.discard()


class _DateFiles:
    """Writes rows to one file for each date, if they arrive in the order of their dates.

    Rows that arrive out of order are buffered, up to LATE_BYTES, and then written date by date.
    """

    def __init__(self, files: DateWriter) -> None:
        self._files = files
        self._held: list[tuple[pa.Array, pa.RecordBatch]] = []
        self._bytes = 0

    def add(self, dates: pa.Array, rows: pa.RecordBatch) -> None:
        """Add rows. `dates` contains the date of each row."""
        if not len(rows):
            return
        date = str(dates[0].as_py())
        if not self._held and self._files.date in ("", date) and len(dates.unique()) == 1:
            self._files.write(date, rows)
            return
        self._held.append((dates, rows))
        self._bytes += rows.nbytes
        if self._bytes >= LATE_BYTES:
            self._write_held()

    def _write_held(self) -> None:
        from pyarrow import compute

        held, self._held, self._bytes = self._held, [], 0
        every = {date for dates, _ in held for date in dates.unique().to_pylist()}
        # Rows for the date of the open file are written first, so that no second file is needed for
        # it.
        for date in sorted(every, key=lambda each: (str(each) != self._files.date, each)):
            for dates, rows in held:
                of_date = compute.equal(dates, date)
                if of_date.true_count:
                    some = rows if of_date.true_count == len(rows) else rows.filter(of_date)
                    self._files.write(str(date), some)

    def finish(self) -> list[WrittenFile]:
        """Close the files, and return a description of each."""
        self._write_held()
        return self._files.finish()

    def discard(self) -> None:
        """Remove the written files."""
        self._files.discard()


class FittedFiles(NamedTuple):
    """The new files of the parsed table and the quarantine, and the files with undecided rows.

    Each pair in `case_variants` is a name in payloads and the column from which it differs only in
    case.
    """

    fit: list[WrittenFile]
    unfit: list[WrittenFile]
    undecided: list[WrittenFile]
    case_variants: set[tuple[str, str]]


def write_frame(frame: DataFrame, begin: Callable[[], PlainWriter | CheckingWriter]) -> FittedFiles:
    """Write a DataFrame to files in Spark's tasks, and return the files.

    A table function is used because it needs only pyarrow, whereas `mapInArrow` also needs pandas.
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
    files = FittedFiles([], [], [], set())
    lists = {FIT: files.fit, UNFIT: files.unfit, UNDECIDED: files.undecided}
    for row in function(frame.asTable()).collect():
        if row["rows_are"] == ALIKE:
            files.case_variants.add((row["path"], row["date"]))
            continue
        none = (0, 0)
        whole = (row["path"], row["date"], 0, row["rows"], row["size"], none, none)
        file = WrittenFile(*whole, row["bounds"])
        lists[row["rows_are"]].append(file)
    return files


def _listing(*written: tuple[Sequence[WrittenFile], str]) -> pa.RecordBatch:
    import pyarrow as pa

    rows = [(*file[:2], *file[3:5], file.bounds, what) for files, what in written for file in files]
    kinds = (pa.string(), pa.string(), pa.int64(), pa.int64(), pa.string(), pa.string())
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(kinds)]
    names = ["path", "date", "rows", "size", "bounds", "rows_are"]
    return pa.RecordBatch.from_arrays(columns, names)


def _to_batch(schema: pa.Schema, arrays: Sequence[pa.Array]) -> pa.RecordBatch:
    """Return a batch with exactly the types of a file, because Spark may use another time zone."""
    import pyarrow as pa

    cast = [
        each if each.type == field.type else each.cast(field.type)
        for each, field in zip(arrays, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def _shorten(reasons: pa.Array) -> pa.Array:
    from pyarrow import compute

    return compute.utf8_slice_codeunits(reasons, 0, REASON_MAX)
