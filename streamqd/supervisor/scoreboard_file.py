"""The scoreboard's file, from which a supervisor continues if its predecessor was killed.

The file is stored in a memory file system, so it costs no more than anonymous memory and disappears
when the host restarts. The instance's lock protects it: a supervisor reads the file only after it
has acquired the lock. By then, its predecessor has exited, and the file no longer changes. A wrong
token in the file does no harm, because Redis rejects any token that is not in the fence.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamqd import logs, startup
from streamqd.config import Daemon
from streamqd.config.setting import NAME
from streamqd.model import Assignment, Lease
from streamqd.scoreboard import (
    BOARD_BYTES,
    HEAD_BYTES,
    HEADER_OFFSET,
    LAYOUT,
    SLOT_BYTES,
    SLOT_COUNT,
    Scoreboard,
    WorkerSlot,
)

SUFFIX = ".board"
DRAFT = ".draft"  # suffix of an unfinished file
REFUSED = ".refused"  # suffix of the last file that was rejected
SWEPT_MAX = 256  # largest number of files that one start checks in the directory
_MAGIC = b"streamqd scoreboard\n"
_HEADER = struct.Struct("<20sII")  # magic number, length and checksum of the JSON that follows
_IN_MEMORY = ("tmpfs", "ramfs")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class ScoreboardFileError(Exception):
    """Raised if a scoreboard file cannot be used. The text is the reason."""


class ResumableAssignment(NamedTuple):
    """The state of one assignment that a killed supervisor held.

    `next_token` is the token that was about to replace the lease's token, or ''. `done` lists the
    places of messages that were handled but perhaps not acknowledged. `running` lists the places of
    messages that were being handled. A place names a stream and an entry in it.
    """

    lease: Lease
    next_token: str
    done: list[bytes]
    running: list[bytes]


class ScoreboardFile:
    """Creates the scoreboard of one supervisor, and reads that of its predecessor.

    After `make`, `resumable` maps the predecessor's assignments to their states. Assignments whose
    data is damaged are left out.
    """

    def __init__(self, daemon: Daemon, lock: startup.InstanceLock) -> None:
        self.resumable: dict[Assignment, ResumableAssignment] = {}
        self._path: Path | None = None
        self._header = _new_header(daemon, lock)
        place = folder(os.environ, os.geteuid())
        if place is not None:
            device, inode = lock.identity.split(":")[1:]
            self._path = place / f"{daemon.instance}-{device}-{inode}{SUFFIX}"
            _sweep(place)

    def make(self, assignments: int) -> Scoreboard:
        """Read the old scoreboard, then return a new one with room for this many assignments.

        The old file stays in place until `publish` replaces it. If no memory file system can be
        used, the new scoreboard is private memory, and nothing can be resumed from it.
        """
        if self._path is None:
            logs.event("scoreboard.private", logging.WARNING, problem="no memory file system")
            return Scoreboard()
        path = self._path
        self._read(path)
        draft = path.with_suffix(DRAFT)
        try:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            board = Scoreboard(descriptor=descriptor)
            board.refused_file = path.with_suffix(REFUSED)
            board.write_header(pack_header(self._header))
            for index in range(assignments):
                board.reserve(index, HEAD_BYTES)
        except (OSError, ValueError) as error:
            logs.event("scoreboard.private", logging.WARNING, problem=str(error))
            with contextlib.suppress(OSError):
                draft.unlink()
            self._path = None
            return Scoreboard()
        return board

    def publish(self) -> None:
        """Replace the old file with the new scoreboard.

        Call this only when the new one contains all state that was resumed from the old file.
        """
        if self._path is None:
            return
        try:
            self._path.with_suffix(DRAFT).replace(self._path)
        except OSError as error:
            logs.event("scoreboard.private", logging.WARNING, problem=str(error))
            self._path = None

    def remove(self) -> None:
        """Remove the file, because this instance no longer owns any assignments."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _read(self, path: Path) -> None:
        try:
            found = read(path, self._header)
        except FileNotFoundError:
            return
        except (ScoreboardFileError, OSError) as error:
            self._put_aside(path, str(error))
            return
        except Exception as error:  # noqa: BLE001 - no file may keep the daemon from starting
            self._put_aside(path, f"{type(error).__name__}: {error}", error)
            return
        for assignment, problem in found.damaged:
            logs.event(
                "scoreboard.refused",
                logging.WARNING,
                assignment=assignment,
                file=str(path),
                problem=problem,
            )
        self.resumable = {each.lease.assignment: each for each in found.partitions}
        logs.event("scoreboard.found", file=str(path), assignments=len(self.resumable))

    def _put_aside(self, path: Path, problem: str, bug: Exception | None = None) -> None:
        """Rename a rejected file, so that no later start reads it, and log its new name."""
        aside = path.with_suffix(REFUSED)
        try:
            path.replace(aside)
            remedy = f"it was renamed to {aside}; delete it, or attach it to a bug report"
        except OSError as error:
            remedy = f"delete it: it cannot be renamed to {aside} ({error.strerror})"
        logs.event(
            "scoreboard.refused",
            logging.WARNING,
            exc=bug,
            file=str(path),
            problem=f"{problem}; {remedy}",
        )


class FoundScoreboard(NamedTuple):
    """The valid assignments in a file, and the problem with each damaged one."""

    partitions: list[ResumableAssignment]
    damaged: list[tuple[Assignment | None, str]]


def folder(environment: Mapping[str, str], user: int) -> Path | None:
    """Return the directory for scoreboard files, or None if there is no suitable one.

    It must be in a memory file system, and only this user may have permission to write to it. The
    candidates are directories that systemd creates, and then directories of this user, which are
    created with mode 0700 if they do not exist.
    """
    given = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    session = environment.get("XDG_RUNTIME_DIR", "")
    # Resolve these two paths, because systemd creates them as symbolic links if it runs the daemon
    # as a dynamic user. This is safe, because no other user can write to their parent directories.
    candidates = [(Path(given).resolve(), False)] if given else []
    candidates.append((Path("/run/streamqd").resolve(), False))
    if session:
        candidates.append((Path(session) / "streamqd", True))
    candidates.append((Path(f"/dev/shm/streamqd-{user}"), True))  # noqa: S108 - checked below
    for path, make in candidates:
        if make:
            with contextlib.suppress(OSError):
                path.mkdir(mode=0o700)
        if _is_ours(path, user):
            return path
    return None


def _is_ours(path: Path, user: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not others
    return ours and os.access(path, os.W_OK | os.X_OK) and _is_in_memory(found.st_dev)


def _is_in_memory(device: int) -> bool:
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    for mount in mounts:
        what, _, kind = mount.partition(" - ")
        if what.split()[2:3] == [name]:
            return kind.split()[:1] != [] and kind.split()[0] in _IN_MEMORY
    return False


# --- the header of a file -------------------------------------------------------------------


def _new_header(daemon: Daemon, lock: startup.InstanceLock) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "slots": SLOT_COUNT,
        "slot_bytes": SLOT_BYTES,
        "boot": startup.boot_id(),
        "lock": lock.identity,
        "lock_file": str(lock.path.absolute()),
        "instance": daemon.instance,
        "fleet": daemon.fleet,
    }


def pack_header(header: Mapping[str, Any]) -> bytes:
    """Return a header as it is stored in the file."""
    raw = json.dumps(header, sort_keys=True).encode()
    return _HEADER.pack(_MAGIC, len(raw), zlib.crc32(raw)) + raw


def unpack_header(raw: bytes) -> dict[str, Any]:
    """Return the header of a file. Raises ScoreboardFileError if it is not valid."""
    if len(raw) < _HEADER.size:
        raise ScoreboardFileError("damaged file: header missing")
    magic, length, checked = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise ScoreboardFileError("not a streamqd scoreboard")
    described = raw[_HEADER.size : _HEADER.size + length]
    if len(described) != length or zlib.crc32(described) != checked:
        raise ScoreboardFileError("damaged file: header checksum mismatch")
    try:
        found = json.loads(described)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ScoreboardFileError("not a streamqd scoreboard")
    return found


def read(path: Path, expected: Mapping[str, Any]) -> FoundScoreboard:
    """Return the state that a dead supervisor has left in its file.

    `expected` is the header that the current supervisor writes. Raises ScoreboardFileError if the
    header of the file differs from it, or if the file is damaged or not safe to read. Raises
    OSError if it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ScoreboardFileError("not a regular file")
        if found.st_uid != os.geteuid():
            raise ScoreboardFileError(f"owner is uid {found.st_uid}, not {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ScoreboardFileError("file is accessible to other users")
        if found.st_nlink != 1:
            raise ScoreboardFileError("file has more than one hard link")
        page = os.pread(descriptor, BOARD_BYTES, 0)
        header = unpack_header(page[HEADER_OFFSET:])
        for name, wanted in expected.items():
            if header.get(name) != wanted:
                raise ScoreboardFileError(
                    f"{name} is {header.get(name)!r:.100}, not {wanted!r:.100}"
                )
        if found.st_size != BOARD_BYTES + SLOT_COUNT * SLOT_BYTES:
            raise ScoreboardFileError("damaged file: wrong size")
        used = int.from_bytes(page[:8], "little")
        if used > SLOT_COUNT:
            raise ScoreboardFileError("damaged file: too many used slots")
        return _read_slots(descriptor, range(used))
    finally:
        os.close(descriptor)


def _read_slots(descriptor: int, indexes: Iterable[int]) -> FoundScoreboard:
    found: dict[Assignment, ResumableAssignment] = {}
    damaged: list[tuple[Assignment | None, str]] = []
    board = Scoreboard(0)
    for index in indexes:
        raw = bytearray(os.pread(descriptor, SLOT_BYTES, BOARD_BYTES + index * SLOT_BYTES))
        slot = WorkerSlot(memoryview(raw), index, board)
        assignment: Assignment | None = None
        try:
            assignment = slot.assignment
            lease = slot.lease()
            if assignment is None or lease is None:
                continue
            if not (
                NAME.fullmatch(assignment.topic) and assignment.partition >= 0 and assignment.group
            ):
                raise ValueError("it does not name a partition and a group")
            if assignment in found:
                raise ValueError("it occurs twice")
            batch = slot.checked_batch()
        except Exception as error:  # noqa: BLE001 - no slot may keep the others from being used
            damaged.append((assignment, f"slot {index} is damaged: {error}"))
            continue
        found[assignment] = ResumableAssignment(*lease, batch.done, batch.running)
    return FoundScoreboard(list(found.values()), damaged)


def _sweep(place: Path) -> None:
    """Remove files that no supervisor will ever read, because the lock that they name is gone."""
    with contextlib.suppress(OSError):
        found = [path for path in place.iterdir() if path.suffix in (SUFFIX, DRAFT, REFUSED)]
        for path in sorted(found)[:SWEPT_MAX]:
            with contextlib.suppress(Exception):  # the content is not trusted
                if not _has_lock(path):
                    path.unlink()


def _has_lock(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
    try:
        header = unpack_header(os.pread(descriptor, BOARD_BYTES - HEADER_OFFSET, HEADER_OFFSET))
    finally:
        os.close(descriptor)
    try:
        lock = Path(header["lock_file"]).stat()
    except FileNotFoundError:
        return False
    return bool(header["lock"] == f"{startup.boot_id()}:{lock.st_dev}:{lock.st_ino}")
