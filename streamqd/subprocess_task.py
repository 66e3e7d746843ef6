"""Run a task in a forked child, which neither blocks the caller nor changes its state.

With this, the supervisor validates new code and registers topics while it keeps renewing leases.
The result of the task is sent back as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from streamqd import logs, process


class TaskResult(NamedTuple):
    """The outcome of a task: its result, or a sentence that explains why it failed."""

    result: Any
    error: str


class SubprocessTask:
    """A task and the child that runs it. Call `poll` until it returns the outcome."""

    def __init__(
        self,
        work: Callable[[], Any],
        *,
        title: str,
        timeout: float,
        forget: Iterable[Callable[[], None]] = (),
    ) -> None:
        """Start the child, which calls `work`. After `timeout` seconds, the child is killed.

        `forget` is the same as for `process.spawn`.
        """
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._timeout = timeout
        self.began = time.monotonic()
        self._deadline = self.began + timeout
        self._chunks: list[bytes] = []
        self._killed = False
        # True once the end of the pipe has been read. After that, the pipe would always be
        # readable.
        self._read_all = False

        def run(_control: object) -> int:
            body = json.dumps(work())
            with os.fdopen(writer, "w") as pipe:
                pipe.write(body)
            return 0

        try:
            self._child = process.spawn(run, title=title, forget=forget, keep=[writer])
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)

    @property
    def pid(self) -> int:
        """The process ID of the child."""
        return self._child.pid

    def poll(self, wait: float = 0.0) -> TaskResult | None:
        """Return the outcome, or None while the child is running. Waits up to `wait` seconds."""
        awaited = [self._child.pidfd] if self._read_all else [self._child.pidfd, self._reader]
        process.wait_readable(awaited, wait)
        self._read()
        exit_ = self._child.reap()
        if exit_ is None:
            if not self._killed and time.monotonic() > self._deadline:
                self.cancel()
            return None
        self._read()
        os.close(self._reader)
        logs.stack(exit_.stack, child=self._child.pid, about=self._child.title)
        if self._killed:
            return TaskResult(None, f"it took longer than {self._timeout:g} s")
        # If the child was killed, it may have written only a part of its result, so its exit is
        # checked.
        if exit_.code != 0 or not self._chunks:
            return TaskResult(None, f"its process terminated with {exit_}")
        try:
            return TaskResult(json.loads(b"".join(self._chunks)), "")
        except ValueError as error:
            return TaskResult(None, f"its result cannot be read: {error}")

    def cancel(self) -> None:
        """Kill the child. `poll` then collects it."""
        self._killed = True
        self._child.kill_group()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reader, 65536):
                self._chunks.append(chunk)
            self._read_all = True
