"""How a record becomes one line, as text or JSON. Nothing a value holds can begin a line."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Mapping

from streamqd.config import masked
from streamqd.model import Unit

LINE_MAX = 16 * 1024  # characters of one rendered line; more is cut
VALUE_MAX = 2 * 1024  # characters of one field
TRACEBACK_MAX = 8 * 1024
NAME_WIDTH = 21  # of the event's column in text


class _Process:
    """What every line says of the process that wrote it."""

    role = "streamqd"


process = _Process()


class JsonFormatter(logging.Formatter):
    """One JSON object per line. Everything outside ASCII is escaped, so no value ends a line."""

    def format(self, record: logging.LogRecord) -> str:
        name = getattr(record, "event", None)
        shown: dict[str, object] = {"event": name} if name is not None else {}
        shown |= {
            "ts": _stamp(record.created, "%Y-%m-%dT%H:%M:%S") + "Z",
            "level": record.levelname.lower(),
            "pid": os.getpid(),
            "role": process.role,
        }
        if name is None:
            shown |= {"logger": record.name, "msg": _cut(record.getMessage(), VALUE_MAX)}
        shown |= {key: _plain(value) for key, value in getattr(record, "fields", {}).items()}
        if record.exc_info:
            shown["traceback"] = _traceback(record)
        return json.dumps(shown, ensure_ascii=True, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """`event  12:00:00.000 INFO supervisor[9] key=value`; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        name = getattr(record, "event", None)
        if name is None:
            name = record.name
            rest = " " + _printable(_cut(record.getMessage(), VALUE_MAX))
        else:
            rest = _pairs(getattr(record, "fields", {}))
        line = (
            f"{name:<{NAME_WIDTH}} {_stamp(record.created, '%H:%M:%S')} {record.levelname:<7} "
            f"{process.role}[{os.getpid()}]{rest}"
        )
        if record.exc_info:
            rows = _traceback(record).splitlines()
            line = "\n".join([line, *("    " + _printable(row) for row in rows)])
        return _cut(line, LINE_MAX)


class Line:
    """An event as a message for formatters that are not ours; rendered when one asks."""

    def __init__(self, name: str, fields: Mapping[str, object]) -> None:
        self._name = name
        self._fields = fields

    def __str__(self) -> str:
        return self._name + _pairs(self._fields)


def _pairs(fields: Mapping[str, object]) -> str:
    return "".join(f" {key}={_quoted(_plain(value))}" for key, value in fields.items())


def flatten(fields: Mapping[str, object]) -> dict[str, object]:
    shown: dict[str, object] = {}
    for key, value in fields.items():
        if isinstance(value, Unit):
            shown |= {"topic": value.topic, "partition": value.partition, "group": value.group}
        elif value is not None:
            shown[key] = value
    return shown


def _plain(value: object) -> object:
    """Reduce to what JSON and text can both show."""
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, BaseException):
        return _cut(f"{type(value).__name__}: {value}", VALUE_MAX)
    if isinstance(value, bytes):
        return _cut(value.decode("utf-8", "backslashreplace"), VALUE_MAX)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in list(value.items())[:64]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in list(value)[:64]]
    return _cut(str(value), VALUE_MAX)


def _quoted(value: object) -> str:
    if isinstance(value, str):
        bare = value and value.isprintable() and not any(mark in value for mark in ' "=\\')
        return value if bare else _printable(json.dumps(value, ensure_ascii=False))
    return _printable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _printable(text: str) -> str:
    """Escape what could begin a new line, move the cursor or turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _traceback(record: logging.LogRecord) -> str:
    assert record.exc_info is not None
    lines = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    # The end names the exception and the innermost frames; keep that when it is too long.
    return masked(lines if len(lines) <= TRACEBACK_MAX else "… " + lines[-TRACEBACK_MAX:])


def _cut(text: str, limit: int) -> str:
    """Shorten a text, and hide passwords in the URLs that it quotes."""
    return masked(text if len(text) <= limit else text[:limit] + "…")


def _stamp(created: float, pattern: str) -> str:
    whole, fraction = divmod(created, 1)
    return f"{time.strftime(pattern, time.gmtime(whole))}.{int(fraction * 1000):03d}"
