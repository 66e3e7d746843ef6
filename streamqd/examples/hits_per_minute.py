"""A job of Spark between two topics: lines of a web server's log in, hits per minute out.

    streamqd pipeline run streamqd.examples.hits_per_minute:count --checkpoints ./checkpoints

reads the topic `access` and writes what has changed into the topic `hits_per_minute`, for a handler
such as `keep` below.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from streamqd import Message, handler

if TYPE_CHECKING:
    from streamqd.spark.pipelines.run import Job

SOURCE, TARGET = "access", "hits_per_minute"
TIME = r"\[([^\]]+)\]"
STATUS = r'" (\d{3}) '


def count(job: Job) -> None:
    """Count the lines of each minute and status that have come since the last run."""
    from pyspark.sql import functions as f

    line = f.col("value").cast("string")
    minute = f.window(
        f.to_timestamp(f.regexp_extract(line, TIME, 1), "dd/MMM/yyyy:HH:mm:ss Z"), "1 minute"
    )
    status = f.regexp_extract(line, STATUS, 1)
    hits = (
        job.stream(SOURCE)
        .where(line.rlike(TIME) & line.rlike(STATUS))
        .groupBy(minute.alias("minute"), status.alias("status"))
        .agg(f.count("*").alias("hits"))
    )
    start = f.date_format(f.col("minute.start"), "yyyy-MM-dd'T'HH:mm'Z'")
    messages = hits.select(
        f.concat_ws(" ", start, "status").alias("key"),
        f.to_json(f.struct(start.alias("minute"), "status", "hits")).alias("value"),
    )
    writer = job.changes(messages, TARGET, "hits-per-minute", partitions="1")
    writer.trigger(availableNow=True).start()


# The latest count of each minute and status. A real handler would keep it where it is needed.
board: dict[tuple[str, str], int] = {}


@handler(topic=TARGET, group="board")
def keep(message: Message) -> None:
    """Keep the latest count."""
    found = json.loads(message.payload)
    board[found["minute"], found["status"]] = found["hits"]
