"""Payloads into columns: what Spark converts, what does not fit and why, and the tasks that write.

Spark converts JSON, and is lenient: it takes the first of two documents, the last of two names,
and makes signs of bytes that are no text. It also computes for hours to round 1e500000000. So each
task reads a payload strictly before Spark sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd.spark.pipelines.derived import OWN
from streamqd.spark.pipelines.parts import DateWriter, WrittenFile
from streamqd.spark.pipelines.schemas import BAD

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

REASON_MAX = 1000  # characters
# A row is a file; `bad` ones are of the quarantine.
FILE_DDL = "path string, date string, rows bigint, size bigint, bad boolean"
_OPTIONS = {
    "columnNameOfCorruptRecord": BAD,
    "timeZone": "UTC",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
_KEPT = ("partition", "id", "timestamp", "date", "key", "value")  # of the raw table
_DAY_US = 86_400_000_000
_YEARS = (-719_162, 2_932_896)  # the first day of 0001 and the last of 9999, of 1970 on
_SECONDS_MAX = (1 << 63) // 1_000_000 - 1  # Spark multiplies more into any time at all
_DIGITS_MAX = 1000
_HUGE = 10**_DIGITS_MAX
# Of more than three digits: Spark removes commas, and knows digits of all scripts.
_EXPONENT = re.compile(r"[eE][-+,]*\d[-+,\d]{3}")


def judged(rows: DataFrame, kind: StructType, event_time: str, now_us: int) -> DataFrame:
    """Rows of a raw table, each with `row`, `event_date`, and why it does not fit, null if it does.

    The event's time must lie between 1970 and a day after `now_us`: each of its dates is a folder.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    rows, bad = converted(rows, kind), StructField(BAD, StringType())
    text, wrong = f.col("text"), f.col("wrong")
    last_day = now_us // _DAY_US + 1
    told = []
    for each in kind.fields:
        alone = f.from_json(text, StructType([each, bad]), _OPTIONS).getField(BAD).isNotNull()
        told.append(_why_not(each, wrong & alone, last_day if each.name == event_time else None))
    said = f.concat_ws("; ", *told)
    reason = f.when(said != "", said).when(wrong, f.lit("it is not of the schema"))
    reason = f.coalesce("fault", reason)
    date = f.col("date")
    if event_time:
        at = f.col("row").getField(event_time)
        date = f.date_from_unix_date(_day(at, kind[event_time].dataType))
    found = rows.withColumn("reason", reason)
    found = found.withColumn("event_date", f.when(f.col("reason").isNull(), date))
    # One file after the other: a task holds one open, however many dates there are.
    return found.select(*_KEPT, "event_date", "reason", "row").sortWithinPartitions(
        "event_date", "date"
    )


def converted(rows: DataFrame, kind: StructType) -> DataFrame:
    """Rows with a payload as `value`, each with it as columns of the schema: `row`.

    `fault` says why Spark must not even try to convert a payload; `text` is null then, else what it
    converts. `wrong` are those that are not of the schema, with a fault or without.
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


def _why_not(field: StructField, unfit: Column, last_day: int | None) -> Column:
    """Why a column is not as it must be, null when it is; `last_day` of the event's time."""
    from pyspark.sql import functions as f

    name, value = field.name, f.col("row").getField(field.name)
    why = f.when(unfit, f.lit(f"{name} is not {field.dataType.simpleString()[:200]}"))
    if not field.nullable or last_day is not None:
        why = why.when(value.isNull(), f.lit(f"{name} is missing"))
    outside = _outside(field.dataType)
    if outside is not None:
        why = why.when(outside(value), f.lit(_out_of_range(field)))
    if last_day is not None:
        day = _day(value, field.dataType)
        why = why.when(day < 0, f.lit(f"{name} is before 1970"))
        why = why.when(day > last_day, f.lit(f"{name} is in the future"))
    return why


def _out_of_range(field: StructField) -> str:
    if field.dataType.typeName() in ("date", "timestamp"):
        return f"{field.name} is not of the years 1-9999"
    return f"{field.name} has a value out of range"


def _outside(kind: DataType) -> Callable[[Column], Column] | None:
    """Whether a value, or one within it, is a time or an infinity that no JSON and no reader knows.

    None for a type that has neither.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import (
        ArrayType,
        DateType,
        DoubleType,
        FloatType,
        MapType,
        StructType,
        TimestampType,
    )

    if isinstance(kind, (DateType, TimestampType)):
        low, high = _YEARS
        return lambda value: (_day(value, kind) < low) | (_day(value, kind) > high)
    if isinstance(kind, (FloatType, DoubleType)):
        return lambda value: f.abs(value) == f.lit(float("inf"))
    if isinstance(kind, StructType):
        checks = [(each.name, check) for each in kind.fields if (check := _outside(each.dataType))]
        if not checks:
            return None
        return lambda value: reduce(or_, (check(value.getField(name)) for name, check in checks))
    if isinstance(kind, ArrayType):
        item = _outside(kind.elementType)
        return item and partial(f.exists, f=item)
    if isinstance(kind, MapType):
        item = _outside(kind.valueType)
        return item and (lambda value: f.exists(f.map_values(value), item))
    return None


def _day(value: Column, kind: DataType) -> Column:
    """The number of a value's day (UTC), whatever time zone the session has."""
    from pyspark.sql import functions as f

    if kind.typeName() == "date":
        return f.unix_date(value)
    # Below the first year any day will do; near the least bigint there is none to subtract from.
    us, floor = f.unix_micros(value), f.lit((_YEARS[0] - 1) * _DAY_US)
    us = f.when(us < floor, floor).otherwise(us)
    return ((us - f.pmod(us, f.lit(_DAY_US))) / _DAY_US).cast("int")


class Plain:
    """Writes rows of a frame into files of a table that nothing divides."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        """Begin; `schema` has the frame's columns."""
        self._schema = schema
        self._files = DateWriter(folder, "", schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self._files.write("", _as(self._schema, batch.columns))

    def finish(self) -> pa.RecordBatch:
        """Close the files; return a row for each."""
        return _told((self._files.finish(), False))

    def discard(self) -> None:
        """Remove them."""
        self._files.discard()


class Fitter:
    """Writes rows of `judged` into files of the parsed table and the quarantine."""

    def __init__(self, parsed: tuple[Path, pa.Schema], quarantine: tuple[Path, pa.Schema]) -> None:
        """Begin; each schema is that of the files, without the column that divides the table."""
        self._good = DateWriter(parsed[0], OWN[0], parsed[1])
        self._bad = DateWriter(quarantine[0], "date", quarantine[1])
        self._schemas = parsed[1], quarantine[1]

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        import pyarrow as pa

        fitting, unfitting = self._schemas
        reasons = batch["reason"]
        for date, rows in _by_date(batch.filter(reasons.is_null()), "event_date"):
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
        index = batch.schema.get_field_index("reason")
        unfit = batch.set_column(index, "reason", _short(reasons)).filter(reasons.is_valid())
        for date, rows in _by_date(unfit, "date"):
            self._bad.write(date, _as(unfitting, [rows[name] for name in unfitting.names]))

    def finish(self) -> pa.RecordBatch:
        """Close the files; return a row for each."""
        return _told((self._good.finish(), False), (self._bad.finish(), True))

    def discard(self) -> None:
        """Remove them."""
        self._good.discard()
        self._bad.discard()


def written(
    frame: DataFrame, begin: Callable[[], Plain | Fitter]
) -> tuple[list[WrittenFile], list[WrittenFile]]:
    """Have Spark's tasks write a frame; return the files of the table, and of the quarantine.

    A function of tables needs pyarrow only; `mapInArrow` would need pandas too.
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


def _told(*written: tuple[Sequence[WrittenFile], bool]) -> pa.RecordBatch:
    import pyarrow as pa

    rows = [(*file[:2], *file[3:5], bad) for files, bad in written for file in files]
    kinds = (pa.string(), pa.string(), pa.int64(), pa.int64(), pa.bool_())
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, ["path", "date", "rows", "size", "bad"])


def _by_date(rows: pa.RecordBatch, column: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    from pyarrow import compute

    for date in rows[column].unique():
        yield str(date.as_py()), rows.filter(compute.equal(rows[column], date))


def _as(schema: pa.Schema, arrays: Sequence[pa.Array]) -> pa.RecordBatch:
    """Arrays as the columns of a file: Spark names the same types otherwise, as the time zone."""
    import pyarrow as pa

    cast = [
        each if each.type == field.type else each.cast(field.type)
        for each, field in zip(arrays, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def _short(reasons: pa.Array) -> pa.Array:
    from pyarrow import compute

    return compute.utf8_slice_codeunits(reasons, 0, REASON_MAX)


# --- JSON, strictly -------------------------------------------------------------------------------


class _TwiceError(ValueError):
    """A name is there twice in one object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise _TwiceError(f"the name {ascii(name)[:100]} is there twice")
            names.add(name)
    return found


def _never(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON


# Floats stay as they are written: their exponent tells whether Spark can round them.
_decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_never, parse_float=str)

_Check = Callable[[Any], bool]
_Fields = Sequence[tuple[str, _Check]]
_Checks = Sequence[tuple[str, str, _Check]]  # of columns: name, what to say, what must not be


def faults(value: Column, kind: StructType) -> Column:
    """The `fault` of each payload, for columns of this schema; null where there is none."""
    import pyarrow as pa
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]

    checks = forbidden(kind)

    def of(payloads: pa.Array) -> pa.Array:
        return pa.array([fault(each, checks) for each in payloads.to_pylist()], pa.string())

    # Spark goes by the hints, and cannot see a module that is imported here.
    of.__annotations__ = {"payloads": pa.Array, "return": pa.Array}
    function: Any = arrow_udf(of, "string")
    found: Column = function(value)
    return found


def forbidden(kind: StructType) -> _Checks:
    """What `fault` must not find in columns of this schema."""
    from pyspark.sql.types import DecimalType, TimestampType

    found = []
    for each in kind.fields:
        if check := _somewhere(each.dataType, DecimalType, _is_huge):
            said = f"{each.name} is not {each.dataType.simpleString()[:200]}"
            found.append((each.name, said, check))
        if check := _somewhere(each.dataType, TimestampType, _is_beyond):
            found.append((each.name, _out_of_range(each), check))
    return found


def _somewhere(kind: DataType, leaf: type[DataType], check: _Check) -> _Check | None:
    """The check of a JSON value of which each value of type `leaf` is checked; None without one."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, leaf):
        return check
    if isinstance(kind, StructType):
        fields = [
            (each.name, inner)
            for each in kind.fields
            if (inner := _somewhere(each.dataType, leaf, check))
        ]
        return partial(_any_field, fields) if fields else None
    if isinstance(kind, ArrayType):
        item = _somewhere(kind.elementType, leaf, check)
        return item and partial(_any_item, item)
    if isinstance(kind, MapType):
        item = _somewhere(kind.valueType, leaf, check)
        return item and partial(_any_value, item)
    return None


def _any_field(fields: _Fields, value: Any) -> bool:
    return isinstance(value, dict) and any(check(value.get(name)) for name, check in fields)


def _any_item(check: _Check, value: Any) -> bool:
    return isinstance(value, list) and any(map(check, value))


def _any_value(check: _Check, value: Any) -> bool:
    return isinstance(value, dict) and any(map(check, value.values()))


def _is_huge(value: Any) -> bool:
    """Whether a number, or a text, has so many digits that Spark would compute for long."""
    if isinstance(value, str):
        return len(value) > _DIGITS_MAX or _EXPONENT.search(value) is not None
    return isinstance(value, int) and abs(value) >= _HUGE


def _is_beyond(value: Any) -> bool:
    """Whether Spark would make another time of a number of seconds."""
    return isinstance(value, int) and abs(value) > _SECONDS_MAX


def fault(payload: bytes | None, checks: _Checks = ()) -> str | None:
    """Why a payload is no JSON object, or has what is `forbidden`; None when it is all right."""
    if not payload:
        return "there is no payload"
    try:
        found = _decoder.decode(payload.decode())
        if b"\\ud" in payload or b"\\uD" in payload:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except UnicodeEncodeError:
        return "it has half of a character, such as \\ud800"
    except _TwiceError as error:
        return str(error)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(found, dict):
        return "it is JSON, but not an object"
    said = [why for name, why, check in checks if name in found and check(found[name])]
    return "; ".join(said) or None
