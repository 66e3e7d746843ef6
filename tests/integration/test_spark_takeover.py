"""An archive of format 1 becomes Delta tables: every row once, whenever that is broken off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from streamqd.errors import Refused
from streamqd.spark import rows as columns
from streamqd.spark.offsets import Position
from streamqd.spark.pipelines import takeover
from streamqd.spark.pipelines.storage import Archive, ArchiveError, ArchiveTable
from streamqd.spark.pipelines.takeover import take_over
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from tests.support.servers import Server

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
deltalake = pytest.importorskip("deltalake")

EVERY = columns.columns(dead=False, headers=True, fields=True)
SCHEMA = columns.arrow_schema([each for each in EVERY if each.name not in ("topic", "partition")])


class KilledError(Exception):
    """Stands in for SIGKILL where the process must live on."""


class Earlier:
    """An archive as format 1 had it, of the topic `access`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "_manifest" / "access").mkdir(parents=True)
        (root / "_archive.json").write_text('{"format": 1, "id": "0123456789abcdef"}\n')

    def batch(self, first: int, last: int, low: int, high: int, generation: int = 0) -> Path:
        """Batches `first` to `last`: the entries (low, high] of partition 0 in one file."""
        file = f"dt=1970-01-01/partition=0/part-g{generation}-00000-00000.zstd.parquet"
        folder = self.root / f"topic=access/batch={last}"
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = [*range(low + 1, high + 1)]
        table = pa.Table.from_pylist(
            [{"id": f"{each}-0", "id_ms": each, "id_seq": 0, "value": b"v"} for each in ids], SCHEMA
        )
        parquet.write_table(table, path)
        held: dict[str, Any] = {"path": file, "partition": 0, "rows": len(ids), "size": 100}
        held |= {"first": f"{low + 1}-0", "last": f"{high}-0"}
        document = {
            "format": 1, "topic": "access", "first": first, "last": last, "generation": generation,
            "written_unix_ms": 0, "rows": len(ids), "size": 100, "folder": "",
            "partitions": {
                "0": {"start": f"{low}-0", "end": f"{high}-0", "rows": len(ids), "passed": high}
            },
            "files": [held],
        }  # fmt: skip
        self.manifest(first, last, generation).write_text(json.dumps(document))
        return path

    def manifest(self, first: int, last: int, generation: int) -> Path:
        name = f"{first:010d}-{last:010d}.g{generation}.json"
        return self.root / "_manifest" / "access" / name


@pytest.fixture
def earlier(tmp_path: Path) -> Earlier:
    """Batches 0 and 1 were compacted into one, 2 was not."""
    made = Earlier(tmp_path / "archive")
    made.batch(0, 0, 0, 2)
    replaced = made.batch(1, 1, 2, 5)
    (made.root / "_retired/access").mkdir(parents=True)
    replaced.rename(made.root / "_retired/access/old.parquet")
    made.batch(0, 1, 0, 5, generation=1)
    made.batch(2, 2, 5, 9)
    return made


@pytest.fixture
def run(earlier: Earlier, server: Server, keys: Keys) -> Any:
    def taken(*wanted: str) -> list[takeover.TakenOver]:
        def opened() -> Connection:
            return connect(server.settings, timeout=10.0, name="test")

        return take_over(Archive(earlier.root), opened, keys, wanted)

    return taken


def seen(root: Path) -> list[int]:
    table = deltalake.DeltaTable(str(Archive(root).folder("access"))).to_pyarrow_table()
    return sorted(table["id_ms"].to_pylist())


def test_every_row_is_taken_over_and_none_is_copied(earlier: Earlier, run: Any) -> None:
    with pytest.raises(Refused, match="--from-manifests"):
        Archive(earlier.root).table("access", create=True)
    before = {path.stat().st_ino for path in earlier.root.glob("topic=access/**/*.parquet")}
    [done] = run()
    assert (done.topic, done.rows, done.files) == ("access", 9, 2)
    assert seen(earlier.root) == [*range(1, 10)]
    table = Archive(earlier.root).table("access")
    assert table is not None
    assert table.positions == {("access", 0): Position((9, 0), 9)}
    assert {table.locate(each).stat().st_ino for each in table.files()} <= before
    assert sorted(each.name for each in earlier.root.iterdir() if any(each.glob("*"))) == ["tables"]
    assert run() == []
    with pytest.raises(Refused, match="no manifests of access"):
        run("access")


@pytest.mark.parametrize("point", ["append", "appended", "remove_below"])
def test_broken_off_and_done_again(
    earlier: Earlier, run: Any, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = ArchiveTable.append

    def blow(*args: Any) -> None:
        if point == "appended":
            append(*args)
        raise KilledError

    with monkeypatch.context() as patch:
        if point == "remove_below":
            patch.setattr(takeover, "remove_below", blow)
        else:
            patch.setattr(ArchiveTable, "append", blow)
        with pytest.raises(KilledError):
            run()
    with pytest.raises(Refused, match="--from-manifests"):
        Archive(earlier.root).table("access", create=True)
    if point != "append":  # another program compacts what is committed
        folder = str(Archive(earlier.root).folder("access"))
        deltalake.DeltaTable(folder).optimize.compact(partition_filters=[("partition", "=", "0")])
    run()
    assert seen(earlier.root) == [*range(1, 10)]


@pytest.mark.parametrize("compacted", [True, False])
def test_what_was_deleted_from_the_table_since_is_kept(
    earlier: Earlier, run: Any, compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blow(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(takeover, "remove_below", blow)
        with pytest.raises(KilledError):
            run()
    table = deltalake.DeltaTable(str(Archive(earlier.root).folder("access")))
    if compacted:
        table.optimize.compact()
    table.delete("id_ms < 3")
    before = {*earlier.root.rglob("*")}
    with pytest.raises(Refused, match=r"lacks date=.*all was kept; move"):
        run()
    assert before == {*earlier.root.rglob("*")}


@pytest.mark.parametrize("other", [True, False])
def test_what_is_not_in_the_table_is_kept(earlier: Earlier, run: Any, other: bool) -> None:
    """The table of the topic has entries of its own: the manifests go further, or beside it."""
    earlier.root.joinpath("_manifest").rename(earlier.root / "aside")
    table = Archive(earlier.root).table("access", create=True)
    assert table is not None
    table.append([], {("access", 0): Position((99, 0), 99) if other else Position((3, 0), 3)})
    earlier.root.joinpath("aside").rename(earlier.root / "_manifest")
    before = {each for each in earlier.root.rglob("*") if "tables" not in each.parts}
    with pytest.raises(Refused, match="all was kept; move") as caught:
        run()
    assert ("lacks date=" if other else "ends before them in partition 0") in str(caught.value)
    assert before == {each for each in earlier.root.rglob("*") if "tables" not in each.parts}


@pytest.mark.parametrize("option", [("--every", "1h"), ("--batch-rows", "7")])
def test_options_of_a_run_are_refused_with_a_takeover(
    earlier: Earlier, option: tuple[str, str]
) -> None:
    words = ("pipeline", "archive", "--archive", str(earlier.root), "--from-manifests", *option)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert f"leave {option[0]} out" in result.stderr


def test_a_file_of_a_broken_compaction_is_found_in_staging(earlier: Earlier, run: Any) -> None:
    file = "dt=1970-01-01/partition=0/part-g1-00000-00000.zstd.parquet"
    staged = earlier.root / "_staging/access/batch=1.g1/batch" / file
    staged.parent.mkdir(parents=True)
    (earlier.root / "topic=access/batch=1" / file).rename(staged)
    run()
    assert seen(earlier.root) == [*range(1, 10)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"topic": ".."}, "cannot be read"),
        ({"last": -1}, "cannot be read"),
        ({"generation": True}, "cannot be read"),
        ({"format": 7}, "format 7"),
        ({"files": [{"path": "../x.parquet"}]}, "not one of a file in its batch"),
        ({"first": 4, "last": 4}, "no manifest holds some of the batches"),
        ({"partitions": {"0": {"start": "6-0", "end": "9-0", "passed": 9}}}, "a gap"),
    ],
)
def test_a_bad_manifest_stops_it_and_nothing_is_lost(
    earlier: Earlier, run: Any, change: dict[str, Any], what: str
) -> None:
    path = earlier.manifest(2, 2, 0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = {each for each in earlier.root.rglob("*") if "tables" not in each.parts}
    with pytest.raises(ArchiveError, match=what):
        run()
    assert before == {each for each in earlier.root.rglob("*") if "tables" not in each.parts}


def test_a_missing_or_short_file_stops_it(earlier: Earlier, run: Any) -> None:
    path = next(earlier.root.glob("topic=access/batch=2/**/*.parquet"))
    whole = path.read_bytes()
    os.unlink(path)  # noqa: PTH108 - a second name may stay
    with pytest.raises(ArchiveError, match="is missing"):
        run()
    path.write_bytes(whole)
    document = json.loads(earlier.manifest(2, 2, 0).read_text())
    document["files"][0]["rows"] = 5
    earlier.manifest(2, 2, 0).write_text(json.dumps(document))
    with pytest.raises(ArchiveError, match="has 4 rows, not 5"):
        run()
    assert path.exists()
