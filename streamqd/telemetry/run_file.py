"""Store the running spans of one worker in a file that outlives the process.

A span is exported only when it finishes, so the span of a run that kills its process would be lost.
The worker therefore writes each running span to its file, and removes it when the run finishes. The
housekeeper exports the spans in the files of dead processes (`killed`).

A file consists of cells of equal size. A cell contains the length of its record, or 0 if the cell
is free, and the record as JSON. The length is written last, so a reader never sees half a record.
Cells are written with `pwrite`, which raises OSError if the disk is full. A write to a mapped page
would kill the process instead.

Instances may share a `state_dir`, even if they run in containers that cannot see each other's
processes. The name of a file therefore contains the name of the instance.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "runs"  # directory below `daemon.state_dir`
CELL_BYTES = 2048
BATCH_CELL_BYTES = 64 * 1024
NO_CELL = -1  # returned if no cell is free or the record is too long
_MAGIC = b"streamqd runs 1\n"
_HEAD = struct.Struct("<16sI12x")  # magic, size of a cell in bytes
_LENGTH = struct.Struct("<I")
_FILE_BYTES_MAX = 256 << 20
_NAME = re.compile(r"(?P<instance>.+)-(?P<identity>(?P<pid>[0-9]{1,9})-[0-9]+)")


class RunFileError(ValueError):
    """Raised if a run file is damaged. The text is the reason."""


class RunFile:
    """The run file of this process. Any thread may call `put` and `clear`."""

    def __init__(self, state_dir: Path, instance: str, cells: int, cell_bytes: int) -> None:
        """Create the file, which is named after the instance and this process. Raises OSError."""
        folder = state_dir / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{instance}-{_identity(os.getpid())}"
        self._bytes = cell_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        self._free = list(range(cells))
        try:
            os.ftruncate(self._file, _HEAD.size + cells * cell_bytes)  # the file is sparse
            os.pwrite(self._file, _HEAD.pack(_MAGIC, cell_bytes), 0)
        except OSError:
            self.remove()
            os.close(self._file)
            raise

    def put(self, record: dict[str, Any]) -> int:
        """Store a record and return its cell, or NO_CELL if it cannot be stored. Raises OSError."""
        raw = json.dumps(record, separators=(",", ":")).encode()
        if len(raw) > self._bytes - _LENGTH.size:
            return NO_CELL
        try:
            cell = self._free.pop()
        except IndexError:
            return NO_CELL
        at = _HEAD.size + cell * self._bytes
        try:
            if os.pwrite(self._file, raw, at + _LENGTH.size) < len(raw):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.pwrite(self._file, _LENGTH.pack(len(raw)), at)
        except OSError:
            self._free.append(cell)
            raise
        return cell

    def clear(self, cell: int) -> None:
        """Delete the record in a cell, so that the cell can be used again."""
        if cell != NO_CELL:
            with contextlib.suppress(OSError):  # nothing is allocated, so this should not fail
                os.pwrite(self._file, _LENGTH.pack(0), _HEAD.size + cell * self._bytes)
            self._free.append(cell)

    def remove(self) -> None:
        """Delete the file. Does nothing if the file is missing."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def files_of_dead(state_dir: Path, instance: str) -> Iterator[tuple[int, Path]]:
    """Yield the process ID and the run file of each process of this instance that has exited."""
    try:
        found = sorted((state_dir / FOLDER).iterdir())
    except OSError:
        return
    for path in found:
        name = _NAME.fullmatch(path.name)
        if name is None or name["instance"] != instance:
            continue
        pid = int(name["pid"])
        if _identity(pid) != name["identity"] and path.is_file() and not path.is_symlink():
            yield pid, path


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records in a run file. Raises OSError and RunFileError."""
    with path.open("rb") as file:
        raw = file.read(_FILE_BYTES_MAX)
    if len(raw) < _HEAD.size:
        return []  # the process was killed while it was creating the file
    magic, size = _HEAD.unpack_from(raw)
    if magic != _MAGIC or size not in (CELL_BYTES, BATCH_CELL_BYTES):
        raise RunFileError("it is not a file of runs")
    records = []
    for at in range(_HEAD.size, len(raw) - _LENGTH.size, size):
        (length,) = _LENGTH.unpack_from(raw, at)
        text = raw[at + _LENGTH.size : at + _LENGTH.size + length]
        if 0 < length == len(text):
            records.append(_record(text))
    return records


def _record(text: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"a record cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise RunFileError("a record is not an object")
    return record


def _identity(pid: int) -> str:
    """Return the ID and the start time of a process, or '' if it is not running.

    The start time is in clock ticks since the host booted, so setting the clock does not change it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    state, *rest = stat.rpartition(b") ")[2].split()
    return "" if state in (b"Z", b"X") else f"{pid}-{rest[18].decode()}"
