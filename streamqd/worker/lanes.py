"""Lanes: where several messages of one partition are handled at once, in coroutines or threads.

A lane writes the state byte of its entry when the handler has ended, and says so; all the rest is
done by the main thread, which alone talks to Redis.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from streamqd import handlers, logs
from streamqd.message import Message
from streamqd.scoreboard import DONE, Slot, now_ns
from streamqd.worker.eventloop import EventLoop, Run
from streamqd.worker.runs import state_after

CLOSE_SECONDS = 1.0
INTERRUPT_SECONDS = 1.0  # longest wait for a thread that is just ending its run


class Entry:
    """One message in hand, from its fetch to the end of its run."""

    __slots__ = (
        *("charged", "crashes", "index", "interrupted", "key", "lane", "message", "place"),
        *("retried", "run", "sequence", "size", "started_ns"),
    )

    def __init__(
        self, index: int, place: bytes, message: Message, retried: bool, crashes: int, size: int
    ) -> None:
        self.index = index
        self.place = place
        self.message = message
        self.retried = retried
        self.crashes = crashes
        self.charged = crashes > 0 or message.failures_in_place > 0  # it has counters in Redis
        self.size = size
        self.key = message.key
        self.lane = 0
        self.sequence = 0
        self.started_ns = 0
        self.interrupted = False
        self.run: Run | None = None  # where it runs as a coroutine


class Ended(NamedTuple):
    """A run that is over: what the handler returned or raised."""

    entry: Entry
    end: object
    at_ns: int


class Lanes:
    """Runs handlers, and keeps their ends until somebody asks. `bell` is readable when it has."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._ended: deque[Ended] = deque()
        self._rung = False
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, entries: list[Entry]) -> None:
        """Begin to handle entries."""
        raise NotImplementedError

    def interrupt(self, entry: Entry, limit: handlers.SoftTimeout) -> None:
        """Raise an exception in a handler that runs. Called by a signal handler."""
        raise NotImplementedError

    def ended(self) -> list[Ended]:
        """Return the runs that have ended since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        self._rung = False  # before the look, so that what comes after it rings again
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def close(self) -> None:
        """Give up what it needs. Nothing runs any more."""
        os.close(self.bell)

    def _over(self, entry: Entry, end: object) -> None:
        self._slot.states[entry.index] = DONE if end is None else state_after(end)
        entry.run = None  # it knows the entry: a circle, which only the collector would break
        self._ended.append(Ended(entry, end, now_ns()))
        if not self._rung:
            # Whoever has rung before is not answered yet: this run is found together with that one.
            self._rung = True
            self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self.bell, 1)


class TaskLanes(Lanes):
    """Coroutines on the worker's event loop."""

    def __init__(self, slot: Slot, function: Callable[..., object], loop: EventLoop) -> None:
        super().__init__(slot)
        self._function = function
        self._loop = loop

    def start(self, entries: list[Entry]) -> None:
        """Begin to handle entries."""
        function, over = self._function, self._over
        runs = []
        for entry in entries:
            message = entry.message
            run = entry.run = Run(partial(function, message), message, partial(over, entry))
            runs.append(run)
        self._loop.begin(runs)

    def interrupt(self, entry: Entry, limit: handlers.SoftTimeout) -> None:
        """Raise an exception in a coroutine, where it waits."""
        run = entry.run
        if run is not None:
            self._loop.interrupt(run, limit)

    def _ring(self) -> None:
        # After all that can run now: each ring wakes the main thread, and stops this one.
        self._loop.soon(super()._ring)


class ThreadLanes(Lanes):
    """Threads, as many as there are lanes."""

    def __init__(self, slot: Slot, function: Callable[..., object], lanes: int) -> None:
        super().__init__(slot)
        self._function = function
        self._work: SimpleQueue[Entry | None] = SimpleQueue()
        self._open: dict[Entry, _Window] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"lane {number}", daemon=True)
            for number in range(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, entries: list[Entry]) -> None:
        """Begin to handle entries."""
        for entry in entries:
            self._work.put(entry)

    def interrupt(self, entry: Entry, limit: handlers.SoftTimeout) -> None:
        """Raise an exception in a thread, as soon as it executes Python again."""
        window = self._open.get(entry)
        if window is not None:
            window.interrupt(limit)

    def close(self) -> None:
        """End the threads. Nothing runs any more."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        super().close()

    def _serve(self) -> None:
        while True:
            entry = self._work.get()
            if entry is None:
                return
            logs.running.set(entry.message)
            window = self._open[entry] = _Window()
            end: object = None
            try:
                try:
                    end = self._function(entry.message)
                finally:
                    window.close()
            except BaseException as raised:  # noqa: BLE001 - user code may raise anything
                end = raised
            window.close()  # an exception may have come before the first one took effect
            if isinstance(end, handlers.SoftTimeout) and window.limit is not None and not end.args:
                end.args = window.limit.args
            self._open.pop(entry, None)
            logs.running.set(None)
            self._over(entry, end)


class _Window:
    """The time in which a thread may be interrupted, and the thread."""

    def __init__(self) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.RLock()
        self._open = True
        self.limit: handlers.SoftTimeout | None = None

    def interrupt(self, limit: handlers.SoftTimeout) -> None:
        # The lock is held for some instructions only, but an exception may come between them.
        if not self._lock.acquire(timeout=INTERRUPT_SECONDS):
            return
        try:
            if self._open:
                self.limit = limit
                kind = ctypes.py_object(handlers.SoftTimeout)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, kind)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let nothing more come, and take back what has not come yet. In the thread itself."""
        with self._lock:
            self._open = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, None)
