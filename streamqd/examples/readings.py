"""A batch handler: many messages become one transaction.

It stores what sensors have measured. A reading that is no number fails alone; the others of its
batch are done. The uid is the primary key, so a batch that comes again changes nothing.
"""

from __future__ import annotations

import sqlite3

from streamqd import Context, Dead, Failures, Message, handler

_database: sqlite3.Connection | None = None


def on_start(context: Context) -> None:
    """Open the database. Runs once in each worker process, before its first message."""
    global _database
    context.state_dir.mkdir(parents=True, exist_ok=True)
    _database = sqlite3.connect(context.state_dir / f"readings-{context.unit.partition}.db")
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
    with _database:  # one transaction: all of them, or an exception and none
        _database.executemany("INSERT OR IGNORE INTO readings VALUES (?, ?)", rows)
    if failed:
        raise Failures(failed)
