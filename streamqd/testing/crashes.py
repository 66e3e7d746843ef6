"""Process crashes in the middle of a handler.

`run_and_kill` kills a forked child process. The handler's changes to files, databases and servers
remain. Its memory is lost, no `finally` runs, and connections are not closed cleanly.

`watched` is for a handler that kills its own process, which is the process of the tests. Python's
calls that end a process raise an exception instead, so a `finally` does run.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Literal, NoReturn

from streamqd.process import Exit

END = "end"
KILLED = Exit(None, signal.SIGKILL)
# By default, these signals stop or continue a process, or are ignored. They do not kill it.
_HARMLESS = frozenset(
    [
        *(0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    ]
)
CrashAt = int | Literal["end"]


def code_of(function: Callable[..., object]) -> CodeType:
    """Return the code whose lines are counted. Raises TypeError unless it is written in Python."""
    inner: Any = inspect.unwrap(function)
    if not inspect.isroutine(inner):
        inner = type(inner).__call__  # a callable object
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        return code
    raise TypeError(f"crash_at counts lines, but {inner!r} has no Python code")


def run_and_kill(work: Callable[[], object], code: CodeType, crash_at: CrashAt) -> bool:
    """Run the work in a child that is killed after `crash_at` lines. Return True if it died.

    Returns False if the work finished before that line. With "end", the child is killed after the
    work. A child that is killed by the work itself counts as dead, too.
    """
    ended, report = os.pipe()
    with warnings.catch_warnings():
        # Python warns about a fork with threads. The child only runs the work and then exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _die(work, code, crash_at, report)
    os.close(report)
    try:
        os.waitpid(child, 0)
        os.set_blocking(ended, False)  # processes started by the work may still have the other end
        return not _read_byte(ended)
    except BaseException:  # such as KeyboardInterrupt during the wait
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    finally:
        os.close(ended)


def _read_byte(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1)
    except BlockingIOError:
        return b""


def _die(work: Callable[[], object], code: CodeType, crash_at: CrashAt, report: int) -> None:
    """Run the work in the child and report to the pipe that it finished alive. Never returns."""
    try:
        if isinstance(crash_at, int):
            _count_lines(code, crash_at)
        work()
        if crash_at == END:
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os.write(report, b".")
        os._exit(0)


def _count_lines(code: CodeType, left: int) -> None:
    """Kill this process after `left` more lines of the code."""

    def on_line(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if event == "line":
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: object) -> Any:
        return on_line if frame.f_code is code else None

    threading.settrace(on_call)  # the event loop runs in another thread
    sys.settrace(on_call)


class Death:
    """The exit of a handler that killed its process, or None."""

    exit: Exit | None = None


class ProcessEndedError(BaseException):
    """Unwinds a handler that killed its process. User code should not catch it."""


@contextlib.contextmanager
def watched(function: Callable[..., object]) -> Iterator[Death]:
    """Record an attempt of the function to kill this process, and keep the process alive.

    This covers `os._exit`, `os.abort`, and signals that this process sends to itself. A crash in
    native code, or a signal from another process, still kills this process.
    """
    death = Death()
    own = os.getpid()

    def end(how: Exit) -> NoReturn:
        death.exit = death.exit or how
        raise ProcessEndedError(str(how))

    def instead(original: Callable[..., Any], ending: Callable[..., Exit | None]) -> Any:
        def called(*args: Any) -> Any:
            # Children forked by the function may exit.
            how = ending(*args) if os.getpid() == own else None
            return original(*args) if how is None else end(how)

        return called

    def exit_of_signal(target: int, number: int) -> Exit | None:
        return Exit(None, number) if target in (own, 0, -os.getpgrp()) and _ends(number) else None

    replaced: dict[Callable[..., Any], Callable[..., Exit | None]] = {
        os._exit: lambda status: Exit(status & 0xFF, None),
        os.abort: lambda: Exit(None, signal.SIGABRT),
        os.kill: exit_of_signal,
        os.killpg: lambda group, number: exit_of_signal(-group, number),
        signal.raise_signal: lambda number: exit_of_signal(own, number),
    }
    by_id = {id(each): instead(each, ending) for each, ending in replaced.items()}
    # The calls are replaced in `os` and `signal`, and among the handler module's imports.
    imported = getattr(inspect.unwrap(function), "__globals__", {})
    places = [
        (names, name, value)
        for names in (vars(os), vars(signal), imported)
        for name, value in tuple(names.items())
        if id(value) in by_id
    ]
    for names, name, value in places:
        names[name] = by_id[id(value)]
    try:
        yield death
    finally:
        for names, name, value in places:
            names[name] = value


def _ends(number: int) -> bool:
    """Return True if a signal would kill this process."""
    if number == signal.SIGKILL:
        return True
    try:
        return number not in _HARMLESS and signal.getsignal(number) is signal.SIG_DFL
    except ValueError:  # not a signal number, so the real call raises the error
        return False
