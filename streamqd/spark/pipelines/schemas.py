"""Parse and check the schema of a topic's payloads, and convert it to the columns of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamqd.errors import InvalidRequestError, RequestRefusedError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructField, StructType

UNITS = {"seconds": 1_000_000, "milliseconds": 1_000, "microseconds": 1}  # size in microseconds
BAD = "__does_not_fit"  # column into which Spark writes a payload that does not fit the schema
_FORM = "streamqd.form"  # metadata key of the unit or the pattern of a column's times
_NAME = re.compile(r"\w[\w-]{0,254}")
_TIMES = ("date", "timestamp")
_SIMPLE = (
    *("boolean", "smallint", "int", "bigint", "float", "double"),
    *("decimal", "string", "binary", "date", "timestamp"),
)
_OTHERWISE = {"short", "integer", "long"}  # PySpark's other names for some of these types
_OF_QUERIES = "byte"  # allowed in rows of a query, but not in payloads


def type_mismatch(field: StructField) -> str:
    """Return the reason to reject a value whose type is not the type of its column."""
    return f"{field.name} is not {field.dataType.simpleString()[:200]}"


def out_of_range(field: StructField) -> str:
    """Return the reason to reject a value that is out of range, or contains such a value.

    JSON has no form for such a value, or readers of the table cannot represent it.
    """
    if field.dataType.typeName() in _TIMES:
        return f"{field.name} is outside the years 1 to 9999"
    return f"{field.name} has a value out of range"


def misaligns_columns(kind: DataType) -> bool:
    """Return True if an invalid value of this type can make Spark misread the columns after it.

    This applies to maps and binary columns. Spark stops reading in the middle of an invalid map, or
    of a string that is not base64.
    """
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

    if isinstance(kind, StructType):
        return any(misaligns_columns(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return misaligns_columns(kind.elementType)
    return isinstance(kind, MapType | BinaryType)


def read_schema(schema: str, times: Sequence[str] = ()) -> StructType:
    """Parse the schema of JSON payloads, such as `id long, amount decimal(10,2)`.

    Each string in `times` consists of a column's name and the unit or the pattern of its times.
    Raises InvalidRequestError if the schema is not valid, and RequestRefusedError for a type that
    Spark does not read correctly.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        kind: Any = StructType.fromDDL(schema)
    except (PySparkException, Py4JError):  # Py4JError is raised for `timestamp(3)`
        kind = None
    names = kind.names if isinstance(kind, StructType) else []
    if not names or len(set(names)) != len(names) or BAD in {each.lower() for each in names}:
        raise InvalidRequestError(
            f"the schema {schema!r} is not valid; write unique names with their types, such as"
            " `id long, amount decimal(10,2)`"
        )
    for each in kind.fields:
        _check_json(each.dataType, each.name)
    forms = dict(each.split(maxsplit=1) for each in times)
    unknown = forms.keys() - {
        each.name for each in kind.fields if each.dataType.typeName() in _TIMES
    }
    if unknown:
        raise RequestRefusedError(
            f"times has the column {min(unknown)}, which is not a timestamp or date of the schema;"
            " remove it from times, or add the column"
        )
    for each in kind.fields:
        if each.name in forms:
            each.metadata = {**(each.metadata or {}), _FORM: forms[each.name].strip()}
    _check_forms(kind)
    return kind  # type: ignore[no-any-return]


def time_format(field: StructField) -> str:
    """Return the unit or the pattern of a column's times, or "" for the default formats."""
    return str((field.metadata or {}).get(_FORM, ""))


def _check_forms(kind: StructType) -> None:
    """Raise RequestRefusedError for a date with a unit, or a pattern that Spark cannot parse."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    for each in kind.fields:
        form = time_format(each)
        if form in UNITS and each.dataType.typeName() == "date":
            raise RequestRefusedError(
                f"times has {form} for {each.name}, which is a date; use a timestamp, or a pattern"
            )
        if not form or form in UNITS:
            continue
        spark = SparkSession.active()
        text = f.date_format(f.lit("2001-02-03T04:05:06Z").cast("timestamp"), form)
        try:
            spark.range(1).select(f.try_to_timestamp(text, f.lit(form))).collect()
        except PySparkException as error:
            raise RequestRefusedError(
                f"times has {form!r} for {each.name}, which is not a pattern of Spark; use seconds,"
                " milliseconds, microseconds, or a pattern such as dd/MM/yyyy HH:mm:ss"
            ) from error


def _check_json(kind: DataType, path: str) -> None:
    """Raise RequestRefusedError for a type that Spark's JSON reader accepts but misreads."""
    from pyspark.sql.types import ArrayType, ByteType, MapType, StringType, StructType

    if isinstance(kind, ByteType):
        raise RequestRefusedError(
            f"the column {path} is a tinyint, which turns 200 into -56; use smallint"
        )
    if isinstance(kind, StructType):
        for each in kind.fields:
            within = f"{path}.{each.name[:100]}"
            if not each.nullable:
                raise RequestRefusedError(
                    f"{within} is NOT NULL, which only a top-level column can be"
                )
            _check_json(each.dataType, within)
    elif isinstance(kind, ArrayType):
        _check_json(kind.elementType, f"{path}.element")
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise RequestRefusedError(
                f"the map {path} has keys of {kind.keyType.simpleString()[:100]}, but JSON has"
                " only string keys; use map<string, …>"
            )
        _check_json(kind.valueType, f"{path}.value")


def table_columns(kind: StructType) -> pa.Schema:
    """Return the columns of a Delta table for this schema. All of them are nullable.

    Raises RequestRefusedError for columns that are not supported, or if two names differ only in
    case, because Spark treats these as duplicates.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    _check(kind, "")
    nullable: Any = kind._as_nullable()  # noqa: SLF001 - there is no public name
    columns = to_arrow_schema(nullable, timezone="UTC")
    return pa.schema([_with_comment(column, kind[column.name]) for column in columns])


def _with_comment(column: pa.Field, field: StructField) -> pa.Field:
    """Return a column with only its comment as metadata, in the form that Delta uses."""
    comment = (field.metadata or {}).get("comment")
    return column.with_metadata({"comment": str(comment)}) if comment else column.remove_metadata()


def _check(kind: DataType, within: str) -> None:
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        if not kind.fields:  # Parquet cannot store such a column
            raise RequestRefusedError(
                f"the column {within.rstrip('.')} is a struct without fields; name its fields, or"
                " make it a string, which has the JSON as text"
            )
        known: set[str] = set()
        for each in kind.fields:
            if not _NAME.fullmatch(each.name):
                raise RequestRefusedError(
                    f"the column {within}{each.name[:100]!r} does not have a valid name; use up"
                    " to 255 letters, digits, _ and -, without a leading -"
                )
            if each.name.lower() in known:
                raise RequestRefusedError(
                    f"the column {within}{each.name} occurs twice, because case is ignored"
                )
            known.add(each.name.lower())
            _check(each.dataType, f"{within}{each.name}.")
    elif isinstance(kind, ArrayType):
        _check(kind.elementType, f"{within}element.")
    elif isinstance(kind, MapType):
        _check(kind.keyType, f"{within}key.")
        _check(kind.valueType, f"{within}value.")
    elif kind.typeName().partition("(")[0] not in {*_SIMPLE, *_OTHERWISE, _OF_QUERIES}:
        raise RequestRefusedError(
            f"the column {within.rstrip('.')} is a {kind.simpleString()}, which tables do not"
            f" support; use {', '.join(_SIMPLE)}, array, map or struct"
        )
