"""Lanes: run several messages of one partition at a time, in coroutines or threads.

When the handler has finished, its lane writes the entry's state byte (DONE or FAILED) and reports
the entry to the main thread. The main thread does everything else, because only it uses Redis.
While it determines the verdict on a failed entry, the entry is RUNNING again, so that a crash is
charged to it. Until then, no crash is charged to the entry, because no user code runs for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from asyncio import CancelledError, Task
from collections.abc import Callable
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from queue import SimpleQueue
from time import CLOCK_BOOTTIME, clock_gettime_ns
from typing import Any, Protocol

from streamqd import handlers, logs
from streamqd.scoreboard import DONE, FAILED, WorkerSlot
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.eventloop import CoroutineRun, EventLoop, task_factory
from streamqd.worker.forks import fork_role

CLOSE_SECONDS = 1.0
INTERRUPT_SECONDS = 1.0  # longest wait for the lock of a thread that finishes its run


class RunEnds:
    """Collects finished runs for the main thread. `wake_fd` becomes readable when it has any."""

    def __init__(
        self, slot: WorkerSlot, soon: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """Start with no finished runs.

        `soon` is used to wake the main thread slightly later, so that many finished runs cause only
        one wake-up. If it is None, the main thread is woken immediately.
        """
        self._states = slot.states
        self._soon = soon
        self._ended: list[FetchedEntry] = []
        self._woken = False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, entry: FetchedEntry, end: object) -> None:
        """Record that a run finished, and wake the main thread unless it is already being woken.

        `end` is the handler's return value or its exception.
        """
        if fork_role.child:
            fork_role.end_child()
        error = None if end is None else handlers.run_error(end)
        entry.end = error
        self._states[entry.index] = DONE if error is None else FAILED
        entry.ended_ns = clock_gettime_ns(CLOCK_BOOTTIME)
        entry.run = None  # breaks the reference cycle entry -> run -> entry
        self._ended.append(entry)
        if not self._woken:
            # Wake the main thread only once. It then collects all runs that have finished by then.
            self._woken = True
            if self._soon is None:
                self._wake()
            else:
                self._soon(self._wake)

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def take(self) -> list[FetchedEntry]:
        """Return the entries whose runs have finished since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        self._woken = False  # cleared first, so that a later run wakes the main thread again
        count = len(self._ended)  # another thread may append entries at the same time
        found = self._ended[:count]
        del self._ended[:count]
        return found

    def close(self) -> None:
        """Close the file descriptor. No run may be active."""
        os.close(self.wake_fd)


class Lanes(Protocol):
    """Runs the handler for several entries at a time, and reports finished runs to `ends`."""

    @property
    def ends(self) -> RunEnds: ...

    def start(self, entries: list[FetchedEntry]) -> None:
        """Start to handle entries. There must be at least as many free lanes as entries."""

    def interrupt(self, entry: FetchedEntry, limit: handlers.SoftTimeout) -> None:
        """Raise an exception in the entry's run. A signal handler may call this."""

    def close(self) -> None:
        """Release the lanes' resources. No handler may be running."""


class TaskLanes:
    """Lanes that run coroutines on the worker's event loop, each in a task of its own."""

    def __init__(
        self,
        slot: WorkerSlot,
        function: Callable[..., Any],
        loop: EventLoop,
        *,
        limited: bool,
    ) -> None:
        """Create the lanes.

        `limited` is true if runs have a soft limit, so that they may have to be interrupted.
        """
        # Wake the main thread only after all callbacks that are ready have run, because each
        # wake-up interrupts the loop's thread.
        self.ends = RunEnds(slot, loop.call_soon)
        self._function = function
        self._loop = loop
        self._limited = limited
        self._name = getattr(function, "__name__", "handler")  # the name of its tasks

    def start(self, entries: list[FetchedEntry]) -> None:
        """Start a task for each entry."""
        if not self._limited:
            self._loop.call(self._begin, entries)
            return
        runs = []
        for entry in entries:
            work, over = partial(self._function, entry.message), partial(self.ends.add, entry)
            run = entry.run = CoroutineRun(work, entry.message, over)
            runs.append(run)
        self._loop.begin(runs)

    def _begin(self, entries: list[FetchedEntry]) -> None:
        make, handle = task_factory(self._name), self._handle
        for entry in entries:
            handled = handle(entry)
            try:
                task = make(handled)
            except BaseException as raised:  # noqa: BLE001 - the handler's module may make the tasks
                if getcoroutinestate(handled) == CORO_CREATED:  # otherwise it finishes normally
                    handled.close()
                    self.ends.add(entry, raised)
                continue
            if not task.done():
                entry.run = task  # the loop does not keep a reference to the task
        self._loop.call_soon(partial(self._report_canceled, entries))

    def _report_canceled(self, entries: list[FetchedEntry]) -> None:
        """Report tasks that were canceled before they ran, because they cannot do so themselves.

        This must be called after every other task has run its first step.
        """
        for entry in entries:
            if isinstance(entry.run, Task) and entry.run.done():
                self.ends.add(entry, CancelledError("canceled before it started"))

    async def _handle(self, entry: FetchedEntry) -> None:
        if fork_role.child:
            fork_role.end_child()
        message = entry.message
        logs.running.set(message)
        try:
            end = await self._function(message)
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything
            self.ends.add(entry, raised)
        else:
            self.ends.add(entry, end)

    def interrupt(self, entry: FetchedEntry, limit: handlers.SoftTimeout) -> None:
        """Raise an exception in a coroutine where it is waiting."""
        run = entry.run
        if isinstance(run, CoroutineRun):
            self._loop.interrupt(run, limit)

    def close(self) -> None:
        """Release the lanes' resources. No handler may be running."""
        self.ends.close()


class ThreadLanes:
    """Lanes that run the handler in threads, one thread per lane."""

    def __init__(self, slot: WorkerSlot, function: Callable[..., object], lanes: int) -> None:
        self.ends = RunEnds(slot)
        self._function = function
        self._work: SimpleQueue[FetchedEntry | None] = SimpleQueue()
        self._open: dict[FetchedEntry, _Window] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"lane {number}", daemon=True)
            for number in range(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, entries: list[FetchedEntry]) -> None:
        """Pass the entries to the threads."""
        for entry in entries:
            self._work.put(entry)

    def interrupt(self, entry: FetchedEntry, limit: handlers.SoftTimeout) -> None:
        """Raise an exception in a thread, as soon as it executes Python again."""
        window = self._open.get(entry)
        if window is not None:
            window.interrupt(limit)

    def close(self) -> None:
        """Stop the threads. No run may be active."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self.ends.close()

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
            window.close()  # repeated, because the exception may have interrupted the first call
            if window.limit is not None and type(end) is handlers.SoftTimeout and not end.args:
                end.args = window.limit.args  # an asynchronous exception is raised without a text
            self._open.pop(entry, None)
            logs.running.set(None)
            self.ends.add(entry, end)


class _Window:
    """The period in which a lane's thread may be interrupted, created when a run starts."""

    def __init__(self) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.RLock()
        self._open = True
        self.limit: handlers.SoftTimeout | None = None

    def interrupt(self, limit: handlers.SoftTimeout) -> None:
        # The thread holds the lock for only a few instructions. But an exception can interrupt it
        # there and leave the lock taken, so do not wait for the lock forever.
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
        """End the period, and remove an exception that is scheduled but was not raised yet.

        This must be called in the lane's thread.
        """
        with self._lock:
            self._open = False
        if self.limit is not None:
            self._clear_exception()

    def _clear_exception(self) -> None:
        # CPython can revoke a scheduled exception. But up to version 3.12, this makes all threads
        # check for one at every call and loop iteration from then on, and they never finish under a
        # tracer. To avoid this, schedule the exception again, and catch it here when it is raised.
        with contextlib.suppress(handlers.SoftTimeout):
            kind = ctypes.py_object(handlers.SoftTimeout)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, kind)
            while True:
                pass
