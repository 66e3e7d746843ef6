"""The running spans of one worker, in a file that outlives the process.

A span is exported after it ends, so the span of a run that kills its process would be lost. The
worker writes each running span into its file, and removes it there when the run ends. The
housekeeper exports the spans in the files of dead processes (`killed`).

A file has cells of one size. A cell is the length of its record, 0 when it is free, then the record
as JSON. The length is written last, so a reader never sees half a record.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "runs"  # in `daemon.state_dir`
CELL_BYTES = 2048
BATCH_CELL_BYTES = 32 * 1024
NO_CELL = -1  # all cells are used, or the record is too long
_MAGIC = b"streamqd runs 1\n"
_HEAD = struct.Struct("<16sI12x")  # magic, bytes of a cell
_LENGTH = struct.Struct("<I")
_FILE_BYTES_MAX = 256 << 20


class RunFile:
    """The file of this process. `put` and `clear` are for any thread."""

    def __init__(self, state_dir: Path, cells: int, cell_bytes: int) -> None:
        """Create the file, named after this process. Raises OSError."""
        folder = state_dir / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / _name(os.getpid())
        self._bytes = cell_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            os.ftruncate(file, _HEAD.size + cells * cell_bytes)  # sparse
            self._map = mmap.mmap(file, _HEAD.size + cells * cell_bytes)
        finally:
            os.close(file)
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, cell_bytes)
        self._free = list(range(cells))

    def put(self, record: dict[str, Any]) -> int:
        """Store a record and return its cell, or NO_CELL."""
        raw = json.dumps(record, separators=(",", ":")).encode()
        if len(raw) > self._bytes - _LENGTH.size:
            return NO_CELL
        try:
            cell = self._free.pop()
        except IndexError:
            return NO_CELL
        at = _HEAD.size + cell * self._bytes
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(raw)] = raw
        self._map[at : at + _LENGTH.size] = _LENGTH.pack(len(raw))
        return cell

    def clear(self, cell: int) -> None:
        """Free a cell."""
        if cell != NO_CELL:
            at = _HEAD.size + cell * self._bytes
            self._map[at : at + _LENGTH.size] = _LENGTH.pack(0)
            self._free.append(cell)

    def remove(self) -> None:
        """Delete the file, because no span is left."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def files_of_dead(state_dir: Path) -> Iterator[tuple[int, Path]]:
    """Return the process ID and the file of each process that has exited."""
    try:
        found = sorted((state_dir / FOLDER).iterdir())
    except OSError:
        return
    for path in found:
        pid, _, _ = path.name.partition("-")
        if pid.isdigit() and len(pid) < 10 and _name(int(pid)) != path.name:
            yield int(pid), path


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file. Raises OSError, and ValueError if it is not a run file."""
    with path.open("rb") as file:
        raw = file.read(_FILE_BYTES_MAX)
    if len(raw) < _HEAD.size:
        return []  # its process died while it was created
    magic, size = _HEAD.unpack_from(raw)
    if magic != _MAGIC or size <= _LENGTH.size:
        raise ValueError("it is not a file of runs")
    records = []
    for at in range(_HEAD.size, len(raw) - _LENGTH.size, size):
        (length,) = _LENGTH.unpack_from(raw, at)
        text = raw[at + _LENGTH.size : at + _LENGTH.size + length]
        if 0 < length == len(text):
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError("a record is not an object")
            records.append(record)
    return records


def _name(pid: int) -> str:
    """Return the file name of a process: its ID and start time. '' if it does not run.

    The start is in clock ticks since the boot of the host, which no change of the clock affects.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    state, *rest = stat.rpartition(b") ")[2].split()
    return "" if state in (b"Z", b"X") else f"{pid}-{rest[18].decode()}"
