"""The event loop of a worker, which runs in a thread of its own for as long as the worker exists.

The loop keeps running while the worker waits for Redis. So the timers, keep-alives and connection
pools of clients that a handler uses also work between two messages. The main thread passes
coroutines to the loop and receives their results.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import select
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from typing import Any

from streamqd import extras, logs
from streamqd.errors import HandlerLoadError
from streamqd.logs import LoggedMessage
from streamqd.scoreboard import WorkerSlot
from streamqd.worker.forks import fork_role
from streamqd.worker.loop_heartbeat import LoopHeartbeat

CLOSE_SECONDS = 5.0  # longest wait for canceled tasks that a handler left running

_libc = ctypes.CDLL(None)

Work = Callable[[], object]  # called in the loop's thread, returns the coroutine


class CoroutineRun:
    """Runs a handler's coroutine, and passes its result to `ended`.

    The result is the returned value or the raised exception. The event loop's task drives this
    object in place of the coroutine, and this object forwards each step to the coroutine. That
    makes it possible to raise an exception at the point where the handler is waiting.
    """

    __slots__ = ("_coroutine", "_ended", "_limit", "_message", "_task", "_work")

    def __init__(
        self, work: Work, message: LoggedMessage | None, ended: Callable[[object], object]
    ) -> None:
        self._work = work
        self._message = message
        self._ended = ended
        self._coroutine: Any = None
        self._limit: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the coroutine. This method and `interrupt` must be called in the loop's thread."""
        try:
            self._task = loop.create_task(self)  # type: ignore[arg-type]
        except BaseException as raised:  # noqa: BLE001 - the handler's module may make the tasks
            if self._coroutine is None:  # otherwise, it has started and finishes normally
                ended, self._work, self._ended = self._ended, _raise_withdrawn, _ignore_result
                ended(raised)

    def interrupt(self, limit: BaseException) -> None:
        """Raise an exception in the coroutine where it is waiting, unless it has finished."""
        self._limit = limit
        if self._task is not None:
            self._task.cancel()

    # --- called by the task ---

    def send(self, value: object) -> object:
        try:
            return self._ensure_started().send(value)
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything
            return self._end(raised)

    def throw(self, error: BaseException) -> object:
        limit = self._limit
        if limit is not None and isinstance(error, asyncio.CancelledError):
            self._limit = None
            if self._task is not None:
                self._task.uncancel()  # the coroutine may continue and wait again
            error = limit
        try:
            return self._ensure_started().throw(error)
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything
            return self._end(raised)

    def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()

    def __await__(self) -> Any:
        raise TypeError("a run is driven by its task alone")

    def __getattr__(self, name: str) -> Any:
        # Tools that inspect the task read attributes of its coroutine, such as `cr_frame`. This
        # object stands in for the coroutine, so return the coroutine's attributes.
        return getattr(self._coroutine, name)

    def _ensure_started(self) -> Any:
        if self._coroutine is None:
            fork_role.end_child()
            if self._message is not None:
                logs.running.set(self._message)
            self._coroutine = self._work()
        return self._coroutine

    def _end(self, raised: BaseException) -> object:
        fork_role.end_child()
        self._task = None  # breaks the reference cycle run -> task -> run
        # Check the class, because `isinstance` can call user code of the exception.
        returned = issubclass(type(raised), StopIteration)
        self._ended(getattr(raised, "value", None) if returned else raised)
        raise StopIteration


def _raise_withdrawn() -> object:
    raise asyncio.CancelledError("its task could not be created")


def _ignore_result(_end: object) -> None:
    pass


def _start(runs: list[CoroutineRun]) -> None:
    loop = asyncio.get_running_loop()
    for run in runs:
        run.start(loop)


def task_factory(name: str) -> Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]:
    """Return the fastest function that creates a task with this name on the running loop.

    On Python 3.12 and later, its tasks start immediately, so that a coroutine that never waits
    finishes without being queued. If the loop has a task factory of its own, the tasks have no
    name.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not None:
        return loop.create_task  # without a name, which Python 3.14 would pass to the task factory
    if sys.version_info >= (3, 12):
        return partial(asyncio.Task, loop=loop, name=name, eager_start=True)
    return partial(asyncio.Task, loop=loop, name=name)


class _PollDescriptor(ctypes.Structure):
    """C's `struct pollfd`."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    """C's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class PreciseSelector(selectors.EpollSelector):
    """A selector that waits no longer than its timeout, so that timers of the loop are precise.

    The usual selector rounds the timeout up to whole milliseconds. This one may return without
    events, less than a millisecond early. In that case, the loop calls it again for the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._poll.register(self.fileno(), select.POLLIN)
        self._time = _TimeSpec(0, 0)
        self._polled = _PollDescriptor(self.fileno(), select.POLLIN, 0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events for up to `timeout` seconds, and return the keys that are ready."""
        if timeout and timeout > 0:
            if milliseconds := int(timeout * 1000):
                self._poll.poll(milliseconds)
            else:
                self._time.nanoseconds = int(timeout * 1e9)
                _libc.ppoll(ctypes.byref(self._polled), 1, ctypes.byref(self._time), None)
            timeout = 0
        return super().select(timeout)


def new_loop(kind: str = "asyncio") -> asyncio.AbstractEventLoop:
    """Return a new event loop. `kind` is the value of the setting `daemon.event_loop`.

    asyncio's own loop gets precise timers (see `PreciseSelector`). Raises HandlerLoadError if
    uvloop is required and cannot be imported.
    """
    if kind == "uvloop":
        try:
            import uvloop
        except ImportError as error:
            raise HandlerLoadError(
                f'daemon.event_loop "uvloop" cannot be imported ({error}); {extras.hint("uvloop")}'
            ) from error
        made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return made
    loop = asyncio.new_event_loop()
    if type(loop) is not asyncio.SelectorEventLoop:
        return loop
    loop.close()
    return asyncio.SelectorEventLoop(PreciseSelector())


class EventLoop:
    """Owns the event loop and its thread.

    The methods must be called in the main thread unless their docstring says otherwise.
    """

    def __init__(self, kind: str = "asyncio") -> None:
        """Create a loop and start its thread. Raises HandlerLoadError if uvloop is missing."""
        self._loop = new_loop(kind)
        self._thread = threading.Thread(target=self._turn, name="event loop", daemon=True)
        self._thread.start()
        self._waited: CoroutineRun | None = None
        self._heartbeat: LoopHeartbeat | None = None
        fork_role.loops.add(self)

    def halt(self) -> None:
        """Stop the loop in a process that a coroutine forked, without running more callbacks."""
        # This is asyncio's queue of callbacks. Other loops, such as uvloop, have no such attribute,
        # so they still run the callbacks of the current turn.
        ready = getattr(self._loop, "_ready", None)
        if isinstance(ready, deque):
            ready.clear()
        self._loop.stop()

    def publish_heartbeat(self, slot: WorkerSlot | None) -> None:
        """Start to publish the loop's heartbeat in a worker's slot, or stop if `slot` is None."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._heartbeat = (
            None if slot is None else LoopHeartbeat(self._loop, slot, self._thread.native_id)
        )

    def begin(self, runs: list[CoroutineRun]) -> None:
        """Start several coroutines, and wake the loop only once for all of them."""
        if self._heartbeat is not None:
            self._heartbeat.start()
        self._loop.call_soon_threadsafe(_start, runs)

    def call(self, function: Callable[..., object], *given: object) -> None:
        """Call a function in the loop's thread."""
        if self._heartbeat is not None:
            self._heartbeat.start()
        self._loop.call_soon_threadsafe(function, *given)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedule a function after all callbacks that are ready now.

        This must be called in the loop's thread.
        """
        self._loop.call_soon(call)

    def interrupt(self, run: CoroutineRun, limit: BaseException) -> None:
        """Raise an exception in a coroutine where it is waiting. A signal handler may call this."""
        self._loop.call_soon_threadsafe(run.interrupt, limit)

    def wait(self, work: Work) -> object:
        """Run a coroutine and wait until it has finished.

        Return the value that it returned or the exception that it raised.
        """
        ends: SimpleQueue[object] = SimpleQueue()
        run = self._waited = CoroutineRun(work, None, ends.put)
        self.begin([run])
        end = ends.get()
        self._waited = None
        return end

    def interrupt_wait(self, limit: BaseException) -> None:
        """Raise an exception in the coroutine that `wait` runs. A signal handler may call this."""
        if self._waited is not None:
            self.interrupt(self._waited, limit)

    def close(self) -> None:
        """Cancel the remaining tasks and stop the thread. This takes up to CLOSE_SECONDS."""
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            fork_role.end_child()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        with contextlib.suppress(Exception):
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=CLOSE_SECONDS / 2))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
