"""Query the history for a report: handled messages, failures and run times of each topic.

The queries read the view `messages`, which counts figures that are in both the archive and Redis
only once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from streamqd import config
from streamqd.spark.pipelines import overviews
from streamqd.spark.pipelines.report_queries import ROWS_MAX, ReportScope, bar_width, persist_frame

MINUTE_MS = 60_000

_SPAN = """
    SELECT unix_millis(min(minute)) AS first_unix_ms, unix_millis(max(minute)) AS last_unix_ms
    FROM {minutes}"""
_GROUPS = """
    SELECT topic, `group`, max_by(handler, minute) FILTER (WHERE handler IS NOT NULL) AS handler,
           sum(handled) AS handled, sum(failed) AS failed, sum(retried) AS retried,
           sum(dead_lettered) AS dead_lettered
    FROM {minutes} GROUP BY topic, `group` ORDER BY handled DESC, topic, `group`"""
_LAGS = """
    WITH single AS (
      SELECT topic, `group`, minute, instance, partition, max(lag) AS lag
      FROM {minutes} GROUP BY ALL
    ), whole AS (SELECT topic, `group`, minute, sum(lag) AS lag FROM single GROUP BY ALL)
    SELECT topic, `group`, max(lag) AS most FROM whole GROUP BY topic, `group`"""
_TIMES = """
    SELECT topic, `group`, percentile(seconds, array(0.5D, 0.95D, 0.99D), runs) AS times
    FROM {minutes} LATERAL VIEW explode(handling) AS seconds, runs
    GROUP BY topic, `group`"""
_TIMELINE = """
    SELECT topic, unix_millis(minute) - pmod(unix_millis(minute), {width}) AS at_unix_ms,
           sum(handled) AS handled, sum(failed) AS failed
    FROM {minutes} GROUP BY topic, at_unix_ms ORDER BY topic, at_unix_ms"""
_SLOWEST = """
    SELECT topic, unix_millis(minute) - pmod(unix_millis(minute), {width}) AS at_unix_ms,
           percentile(seconds, 0.99D, runs) AS p99_seconds
    FROM {minutes} LATERAL VIEW explode(handling) AS seconds, runs
    GROUP BY topic, at_unix_ms"""


def histories(
    spark: SparkSession, settings: config.Settings, scope: ReportScope
) -> dict[str, dict[str, Any]]:
    """Return the history of each topic that has one, within the window of the report.

    For each group, `groups` contains the sums of its counts, its largest lag in any minute, and
    quantiles of its run times in seconds. For each bucket of `width_ms`, `timeline` contains the
    sums of the counts and the 99th percentile of run times.
    """
    minutes = overviews.messages(spark, settings, scope.archive)
    with persist_frame(scope.in_window(minutes, "minute")) as found:
        return _histories(spark, found)


def _histories(spark: SparkSession, minutes: DataFrame) -> dict[str, dict[str, Any]]:
    def ask(query: str, **more: Any) -> list[dict[str, Any]]:
        answer = spark.sql(query, minutes=minutes, **more).limit(ROWS_MAX)
        rows: list[dict[str, Any]] = answer.toArrow().to_pylist()
        return rows

    span = ask(_SPAN)
    if span[0]["first_unix_ms"] is None:
        return {}
    width = max(MINUTE_MS, bar_width(span))
    lags = {(each["topic"], each["group"]): each["most"] for each in ask(_LAGS)}
    times = {(each["topic"], each["group"]): each["times"] for each in ask(_TIMES)}
    slowest = {(e["topic"], e["at_unix_ms"]): e["p99_seconds"] for e in ask(_SLOWEST, width=width)}
    found: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"width_ms": width, "groups": [], "timeline": []}
    )
    for row in ask(_GROUPS):
        pair = row["topic"], row["group"]
        p50, p95, p99 = times.get(pair) or (None, None, None)
        row |= {"most_lag": lags.get(pair), "p50_seconds": p50, "p95_seconds": p95}
        found[row.pop("topic")]["groups"].append(row | {"p99_seconds": p99})
    for row in ask(_TIMELINE, width=width):
        topic = row.pop("topic")
        row["p99_seconds"] = slowest.get((topic, row["at_unix_ms"]))
        found[topic]["timeline"].append(row)
    return dict(found)
