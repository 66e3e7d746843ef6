"""Compaction, replay, queries and jobs, in the Spark session that the tests share."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamqd import config
from streamqd.cli import answers
from streamqd.errors import (
    HandlerLoadError,
    RedisResponseError,
    RequestRefusedError,
    TopicNotFoundError,
)
from streamqd.message import REPLAY_OF
from streamqd.spark import read_topic
from streamqd.spark.form import OptionsError
from streamqd.spark.pipelines import queries, standing, tables
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.pipelines.checkpoints import lease_checkpoints
from streamqd.spark.pipelines.compact import compact, purge
from streamqd.spark.pipelines.prompt import Prompt
from streamqd.spark.pipelines.queries import PipelineError, wait
from streamqd.spark.pipelines.replay import ReplayFilter, replay
from streamqd.spark.pipelines.run import Job, load, run
from streamqd.spark.pipelines.standing import StandingQuery
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.streams import Catalog, DataLossError
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.spark.conftest import Shop


@pytest.fixture
def settings(shop: Shop) -> config.Settings:
    return replace(config.Settings(), redis=shop.server.settings)


@pytest.fixture
def archive(shop: Shop, settings: config.Settings, tmp_path: Path) -> Archive:
    """Archive 1-0 to 6-0 of partition 0 and 1-0 of partition 1 in three batches, and trim all."""
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


def test_hot_and_cold_tiers_form_one_table(
    shop: Shop, settings: config.Settings, archive: Archive
) -> None:
    shop.fill("access", 0, 7, 9)
    query = "SELECT partition, count(*), count(DISTINCT id) FROM topic_access GROUP BY 1 ORDER BY 1"
    expected = [(0, 9, 9), (1, 1, 1)]

    def asked() -> list[tuple[Any, ...]]:
        assert tables.make_views(shop.spark, settings, archive, query) == ["topic_access"]
        found = [tuple(row) for row in shop.spark.sql(query).collect()]
        read_topic(
            shop.spark, "access", settings=settings, archivePath=archive.root
        ).createOrReplaceTempView("topic_access")
        assert [tuple(row) for row in shop.spark.sql(query).collect()] == found
        return found

    assert asked() == expected
    begun = tables.topic_table(shop.spark, settings, "access", archive, "cold")
    (done,), _ = compact(settings, archive.root)
    assert (done.rows, done.files_before, done.files_after) == (6, 3, 1)
    assert asked() == expected
    rows = tables.topic_table(shop.spark, settings, "access", archive, "cold").collect()
    assert Counter((row.partition, row.id) for row in rows) == Counter(
        [*((0, f"{n}-0") for n in range(1, 7)), (1, "1-0")]
    )
    assert begun.count() == 7, "the files of the earlier plan still exist"
    assert compact(settings, archive.root)[0][0].rows == 0
    table = archive.table("access")
    assert table is not None
    assert purge(table, 0.0) == 3
    assert asked() == expected
    with pytest.raises(RequestRefusedError, match="startingOffsets cannot be used with an archive"):
        read_topic(
            shop.spark,
            "access",
            settings=settings,
            archivePath=archive.root,
            startingOffsets="earliest",
        )


def test_entries_archived_and_trimmed_during_planning_are_read(
    shop: Shop, settings: config.Settings, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is read first, so that it has all entries that Redis trims later."""
    shop.fill("access", 0, 7, 9)
    facts = Catalog.facts

    def overtaken(self: Catalog, places: Any) -> Any:
        monkeypatch.setattr(Catalog, "facts", facts)
        archiver = Archiver(settings, archive.root, lambda: shop.spark, lambda _: None)
        archiver.run()
        archiver.close()
        shop.link.execute("XTRIM", shop.keys.stream("access", 0), "MAXLEN", 0)
        return facts(self, places)

    monkeypatch.setattr(Catalog, "facts", overtaken)
    frame = tables.topic_table(shop.spark, settings, "access", archive)
    assert Counter((row.partition, row.id) for row in frame.collect()) == Counter(
        [*((0, f"{n}-0") for n in range(1, 10)), (1, "1-0")]
    )
    # Entries that are in no archive are reported as lost, or are skipped.
    shop.fill("access", 0, 10, 12)
    shop.link.execute("XTRIM", shop.keys.stream("access", 0), "MAXLEN", "=", 1)
    with pytest.raises(DataLossError, match="2 entries of access partition 0 after 9-0"):
        tables.topic_table(shop.spark, settings, "access", archive)
    left = read_topic(
        shop.spark,
        "access",
        settings=settings,
        archivePath=archive.root,
        failOnDataLoss=False,
    )
    assert left.count() == 11


@pytest.mark.parametrize("tier", ["all", "hot", "cold"])
def test_tier_options_are_checked(shop: Shop, archive: Archive, tier: str) -> None:
    given: dict[str, Any] = {"archivePath": archive.root, "tier": tier}
    with pytest.raises(OptionsError, match="fetchsiez is not an option; did you mean fetchSize"):
        read_topic(shop.spark, "access", url=shop.server.url, fetchSiez=7, **given)
    with pytest.raises(OptionsError, match="failOnDataLoss must be true or false"):
        read_topic(shop.spark, "access", url=shop.server.url, failOnDataLoss="maybe", **given)


def test_tier_options_ignore_case(
    shop: Shop, settings: config.Settings, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.fill("access", 0, 7, 9)
    shop.link.execute("XTRIM", shop.keys.stream("access", 0), "MAXLEN", "=", 1)
    given = {"archivePath": archive.root, "FAILONDATALOSS": " False"}
    left = read_topic(shop.spark, "access", url=shop.server.url, **given)
    assert left.count() == 8
    # The address may be in the environment, as it may be without an archive.
    monkeypatch.setenv("STREAMQ_URL", shop.server.url)
    begins = tables.starting_offsets({}, "access", archive.table("access"), fail=False)
    assert json.loads(begins)["access"].keys() == {"0", "1"}


def test_source_is_registered_once(
    shop: Shop, settings: config.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table has its own source, registered only once, because Spark warns of repetition."""
    from pyspark.sql.datasource import DataSourceRegistration

    register, made = DataSourceRegistration.register, list[str]()

    def noted(self: DataSourceRegistration, source: Any) -> None:
        made.append(source.name())
        register(self, source)

    monkeypatch.setattr(DataSourceRegistration, "register", noted)
    for name in ("access", "orders"):
        shop.topic(name, 1)
        shop.fill(name, 0, 1, 2)
    archiver = Archiver(settings, tmp_path / "archive", lambda: shop.spark, lambda _: None)
    for first in (3, 5):
        assert [each.rows for each in archiver.run()] == [2, 2]
        for name in ("access", "orders"):
            shop.fill(name, 0, first, first + 1)
    archiver.close()
    assert len(made) == len(set(made)) == 2


def test_named_replay_from_the_archive_sends_once(
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
    for sent in (4, 0):
        done = replay(
            settings, shop.spark, "access", since, archive=archive, target="again", name="one"
        )
        assert (done.rows, done.sent) == (4, sent)
    sent = entries(shop, "again")
    assert [each["payload"] for each in sent] == [b"0:%d-0" % n for n in range(3, 7)]
    assert [json.loads(each["headers"]) for each in sent] == [
        {REPLAY_OF: f"access/0/{n}-0"} for n in range(3, 7)
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
    assert json.loads(sent.pop("headers")) == {"n": "1", REPLAY_OF: "access/1/1-0"}
    assert sent == {"payload": b"1:1-0", "key": b"k1", "sentAt": b"5"}
    with pytest.raises(RequestRefusedError, match="the condition is not valid"):
        replay(settings, shop.spark, "access", ReplayFilter(where="nothing = 1"), archive=archive)
    with pytest.raises(RequestRefusedError, match="the tier cold requires an archive"):
        replay(settings, shop.spark, "access", ReplayFilter(tier="cold"))


def test_named_replay_into_its_own_topic_terminates(shop: Shop, settings: config.Settings) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 3)
    for sent in (3, 0):
        done = replay(settings, shop.spark, "access", ReplayFilter(), name="one")
        assert (done.rows, done.sent) == (3, sent)
    assert len(entries(shop, "access")) == 6


def test_replay_error_of_a_failed_task_is_one_sentence(
    shop: Shop, settings: config.Settings, archive: Archive
) -> None:
    shop.topic("again", 1)
    shop.link.execute("SET", shop.keys.stream("again", 0), "no stream")
    with pytest.raises(RedisResponseError) as told:
        replay(settings, shop.spark, "access", ReplayFilter(), archive=archive, target="again")
    assert str(told.value).startswith("WRONGTYPE")
    assert told.value.code == "WRONGTYPE"
    assert "\n" not in str(told.value)


def test_replay_with_a_rate_is_evenly_paced(shop: Shop, settings: config.Settings) -> None:
    """A rate spaces messages evenly by server time: they may be late, but never early."""
    shop.topic("access", 2)
    shop.topic("again", 1)
    shop.fill("access", 0, 1, 40)
    shop.fill("access", 1, 1, 40)

    done = replay(settings, shop.spark, "access", ReplayFilter(), target="again", rate=50)

    assert done.sent == 80
    found = shop.link.execute("XRANGE", shop.keys.stream("again", 0), "-", "+")
    times = [int(each.partition(b"-")[0]) for each, _ in found]
    assert len(times) == 80
    # In every window of half a second, 25 messages are due, plus those that are up to 20 ms late.
    assert max(sum(begin <= each < begin + 500 for each in times) for begin in times) <= 28
    assert replay(settings, shop.spark, "access", ReplayFilter(), target="again").sent == 80


def test_replay_into_a_missing_topic_is_refused(shop: Shop, settings: config.Settings) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 3)
    with pytest.raises(TopicNotFoundError, match="again"):
        replay(settings, shop.spark, "access", ReplayFilter(), target="again")


def test_replay_accepts_archived_dead_letters(shop: Shop, settings: config.Settings) -> None:
    shop.topic("access", 1)
    letter = {"payload": "p", "key": "k", "reason": "attempts", "originalId": "3-0"}
    flat = [part for pair in letter.items() for part in pair]
    shop.link.execute("XADD", shop.keys.dlq("access", 0), "9-0", *flat)
    choice = ReplayFilter(tier="dlq", where="reason = 'attempts'")
    assert replay(settings, shop.spark, "access", choice).rows == 1
    assert entries(shop, "access") == [
        {"payload": b"p", "key": b"k", "headers": b'{"x-replay-of":"access:dlq/0/9-0"}'}
    ]
    prompt = Prompt(shop.spark, settings, None)
    found = prompt.ask("SELECT reason, 1 AS n, 2 AS n FROM DLQ_access")
    assert found == (["reason", "n", "n"], [("attempts", 1, 2)])
    with pytest.raises(RequestRefusedError, match="`cause` cannot be resolved"):
        prompt.ask("SELECT cause FROM dlq_access")


def test_statement_without_a_spark_job_can_be_canceled(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    from pyspark.sql.datasource import DataSource

    class SlowSource(DataSource):
        """A source whose columns are known only after a write to a pipe, which Python waits for."""

        @classmethod
        def name(cls) -> str:
            return "slow"

        def schema(self) -> str:
            folder = Path(self.options["folder"])
            (folder / "begun").touch()
            with (folder / "go").open("rb") as pipe:
                pipe.read(1)
            (folder / "ended").touch()
            return "x int"

    def interrupt() -> None:
        wait_until((tmp_path / "begun").exists, timeout=60)
        os.kill(os.getpid(), signal.SIGINT)

    os.mkfifo(tmp_path / "go")
    shop.spark.dataSource.register(SlowSource)
    prompt = Prompt(shop.spark, settings, None)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the signal handler of PySpark calls Java
    user = threading.Thread(target=interrupt)
    user.start()
    slow = f"CREATE TEMPORARY VIEW slow USING slow OPTIONS (folder '{tmp_path}')"
    with (tmp_path / "go").open("r+b", buffering=0) as pipe:
        try:
            with pytest.raises(KeyboardInterrupt):
                prompt.ask(slow)
            assert not (tmp_path / "ended").exists()
            assert prompt.ask("SELECT 6 * 7").rows == [(42,)]
        finally:
            signal.signal(signal.SIGINT, before)
            pipe.write(b"x")
            user.join()
            wait_until((tmp_path / "ended").exists, timeout=60)


def test_interrupt_during_the_exit_of_a_query_is_not_lost(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during a query's exit stops a repeated query, as in `archive --every`."""
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 1)

    waiting = threading.Event()

    def interrupt(*_: object) -> None:
        assert waiting.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def look() -> None:
        monkeypatch.setattr(queries, "_POLL", 60)  # so long that the next check comes after the end
        waiting.set()

    writer = shop.stream("access").writeStream.foreachBatch(interrupt).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(KeyboardInterrupt):
        wait([query], look)
    query.stop()


def test_show_tables_lists_every_topic(shop: Shop, settings: config.Settings) -> None:
    """The list includes tables that have not been used yet."""
    shop.topic("access", 1)
    shop.topic("a.b", 1)
    found = Prompt(shop.spark, settings, None).ask("show tables")
    names = {row[found.columns.index("tableName")] for row in found.rows}
    assert {"topic_access", "dlq_access", "topic_a_b", "dlq_a_b"} <= names


def test_unsupported_columns_are_refused_before_the_query(
    shop: Shop, settings: config.Settings
) -> None:
    prompt = Prompt(shop.spark, settings, None)
    query = "SELECT raise_error(concat('it', ' ran', id)) AS n, 2 AS n FROM range(3)"
    with pytest.raises(PipelineError, match="it ran"):
        prompt.ask(query)
    with pytest.raises(RequestRefusedError, match="two columns are named n"):
        prompt.ask(query, fits=answers.column_check("json"))
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 2)
    asked = StandingQuery("SELECT raise_error(id) AS n, 2 AS n FROM topic_access")
    with pytest.raises(RequestRefusedError, match="two columns are named n"):
        standing.run(shop.spark, settings, asked, _gone, fits=answers.column_check("json"))


def test_job_resumes_from_its_checkpoint(
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
def test_missing_job_function_is_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(HandlerLoadError, match=reference):
        load(reference, tmp_path)


def test_standing_query_shows_rows_and_changes(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", 2)
    shop.fill("access", 0, 1, 3)
    shop.fill("access", 1, 1, 1)
    shown: list[dict[str, Any]] = []

    def show(names: list[str], rows: list[tuple[Any, ...]]) -> None:
        shown.extend(dict(zip(names, row, strict=True)) for row in rows)

    def ask(query: str, **given: Any) -> list[dict[str, Any]]:
        checkpoint = given.pop("checkpoint", None)
        shown.clear()
        asked = StandingQuery(query, **given)
        standing.run(shop.spark, settings, asked, show, checkpoint)
        return sorted(shown, key=str)

    plain = "SELECT id, string(value) AS body FROM topic_access WHERE id_ms > 2"
    assert ask(plain) == [{"id": "3-0", "body": "0:3-0"}]
    counts = "SELECT partition, count(*) AS n FROM topic_access GROUP BY partition"
    with pytest.raises(RequestRefusedError, match="--mode update"):
        ask(counts)
    one = {"mode": "update", "checkpoint": tmp_path / "one"}
    assert ask(counts, **one) == [{"partition": 0, "n": 3}, {"partition": 1, "n": 1}]
    shop.fill("access", 1, 2, 3)
    assert ask(counts, **one) == [{"partition": 1, "n": 3}], "only changed rows"
    with pytest.raises(
        RequestRefusedError, match="is the checkpoint of another query, whose mode is 'update'"
    ):
        ask(counts, checkpoint=tmp_path / "one")
    with (
        lease_checkpoints(settings, tmp_path / "one"),
        pytest.raises(RequestRefusedError, match="one is in use by process"),
    ):
        ask(counts, **one)
    with pytest.raises(RequestRefusedError, match="the query reads no topic"):
        ask("SELECT 1")

    with pytest.raises(BrokenPipeError):  # its reader has exited
        standing.run(shop.spark, settings, StandingQuery(plain), _gone)


def _gone(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    raise BrokenPipeError


def test_standing_query_sends_rows_once(
    shop: Shop, settings: config.Settings, tmp_path: Path
) -> None:
    shop.topic("access", 1)
    shop.fill("access", 0, 1, 4)
    loud = StandingQuery(
        "SELECT id AS key, upper(concat('v', string(value))) AS value FROM topic_access",
        target="loud", partitions=1, follow=True,
    )  # fmt: skip
    with pytest.raises(RequestRefusedError, match="requires a directory for the checkpoint"):
        standing.run(shop.spark, settings, loud, _gone)
    with pytest.raises(RequestRefusedError, match="has no column value"):
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
