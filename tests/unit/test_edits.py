"""Each edit of a source file is reported once, when the file is complete, and none is missed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from streamqd.supervisor.watcher import Edits


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A module whose modification time is in 2001."""
    file = tmp_path / "work.py"
    file.write_text("VERSION = 1\n")
    os.utime(file, (1e9, 1e9))
    return file


@pytest.fixture
def edits(code: Path) -> Edits:
    edits = Edits()
    edits.watch([], [str(code.parent)], time.time_ns())
    return edits


def test_unchanged_files_are_not_reported(edits: Edits):
    assert [edits.find_change() for _ in range(3)] == ["", "", ""]


def test_file_still_being_written_is_not_reported(edits: Edits, code: Path):
    code.write_text("VERSION")
    assert edits.find_change() == ""
    code.write_text("VERSION = 2\n")
    assert edits.find_change() == ""
    assert edits.find_change() == str(code)
    assert edits.find_change() == "", "an edit is found once"


def test_briefly_missing_file_is_reported_once(edits: Edits, code: Path):
    text = code.read_text()
    code.unlink()
    assert edits.find_change() == ""
    code.write_text(text)
    assert [edits.find_change(), edits.find_change(), edits.find_change()] == ["", str(code), ""]


def test_deleted_and_restored_file_is_reported_twice(edits: Edits, code: Path):
    code.unlink()
    assert [edits.find_change(), edits.find_change()] == ["", str(code)]
    code.write_text("VERSION = 3\n")
    assert [edits.find_change(), edits.find_change()] == ["", str(code)]


def test_new_modules_are_reported_but_not_editor_files(edits: Edits, code: Path):
    for name in (".#work.py", ".work.py.swp", "work.py~", "4913", "notes.txt"):
        (code.parent / name).write_text("draft")
    (code.parent / ".#other.py").symlink_to("nobody@nowhere")
    assert [edits.find_change(), edits.find_change()] == ["", ""]
    new = code.parent / "other.py"
    new.write_text("")
    assert [edits.find_change(), edits.find_change()] == ["", str(new)]


def test_replaced_file_of_equal_size_and_time_is_reported(edits: Edits, code: Path):
    """A replaced file is reported even if its size and time are the same.

    For example, a link switches a release, or a backup is restored with its time.
    """
    other = code.with_suffix(".new")
    other.write_text("VERSION = 2\n")
    os.utime(other, (1e9, 1e9))
    other.rename(code)
    assert [edits.find_change(), edits.find_change()] == ["", str(code)]


def test_edit_of_a_link_target_is_reported(tmp_path: Path, edits: Edits, code: Path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "real.py").write_text("1")
    (code.parent / "link.py").symlink_to(target / "real.py")
    assert [edits.find_change(), edits.find_change()] == ["", str(code.parent / "link.py")]
    (target / "real.py").write_text("22")
    assert [edits.find_change(), edits.find_change()] == ["", str(code.parent / "link.py")]


def test_file_saved_between_import_and_watch_is_reported(code: Path):
    read = time.time_ns()
    later = (read + 1_000_000) / 1e9
    os.utime(code, (later, later))
    edits = Edits()
    edits.watch([str(code)], [], read)
    assert [edits.find_change(), edits.find_change(), edits.find_change()] == ["", str(code), ""]


def test_recreated_folder_is_watched_again(tmp_path: Path, edits: Edits):
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "a.py").write_text("")
    edits.watch([], [str(folder)], time.time_ns())
    edits.find_change()
    folder.rename(tmp_path / "away")
    assert [edits.find_change(), edits.find_change()] == ["", str(folder / "a.py")]
    (tmp_path / "away").rename(folder)
    assert [edits.find_change(), edits.find_change()] == ["", str(folder / "a.py")]
