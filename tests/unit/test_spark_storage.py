"""The archive on disk, without Spark: writing parts, publishing, every place to be killed at."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamqd.errors import Refused
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import Manifest, ManifestError, Range
from streamqd.spark.pipelines.storage import Archive
from tests.support.quick import examples

pa = pytest.importorskip("pyarrow")
dataset = pytest.importorskip("pyarrow.dataset")
parquet = pytest.importorskip("pyarrow.parquet")

from streamqd.spark.pipelines import parts  # noqa: E402
from streamqd.spark.pipelines.parts import PartWriter, files_of  # noqa: E402

DAY = 86_400_000


def table(ids: Iterable[int]) -> Any:
    ms = list(ids)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k"] * len(ms)),
            "value": pa.array([b"v%d" % each for each in ms]),
            "id": pa.array([f"{each}-0" for each in ms]),
            "id_ms": pa.array(ms, pa.int64()),
            "id_seq": pa.array([0] * len(ms), pa.int64()),
            "timestamp": pa.array([each * 1000 for each in ms], pa.timestamp("us", tz="UTC")),
        }
    )


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive", create=True)


def prepared(archive: Archive, number: int, low: int, high: int) -> tuple[Path, Manifest]:
    """Batch `number` with entries (low, high], ready to be published."""
    staged = archive.stage("access", number)
    writer = PartWriter(staged / "tasks" / "0", 0, 0)
    writer.write(table(range(low + 1, high + 1)))
    reports = writer.finish()
    ready = archive.gather(staged, [(Path(each["source"]), each["path"]) for each in reports])
    ranges = {0: Range((low, 0), (high, 0), high - low)}
    return ready, Manifest("access", number, number, 0, ranges, files_of(reports))


def compacted(archive: Archive) -> tuple[Path, Manifest]:
    """All batches in one, ready to replace them."""
    old = archive.current("access")
    staged = archive.stage("access", old[-1].last, 1)
    writer = PartWriter(staged / "tasks" / "0", 0, 0, generation=1)
    for path in archive.files(old):
        for batch in dataset.dataset(path).to_batches():
            writer.write(batch)
    reports = writer.finish()
    ready = archive.gather(staged, [(Path(each["source"]), each["path"]) for each in reports])
    return ready, manifests.merged(old, files_of(reports), 0)


def plain(archive: Archive) -> list[int]:
    """What a reader sees that knows nothing of manifests."""
    found = dataset.dataset(archive.root, format="parquet", partitioning="hive").to_table()
    return sorted(found["id_ms"].to_pylist())


def by_manifest(archive: Archive) -> list[int]:
    files = archive.files(archive.current("access"))
    return sorted(dataset.dataset(files).to_table()["id_ms"].to_pylist())


# --- parts ----------------------------------------------------------------------------------------


def test_a_part_for_each_date(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, 3, 1)
    writer.write(table([]))
    writer.write(table([DAY - 2, DAY - 1, DAY, 3 * DAY]))
    writer.write(table([3 * DAY + 7]))
    reports = {each["path"]: each for each in writer.finish()}
    assert {
        path: (each["rows"], each["first_ms"], each["last_ms"]) for path, each in reports.items()
    } == {
        "dt=1970-01-01/partition=1/part-g0-00003-00000.zstd.parquet": (2, DAY - 2, DAY - 1),
        "dt=1970-01-02/partition=1/part-g0-00003-00001.zstd.parquet": (1, DAY, DAY),
        "dt=1970-01-04/partition=1/part-g0-00003-00002.zstd.parquet": (2, 3 * DAY, 3 * DAY + 7),
    }
    assert {each["partition"] for each in reports.values()} == {1}
    read = dataset.dataset(tmp_path, partitioning="hive").to_table()
    assert {*read.column_names} >= {"dt", "partition", "key", "value", "id", "timestamp"}
    assert read["timestamp"].to_pylist()[0].tzinfo is not None
    assert min(read["timestamp"].to_pylist()) == dt.datetime(
        1970, 1, 1, 23, 59, 59, 998_000, dt.UTC
    )


def test_long_files_are_divided(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, 0, 0, rows_max=10)
    for first in range(0, 100, 5):
        writer.write(table(range(first, first + 5)))
    reports = writer.finish()
    assert [each["rows"] for each in reports] == [10] * 10
    assert dataset.dataset([each["source"] for each in reports]).count_rows() == 100


def test_what_is_held_back_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GROUP_BYTES", 1000)
    writer = PartWriter(tmp_path, 0, 0)
    for number in range(1, 101):
        writer.write(table([number]))
    file = parquet.ParquetFile(writer.finish()[0]["source"])
    sizes = [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)]
    assert len(sizes) > 1
    assert max(sizes) < 30


def test_rows_in_disorder_are_refused(tmp_path: Path) -> None:
    """A file's first and last id are taken from its ends."""
    writer = PartWriter(tmp_path, 0, 0)
    writer.write(table([5, 6]))
    with pytest.raises(ManifestError, match="comes behind"):
        writer.write(table([4]))


# --- publishing -----------------------------------------------------------------------------------


def test_published_is_seen_by_every_reader(archive: Archive) -> None:
    for number in range(3):
        archive.publish(*prepared(archive, number, 10 * number, 10 * number + 10))
    assert plain(archive) == by_manifest(archive) == list(range(1, 31))
    archive.verify(archive.current("access"))
    assert Archive(archive.root).id == archive.id
    assert archive.topics() == ["access"]


def test_what_another_run_published_is_not_replaced(archive: Archive) -> None:
    archive.publish(*prepared(archive, 0, 0, 10))
    with pytest.raises(Refused, match="another run"):
        archive.publish(*prepared(archive, 0, 0, 12))
    assert plain(archive) == list(range(1, 11))


def test_killed_before_the_rename(archive: Archive) -> None:
    prepared(archive, 0, 0, 10)
    assert archive.current("access") == []
    archive.recover("access")
    assert not list((archive.root / manifests.STAGING).iterdir())
    archive.publish(*prepared(archive, 0, 0, 10))
    assert plain(archive) == list(range(1, 11))


def test_killed_between_rename_and_manifest(archive: Archive) -> None:
    archive.publish(*prepared(archive, 0, 0, 10))
    ready, new = prepared(archive, 1, 10, 20)
    archive.publish(ready, new)
    (archive.root / new.path).unlink()
    assert len(archive.current("access")) == 1
    archive.recover("access")
    assert [each.last for each in archive.current("access")] == [0, 1]
    assert plain(archive) == by_manifest(archive) == list(range(1, 21))


def test_strange_folders_stop_it(archive: Archive) -> None:
    archive.publish(*prepared(archive, 0, 0, 10))
    folder = archive.root / "topic=access" / "batch=7"
    shutil.copytree(folder.with_name("batch=0"), folder)
    with pytest.raises(ManifestError, match="batch=7 belongs to no manifest"):
        archive.recover("access")


def test_missing_and_short_files_are_found(archive: Archive) -> None:
    archive.publish(*prepared(archive, 0, 0, 10))
    path = archive.files(archive.current("access"))[0]
    pa.parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ManifestError, match="has 1 rows, not 10"):
        archive.verify(archive.current("access"))
    path.unlink()
    with pytest.raises(ManifestError, match="missing"):
        archive.verify(archive.current("access"))


def test_a_folder_of_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(Refused, match="neither empty"):
        Archive(tmp_path, create=True)
    with pytest.raises(Refused, match="no archive"):
        Archive(tmp_path / "nowhere")


# --- compaction -----------------------------------------------------------------------------------


def three(archive: Archive) -> None:
    for number in range(3):
        archive.publish(*prepared(archive, number, 10 * number, 10 * number + 10))


def test_compacted_takes_the_place_of_its_batches(archive: Archive) -> None:
    three(archive)
    archive.replace(*compacted(archive))
    assert plain(archive) == by_manifest(archive) == list(range(1, 31))
    assert len(archive.files(archive.current("access"))) == 1
    assert archive.purge("access", grace=3600) == 0
    assert archive.purge("access", grace=-1) == 3
    assert plain(archive) == by_manifest(archive) == list(range(1, 31))
    archive.publish(*prepared(archive, 3, 30, 40))
    archive.recover("access")
    assert plain(archive) == list(range(1, 41))


@pytest.mark.parametrize("renames", range(5))
def test_a_compaction_killed_at_any_rename_is_finished(
    archive: Archive, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(archive)
    ready, new = compacted(archive)
    done = 0
    rename = Path.rename

    def limited(self: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            raise KeyboardInterrupt
        done += 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", limited)
    if renames < 4:
        with pytest.raises(KeyboardInterrupt):
            archive.replace(ready, new)
    else:
        archive.replace(ready, new)
    monkeypatch.undo()
    assert by_manifest(archive) == list(range(1, 31))
    archive.recover("access")
    assert plain(archive) == by_manifest(archive) == list(range(1, 31))
    assert len(archive.current("access")) == 1


# --- names that lead elsewhere --------------------------------------------------------------------

HOSTILE = ["..", ".", "", "../access", "a/../..", "/", ".hidden", "access/..", "a\0b", "\udc80"]


def everything(archive: Archive) -> dict[str, bytes]:
    return {
        str(path.relative_to(archive.root)): path.read_bytes()
        for path in sorted(archive.root.rglob("*"))
        if path.is_file()
    }


@given(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=10)))
@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example("..")
def test_no_name_of_a_topic_harms_another(archive: Archive, topic: str) -> None:
    """S1: whatever a topic is called, what is archived of others stays as it is."""
    if not archive.topics():
        archive.publish(*prepared(archive, 0, 0, 3))
    before = everything(archive)
    for deed in (archive.recover, archive.current, lambda name: archive.purge(name, 0.0)):
        with suppress(Refused):
            deed(topic)
    with suppress(Refused):
        archive.stage(topic, 0)
    assert everything(archive) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("topic", "../access"), ("topic", ".."), ("first", "0/../.."), ("last", -1)),
        *(("generation", "0/.."), ("generation", True)),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(
    archive: Archive, name: str, value: Any
) -> None:
    """S1: what a manifest says of places is checked before anything is done there."""
    archive.publish(*prepared(archive, 0, 0, 3))
    path = archive.root / archive.current("access")[0].path
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ManifestError, match="cannot be read"):
        archive.current("access")


@pytest.mark.parametrize("path", ["../x.parquet", "/etc/passwd", "dt=1/../../x", "dt=1/./x", ""])
def test_a_file_outside_of_its_batch_is_refused(archive: Archive, path: str) -> None:
    """S1: so are the files of a manifest."""
    archive.publish(*prepared(archive, 0, 0, 3))
    where = archive.root / archive.current("access")[0].path
    document = json.loads(where.read_text())
    document["files"][0]["path"] = path
    where.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="not one of a file in its batch"):
        archive.files(archive.current("access"))


def test_a_manifest_of_another_topic_is_refused(archive: Archive) -> None:
    """S1: a manifest counts for the topic in whose folder it lies."""
    archive.publish(*prepared(archive, 0, 0, 3))
    shutil.copytree(archive.root / "_manifest/access", archive.root / "_manifest/orders")
    with pytest.raises(ManifestError, match="a manifest of another topic: access"):
        archive.purge("orders", 0.0)


def test_a_link_in_the_archive_is_not_followed(archive: Archive, tmp_path: Path) -> None:
    """S1: a link below the root would have another folder written to and removed."""
    (tmp_path / "elsewhere" / "access").mkdir(parents=True)
    (tmp_path / "elsewhere" / "access" / "kept").touch()
    (archive.root / "_staging").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="symbolic link"):
        archive.stage("access", 0)
    with pytest.raises(Refused, match="symbolic link"):
        archive.recover("access")
    assert (tmp_path / "elsewhere" / "access" / "kept").exists()
