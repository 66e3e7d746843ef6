"""Handlers that read a web server's access log and count hits per path and user agents.

Both groups read every message of the topic at their own pace. Both handlers are idempotent: a
message that is handled twice is counted once. This is necessary because streamqd delivers at least
once. If a process dies after the handler's last line but before the acknowledgment, the message is
delivered again.

The counts are stored in one SQLite file per group and partition, so the example needs no server. In
production, use a shared database, because a partition may move to another host.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass

from streamqd import Context, Dead, Message, handler

TABLES = """
CREATE TABLE IF NOT EXISTS seen (uid TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS hits (
    path TEXT, status INTEGER, count INTEGER, PRIMARY KEY (path, status)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS agents (agent TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID;
"""

# The combined log format. It matches only whole lines, so a truncated line does not match. Within
# quotation marks, the server writes a quotation mark as \".
COMBINED = re.compile(
    r"(?P<client>\S+) \S+ (?P<user>\S+) "
    r"\[(?P<time>\d{2}/\w{3}/\d{4}:\d{2}:\d{2}:\d{2} [+-]\d{4})\] "
    r'"(?P<method>[A-Z]+) (?P<path>\S+) (?P<protocol>HTTP/\d(?:\.\d)?)" '
    r"(?P<status>\d{3}) (?P<size>\d+|-) "
    r'"(?P<referrer>(?:[^"\\]|\\.)*)" "(?P<agent>(?:[^"\\]|\\.)*)"'
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, parsed from a line of the log."""

    client: str
    time: str
    method: str
    path: str
    status: int
    size: int  # bytes sent, 0 if the log contains -
    referrer: str
    agent: str


def parse(line: str) -> Request:
    """Parse one line of the combined log format. Raises Dead for any other line.

    Retries cannot succeed for such a line. Dead moves the message to the dead letters immediately,
    with this text, so that an operator can examine it.
    """
    match = COMBINED.fullmatch(line)
    if match is None:
        raise Dead("not a line of the combined log format")
    return Request(
        client=match["client"],
        time=match["time"],
        method=match["method"],
        path=match["path"].partition("?")[0],  # count a page once, without its query
        status=int(match["status"]),
        size=0 if match["size"] == "-" else int(match["size"]),
        referrer=match["referrer"],
        agent=match["agent"],
    )


_database: sqlite3.Connection | None = None


def on_start(context: Context) -> None:
    """Open the database. Runs once in each worker process, before its first message.

    Open connections here and not at module level, because each worker is a separate process.
    """
    global _database
    assignment = context.assignment
    folder = context.state_dir / "weblog"
    folder.mkdir(parents=True, exist_ok=True)
    _database = sqlite3.connect(folder / f"{assignment.group}-{assignment.partition}.db")
    # WAL allows reads while this process writes. NORMAL survives the crash of a process. Use FULL
    # if the counts must also survive a power failure.
    _database.execute("PRAGMA journal_mode = WAL")
    _database.execute("PRAGMA synchronous = NORMAL")
    _database.executescript(TABLES)


def on_stop() -> None:
    """Close the database. Runs when the worker stops normally, but not after a crash."""
    if _database is not None:
        _database.close()


def count(uid: str, statement: str, *values: object) -> None:
    """Run a counting statement only once for the message `uid`, even if this is called again.

    One transaction stores both the uid and the count, or neither of them. If a message is delivered
    again, its uid already exists, so nothing changes. If the process dies in the middle, nothing is
    stored.
    """
    if _database is None:
        raise RuntimeError("on_start has not run")
    with _database:
        fresh = _database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (uid,)).rowcount
        if fresh:
            _database.execute(statement, values)


@handler(topic="access", group="hits", max_attempts=5, timeout="30s")
def count_hit(msg: Message) -> None:
    """Count one request by path and status."""
    request = parse(msg.text())
    count(
        msg.uid,
        "INSERT INTO hits VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
        request.path,
        request.status,
    )


@handler(topic="access", group="agents", max_attempts=5, timeout="30s")
def count_agent(msg: Message) -> None:
    """Count one request by user agent."""
    request = parse(msg.text())
    count(
        msg.uid,
        "INSERT INTO agents VALUES (?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
        request.agent,
    )
