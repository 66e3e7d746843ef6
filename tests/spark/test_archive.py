"""On a real Spark, each entry is archived exactly once, even if faults occur."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.config import Topic
from streamqd.errors import RequestRefusedError
from streamqd.spark.pipelines import archive, tables
from streamqd.spark.pipelines.archive import Archiver, ArchiveResult
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.queries import PipelineError
from streamqd.spark.pipelines.storage import Archive
from streamqd.spark.streams import DataLossError
from streamqd.store import topics
from streamqd.store.client import Connection, connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.killed_archive import POINTS, strike
from tests.support.servers import Server
from tests.support.spark_process import QUICK

deltalake = pytest.importorskip("deltalake")

ROOT = Path(__file__).parents[2]
START = 1_763_683_195_000  # five seconds before midnight, UTC
Entry = tuple[str, int, str, bytes]  # topic, partition, id and value


class KilledError(Exception):
    """Raised instead of SIGKILL where the process must survive."""


class ArchiveCase:
    """A set of topics with a ledger, and an archive of them."""

    def __init__(
        self, link: Connection, keys: Keys, server: Server, spark: Any, folder: Path
    ) -> None:
        self.link, self.keys, self.folder, self.spark = link, keys, folder, spark
        self.settings = replace(config.Settings(), redis=server.settings)
        self.ledger: Counter[Entry] = Counter()
        self.asked = 0
        self._next = START

    @property
    def store(self) -> Store:
        return Store(self.link, self.keys)

    def topic(self, name: str, partitions: int = 2) -> None:
        topics.create(self.store, name, Topic(partitions=partitions))

    def add(self, topic: str, partition: int, count: int) -> None:
        for _ in range(count):
            self._next += 10
            entry, value = f"{self._next}-{self._next % 3}", f"body {self._next}".encode()
            fields = ("payload", value, "key", "k", "headers", '{"a":"1"}', "sentAt", "7")
            self.link.execute("XADD", self.keys.stream(topic, partition), entry, *fields)
            self.ledger[topic, partition, entry, value] += 1

    def archiver(self, **changes: Any) -> Archiver:
        return Archiver(self.settings, self.folder, self._ask, lambda _: None, **changes)

    def run(self, *wanted: str, **changes: Any) -> dict[str, ArchiveResult]:
        archiver = self.archiver(**changes)
        try:
            return {each.topic: each for each in archiver.run(wanted)}
        finally:
            archiver.close()

    def _ask(self) -> Any:
        self.asked += 1
        return self.spark

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Return the rows that an independent reader of Delta tables sees."""
        table = deltalake.DeltaTable(str(Archive(self.folder).folder(topic)))
        found: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return found

    def reader_rows(self) -> Counter[Entry]:
        return Counter(
            (topic, row["partition"], row["id"], row["value"])
            for topic in Archive(self.folder).topics()
            for row in self.rows(topic)
        )

    def spark_rows(self) -> Counter[Entry]:
        archive = Archive(self.folder)
        found: Counter[Entry] = Counter()
        for topic in archive.topics():
            frame = tables.read_cold(self.spark, topic, archive.table(topic))
            rows = frame.select("topic", "partition", "id", "value").collect()
            found += Counter((row[0], row[1], row[2], bytes(row[3])) for row in rows)
        return found

    def archived_position(self, topic: str, partition: int) -> str | None:
        raw = self.link.execute("HGET", self.keys.trim(topic, partition), "archived")
        return None if raw is None else raw.decode()

    def last(self, topic: str, partition: int) -> str:
        return max(
            (
                entry
                for name, number, entry, _ in self.ledger
                if (name, number) == (topic, partition)
            ),
            key=lambda entry: tuple(map(int, entry.split("-"))),
        )


@pytest.fixture
def case(link: Connection, keys: Keys, server: Server, spark: Any, tmp_path: Path) -> ArchiveCase:
    made = ArchiveCase(link, keys, server, spark, tmp_path / "archive")
    made.topic("access")
    return made


def test_archive_has_each_entry_once_after_several_runs(case: ArchiveCase) -> None:
    case.topic("orders", 1)
    case.add("access", 0, 700)  # these entries continue past midnight
    case.add("access", 1, 5)
    case.add("orders", 0, 3)
    done = case.run()
    assert {name: each.rows for name, each in done.items()} == {"access": 705, "orders": 3}
    assert case.reader_rows() == case.spark_rows() == case.ledger
    assert len({row["date"] for row in case.rows("access")}) == 2
    assert (
        case.archived_position("access", 1)
        == done["access"].archived["1"]
        == case.last("access", 1)
    )

    case.run()
    assert case.asked == 2, "without anything new Spark is not even started"

    case.link.execute("HSET", case.keys.meta("access"), "partitionCount", 3)
    case.add("access", 0, 4)
    case.add("access", 2, 6)
    assert case.run("access", batch_rows=4)["access"].batches == 3
    assert case.reader_rows() == case.spark_rows() == case.ledger
    assert case.archived_position("access", 2) == case.last("access", 2)
    left = case.link.execute("KEYS", "*:p[ir][po]*")
    assert left == [], "leases and progress are gone"


def test_archive_row_contains_the_whole_entry(case: ArchiveCase) -> None:
    case.add("access", 1, 1)
    case.run()
    row = case.rows("access")[0]
    ms, seq = map(int, case.last("access", 1).split("-"))
    assert (row["id_ms"], row["id_seq"], row["key"]) == (ms, seq, b"k")
    assert row["timestamp"].timestamp() * 1000 == ms
    assert row["headers"] == [{"key": "a", "value": b"1"}]
    assert row["fields"] == [("sentAt", b"7")]
    assert (str(row["date"]), row["partition"]) == ("2025-11-20", 1)


@pytest.mark.parametrize("point", POINTS)
def test_archive_is_exact_after_an_error_at_any_point(case: ArchiveCase, point: str) -> None:
    case.add("access", 0, 6)
    case.add("access", 1, 6)

    def blow() -> None:
        raise KilledError

    undo = strike(point, 2, blow)
    try:
        with pytest.raises(KilledError):
            case.run(batch_rows=4)
    finally:
        undo()
    seen = case.reader_rows()
    assert max(seen.values()) == 1
    assert seen <= case.ledger
    case.add("access", 0, 3)
    case.run(batch_rows=4)
    assert case.reader_rows() == case.spark_rows() == case.ledger
    assert case.archived_position("access", 0) == case.last("access", 0)


def test_archive_continues_after_its_table_despite_trimming(case: ArchiveCase) -> None:
    case.add("access", 0, 5)
    case.run()
    case.link.execute("XTRIM", case.keys.stream("access", 0), "MAXLEN", 0)
    case.add("access", 0, 2)
    case.add("access", 1, 2)
    assert case.run()["access"].rows == 4
    assert case.reader_rows() == case.ledger


def test_entries_trimmed_before_archiving_are_reported(case: ArchiveCase) -> None:
    case.add("access", 0, 4)
    case.run()
    case.add("access", 0, 6)
    stream = case.keys.stream("access", 0)
    kept = [entry.decode() for entry, _ in case.link.execute("XRANGE", stream, "-", "+")][-2:]
    case.link.execute("XTRIM", stream, "MINID", kept[0])
    with pytest.raises(DataLossError, match=r"4 entries of access partition 0 .* were trimmed"):
        case.run()
    assert case.run(allow_loss=True)["access"].missing == 4
    assert sum(case.reader_rows().values()) == 6
    case.add("access", 0, 1)
    assert case.run()["access"].rows == 1


def test_failed_task_leaves_no_rows(case: ArchiveCase) -> None:
    """A failed task's error is reported verbatim, and the other tasks' files stay in staging."""
    case.add("access", 0, 4)
    case.run()
    case.add("access", 0, 4)
    case.add("access", 1, 4)
    backlog = archive._Run.backlog

    def overtaken(self: archive._Run, *given: Any) -> int:
        """Trim entries after the driver has checked that none is missing."""
        found = backlog(self, *given)
        case.link.execute("XTRIM", case.keys.stream("access", 0), "MAXLEN", "=", 1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive._Run, "backlog", overtaken)
        with pytest.raises(PipelineError, match=r"3 entries of access partition 0 .* were trimmed"):
            case.run()
    assert sum(case.reader_rows().values()) == 4
    assert case.run(allow_loss=True)["access"].missing == 3
    assert sum(case.reader_rows().values()) == 9


def test_hostile_topic_name_in_the_registry_is_skipped(
    case: ArchiveCase, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic that is named `..` does not erase the archive."""
    case.topic("orders", 1)
    case.add("orders", 0, 50)
    case.run("orders")
    for name in (b"..", b".", b"../orders", b"a/../..", b"\xff", b""):
        case.link.execute("SADD", case.keys.registry(), name)
    # A topic with a name that an earlier version allowed, which has its own entries.
    case.link.run(topics.create_call(case.keys, "..", Topic(partitions=1)))
    case.link.execute("XADD", case.keys.stream("..", 0), "*", "payload", "x")
    case.link.execute("XTRIM", case.keys.stream("orders", 0), "MAXLEN", 0)
    before = sorted(path for path in case.folder.rglob("*") if path.is_file())

    done = case.run()

    assert sorted(done) == ["access", "orders"]
    assert [path for path in before if not path.exists()] == []
    assert case.reader_rows() == case.ledger
    told = [each.getMessage() for each in caplog.records if "is skipped" in each.getMessage()]
    assert len(told) == 6
    assert all(case.keys.registry() in each for each in told)
    with pytest.raises(RequestRefusedError, match=r"topic \.\. does not exist"):
        case.run("..")


def test_concurrent_archive_run_is_refused(case: ArchiveCase) -> None:
    case.add("access", 0, 1)
    archiver = case.archiver()
    other = PipelineLease(
        lambda: connect(case.settings.redis, timeout=10.0, name="test:other"),
        case.keys,
        "access",
        archiver.archive.lease_name,
    )
    with other, pytest.raises(RequestRefusedError, match=f"being run by process {os.getpid()} on"):
        archiver.run()
    assert archiver.run()[0].rows == 1
    archiver.close()


@pytest.mark.slow
def test_archive_is_exact_after_kills(case: ArchiveCase, server: Server, tmp_path: Path) -> None:
    """Each run continues where the previous one was killed with a real SIGKILL."""
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{server.url}"\n', "utf-8")
    for number, point in enumerate(POINTS):
        case.add("access", number % 2, 5)
        command = [sys.executable, "-m", "tests.support.killed_archive", point, "1"]
        command += ["--config", str(tmp_path / "streamq.toml"), "pipeline", "archive"]
        command += ["--archive", str(case.folder), "--batch-rows", "3"]
        command += ["--master", "local[1]", *QUICK]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        seen = case.reader_rows()
        assert seen <= case.ledger
        for partition in range(2):
            told = case.archived_position("access", partition)
            assert told is None or ("access", partition, told) in {each[:3] for each in seen}
    case.run()
    assert case.reader_rows() == case.spark_rows() == case.ledger
