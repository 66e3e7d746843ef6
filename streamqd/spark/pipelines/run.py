"""Run a user's function as a Spark job that gets a session and access to topics."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter

from streamqd import config
from streamqd.errors import HandlerLoadError
from streamqd.paths import join_parts
from streamqd.spark import read_topic
from streamqd.spark.options import of_settings
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.queries import to_streamqd_error, wait
from streamqd.spark.pipelines.storage import Archive


@dataclass(frozen=True)
class Job:
    """The argument with which the user's function is called.

    `checkpoints` is the directory for the checkpoints of queries. `arguments` contains the
    arguments that the user passed on the command line.
    """

    spark: SparkSession
    settings: config.Settings
    checkpoints: Path
    archive: Archive | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)

    def read(self, topic: str, **options: object) -> DataFrame:
        """Return the current entries of a topic, including its archived entries.

        If you pass options of the data source, they must include `archivePath` to read archived
        entries.
        """
        if options:
            return read_topic(self.spark, topic, settings=self.settings, **options)
        return tables.topic_table(self.spark, self.settings, topic, self.archive)

    def stream(self, topic: str, **options: str) -> DataFrame:
        """Return a topic as a stream, which starts at the first entry by default.

        Set `startingOffsets` to start at another position.
        """
        given = of_settings(self.settings) | {
            "subscribe": topic,
            "startingOffsets": "earliest",
        }
        return self.spark.readStream.format("streamq").options(**(given | options)).load()

    def sink(self, frame: DataFrame, topic: str, name: str, **options: str) -> DataStreamWriter:
        """Return a writer that sends the rows of a stream to a topic, each exactly once.

        Call its `start` method to start the query. `name` is the name of the query and of its
        checkpoint directory.
        """
        given = of_settings(self.settings) | {"topic": topic} | options
        return (
            frame.writeStream.format("streamq")
            .options(**given)
            .queryName(name)
            .option("checkpointLocation", str(join_parts(self.checkpoints, name)))
        )

    def changes(self, frame: DataFrame, topic: str, name: str, **options: str) -> DataStreamWriter:
        """Return a writer that sends the changed rows of an aggregation to a topic.

        Call its `start` method to start the query. The rows need a column `key` that is unique
        within a batch. If Spark repeats a batch within a day, its rows are not sent again.
        """
        given = of_settings(self.settings) | {"topic": topic, "idColumn": "dedup"}
        given |= {"dedupWindow": "1d"} | options
        checkpoint = join_parts(self.checkpoints, name)

        def send(batch: DataFrame, number: int) -> None:
            # Without its checkpoint, a query starts at batch 0 again. Its ID is then new, so the
            # dedup IDs of its rows cannot be the same as before.
            query = json.loads((checkpoint / "metadata").read_text("utf-8"))["id"]
            dedup = f.concat_ws("/", f.lit(query), f.lit(number), f.col("key").cast("string"))
            rows = batch.withColumn("dedup", dedup)
            rows.write.format("streamq").options(**given).mode("append").save()

        return (
            frame.writeStream.foreachBatch(send)
            .outputMode("update")
            .queryName(name)
            .option("checkpointLocation", str(checkpoint))
        )


def load(reference: str, folder: Path) -> Callable[[Job], Any]:
    """Import the function that is given as `module:function`.

    The module may be in `folder`, the directory of the configuration. Raises HandlerLoadError if
    the function cannot be imported.
    """
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise HandlerLoadError(f"{reference} does not have the form module:function")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise HandlerLoadError(f"{reference} cannot be loaded: {error}") from error
    if not callable(found):
        raise HandlerLoadError(f"{reference} is not a function")
    return found  # type: ignore[no-any-return]


def run(job: Job, function: Callable[[Job], Any]) -> Any:
    """Run the function, and then wait for the streaming queries that it started.

    Returns the result of the function. Raises PipelineError if a query fails.
    """
    returned = function(job)
    queries = job.spark.streams.active
    try:
        wait(queries)
    except StreamingQueryException as error:
        raise to_streamqd_error(error) from error
    finally:
        for query in queries:
            query.stop()
    return returned
