"""The lock of an instance is private, because a user who can take it can prevent the start."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamqd.errors import StartupError
from streamqd.startup import InstanceLock

NOBODY = 65534
TAKE = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An existing directory with mode 0755, such as a /var/lib/x that a package has created."""
    for each in (tmp_path, *tmp_path.parents[:3]):  # pytest's directories are private to its user
        if each.name.startswith(("pytest", "test")):
            each.chmod(0o755)
    made = tmp_path / "state"
    made.mkdir()
    made.chmod(0o755)
    return made


@pytest.fixture
def lock(folder: Path) -> Iterator[InstanceLock]:
    made = InstanceLock(folder, "one")
    yield made
    made.release()


def test_instance_lock_is_private_to_its_user(lock: InstanceLock) -> None:
    """The lock is private. Otherwise, any local user could take it in a directory of mode 0755."""
    assert lock.acquire() is None
    assert lock.path.stat().st_mode & 0o777 == 0o600


def test_instance_lock_of_an_earlier_version_becomes_private(lock: InstanceLock) -> None:
    """An upgrade removes the permissions that other users had."""
    lock.path.touch(0o644)
    assert lock.acquire() is None
    assert lock.path.stat().st_mode & 0o777 == 0o600


@as_root
def test_instance_lock_cannot_be_taken_by_another_user(lock: InstanceLock) -> None:
    """Other users cannot take the lock, even while it is free."""
    assert lock.acquire() is None
    lock.release()
    taken = subprocess.run(
        ["/usr/bin/env", "python3", "-c", TAKE, lock.path],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    assert b"PermissionError" in taken.stderr, taken.stderr


@as_root
def test_lock_file_of_another_user_is_refused(lock: InstanceLock) -> None:
    """A file of another user is refused, because its owner could open it for other users again."""
    lock.path.touch()
    os.chown(lock.path, NOBODY, NOBODY)
    with pytest.raises(StartupError, match="belongs to another user"):
        lock.acquire()


def test_instance_lock_refuses_a_symlink(folder: Path, tmp_path: Path) -> None:
    """A symlink is refused, and its target is not opened, truncated or written."""
    (tmp_path / "elsewhere").write_text("kept")
    (folder / "one.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="symbolic link"):
        InstanceLock(folder, "one")
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_refused_lock_names_its_holder(lock: InstanceLock, folder: Path) -> None:
    assert lock.acquire() is None
    code = (
        "import sys; from pathlib import Path; from streamqd.startup import InstanceLock;"
        " print(InstanceLock(Path(sys.argv[1]), 'one').acquire())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(os.getpid())
    with lock.path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
