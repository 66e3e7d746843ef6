"""A job of Spark between two topics: lines of a web server's log in, hits per minute out.

    streamqd pipeline run streamqd.examples.hits_per_minute:count --checkpoints ./checkpoints

reads the topic `access` and writes what has changed into the topic `hits_per_minute`, which `keep`
below reads in a daemon: `handlers = ["streamqd.examples.hits_per_minute"]`. It ends with what is
there; with `--set "every=5 seconds"` it goes on until it is interrupted.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

from streamqd import Context, Message, handler

if TYPE_CHECKING:
    from streamqd.spark.pipelines.run import Job

SOURCE, TARGET = "access", "hits_per_minute"
TIME = r"\[([^\]]+)\]"
STATUS = r'" (\d{3}) '


def count(job: Job) -> None:
    """Count the lines of each minute and status, on from where the last run was."""
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
    every = job.arguments.get("every")
    (writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)).start()


BOARD = """
CREATE TABLE IF NOT EXISTS board (
    minute TEXT, status TEXT, hits INTEGER, PRIMARY KEY (minute, status)
) WITHOUT ROWID
"""
_board: sqlite3.Connection | None = None


def on_start(context: Context) -> None:
    """Open the board. A real handler would write to where the numbers are looked at."""
    global _board
    context.state_dir.mkdir(parents=True, exist_ok=True)
    _board = sqlite3.connect(context.state_dir / "hits_per_minute.db")
    with _board:
        _board.execute(BOARD)


@handler(topic=TARGET, group="board")
def keep(message: Message) -> None:
    """Keep the latest count of a minute and status. Counts only grow, so a message that comes
    twice, or after a later one, changes nothing."""
    found = json.loads(message.payload)
    if _board is None:
        raise RuntimeError("on_start has not run")
    with _board:
        _board.execute(
            "INSERT INTO board VALUES (?, ?, ?)"
            " ON CONFLICT DO UPDATE SET hits = max(hits, excluded.hits)",
            (found["minute"], found["status"], found["hits"]),
        )
