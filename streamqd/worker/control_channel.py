"""Receive the supervisor's commands between two messages: continue, pause or stop.

The supervisor stores its command in the worker's slot of the scoreboard, and the worker reads it
before every message. The control socket only wakes a worker that is waiting. If the socket is
closed at the other end, the supervisor has exited, so the worker also exits.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import time
from collections.abc import Callable

from streamqd import process
from streamqd.scoreboard import (
    WORD_COMMAND,
    WORD_TRUSTED_UNTIL,
    WorkerCommand,
    WorkerSlot,
    WorkerState,
    now_ns,
)
from streamqd.worker.forks import fork_role

TRUST_POLL_SECONDS = 0.05
PROGRESS_SECONDS = 5.0  # interval at which a waiting worker publishes that it is alive
MESSAGE_BYTES_MAX = 160_000  # packed size of a grant with ENTRIES_MAX suspects


class ExitCode(enum.IntEnum):
    """The exit code of a worker, from which the supervisor learns why the worker exited."""

    STOPPED = 0
    BOOT_FAILED = 3
    FENCED = 4
    RECYCLE = 5
    NO_GROUP = 6


class Stop(Exception):  # noqa: N818 - leaves all loops, it is not an error
    """Raised when the worker must exit now. Messages that have not started stay pending."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code.name)
        self.code = code


class ControlChannel:
    """Receives the supervisor's commands in a worker."""

    def __init__(
        self, slot: WorkerSlot, control: socket.socket, before_pause: Callable[[], None]
    ) -> None:
        """Listen on a control socket. `before_pause` settles all verdicts that Redis accepts."""
        self.slot = slot
        self.control = control
        self._before_pause = before_pause
        # Called before each wait. It must be quick, because a worker waits often.
        self.before_wait: Callable[[], None] = lambda: None

    def check(self, unstarted: int = 0) -> None:
        """Follow the current command: return if there is none, wait while paused, or raise Stop.

        `unstarted` is the number of fetched entries that have not started. If the worker stops,
        they are counted as released.
        """
        command = self.slot.words[WORD_COMMAND]
        if command == WorkerCommand.NONE:
            return
        fork_role.end_child()
        if command == WorkerCommand.STOP:
            self.slot.add("released", unstarted)
            raise Stop(ExitCode.STOPPED)
        self._before_pause()
        self.slot.state = WorkerState.PAUSED
        self.wake_supervisor()
        while self.slot.words[WORD_COMMAND] == WorkerCommand.PAUSE:
            self._wait(1.0)
            self._before_pause()
        self.slot.state = WorkerState.READY
        self.check(unstarted)

    def await_trust(self) -> int:
        """Wait until the supervisor has renewed the lease. Return the time after that (`now_ns`).

        Before the wait, finished messages are settled, because another worker may own the
        assignment by the end of the wait. Raises Stop if the supervisor commands it.
        """
        settled = False
        while (now := now_ns()) > self.slot.words[WORD_TRUSTED_UNTIL]:
            if not settled:
                self._before_pause()
                settled = True
            self.check()
            self._wait(TRUST_POLL_SECONDS)
        return now

    def sleep(self, seconds: float, unstarted: int = 0) -> None:
        """Wait for `seconds`, but follow the supervisor's commands during the wait.

        `unstarted` is passed to `check`. Raises Stop.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check(unstarted)
            self._wait(min(left, PROGRESS_SECONDS))

    def await_any(self, descriptors: list[int], seconds: float) -> set[int]:
        """Wait until a descriptor is readable, the supervisor wakes the worker, or time is up.

        Return the readable descriptors. If the supervisor woke the worker with a command, the
        command is stored in `self.slot`, where the caller must check for it.
        """
        self.slot.progress_ns = now_ns()
        poller = select.poll()
        for descriptor in (*descriptors, self.control.fileno()):
            poller.register(descriptor, select.POLLIN)
        ready = {found for found, _ in poller.poll(seconds * 1000)}
        if self.control.fileno() in ready:
            self._read()
        return ready

    def await_assignment(self) -> bytes:
        """Wait in a standby for the supervisor's next message, which is a grant or STOP."""
        while True:
            process.wait_readable([self.control.fileno()], PROGRESS_SECONDS)
            message = self._read()
            if message:
                return message

    def wake_supervisor(self) -> None:
        """Wake the supervisor, because this worker has changed its slot in the scoreboard."""
        with contextlib.suppress(OSError):
            self.control.send(b"!", socket.MSG_DONTWAIT)

    def fail(self, why: str) -> None:
        """Report why this process cannot start. The supervisor logs the text after the exit."""
        with contextlib.suppress(OSError):
            message = process.FAILURE_PREFIX + why.encode("utf-8", "replace")
            self.control.send(message[: process.FAILURE_BYTES_MAX], socket.MSG_DONTWAIT)

    def _wait(self, seconds: float) -> None:
        self.before_wait()
        # Waiting counts as progress, so that the supervisor does not kill this worker as stalled.
        self.slot.progress_ns = now_ns()
        if process.wait_readable([self.control.fileno()], seconds):
            self._read()

    def _read(self) -> bytes:
        try:
            message = self.control.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError:
            message = b""
        if not message:
            os._exit(1)  # the supervisor has exited, and all fetched entries stay pending
        return message
