"""A Spark job between two topics: it reads a web server's log and writes hits per minute.

    streamqd pipeline run streamqd.examples.hits_per_minute:count --checkpoints ./checkpoints

This command reads the topic `access` and writes changed counts to the topic `hits_per_minute`. The
handler `keep` reads them in a daemon: `handlers = ["streamqd.examples.hits_per_minute"]`. The job
stops after the last available message. With `--set "every=5 seconds"`, it runs until it is
interrupted.
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
    """Count the lines for each minute and status, starting at the checkpoint of the last run."""
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
    """Open the board. A real handler would write to the database of a dashboard."""
    global _board
    context.state_dir.mkdir(parents=True, exist_ok=True)
    _board = sqlite3.connect(context.state_dir / "hits_per_minute.db")
    with _board:
        _board.execute(BOARD)


@handler(topic=TARGET, group="board")
def keep(message: Message) -> None:
    """Store the latest count for a minute and status.

    Counts only grow, so a message that is repeated or out of order changes nothing.
    """
    found = json.loads(message.payload)
    if _board is None:
        raise RuntimeError("on_start has not run")
    with _board:
        _board.execute(
            "INSERT INTO board VALUES (?, ?, ?)"
            " ON CONFLICT DO UPDATE SET hits = max(hits, excluded.hits)",
            (found["minute"], found["status"], found["hits"]),
        )
