"""Query a topic for a report: its entries, its dead letters, and the fields of its payloads.

The entries are read once, and a copy with a few columns is kept for all queries. Only the query for
the fields of payloads reads them again.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import AtomicType, DataType

from streamqd import config
from streamqd.policy import fingerprint as fingerprints
from streamqd.spark.pipelines import fitting
from streamqd.spark.pipelines.packed import reader
from streamqd.spark.pipelines.schemas import read_schema
from streamqd.spark.pipelines.storage import Archive

ROWS_MAX = 10_000  # maximum rows in one result
VALUES_MAX = 5  # maximum number of frequent values that are listed for each field
TEXT_MAX = 300  # maximum characters of a text that a report keeps
_BARS = 60  # maximum number of bars in the timeline
_SECONDS = (1, 5, 15, 60, 300, 900, 3_600, 10_800, 43_200, 86_400, 604_800, 2_419_200)

_PARTITIONS = """
    SELECT partition, count(*) AS entries, sum(size) AS bytes,
           min(ms) AS first_unix_ms, max(ms) AS last_unix_ms
    FROM {entries} GROUP BY partition ORDER BY partition"""
_KEYS = """
    SELECT left(key, 300) AS key, crc32(key) AS crc32, count(*) AS entries,
           count(*) OVER () AS keys
    FROM {entries} AS e WHERE key IS NOT NULL
    GROUP BY e.key ORDER BY entries DESC, crc32 LIMIT 50"""
_CAUSES = """
    SELECT `group`, fingerprint, count(*) AS dead_letters,
           min(ms) AS first_unix_ms, max(ms) AS last_unix_ms,
           percentile_approx(took_ms, 0.5) FILTER (WHERE took_ms >= 0) AS p50_ms,
           percentile_approx(took_ms, 0.99) FILTER (WHERE took_ms >= 0) AS p99_ms,
           max_by(newest, ms) AS newest
    FROM {dead_letters} GROUP BY `group`, fingerprint
    ORDER BY dead_letters DESC, last_unix_ms DESC"""
_TIMELINE = """
    SELECT ms - pmod(ms, {width}) AS at_unix_ms, count_if(NOT dead) AS entries,
           count_if(dead) AS dead_letters
    FROM (SELECT ms, false AS dead FROM {entries}
          UNION ALL SELECT ms, true AS dead FROM {dead_letters})
    GROUP BY at_unix_ms ORDER BY at_unix_ms"""


@dataclass(frozen=True)
class ReportScope:
    """The scope of a report: its topics, its time window, and schemas to examine payloads with.

    The window selects entries by their times. Its start is inclusive, and its end is exclusive.
    """

    topics: tuple[str, ...] = ()
    archive: Archive | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)

    def in_window(self, frame: DataFrame, column: str = "timestamp") -> DataFrame:
        """Return the rows whose time in this column is in the window."""
        if self.since is not None:
            frame = frame.where(f.col(column) >= f.lit(self.since))
        if self.until is not None:
            frame = frame.where(f.col(column) < f.lit(self.until))
        return frame


def figures(rows: DataFrame, dead_letters: DataFrame, pipeline: config.Pipeline) -> dict[str, Any]:
    """Return the contents of a topic, which are the results of the queries above.

    If the pipeline has a schema, `fields` describes the fields of payloads, and otherwise it is
    None. `width_ms` is the width of each bucket in the timeline. Raises InvalidRequestError if the
    schema is invalid.
    """
    with (
        persist_frame(_entries(rows)) as entries,
        persist_frame(_dead_letters(dead_letters)) as dead,
    ):

        def ask(query: str, **more: Any) -> list[dict[str, Any]]:
            found = rows.sparkSession.sql(query, entries=entries, dead_letters=dead, **more)
            answer: list[dict[str, Any]] = found.limit(ROWS_MAX).toArrow().to_pylist()
            return answer

        partitions, keys, causes = ask(_PARTITIONS), ask(_KEYS), ask(_CAUSES)
        for each in keys:
            each["key"] = each["key"].decode("utf-8", "backslashreplace")
        width = bar_width([*partitions, *causes])
        return {
            "partitions": partitions,
            "keys": keys,
            "causes": [{**each.pop("newest"), **each} for each in causes],
            "width_ms": width,
            "timeline": ask(_TIMELINE, width=width),
            "fields": _fields(rows, pipeline) if pipeline.schema else None,
        }


@contextlib.contextmanager
def persist_frame(frame: DataFrame) -> Iterator[DataFrame]:
    """Keep a DataFrame in memory or on disk during a block, so that Spark computes it only once."""
    cached = frame.persist()
    try:
        yield cached
    finally:
        cached.unpersist()


def _entries(rows: DataFrame) -> DataFrame:
    """Select the columns of entries that the queries use.

    partition, key   as in the table
    size             size of the payload in bytes
    ms               time of the ID, Unix ms
    """
    return rows.selectExpr("partition", "key", "coalesce(length(value), 0) AS size", "id_ms AS ms")


def _dead_letters(dead_letters: DataFrame) -> DataFrame:
    """Select the columns of dead letters that the queries use.

    group         group that dead-lettered the message, '' if unknown
    fingerprint   fingerprint of the cause
    ms            time of the dead letter's ID, Unix ms
    took_ms       ms from the first write of the message to the dead letter
    newest        struct of the ID, the place of the failure and the recorded texts
    """
    cause = f.udf(_cause, "fingerprint string, place string", useArrow=False)
    texts = ("error_class", "error_message", "reason", "handler")
    said = (f"left(coalesce({each}, ''), {TEXT_MAX}) AS {each}" for each in texts)
    return dead_letters.withColumn(
        "cause",
        cause("fingerprint", "error_class", "signal", "reason", "traceback", "handler"),
    ).selectExpr(
        "coalesce(`group`, '') AS `group`",
        "cause.fingerprint",
        "id_ms AS ms",
        "id_ms - unix_millis(original_timestamp) AS took_ms",
        f"struct(concat(partition, ':', id) AS id, cause.place, {', '.join(said)}) AS newest",
    )


def _cause(*told: str | None) -> tuple[str, str]:
    """Return a dead letter's fingerprint, and the stack frame in which the handler failed.

    If no fingerprint was recorded, it is computed from the other fields.
    """
    names = ("fingerprint", "errorClass", "signal", "reason", "traceback", "handler")
    fields = {
        name.encode(): text.encode("utf-8", "replace")
        for name, text in zip(names, told, strict=True)
        if text is not None
    }
    return fingerprints.dead_letter_fingerprint(fields), fingerprints.innermost_user_frame(
        told[4] or ""
    )


def bar_width(rows: list[dict[str, Any]]) -> int:
    """Return the width of a bucket (ms) with which all times in the rows fit into the chart."""
    first = min((row["first_unix_ms"] for row in rows), default=0)
    span = max((row["last_unix_ms"] for row in rows), default=0) - first
    fitting = (1000 * each for each in _SECONDS if span < 1000 * each * _BARS)
    return next(fitting, span // _BARS + 1)


# --- fields of payloads ---------------------------------------------------------------------------


def _fields(rows: DataFrame, pipeline: config.Pipeline) -> dict[str, Any]:
    """Count the payloads that match the schema (`fits`) or do not (`bad`), and describe its fields.

    In the result, `rows` contains a row for each field, with its name, its type, the counts of
    values and nulls, the approximate number of distinct values, and the least and the greatest
    value. `top` contains the most frequent values (`item`), with their approximate counts
    (`count`). Raises InvalidRequestError if the schema is invalid.
    """
    kind = read_schema(pipeline.schema or "", pipeline.times)
    every = f.array(*(_field(each.name, each.dataType) for each in kind.fields))
    counted = fitting.convert_rows(rows, kind, reader(pipeline.codec, kind)).agg(
        f.count_if(~f.col("wrong")).alias("fits"),
        f.count_if("wrong").alias("bad"),
        every.alias("rows"),
    )
    (found,) = counted.toArrow().to_pylist()
    for each in found["rows"]:
        known = (top for top in each["top"] if top["item"] is not None)
        each["top"] = sorted(known, key=lambda top: (-top["count"], top["item"]))[:VALUES_MAX]
    return dict(found)


def _field(name: str, kind: DataType) -> Column:
    def short(column: Column) -> Column:
        return f.left(column.cast("string"), f.lit(TEXT_MAX))

    value = f.when(~f.col("wrong"), f.col("row").getField(name))
    about = f.approx_count_distinct(value.cast("string"), 0.01)
    ordered = value if isinstance(kind, AtomicType) else f.lit(None)
    return f.struct(
        f.lit(name).alias("name"),
        f.lit(kind.simpleString()[:TEXT_MAX]).alias("type"),
        f.count(value).alias("count"),
        (f.count_if(~f.col("wrong")) - f.count(value)).alias("nulls"),
        f.least(f.count(value), about).alias("distinct"),
        short(f.min(ordered)).alias("least"),
        short(f.max(ordered)).alias("greatest"),
        f.call_function("approx_top_k", short(value), f.lit(VALUES_MAX + 1)).alias("top"),
    )


# --- the quarantine -------------------------------------------------------------------------------


def reasons(rows: DataFrame) -> list[dict[str, Any]]:
    """Return the reasons in a quarantine, with their numbers of rows and newest entries' times."""
    grouped = rows.groupBy(f.left("reason", f.lit(TEXT_MAX)).alias("reason")).agg(
        f.count("*").alias("rows"), f.unix_millis(f.max("timestamp")).alias("last_unix_ms")
    )
    found = grouped.orderBy(f.desc("rows"), "reason").limit(ROWS_MAX).toArrow().to_pylist()
    return list(found)
