"""Other readers than Spark read an archive that grows or is compacted, or whose writer dies."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamqd.spark.pipelines.storage import Archive, ArchiveError
from tests.support.growing_archive import ROWS
from tests.support.waiting import wait_until

deltalake = pytest.importorskip("deltalake")
duckdb = pytest.importorskip("duckdb")
polars = pytest.importorskip("polars")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
KILLS = 12


def read_with_pyarrow(folder: str) -> list[int]:
    table = deltalake.DeltaTable(folder).to_pyarrow_dataset().to_table(columns=["id_ms"])
    return table["id_ms"].to_pylist()  # type: ignore[no-any-return]


def read_with_polars(folder: str) -> list[int]:
    return polars.scan_delta(folder).select("id_ms").collect()["id_ms"].to_list()  # type: ignore[no-any-return]


def read_with_pandas(folder: str) -> list[int]:
    return deltalake.DeltaTable(folder).to_pandas(columns=["id_ms"])["id_ms"].to_list()  # type: ignore[no-any-return]


def read_with_duckdb(folder: str) -> list[int]:
    files = deltalake.DeltaTable(folder).file_uris()
    found = duckdb.sql("SELECT id_ms FROM read_parquet($files)", params={"files": files})
    return [each for (each,) in found.fetchall()]


READERS: tuple[Callable[[str], list[int]], ...] = (
    read_with_pyarrow,
    read_with_polars,
    read_with_pandas,
    read_with_duckdb,
)


def test_every_engine_reads_whole_batches_once(tmp_path: Path) -> None:
    chance = random.Random(7)
    archive = Archive(tmp_path / "archive", create=True)
    folder = str(archive.folder("access"))
    most = 0

    def batch() -> int:
        try:
            table = archive.table("access")
        except ArchiveError:  # the writer was killed before its first commit
            return 0
        return 0 if table is None else table.note.batch

    for number in range(KILLS):
        before = batch()
        command = [sys.executable, "-m", "tests.support.growing_archive", str(archive.root)]
        with subprocess.Popen(command, cwd=ROOT) as running:
            for read in (*READERS, READERS[number % 4]):
                wait_until(lambda b=before: batch() > b, timeout=60, what="a batch")
                seen = read(folder)
                assert sorted(seen) == [*range(1, len(seen) + 1)], read.__name__
                assert len(seen) % ROWS == 0
                assert len(seen) >= most
                most, before = len(seen), batch()
            for _ in range(chance.randrange(2000)):
                pass  # the kill came in the middle of a run
            running.kill()
    table = archive.table("access")
    assert table is not None
    assert len(read_with_pyarrow(folder)) == ROWS * table.note.batch
    assert len(table.files()) < table.note.batch / 2, "it was compacted during the reads"
    table.verify(table.files())
