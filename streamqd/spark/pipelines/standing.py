"""Run standing queries: SQL over topics as streams, whose rows are printed, sent or stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.errors import (
    AnalysisException,
    ParseException,
    PySparkException,
    StreamingQueryException,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.spark.pipelines import checkpoints, results, tables
from streamqd.spark.pipelines.prompt import Fits
from streamqd.spark.pipelines.queries import cause_sentence, to_streamqd_error, wait
from streamqd.spark.pipelines.run import Job
from streamqd.spark.pipelines.statements import check
from streamqd.spark.pipelines.storage import Archive

NAME = "sql"  # name of the query and of its checkpoint directory
SHOWN_MAX = 20_000  # maximum entries per batch if rows are shown, as all are held in memory
INTERVAL = "1 second"  # interval between two batches of a query that follows its topics

Show = Callable[[list[str], list[tuple[Any, ...]]], None]


@dataclass(frozen=True)
class StandingQuery:
    """A standing query and its options."""

    query: str
    mode: str = "append"  # append | update (rows of an aggregation, each time they change)
    start: str = "earliest"  # earliest | latest, for a query without a checkpoint
    follow: bool = False  # True to continue with new entries
    target: str = ""  # topic that the rows are sent to
    partitions: int = 0  # number of partitions of the target if it must be created
    into: str = ""  # table of `archive` that the rows are stored in
    archive: Archive | None = None

    @property
    def shown(self) -> bool:
        """True if the rows are only shown to the user, and neither sent nor stored."""
        return not (self.target or self.into)


@dataclass
class StreamResult:
    """The result of a standing query."""

    batches: int
    entries: int  # number of entries that the query processed


def run(
    spark: SparkSession,
    settings: config.Settings,
    standing: StandingQuery,
    show: Show,
    checkpoint: Path | None = None,
    fits: Fits = lambda _: None,
) -> StreamResult:
    """Run the query until all entries that exist now are processed.

    If the query follows its topics, it runs until it is interrupted. Each batch of rows is passed
    to `show`, unless the rows go to a topic or a table. Before rows are shown, `fits` is called
    with the names of the columns, and may raise an error to refuse the query.

    Raises RequestRefusedError or InvalidRequestError if the query is not valid, and PipelineError
    if it fails.
    """
    check(standing.query)
    if not standing.shown and checkpoint is None:
        into = standing.target or standing.into
        raise RequestRefusedError(f"writing into {into} requires a directory for the checkpoint")
    with contextlib.ExitStack() as held:
        if checkpoint is not None:
            held.enter_context(checkpoints.lease_checkpoints(settings, checkpoint))
            target = standing.target
            if standing.archive is not None:
                held.enter_context(results.lease_results(settings, standing.archive, standing.into))
                target = f"{standing.into} in {standing.archive.id}"
            query = {"query": standing.query, "mode": standing.mode, "target": target}
            checkpoints.bind_query(checkpoint, query)
        return _run(spark, settings, standing, show, checkpoint and checkpoint.absolute(), fits)


def _run(
    spark: SparkSession,
    settings: config.Settings,
    standing: StandingQuery,
    show: Show,
    checkpoint: Path | None,
    fits: Fits,
) -> StreamResult:
    failures: list[Exception] = []

    def show_batch(batch: DataFrame, _: int) -> None:
        rows = [tuple(row) for row in batch.collect()]
        if rows:
            show(batch.columns, rows)

    try:
        frame = _query_frame(spark, settings, standing)
        if standing.target:
            assert checkpoint is not None
            writer = _sender(Job(spark, settings, checkpoint), frame, standing)
        else:
            take: Callable[[DataFrame, int], None] = show_batch
            if standing.archive is None:
                fits(frame.columns)
            else:
                assert checkpoint is not None
                own = checkpoint / NAME
                take = results.ResultWriter(standing.archive, standing.into, frame, own)
            writer = frame.writeStream.foreachBatch(_storing_errors(take, failures))
            writer = writer.outputMode(standing.mode).queryName(NAME)
            if checkpoint is not None:
                writer = writer.option("checkpointLocation", str(checkpoint / NAME))
        pace = {"processingTime": INTERVAL} if standing.follow else {"availableNow": True}
        query = writer.trigger(**pace).start()
    except (AnalysisException, ParseException) as error:
        raise RequestRefusedError(_add_hint(cause_sentence(error), standing)) from error
    try:
        wait([query])
    except StreamingQueryException as error:
        raise (failures[0] if failures else to_streamqd_error(error)) from error
    finally:
        query.stop()
    taken = [each["numInputRows"] for each in query.recentProgress]  # at most the last 100 batches
    return StreamResult(len(taken), sum(taken))


def _storing_errors(
    take: Callable[[DataFrame, int], None], failures: list[Exception]
) -> Callable[[DataFrame, int], None]:
    """Wrap a batch function so that its errors are added to `failures`.

    Spark passes on only the text of an error, so the caller needs the error itself from this list.
    """

    def taking(batch: DataFrame, number: int) -> None:
        try:
            take(batch, number)
        except PySparkException:
            raise
        except Exception as error:
            failures.append(error)
            raise

    return taking


def _query_frame(
    spark: SparkSession, settings: config.Settings, standing: StandingQuery
) -> DataFrame:
    options = {"startingOffsets": standing.start}
    if standing.shown:
        options["maxOffsetsPerTrigger"] = str(SHOWN_MAX)
    tables.make_views(spark, settings, None, standing.query, stream=options)
    frame = spark.sql(standing.query)
    if not frame.isStreaming:
        raise RequestRefusedError("the query reads no topic, which would be a table topic_NAME")
    if standing.target:
        needed = {"value", *(("key",) if standing.mode == "update" else ())}
        if missing := sorted(needed - set(frame.columns)):
            raise RequestRefusedError(
                f"the query has no column {missing[0]}, which sending to a topic requires"
            )
    return frame


def _sender(job: Job, frame: DataFrame, standing: StandingQuery) -> DataStreamWriter:
    send = job.changes if standing.mode == "update" else job.sink
    more = {"partitions": str(standing.partitions)} if standing.partitions else {}
    return send(frame.drop("topic", "partition"), standing.target, NAME, **more)


def _add_hint(text: str, standing: StandingQuery) -> str:
    if standing.mode == "append" and "STREAMING_OUTPUT_MODE" in text:
        return (
            f"{text} With streamqd, --mode update shows each row of an aggregation whenever it"
            " changes"
        )
    return text
