"""With an archive in an object store, the pipelines handle each entry once and need no jar."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.config import ArchiveStore, Pipeline, Topic
from streamqd.errors import SparkError
from streamqd.spark import read_topic
from streamqd.spark.location import location
from streamqd.spark.pipelines import standing, tables
from streamqd.spark.pipelines.archive import Archiver, ArchiveResult
from streamqd.spark.pipelines.compact import compact
from streamqd.spark.pipelines.derived import PARSED, QUARANTINE, RESULTS
from streamqd.spark.pipelines.prompt import Prompt
from streamqd.spark.pipelines.queries import PipelineError
from streamqd.spark.pipelines.reparse import reparse
from streamqd.spark.pipelines.replay import ReplayFilter, replay
from streamqd.spark.pipelines.report import report
from streamqd.spark.pipelines.report_queries import ReportScope
from streamqd.spark.pipelines.standing import StandingQuery
from streamqd.spark.pipelines.storage import RAW, Archive, ArchiveError, ArchiveTable, TableKind
from streamqd.store import topics
from tests.spark.conftest import Shop
from tests.support.killed_archive import POINTS, strike
from tests.support.s3 import KEY, SECRET, BucketServer, StoreFault
from tests.support.spark_process import QUICK

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("moto")

ROOT = Path(__file__).parents[2]
START = 1_763_683_195_000  # five seconds before midnight, UTC
SCHEMA = "id int, tags map<string,string>"
JOB = """
def count(job):
    return {"rows": job.read("orders").count(), "archive": str(job.archive.root)}
"""


class KilledError(Exception):
    """Raised instead of SIGKILL where the process must survive."""


@pytest.fixture(scope="module")
def server_of_buckets() -> Iterator[BucketServer]:
    with BucketServer() as made:
        yield made


class BucketCase:
    """A topic with a schema and a ledger, and an archive of it in a bucket."""

    def __init__(self, shop: Shop, store: BucketServer, url: str) -> None:
        self.shop, self.store, self.url = shop, store, url
        self.settings = replace(
            config.Settings(),
            redis=shop.server.settings,
            archive=ArchiveStore(json.dumps(store.options)),
            pipelines={"orders": Pipeline(SCHEMA)},
        )
        topics.create(shop.store, "orders", Topic(partitions=2))
        self.ledger: Counter[tuple[int, str]] = Counter()
        self._next = START

    def add(self, count: int, *, wrong: int = 0) -> None:
        """Add entries. The last `wrong` of them do not fit the schema."""
        for number in range(count):
            self._next += 1000
            body = b"[]" if number >= count - wrong else b'{"id": %d, "tags": {"a": "b"}}' % number
            key = self.shop.keys.stream("orders", number % 2)
            fields = ("payload", body, "key", "k", "headers", '{"h":"1"}')
            self.shop.link.execute("XADD", key, f"{self._next}-0", *fields)
            self.ledger[number % 2, f"{self._next}-0"] += 1

    def run(self, **changes: Any) -> ArchiveResult:
        archiver = Archiver(
            self.settings, self.url, lambda: self.shop.spark, lambda _: None, **changes
        )
        try:
            [done] = archiver.run(["orders"])
            for problem in archiver.problems.values():
                raise problem
            return done
        finally:
            archiver.close()

    @property
    def archive(self) -> Archive:
        return Archive(self.url, options=self.store.options)

    def rows(self, kind: TableKind = RAW, name: str = "orders") -> list[dict[str, Any]]:
        """Return the rows that an independent reader of Delta tables sees."""
        place = f"{self.url}/{kind.folder}/{name}"
        table = deltalake.DeltaTable(place, storage_options=self.store.options)
        found: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return found

    def archived_entries(self) -> Counter[tuple[int, str]]:
        return Counter((row["partition"], row["id"]) for row in self.rows())

    def configured(self, folder: Path) -> Path:
        """Write a configuration with the options of the store, and return its path."""
        file = folder / "streamq.toml"
        lines = [f'[redis]\nurl = "{self.shop.server.url}"']
        lines += [f'[pipelines.orders]\nschema = "{SCHEMA}"', "[archive.options]"]
        lines += [f'{name} = "{value}"' for name, value in self.store.options.items()]
        file.write_text("\n".join([*lines, ""]), "utf-8")
        file.chmod(0o600)
        return file

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return Prompt(self.shop.spark, self.settings, self.archive).ask(query).rows


@pytest.fixture
def case(
    shop: Shop, server_of_buckets: BucketServer, request: pytest.FixtureRequest
) -> Iterator[BucketCase]:
    server_of_buckets.heal()
    yield BucketCase(
        shop, server_of_buckets, f"s3://bucket/{re.sub(r'[^a-z_]+', '-', request.node.name)}"
    )
    server_of_buckets.heal()


def test_bucket_holds_archive_and_parsed_tables(case: BucketCase) -> None:
    case.add(20, wrong=3)
    done = case.run()
    assert (done.rows, done.parsed, done.quarantined) == (20, 17, 3)
    case.add(6, wrong=1)
    assert (case.run().rows, case.run().rows) == (6, 0)
    assert case.archived_entries() == case.ledger
    assert {row["entry_id"] for row in case.rows(PARSED)} | {
        row["id"] for row in case.rows(QUARANTINE)
    } == {entry for _, entry in case.ledger}
    assert len(case.rows(PARSED)) == 22
    trim = case.shop.keys.trim("orders", 0)
    last = max(entry for partition, entry in case.ledger if partition == 0)
    assert case.shop.link.execute("HGET", trim, "archived").decode() == last


def test_tiers_of_a_bucket_have_each_entry_once(case: BucketCase) -> None:
    case.add(12)
    case.run()
    case.shop.link.execute("XTRIM", case.shop.keys.stream("orders", 0), "MAXLEN", 0)
    case.add(4)
    spark = case.shop.spark
    frame = read_topic(spark, "orders", settings=case.settings, archivePath=case.url)
    rows = frame.collect()
    assert Counter((row.partition, row.id) for row in rows) == case.ledger
    assert {bytes(row.headers[0].value) for row in rows} == {b"1"}
    cold = read_topic(spark, "orders", settings=case.settings, archivePath=case.url, tier="cold")
    assert cold.count() == 12
    disk = spark.createDataFrame(cold.collect(), cold.schema)
    moment = dt.datetime.fromtimestamp(START / 1000 + 6, dt.UTC)
    for where in (
        "partition = 1", "partition IN (0, 7)", f"id_ms > {START + 5000}",
        f"timestamp >= timestamp'{moment:%Y-%m-%d %H:%M:%S}'", "key IS NULL", "id_ms < 3",
        f"id = '{START + 3000}-0'", "key = X'6B' AND partition = 0", "partition IS NOT NULL",
        f"NOT (id_ms <= {START + 5000} OR partition = 1)",
    ):  # fmt: skip
        found = sorted(row.id for row in cold.where(where).collect())
        assert found == sorted(row.id for row in disk.where(where).collect()), where
    case.store.requests()
    assert cold.where("partition = 0 AND id_ms < 5").count() == 0
    assert not [each for each in case.store.requests() if ".parquet" in each]


def test_bucket_supports_sql_replay_and_results(case: BucketCase, tmp_path: Path) -> None:
    case.add(10, wrong=2)
    case.run()
    assert case.ask("SELECT count(*), count(tags['a']) FROM parsed_orders") == [(8, 8)]
    assert case.ask("SELECT count(*) FROM quarantine_orders") == [(2,)]
    assert case.ask("SELECT count(*) FROM topic_orders") == [(10,)]
    topics.create(case.shop.store, "again", Topic(partitions=1))
    choice = ReplayFilter(tier="cold", where="partition = 1")
    sent = replay(
        case.settings, case.shop.spark, "orders", choice, archive=case.archive, target="again"
    )
    assert (sent.rows, sent.sent) == (5, 5)
    query = "SELECT id, string(value) AS line FROM topic_orders"
    for count in (10, 13):
        asked = StandingQuery(query, into="lines", archive=case.archive)
        checkpoint = tmp_path / "checkpoint"
        standing.run(case.shop.spark, case.settings, asked, lambda *_: None, checkpoint)
        assert len(case.rows(RESULTS, "lines")) == count
        case.add(3)
    assert case.ask("SELECT count(*) FROM table_lines") == [(13,)]


def test_compaction_of_a_bucket_changes_no_row(case: BucketCase) -> None:
    for _ in range(3):
        case.add(4, wrong=2)
        case.run()
    [raw, parsed, quarantine], problems = compact(case.settings, case.url)
    assert problems == []
    assert (raw.rows, raw.files_before, raw.files_after) == (8, 4, 2)  # the second date only
    assert (parsed.rows, quarantine.rows) == (4, 4)
    assert case.archived_entries() == case.ledger
    frame = tables.read_cold(case.shop.spark, "orders", case.archive.table("orders"))
    assert Counter((row.partition, row.id) for row in frame.collect()) == case.ledger
    assert case.ask("SELECT count(*), sum(id) FROM parsed_orders") == [(6, 3)]


def test_quarantine_of_a_bucket_is_parsed_again(case: BucketCase) -> None:
    schema = "id int NOT NULL, tags map<string,string>"
    case.settings = replace(case.settings, pipelines={"orders": Pipeline(schema)})
    case.add(4, wrong=1)
    case.shop.link.execute("XADD", case.shop.keys.stream("orders", 0), "*", "payload", b"{}")
    case.run()
    assert (len(case.rows(PARSED)), len(case.rows(QUARANTINE))) == (3, 2)
    case.settings = replace(case.settings, pipelines={"orders": Pipeline(SCHEMA)})
    done = reparse(case.settings, case.url, "orders", lambda: case.shop.spark, quarantine_only=True)
    assert (done.parsed, done.quarantined) == (1, 1)
    assert (len(case.rows(PARSED)), len(case.rows(QUARANTINE))) == (4, 1)
    assert case.ask("SELECT count(*) FROM parsed_orders WHERE id IS NULL") == [(1,)]


@pytest.mark.parametrize("kind", [PARSED, QUARANTINE])
def test_tables_of_a_bucket_are_parsed_again(
    case: BucketCase, monkeypatch: pytest.MonkeyPatch, kind: TableKind
) -> None:
    """Tables in a bucket are parsed again with another type, even after a kill before a commit."""
    case.add(4, wrong=1)
    case.run()
    query = "SELECT entry_partition, entry_id, id FROM parsed_orders ORDER BY 1, 2"
    before = case.ask(query)
    case.settings = replace(
        case.settings, pipelines={"orders": Pipeline("id string, tags map<string,string>")}
    )
    append = ArchiveTable.append

    def killed(self: ArchiveTable, *args: Any, **more: Any) -> None:
        if self.kind is kind:
            raise KilledError
        append(self, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(ArchiveTable, "append", killed)
        with pytest.raises(KilledError):
            reparse(case.settings, case.url, "orders", lambda: case.shop.spark)
    if kind is PARSED:
        assert case.ask(query) == before
    else:
        case.run()
        assert len(case.rows(QUARANTINE)) == 1
    done = reparse(case.settings, case.url, "orders", lambda: case.shop.spark)
    assert (done.parsed, done.quarantined) == (3, 1)
    assert case.ask(query) == [(*row[:2], str(row[2])) for row in before]
    assert len(case.rows(QUARANTINE)) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_accept_a_bucket(case: BucketCase, tmp_path: Path) -> None:
    """The report, the prompt and a job run as processes with options from the configuration."""
    case.add(12, wrong=2)
    case.run()
    case.shop.link.execute("XTRIM", case.shop.keys.stream("orders", 0), "MAXLEN", 0)
    case.add(3)
    file = case.configured(tmp_path)
    (tmp_path / "job.py").write_text(JOB, "utf-8")
    out = f"{case.url}-report"

    def call(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streamqd", "--config", str(file), "pipeline"]
        ended = subprocess.run(
            [*command, *arguments, "--archive", case.url, "--master", "local[2]", *QUICK],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            input=text,
            timeout=250,
        )
        assert not any(each in ended.stdout + ended.stderr for each in (KEY, SECRET, "Traceback"))
        return ended

    counts = [f"SELECT count(*) AS n FROM {each}_orders" for each in ("topic", "parsed")]
    shown = call("shell", "--format", "json", text="; ".join(counts))
    assert shown.stdout.splitlines() == ['{"n": 15}', '{"n": 10}'], shown.stderr
    ran = call("run", "job:count", "--checkpoints", str(tmp_path / "checkpoints"), "--json")
    assert json.loads(ran.stdout) == {"rows": 15, "archive": case.url}, ran.stderr
    reported = call("report", "--out", out, "--json")
    assert json.loads(reported.stdout)["topics"][0]["entries"] == 15, reported.stderr
    assert sorted(location(out, case.store.options).names()) == ["report.html", "report.json"]


def test_report_with_expired_credentials_is_one_sentence(case: BucketCase, tmp_path: Path) -> None:
    case.add(4)
    case.run()
    out = location(f"{case.url}-report", case.store.options)
    scope = ReportScope(archive=case.archive)
    for method, path in (("GET", r"\.parquet"), ("PUT", "report.html")):
        case.store.fail(method, path, StoreFault.EXPIRED, times=10_000)
        with pytest.raises(SparkError) as caught:
            report(case.settings, lambda: case.shop.spark, out, scope)
        assert "ExpiredToken" in str(caught.value)
        assert not any(each in str(caught.value) for each in (KEY, SECRET, "\n"))
        case.store.heal()
    # The command opens the archive before it starts Spark.
    case.store.fail("GET", "_archive.json", StoreFault.EXPIRED, times=10_000)
    command = ["-c", str(case.configured(tmp_path)), "pipeline", "report", "--archive", case.url]
    ended = CliRunner().invoke(cli, [*command, "--out", out.address])
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"Error: {case.url} cannot be an archive: ")
    assert ended.stderr.count("\n") == 1
    assert KEY not in ended.stderr


@pytest.mark.parametrize("point", POINTS)
def test_bucket_archive_is_exact_after_an_error(case: BucketCase, point: str) -> None:
    case.add(12, wrong=2)

    def blow() -> None:
        raise KilledError

    undo = strike(point, 2, blow)
    try:
        with pytest.raises(KilledError):
            case.run(batch_rows=4)
    finally:
        undo()
    seen = case.archived_entries()
    assert max(seen.values()) == 1
    assert seen <= case.ledger
    case.add(3)
    case.run(batch_rows=4)
    assert case.archived_entries() == case.ledger
    assert (len(case.rows(PARSED)), len(case.rows(QUARANTINE))) == (13, 2)


@pytest.mark.slow
def test_bucket_archive_is_exact_after_a_kill(case: BucketCase, tmp_path: Path) -> None:
    """Each run has another core count, and continues where the previous one was killed."""
    file = case.configured(tmp_path)
    for number, point in enumerate(POINTS):
        case.add(6, wrong=1)
        command = [sys.executable, "-m", "tests.support.killed_archive", point, "1"]
        command += ["--config", str(file), "pipeline", "archive", "--archive", case.url]
        command += ["--batch-rows", "3", "--master", f"local[{1 + number % 3}]", *QUICK]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert SECRET not in ended.stdout + ended.stderr
        seen = case.archived_entries()
        assert seen <= case.ledger
    case.run()
    assert case.archived_entries() == case.ledger
    assert len(case.rows(PARSED)) + len(case.rows(QUARANTINE)) == case.ledger.total()


def test_run_with_expired_credentials_can_be_repeated(case: BucketCase) -> None:
    case.add(4)
    case.run()
    case.add(4)
    case.store.fail("PUT", r"\.parquet", StoreFault.EXPIRED, times=1000)
    case.store.fail("POST", r"\.parquet", StoreFault.EXPIRED, times=1000)
    with pytest.raises((PipelineError, ArchiveError)) as caught:
        case.run()
    assert not any(each in str(caught.value) for each in (KEY, SECRET, "\n"))
    case.store.heal()
    assert case.run().rows == 4
    assert case.archived_entries() == case.ledger


def test_plans_and_event_logs_contain_no_credentials(
    case: BucketCase, event_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case.add(6, wrong=1)
    case.run()
    frame = read_topic(case.shop.spark, "orders", settings=case.settings, archivePath=case.url)
    assert frame.where("partition = 1").count() == 3
    frame.explain("extended")
    assert case.ask("SELECT count(*) FROM parsed_orders") == [(5,)]
    shown = capfd.readouterr()
    logs = [each.read_text() for each in event_log.rglob("*") if each.is_file()]
    assert any("streamq_table" in each for each in logs)
    for text in (shown.out, shown.err, *logs):
        assert SECRET not in text
        assert KEY not in text
