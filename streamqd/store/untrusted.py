"""Check values that were read from Redis, because any client can write any value to any key.

Each function takes a raw reply. It returns a value within the given bounds, or raises
InvalidValueError, which contains the key and the field. Callers catch this error for each
partition, group or topic, so that one invalid value does not affect the others.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from streamqd.config.setting import NAME
from streamqd.errors import InvalidValueError

INTEGER_MAX = (1 << 53) - 1  # largest integer that Lua, JSON and sorted sets represent exactly
TEXT_BYTES_MAX = 64 << 10
OBJECT_BYTES_MAX = 1 << 20
SHOWN_BYTES = 40  # number of bytes of an invalid value that are shown in an error

_INTEGER = re.compile(rb"-?[0-9]{1,16}")
_ENTRY_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")


def integer(
    raw: bytes | None,
    key: str,
    field: str = "",
    *,
    default: int | None = None,
    low: int = 0,
    high: int = INTEGER_MAX,
) -> int:
    """Return an integer from `low` to `high`. If `raw` is None, return the default if there is one.

    Raises InvalidValueError for any other value.
    """
    if raw is None and default is not None:
        return default
    if raw is None or not _INTEGER.fullmatch(raw) or not low <= int(raw) <= high:
        raise InvalidValueError(key, field, format_value(raw), f"an integer from {low} to {high}")
    return int(raw)


def number(
    raw: bytes | None,
    key: str,
    field: str = "",
    *,
    default: float | None = None,
    low: float = 0.0,
    high: float = float(INTEGER_MAX),
) -> float:
    """Return a number from `low` to `high`. If `raw` is None, return the default if there is one.

    Raises InvalidValueError for any other value, including NaN.
    """
    if raw is None and default is not None:
        return default
    try:
        value = float(raw) if raw is not None and len(raw) <= 32 else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # false for NaN
        raise InvalidValueError(key, field, format_value(raw), f"a number from {low:g} to {high:g}")
    return value


def text(raw: bytes | None, key: str, field: str = "", *, default: str | None = None) -> str:
    """Return a string of up to 64 KiB, decoded from UTF-8.

    If `raw` is None, return the default if there is one.
    Raises InvalidValueError for any other value.
    """
    if raw is None and default is not None:
        return default
    try:
        if raw is not None and len(raw) <= TEXT_BYTES_MAX:
            return raw.decode()
    except UnicodeDecodeError:
        pass
    raise InvalidValueError(key, field, format_value(raw), "UTF-8 text of at most 64 KiB")


def name(raw: bytes | None, key: str, field: str = "") -> str:
    """Return the name of a topic, group or instance.

    Raises InvalidValueError if the name would not be valid in the configuration.
    """
    try:
        found = (raw or b"").decode("ascii")
    except UnicodeDecodeError:
        found = ""
    if not NAME.fullmatch(found):
        raise InvalidValueError(
            key,
            field,
            format_value(raw),
            "a name of 1 to 64 of A-Z a-z 0-9 . _ - without a dot first",
        )
    return found


def entry_id(raw: bytes | None, key: str, field: str = "", *, default: str | None = None) -> str:
    """Return the ID of a stream entry, `ms-seq`.

    If `raw` is None or empty, return the default if there is one. Raises InvalidValueError for any
    other value.
    """
    if not raw and default is not None:
        return default
    if raw is None or not _ENTRY_ID.fullmatch(raw):
        raise InvalidValueError(
            key, field, format_value(raw), "the id of an entry, as 1700000000000-0"
        )
    return raw.decode()


def label(raw: bytes) -> str:
    """Return a name that another client chose, with bytes that are not valid UTF-8 escaped."""
    return raw.decode("utf-8", "backslashreplace")


def json_object(
    raw: bytes | None, key: str, field: str = "", *, default: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a JSON object of up to 1 MiB. If `raw` is None, return the default if there is one.

    The values in the object are not checked. Raises InvalidValueError if `raw` is anything else.
    """
    if raw is None and default is not None:
        return default
    try:
        if raw is not None and len(raw) <= OBJECT_BYTES_MAX:
            found = json.loads(raw)
            if isinstance(found, dict):
                return found
    except (ValueError, RecursionError):
        pass
    raise InvalidValueError(key, field, format_value(raw), "a JSON object of at most 1 MiB")


def format_value(raw: bytes | None) -> str:
    """Return the start of a value in a printable form for an error, on a single line."""
    if raw is None:
        return "nothing"
    return repr(raw[:SHOWN_BYTES])[1:] + ("..." if len(raw) > SHOWN_BYTES else "")
