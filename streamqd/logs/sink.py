"""Writes lines to a descriptor without ever blocking.

Only `logs` uses this module. Standard error is shared with handlers and with the shell, so it must
not be set to non-blocking. Instead, a pipe or terminal is opened a second time through /proc, and a
socket (journald) is written with MSG_DONTWAIT. A line that cannot be written now waits in a buffer
of limited size. If the buffer has no room for it, the line is dropped and counted.

Each process writes to its own descriptor. User code may close it, and its number may then be reused
for a connection. Before each write, the sink therefore checks that the descriptor is still the same
file.

Several processes write to one file. If a full disk or a full pipe cuts a line, a shared mark
records the process, and the next process that writes starts a new line.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable

BUFFER_MAX = 256 * 1024  # limit of buffered lines, in bytes
_OTHERS = 1  # mark of an exited process's open line; no daemon process has pid 1

Identity = tuple[int, int]  # device and inode


class Sink:
    """Writes lines to a descriptor that it does not own. Not thread-safe, so callers must lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._identity = _identity(fd)
        self._pid = 0
        self._own = -1
        self._send: Callable[[bytes], int] = _refuse
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._head_sent = 0  # bytes of the first waiting line that have been written
        self._reported = 0
        self._broken = False
        self.dropped = 0
        # The pid of the process whose line is open at the end of the output, or 0 if no line is
        # open. All forked processes share it.
        self._mark = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("I")
        if _ends_within_line(fd):
            self._mark[0] = _OTHERS

    def open(self) -> None:
        """Open this process's own descriptor, before user code can close the shared one."""
        if self._pid == os.getpid() and self._is_same(self._own):
            return
        if self._pid != os.getpid():
            # The lines that were waiting at the fork belong to the parent.
            self._pid = os.getpid()
            self._clear()
            self._reported = self.dropped = 0
        # Do not close the old number, which may already belong to another file.
        self._own, self._send = -1, _refuse
        if self._is_same(self._fd):
            with contextlib.suppress(OSError):
                self._own, self._send = self._open_own()

    def write(self, line: str) -> None:
        """Write one line. A line that cannot be written now is buffered, or dropped and counted."""
        self.open()
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        self._flush(0.0)
        if self._waiting_bytes + len(data) > BUFFER_MAX:
            self.dropped += 1
        else:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._flush(0.0)

    def flush(self, wait: float = 0.0) -> None:
        """Write the buffered lines, and wait up to `wait` seconds for a reader."""
        if self._waiting and self._pid == os.getpid():
            self.open()
            self._flush(wait)

    def take_unreported(self) -> int:
        """Return the number of dropped lines to report, or 0 while a report cannot be written."""
        if self._waiting or self._broken or self._reported == self.dropped:
            return 0
        lines = self.dropped - self._reported
        self._reported = self.dropped
        return lines

    def close(self) -> None:
        """Close this process's own descriptor."""
        if self._pid == os.getpid() and self._is_same(self._own):
            os.close(self._own)
        self._own, self._send, self._pid = -1, _refuse, 0

    def _flush(self, wait: float) -> None:
        deadline = time.monotonic() + wait
        while self._waiting:
            try:
                self._send_head()
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._wait_writable(left)
            except OSError:
                # The reader is gone, the disk is full, or the descriptor is closed.
                self.dropped += len(self._waiting)
                self._clear()
                self._broken = True
                return
            else:
                self._broken = False

    def _send_head(self) -> None:
        """Send the rest of the first line, or the whole line again if another one came between."""
        open_line, mine = self._mark[0], self._pid
        if open_line != mine:
            self._head_sent = 0
        line = self._waiting[0]
        # Our line can be open although nothing of it is left to send, because the disk was full and
        # the line was dropped.
        before = b"\n" if open_line and not self._head_sent else b""
        data = before + line[self._head_sent :]
        count = self._send(data)
        if not count:
            raise BlockingIOError
        if count < len(data):
            self._head_sent += max(0, count - len(before))
            self._mark[0] = mine
            return
        if open_line:
            self._mark[0] = 0
        self._head_sent = 0
        self._waiting.popleft()
        self._waiting_bytes -= len(line)

    def _clear(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = self._head_sent = 0

    def _is_same(self, descriptor: int) -> bool:
        """Return True if a descriptor still refers to the file for which this sink was created."""
        return self._identity is not None and _identity(descriptor) == self._identity

    def _open_own(self) -> tuple[int, Callable[[bytes], int]]:
        """Return a new descriptor for this process, and the function that sends data to it."""
        mode = os.fstat(self._fd).st_mode
        if not (stat.S_ISSOCK(mode) or stat.S_ISREG(mode)):
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                own = os.open(f"/proc/self/fd/{self._fd}", flags)
                return own, lambda data: os.write(own, data)
        own = fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 3)
        if stat.S_ISSOCK(mode):
            return own, lambda data: _send_to_socket(own, data)
        if stat.S_ISREG(mode):
            return own, lambda data: os.write(own, data)
        return own, lambda data: _write_if_ready(own, data)

    def _wait_writable(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._own, select.POLLOUT)
        poll.poll(max(1, round(seconds * 1000)))


def _send_to_socket(descriptor: int, data: bytes) -> int:
    shared = socket.socket(fileno=descriptor)
    try:
        return shared.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        shared.detach()


def _write_if_ready(descriptor: int, data: bytes) -> int:
    # This descriptor blocks. A pipe that is ready accepts PIPE_BUF bytes without blocking, unless
    # another process fills it between these two calls.
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])


def _identity(descriptor: int) -> Identity | None:
    """Return the device and inode of a descriptor's file, or None if the descriptor is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _ends_within_line(descriptor: int) -> bool:
    """Return True if the last line of a file is incomplete, for example after the disk was full."""
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size:
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(reader, 1, found.st_size - 1) != b"\n"
            finally:
                os.close(reader)
    return False


def _refuse(data: bytes) -> int:
    raise OSError(f"{len(data)} bytes for a closed descriptor")
