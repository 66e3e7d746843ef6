"""What a report asks Spark: entries and letters in a narrow form, and the counts made of them.

The input is read once and kept by Spark; every figure comes from that copy.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.policy import fingerprint as fingerprints
from streamqd.spark import read_topic, rows
from streamqd.spark.options import DLQ, of_settings
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.manifest import Manifest
from streamqd.spark.pipelines.replay import HEADER as REPLAY_HEADER
from streamqd.spark.pipelines.report_figures import PERCENTILES
from streamqd.spark.pipelines.storage import Archive

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Rows = list[dict[str, Any]]

ORIGIN_HEADER = "uid"  # what a handler gives on that sends a message to another topic
_CAUSE = "fingerprint string, place string"
ROWS_MAX = 10_000  # of one table; the rest is left out and the report says so
_ACCURACY = 10_000  # a percentile's rank is wrong by at most one in so many
_SKETCH = 14  # of a count of keys: exact to some hundreds, then wrong by about 0.7 %
_ORIGIN = r"^([^/]+)/[0-9]{1,9}/([0-9]{1,15})-[0-9]{1,20}$"


@dataclass(frozen=True)
class Window:
    """Which entries count, by the time of their id; the end is not part of it."""

    since: dt.datetime | None = None
    until: dt.datetime | None = None

    def of(self, frame: DataFrame) -> DataFrame:
        """The rows of a frame that lie in it."""
        from pyspark.sql import functions as f

        if self.since is not None:
            frame = frame.where(f.col("timestamp") >= f.lit(self.since))
        if self.until is not None:
            frame = frame.where(f.col("timestamp") < f.lit(self.until))
        return frame


# --- input ----------------------------------------------------------------------------------------


def entries(
    spark: SparkSession,
    settings: config.Settings,
    topics: Sequence[str],
    archive: Archive | None,
    known: Mapping[str, Sequence[Manifest]],
    window: Window,
    progress_key: str,
) -> DataFrame:
    """Entries, archived or in Redis, each once: what the figures need of them.

    Columns topic, partition, key, size (bytes of the payload), ms (of the id), sent_ms (of a
    scheduled send), and of what was written before how (forwarded, replayed, returned), origin
    and origin_ms. `topics` are read from Redis, `known` are the manifests of what is archived.
    """
    parts = []
    if topics:
        options = {"includeHeaders": "true", "includeFields": "true", "progressKey": progress_key}
        if any(known.get(name) for name in topics):
            starts: dict[str, dict[str, Any]] = {}
            for name in topics:
                behind = tables.starts_behind(of_settings(settings), name, known.get(name, []))
                for part, places in json.loads(behind).items():
                    starts.setdefault(part, {}).update(places)
            options["startingOffsets"] = json.dumps(starts)
        parts.append(read_topic(spark, ",".join(topics), settings=settings, **options))
    if archive is not None:
        parts.append(
            tables.cold(spark, archive, [each for held in known.values() for each in held])
        )
    frame = parts[0]
    for each in parts[1:]:
        frame = frame.unionByName(each)
    return _narrow(window.of(frame))


def _narrow(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    written = {
        "replayed": _header(REPLAY_HEADER),
        "forwarded": _header(ORIGIN_HEADER),
        "returned": f.concat_ws("/", "topic", "partition", _field("originalId")),
    }
    sound = [(how, uid.rlike(_ORIGIN), uid) for how, uid in written.items()]
    first = f.coalesce(
        *(
            f.when(fits, f.struct(f.lit(how).alias("how"), uid.alias("uid")))
            for how, fits, uid in sound
        )
    )
    return frame.select(
        *("topic", "partition", "key"),
        f.coalesce(f.length("value"), f.lit(0)).alias("size"),
        f.col("id_ms").alias("ms"),
        _field("sentAt").try_cast("bigint").alias("sent_ms"),
        first["how"].alias("how"),
        f.regexp_extract(first["uid"], _ORIGIN, 1).alias("origin"),
        f.regexp_extract(first["uid"], _ORIGIN, 2).try_cast("bigint").alias("origin_ms"),
    )


def letters(
    spark: SparkSession, settings: config.Settings, topics: Sequence[str], window: Window
) -> DataFrame:
    """The dead letters of registered topics: what the figures need of them."""
    from pyspark.sql import functions as f

    if topics:
        frame = read_topic(spark, ",".join(name + DLQ for name in topics), settings=settings)
    else:
        columns = rows.columns(dead=True, headers=False, fields=False)
        frame = spark.createDataFrame([], rows.ddl(columns))
    frame = window.of(frame)
    cause = f.udf(_cause, _CAUSE, useArrow=False)(
        *("fingerprint", "error_class", "signal", "reason", "traceback", "handler")
    )
    original = f.regexp_extract("original_id", r"^([0-9]{1,15})-[0-9]{1,20}$", 1)
    runs = f.coalesce("attempts", f.lit(0)) + f.coalesce("crashes", f.lit(0))
    return frame.select(
        f.regexp_replace("topic", DLQ + "$", "").alias("topic"),
        f.concat_ws(":", "partition", "id").alias("letter"),
        f.coalesce("group", f.lit("")).alias("group"),
        f.coalesce("handler", f.lit("")).alias("handler"),
        f.coalesce("error_class", f.lit("")).alias("error_class"),
        f.coalesce("reason", f.lit("")).alias("reason"),
        f.substring(f.coalesce("error_message", f.lit("")), 1, 300).alias("error_message"),
        cause["place"].alias("place"),
        cause["fingerprint"].alias("fingerprint"),
        f.coalesce(f.unix_millis("failed_at"), f.col("id_ms")).alias("failed_ms"),
        f.coalesce(f.unix_millis("original_timestamp"), original.try_cast("bigint")).alias(
            "original_ms"
        ),
        f.when(f.coalesce("replays", f.lit(0)) > 0, "dead after a replay")
        .when(runs > 1, "dead after retries")
        .otherwise("dead at once")
        .alias("measure"),
    )


def _cause(*told: str | None) -> tuple[str, str]:
    """The fingerprint of a letter, told or derived, and the frame where it failed."""
    names = ("fingerprint", "errorClass", "signal", "reason", "traceback", "handler")
    fields = {
        name.encode(): text.encode("utf-8", "replace")
        for name, text in zip(names, told, strict=True)
        if text is not None
    }
    return fingerprints.of_letter(fields), fingerprints.frame_of(told[4] or "")


def _field(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.try_element_at("fields", f.lit(name)).cast("string")


def _header(name: str) -> Column:
    from pyspark.sql import functions as f

    found = f.filter("headers", lambda each: each["key"] == name)
    return f.try_element_at(found, f.lit(1))["value"].cast("string")


# --- counts ---------------------------------------------------------------------------------------


def places(frame: DataFrame) -> Rows:
    """topic, partition, rows, bytes, first_ms, last_ms, keyed and keys, of those with entries.

    `keyed` rows have a key, of about `keys` different ones. A row whose partition is null is about
    the whole topic.
    """
    from pyspark.sql import functions as f

    sets = [[f.col("topic"), f.col("partition")], [f.col("topic")]]
    return _collected(
        frame.groupingSets(sets, "topic", "partition").agg(
            f.count("*").alias("rows"),
            f.sum("size").alias("bytes"),
            f.min("ms").alias("first_ms"),
            f.max("ms").alias("last_ms"),
            f.count("key").alias("keyed"),
            f.hll_sketch_estimate(f.hll_sketch_agg("key", _SKETCH)).alias("keys"),
        )
    )


def top_keys(frame: DataFrame, most: int) -> Rows:
    """topic, rank, key, rows and bytes of the keys with the most rows of each topic."""
    from pyspark.sql import Window as Over
    from pyspark.sql import functions as f

    counted = (
        frame.where(f.col("key").isNotNull())
        .groupBy("topic", "key")
        .agg(f.count("*").alias("rows"), f.sum("size").alias("bytes"))
    )
    order = Over.partitionBy("topic").orderBy(f.desc("rows"), "key")
    ranked = counted.withColumn("rank", f.row_number().over(order)).where(f.col("rank") <= most)
    return _collected(ranked.orderBy("topic", "rank"))


def throughput(frame: DataFrame, widths: Mapping[str, int]) -> Rows:
    """topic, at (start of the bucket, unix ms), rows and bytes of the buckets with entries.

    `widths` of the buckets of each topic, in ms.
    """
    from pyspark.sql import functions as f

    if not widths:
        return []
    width = f.create_map(*(f.lit(each) for pair in widths.items() for each in pair))
    at = f.col("ms") - f.col("ms") % f.try_element_at(width, "topic").cast("bigint")
    grouped = frame.groupBy("topic", at.alias("at"))
    return _collected(grouped.agg(f.count("*").alias("rows"), f.sum("size").alias("bytes")))


def latencies(frame: DataFrame, dead: DataFrame) -> Rows:
    """topic, measure, of, count, p50_ms, p90_ms, p99_ms, max_ms and skipped (negative ones)."""
    from pyspark.sql import functions as f

    def measured(source: DataFrame, measure: Column, of: Column, took: Column) -> DataFrame:
        return source.select("topic", measure.alias("measure"), of.alias("of"), took.alias("ms"))

    since = f.try_subtract("ms", "origin_ms")
    scheduled = f.try_subtract("ms", "sent_ms")
    every = (
        measured(frame, f.col("how"), f.col("origin"), since)
        .where("measure IS NOT NULL")
        .unionByName(measured(frame, f.lit("scheduled"), f.lit(""), scheduled))
        .unionByName(
            measured(
                dead, f.col("measure"), f.col("group"), f.try_subtract("failed_ms", "original_ms")
            )
        )
        .where("ms IS NOT NULL")
    )
    sound = f.when(f.col("ms") >= 0, f.col("ms"))
    ranks = f.percentile_approx(sound, list(PERCENTILES), _ACCURACY)
    found = every.groupBy("topic", "measure", "of").agg(
        f.count(sound).alias("count"),
        ranks.alias("ranks"),
        f.max(sound).alias("max_ms"),
        f.count_if(f.col("ms") < 0).alias("skipped"),
    )
    names = [f"p{round(100 * share)}_ms" for share in PERCENTILES]
    return _collected(
        found.select(
            *("topic", "measure", "of", "count"),
            *(f.col("ranks")[at].alias(name) for at, name in enumerate(names)),
            *("max_ms", "skipped"),
        ).orderBy("topic", "measure", "of")
    )


def deaths(dead: DataFrame) -> Rows:
    """The letters by cause and by hour, the most frequent first.

    topic, fingerprint, error_class, place, group, handler, at (start of the hour, unix ms),
    letters, first_ms, last_ms and of the newest letter: newest (its id), reason, error_message.
    A row whose hour is null is about a cause, one whose fingerprint is null about an hour.
    """
    from pyspark.sql import functions as f

    cause = ("topic", "fingerprint", "error_class", "place", "group", "handler")
    hour = dead.withColumn("at", f.col("failed_ms") - f.col("failed_ms") % 3_600_000)
    sets = [[f.col(name) for name in cause], [f.col("topic"), f.col("at")]]
    newest = f.max_by(f.struct("letter", "reason", "error_message"), "failed_ms")
    counts = hour.groupingSets(sets, *cause, "at").agg(
        f.count("*").alias("letters"),
        f.min("failed_ms").alias("first_ms"),
        f.max("failed_ms").alias("last_ms"),
        newest.alias("newest"),
    )
    return _collected(
        counts.select(
            *(*cause, "at", "letters", "first_ms", "last_ms"),
            f.col("newest.letter").alias("newest"),
            f.col("newest.reason").alias("reason"),
            f.col("newest.error_message").alias("error_message"),
        ).orderBy(f.desc("letters"), "topic", "fingerprint", "group", "handler", "at")
    )


def _collected(frame: DataFrame) -> Rows:
    """The rows of a small frame. One more than ROWS_MAX tells that there are more."""
    found: Rows = frame.limit(ROWS_MAX + 1).toArrow().to_pylist()
    return found
