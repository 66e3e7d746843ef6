"""Check values from Redis. Each value is untrusted until one of these functions has checked it.

Any client can write any value to streamqd's keys. Each function takes the raw reply, and returns a
value within bounds or raises InvalidValueError with the key and field. Callers catch
InvalidValueError per partition, group or topic, and continue with the others.
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
SHOWN_BYTES = 40

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
    """Return an integer from `low` to `high`. For None, return the default, if there is one."""
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
    """Return a finite number from `low` to `high`. For None, return the default, if any."""
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
    """Return UTF-8 text of at most 64 KiB. For None, return the default, if there is one."""
    if raw is None and default is not None:
        return default
    try:
        if raw is not None and len(raw) <= TEXT_BYTES_MAX:
            return raw.decode()
    except UnicodeDecodeError:
        pass
    raise InvalidValueError(key, field, format_value(raw), "UTF-8 text of at most 64 KiB")


def name(raw: bytes | None, key: str, field: str = "") -> str:
    """Return the name of a topic, group or instance that is valid in the configuration too."""
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
    """Return the ID of a stream entry, `ms-seq`. For None, return the default, if there is one."""
    if not raw and default is not None:
        return default
    if raw is None or not _ENTRY_ID.fullmatch(raw):
        raise InvalidValueError(
            key, field, format_value(raw), "the id of an entry, as 1700000000000-0"
        )
    return raw.decode()


def label(raw: bytes) -> str:
    """Return a name that another client chose, which may be any bytes, in printable form."""
    return raw.decode("utf-8", "backslashreplace")


def json_object(
    raw: bytes | None, key: str, field: str = "", *, default: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a JSON object of at most 1 MiB. For None, return the default, if there is one.

    The values in the object are still untrusted.
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
    """Return the start of a value in printable form, without escapes and line breaks."""
    if raw is None:
        return "nothing"
    return repr(raw[:SHOWN_BYTES])[1:] + ("..." if len(raw) > SHOWN_BYTES else "")
