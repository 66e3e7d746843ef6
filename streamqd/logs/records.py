"""What handlers log: each record carries the message that is being handled.

The message is noted by reference: who logs nothing pays nothing. Where it goes is for the handler's
own code to say; when that gives the root logger no handler, the records go into the daemon's log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from streamqd.model import Unit

CONTEXT = ("topic", "partition", "group", "uid", "attempt")
"""What a record carries, in the order in which lines show it. Also `handler`, which they do not."""


class Handled(Protocol):
    """What the record of a handler's log line takes from the message that is being handled."""

    @property
    def uid(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class Several:
    """The messages of one batch: their first and last uid, and the highest attempt."""

    def __init__(self, messages: Sequence[Handled]) -> None:
        self._messages = messages

    @property
    def uid(self) -> str:
        return f"{self._messages[0].uid}..{self._messages[-1].uid}"

    @property
    def attempt(self) -> int:
        return max(message.attempt for message in self._messages)


class Current:
    """What is being handled in this process, by a worker that handles one call at a time."""

    __slots__ = ("message",)

    def __init__(self) -> None:
        self.message: Handled | None = None


current = Current()

running: ContextVar[Handled | None] = ContextVar("running", default=None)
"""The message being handled in this coroutine or thread; for workers that handle several."""


def mark_records(handler: str, unit: Unit) -> None:
    """Give every record made in this process what `CONTEXT` names, and `handler`.

    Called by workers. Between messages `uid` and `attempt` are None, so that a format string may
    name them always. No logger, handler or formatter is changed.
    """
    base = logging.getLogRecordFactory()
    always = {
        "topic": unit.topic,
        "partition": unit.partition,
        "group": unit.group,
        "handler": handler,
    }

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = base(*args, **kwargs)
        marks = _Marked(record.__dict__)
        marks.update(always)
        marks["uid"], marks["attempt"] = _named(current.message or running.get())
        record.__dict__ = marks
        return record

    logging.setLogRecordFactory(factory)


def _named(message: Handled | None) -> tuple[str | None, int | None]:
    if message is None:
        return None, None
    try:
        return message.uid, message.attempt
    except Exception:  # noqa: BLE001 - its handler may have assigned anything to it
        return None, None


class _Marked(dict[str, Any]):
    """The attributes of a marked record.

    `Logger.makeRecord` raises KeyError for an `extra` that the record holds already. A handler that
    says `extra={"uid": …}` itself must not fail because of us: its value wins.
    """

    def __contains__(self, key: object) -> bool:
        return key not in _MARKS and super().__contains__(key)


_MARKS = frozenset({*CONTEXT, "handler"})


class Output(logging.Handler):
    """Writes the records of handlers into the daemon's log, as long as no other process takes them.

    A worker boots in three steps, so that whatever its code sets up wins, and only that: what is
    logged while the handler's module is imported, and in `on_start`, comes here as to Python's own
    handler of last resort.
    """

    def __init__(self, log: logging.Handler) -> None:
        super().__init__()
        self._log = log
        self._root = logging.getLogger()

    def stand_by(self) -> None:
        """Before the handler's module is imported: be there for what no handler takes."""
        self._last_resort = logging.lastResort
        # It is only ever asked for its level and to handle a record.
        logging.lastResort = self

    def follow(self, level: str) -> None:
        """After it: records from a level on are made, unless the module has set up the root."""
        if not self._root.handlers and self._root.level == logging.WARNING:
            self._root.setLevel(level.upper())

    def take_over(self) -> None:
        """After `on_start`: take also what libraries log, whose loggers have handlers for nothing.

        Not when the root logger has been given a handler by now.
        """
        if not self._root.handlers:
            self._root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, when no other handler gets it too."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            for handler in logger.handlers:
                if handler is not self and not isinstance(handler, logging.NullHandler):
                    return
            logger = logger.parent if logger.propagate else None
        self._log.handle(record)
