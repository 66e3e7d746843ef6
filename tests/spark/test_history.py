"""The views `messages` and `dead_letters` cover all topics, in the archive and in Redis."""

from __future__ import annotations

import datetime as dt
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamqd import config
from streamqd.spark.pipelines import overviews
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.kinds import HISTORY, first_minute_columns
from streamqd.spark.pipelines.prompt import Prompt
from streamqd.spark.pipelines.storage import Archive
from streamqd.store import history
from streamqd.store.history import HistoryRow, Interval
from tests.pages.reader import fences
from tests.spark.test_guides import QUERY

if TYPE_CHECKING:
    from tests.spark.conftest import Shop
    from tests.support.servers import Server

HOUR = 3_600_000
AT = 1_763_632_800_000  # 2025-11-20T10:00:00Z


@pytest.fixture
def settings(server: Server) -> config.Settings:
    return replace(config.Settings(), redis=server.settings)


def minute(shop: Shop, until: int, *assignments: HistoryRow) -> None:
    written = Interval("", "web-1", until, 60.0, assignments=assignments)
    history.append(shop.store, "default", written, 10 * 365 * 86_400.0)


def figures(topic: str, handler: str, partition: int = 0, **given: Any) -> HistoryRow:
    counts = dict.fromkeys(history.COUNTS, 0) | given.pop("counts", {})
    return HistoryRow(topic, "hits", partition, handler, counts, **given)


def write_dead_letters(shop: Shop, topic: str, partition: int, *ids: str) -> None:
    for each in ids:
        letter = ("payload", "p", "group", "hits", "handler", "weblog:count", "errorClass", "E")
        shop.link.execute("XADD", shop.keys.dlq(topic, partition), each, *letter)


def archive_history(settings: config.Settings, folder: Path | str, shop: Shop) -> None:
    with closing(Archiver(settings, folder, lambda: shop.spark, lambda _: None)) as archiver:
        archiver.run()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_views_have_each_row_once_archived_or_not(
    shop: Shop, settings: config.Settings, tmp_path: Path, steps: int
) -> None:
    """Each row appears once, whether none, half or all of the dead letters have been archived.

    Archived dead letters are removed from Redis.
    """
    shop.topic("access", 2)
    shop.topic("orders", 1)
    folder = tmp_path / "archive"
    for step in range(2):
        one, two = f"{AT + step}-0", f"{AT + step}-1"
        write_dead_letters(shop, "access", step, one, two)
        write_dead_letters(shop, "orders", 0, one)
        minute(shop, AT + step * HOUR + 60_100, figures("access", "weblog:count", step, lag=1))
        if step < steps:
            archive_history(settings, folder, shop)
            shop.link.execute("XDEL", shop.keys.dlq("access", step), one, two)
    archive = Archive(folder) if steps else None
    prompt = Prompt(shop.spark, settings, archive)

    letters = prompt.ask("SELECT topic, partition, id, handler FROM dead_letters ORDER BY 1, 2, 3")
    minutes = prompt.ask("SELECT fleet, topic, partition, minute FROM messages ORDER BY minute")

    assert [row[:3] for row in letters.rows] == [
        *(("access", step, f"{AT + step}-{each}") for step in range(2) for each in range(2)),
        *(("orders", 0, f"{AT + step}-0") for step in range(2)),
    ]
    assert {row[3] for row in letters.rows} == {"weblog:count"}
    assert [row[:3] for row in minutes.rows] == [("default", "access", 0), ("default", "access", 1)]
    assert len({row[3] for row in minutes.rows}) == 2
    shown = prompt.ask("SHOW TABLES")
    assert {"messages", "dead_letters"} <= {row[1] for row in shown.rows}


def test_queries_of_the_guide_return_the_documented_rows(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    """The guide's queries find the hourly P99 over all runs, and the handler that failed most."""
    shop.topic("access", 1)
    now = dt.datetime.now(dt.UTC).replace(minute=30, second=0, microsecond=0)
    start = now - dt.timedelta(hours=2)
    since = round(start.timestamp() * 1000)
    fast, slow = 15, 25  # histogram buckets of 34 ms and 34 s
    for hour, slow_runs in ((0, 1), (1, 30)):
        for number in range(2):
            at = since + hour * HOUR + number * 60_000 + 100
            minute(
                shop,
                at,
                figures(
                    *("access", "weblog:count"),
                    handled={fast: 100},
                    delays={3: 100},
                    counts={"failed": 2},
                ),
                figures(
                    *("access", "mail:send", 1),
                    handled={slow: slow_runs},
                    delays={9: slow_runs},
                    counts={"failed": 7},
                ),
            )
    archive_history(settings, tmp_path / "archive", shop)
    prompt = Prompt(shop.spark, settings, Archive(tmp_path / "archive"))
    hourly, delayed, failing = (each.text for each in fences(QUERY) if "FROM messages" in each.text)

    by_hour = prompt.ask(statement(hourly))
    delays = prompt.ask(statement(delayed))
    by_handler = prompt.ask(statement(failing).replace("2025-11-01", f"{start:%Y-%m-%d}T00:00:00Z"))

    shortest, longest = ((1 << (10 + each)) / 1e9 for each in (fast, slow))
    assert [row[1] for row in by_hour.rows] == [shortest, longest]
    assert [row[0].minute for row in by_hour.rows] == [0, 0]
    assert [row[1] for row in delays.rows] == [0.008, 0.512]
    assert by_handler.rows[0][0] == "mail:send"


def statement(command: str) -> str:
    """Return the SQL in a command on a page."""
    return command.partition('"')[2].rpartition('"')[0].replace("\\\n", "")


def test_view_has_concurrently_archived_rows_once(
    shop: Shop, settings: config.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that move into the archive after a view has opened the table appear once."""
    shop.topic("access", 1)
    folder = tmp_path / "archive"
    write_dead_letters(shop, "access", 0, f"{AT}-0")
    archive_history(settings, folder, shop)
    write_dead_letters(shop, "access", 0, f"{AT}-1")
    find, runs = overviews._dead_letter_places, []

    def late(given: config.Settings) -> Any:
        found = find(given)
        if not runs:
            runs.append(found)
            archive_history(settings, folder, shop)
            shop.link.execute("XDEL", shop.keys.dlq("access", 0), f"{AT}-0", f"{AT}-1")
        return found

    monkeypatch.setattr(overviews, "_dead_letter_places", late)
    prompt = Prompt(shop.spark, settings, Archive(folder))
    letters = prompt.ask("SELECT id FROM dead_letters ORDER BY id")
    assert [row[0] for row in letters.rows] == [f"{AT}-0", f"{AT}-1"]


def test_views_skip_unreadable_rows(
    shop: Shop, settings: config.Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("access", "orders", "mail"):
        shop.topic(topic, 1)
        write_dead_letters(shop, topic, 0, f"{AT}-0")
    minute(shop, AT + 60_100, figures("access", "weblog:count"))
    folder = tmp_path / "archive"
    archive_history(settings, folder, shop)
    for table in ("dead_letters/orders", "history/default"):
        for file in (folder / table / "_delta_log").glob("*.json"):
            file.write_text("x", "utf-8")
    write_dead_letters(shop, "access", 0, f"{AT}-1")
    shop.link.execute("DEL", shop.keys.dlq("mail", 0))
    shop.link.execute("SET", shop.keys.dlq("mail", 0), "x")
    shop.link.execute("SADD", shop.keys.registry(), "gone")

    prompt = Prompt(shop.spark, settings, Archive(folder))
    letters = prompt.ask("SELECT topic, id FROM dead_letters ORDER BY topic, id")
    minutes = prompt.ask("SELECT topic FROM messages")

    access = [("access", f"{AT}-{each}") for each in range(2)]
    assert letters.rows == [*access, ("mail", f"{AT}-0"), ("orders", f"{AT}-0")]
    assert minutes.rows == [("access",)], "read from Redis"
    for left_out in ("dead_letters/orders", "history/default", shop.keys.dlq("mail", 0)):
        assert any(left_out in text and "the view" in text for text in caplog.messages)


def test_view_of_an_older_table_has_null_delays(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    """A table of an older version shows null delays until a run of this version writes to it."""
    shop.topic("access", 1)
    archive = Archive(tmp_path / "archive", create=True)
    archive.derived_table("default", HISTORY, first_minute_columns())
    minute(shop, AT + 60_100, figures("access", "weblog:count", delays={3: 9}))
    prompt = Prompt(shop.spark, settings, archive)
    found = prompt.ask("SELECT delay_p50, map_keys(delay)[0] AS bound FROM messages")
    assert [tuple(row) for row in found.rows] == [(0.008, 0.008)]
