"""Renders a record as one line, in text or JSON. No value can start a new line."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import traceback
from collections.abc import Mapping

from streamqd.config import mask_passwords
from streamqd.logs.records import CONTEXT
from streamqd.model import Assignment
from streamqd.words import HIDDEN, escape_unprintable

LINE_MAX = 16 * 1024  # maximum characters of a line, longer lines are cut
VALUE_MAX = 2 * 1024  # maximum characters of one field
TRACEBACK_MAX = 8 * 1024
NAME_WIDTH = 21  # width of the event column in text lines


class _Process:
    """The role that each line shows for this process."""

    role = "streamqd"


process = _Process()


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line.

    Unprintable characters are escaped, and other text is kept.
    """

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
            shown |= {"logger": record.name, "msg": _cut(_message(record), VALUE_MAX)}
            shown |= {key: _to_plain(value) for key, value in _context(record).items()}
        shown |= {key: _to_plain(value) for key, value in getattr(record, "fields", {}).items()}
        if trace := _traceback(record):
            shown["traceback"] = trace
        return json_line(shown)


def json_line(shown: Mapping[str, object]) -> str:
    """Return one line that every JSON parser accepts. Letters of all scripts stay unchanged.

    Unprintable and invisible characters are escaped, so that no value can break the line. Half a
    surrogate pair, which a parser may reject, becomes text such as `\\ud800`.
    """
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    if text.isascii() and text.isprintable():
        return text
    whole = text if text.isprintable() else "".join(map(_json_character, text))
    return HIDDEN.sub(lambda found: str(json.dumps(found[0])[1:-1]), whole)


def _json_character(each: str) -> str:
    if each.isprintable():
        return each
    half = "\ud800" <= each <= "\udfff"
    return f"\\\\u{ord(each):04x}" if half else json.dumps(each)[1:-1]


class TextFormatter(logging.Formatter):
    """Formats `event  12:00:00.000 INFO supervisor[9] key=value`, then an indented traceback."""

    def format(self, record: logging.LogRecord) -> str:
        name = getattr(record, "event", None)
        if name is None:
            name = record.name
            rest = (
                " "
                + escape_unprintable(_cut(_message(record), VALUE_MAX))
                + _pairs(_context(record))
            )
        else:
            rest = _pairs(getattr(record, "fields", {}))
        line = (
            f"{name:<{NAME_WIDTH}} {_stamp(record.created, '%H:%M:%S')} {record.levelname:<7} "
            f"{process.role}[{os.getpid()}]{rest}"
        )
        if trace := _traceback(record):
            rows = trace.splitlines()
            line = "\n".join([line, *("    " + escape_unprintable(row) for row in rows)])
        return _cut(line, LINE_MAX)


class LogLine:
    """An event as a message for other formatters. It is rendered on demand."""

    def __init__(self, name: str, fields: Mapping[str, object]) -> None:
        self._name = name
        self._fields = fields

    def __str__(self) -> str:
        return self._name + _pairs(self._fields)


def _message(record: logging.LogRecord) -> str:
    """Return the text of a record, or its format and values if these do not fit together."""
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - formats, values and their __str__ are user code
        return f"{record.msg!s} {record.args!r}"


def _context(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of the message that the handler was handling when it created the record."""
    found = ((key, getattr(record, key, None)) for key in CONTEXT)
    return {key: value for key, value in found if value is not None}


def _pairs(fields: Mapping[str, object]) -> str:
    return "".join(f" {key}={_quote(_to_plain(value))}" for key, value in fields.items())


def flatten(fields: Mapping[str, object]) -> dict[str, object]:
    shown: dict[str, object] = {}
    for key, value in fields.items():
        if isinstance(value, Assignment):
            shown |= {"topic": value.topic, "partition": value.partition, "group": value.group}
        elif value is not None:
            shown[key] = value
    return shown


def _to_plain(value: object) -> object:
    """Convert a value to a type that JSON and text can both show."""
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, BaseException):
        return _cut(f"{type(value).__name__}: {value}", VALUE_MAX)
    if isinstance(value, bytes):
        return _cut(value.decode("utf-8", "backslashreplace"), VALUE_MAX)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in list(value.items())[:64]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(item) for item in list(value)[:64]]
    return _cut(str(value), VALUE_MAX)


def _quote(value: object) -> str:
    if isinstance(value, str):
        bare = value and value.isprintable() and not any(mark in value for mark in ' "=\\')
        return value if bare else escape_unprintable(json.dumps(value, ensure_ascii=False))
    return escape_unprintable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _traceback(record: logging.LogRecord) -> str:
    """Return the traceback of a record, or '' if it has none."""
    if record.exc_info:
        lines = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    else:
        lines = getattr(record, "trace", "").rstrip("\n")
    # Keep the end of a long traceback, because it contains the exception and the innermost frames.
    return mask_passwords(lines if len(lines) <= TRACEBACK_MAX else "… " + lines[-TRACEBACK_MAX:])


def _cut(text: str, limit: int) -> str:
    """Shorten a text, and mask passwords in URLs that it contains."""
    return mask_passwords(text if len(text) <= limit else text[:limit] + "…")


def _stamp(created: float, pattern: str) -> str:
    whole, fraction = divmod(created, 1)
    return f"{time.strftime(pattern, time.gmtime(whole))}.{int(fraction * 1000):03d}"
