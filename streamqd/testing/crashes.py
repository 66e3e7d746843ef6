"""Crash a process in the middle of a handler.

`run_and_kill` kills a forked child process. Changes that the handler has made to files, databases
and servers remain. Its memory is lost, no `finally` block runs, and connections are not closed
cleanly.

`intercept_exit` is for a handler that kills its own process, which would be the process of the
tests. The functions of Python that end a process raise an exception instead, so `finally` blocks do
run.
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


def handler_code(function: Callable[..., object]) -> CodeType:
    """Return the code object whose lines are counted.

    Raises TypeError if the function is not written in Python.
    """
    inner: Any = inspect.unwrap(function)
    if not inspect.isroutine(inner):
        inner = type(inner).__call__  # the function is a callable object
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        return code
    raise TypeError(f"crash_at counts lines, but {inner!r} has no Python code")


def run_and_kill(work: Callable[[], object], code: CodeType, crash_at: CrashAt) -> bool:
    """Run the work in a child that is killed after `crash_at` lines. Return True if it died.

    Return False if the work finished before that line. If `crash_at` is "end", the child is killed
    after the work. If the work itself kills the child, this also counts as dying.
    """
    ended, report = os.pipe()
    with warnings.catch_warnings():
        # Python warns about forks in a process that has threads. This one is safe, because the
        # child only runs the work and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_child(work, code, crash_at, report)
    os.close(report)
    try:
        os.waitpid(child, 0)
        os.set_blocking(ended, False)  # processes that the work started may hold the other end
        return not _read_byte(ended)
    except BaseException:  # for example a KeyboardInterrupt while waiting
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


def _run_child(work: Callable[[], object], code: CodeType, crash_at: CrashAt, report: int) -> None:
    """Run the work in the child. If it finishes, report this over the pipe. Never returns."""
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
    """Kill this process after it has run this many more lines of the code."""

    def on_line(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if event == "line":
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: object) -> Any:
        return on_line if frame.f_code is code else None

    threading.settrace(on_call)  # for handlers in the thread of the event loop
    sys.settrace(on_call)


class InterceptedExit:
    """How a handler tried to kill its process. `exit` is None if it did not try."""

    exit: Exit | None = None


class ProcessEndedError(BaseException):
    """Unwinds the stack of a handler that tried to kill its process.

    User code should not catch it.
    """


@contextlib.contextmanager
def intercept_exit(function: Callable[..., object]) -> Iterator[InterceptedExit]:
    """Keep this process alive if the function tries to kill it, and record how.

    This covers `os._exit`, `os.abort`, and signals that this process sends to itself. A crash in
    native code, or a signal from another process, still kills this process.
    """
    death = InterceptedExit()
    own = os.getpid()

    def end(how: Exit) -> NoReturn:
        death.exit = death.exit or how
        raise ProcessEndedError(str(how))

    def instead(original: Callable[..., Any], ending: Callable[..., Exit | None]) -> Any:
        def called(*args: Any) -> Any:
            # Children that the function has forked may exit.
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
    # The functions are replaced in `os` and `signal`, and in the handler's module if it imported
    # them.
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
    except ValueError:  # for an invalid number, the real function raises the error
        return False
