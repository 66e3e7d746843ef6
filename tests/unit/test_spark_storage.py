"""The archive's tables, without Spark: writing files, committing them, and failures."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamqd import config
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.spark import rows as columns
from streamqd.spark.location import location
from streamqd.spark.offsets import Position
from streamqd.spark.pipelines import compact, storage
from streamqd.spark.pipelines.storage import Archive, ArchiveError, ArchiveTable
from tests.support.quick import examples

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
deltalake = pytest.importorskip("deltalake")

from streamqd.spark.pipelines import parts  # noqa: E402
from streamqd.spark.pipelines.parts import PartWriter, WrittenFile  # noqa: E402

DAY = 86_400_000
PLACE = ("access", 0)


def table(ids: Iterable[int]) -> Any:
    ms = list(ids)
    values = {
        "key": [b"k"] * len(ms),
        "value": [b"v%d" % each for each in ms],
        "id": [f"{each}-0" for each in ms],
        "id_ms": ms,
        "id_seq": [0] * len(ms),
        "timestamp": [each * 1000 for each in ms],
        "headers": [[{"key": "a", "value": b"1"}]] * len(ms),
        "fields": [[("sentAt", b"7")]] * len(ms),
    }
    every = columns.columns(dead=False, headers=True, fields=True)
    schema = columns.arrow_schema([each for each in every if each.name in values])
    return pa.RecordBatch.from_pydict(values, schema=schema)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive", create=True)


def open_table(archive: Archive, topic: str = "access") -> ArchiveTable:
    found = archive.table(topic, create=True)
    assert found is not None
    return found


def write_files(into: ArchiveTable, low: int, high: int, partition: int = 0) -> list[WrittenFile]:
    """Write files with the entries (low, high] to the table's directory."""
    writer = PartWriter(into.folder, partition)
    writer.write(table(range(low + 1, high + 1)))
    return writer.finish()


def add(into: ArchiveTable, low: int, high: int) -> list[WrittenFile]:
    files = write_files(into, low, high)
    into.append(files, {PLACE: Position((high, 0), high)})
    return files


def read_ids(archive: Archive) -> list[int]:
    """Return the rows that an independent reader of Delta tables finds."""
    found = deltalake.DeltaTable(str(archive.folder("access"))).to_pyarrow_table(columns=["id_ms"])
    return sorted(found["id_ms"].to_pylist())


# --- files ----------------------------------------------------------------------------------------


def test_part_writer_writes_one_file_per_date(tmp_path: Path) -> None:
    writer = PartWriter(location(tmp_path), 1)
    writer.write(table([]))
    writer.write(table([DAY - 2, DAY - 1, DAY, 3 * DAY]))
    writer.write(table([3 * DAY + 7]))
    files = writer.finish()
    assert [(each.date, each.rows, each.first[0], each.last[0]) for each in files] == [
        ("1970-01-01", 2, DAY - 2, DAY - 1),
        ("1970-01-02", 1, DAY, DAY),
        ("1970-01-04", 2, 3 * DAY, 3 * DAY + 7),
    ]
    for each in files:
        assert Path(each.path).parent.as_posix() == f"date={each.date}/partition=1"
        assert (tmp_path / each.path).stat().st_size == each.size
    assert len({each.path for each in [*files, *rewrite_files(tmp_path)]}) == 4


def rewrite_files(folder: Path) -> list[WrittenFile]:
    writer = PartWriter(location(folder), 1)
    writer.write(table([DAY - 2]))
    return writer.finish()


def test_ids_after_the_last_date_belong_to_it() -> None:
    assert parts.partition_date((1 << 63) - 1) == "9999-12-31"


def test_long_files_are_split(tmp_path: Path) -> None:
    writer = PartWriter(location(tmp_path), 0, rows_max=10)
    for first in range(0, 100, 5):
        writer.write(table(range(first, first + 5)))
    assert [each.rows for each in writer.finish()] == [10] * 10


def test_buffered_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GROUP_BYTES", 1000)
    writer = PartWriter(location(tmp_path), 0)
    for number in range(1, 101):
        writer.write(table([number]))
    file = parquet.ParquetFile(tmp_path / writer.finish()[0].path)
    sizes = [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)]
    assert len(sizes) > 1
    assert max(sizes) < 30


def test_unordered_rows_are_refused(tmp_path: Path) -> None:
    """Rows out of order are refused, because a file's first and last row define its range."""
    writer = PartWriter(location(tmp_path), 0)
    writer.write(table([5, 6]))
    with pytest.raises(ValueError, match="follows the later entry"):
        writer.write(table([4]))


def test_link_within_a_table_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "date=1970-01-01").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestRefusedError, match="symbolic link"):
        PartWriter(location(tmp_path / "table"), 0).write(table([1]))
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- commits --------------------------------------------------------------------------------------


def test_commit_is_visible_to_every_engine(archive: Archive) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    made = open_table(archive)
    add(made, 0, 3)
    write_files(made, 3, 9)  # the run was killed, so no commit names the files
    folder = str(made.folder)
    rows = deltalake.DeltaTable(folder).to_pyarrow_dataset()
    assert rows.count_rows() == 3
    assert duckdb.sql("SELECT count(*), max(id_ms), min(date) FROM rows").fetchall() == [
        (3, 3, dt.date(1970, 1, 1))
    ]
    names = ", ".join(f"'{each}'" for each in deltalake.DeltaTable(folder).file_uris())
    assert duckdb.sql(f"SELECT sum(id_ms) FROM read_parquet([{names}])").fetchall() == [(6,)]
    assert polars.read_delta(folder).filter(polars.col("partition") == 0)["id"].to_list() == [
        *("1-0", "2-0", "3-0")
    ]
    assert deltalake.DeltaTable(folder).to_pandas()["value"].to_list() == [b"v1", b"v2", b"v3"]
    row = rows.to_table().to_pylist()[0]
    assert (row["headers"], row["fields"]) == ([{"key": "a", "value": b"1"}], [("sentAt", b"7")])


def test_positions_are_read_from_the_newest_commit(archive: Archive) -> None:
    made = open_table(archive)
    assert made.positions == {}
    add(made, 0, 3)
    made.append([], {("access", 1): Position((5, 7), None)})  # every entry is gone
    expected = {PLACE: Position((3, 0), 3), ("access", 1): Position((5, 7), None)}
    assert made.positions == open_table(archive).positions == expected
    assert archive.topics() == ["access"]


def test_second_concurrent_run_is_refused(archive: Archive) -> None:
    """The second run is refused by the conflict check.

    That check is the fence, because the lease is only advisory.
    """
    first, second = open_table(archive), open_table(archive)
    files = write_files(second, 0, 3)
    add(first, 0, 3)
    with pytest.raises(RequestRefusedError, match="another run wrote"):
        second.append(files, {PLACE: Position((3, 0), 3)})
    assert read_ids(archive) == [1, 2, 3]


def test_simultaneous_runs_commit_only_once(archive: Archive) -> None:
    open_table(archive)
    tables = [open_table(archive) for _ in range(4)]
    files = [write_files(each, 0, 5) for each in tables]
    ready, done = threading.Barrier(4), []

    def run(number: int) -> None:
        ready.wait()
        with suppress(RequestRefusedError):
            tables[number].append(files[number], {PLACE: Position((5, 0), 5)})
            done.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(done) == 1
    assert read_ids(archive) == [1, 2, 3, 4, 5]


def test_missing_and_damaged_files_are_not_committed(archive: Archive) -> None:
    made = open_table(archive)
    [file] = write_files(made, 0, 3)
    for spoilt, what in (
        (file._replace(path=file.path + "x"), "is missing"),
        (file._replace(rows=4), "has 3 rows, not 4"),
    ):
        with pytest.raises(ArchiveError, match=what):
            made.append([spoilt], {PLACE: Position((3, 0), 3)})
    (made.folder.path / file.path).write_bytes(b"PAR1 nonsense")
    with pytest.raises(ArchiveError, match="cannot be read"):
        made.append([file], {PLACE: Position((3, 0), 3)})
    assert (open_table(archive).version, open_table(archive).positions) == (0, {})


@pytest.mark.parametrize("path", ["../x.parquet", "/etc/passwd", "date=1/../../x", ""])
def test_file_outside_of_its_table_is_refused(archive: Archive, path: str) -> None:
    made = open_table(archive)
    [file] = write_files(made, 0, 3)
    with pytest.raises(RequestRefusedError, match="not a path below"):
        made.append([file._replace(path=path)], {})


# --- other programs -------------------------------------------------------------------------------


def test_other_programs_may_compact_and_vacuum(archive: Archive) -> None:
    made = open_table(archive)
    add(made, 0, 3)
    add(made, 3, 6)
    other = deltalake.DeltaTable(str(made.folder))
    other.optimize.compact()
    other.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    again = open_table(archive)
    assert again.positions == {PLACE: Position((6, 0), 6)}
    again.verify(again.files())
    add(made, 6, 7)  # a run that has not refreshed its view since then
    assert read_ids(archive) == [1, 2, 3, 4, 5, 6, 7]


def test_archive_continues_from_a_restored_version(archive: Archive) -> None:
    made = open_table(archive)
    for low in (0, 3, 6):
        add(made, low, low + 3)
    deltalake.DeltaTable(str(made.folder)).restore(2)
    again = open_table(archive)
    assert again.positions == {PLACE: Position((6, 0), 6)}
    add(again, 6, 8)
    assert read_ids(archive) == [1, 2, 3, 4, 5, 6, 7, 8]
    earliest = deltalake.DeltaTable(str(made.folder)).history()[-2]["timestamp"]
    moment = dt.datetime.fromtimestamp(earliest / 1000, dt.UTC)
    deltalake.DeltaTable(str(made.folder)).restore(moment)
    assert open_table(archive).positions == {PLACE: Position((3, 0), 3)}


def write_spark_restore(folder: Path, version: int, given: Any) -> None:
    """Write the commit that Spark makes for a restore."""
    info = {"timestamp": 2_000_000_000_000, "operation": "RESTORE", "operationParameters": given}
    (folder / "_delta_log" / f"{version:020d}.json").write_text(json.dumps({"commitInfo": info}))


@pytest.mark.parametrize("null", [None, "null"])
def test_restore_by_spark_resets_the_positions(archive: Archive, null: str | None) -> None:
    made = open_table(archive)
    for low in (0, 3, 6):
        add(made, low, low + 3)
    write_spark_restore(made.folder.path, 4, {"version": "2", "timestamp": null})
    assert open_table(archive).positions == {PLACE: Position((6, 0), 6)}
    moment = dt.datetime.fromtimestamp(storage_time(made, 1) / 1000, dt.UTC).isoformat()
    write_spark_restore(made.folder.path, 5, {"version": null, "timestamp": moment})
    assert open_table(archive).positions == {PLACE: Position((3, 0), 3)}


def storage_time(made: ArchiveTable, version: int) -> int:
    """Return when a version was committed (unix ms)."""
    listed = deltalake.DeltaTable(str(made.folder)).history()
    return int(next(each["timestamp"] for each in listed if each.get("version") == version))


@pytest.mark.parametrize(
    "given",
    [
        {"version": "null", "timestamp": "2026-01-01 00:00:00"},  # without a time zone
        {"version": "two"},
        {"version": None, "timestamp": None},
        {"datetime": "x"},
        {},
    ],
)
def test_unreadable_restore_is_refused(archive: Archive, given: dict[str, Any]) -> None:
    made = open_table(archive)
    add(made, 0, 3)
    write_spark_restore(made.folder.path, 2, given)
    what = "restore in version 2 of the table cannot be read.*restore that version by its number"
    with pytest.raises(ArchiveError, match=what):
        open_table(archive)
    write_spark_restore(made.folder.path, 3, {"version": "1"})
    assert open_table(archive).positions == {PLACE: Position((3, 0), 3)}


def test_table_with_unsupported_features_is_refused(archive: Archive) -> None:
    made = open_table(archive)
    protocol: dict[str, Any] = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol |= {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    path = made.folder.path / "_delta_log" / f"{1:020d}.json"
    path.write_text(json.dumps({"protocol": protocol}))
    with pytest.raises(ArchiveError, match="another program added deletionVectors"):
        open_table(archive)


def add_column_mapping(schema: Any, numbers: Iterator[int]) -> None:
    """Add the metadata that Spark gives each field if column mapping is enabled."""
    for field in schema["fields"]:
        number = next(numbers)
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": f"col-{number}",
        }
        inner = field["type"]
        while isinstance(inner, dict) and inner["type"] == "array":
            inner = inner["elementType"]
        if isinstance(inner, dict) and inner["type"] == "struct":
            add_column_mapping(inner, numbers)


@pytest.mark.parametrize("mode", ["name", "id"])
def test_older_column_mapping_is_refused(archive: Archive, mode: str) -> None:
    """An older column mapping is refused.

    Protocols without features have only a number, so the table's property decides.
    """
    made = open_table(archive)
    log = made.folder.path / "_delta_log"
    first = [json.loads(each) for each in (log / f"{0:020d}.json").read_text().splitlines()]
    metadata = next(each["metaData"] for each in first if "metaData" in each)
    metadata["configuration"]["delta.columnMapping.mode"] = mode
    schema = json.loads(metadata["schemaString"])
    add_column_mapping(schema, itertools.count(1))
    metadata["schemaString"] = json.dumps(schema)
    protocol = {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}
    lines = (json.dumps(each) for each in (protocol, {"metaData": metadata}))
    (log / f"{1:020d}.json").write_text("\n".join(lines))
    with pytest.raises(ArchiveError, match="another program added columnMapping"):
        open_table(archive)


def test_files_of_an_interrupted_creation_are_no_table(tmp_path: Path) -> None:
    root = tmp_path / "archive"
    root.mkdir()
    (root / "_archive.json.tmp").write_text("{")
    archive = Archive(root, create=True)
    log = archive.folder("access").path / "_delta_log"
    log.mkdir(parents=True)
    assert archive.topics() == []
    assert archive.table("access") is None
    add(open_table(archive), 0, 3)
    assert archive.topics() == ["access"]
    assert read_ids(archive) == [1, 2, 3]


@pytest.mark.parametrize("name", ["a%20b", "a#b", "a?b", "a*b", "a[b]", "a{b}", "a\\b"])
def test_path_with_special_characters_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestRefusedError, match=r"contains ., which has a special meaning"):
        Archive(tmp_path / name, create=True)
    assert list(tmp_path.iterdir()) == []


def test_unusable_folder_error_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/nope")):
        with pytest.raises(RequestRefusedError, match="cannot be"):
            Archive(path, create=True)
    with pytest.raises(RequestRefusedError, match="cannot be an archive: Not a directory"):
        Archive(tmp_path / "file")


def test_added_columns_do_no_harm(archive: Archive) -> None:
    made = open_table(archive)
    other = deltalake.DeltaTable(str(made.folder))
    other.alter.add_columns([deltalake.Field("note", deltalake.schema.PrimitiveType("string"))])
    add(open_table(archive), 0, 3)
    assert read_ids(archive) == [1, 2, 3]


def test_foreign_table_is_left_alone(archive: Archive) -> None:
    deltalake.write_deltalake(str(archive.folder("access")), pa.table({"x": [1]}))
    with pytest.raises(ArchiveError, match="a table with other columns; move it away"):
        archive.table("access", create=True)
    folder = str(archive.folder("orders"))
    schema = storage.arrow_schema()
    deltalake.DeltaTable.create(folder, schema, partition_by=["date", "partition"])
    with pytest.raises(ArchiveError, match=r"no archive of orders wrote"):
        archive.table("orders", create=True)
    assert deltalake.DeltaTable(str(archive.folder("access"))).count() == 1


def test_unreadable_table_raises_one_sentence(archive: Archive) -> None:
    made = open_table(archive)
    log = made.folder.path / "_delta_log"
    for spoilt in ('{"commitInfo":{"streamqd":"junk"}}', "junk"):
        (log / f"{1:020d}.json").write_text(spoilt)
        with pytest.raises(ArchiveError, match="cannot be read") as caught:
            archive.table("access")
        assert "\n" not in str(caught.value)
    for note in ('{"format":9}', '{"format":2,"topic":"x"}', "[]", '{"format":2,"topic":"access"}'):
        (log / f"{1:020d}.json").write_text(json.dumps({"commitInfo": {"streamqd": note}}))
        with pytest.raises(ArchiveError, match="record of the last batch"):
            archive.table("access")


def test_folder_that_is_not_an_archive_is_refused(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(RequestRefusedError, match="neither empty nor an archive"):
        Archive(tmp_path / "other", create=True)
    with pytest.raises(RequestRefusedError, match="is not an archive"):
        Archive(tmp_path / "nothing")
    for address in ("s3://bucket/archive", "s3:/bucket/archive"):
        with pytest.raises(InvalidRequestError, match="is not a valid directory URL"):
            Archive(Path(address), create=True)
    (archive.folder("access").path / "strange").mkdir(parents=True)
    with pytest.raises(RequestRefusedError, match="neither empty nor a table"):
        archive.table("access", create=True)
    assert archive.table("orders") is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted: not root, or in a container without rights")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_error_is_one_sentence_and_loses_nothing(small_disk: Path) -> None:
    archive = Archive(small_disk / "archive", create=True)
    made = open_table(archive)
    add(made, 0, 3)
    add(made, 3, 6)
    files = write_files(made, 6, 9)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for work in (
        lambda: made.append(files, {PLACE: Position((9, 0), 9)}),
        lambda: compact.rewrite(made, 1 << 20),
        lambda: archive.table("orders", create=True),
    ):
        with pytest.raises(ArchiveError, match=r"cannot be written: .*No space left") as caught:
            work()
        assert "\n" not in str(caught.value)
    assert read_ids(archive) == [1, 2, 3, 4, 5, 6]
    ballast.unlink()
    again = open_table(archive)
    again.append(files, {PLACE: Position((9, 0), 9)})
    compact.rewrite(again, 1 << 20)
    assert read_ids(archive) == [*range(1, 10)]


def all_paths(archive: Archive) -> set[Path]:
    return set(archive.root.path.parent.rglob("*"))


@given(
    topic=st.one_of(
        st.text(alphabet="./a\0_-", max_size=8),
        st.sampled_from(["..", ".", "../access", "access/..", "/etc", "", "a" * 300, "é"]),
    )
)
@settings(
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example("..")
def test_topic_name_never_affects_another_archive(archive: Archive, topic: str) -> None:
    """The name of a topic can never change the archive of another topic."""
    if not archive.topics():
        add(open_table(archive), 0, 3)
    before = all_paths(archive)
    with suppress(RequestRefusedError):
        made = archive.table(topic, create=True)
        assert made is not None
        assert made.folder.path.parent.parent == archive.root.path
    assert before <= all_paths(archive)
    assert {
        each for each in all_paths(archive) - before if archive.root.path not in each.parents
    } == (set())


def test_link_in_the_archive_is_not_followed(archive: Archive, tmp_path: Path) -> None:
    """A link below the root is not followed, because rows would be written to another directory."""
    (tmp_path / "elsewhere").mkdir()
    (archive.root.path / "tables").mkdir()
    (archive.root.path / "tables" / "access").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestRefusedError, match="symbolic link"):
        archive.table("access", create=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- few files of many ----------------------------------------------------------------------------


def test_small_files_are_merged_automatically(archive: Archive) -> None:
    made = open_table(archive)
    for low in range(compact.FAN_IN):
        add(made, low, low + 1)
        compact.merge_small_files(made, 1)
    assert len(made.files()) == 1
    assert read_ids(archive) == [*range(1, compact.FAN_IN + 1)]
    assert open_table(archive).positions == {PLACE: Position((compact.FAN_IN, 0), compact.FAN_IN)}


def test_small_files_of_many_dates_are_compacted_in_one_commit(archive: Archive) -> None:
    """Small files are compacted in one commit.

    Any producer may send messages of many dates, and each commit examines all files.
    """
    made = open_table(archive)
    dates = 20
    for number in range(1, compact.FAN_IN + 1):
        writer = PartWriter(made.folder, 0)
        writer.write(table(day * DAY + number for day in range(dates)))
        made.append(writer.finish(), {PLACE: Position(((dates - 1) * DAY + number, 0), number)})
    version = made.version
    compact.merge_small_files(made, 1)
    assert (len(made.files()), made.version) == (dates, version + 1)
    assert len(read_ids(archive)) == dates * compact.FAN_IN


def test_running_reader_finishes_within_the_grace_period(archive: Archive) -> None:
    made = open_table(archive)
    for low in range(3):
        add(made, low, low + 1)
    before = deltalake.DeltaTable(str(made.folder))
    old, new = compact.rewrite(made, 1 << 20)
    assert (len(old), len(new), new[0].rows) == (3, 1, 3)
    orphans = write_files(made, 3, 4)
    assert compact.purge(made, 3600.0) == 0
    assert before.to_pyarrow_table().num_rows == 3
    assert compact.purge(made, 0.0) == 4
    assert not (made.folder.path / orphans[0].path).exists()
    assert read_ids(archive) == [1, 2, 3]
    assert open_table(archive).positions == {PLACE: Position((3, 0), 3)}


def test_foreign_files_are_never_purged(archive: Archive, tmp_path: Path) -> None:
    """Files of other programs and targets of links are never purged."""
    made = open_table(archive)
    [file] = add(made, 0, 1)
    orphan = made.folder.path / write_files(made, 1, 2)[0].path
    outside = tmp_path / "outside" / "partition=0"
    outside.mkdir(parents=True)
    here = (made.folder.path / file.path).parent
    kept = [outside / "a.parquet", made.folder.path / "notes.txt", here / "notes.txt"]
    kept.append(made.folder.path / "copy" / "b.parquet")
    kept[-1].parent.mkdir()
    for each in kept:
        each.touch()
    (made.folder.path / "date=2000-01-01").symlink_to(outside.parent)
    (made.folder.path / "date=2000-01-02").mkdir()
    (made.folder.path / "date=2000-01-02" / "partition=0").symlink_to(outside)
    (here / "linked.parquet").symlink_to(kept[0])
    assert compact.purge(made, 0.0) == 1
    assert not orphan.exists()
    assert all(each.exists() for each in kept)
    assert (here / "linked.parquet").is_symlink()
    assert read_ids(archive) == [1]


def test_undeletable_file_is_logged_in_one_sentence(small_disk: Path) -> None:
    archive = Archive(small_disk / "archive", create=True)
    made = open_table(archive)
    [orphan] = write_files(made, 0, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ArchiveError, match=r"parquet cannot be deleted: Read-only file system"):
        compact.purge(made, 0.0)
    assert Path(made.locate(orphan)).exists()


def test_compaction_tolerates_a_concurrent_commit(archive: Archive) -> None:
    made = open_table(archive)
    for low in range(3):
        add(made, low, low + 1)
    add(open_table(archive), 3, 7)
    old, new = compact.rewrite(made, 1 << 20)
    assert (len(old), [each.rows for each in new]) == (3, [3])
    assert read_ids(archive) == [*range(1, 8)]
    assert open_table(archive).positions == {PLACE: Position((7, 0), 7)}


def test_failed_merge_stops_a_run_only_on_damage(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = open_table(archive)
    files = [add(made, low, low + 1)[0] for low in range(compact.FAN_IN)]
    gone = made.folder.path / files[0].path
    gone.rename(gone.with_suffix(".aside"))
    compact.merge_small_files(made, 1)  # because the file cannot be read
    assert "the small files of access were not merged" in caplog.text
    gone.with_suffix(".aside").rename(gone)
    gone.unlink()
    monkeypatch.setattr(compact, "_merge_small_files", lambda table, _: table.verify(files[:1]))
    with pytest.raises(ArchiveError, match="is missing"):
        compact.merge_small_files(made, 1)


@pytest.mark.parametrize("grace", [0.0, 3599.0, -1.0])
def test_too_short_grace_period_is_refused(archive: Archive, grace: float) -> None:
    with pytest.raises(RequestRefusedError, match="must be at least 1h"):
        compact.compact(config.Settings(), archive.root, grace=grace)


def test_table_log_does_not_grow_with_age(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_CHECKPOINT", 5)
    short = {"delta.checkpointInterval": "5", "delta.logRetentionDuration": "interval 0 days"}
    monkeypatch.setattr(storage, "_CONFIGURATION", storage._CONFIGURATION | short)
    made = open_table(archive)
    for low in range(31):
        add(made, low, low + 1)
    log = list((made.folder.path / "_delta_log").glob("*.json"))
    assert len(log) < 15
    assert read_ids(archive) == [*range(1, 32)]
    assert open_table(archive).positions == {PLACE: Position((31, 0), 31)}


# --- power loss -----------------------------------------------------------------------------------


def test_committed_files_are_synced_to_disk(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, commits and the log's checkpoint are synced before Redis gets the new position."""
    settled: set[int] = set()
    fsync = os.fsync

    def noted(number: int) -> None:
        fsync(number)
        settled.add(os.fstat(number).st_ino)

    def lost() -> list[str]:
        log = made.folder.path / "_delta_log"
        files = [made.folder.path / each.path for each in made.files()]
        folders = [
            *made.folder.path.parents[:2],
            made.folder.path,
            log,
            *(each.parent for each in files),
        ]
        kept = [*log.glob("*.json"), *log.glob("*.parquet"), *log.glob("_last_checkpoint")]
        every = [*folders, *files, *kept]
        return [each.name for each in every if each.stat().st_ino not in settled]

    monkeypatch.setattr(os, "fsync", noted)
    interval = {"delta.checkpointInterval": "5"}
    monkeypatch.setattr(storage, "_CONFIGURATION", storage._CONFIGURATION | interval)
    made = open_table(archive)
    assert lost() == []
    for low in range(11):
        add(made, low, low + 1)
        assert lost() == []
    assert list((made.folder.path / "_delta_log").glob("*.checkpoint.parquet"))
    compact.rewrite(made, 1 << 20)
    assert lost() == []
    assert len(made.files()) == 1
