"""A batch handler: it stores many messages in one transaction.

The messages are sensor readings. A reading that is not a number fails alone, and the others of its
batch succeed. The uid is the primary key, so a batch that is delivered again changes nothing.
"""

from __future__ import annotations

import sqlite3

from streamqd import Context, Dead, Failures, Message, handler

_database: sqlite3.Connection | None = None


def on_start(context: Context) -> None:
    """Open the database. Runs once in each worker process, before its first message."""
    global _database
    context.state_dir.mkdir(parents=True, exist_ok=True)
    _database = sqlite3.connect(context.state_dir / f"readings-{context.assignment.partition}.db")
    _database.execute("CREATE TABLE IF NOT EXISTS readings (uid TEXT PRIMARY KEY, value REAL)")


@handler(topic="sensors", group="store", batch=100)
def store(batch: list[Message]) -> None:
    """Store the readings of a batch in one transaction."""
    if _database is None:
        raise RuntimeError("on_start has not run")
    rows: list[tuple[str, float]] = []
    failed: dict[Message, BaseException] = {}
    for message in batch:
        try:
            rows.append((message.uid, float(message.text())))
        except ValueError:
            failed[message] = Dead("not a number")
    with _database:  # one transaction: it stores all rows, or raises and stores none
        _database.executemany("INSERT OR IGNORE INTO readings VALUES (?, ?)", rows)
    if failed:
        raise Failures(failed)
