"""A death of the process in the middle of a handler: real, in a forked child.

What the handler has done to files, databases and servers stays; what it held in memory is gone, no
`finally` runs, and no connection is closed in peace.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Literal

END = "end"
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

    False: the work ended before that. With "end" the child is killed after the work.
    """
    with warnings.catch_warnings():
        # Python warns of forks beside threads. The child has a single thing to do, and then dies.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _die(work, code, crash_at)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:  # who waits has been interrupted
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.WIFSIGNALED(status)


def _die(work: Callable[[], object], code: CodeType, crash_at: CrashAt) -> None:
    """In the child. It never returns."""
    try:
        if isinstance(crash_at, int):
            _count_lines(code, crash_at)
        work()
        if crash_at == END:
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(0)


def _count_lines(code: CodeType, left: int) -> None:
    """Kill this process when so many lines of the code have been run."""

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
