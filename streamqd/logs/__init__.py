"""The daemon's log: one line per state change, all through the logger `streamqd`.

A line starts with an event name from `EVENTS`. These names stay the same across versions, so that
scripts and tests can wait for them. Writing never blocks and never raises. Lines that have no
reader are dropped and counted, and their number is reported later. Payloads are never logged,
except for the parts that a handler's error quotes, as far as `dlq_error` and `redact_error` allow.

Handlers log through their own loggers, see `records`. Their records are written to the same log,
unless the handlers' code sends them elsewhere. A forked child must close inherited descriptors
before it logs, because its first line opens a new descriptor.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Hashable, Iterable, Mapping

from streamqd.errors import InvalidValueError
from streamqd.logs.events import EVENTS
from streamqd.logs.interpreter import Interpreter
from streamqd.logs.lines import JsonFormatter, LogLine, TextFormatter, flatten, process
from streamqd.logs.records import LoggedBatch, LoggedMessage, Output, current, mark_records, running
from streamqd.logs.sink import Sink

__all__ = [
    "EVENTS",
    "Episode",
    "Limit",
    "LoggedBatch",
    "LoggedMessage",
    "Once",
    "Output",
    "bad_value",
    "bad_values",
    "close",
    "count_dropped",
    "current",
    "event",
    "flush",
    "is_json",
    "mark_records",
    "output_of_handlers",
    "running",
    "set_role",
    "setup",
    "stack",
    "verbose",
]

RESERVED = frozenset({"ts", "level", "event", "pid", "role", "logger", "msg", "traceback"})

LINES_PER_SECOND = 20  # limit per second and process, for events that messages cause
LINES_AT_ONCE = 10  # limit of lines per check, because a client may have written 10,000 bad values

_LOGGER = logging.getLogger("streamqd")
_interpreter = Interpreter(
    lambda error, **where: event("process.failed", logging.ERROR, exc=error, **where)
)


# --- events ---------------------------------------------------------------------------------------


def event(
    name: str,
    level: int = logging.INFO,
    *,
    exc: BaseException | None = None,
    trace: str = "",
    **fields: object,
) -> None:
    """Log one event. Fields that are None are omitted. An `Assignment` becomes three fields.

    `exc` adds the traceback of an exception, and `trace` adds a traceback that is already text.
    Field values are shortened and escaped. Never pass a payload.
    """
    assert name in EVENTS, f"the log event {name!r} is not registered in streamqd.logs.EVENTS"
    _log(name, level, fields, exc, trace)


def stack(text: str, child: int, **where: object) -> None:
    """Log the stack that Python's fault handler wrote for a process, unless it is ''.

    A command has no log, so it prints the stack to standard error.
    """
    if text and any(isinstance(handler, _Handler) for handler in _LOGGER.handlers):
        _log("stack.dumped", logging.WARNING, {"child": child, **where}, trace=text)
    elif text:
        sys.stderr.write(text + "\n")


def bad_value(error: InvalidValueError, **where: object) -> None:
    """Log an unexpected value in Redis, and its key and field."""
    _log("redis.bad_value", logging.WARNING, {**_bad_value_fields(error), **where})


def _bad_value_fields(error: InvalidValueError) -> dict[str, object]:
    """Return the log fields that describe a bad value."""
    return {
        "key": error.key[:200],
        "field": error.field[:200] or None,
        "found": error.found,
        "wanted": error.wanted,
    }


def bad_values() -> Once:
    """Return a log for repeated checks, which logs each bad value only once until it changes."""
    return Once("redis.bad_value")


class Episode:
    """A repeating failure, logged when it starts, and again with its duration when it is over."""

    def __init__(self, begins: str, ends: str) -> None:
        assert begins in EVENTS, begins
        assert ends in EVENTS, ends
        self._begins = begins
        self._ends = ends
        self._since: float | None = None
        self.failures = 0

    @property
    def open(self) -> bool:
        """True while the failure continues."""
        return self._since is not None

    def log_failure(
        self, level: int = logging.WARNING, *, exc: BaseException | None = None, **fields: object
    ) -> None:
        """Count one failure, and log it if it is the first of its episode."""
        self.failures += 1
        if self._since is None:
            self._since = time.monotonic()
            _log(self._begins, level, fields, exc)

    def log_recovery(self, level: int = logging.INFO, **fields: object) -> None:
        """Close the episode, and log its duration in seconds.

        Does nothing if no episode is open.
        """
        if self._since is not None:
            seconds = round(time.monotonic() - self._since, 3)
            length: dict[str, object] = {"seconds": seconds, "failures": self.failures}
            _log(self._ends, level, length | fields)
            self._since = None
            self.failures = 0


class Limit:
    """Logs an event that messages cause, no more than `per_second` times per second.

    After lines have been suppressed, the next line reports their number in `suppressed`.
    """

    def __init__(self, name: str, level: int, per_second: int = LINES_PER_SECOND) -> None:
        assert name in EVENTS, name
        self._name = name
        self._level = level
        self._per_second = per_second
        self._left = 0
        self._since = -math.inf
        self._suppressed = 0

    def is_suppressed(self) -> bool:
        """Return True and count a suppressed line if no line may be written now.

        Callers use this to avoid building a line that would not be written.
        """
        if not _LOGGER.isEnabledFor(self._level):
            return True
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since = now
            self._left = self._per_second
        if not self._left:
            self._suppressed += 1
        return not self._left

    def event(self, *, trace: str = "", **fields: object) -> None:
        """Log one event, or count it as suppressed. `trace` is a traceback that is already text."""
        if self.is_suppressed():
            return
        self._left -= 1
        held, self._suppressed = self._suppressed, 0
        _log(self._name, self._level, {**fields, "suppressed": held or None}, None, trace)

    def catch_up(self, **fields: object) -> None:
        """Log the number of suppressed lines if a second has passed and no line has reported it."""
        if self._suppressed and time.monotonic() - self._since >= 1.0:
            self._left = self._per_second - 1
            self._since = time.monotonic()
            held, self._suppressed = self._suppressed, 0
            _log(self._name, self._level, {**fields, "suppressed": held})


class Once:
    """Logs the results of repeated checks. Each item is logged once, until it changes."""

    def __init__(self, name: str, level: int = logging.WARNING) -> None:
        assert name in EVENTS, name
        self._name = name
        self._level = level
        self._known: dict[Hashable, Mapping[str, object]] = {}

    def report(self, found: Mapping[Hashable, Mapping[str, object]]) -> None:
        """Log the items that are new or have changed. `found` must contain all current items.

        After LINES_AT_ONCE lines, one more line contains the number of the remaining items.
        """
        fresh = [fields for name, fields in found.items() if self._known.get(name) != fields]
        self._known = dict(found)
        for fields in fresh[:LINES_AT_ONCE]:
            _log(self._name, self._level, fields)
        if len(fresh) > LINES_AT_ONCE:
            _log(self._name, self._level, {"more": len(fresh) - LINES_AT_ONCE})

    def report_values(self, found: Iterable[InvalidValueError]) -> None:
        """Log the bad values that are new or have changed.

        `found` must contain all current ones.
        """
        self.report({(each.key, each.field): _bad_value_fields(each) for each in found})


def _log(
    name: str,
    level: int,
    fields: Mapping[str, object],
    exc: BaseException | None = None,
    trace: str = "",
) -> None:
    assert RESERVED.isdisjoint(fields), f"reserved log fields: {RESERVED & fields.keys()}"
    if _LOGGER.isEnabledFor(level):
        shown = flatten(fields)
        info = (type(exc), exc, exc.__traceback__) if exc is not None else None
        extra = {"event": name, "fields": shown, "trace": trace}
        _LOGGER.log(level, "%s", LogLine(name, shown), exc_info=info, extra=extra)


# --- setup ----------------------------------------------------------------------------------------


def setup(*, role: str, style: str = "auto", level: str = "info", fd: int = 2) -> None:
    """Write the daemon's lines, and the messages that Python itself prints, to a descriptor.

    `style` is "auto" (text on a terminal, otherwise JSON), "text" or "json".
    """
    close()
    handler = _Handler(Sink(fd))
    handler.setFormatter(JsonFormatter() if is_json(style, fd) else TextFormatter())
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level.upper())
    _LOGGER.propagate = False
    _interpreter.set_hooks(Output(handler))
    set_role(role)


def is_json(style: str, fd: int = 2) -> bool:
    """Return True if lines in this style (auto, text or json) are JSON on the descriptor."""
    assert style in ("auto", "text", "json"), style
    return style == "json" or (style == "auto" and not _is_terminal(fd))


def set_role(role: str) -> None:
    """Set the role that this process shows in its lines, such as `supervisor`.

    A forked child sets its own role. This call also opens the child's own descriptor, before user
    code can close standard error.
    """
    process.role = role
    for handler in _LOGGER.handlers:
        if isinstance(handler, _Handler):
            handler.sink.open()


def flush(wait: float = 0.0) -> None:
    """Write the buffered lines, and wait up to `wait` seconds for a reader.

    Called once per tick.
    """
    for handler in _LOGGER.handlers:
        if isinstance(handler, _Handler):
            handler.acquire()
            try:
                handler.sink.flush(wait)
                handler.report_dropped()
            finally:
                handler.release()


def verbose() -> bool:
    """Return True if debug lines are being written."""
    return _LOGGER.isEnabledFor(logging.DEBUG)


def count_dropped() -> int:
    """Return the number of lines that this process has dropped since it started."""
    return sum(h.sink.dropped for h in _LOGGER.handlers if isinstance(h, _Handler))


def output_of_handlers() -> Output | None:
    """Return the `logging` handler for records of message handlers, or None before `setup`."""
    _LOGGER.disabled = False  # `logging.config` disables every logger that it does not configure
    for handler in _LOGGER.handlers:
        if isinstance(handler, _Handler):
            return Output(handler)
    return None


def close() -> None:
    """Undo `setup`, and close the descriptor."""
    _interpreter.restore_hooks()
    for handler in list(_LOGGER.handlers):
        if isinstance(handler, _Handler):
            _LOGGER.removeHandler(handler)
            handler.sink.close()


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class _Handler(logging.Handler):
    """Formats a record and passes it to the sink. It never raises and never prints to stderr."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self.sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - the __str__ of a field may raise
            line = self._dropped_line(lines=1, error=type(error).__name__)
        self.sink.write(line)
        self.report_dropped()

    def report_dropped(self) -> None:
        lines = self.sink.take_unreported()
        if lines:
            self.sink.write(self._dropped_line(lines=lines))

    def _dropped_line(self, **shown: object) -> str:
        """Return the line that reports how many lines were dropped."""
        return self.format(
            _LOGGER.makeRecord(
                _LOGGER.name,
                logging.WARNING,
                __file__,
                0,
                "%s",
                (LogLine("log.dropped", shown),),
                None,
                extra={"event": "log.dropped", "fields": shown},
            )
        )
