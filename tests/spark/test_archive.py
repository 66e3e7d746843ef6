"""The archive on a real Spark: each entry once, despite faults in between."""

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
from streamqd.errors import Refused
from streamqd.spark.pipelines import archive, tables
from streamqd.spark.pipelines.archive import Archiver, Done
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
Entry = tuple[str, int, str, bytes]  # topic, partition, id, value


class KilledError(Exception):
    """Replaces SIGKILL where the process must survive."""


class Desk:
    """Topics, their ledger, and an archive of them."""

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

    def run(self, *wanted: str, **changes: Any) -> dict[str, Done]:
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

    def plain(self) -> Counter[Entry]:
        return Counter(
            (topic, row["partition"], row["id"], row["value"])
            for topic in Archive(self.folder).topics()
            for row in self.rows(topic)
        )

    def by_spark(self) -> Counter[Entry]:
        archive = Archive(self.folder)
        found: Counter[Entry] = Counter()
        for topic in archive.topics():
            frame = tables.cold(self.spark, topic, archive.table(topic))
            rows = frame.select("topic", "partition", "id", "value").collect()
            found += Counter((row[0], row[1], row[2], bytes(row[3])) for row in rows)
        return found

    def archived(self, topic: str, partition: int) -> str | None:
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
def desk(link: Connection, keys: Keys, server: Server, spark: Any, tmp_path: Path) -> Desk:
    made = Desk(link, keys, server, spark, tmp_path / "archive")
    made.topic("access")
    return made


def test_everything_once_over_several_runs(desk: Desk) -> None:
    desk.topic("orders", 1)
    desk.add("access", 0, 700)  # across midnight
    desk.add("access", 1, 5)
    desk.add("orders", 0, 3)
    done = desk.run()
    assert {name: each.rows for name, each in done.items()} == {"access": 705, "orders": 3}
    assert desk.plain() == desk.by_spark() == desk.ledger
    assert len({row["date"] for row in desk.rows("access")}) == 2
    assert desk.archived("access", 1) == done["access"].archived["1"] == desk.last("access", 1)

    desk.run()
    assert desk.asked == 2, "without anything new Spark is not even started"

    desk.link.execute("HSET", desk.keys.meta("access"), "partitionCount", 3)
    desk.add("access", 0, 4)
    desk.add("access", 2, 6)
    assert desk.run("access", batch_rows=4)["access"].batches == 3
    assert desk.plain() == desk.by_spark() == desk.ledger
    assert desk.archived("access", 2) == desk.last("access", 2)
    left = desk.link.execute("KEYS", "*:p[ir][po]*")
    assert left == [], "leases and progress are gone"


def test_a_row_is_all_of_an_entry(desk: Desk) -> None:
    desk.add("access", 1, 1)
    desk.run()
    row = desk.rows("access")[0]
    ms, seq = map(int, desk.last("access", 1).split("-"))
    assert (row["id_ms"], row["id_seq"], row["key"]) == (ms, seq, b"k")
    assert row["timestamp"].timestamp() * 1000 == ms
    assert row["headers"] == [{"key": "a", "value": b"1"}]
    assert row["fields"] == [("sentAt", b"7")]
    assert (str(row["date"]), row["partition"]) == ("2025-11-20", 1)


@pytest.mark.parametrize("point", POINTS)
def test_broken_off_at(desk: Desk, point: str) -> None:
    desk.add("access", 0, 6)
    desk.add("access", 1, 6)

    def blow() -> None:
        raise KilledError

    undo = strike(point, 2, blow)
    try:
        with pytest.raises(KilledError):
            desk.run(batch_rows=4)
    finally:
        undo()
    seen = desk.plain()
    assert max(seen.values()) == 1
    assert seen <= desk.ledger
    desk.add("access", 0, 3)
    desk.run(batch_rows=4)
    assert desk.plain() == desk.by_spark() == desk.ledger
    assert desk.archived("access", 0) == desk.last("access", 0)


def test_archive_continues_after_the_table_despite_trimming(desk: Desk) -> None:
    desk.add("access", 0, 5)
    desk.run()
    desk.link.execute("XTRIM", desk.keys.stream("access", 0), "MAXLEN", 0)
    desk.add("access", 0, 2)
    desk.add("access", 1, 2)
    assert desk.run()["access"].rows == 4
    assert desk.plain() == desk.ledger


def test_entries_trimmed_before_archiving_are_reported(desk: Desk) -> None:
    desk.add("access", 0, 4)
    desk.run()
    desk.add("access", 0, 6)
    stream = desk.keys.stream("access", 0)
    kept = [entry.decode() for entry, _ in desk.link.execute("XRANGE", stream, "-", "+")][-2:]
    desk.link.execute("XTRIM", stream, "MINID", kept[0])
    with pytest.raises(DataLossError, match=r"4 entries of access partition 0 .* were trimmed"):
        desk.run()
    assert desk.run(allow_loss=True)["access"].missing == 4
    assert sum(desk.plain().values()) == 6
    desk.add("access", 0, 1)
    assert desk.run()["access"].rows == 1


def test_a_task_that_fails_leaves_nothing(desk: Desk) -> None:
    """The error of a task is reported in its own words, and the files of others stay in staging."""
    desk.add("access", 0, 4)
    desk.run()
    desk.add("access", 0, 4)
    desk.add("access", 1, 4)
    backlog = archive._Run.backlog

    def overtaken(self: archive._Run, *given: Any) -> int:
        """Trim after the driver has checked that nothing is gone."""
        found = backlog(self, *given)
        desk.link.execute("XTRIM", desk.keys.stream("access", 0), "MAXLEN", "=", 1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive._Run, "backlog", overtaken)
        with pytest.raises(PipelineError, match=r"3 entries of access partition 0 .* were trimmed"):
            desk.run()
    assert sum(desk.plain().values()) == 4
    assert desk.run(allow_loss=True)["access"].missing == 3
    assert sum(desk.plain().values()) == 9


def test_a_hostile_name_in_the_registry_harms_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """S1: a topic named `..` erased the whole archive."""
    desk.topic("orders", 1)
    desk.add("orders", 0, 50)
    desk.run("orders")
    for name in (b"..", b".", b"../orders", b"a/../..", b"\xff", b""):
        desk.link.execute("SADD", desk.keys.registry(), name)
    # A topic that an earlier version allowed, with entries of its own.
    desk.link.run(topics.creation(desk.keys, "..", Topic(partitions=1)))
    desk.link.execute("XADD", desk.keys.stream("..", 0), "*", "payload", "x")
    desk.link.execute("XTRIM", desk.keys.stream("orders", 0), "MAXLEN", 0)
    before = sorted(path for path in desk.folder.rglob("*") if path.is_file())

    done = desk.run()

    assert sorted(done) == ["access", "orders"]
    assert [path for path in before if not path.exists()] == []
    assert desk.plain() == desk.ledger
    told = [each.getMessage() for each in caplog.records if "is skipped" in each.getMessage()]
    assert len(told) == 6
    assert all(desk.keys.registry() in each for each in told)
    with pytest.raises(Refused, match=r"the topic \.\. does not exist"):
        desk.run("..")


def test_two_runs_do_not_meet(desk: Desk) -> None:
    desk.add("access", 0, 1)
    archiver = desk.archiver()
    other = PipelineLease(
        lambda: connect(desk.settings.redis, timeout=10.0, name="test:other"),
        desk.keys,
        "access",
        archiver.archive.lease_name,
    )
    with other, pytest.raises(Refused, match=f"being run by process {os.getpid()} on"):
        archiver.run()
    assert archiver.run()[0].rows == 1
    archiver.close()


@pytest.mark.slow
def test_killed_and_run_again(desk: Desk, server: Server, tmp_path: Path) -> None:
    """Real kills. Each run continues where the previous one was killed."""
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{server.url}"\n', "utf-8")
    for number, point in enumerate(POINTS):
        desk.add("access", number % 2, 5)
        command = [sys.executable, "-m", "tests.support.killed_archive", point, "1"]
        command += ["--config", str(tmp_path / "streamq.toml"), "pipeline", "archive"]
        command += ["--archive", str(desk.folder), "--batch-rows", "3"]
        command += ["--master", "local[1]", *QUICK]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        seen = desk.plain()
        assert seen <= desk.ledger
        for partition in range(2):
            told = desk.archived("access", partition)
            assert told is None or ("access", partition, told) in {each[:3] for each in seen}
    desk.run()
    assert desk.plain() == desk.by_spark() == desk.ledger
