"""Dead letters and the history of minutes are each archived once, without Spark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.config import Topic
from streamqd.policy.fingerprint import dead_letter_fingerprint
from streamqd.store import history, topics
from streamqd.store.client import Connection
from streamqd.store.history import HistoryRow, Interval
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support import optional
from tests.support.commands import Run
from tests.support.servers import Server

pytestmark = [optional.need("pyspark", "deltalake", "msgspec", "pyarrow")]

deltalake = pytest.importorskip("deltalake")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from streamqd.spark import offsets, reader  # noqa: E402
from streamqd.spark.offsets import Position  # noqa: E402
from streamqd.spark.pipelines import compact, dead_letters, minutes  # noqa: E402
from streamqd.spark.pipelines.archive import Archiver, ArchiveResult  # noqa: E402
from streamqd.spark.pipelines.kinds import DEAD, HISTORY, first_minute_columns  # noqa: E402
from streamqd.spark.pipelines.lease import PipelineLease  # noqa: E402
from streamqd.spark.pipelines.parts import DateWriter  # noqa: E402
from streamqd.spark.pipelines.storage import Archive, ArchiveDamagedError  # noqa: E402
from tests.support.killed_archive import LETTER_POINTS, strike  # noqa: E402

ROOT = Path(__file__).parents[2]
START = 1_763_683_195_000  # five seconds before midnight, UTC
MINUTE = 60_000
FLEET = "default"


class KilledError(Exception):
    """Stands in for SIGKILL where the process has to survive."""


def fail_if_started() -> Any:
    pytest.fail("Spark was started for nothing")


class HistoryCase:
    """Dead letters and minutes with their ledger, and an archive of both."""

    def __init__(self, link: Connection, keys: Keys, server: Server, folder: Path | str) -> None:
        self.link, self.keys, self.server, self.folder = link, keys, server, folder
        self.store = Store(link, keys)
        self.settings = replace(config.Settings(), redis=server.settings)
        self.options: dict[str, str] = {}
        self.letters: Counter[tuple[str, int, str]] = Counter()
        self.minutes: Counter[tuple[str, str, str, int | None, int]] = Counter()
        self._next = START

    def write_dead_letters(
        self, topic: str, partition: int, count: int, **fields: str
    ) -> list[str]:
        """Write dead letters. Return their IDs."""
        made = []
        for _ in range(count):
            self._next += 1_000
            body = {"payload": b"p", "key": "k", "group": "hits", "attempts": "3"}
            body |= {"errorClass": "ValueError", "handler": "weblog:count", **fields}
            flat = [part for pair in body.items() for part in pair]
            entry = f"{self._next}-0"
            self.link.execute("XADD", self.keys.dlq(topic, partition), entry, *flat)
            self.letters[topic, partition, entry] += 1
            made.append(entry)
        return made

    def minute(self, instance: str, number: int, *assignments: HistoryRow) -> None:
        """Write an entry of an instance for a minute, numbered from START."""
        rows = [
            HistoryRow(*each)
            for each in sorted({(assignment.topic, assignment.group) for assignment in assignments})
        ]
        for row in rows:
            for assignment in assignments:
                if (assignment.topic, assignment.group) == (row.topic, row.group):
                    row.counts = {
                        name: row.counts[name] + assignment.counts[name] for name in row.counts
                    }
        until = (START // MINUTE + number + 1) * MINUTE + 120
        written = Interval("", instance, until, 60.0, rows, assignments=assignments)
        history.append(self.store, FLEET, written, 10 * 365 * 86_400.0)
        for assignment in assignments:
            key = (
                instance,
                assignment.topic,
                assignment.group,
                assignment.partition,
                until // MINUTE - 1,
            )
            self.minutes[key] += assignment.counts["acked"]

    def run(self, *wanted: str) -> dict[str, ArchiveResult]:
        """Archive, and raise the first problem, as the command does."""
        with closing(
            Archiver(self.settings, self.folder, fail_if_started, lambda _: None)
        ) as archiver:
            done = {each.topic: each for each in archiver.run(wanted)}
            for problem in archiver.problems.values():
                raise problem
            return done

    def break_off(self, point: str) -> None:
        """Archive, and fail at the given point of the first commit."""

        def blow() -> None:
            raise KilledError

        undo = strike(point, 1, blow)
        try:
            with pytest.raises(KilledError):
                self.run()
        finally:
            undo()

    def rows(self, kind: Any, name: str) -> list[dict[str, Any]]:
        """Return the rows that an independent reader of Delta tables finds."""
        folder = Archive(self.folder, options=self.options).folder(name, kind)
        if not folder.has_table():
            return []
        table = deltalake.DeltaTable(str(folder), storage_options=self.options or None)
        found: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return found

    def archived_letters(self) -> Counter[tuple[str, int, str]]:
        return Counter(
            (topic, row["partition"], row["id"])
            for topic in Archive(self.folder, options=self.options).names(DEAD)
            for row in self.rows(DEAD, topic)
        )

    def archived_minutes(self) -> Counter[tuple[str, str, str, int | None, int]]:
        found: Counter[tuple[str, str, str, int | None, int]] = Counter()
        for row in self.rows(HISTORY, FLEET):
            minute = round(row["minute"].timestamp()) // 60
            key = (row["instance"], row["topic"], row["group"], row["partition"], minute)
            found[key] += row["handled"]
        return found

    def mark(self, topic: str, partition: int) -> str | None:
        raw = self.link.execute("HGET", self.keys.trim(topic, partition), "dead_archived")
        return None if raw is None else raw.decode()


@pytest.fixture
def case(link: Connection, keys: Keys, server: Server, tmp_path: Path) -> Iterator[HistoryCase]:
    made = HistoryCase(link, keys, server, tmp_path / "archive")
    topics.create(made.store, "access", Topic(partitions=2))
    yield made
    link.execute("DEL", keys.history(FLEET))


def assignment(partition: int, acked: int, **figures: Any) -> HistoryRow:
    counts = dict.fromkeys(history.COUNTS, 0) | {"acked": acked}
    return HistoryRow("access", "hits", partition, "weblog:count", counts, **figures)


# --- dead letters ---------------------------------------------------------------------------------


def test_dead_letters_are_archived_once_and_survive_removal(case: HistoryCase) -> None:
    topics.create(case.store, "orders", Topic(partitions=1))
    first = case.write_dead_letters("access", 0, 7)  # their times are on both sides of midnight
    case.write_dead_letters("access", 1, 2, fingerprint="told")
    done = case.run()
    assert {name: each.dead_letters for name, each in done.items()} == {"access": 9, "orders": 0}
    assert case.archived_letters() == case.letters
    assert case.mark("access", 0) == first[-1]
    assert not (Path(case.folder) / "dead_letters" / "orders").exists()

    case.link.execute("XDEL", case.keys.dlq("access", 0), *first)
    assert case.run()["access"].dead_letters == 0
    case.write_dead_letters("access", 0, 1)
    assert case.run("access")["access"].dead_letters == 1
    assert case.archived_letters() == case.letters
    assert len({str(row["date"]) for row in case.rows(DEAD, "access")}) == 2


def test_dead_letter_row_has_its_failure(case: HistoryCase) -> None:
    fields = {
        "originalId": "5-1",
        "failedAt": str(START),
        "timestamp": str(START - 2_000),
        "reason": "attempts",
        "errorMessage": "no",
        "traceback": 'Traceback\n  File "/srv/weblog.py", line 9, in count\nValueError: no',
        "other": "x",
    }
    case.write_dead_letters("access", 1, 1, **fields)
    case.run()
    [row] = case.rows(DEAD, "access")
    assert (row["error_class"], row["error_message"], row["handler"]) == (
        *("ValueError", "no", "weblog:count"),
    )
    assert (row["original_id"], row["reason"], row["attempts"], row["group"]) == (
        *("5-1", "attempts", 3, "hits"),
    )
    assert (row["failed_at"] - row["original_timestamp"]).total_seconds() == 2.0
    assert (row["value"], row["key"], row["fields"]) == (b"p", b"k", [("other", b"x")])
    written = {name.encode(): value.encode() for name, value in fields.items()}
    written |= {b"errorClass": b"ValueError", b"handler": b"weblog:count"}
    assert row["fingerprint"] == dead_letter_fingerprint(written)


def test_damaged_file_of_dead_letters_is_not_reported_to_redis(case: HistoryCase) -> None:
    case.write_dead_letters("access", 0, 2)

    case.break_off("committed")
    [file] = (Path(case.folder) / "dead_letters" / "access").rglob("*.parquet")
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(ArchiveDamagedError, match="is missing"):
        case.run()
    assert case.mark("access", 0) is None
    file.write_bytes(kept)
    case.run()
    assert case.mark("access", 0) is not None


def test_invalid_dead_letters_and_history_affect_no_others(case: HistoryCase) -> None:
    topics.create(case.store, "orders", Topic(partitions=1))
    for topic in ("access", "orders"):
        case.write_dead_letters(topic, 0, 3)
    case.minute("web-1", 0, assignment(0, 1))
    Archive(case.folder, create=True)
    for table in (f"history/{FLEET}", "dead_letters/access"):
        folder = Path(case.folder) / table
        folder.mkdir(parents=True)
        (folder / "stray").write_text("x", "utf-8")
    with closing(Archiver(case.settings, case.folder, fail_if_started, lambda _: None)) as archiver:
        done = {each.topic: each.dead_letters for each in archiver.run()}
    assert done == {"access": 0, "orders": 3}
    assert list(archiver.problems) == ["access:dlq", case.keys.history(FLEET)]
    texts = [str(each) for each in archiver.problems.values()]
    assert "dead letters of access are not archived: " in texts[0]
    assert "the history is not archived: " in texts[1]
    assert all("is neither empty nor a table" in each for each in texts), texts

    def started() -> Any:
        raise KilledError

    # Entries are archived before dead letters.
    case.link.execute("XADD", case.keys.stream("access", 0), "*", "payload", "p")
    with closing(Archiver(case.settings, case.folder, started, lambda _: None)) as archiver:
        with pytest.raises(KilledError):
            archiver.run()
        assert not archiver.problems


@pytest.mark.parametrize("point", LETTER_POINTS)
def test_dead_letters_are_exact_after_an_error_at(case: HistoryCase, point: str) -> None:
    case.write_dead_letters("access", 0, 2)
    case.run()
    case.write_dead_letters("access", 0, 3)
    case.write_dead_letters("access", 1, 2)

    case.break_off(point)
    seen = case.archived_letters()
    assert seen <= case.letters
    told = case.mark("access", 0)
    assert told is not None
    assert seen["access", 0, told] == 1
    case.write_dead_letters("access", 1, 1)
    case.run()
    assert case.archived_letters() == case.letters
    assert case.mark("access", 1) == max(entry for _, number, entry in case.letters if number)


def test_dead_letters_and_minutes_are_exact_after_kills(case: HistoryCase, tmp_path: Path) -> None:
    """Dead letters and minutes are archived exactly once despite real kills.

    Dead letters are deleted as soon as they count as archived.
    """
    (tmp_path / "streamq.toml").write_text(f'[redis]\nurl = "{case.server.url}"\n', "utf-8")
    command = [sys.executable, "-m", "tests.support.killed_archive"]
    for number, (point, batch) in enumerate((p, b) for b in (1, 2) for p in LETTER_POINTS):
        case.write_dead_letters("access", number % 2, 3)
        case.minute("web-1", number, assignment(0, 5 + number), assignment(1, number))
        if point == "told_dead" and batch == 2:
            continue  # a run reports dead letters only once after it starts
        run = [*command, point, str(batch), "--config", str(tmp_path / "streamq.toml")]
        run += ["pipeline", "archive", "--archive", str(case.folder)]
        killed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert case.archived_letters() <= case.letters
        assert case.archived_minutes().keys() <= case.minutes.keys()
        for partition in range(2):
            if told := case.mark("access", partition):
                assert case.archived_letters()["access", partition, told] == 1
                key = case.keys.dlq("access", partition)
                old = [entry for entry, _ in case.link.execute("XRANGE", key, "-", told)]
                if old:
                    case.link.execute("XDEL", key, *old)
    case.run()
    assert case.archived_letters() == case.letters
    assert case.archived_minutes() == case.minutes


def test_dead_letters_are_committed_in_portions(
    case: HistoryCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead letters are committed in portions, so a kill loses only those not committed yet.

    A portion may end within a partition.
    """
    monkeypatch.setattr(dead_letters, "PORTION_ROWS", 1)
    monkeypatch.setattr(reader, "BATCH_ROWS", 1)
    first = case.write_dead_letters("access", 0, 40)  # the first page has 32 of them
    case.write_dead_letters("access", 1, 2)

    case.break_off("committed")
    assert case.archived_letters() == Counter({("access", 0, entry): 1 for entry in first[:32]})
    assert case.run()["access"].dead_letters == 10
    assert case.archived_letters() == case.letters
    assert case.mark("access", 0) == first[-1]


@pytest.mark.parametrize("later", [False, True])
def test_dead_letters_after_a_failover_are_archived(case: HistoryCase, later: bool) -> None:
    """Dead letters after a failover are archived.

    The new master has one of three, and its clock is slow, so that the next ID is before the
    position.
    """
    kept, lost, last = case.write_dead_letters("access", 0, 3)
    case.run()
    dlq, trim = case.keys.dlq("access", 0), case.keys.trim("access", 0)
    [[_, fields]] = case.link.execute("XRANGE", dlq, kept, kept)
    case.link.execute("DEL", dlq)
    case.link.execute("XADD", dlq, kept, *fields)
    case.link.execute("HSET", trim, "dead_archived", kept)
    new = f"{lost.partition('-')[0]}-7"
    case.link.execute("XADD", dlq, new, *fields)
    case.letters["access", 0, new] += 1
    if later:
        case.write_dead_letters("access", 0, 1)  # IDs reach the position before the next run

    case.break_off("committed")
    case.run()
    assert case.archived_letters() == case.letters
    assert last in {row["id"] for row in case.rows(DEAD, "access")}
    assert case.mark("access", 0) == (max(id_ for _, _, id_ in case.letters) if later else new)
    assert case.run()["access"].dead_letters == 0


@pytest.mark.parametrize("field", ["dlq", "trim"])
def test_dead_letter_key_of_a_wrong_type_affects_no_history(case: HistoryCase, field: str) -> None:
    """The history is archived, even if a key has another type or a field is not an ID."""
    topics.create(case.store, "orders", Topic(partitions=1))
    case.write_dead_letters("orders", 0, 2)
    case.write_dead_letters("access", 0, 1)
    case.run()
    if field == "dlq":
        if case.server.version < (7,):
            pytest.skip("Redis 6.2 does not count entries, so the record of trimming is needed")
        case.link.execute("DEL", case.keys.dlq("access", 0))
        case.link.execute("SET", case.keys.dlq("access", 0), "x")
    else:
        case.link.execute("HSET", case.keys.trim("access", 0), "dead_archived", "x")
    case.write_dead_letters("orders", 0, 1)
    with closing(Archiver(case.settings, case.folder, fail_if_started, lambda _: None)) as archiver:
        done = {each.topic: each.dead_letters for each in archiver.run()}
    assert done == {"access": 0, "orders": 1}
    assert list(archiver.problems) == ["access:dlq"]
    assert "dead letters of access are not archived: " in str(archiver.problems["access:dlq"])


def test_two_archives_do_not_share_positions(case: HistoryCase, tmp_path: Path) -> None:
    case.write_dead_letters("access", 0, 2)
    case.run()
    other = HistoryCase(case.link, case.keys, case.server, tmp_path / "other")
    assert other.run()["access"].dead_letters == 2
    assert other.archived_letters() == case.letters


def test_dead_letters_of_a_recreated_topic_are_archived(case: HistoryCase) -> None:
    case.write_dead_letters("access", 0, 2)
    case.run()
    case.link.execute("DEL", case.keys.dlq("access", 0), case.keys.trim("access", 0))
    case.write_dead_letters("access", 0, 1)
    assert case.run()["access"].dead_letters == 1
    assert case.archived_letters() == case.letters


def test_archive_in_a_bucket_is_exact_after_errors(case: HistoryCase) -> None:
    pytest.importorskip("moto")
    from tests.support.s3 import BucketServer

    with BucketServer() as buckets:
        case.folder, case.options = "s3://bucket/history", dict(buckets.options)
        stored = config.ArchiveStore(json.dumps(case.options))
        case.settings = replace(case.settings, archive=stored)
        for number, point in enumerate(LETTER_POINTS):
            case.write_dead_letters("access", number % 2, 2)
            case.minute("web-1", number, assignment(0, 3))
            case.break_off(point)
            assert case.archived_letters() <= case.letters
        case.run()
        assert case.run()["access"].dead_letters == 0
        assert case.archived_letters() == case.letters
        assert case.archived_minutes() == case.minutes
        done, problems = compact.compact(case.settings, case.folder)
        assert problems == []
        assert len(done) == 3
        assert case.archived_letters() == case.letters


def test_compact_merges_dead_letters_and_minutes(case: HistoryCase) -> None:
    for number in range(3):
        case.write_dead_letters("access", 1, 2)
        case.minute("web-1", number, assignment(0, 1))
        case.run()
    done, problems = compact.compact(case.settings, case.folder)
    assert problems == []
    assert {"access", "dead_letters/access", f"history/{FLEET}"} <= {each.topic for each in done}
    assert case.archived_letters() == case.letters
    assert case.archived_minutes() == case.minutes


# --- the history ----------------------------------------------------------------------------------


def test_minutes_are_archived_once_with_their_quantiles(case: HistoryCase) -> None:
    case.minute("web-1", 0, assignment(0, 90, lag=4, oldest_ms=1_500, handled={10: 89, 20: 1}))
    case.minute("web-2", 0, assignment(1, 3))
    case.minute("web-1", 1)  # a minute in which nothing happened
    case.run()
    case.minute("web-1", 2, assignment(0, 7))
    case.run()
    case.run("access")
    assert case.archived_minutes() == case.minutes
    row = next(each for each in case.rows(HISTORY, FLEET) if each["handled"] == 90)
    assert (row["partition"], row["handler"], row["lag"]) == (0, "weblog:count", 4)
    assert (row["oldest_seconds"], row["covered_seconds"]) == (1.5, 60.0)
    fast, slow = (1 << 20) / 1e9, (1 << 30) / 1e9
    assert row["handling"] == [(fast, 89), (slow, 1)]
    assert (row["handling_p50"], row["handling_p95"], row["handling_p99"]) == (fast, fast, slow)
    assert row["minute"].timestamp() == START // MINUTE * 60


def test_history_rows_have_the_minutes_of_their_entry(case: HistoryCase) -> None:
    """Each row has the minute of its entry.

    One housekeeper starts and exits within a minute, and another one writes after an outage.
    """
    first = START // MINUTE * MINUTE
    for until, seconds, acked in ((first + 60_120, 10.0, 5), (first + 80_000, 20.0, 7)):
        written = Interval(
            "", "web-1", until, seconds, assignments=[assignment(0, acked, lag=acked)]
        )
        history.append(case.store, FLEET, written, 10 * 365 * 86_400.0)
    late = Interval(
        "", "web-1", first + 5 * MINUTE + 120, 180.0, assignments=[assignment(0, 8, lag=9)]
    )
    history.append(case.store, FLEET, late, 10 * 365 * 86_400.0)
    case.run()
    rows = sorted(case.rows(HISTORY, FLEET), key=lambda row: row["minute"])
    found = [
        (round(row["minute"].timestamp() * 1000) - first, row["handled"], row["lag"])
        for row in rows
    ]
    assert found == [
        (0, 5, 5),
        (MINUTE, 7, None),  # a stop before the minute is complete
        *((2 * MINUTE, 2, None), (3 * MINUTE, 3, None), (4 * MINUTE, 3, 9)),
    ]
    assert [row["covered_seconds"] for row in rows] == [10.0, 20.0, 60.0, 60.0, 60.0]


def test_history_rows_have_the_quantiles_of_delays(case: HistoryCase) -> None:
    case.minute(
        "web-1", 0, assignment(0, 100, delays={0: 90, 11: 9, 33: 1}), assignment(1, 1, delays={})
    )
    case.minute("web-2", 0, assignment(0, 1))  # an entry that an older version has written
    case.run()
    rows = {(row["instance"], row["partition"]): row for row in case.rows(HISTORY, FLEET)}
    row = rows["web-1", 0]
    short, long, longest = ((1 << bits) / 1e3 for bits in (0, 11, 32))
    assert row["delay"] == [(short, 90), (long, 9), (longest, 1)]
    assert (row["delay_p50"], row["delay_p95"], row["delay_p99"]) == (short, long, long)
    assert (rows["web-1", 1]["delay"], rows["web-1", 1]["delay_p99"]) == ([], None)
    assert (rows["web-2", 0]["delay"], rows["web-2", 0]["delay_p99"]) == (None, None)


def test_older_table_gets_the_columns_of_delays(case: HistoryCase) -> None:
    archive_old_table(case)
    case.minute("web-1", 2, assignment(0, 7, delays={3: 7}))
    case.run()
    case.minute("web-1", 3, assignment(0, 2, delays={4: 2}))
    case.run()
    assert case.archived_minutes() == case.minutes
    rows = sorted(case.rows(HISTORY, FLEET), key=lambda row: row["minute"])
    assert [row["delay"] for row in rows] == [
        None,
        *([((1 << bits) / 1e3, count)] for bits, count in ((3, 7), (4, 2))),
    ]
    done, problems = compact.compact(case.settings, case.folder)
    files = {each.topic: (each.files_before, each.files_after) for each in done}
    assert (files[f"history/{FLEET}"], problems) == ((3, 1), [])
    merged = sorted(case.rows(HISTORY, FLEET), key=lambda row: row["minute"])
    assert merged == rows


def archive_old_table(case: HistoryCase) -> None:
    """Archive a minute into a table that has no columns for delays."""
    archive = Archive(case.folder, create=True)
    table = archive.derived_table(FLEET, HISTORY, first_minute_columns())
    case.minute("web-1", 1, assignment(0, 5))  # the first minute after midnight
    assert table is not None
    [entry] = history.read(case.store, FLEET, 0)
    known = first_minute_columns().names
    rows = [{name: row[name] for name in known} for row in minutes._rows(entry)]
    writer = DateWriter(table.folder, "date", pa.schema(list(first_minute_columns())[1:]))
    for row in rows:
        date = row.pop("date").isoformat()
        writer.write(
            date, pa.RecordBatch.from_pylist([row], pa.schema(list(first_minute_columns())[1:]))
        )
    table.append(writer.finish(), {(FLEET, 0): Position(offsets.read_id(entry.id))})


def test_history_row_of_an_older_version_has_no_partition(case: HistoryCase) -> None:
    """The row has no partition, because an older version wrote only the sums of groups."""
    counts = dict.fromkeys(history.COUNTS, 0) | {"acked": 10, "failed": 2}
    row = HistoryRow("access", "hits", None, "", counts, 5, 900, {3: 10})
    one = assignment(1, 4, lag=5, oldest_ms=900, handled={3: 4})
    for assignments in ((), (one,)):
        written = Interval("", "web-1", START + 5_000, 60.0, [row], assignments=assignments)
        history.append(case.store, FLEET, written, 10 * 365 * 86_400.0)
    case.run()
    found = [
        (each["partition"], each["handled"], each["failed"], each["lag"], each["handling"][0][1])
        for each in case.rows(HISTORY, FLEET)
    ]
    assert found == [(None, 10, 2, 5, 10), (1, 4, 0, 5, 4), (None, 6, 2, 0, 6)]


@pytest.mark.parametrize("assignments", ["[[1]]", r'[["t","g","\ud800",[[0,1,1,0,0,0,0,0,0]]]]'])
def test_unreadable_history_entry_is_skipped(case: HistoryCase, assignments: str) -> None:
    case.minute("web-1", 0, assignment(0, 1))
    fields = (
        "instance",
        "web-1",
        "until",
        "1",
        "seconds",
        "60",
        "rows",
        "[]",
        "units",
        assignments,
    )
    case.link.execute("XADD", case.keys.history(FLEET), "*", *fields)
    case.minute("web-1", 1, assignment(0, 2))
    told: list[str] = []
    archiver = Archiver(
        case.settings, case.folder, fail_if_started, lambda _: None, warn=told.append
    )
    with closing(archiver):
        archiver.run()
        archiver.run()
    assert case.archived_minutes() == case.minutes
    [text] = told
    assert "entries that cannot be read" in text


def test_concurrent_runs_archive_the_history_once(case: HistoryCase) -> None:
    case.minute("web-1", 0, assignment(0, 1))
    archiver = Archiver(case.settings, case.folder, fail_if_started, lambda _: None)
    name = f"history:{archiver.archive.id[:12]}"
    with closing(archiver):
        with PipelineLease(archiver._connect, case.keys, FLEET, name):
            archiver.run()
        assert archiver.history_rows == 0
        archiver.run()
        assert archiver.history_rows == 1


def test_command_prints_dead_letters_and_minutes(
    case: HistoryCase, run: Run, tmp_path: Path
) -> None:
    case.write_dead_letters("access", 0, 2)
    case.minute("web-1", 0, assignment(0, 1))
    command = ("pipeline", "archive", "--archive", str(tmp_path / "made"))
    found = json.loads(run(*command, "--json").stdout)
    assert (found["history_rows"], found["topics"][0]["dead_letters"]) == (1, 2)
    assert "DEAD_LETTERS" in run(*command).stdout
