"""Handlers that read a web server's access log: hits per path, and user agents.

The two groups see every message of the topic, each at its own pace. Both are idempotent: a message
that is handled twice is counted once. That matters, because streamqd delivers at least once: when
a process dies between the handler's last line and the acknowledgement, the message comes again.

Here the counts live in one SQLite file per group and partition, so the example needs no server. In
production it is your own database, and it is shared: a partition may move to another host.
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

# The combined log format, from the first character to the last: a line that is cut off does not
# match. Inside quotation marks the server writes a quotation mark as \".
COMBINED = re.compile(
    r"(?P<client>\S+) \S+ (?P<user>\S+) "
    r"\[(?P<time>\d{2}/\w{3}/\d{4}:\d{2}:\d{2}:\d{2} [+-]\d{4})\] "
    r'"(?P<method>[A-Z]+) (?P<path>\S+) (?P<protocol>HTTP/\d(?:\.\d)?)" '
    r"(?P<status>\d{3}) (?P<size>\d+|-) "
    r'"(?P<referrer>(?:[^"\\]|\\.)*)" "(?P<agent>(?:[^"\\]|\\.)*)"'
)


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the log."""

    client: str
    time: str
    method: str
    path: str
    status: int
    size: int  # bytes sent, 0 when none were
    referrer: str
    agent: str


def parse(line: str) -> Request:
    """Read one line of the combined log format, whole. Raises Dead when it is anything else.

    Dead, not an ordinary exception: the line will be as broken on the fifth attempt as on the
    first. The message goes to the dead letters at once, with this reason, and waits for a person.
    """
    match = COMBINED.fullmatch(line)
    if match is None:
        raise Dead("not a line of the combined log format")
    return Request(
        client=match["client"],
        time=match["time"],
        method=match["method"],
        path=match["path"].partition("?")[0],  # one page is one path, whatever its query
        status=int(match["status"]),
        size=0 if match["size"] == "-" else int(match["size"]),
        referrer=match["referrer"],
        agent=match["agent"],
    )


_database: sqlite3.Connection | None = None


def on_start(context: Context) -> None:
    """Open the database. Runs once in each worker process, before its first message.

    Connections belong here and not at module level: each worker is a process of its own.
    """
    global _database
    unit = context.unit
    folder = context.state_dir / "weblog"
    folder.mkdir(parents=True, exist_ok=True)
    _database = sqlite3.connect(folder / f"{unit.group}-{unit.partition}.db")
    # WAL lets others read while this process writes. NORMAL survives the death of any process; use
    # FULL when the counts must survive a power cut too.
    _database.execute("PRAGMA journal_mode = WAL")
    _database.execute("PRAGMA synchronous = NORMAL")
    _database.executescript(TABLES)


def on_stop() -> None:
    """Close the database. Runs when the worker ends in order."""
    if _database is not None:
        _database.close()


def count(uid: str, statement: str, *values: object) -> None:
    """Count something for the message `uid`, once, however often it is called.

    The uid and the count move in one transaction: either both are stored or neither is. So a
    message that comes again finds its uid and changes nothing, and a process that dies in the
    middle leaves nothing half done.
    """
    if _database is None:
        raise RuntimeError("on_start has not run")
    with _database:
        fresh = _database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (uid,)).rowcount
        if fresh:
            _database.execute(statement, values)


@handler(topic="access", group="hits", max_attempts=5, timeout="30s")
def count_hit(msg: Message) -> None:
    """Count one request by its path and its status."""
    request = parse(msg.text())
    count(
        msg.uid,
        "INSERT INTO hits VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
        request.path,
        request.status,
    )


@handler(topic="access", group="agents", max_attempts=5, timeout="30s")
def count_agent(msg: Message) -> None:
    """Count one request by the program that sent it."""
    request = parse(msg.text())
    count(
        msg.uid,
        "INSERT INTO agents VALUES (?, 1) ON CONFLICT DO UPDATE SET count = count + 1",
        request.agent,
    )
