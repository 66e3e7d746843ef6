"""Read plain or gzip-compressed lines from a file or standard input in bounded memory."""

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


def _limit(max_bytes: int) -> str:
    return f"max_message_bytes ({max_bytes:,}); split it, or raise daemon.max_message_bytes"


class BadInputError(Exception):
    """The input cannot be read or sent. The message is a sentence with the place of the error."""


class Lines:
    """The lines of a file, or of standard input if the path is `-`."""

    def __init__(self, path: str) -> None:
        """Open the file. Raises click.UsageError if it cannot be read."""
        self.name = STDIN if path == "-" else path
        self.number = 0  # number of the line that was read last, starting from 1
        self._raw = self._open(path)

    @property
    def place(self) -> str:
        """A description of the line that was read last, for the start of an error message."""
        return f"line {self.number} of {self.name}"

    @property
    def size(self) -> int | None:
        """The size of the file in bytes, or None if it is not a regular file."""
        try:
            found = os.fstat(self._raw.fileno())
        except (OSError, io.UnsupportedOperation):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @property
    def position(self) -> int:
        """The number of bytes read so far, which is ahead of the last line by up to one buffer."""
        return self._raw.tell()

    def read(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the lines without their line breaks, and count them.

        Raises BadInputError if a line is longer than `max_bytes`, or if the input cannot be read.
        """
        readline = self._unpack().readline
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
                raise BadInputError(f"{self.place} is longer than {_limit(max_bytes)}")
            yield line

    def close(self) -> None:
        """Close the file. Standard input stays open."""
        if self.name != STDIN:
            self._raw.close()

    def _unpack(self) -> io.BufferedIOBase:
        """Return the input, decompressed if it is gzip.

        Call this only at the first read, because reading from standard input may block.
        """
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
    """The entire content of a file or of standard input as one message.

    It is sent as it is, even if it is compressed.
    """

    @property
    def place(self) -> str:
        """The name of the file, as the start of an error message."""
        return self.name

    def read(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the content. Raises BadInputError if it is too long or cannot be read."""
        try:
            whole = io.BufferedReader(_Joined(b"", self._raw), _BUFFER_BYTES).read(max_bytes + 1)
        except OSError as error:
            raise BadInputError(f"{self.name} cannot be read: {error}") from error
        if len(whole) > max_bytes:
            raise BadInputError(f"{self.name} is longer than {_limit(max_bytes)}")
        yield whole


class Payload:
    """A single message from the command line. It has the same interface as `Lines`."""

    name = place = "the payload"
    size: int | None = None
    position = 0

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def read(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the payload. Raises BadInputError if it is too long."""
        if len(self._payload) > max_bytes:
            raise BadInputError(f"the payload is longer than {_limit(max_bytes)}")
        yield self._payload

    def close(self) -> None:
        """Do nothing, because there is no file to close."""


class _Joined(io.RawIOBase):
    """A stream whose first bytes were already read, and are returned first."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head = head
        self._tail = rest

    def readable(self) -> bool:
        return True

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._head[: len(target)] or _read_some(self._tail, len(target))
        self._head = self._head[len(target) :]
        target[: len(data)] = data
        return len(data)


def _read_some(stream: BinaryIO, size: int) -> bytes:
    # read1 returns the bytes that are available in a pipe, whereas read would wait until the buffer
    # is full.
    read = cast(Callable[[int], bytes], getattr(stream, "read1", stream.read))
    return read(size)
