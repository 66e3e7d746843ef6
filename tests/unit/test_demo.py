"""The demo checks its own figures and detects wrong ones. No Redis and no daemon is needed."""

from __future__ import annotations

import fcntl
import re
import sqlite3
from pathlib import Path

import pytest

from streamqd.cli import cli as command
from streamqd.examples import weblog
from streamqd.examples.demo import summary
from streamqd.examples.demo.board import Board, shorten, table
from streamqd.examples.demo.stage import MARKER, DemoError, Folder
from streamqd.examples.demo.tally import GROUPS, PARTITIONS, DemoTally

EACH = 5  # messages in each partition


@pytest.fixture
def tally(tmp_path: Path) -> DemoTally:
    """Return a successful run: 4 messages handled and 1 dead-lettered, per partition and group."""
    folder = Folder(tmp_path)
    for group in GROUPS:
        for partition in PARTITIONS:
            store(folder, group, partition, handled=EACH - 1)
    made = DemoTally(folder, lines=EACH * len(PARTITIONS))
    made.update()
    made.unsettled = 0
    for partition in PARTITIONS:
        made.added[partition] = EACH
        for group in GROUPS:
            made.dead[group, partition] = 1
    return made


def store(folder: Folder, group: str, partition: int, *, handled: int) -> None:
    path = folder.database(group, partition)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    what = "'/a', 200" if group == "hits" else "'curl'"
    database = sqlite3.connect(path)
    database.executescript(weblog.TABLES)
    with database:
        database.executemany("INSERT INTO seen VALUES (?)", ((str(n),) for n in range(handled)))
        database.execute(f"INSERT INTO {group} VALUES ({what}, {handled})")
    database.close()


def failed_checks(tally: DemoTally) -> list[str]:
    return [sentence for ok, sentence in tally.checks() if not ok]


def test_demo_accepts_correct_counts(tally: DemoTally):
    assert failed_checks(tally) == []
    assert tally.top("hits") == [("/a", 200, 4 * (EACH - 1))]


def test_demo_finds_a_lost_message(tally: DemoTally):
    store(tally.folder, "agents", 2, handled=EACH - 2)
    tally.update()

    assert failed_checks(tally) == [
        "agents: handled + dead-lettered = produced, in every partition"
    ]


def test_demo_finds_a_message_in_the_wrong_partition(tally: DemoTally):
    tally.added[0] += 1
    tally.added[1] -= 1

    assert failed_checks(tally) == [
        "hits: handled + dead-lettered = produced, in every partition",
        "agents: handled + dead-lettered = produced, in every partition",
    ]


def test_demo_finds_a_message_counted_twice(tally: DemoTally):
    database = sqlite3.connect(tally.folder.database("hits", 3))
    with database:
        database.execute("UPDATE hits SET count = count + 1")
    database.close()

    assert failed_checks(tally) == ["hits: each handled message is counted exactly once"]


def test_demo_finds_an_unsent_line(tally: DemoTally):
    tally.lines += 1

    assert failed_checks(tally) == ["every line of the file is in Redis"]


@pytest.mark.parametrize("unsettled", [1, None])
def test_demo_finds_unfinished_work(tally: DemoTally, unsettled: int | None):
    tally.unsettled = unsettled

    assert failed_checks(tally) == ["no message is unread, pending or waiting"]


def test_demo_recreates_its_folder_for_each_run(tmp_path: Path):
    folder = Folder(tmp_path / "demo")
    assert folder.prepare() == 10_000
    left_over = folder.path / "left-over"
    left_over.touch()

    assert folder.prepare() == 10_000
    assert not left_over.exists()
    assert folder.lines.read_bytes().count(b"\n") == 10_000
    assert f"127.0.0.1:{folder.port}" in folder.config.read_text()


def test_demo_leaves_a_foreign_folder_alone(tmp_path: Path):
    mine = tmp_path / "thesis.txt"
    mine.touch()

    with pytest.raises(DemoError, match="is not a demo directory"):
        Folder(tmp_path).prepare()
    assert mine.exists()


def test_demo_leaves_the_folder_of_a_running_daemon_alone(tmp_path: Path):
    (tmp_path / MARKER).touch()
    lock_path = tmp_path / "demo.lock"
    lock_path.write_text("4711")
    with lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(DemoError, match="process 4711"):
            Folder(tmp_path).prepare()
    assert lock_path.exists()


def test_commands_printed_by_the_demo_exist(tally: DemoTally, capsys: pytest.CaptureFixture[str]):
    summary.where_to_look(tally.folder, tally, serving=True)

    verbs = set(re.findall(r"streamqd -c \S+ (\w+)", capsys.readouterr().out))
    assert verbs >= {"status", "partitions"}
    assert verbs <= set(command.list_commands(None))


def test_plain_progress_prints_a_line_every_ten_percent(capsys: pytest.CaptureFixture[str]):
    board = Board()
    for done in (0, 3, 25, 29, 99):
        board.show([("hits", done, 100, "handled")], 1.0)
    board.show([("hits", 99, 100, "handled, 1 dead")], 1.0, last=True)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("s  ")[1] for line in lines] == [
        "hits 0 handled",
        "hits 25 handled",
        "hits 99 handled",
        "hits 99 handled, 1 dead",
    ]


def test_table_aligns_numbers_to_the_right():
    assert table(("n", "what"), [(1000, "a"), (5, "bc")], indent="").splitlines() == [
        "    n  what",
        "1,000  a",
        "    5  bc",
    ]
    assert table(("n", "what"), [], indent="") == "n  what"


def test_table_truncates_long_texts():
    assert shorten("abcdef", 4) == "abc…"
    assert shorten("abcd", 4) == "abcd"
