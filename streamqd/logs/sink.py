"""A descriptor that is written without ever blocking the writer.

Used by `logs` only. Standard error is shared with handlers and with the shell, so it must not be
made non-blocking itself: a pipe, terminal or file is opened a second time through /proc, a socket
(journald) is sent to with MSG_DONTWAIT. What cannot be written now waits in a bounded buffer; what
does not fit there is dropped and counted. Each process opens its own descriptor at its first line.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable

BUFFER_MAX = 256 * 1024  # bytes of lines waiting for a reader


class Sink:
    """Writes lines to a descriptor that it does not own. Not thread-safe; the caller locks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = 0
        self._send: Callable[[bytes], int] | None = None
        self._own: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._reported = 0
        self._broken = False
        self._cut = False  # what was written last ends within a line
        self.dropped = 0
        # A closed descriptor stays closed for us: its number may belong to a connection later.
        self._closed = not _is_open(fd)

    def write(self, line: str) -> None:
        """Write one line, or keep it for later, or drop and count it."""
        if self._pid != os.getpid():
            self._open()
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        self.flush()
        if self._cut and not self._waiting:
            # The rest of a line was dropped, as when the disk was full: this one begins a new line.
            data = b"\n" + data
        if self._waiting_bytes + len(data) > BUFFER_MAX:
            self.dropped += 1
        else:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self.flush()

    def flush(self, wait: float = 0.0) -> None:
        """Write what waits; give a reader up to `wait` seconds."""
        deadline = time.monotonic() + wait
        while self._waiting and self._pid == os.getpid():
            try:
                count = self._send(self._waiting[0]) if self._send else 0
            except BlockingIOError:
                count = 0
                if time.monotonic() >= deadline:
                    return
                self._wait_writable(deadline - time.monotonic())
            except OSError:
                # The reader is gone, the disk is full, the descriptor is closed: nothing to wait
                # for, and nobody to tell.
                self.dropped += len(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                self._broken = True
                return
            self._broken = False
            self._advance(count)

    def unreported(self) -> int:
        """Return how many dropped lines nobody was told of, once the way is free again."""
        if self._waiting or self._broken or self._reported == self.dropped:
            return 0
        lines = self.dropped - self._reported
        self._reported = self.dropped
        return lines

    def close(self) -> None:
        """Forget the descriptor; close it if this process opened it."""
        if self._own is not None and self._pid == os.getpid():
            os.close(self._own)
        self._own = self._send = None
        self._pid = 0

    def _advance(self, count: int) -> None:
        if count:
            head = self._waiting.popleft()
            self._waiting_bytes -= count
            self._cut = count < len(head)
            if count < len(head):
                self._waiting.appendleft(head[count:])

    def _open(self) -> None:
        # What waits here after a fork is the parent's to write. Its descriptor is left alone:
        # the number may belong to something else by now.
        self._pid = os.getpid()
        self._own = None
        self._waiting.clear()
        self._waiting_bytes = 0
        self._cut = False
        self._reported = self.dropped = 0
        self._send = self._sender()

    def _sender(self) -> Callable[[bytes], int]:
        if self._closed:
            return _refuse
        mode = os.fstat(self._fd).st_mode
        if stat.S_ISSOCK(mode):
            return self._send_to_socket
        if stat.S_ISREG(mode):
            return lambda data: os.write(self._fd, data)
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            own = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError:
            return self._write_if_ready
        self._own = own
        return lambda data: os.write(own, data)

    def _send_to_socket(self, data: bytes) -> int:
        shared = socket.socket(fileno=self._fd)
        try:
            return shared.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        finally:
            shared.detach()

    def _write_if_ready(self, data: bytes) -> int:
        # Without a descriptor of our own: a pipe that is ready takes PIPE_BUF bytes without
        # blocking, unless another process fills it in between.
        if not select.select([], [self._fd], [], 0)[1]:
            raise BlockingIOError
        return os.write(self._fd, data[: select.PIPE_BUF])

    def _wait_writable(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._fd if self._own is None else self._own, select.POLLOUT)
        poll.poll(max(0, round(seconds * 1000)))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _refuse(data: bytes) -> int:
    raise OSError(f"{len(data)} bytes for a closed descriptor")
