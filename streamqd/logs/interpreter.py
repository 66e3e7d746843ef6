"""Writes Python's own messages for standard error to the log.

Warnings become records of the logger `py.warnings`. Exceptions that no code catches become events.
Records that no handler accepts are written to the log as well. If user code installs its own hooks,
they replace these. Output that C libraries or `print` write directly to standard error is not
logged.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from types import TracebackType
from typing import Any, Protocol, TextIO

from streamqd.logs.records import Output


class Report(Protocol):
    """A function that logs an exception that no code has caught, and where it was raised."""

    def __call__(self, error: BaseException, **where: object) -> None: ...


class Interpreter:
    """The hooks of this process. A forked child inherits them."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._before: tuple[Any, ...] | None = None

    def set_hooks(self, output: Output) -> None:
        """Install the hooks. `output` writes the records that no other handler accepts."""
        self._before = (
            sys.excepthook,
            sys.unraisablehook,
            threading.excepthook,
            warnings.showwarning,
            logging.lastResort,
        )
        sys.excepthook = self._exception
        sys.unraisablehook = self._unraisable
        threading.excepthook = self._exception_of_thread
        warnings.showwarning = self._warning
        output.stand_by()

    def restore_hooks(self) -> None:
        """Restore the previous hooks."""
        if self._before is None:
            return
        (
            sys.excepthook,
            sys.unraisablehook,
            threading.excepthook,
            warnings.showwarning,
            logging.lastResort,
        ) = self._before
        self._before = None

    def _exception(
        self, _kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._report(error.with_traceback(trace))

    def _exception_of_thread(self, failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and failed.exc_type is not SystemExit:
            name = failed.thread.name if failed.thread is not None else None
            self._report(failed.exc_value, thread=name)

    def _unraisable(self, failed: sys.UnraisableHookArgs) -> None:
        if failed.exc_value is not None:
            self._report(failed.exc_value, about=failed.err_msg or "exception ignored")

    def _warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None:
            file.write(warnings.formatwarning(message, category, filename, lineno, line))
            return
        where = f"{filename}:{lineno}"
        logging.getLogger("py.warnings").warning("%s: %s: %s", where, category.__name__, message)
