"""The slow reference for the reasons why payloads do not fit: Spark converts each column alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StructField,
    StructType,
    TimestampType,
)

from streamqd.spark.pipelines import fitting
from streamqd.spark.pipelines.packed import Reader, json_texts
from streamqd.spark.pipelines.reasons import FIRST_DAY, LAST_DAY, last_day
from streamqd.spark.pipelines.schemas import BAD, out_of_range, type_mismatch

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def judge_rows(
    rows: DataFrame, kind: StructType, event_time: str, now_us: int, read: Reader = json_texts
) -> DataFrame:
    """Return the rows of a raw table, each with its `reason`."""
    rows = fitting.convert_rows(rows, kind, read)
    wrong = f.col("wrong")
    told = []
    for each in kind.fields:
        alone = fitting._from_json("text", [each]).getField(BAD).isNotNull()
        last = last_day(now_us) if each.name == event_time else None
        told.append(_why_not(each, wrong & alone, last))
    said = f.concat_ws("; ", *told)
    reason = f.when(said != "", said).when(wrong, f.lit("it does not fit the schema"))
    return rows.withColumn("reason", f.coalesce("fault", reason))


def _why_not(field: StructField, unfit: Column, last: int | None) -> Column:
    name, value = field.name, f.col("row").getField(field.name)
    why = f.when(unfit, f.lit(type_mismatch(field)))
    if not field.nullable or last is not None:
        why = why.when(value.isNull(), f.lit(f"{name} is missing"))
    outside = _outside(field.dataType)
    if outside is not None:
        why = why.when(outside(value), f.lit(out_of_range(field)))
    if last is not None:
        day = fitting._day(value, field.dataType)
        why = why.when(day < 0, f.lit(f"{name} is before 1970"))
        why = why.when(day > last, f.lit(f"{name} is in the future"))
    return why


def _outside(kind: DataType) -> Callable[[Column], Column] | None:
    if isinstance(kind, DateType | TimestampType):
        return lambda value: (
            (fitting._day(value, kind) < FIRST_DAY) | (fitting._day(value, kind) > LAST_DAY)
        )
    if isinstance(kind, FloatType | DoubleType):
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
