"""The archive's stream without Spark: its plans, files and reports, on a real server."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.errors import RequestRefusedError
from streamqd.spark.offsets import Position
from streamqd.spark.options import read_options
from streamqd.spark.pipelines import batches, parts
from streamqd.spark.pipelines.derived import PARSED, RESULTS, parsed_columns
from streamqd.spark.pipelines.kinds import DEAD
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.storage import RAW, Archive, ArchiveError, ArchiveTable
from streamqd.spark.streams import DataLossError
from streamqd.store import client, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server

pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")
types = pytest.importorskip("pyspark.sql.types")
writer = pytest.importorskip("streamqd.spark.pipelines.writer")

LIMIT = None  # means that the limit of the options applies


class Shop:
    """A topic of two partitions, and its table."""

    def __init__(self, server: Server, link: Connection, keys: Keys, folder: Path) -> None:
        self.server, self.link, self.keys = server, link, keys
        topics.create(Store(link, keys), "access", config.Topic(partitions=2))
        self.archive = Archive(folder, create=True)
        self.table = self.open_table()

    def connect(self) -> Connection:
        return client.connect(self.server.settings, timeout=10, name="test")

    def open_table(self) -> ArchiveTable:
        found = self.archive.table("access", create=True)
        assert found is not None
        return found

    def add(self, partition: int, *ids: str) -> None:
        key = self.keys.stream("access", partition)
        self.link.pipeline([("XADD", key, each, "payload", f"v{each}") for each in ids])

    def fill(self, partition: int, first: int, last: int) -> None:
        self.add(partition, *(f"{number}-0" for number in range(first, last + 1)))

    def reader(self, **given: object) -> Any:
        every = {"url": self.server.url, "subscribe": "access", "minPartitions": 2} | given
        options = read_options({name.lower(): str(value) for name, value in every.items()}, {})
        made = writer.FileStreamReader(options, self.table.folder)
        made.prepareForTriggerAvailableNow()
        return made

    def batch(self, reader: Any) -> bool:
        """Run a batch as Spark does. Return True if there was one."""
        start = {"batch": 0}
        end = reader.latestOffset(start, LIMIT)
        if end == start:
            return False
        assert reader.latestOffset(end, LIMIT) == end
        rows = self.rows(reader, start, end)
        self.table = self.open_table()
        files, ends = writer.parse_rows(rows)
        self.table.append(files, ends)
        return True

    def rows(self, reader: Any, start: Any, end: Any) -> Sequence[Any]:
        # Spark carries readers and parts from one process to another.
        parts = pickle.loads(pickle.dumps(reader.partitions(start, end)))
        source = writer.file_source(self.table.folder, "files")({})
        names = [part.split()[0] for part in source.schema().split(", ")]
        make = types.Row(*names)
        carried = pickle.loads(pickle.dumps(reader))
        return [make(*row) for part in parts for row in carried.read(part)]

    def archived_entries(self) -> list[tuple[int, str]]:
        found = deltalake.DeltaTable(str(self.table.folder)).to_pyarrow_table()
        return sorted(zip(found["partition"].to_pylist(), found["id"].to_pylist(), strict=True))


@pytest.fixture
def shop(server: Server, link: Connection, keys: Keys, tmp_path: Path) -> Shop:
    return Shop(server, link, keys, tmp_path / "archive")


def test_successive_batches_archive_every_entry_once(shop: Shop) -> None:
    shop.fill(0, 1, 30)
    shop.fill(1, 1, 10)
    reader = shop.reader(maxOffsetsPerTrigger=16)
    shop.fill(0, 31, 40)  # written after the start, so it is not part of this run
    count = 0
    while shop.batch(reader):
        count += 1
    assert count == 3
    assert shop.archived_entries() == sorted(
        [*((0, f"{n}-0") for n in range(1, 31)), *((1, f"{n}-0") for n in range(1, 11))]
    )
    assert shop.table.positions == {
        ("access", 0): Position((30, 0), 30),
        ("access", 1): Position((10, 0), 10),
    }


def test_archive_trusts_the_table_over_the_checkpoint(shop: Shop) -> None:
    shop.fill(0, 1, 4)
    reader = shop.reader()
    assert shop.batch(reader)
    shop.fill(0, 5, 6)
    for start in ({"batch": 0}, {"batch": 77}):
        again = shop.reader()
        rows = shop.rows(again, start, {"batch": start["batch"] + 1})
        files, ends = writer.parse_rows(rows)
        assert sum(each.rows for each in files) == 2
        assert ends == {("access", 0): Position((6, 0), 6)}


def test_long_stream_is_archived_in_parts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PIECE_ROWS", 10)
    shop.fill(0, 1, 200)
    shop.batch(shop.reader())
    assert [each.rows for each in shop.table.files()] == [100, 100]
    assert len(shop.archived_entries()) == 200


def test_archive_reports_or_skips_missing_entries(shop: Shop) -> None:
    shop.fill(0, 1, 4)
    shop.batch(shop.reader())
    shop.fill(0, 5, 9)
    stream = shop.keys.stream("access", 0)
    removed = shop.link.execute("XTRIM", stream, "MINID", "=", "8-0")
    shop.link.execute("HINCRBY", shop.keys.trim("access", 0), "removed", removed)
    with pytest.raises(DataLossError, match="3 entries of access partition 0 after 4-0"):
        shop.batch(shop.reader())
    assert shop.batch(shop.reader(failOnDataLoss="false"))
    assert [entry for _, entry in shop.archived_entries()] == [
        *(f"{n}-0" for n in (1, 2, 3, 4, 8, 9))
    ]
    assert shop.table.positions[("access", 0)] == Position((9, 0), 9)


def test_repeated_task_is_not_committed_twice(shop: Shop) -> None:
    shop.fill(0, 1, 4)
    reader = shop.reader()
    shop.rows(reader, {"batch": 0}, {"batch": 1})
    assert shop.batch(reader)
    assert len(shop.archived_entries()) == 4
    assert len(list(shop.table.folder.path.rglob("*.parquet"))) == 2


def test_failed_archive_task_removes_its_files(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed task removes its files.

    Here, the disk becomes full in the middle of the second file.
    """
    shop.add(0, "1-0", "86400000-0")
    group = parts.OpenFile._write_group

    def fail(file: Any) -> None:
        if "date=1970-01-02" in file.path:
            raise OSError(28, "No space left on device")
        group(file)

    monkeypatch.setattr(parts.OpenFile, "_write_group", fail)
    with pytest.raises(OSError, match="No space left"):
        shop.batch(shop.reader())
    assert list(shop.table.folder.path.rglob("*.parquet")) == []


@pytest.mark.parametrize("ids", [("2-0",), ("2-0", "9-0")])
def test_archive_reports_no_position_for_a_recreated_stream(
    shop: Shop, ids: tuple[str, ...]
) -> None:
    """The archive reports no position for a recreated stream.

    Entries that are reported as archived may be trimmed, but these are in no table yet.
    """
    from streamqd.spark.pipelines.archive import Archiver

    if shop.server.version < (7,) and len(ids) > 1:
        pytest.skip("Redis 6.2 does not count: ids of the past may be those of the one stream")
    shop.fill(0, 1, 4)
    shop.fill(1, 1, 2)
    shop.batch(shop.reader())
    shop.link.execute("DEL", shop.keys.stream("access", 0))
    shop.add(0, *ids)
    settings = replace(config.Settings(), redis=shop.server.settings)
    archiver = Archiver(settings, shop.archive.root, pytest.fail, print)
    with contextlib.closing(archiver), pytest.raises(DataLossError, match="not the stream"):
        archiver.run(["access"])
    told = [shop.link.execute("HGET", shop.keys.trim("access", n), "archived") for n in (0, 1)]
    assert told == [None, b"2-0"]


def test_archive_reports_its_position_after_a_restore(shop: Shop) -> None:
    """After a restore, a run reports its position again.

    Redis keeps all entries until then, because it has no watermark.
    """
    from streamqd.spark.pipelines.archive import Archiver

    class SparkError(Exception):
        """Stands in for Spark's error, because no Spark is running here."""

    def spark() -> Any:
        raise SparkError

    for low in (1, 5):
        shop.fill(0, low, low + 3)
        shop.batch(shop.reader())
    trim = shop.keys.trim("access", 0)
    settings = replace(config.Settings(), redis=shop.server.settings)
    archiver = Archiver(settings, shop.archive.root, spark, print)
    with contextlib.closing(archiver):
        assert archiver.run(["access"])[0].archived == {"0": "8-0"}
        deltalake.DeltaTable(str(shop.table.folder)).restore(1)
        with pytest.raises(SparkError):  # the run stops and must archive the rest again
            archiver.run(["access"])
        assert shop.link.execute("HGET", trim, "archived") == b"8-0"
        shop.link.execute("HDEL", trim, "archived")
        with pytest.raises(SparkError):
            archiver.run(["access"])
        assert shop.link.execute("HGET", trim, "archived") == b"4-0"


@pytest.mark.parametrize(
    "command",
    [
        ("pipeline", "run", "jobs:copy", "--checkpoints"),
        ("pipeline", "sql", "--stream", "SELECT * FROM topic_access", "--checkpoint"),
    ],
)
def test_checkpoint_in_an_object_store_is_refused_before_a_write(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """`--checkpoint s3a://bucket/ck` does not create a local directory `s3a:`."""
    monkeypatch.setenv("STREAMQ_REDIS__URL", shop.server.url)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = CliRunner().invoke(cli, [*command, "s3a://bucket/ck"])
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: s3a://bucket/ck is not a directory of this machine")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ("pipeline", "archive", "--archive"),
        ("pipeline", "compact", "--archive"),
        ("pipeline", "report", "--out"),
        ("trace", "access/0/1-0", "--archive"),
    ],
)
@pytest.mark.parametrize("address", ["hdfs://host/a", "s3:/bucket/a", "s3://key:secret@bucket/a"])
def test_address_without_a_directory_is_refused_before_a_write(
    shop: Shop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    address: str,
) -> None:
    """The command refuses such an address, so it does not create a local directory for it."""
    monkeypatch.setenv("STREAMQ_REDIS__URL", shop.server.url)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = CliRunner().invoke(cli, [*command, address])
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
    assert list(Path().iterdir()) == []


def test_archive_warns_about_an_unknown_topic(shop: Shop, tmp_path: Path) -> None:
    file, folder = tmp_path / "streamq.toml", str(shop.archive.root)
    file.write_text(
        f'[redis]\nurl = "{shop.server.url}"\n[topics.later]\n'
        "[pipelines.access]\n[pipelines.later]\n[pipelines.acess]\n"
    )
    done = CliRunner().invoke(cli, ["-c", str(file), "pipeline", "archive", "--archive", folder])
    said = "topic acess does not exist, so this section has no effect"
    assert (done.exit_code, done.stderr) == (0, f"Warning: pipelines.acess: {said}\n")


def test_compaction_continues_after_a_failed_table(shop: Shop, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    for number in range(3):
        shop.fill(0, 10 * number + 1, 10 * number + 2)
        shop.batch(shop.reader())
    archive, columns = shop.archive, pa.schema([("a", pa.int64())])
    for name in ("aaa", "bbb"):
        assert archive.table(name, create=True)
    archive.derived_table("bbb", PARSED, parsed_columns())
    for kind, name in ((RAW, "aaa"), (DEAD, "bbb"), (PARSED, "bbb"), (RESULTS, "ccc")):
        archive.derived_table(name, kind, DEAD.columns() if kind is DEAD else columns)
        (archive.folder(name, kind).path / "_delta_log" / f"{0:020d}.json").write_text("{")
    archive.derived_table("ddd", RESULTS, columns)
    file = tmp_path / "streamq.toml"
    file.write_text(f'[redis]\nurl = "{shop.server.url}"\n')
    command = ["-c", str(file), "pipeline", "compact", "--archive", str(archive.root)]

    done = CliRunner().invoke(cli, [*command, "--json"])

    found = json.loads(done.stdout)
    names = ["tables/aaa", "dead_letters/bbb", "parsed/bbb", "results/ccc"]
    assert [each["topic"] for each in found["topics"]] == ["access", "bbb", "results/ddd"]
    assert (found["topics"][0]["files_before"], found["topics"][0]["files_after"]) == (3, 1)
    for each, name in zip(found["problems"], names, strict=True):
        assert each.startswith(f"{archive.root}/{name} cannot be read: ")
    assert done.exit_code == 1
    assert done.stderr.count("Error: ") == 4
    assert done.stderr.count("\n") == 4
    with PipelineLease(shop.connect, shop.keys, "access", archive.lease_name):
        refused = CliRunner().invoke(cli, [*command, "--topic", "access", "--topic", "bbb"])
    assert (refused.exit_code, refused.stdout.split()[6:8]) == (8, ["bbb", "0"])
    assert "the pipeline archive of access is being run by" in refused.stderr


def test_message_is_found_in_the_archive_without_spark(shop: Shop) -> None:
    """`trace --archive` prints the file that contains a message, or reports that none does."""
    from streamqd.spark.pipelines.lookup import find_entry

    shop.add(0, "1000-0", "1001-0", "1003-0", "1004-0")
    shop.add(1, "1001-0")
    shop.batch(shop.reader())
    folder = shop.archive.root

    found = find_entry(folder, "access", 0, "1001-0")
    assert found.found
    assert Path(found.file).is_file()
    between = find_entry(folder, "access", 0, "1002-0")
    assert (between.file, between.found) == (found.file, False)
    assert find_entry(folder, "access", 0, "2000-0").file == ""
    assert find_entry(folder, "other", 0, "1001-0").found is False
    with pytest.raises(RequestRefusedError, match="is not an archive"):
        find_entry(f"{folder}/nowhere", "access", 0, "1001-0")


def test_lookup_in_a_damaged_file_raises_one_sentence(shop: Shop) -> None:
    """A lookup in a damaged file raises one sentence.

    An error of Arrow is not an OSError, but it must not appear with its traceback either.
    """
    from streamqd.spark.pipelines.lookup import find_entry

    shop.add(0, "1000-0", "1001-0")
    shop.batch(shop.reader())
    found = find_entry(shop.archive.root, "access", 0, "1000-0")
    Path(found.file).write_bytes(b"PAR1 and not Parquet PAR1")
    with pytest.raises(ArchiveError) as caught:
        find_entry(shop.archive.root, "access", 0, "1000-0")
    assert str(caught.value).startswith(f"{found.file} cannot be read: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["../a.parquet", "..%2Fa.parquet", "..%252Fa.parquet", "/a.parquet"]
)
def test_lookup_refuses_a_file_outside_of_its_table(shop: Shop, path: str) -> None:
    shop.add(0, "1000-0")
    shop.batch(shop.reader())
    log = Path(shop.table.folder.path, "_delta_log")
    values = {"date": "1970-01-01", "partition": "0"}
    added = {"path": path, "partitionValues": values, "size": 1, "modificationTime": 0}
    added |= {"dataChange": True, "stats": '{"numRecords": 1}'}
    (log / f"{shop.table.version + 1:020d}.json").write_text(json.dumps({"add": added}) + "\n")
    with pytest.raises(ArchiveError, match="which is not in its directory; restore an earlier"):
        shop.open_table().files()
