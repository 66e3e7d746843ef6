"""Send old messages again, from Redis, the archive or the dead letters, to any topic.

A replayed message is a new message. Its header `x-replay-of` contains the topic, the partition and
the ID of the old entry.
"""

from __future__ import annotations

import datetime as dt
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.message import REPLAY_OF
from streamqd.spark.options import WriteOptions, of_settings, write_options
from streamqd.spark.outgoing import Row, Targets, deliver, to_messages
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.queries import convert_errors, first_line
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.rows import COLUMNS, FIELDS, HEADERS, Column, arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import Row as SparkRow

WINDOW = "30d"  # lifetime of the dedup IDs of a named replay
_EVEN = 0.02  # target seconds between two writes of a replay that has a rate
_SENT = (*COLUMNS[:2], HEADERS, FIELDS, Column("dedup", "string"))


@dataclass(frozen=True)
class ReplayFilter:
    """Selects the messages to replay. A message must meet all conditions.

    `since` (inclusive) and `until` (exclusive) apply to the times of the entries.
    """

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    keys: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    where: str = ""  # SQL condition over the columns
    tier: str = "all"  # all | hot | cold | dlq


@dataclass
class ReplaySummary:
    """The result of a replay, or of its dry run."""

    topic: str
    target: str
    rows: int  # number of chosen messages
    size: int  # bytes of their payloads
    first: str | None
    last: str | None
    dry_run: bool
    sent: int = 0  # messages sent, fewer than `rows` if an earlier replay sent some
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
    """Send the chosen messages to a target topic, or by default to their own topic.

    `rate` limits the number of messages per second. If the replay has a `name` and is interrupted,
    run it again under the same name: no message is sent twice within WINDOW. Without a name, a
    second run sends all messages again.

    Raises RequestRefusedError for an invalid condition, TopicNotFoundError if a topic does not
    exist, and PipelineError if Spark fails.
    """
    began = time.monotonic()
    raw = of_settings(settings) | {"topic": target or topic}
    if name:
        raw |= {"idColumn": "dedup", "dedupWindow": WINDOW}
    options = write_options(raw, {})
    chosen = choose(_source(settings, spark, topic, choice, archive), choice)
    if name and options.topic == topic and choice.tier != "dlq":
        chosen = chosen.where(~_is_replay())
    with convert_errors():
        result = _summarize(chosen, topic, options.topic, dry_run)
    if not dry_run and result.rows:
        Targets(options).count(options.topic)
        ready = _sink_rows(chosen, topic, choice, name or secrets.token_hex(8))
        with convert_errors():
            result.sent = _send(ready, options, rate)
    result.seconds = round(time.monotonic() - began, 3)
    return result


def choose(frame: DataFrame, choice: ReplayFilter) -> DataFrame:
    """Select the rows that meet all conditions.

    Raises RequestRefusedError if Spark cannot parse the SQL condition.
    """
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
            raise RequestRefusedError(f"the condition is not valid: {first_line(error)}") from error
    return frame


def _source(
    settings: config.Settings,
    spark: SparkSession,
    topic: str,
    choice: ReplayFilter,
    archive: Archive | None,
) -> DataFrame:
    if choice.tier == "dlq":
        return tables.dead_letter_table(spark, settings, topic)
    return tables.topic_table(spark, settings, topic, archive, choice.tier)


def _summarize(frame: DataFrame, topic: str, target: str, dry_run: bool) -> ReplaySummary:
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


def _sink_rows(frame: DataFrame, topic: str, choice: ReplayFilter, name: str) -> DataFrame:
    """Convert rows to the columns that the sink expects, in order within each partition."""
    from pyspark.sql import functions as f

    place = ":dlq" if choice.tier == "dlq" else ""
    origin = f.concat_ws("/", f.lit(topic + place), f.col("partition").cast("string"), f.col("id"))
    others = f.filter(
        f.coalesce(f.col("headers"), f.array().cast("array<struct<key:string,value:binary>>")),
        lambda each: each["key"] != REPLAY_OF,
    )
    headers = f.concat(others, f.array(_header(f.lit(REPLAY_OF), origin)))
    # Only the fields of the message are kept. A dead letter has more fields, which describe its
    # failure.
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
        .select([column.name for column in _SENT])
    )


def _header(name: SparkColumn, value: SparkColumn) -> SparkColumn:
    from pyspark.sql import functions as f

    return f.struct(name.alias("key"), f.encode(value, "utf-8").alias("value"))


def _is_replay() -> SparkColumn:
    """Return a condition that is true for replayed messages.

    A named replay into the same topic uses this condition to leave out the messages that it sent
    itself.
    """
    from pyspark.sql import functions as f

    return f.coalesce(f.exists("headers", lambda each: each["key"] == REPLAY_OF), f.lit(False))


def _send(frame: DataFrame, options: WriteOptions, rate: float | None) -> int:
    """Send rows, and return the number of messages that were not already sent.

    If a rate is set, a single task sends all rows, so that the rate applies to all
    together.
    """
    from streamqd.spark.sink import append

    if rate is not None:
        frame = frame.coalesce(1)
        options = replace(options, batch_rows=min(1000, max(1, int(rate * _EVEN))))

    def send(found: Iterable[SparkRow]) -> Iterator[int]:
        sent: list[int] = []
        messages = _messages(found, options)
        deliver(
            messages if rate is None else pace(messages, rate), options, 0,
            lambda chunk: sent.append(append(options, chunk)),
        )  # fmt: skip
        yield sum(sent)

    return int(frame.rdd.mapPartitions(send).sum())


def _messages(found: Iterable[SparkRow], options: WriteOptions) -> Iterator[Row]:
    """Convert rows to the messages that the sink sends."""
    import pyarrow as pa

    schema = arrow_schema(_SENT)
    found = iter(found)
    while some := list(islice(found, 1000)):
        plain = [row.asDict(recursive=True) for row in some]
        for each in plain:
            each["fields"] = list((each["fields"] or {}).items())
        yield from to_messages(pa.RecordBatch.from_pylist(plain, schema), options)


def pace(rows: Iterable[Row], rate: float) -> Iterator[Row]:
    """Yield rows at an even rate (rows per second).

    After a delay, there is no burst to catch up.
    """
    due = time.monotonic()
    for row in rows:
        early = due - time.monotonic()
        if early > 0:
            time.sleep(early)
        yield row
        due = max(due, time.monotonic() - _EVEN) + 1 / rate


def _iso(moment: dt.datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
