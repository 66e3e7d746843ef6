"""A death of the process in the middle of a handler.

`dies` is a real one, in a forked child. What the handler has done to files, databases and servers
stays; what it held in memory is gone, no `finally` runs, and no connection is closed in peace.

`watched` is for a handler that ends its process itself, which here is that of the tests: the calls
of Python that end a process raise an exception instead, so a `finally` does run.
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
# By default these end no process: they stop it, wake it, or nothing happens.
_HARMLESS = frozenset(
    [
        *(0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    ]
)
CrashAt = int | Literal["end"]


def code_of(function: Callable[..., object]) -> CodeType:
    """The code whose lines are counted. Raises TypeError for what is not written in Python."""
    inner: Any = inspect.unwrap(function)
    if not inspect.isroutine(inner):
        inner = type(inner).__call__  # an object that is called
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        return code
    raise TypeError(f"crash_at counts lines, and {inner!r} has none in Python")


def dies(work: Callable[[], object], code: CodeType, crash_at: CrashAt) -> bool:
    """Do the work in a child that is killed when it has run `crash_at` lines of the code.

    False: the work ended before that. With "end" the child is killed after the work. A child that
    the work itself has ended is dead as well.
    """
    ended, tell = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks beside threads. The child has a single thing to do, and then dies.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _die(work, code, crash_at, tell)
    os.close(tell)
    try:
        os.waitpid(child, 0)
        os.set_blocking(ended, False)  # what the work has started may have the other end still
        return not _said(ended)
    except BaseException:  # who waits has been interrupted
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    finally:
        os.close(ended)


def _said(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1)
    except BlockingIOError:
        return b""


def _die(work: Callable[[], object], code: CodeType, crash_at: CrashAt, tell: int) -> None:
    """In the child. It never returns. It tells that the work has ended without a death."""
    try:
        if isinstance(crash_at, int):
            _count_lines(code, crash_at)
        work()
        if crash_at == END:
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os.write(tell, b".")
        os._exit(0)


def _count_lines(code: CodeType, left: int) -> None:
    """Kill this process after `left` lines of the code."""

    def on_line(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if event == "line":
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: object) -> Any:
        return on_line if frame.f_code is code else None

    threading.settrace(on_call)  # the event loop has a thread of its own
    sys.settrace(on_call)


class Death:
    """How a handler has ended its process, once it has."""

    exit: Exit | None = None


class ProcessEnded(BaseException):
    """Unwinds a handler that has ended its process, as nothing else in it should catch."""


@contextlib.contextmanager
def watched(function: Callable[..., object]) -> Iterator[Death]:
    """Notice that the function ends this process, which goes on.

    Seen are `os._exit`, `os.abort`, and signals that this process sends to itself. A death in
    native code, or by another process, is one of this process.
    """
    death = Death()
    own = os.getpid()

    def end(how: Exit) -> NoReturn:
        death.exit = death.exit or how
        raise ProcessEnded(str(how))

    def instead(original: Callable[..., Any], ending: Callable[..., Exit | None]) -> Any:
        def called(*args: Any) -> Any:
            # A child that the function has forked ends as it likes.
            how = ending(*args) if os.getpid() == own else None
            return original(*args) if how is None else end(how)

        return called

    def sent(target: int, number: int) -> Exit | None:
        return Exit(None, number) if target in (own, 0, -os.getpgrp()) and _ends(number) else None

    replaced: dict[Callable[..., Any], Callable[..., Exit | None]] = {
        os._exit: lambda status: Exit(status & 0xFF, None),
        os.abort: lambda: Exit(None, signal.SIGABRT),
        os.kill: sent,
        os.killpg: lambda group, number: sent(-group, number),
        signal.raise_signal: lambda number: sent(own, number),
    }
    by_id = {id(each): instead(each, ending) for each, ending in replaced.items()}
    # Where they are called from: `os`, and what a module has imported from it.
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
    """Whether a signal would end this process."""
    if number == signal.SIGKILL:
        return True
    try:
        return number not in _HARMLESS and signal.getsignal(number) is signal.SIG_DFL
    except ValueError:  # no signal has this number, as the real call will say
        return False
