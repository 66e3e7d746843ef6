"""A damaged file of a scoreboard is refused, and never prevents a start."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd import logs
from streamqd.config import Daemon
from streamqd.model import Assignment, Lease
from streamqd.scoreboard import BOARD_BYTES, SLOT_BYTES, WorkerSlot
from streamqd.startup import InstanceLock
from streamqd.supervisor import scoreboard_file
from streamqd.supervisor.scoreboard_file import ScoreboardFile

ASSIGNMENTS = [Assignment("orders", number, "mail") for number in range(3)]


def test_scoreboard_file_header_round_trips():
    assert scoreboard_file.unpack_header(scoreboard_file.pack_header({"layout": 1})) == {
        "layout": 1
    }


@pytest.mark.parametrize("document", [b"{", b"\xff", b"[" * 900, b"[]", b"7", b""])
def test_header_with_valid_checksum_and_invalid_json_is_refused(document: bytes):
    """The error is a ScoreboardFileError. The decoder's own error would prevent the start."""
    magic = scoreboard_file.pack_header({})[:20]
    raw = struct.pack("<20sII", magic, len(document), zlib.crc32(document)) + document
    with pytest.raises(scoreboard_file.ScoreboardFileError, match="not a streamqd scoreboard"):
        scoreboard_file.unpack_header(raw)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private directory in memory."""
    place = scoreboard_file.folder(os.environ, os.geteuid())
    if place is None:
        pytest.skip("no memory file system can be written")
    own = place / f"test-{os.getpid()}-{tmp_path.name}"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(own))
    yield own
    for each in own.iterdir():
        each.rmdir() if each.is_dir() else each.unlink()
    own.rmdir()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[InstanceLock]:
    made = InstanceLock(tmp_path, "one")
    assert made.acquire() is None
    yield made
    made.release()


@pytest.fixture
def logged_problems(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the problems that were logged."""
    found: list[str] = []

    def note(name: str, _level: int = 0, **fields: object) -> None:
        if name == "scoreboard.refused":
            found.append(str(fields["problem"]))

    monkeypatch.setattr(logs, "event", note)
    return found


def start(lock: InstanceLock) -> ScoreboardFile:
    """Read and replace the file of the last supervisor, as a start does."""
    file = ScoreboardFile(Daemon(instance="one"), lock)
    board = file.make(len(ASSIGNMENTS))
    for assignment in ASSIGNMENTS:
        slot = board.allot(assignment)
        slot.note_lease(Lease(assignment, "a" * 32, 7))
        slot.restore([b"m:1-0"], [b"m:2-0"])
    file.publish()
    return file


def board_in(memory: Path) -> Path:
    (found,) = memory.glob(f"*{scoreboard_file.SUFFIX}")
    return found


@pytest.mark.parametrize("error", [RuntimeError, KeyError, MemoryError, AssertionError])
def test_unreadable_board_is_renamed_after_any_exception(
    memory: Path,
    lock: InstanceLock,
    logged_problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
):
    """Whatever goes wrong, the file is renamed, and the start continues.

    The problem is logged once.
    """
    start(lock)

    def fail(_raw: bytes) -> dict[str, object]:
        raise error("found while reading")

    with monkeypatch.context() as broken:
        broken.setattr(scoreboard_file, "unpack_header", fail)
        assert start(lock).resumable == {}
    aside = board_in(memory).with_suffix(scoreboard_file.REFUSED)
    (problem,) = logged_problems
    assert f"{error.__name__}: " in problem
    assert f"it was renamed to {aside}; delete it" in problem
    assert aside.stat().st_size
    assert set(start(lock).resumable) == set(ASSIGNMENTS), "the file after it is read again"
    assert len(logged_problems) == 1


def test_unreadable_slot_costs_only_its_own_assignment(
    memory: Path, lock: InstanceLock, logged_problems: list[str], monkeypatch: pytest.MonkeyPatch
):
    """After an unexpected error about one slot, all other assignments can still be resumed."""
    start(lock)
    read = WorkerSlot.checked_batch

    def fail(slot: WorkerSlot) -> object:
        if slot.assignment == ASSIGNMENTS[1]:
            raise RuntimeError("found while reading")
        return read(slot)

    with monkeypatch.context() as broken:
        broken.setattr(WorkerSlot, "checked_batch", fail)
        assert set(start(lock).resumable) == {ASSIGNMENTS[0], ASSIGNMENTS[2]}
    assert logged_problems == ["slot 1 is damaged: found while reading"]


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("obstacle", [_folder, _pipe])
def test_scoreboard_that_is_not_a_file_is_moved_aside(
    memory: Path, lock: InstanceLock, logged_problems: list[str], obstacle: Callable[[Path], None]
):
    """If there is a directory in place of the file, the daemon still starts."""
    start(lock)
    obstacle(board_in(memory))
    assert start(lock).resumable == {}
    assert "not a regular file" in logged_problems[0]
    assert board_in(memory).is_file()


def test_unrenamable_board_does_not_prevent_the_start(
    memory: Path, lock: InstanceLock, logged_problems: list[str]
):
    """If there are directories in both places, the daemon starts without a file."""
    start(lock)
    path = board_in(memory)
    _folder(path)
    aside = path.with_suffix(scoreboard_file.REFUSED)
    aside.mkdir()
    (aside / "kept").mkdir()
    try:
        assert start(lock).resumable == {}
        assert "cannot be renamed" in logged_problems[0]
    finally:
        (aside / "kept").rmdir()


def test_random_bytes_in_a_board_never_prevent_a_start(
    memory: Path, lock: InstanceLock, logged_problems: list[str]
):
    """300 boards with random bytes in random places are either used in part or renamed."""
    start(lock)
    drawn = random.Random(20)
    sizes = [1, 8, 64, 4096]
    for _ in range(300):
        with board_in(memory).open("r+b") as file:
            for _ in range(drawn.randint(1, 4)):
                file.seek(drawn.randrange(BOARD_BYTES + len(ASSIGNMENTS) * SLOT_BYTES))
                file.write(drawn.randbytes(drawn.choice(sizes)))
        assert set(start(lock).resumable) <= set(ASSIGNMENTS)
    assert logged_problems, "some damage was noticed"
