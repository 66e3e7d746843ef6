"""Log records of handlers, each of which carries the message that is being handled.

The message is stored by reference, so a handler that logs nothing has no extra cost. The handler's
code decides where its records go. If it adds no handler to the root logger, the records go to the
daemon's log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from streamqd.model import Assignment

CONTEXT = ("topic", "partition", "group", "uid", "attempt", "trace_id", "span_id")
"""Attributes of a record, in the order in which lines show them. `handler` is never shown."""


class LoggedMessage(Protocol):
    """The fields that a log record takes from the message that is being handled."""

    @property
    def uid(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class LoggedBatch:
    """The messages of one batch, represented by the first and last uid and the highest attempt."""

    def __init__(self, messages: Sequence[LoggedMessage]) -> None:
        self._messages = messages

    @property
    def uid(self) -> str:
        return f"{self._messages[0].uid}..{self._messages[-1].uid}"

    @property
    def attempt(self) -> int:
        return max(message.attempt for message in self._messages)


class Current:
    """The message that this process is handling, for a worker that handles one call at a time."""

    __slots__ = ("message",)

    def __init__(self) -> None:
        self.message: LoggedMessage | None = None


current = Current()

running: ContextVar[LoggedMessage | None] = ContextVar("running", default=None)
"""The message that this coroutine or thread is handling, for workers that handle several."""


def mark_records(
    handler: str,
    assignment: Assignment,
    ids: Callable[[], tuple[str | None, str | None]] | None = None,
) -> None:
    """Add the attributes in `CONTEXT`, and `handler`, to every record that this process creates.

    Workers call this. `ids` returns the IDs of the current trace and span. Between messages, `uid`
    and `attempt` are None, so that a format string may always contain them. Without traces,
    `trace_id` and `span_id` are None too. No logger, handler or formatter is changed.
    """
    base = logging.getLogRecordFactory()
    always = {
        "topic": assignment.topic,
        "partition": assignment.partition,
        "group": assignment.group,
        "handler": handler,
        "trace_id": None,
        "span_id": None,
    }

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = base(*args, **kwargs)
        marks = _Marked(record.__dict__)
        marks.update(always)
        marks["uid"], marks["attempt"] = _uid_and_attempt(current.message or running.get())
        if ids is not None:
            marks["trace_id"], marks["span_id"] = ids()
        record.__dict__ = marks
        return record

    logging.setLogRecordFactory(factory)


def _uid_and_attempt(message: LoggedMessage | None) -> tuple[str | None, int | None]:
    if message is None:
        return None, None
    try:
        return message.uid, message.attempt
    except Exception:  # noqa: BLE001 - the handler may have changed the message
        return None, None


class _Marked(dict[str, Any]):
    """The attributes of a marked record.

    `Logger.makeRecord` raises KeyError if an `extra` already exists in the record. A handler that
    passes `extra={"uid": …}` must not fail because streamqd has set this attribute, so its own
    value takes precedence.
    """

    def __contains__(self, key: object) -> bool:
        return key not in _MARKS and super().__contains__(key)


_MARKS = frozenset({*CONTEXT, "handler"})


class Output(logging.Handler):
    """Writes the records of handlers to the daemon's log, as long as no other handler accepts them.

    A worker calls `stand_by` before it imports the handler's module, `follow` after the import, and
    `take_over` after `on_start`, so that any logging configuration in the module takes precedence.
    From `stand_by` on, this object replaces Python's handler of last resort.
    """

    def __init__(self, log: logging.Handler) -> None:
        super().__init__()
        self._log = log
        self._root = logging.getLogger()

    def stand_by(self) -> None:
        """Receive records that no handler accepts.

        Called before the handler's module is imported.
        """
        self._last_resort = logging.lastResort
        # Python only reads the level of this object, and passes records to it.
        logging.lastResort = self

    def follow(self, level: str) -> None:
        """Create records at `level` and above, unless the module configured the root logger."""
        if not self._root.handlers and self._root.level == logging.WARNING:
            self._root.setLevel(level.upper())

    def take_over(self) -> None:
        """Also receive records from libraries whose loggers have only null handlers.

        Called after `on_start`. Does nothing if the root logger already has a handler.
        """
        if not self._root.handlers:
            self._root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless another handler receives it too."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            for handler in logger.handlers:
                if handler is not self and not isinstance(handler, logging.NullHandler):
                    return
            logger = logger.parent if logger.propagate else None
        self._log.handle(record)
