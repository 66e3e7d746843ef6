"""Reading a file or standard input line by line, gzipped or not, in bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import click

_GZIP = b"\x1f\x8b"
_BUFFER_BYTES = 1 << 16
STDIN = "standard input"


class BadInputError(Exception):
    """What is read cannot be sent. The text is a sentence that names the line."""


class Lines:
    """The lines of a file, or of standard input when the path is `-`."""

    def __init__(self, path: str) -> None:
        """Open it. Raises click.UsageError when that fails."""
        self.name = STDIN if path == "-" else path
        self.number = 0  # of the line read last
        self._raw = self._open(path)

    @property
    def place(self) -> str:
        """The line read last, as a sentence about it begins."""
        return f"line {self.number} of {self.name}"

    @property
    def size(self) -> int | None:
        """Bytes of the file, None when that cannot be known."""
        try:
            found = os.fstat(self._raw.fileno())
        except (OSError, io.UnsupportedOperation):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @property
    def position(self) -> int:
        """Bytes of the file read so far; about where the lines are."""
        return self._raw.tell()

    def read(self, max_bytes: int) -> Iterator[bytes]:
        """Yield lines without their ends, counting them. BadInputError when one is too long."""
        readline = self._whole().readline
        while True:
            try:
                line = readline(max_bytes + 3)
            except (OSError, EOFError, zlib.error) as error:
                behind = f" after line {self.number}" if self.number else ""
                raise BadInputError(f"{self.name} cannot be read{behind}: {error}") from error
            if not line:
                return
            self.number += 1
            if line.endswith(b"\n"):
                line = line[:-2] if line.endswith(b"\r\n") else line[:-1]
            if len(line) > max_bytes:
                raise BadInputError(
                    f"{self.place} is longer than max_message_bytes ({max_bytes:,})"
                )
            yield line

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self.name != STDIN:
            self._raw.close()

    def _whole(self) -> io.BufferedIOBase:
        """What is read from, unpacked. Not before it is wanted: standard input may have to wait."""
        head = self._raw.read(2)
        whole = io.BufferedReader(_Joined(head, self._raw), _BUFFER_BYTES)
        return gzip.GzipFile(fileobj=whole) if head == _GZIP else whole

    def _open(self, path: str) -> BinaryIO:
        if path == "-":
            return sys.stdin.buffer
        try:
            return cast(BinaryIO, Path(path).open("rb", buffering=0))
        except OSError as error:
            raise click.UsageError(f"{path} cannot be read: {error.strerror}") from None


class File(Lines):
    """All bytes of a file, or of standard input, as one message: no line ends, no gzip."""

    @property
    def place(self) -> str:
        """The file, as a sentence about it begins."""
        return self.name

    def read(self, max_bytes: int) -> Iterator[bytes]:
        """Yield all of it. BadInputError when it is too long, or cannot be read."""
        try:
            whole = io.BufferedReader(_Joined(b"", self._raw), _BUFFER_BYTES).read(max_bytes + 1)
        except OSError as error:
            raise BadInputError(f"{self.name} cannot be read: {error}") from error
        if len(whole) > max_bytes:
            raise BadInputError(f"{self.name} is longer than max_message_bytes ({max_bytes:,})")
        yield whole


class Payload:
    """One message that is there already, in the place of `Lines`: whatever is in it, it is one."""

    name = place = "the payload"
    size: int | None = None
    position = 0

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def read(self, max_bytes: int) -> Iterator[bytes]:
        """Yield it. BadInputError when it is too long."""
        if len(self._payload) > max_bytes:
            raise BadInputError(f"the payload is longer than max_message_bytes ({max_bytes:,})")
        yield self._payload

    def close(self) -> None:
        """There is nothing to close."""


class _Joined(io.RawIOBase):
    """A stream whose first bytes have been read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._head[: len(target)] or _read_some(self._rest, len(target))
        self._head = self._head[len(target) :]
        target[: len(data)] = data
        return len(data)


def _read_some(stream: BinaryIO, size: int) -> bytes:
    # read1 gives what a pipe has now; read would wait until the buffer is full.
    read = cast(Callable[[int], bytes], getattr(stream, "read1", stream.read))
    return read(size)
