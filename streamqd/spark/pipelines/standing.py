"""A standing query: SQL over topics as streams. Its rows are shown as they come, or sent on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamqd import config
from streamqd.errors import Refused
from streamqd.spark.pipelines import checkpoints, tables
from streamqd.spark.pipelines.archive import PipelineError, sentence
from streamqd.spark.pipelines.run import Job, wait

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

NAME = "sql"  # of the query; its checkpoint is the folder of that name
SHOWN_MAX = 20_000  # entries of one batch whose rows are shown: all of them are held at once
INTERVAL = "1 second"  # between two batches, for whom it goes on

Show = Callable[[list[str], list[dict[str, Any]]], None]


@dataclass(frozen=True)
class Standing:
    """What is asked, and how."""

    query: str
    mode: str = "append"  # append | update: the rows of an aggregation, each time they change
    start: str = "earliest"  # earliest | latest, without a checkpoint
    follow: bool = False  # go on for new entries
    target: str = ""  # topic
    partitions: int = 0  # of the target, to create it


@dataclass
class Stood:
    """What a standing query did."""

    batches: int = 0
    entries: int = 0  # that it took in


def run(
    spark: SparkSession,
    settings: config.Settings,
    standing: Standing,
    show: Show,
    checkpoint: Path | None = None,
) -> Stood:
    """Ask until all that is there now is done; with `follow` until interrupted.

    Each batch of rows is given to `show`, unless they go into a topic. Raises Refused for a query
    that cannot be, PipelineError for what stops it.
    """
    if standing.target and checkpoint is None:
        raise Refused(f"sending into {standing.target} needs a folder for the checkpoint")
    if checkpoint is None:
        return _run(spark, settings, standing, show, None)
    with checkpoints.hold(settings, checkpoint):
        fixed = ("query", "mode", "target")
        checkpoints.bind(checkpoint, {name: str(asdict(standing)[name]) for name in fixed})
        return _run(spark, settings, standing, show, checkpoint.absolute())


def _run(
    spark: SparkSession,
    settings: config.Settings,
    standing: Standing,
    show: Show,
    checkpoint: Path | None,
) -> Stood:
    from pyspark.errors import AnalysisException, ParseException, StreamingQueryException

    failures: list[Exception] = []

    def shown(batch: DataFrame, _: int) -> None:
        try:
            rows = [row.asDict(recursive=True) for row in batch.collect()]
            if rows:
                show(batch.columns, rows)
        except Exception as error:
            failures.append(error)  # Spark carries texts only
            raise

    try:
        frame = _asked(spark, settings, standing)
        if standing.target:
            assert checkpoint is not None
            writer = _sender(Job(spark, settings, checkpoint), frame, standing)
        else:
            writer = frame.writeStream.foreachBatch(shown).outputMode(standing.mode).queryName(NAME)
            if checkpoint is not None:
                writer = writer.option("checkpointLocation", str(checkpoint / NAME))
        query = _begun(writer, follow=standing.follow)
    except (AnalysisException, ParseException) as error:
        raise Refused(_hinted(sentence(error), standing)) from error
    done = Stood()
    try:
        wait([query])
    except StreamingQueryException as error:
        raise (failures[0] if failures else PipelineError(sentence(error))) from error
    finally:
        _count(query, done)
        query.stop()
    return done


def _asked(spark: SparkSession, settings: config.Settings, standing: Standing) -> DataFrame:
    options = {"startingOffsets": standing.start}
    if not standing.target:
        options["maxOffsetsPerTrigger"] = str(SHOWN_MAX)
    tables.make_views(spark, settings, None, standing.query, stream=options)
    frame = spark.sql(standing.query)
    if not frame.isStreaming:
        raise Refused("the query names no topic: a topic is the table topic_NAME")
    if standing.target:
        needed = {"value", *(("key",) if standing.mode == "update" else ())}
        if missing := sorted(needed - set(frame.columns)):
            raise Refused(
                f"sending into a topic needs a column {missing[0]}: a message is key and value"
            )
    return frame


def _sender(job: Job, frame: DataFrame, standing: Standing) -> DataStreamWriter:
    send = job.changes if standing.mode == "update" else job.sink
    more = {"partitions": str(standing.partitions)} if standing.partitions else {}
    return send(frame.drop("topic", "partition"), standing.target, NAME, **more)


def _begun(writer: DataStreamWriter, *, follow: bool) -> StreamingQuery:
    if follow:
        return writer.trigger(processingTime=INTERVAL).start()
    return writer.trigger(availableNow=True).start()


def _hinted(text: str, standing: Standing) -> str:
    if standing.mode == "append" and "STREAMING_OUTPUT_MODE" in text:
        return f"{text} Here: --mode update shows each row of an aggregation whenever it changes"
    return text


def _count(query: StreamingQuery, done: Stood) -> None:
    """Spark remembers its last hundred batches."""
    for each in query.recentProgress:
        done.batches += 1
        done.entries += each["numInputRows"]
