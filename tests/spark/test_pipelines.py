"""Compacting, replaying, asking and running jobs, on the one session of the Spark tests."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamqd import config
from streamqd.errors import HandlerLoadError, Refused
from streamqd.spark.pipelines import standing, tables
from streamqd.spark.pipelines.archive import Archiver, PipelineError
from streamqd.spark.pipelines.checkpoints import hold
from streamqd.spark.pipelines.compact import compact
from streamqd.spark.pipelines.replay import HEADER, ReplayFilter, replay
from streamqd.spark.pipelines.run import Job, load, run
from streamqd.spark.pipelines.standing import Standing
from streamqd.spark.pipelines.storage import Archive
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.spark.conftest import Shop

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def settings(shop: Shop) -> config.Settings:
    return replace(config.Settings(), redis=shop.server.settings)


@pytest.fixture
def archive(shop: Shop, settings: config.Settings, tmp_path: Path) -> Archive:
    """Entries 1-0 to 6-0 of partition 0 and 1-0 of partition 1 in three batches, all trimmed."""
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 6)
    shop.add("access", 1, "1-0", key=b"k1", headers=b'{"n":"1","x-replay-of":"old"}', sentAt=b"5")
    archiver = Archiver(
        settings, tmp_path / "archive", lambda: shop.spark, lambda _: None, batch_rows=3
    )
    assert [each.batches for each in archiver.run()] == [3]
    archiver.close()
    for number in (0, 1):
        shop.link.execute("XTRIM", shop.keys.stream("access", number), "MAXLEN", 0)
    return archiver.archive


def entries(shop: Shop, topic: str, partition: int = 0) -> list[dict[str, Any]]:
    found = shop.link.execute("XRANGE", shop.keys.stream(topic, partition), "-", "+")
    return [
        {name.decode(): value for name, value in zip(f[::2], f[1::2], strict=True)}
        for _, f in found
    ]


def test_hot_and_cold_are_one_table_before_and_after_compaction(
    shop: Shop, settings: config.Settings, archive: Archive
) -> None:
    shop.fill("access", 0, 7, 9)
    query = "SELECT partition, count(*), count(DISTINCT id) FROM topic_access GROUP BY 1 ORDER BY 1"
    expected = [(0, 9, 9), (1, 1, 1)]

    def asked() -> list[tuple[Any, ...]]:
        assert tables.make_views(shop.spark, settings, archive, query) == ["topic_access"]
        found = [tuple(row) for row in shop.spark.sql(query).collect()]
        # The data source by itself says the same.
        shop.read("access", archivePath=archive.root).createOrReplaceTempView("topic_access")
        assert [tuple(row) for row in shop.spark.sql(query).collect()] == found
        return found

    assert asked() == expected
    done = compact(settings, archive.root, lambda: shop.spark)[0]
    assert (done.rows, done.files_before, done.files_after) == (7, 4, 2)
    assert asked() == expected
    rows = tables.topic_table(shop.spark, settings, "access", archive, "cold").collect()
    assert Counter((row.partition, row.id) for row in rows) == Counter(
        [*((0, f"{n}-0") for n in range(1, 7)), (1, "1-0")]
    )
    assert shop.spark.read.parquet(str(archive.root)).count() == 7
    again = compact(settings, archive.root, lambda: shop.spark, grace=-1)[0]
    assert (again.rows, again.purged) == (0, 3)
    assert asked() == expected


def test_replay_from_the_archive_once_under_a_name(
    shop: Shop, settings: config.Settings, archive: Archive
) -> None:
    shop.topic("again", 1)
    dry = replay(
        settings,
        shop.spark,
        "access",
        ReplayFilter(),
        archive=archive,
        target="again",
        dry_run=True,
    )
    assert (dry.rows, entries(shop, "again")) == (7, [])
    since = ReplayFilter(since=dt.datetime.fromtimestamp(0.003, dt.UTC), where="partition = 0")
    for _ in range(2):
        done = replay(
            settings, shop.spark, "access", since, archive=archive, target="again", name="one"
        )
        assert done.rows == 4
    sent = entries(shop, "again")
    assert [each["payload"] for each in sent] == [b"0:%d-0" % n for n in range(3, 7)]
    assert [json.loads(each["headers"]) for each in sent] == [
        {HEADER: f"access/0/{n}-0"} for n in range(3, 7)
    ]


def test_replay_by_key_and_header_keeps_the_message(
    shop: Shop, settings: config.Settings, archive: Archive
) -> None:
    shop.topic("again", 1)
    for choice in (ReplayFilter(keys=("k2",)), ReplayFilter(headers={"n": "2"})):
        found = replay(settings, shop.spark, "access", choice, archive=archive, dry_run=True)
        assert found.rows == 0
    choice = ReplayFilter(keys=("k1",), headers={"n": "1"})
    replay(settings, shop.spark, "access", choice, archive=archive, target="again", rate=1000)
    (sent,) = entries(shop, "again")
    assert json.loads(sent.pop("headers")) == {"n": "1", HEADER: "access/1/1-0"}
    assert sent == {"payload": b"1:1-0", "key": b"k1", "sentAt": b"5"}
    with pytest.raises(Refused, match="the condition cannot be used"):
        replay(settings, shop.spark, "access", ReplayFilter(where="nothing = 1"), archive=archive)
    with pytest.raises(Refused, match="without an archive"):
        replay(settings, shop.spark, "access", ReplayFilter(tier="cold"))


def test_replay_of_dead_letters(shop: Shop, settings: config.Settings) -> None:
    shop.topic("access", 1)
    letter = {"payload": "p", "key": "k", "reason": "attempts", "originalId": "3-0"}
    flat = [part for pair in letter.items() for part in pair]
    shop.link.execute("XADD", shop.keys.dlq("access", 0), "9-0", *flat)
    choice = ReplayFilter(tier="dlq", where="reason = 'attempts'")
    assert replay(settings, shop.spark, "access", choice).rows == 1
    assert entries(shop, "access") == [
        {"payload": b"p", "key": b"k", "headers": b'{"x-replay-of":"access:dlq/0/9-0"}'}
    ]
    found = tables.ask(shop.spark, settings, None, "SELECT reason FROM DLQ_access")
    assert found == (["reason"], [{"reason": "attempts"}])
    with pytest.raises(Refused, match="`cause` cannot be resolved"):
        tables.ask(shop.spark, settings, None, "SELECT cause FROM dlq_access")


def test_a_job_from_topic_to_topic_and_on_from_where_it_was(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", 1)
    job = Job(shop.spark, settings, tmp_path)
    count = load("streamqd.examples.hits_per_minute:count", tmp_path)

    def serve(*lines: tuple[str, int]) -> None:
        for at, status in lines:
            line = f'1.2.3.4 - - [20/Nov/2025:10:{at} +0100] "GET / HTTP/1.1" {status} 5 "-" "-"'
            shop.link.execute("XADD", shop.keys.stream("access", 0), "*", "payload", line)

    def counted() -> set[tuple[str, str, int]]:
        run(job, count)
        found = [json.loads(each["payload"]) for each in entries(shop, "hits_per_minute")]
        shop.link.execute("XTRIM", shop.keys.stream("hits_per_minute", 0), "MAXLEN", 0)
        return {(each["minute"], each["status"], each["hits"]) for each in found}

    serve(("01:05", 200), ("01:59", 200), ("01:30", 404), ("02:00", 200))
    assert counted() == {
        ("2025-11-20T09:01Z", "200", 2),
        ("2025-11-20T09:01Z", "404", 1),
        ("2025-11-20T09:02Z", "200", 1),
    }
    serve(("01:10", 200))
    assert counted() == {("2025-11-20T09:01Z", "200", 3)}


@pytest.mark.parametrize("reference", ["nothing", "no_such_module:f", "json:no_such_function"])
def test_a_job_that_is_not_there(reference: str, tmp_path: Path) -> None:
    with pytest.raises(HandlerLoadError, match=reference):
        load(reference, tmp_path)


def test_a_standing_query_shows_rows_and_their_changes(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 3)
    shop.fill("access", 1, 1, 1)
    shown: list[dict[str, Any]] = []

    def ask(query: str, **given: Any) -> list[dict[str, Any]]:
        checkpoint = given.pop("checkpoint", None)
        shown.clear()
        asked = Standing(query, **given)
        standing.run(shop.spark, settings, asked, lambda _, rows: shown.extend(rows), checkpoint)
        return sorted(shown, key=str)

    plain = "SELECT id, string(value) AS body FROM topic_access WHERE id_ms > 2"
    assert ask(plain) == [{"id": "3-0", "body": "0:3-0"}]
    counts = "SELECT partition, count(*) AS n FROM topic_access GROUP BY partition"
    with pytest.raises(Refused, match="--mode update"):
        ask(counts)
    one = {"mode": "update", "checkpoint": tmp_path / "one"}
    assert ask(counts, **one) == [{"partition": 0, "n": 3}, {"partition": 1, "n": 1}]
    shop.fill("access", 1, 2, 3)
    assert ask(counts, **one) == [{"partition": 1, "n": 3}], "only what has changed"
    with pytest.raises(Refused, match="is the checkpoint of another query, its mode is 'update'"):
        ask(counts, checkpoint=tmp_path / "one")
    with hold(settings, tmp_path / "one"), pytest.raises(Refused, match="one is used by process"):
        ask(counts, **one)
    with pytest.raises(Refused, match="the query names no topic"):
        ask("SELECT 1")

    with pytest.raises(BrokenPipeError):  # who reads it has gone
        standing.run(shop.spark, settings, Standing(plain), _gone)


def _gone(names: list[str], rows: list[dict[str, Any]]) -> None:
    raise BrokenPipeError


def test_a_standing_query_sends_its_rows_once(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 4)
    loud = Standing(
        "SELECT id AS key, upper(concat('v', string(value))) AS value FROM topic_access",
        target="loud", partitions=1, follow=True,
    )  # fmt: skip
    with pytest.raises(Refused, match="needs a folder for the checkpoint"):
        standing.run(shop.spark, settings, loud, _gone)
    with pytest.raises(Refused, match="needs a column value"):
        standing.run(
            shop.spark,
            settings,
            replace(loud, query="SELECT id FROM topic_access"),
            _gone,
            tmp_path,
        )

    wrong = replace(loud, query="SELECT 1 AS headers, value FROM topic_access")
    with pytest.raises(PipelineError, match=r"^streamq: the column headers must be array<struct"):
        standing.run(shop.spark, settings, wrong, _gone, tmp_path / "wrong")

    def stop_when_sent() -> None:
        wait_until(lambda: len(entries(shop, "loud")) == 4, timeout=60, what="the first four")
        shop.fill("access", 0, 5, 6)
        wait_until(lambda: len(entries(shop, "loud")) == 6, timeout=60, what="those that came")
        for query in shop.spark.streams.active:
            query.stop()

    watcher = threading.Thread(target=stop_when_sent)
    watcher.start()
    standing.run(shop.spark, settings, loud, _gone, tmp_path / "loud")
    watcher.join()
    standing.run(shop.spark, settings, replace(loud, follow=False), _gone, tmp_path / "loud")
    assert [(each["key"], each["payload"]) for each in entries(shop, "loud")] == [
        (f"{n}-0".encode(), f"V0:{n}-0".encode()) for n in range(1, 7)
    ]
