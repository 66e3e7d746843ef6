"""The web-log example is called directly, without Redis and a daemon."""

from __future__ import annotations

import gzip
import sqlite3
from importlib import resources
from pathlib import Path

import pytest

from streamqd import Context, Dead, Message
from streamqd.examples import weblog
from streamqd.message import Delivery
from streamqd.model import Assignment

LINE = (
    '83.149.9.216 - - [17/May/2015:10:05:03 +0000] "GET /images/search.png?raw=1 HTTP/1.1" '
    '200 203023 "http://semicomplete.com/" "Mozilla/5.0 (Macintosh)"'
)


@pytest.fixture
def hits(tmp_path: Path):
    """Run the module's hooks like a worker of access/0/hits. Return the path of its counts."""
    assignment = Assignment("access", 0, "hits")
    weblog.on_start(Context(assignment=assignment, instance="test", state_dir=tmp_path))
    yield tmp_path / "weblog" / "hits-0.db"
    weblog.on_stop()


def message(entry_id: str, line: str) -> Message:
    delivery = Delivery(Assignment("access", 0, "hits"), "test", 1)
    return Message(delivery, entry_id.encode(), [b"payload", line.encode()], retried=False)


def rows(database: Path, query: str) -> list[tuple]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_weblog_parses_a_whole_line():
    request = weblog.parse(LINE)

    assert (request.client, request.method, request.path) == (
        "83.149.9.216",
        "GET",
        "/images/search.png",
    )
    assert (request.status, request.size) == (200, 203023)
    assert request.agent == "Mozilla/5.0 (Macintosh)"


def test_missing_size_counts_as_zero():
    assert weblog.parse(LINE.replace("203023", "-")).size == 0


def test_quotation_mark_inside_the_agent_is_escaped():
    assert weblog.parse(LINE[:-1] + r' \"x\""').agent == r"Mozilla/5.0 (Macintosh) \"x\""


@pytest.mark.parametrize(
    "line",
    [
        LINE[:-1],
        LINE[1:].partition(" ")[2],
        LINE + " more",
        LINE + "\n",
        LINE.replace(" 200 ", " ok "),
        "",
    ],
    ids=["cut off", "no client", "more", "line end", "no status", "empty"],
)
def test_weblog_dead_letters_a_line_in_another_format(line: str):
    with pytest.raises(Dead, match="combined log format"):
        weblog.parse(line)


def test_example_log_has_one_broken_line():
    data = resources.files("streamqd.examples") / "data" / "apache_access.log.gz"
    lines = gzip.decompress(data.read_bytes()).decode().splitlines()
    broken = []
    for number, line in enumerate(lines, 1):
        try:
            weblog.parse(line)
        except Dead:
            broken.append(number)

    assert len(lines) == 10_000
    assert broken == [8899]


def test_repeated_message_is_counted_once(hits: Path):
    weblog.count_hit(message("5-0", LINE))
    weblog.count_hit(message("5-0", LINE))
    weblog.count_hit(message("6-0", LINE))

    assert rows(hits, "SELECT * FROM hits") == [("/images/search.png", 200, 2)]
    assert rows(hits, "SELECT count(*) FROM seen") == [(2,)]


def test_uid_and_count_are_stored_atomically(hits: Path):
    with pytest.raises(sqlite3.OperationalError):
        weblog.count("access/0/7-0", "INSERT INTO no_such_table VALUES (1)")

    assert rows(hits, "SELECT count(*) FROM seen") == [(0,)]
    weblog.count_hit(message("7-0", LINE))
    assert rows(hits, "SELECT * FROM hits") == [("/images/search.png", 200, 1)]


def test_weblog_counts_nothing_for_a_broken_line(hits: Path):
    with pytest.raises(Dead):
        weblog.count_hit(message("8-0", LINE[:-1]))

    assert rows(hits, "SELECT count(*) FROM seen") == [(0,)]
    assert rows(hits, "SELECT * FROM hits") == []
