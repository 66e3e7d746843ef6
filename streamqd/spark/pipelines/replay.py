"""Sending again what once was sent: from Redis, the archive or the dead letters, to any topic.

A replayed message is a new message. Its header `x-replay-of` says which entry it was.
"""

from __future__ import annotations

import datetime as dt
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import Refused
from streamqd.spark.options import of_settings
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.archive import first_line
from streamqd.spark.pipelines.storage import Archive

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

HEADER = "x-replay-of"
WINDOW = "30d"  # how long a named replay is remembered, message by message
_SENT = ("key", "value", "headers", "fields", "dedup")


@dataclass(frozen=True)
class ReplayFilter:
    """What is replayed. All that is given must hold; times are of the entries."""

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    keys: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    where: str = ""  # a condition in SQL over the columns
    tier: str = "all"  # all | hot | cold | dlq


@dataclass
class ReplaySummary:
    """What a replay did, or would do."""

    topic: str
    target: str
    rows: int
    size: int  # bytes of the payloads
    first: str | None
    last: str | None
    dry_run: bool
    seconds: float = 0.0


def replay(
    settings: config.Settings,
    spark: SparkSession,
    topic: str,
    choice: ReplayFilter,
    *,
    archive: Archive | None = None,
    target: str = "",
    rate: float | None = None,
    name: str = "",
    dry_run: bool = False,
) -> ReplaySummary:
    """Send the chosen messages to `target`, or to their own topic.

    `rate` in messages per second. With a `name` no message is sent twice within WINDOW, however
    often the replay of that name is repeated; without, a replay that was broken off begins anew.
    """
    began = time.monotonic()
    chosen = choose(_source(settings, spark, topic, choice, archive), choice)
    result = _measured(chosen, topic, target or topic, dry_run)
    if not dry_run and result.rows:
        ready = _prepared(chosen, topic, choice, name or secrets.token_hex(8))
        if rate is not None:
            ready = _slowed(ready.coalesce(1), rate)
        options = of_settings(settings) | {"topic": result.target}
        if name:
            options |= {"idColumn": "dedup", "dedupWindow": WINDOW}
        ready.write.format("streamq").options(**options).mode("append").save()
    result.seconds = round(time.monotonic() - began, 3)
    return result


def choose(frame: DataFrame, choice: ReplayFilter) -> DataFrame:
    """The rows that are meant. Raises Refused for a condition that Spark cannot read."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as f

    if choice.since is not None:
        frame = frame.where(f.col("timestamp") >= f.lit(choice.since))
    if choice.until is not None:
        frame = frame.where(f.col("timestamp") < f.lit(choice.until))
    if choice.keys:
        frame = frame.where(f.col("key").isin([key.encode() for key in choice.keys]))
    for name, value in choice.headers.items():
        frame = frame.where(f.array_contains("headers", _header(f.lit(name), f.lit(value))))
    if choice.where:
        try:
            frame = frame.where(choice.where)
            _ = frame.schema
        except (AnalysisException, ParseException) as error:
            raise Refused(f"the condition cannot be used: {first_line(error)}") from error
    return frame


def _source(
    settings: config.Settings,
    spark: SparkSession,
    topic: str,
    choice: ReplayFilter,
    archive: Archive | None,
) -> DataFrame:
    if choice.tier == "dlq":
        return tables.letter_table(spark, settings, topic)
    return tables.topic_table(spark, settings, topic, archive, choice.tier)


def _measured(frame: DataFrame, topic: str, target: str, dry_run: bool) -> ReplaySummary:
    from pyspark.sql import functions as f

    found = frame.agg(
        f.count("*").alias("rows"),
        f.sum(f.length("value")).alias("size"),
        f.min("timestamp").alias("first"),
        f.max("timestamp").alias("last"),
    ).collect()[0]
    return ReplaySummary(
        topic, target, found["rows"], found["size"] or 0, _iso(found["first"]),
        _iso(found["last"]), dry_run,
    )  # fmt: skip


def _prepared(frame: DataFrame, topic: str, choice: ReplayFilter, name: str) -> DataFrame:
    """The rows as the sink takes them, those of a partition in their order."""
    from pyspark.sql import functions as f

    place = ":dlq" if choice.tier == "dlq" else ""
    origin = f.concat_ws("/", f.lit(topic + place), f.col("partition").cast("string"), f.col("id"))
    others = f.filter(
        f.coalesce(f.col("headers"), f.array().cast("array<struct<key:string,value:binary>>")),
        lambda each: each["key"] != HEADER,
    )
    headers = f.concat(others, f.array(_header(f.lit(HEADER), origin)))
    # What a dead letter carries beside its message is about its death.
    fields = (
        f.col("fields") if "fields" in frame.columns else f.lit(None).cast("map<string,binary>")
    )
    return (
        frame.withColumns(
            {
                "headers": headers,
                "fields": fields,
                "dedup": f.concat_ws("/", f.lit("replay"), f.lit(name), origin),
            }
        )
        .repartition("partition")
        .sortWithinPartitions("partition", "id_ms", "id_seq")
        .select(*_SENT)
    )


def _header(name: Column, value: Column) -> Column:
    from pyspark.sql import functions as f

    return f.struct(name.alias("key"), f.encode(value, "utf-8").alias("value"))


def _slowed(frame: DataFrame, rate: float) -> DataFrame:
    """The same rows, of one task, no faster than the rate."""

    def pass_on(rows: Iterable[Row]) -> Iterable[Row]:
        began = time.monotonic()
        for number, row in enumerate(rows):
            early = number / rate - (time.monotonic() - began)
            if early > 0:
                time.sleep(early)
            yield row

    return frame.sparkSession.createDataFrame(
        frame.rdd.mapPartitions(pass_on), frame.schema, verifySchema=False
    )


def _iso(moment: dt.datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
