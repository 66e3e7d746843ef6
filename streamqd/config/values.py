"""Parse and format durations, sizes and rates.

`parse_duration` and `parse_size` raise ValueError with a clause that completes a sentence starting
with the value. The loader adds the TOML path and the value.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

Duration = float | str | timedelta  # seconds, or a string such as "1m30s"
Size = int | str  # bytes, or a string such as "64MiB"

DURATION_HINT = 'write a number of seconds, or a string such as "30s", "1m30s", "500ms" or "24h"'
SIZE_HINT = 'write an integer number of bytes, or a string such as "64MiB", "4MB" or "512KiB"'

# The units are sorted from the longest to the shortest. A duration must list its units in this
# order, and may use each of them only once.
_DURATION_UNITS: dict[str, Decimal] = {
    "w": Decimal(604_800),
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
_SIZE_UNITS: dict[str, int] = {
    "TiB": 1 << 40,
    "GiB": 1 << 30,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "kB": 10**3,
    "B": 1,
}

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
# The JSON schema also contains these patterns. They do not check the order of the units.
DURATION_PATTERN = rf"^\s*(?:{_NUMBER}|(?:{_NUMBER}\s*(?:ms|[wdhms])\s*)+)\s*$"
SIZE_PATTERN = rf"^\s*{_NUMBER}\s*(?:[TGMK]iB|[TGMKk]?B)?\s*$"
RATE_PATTERN = r"[0-9]{1,9}(?:\.[0-9]{1,6})?/[smh]"
_DURATION = re.compile(DURATION_PATTERN)
_DURATION_PART = re.compile(rf"({_NUMBER})\s*(ms|[wdhms])")
_SIZE = re.compile(SIZE_PATTERN)


def parse_duration(value: object) -> float:
    """Return the number of seconds in a number, a string such as "1m30s", or a timedelta."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        return _duration_of_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is not a duration ({DURATION_HINT})")
    if not 0 <= value <= 1e15:  # also rejects nan
        raise ValueError(f"is out of range for a duration ({DURATION_HINT})")
    return float(value)


def _duration_of_text(text: str) -> float:
    if not _DURATION.match(text):
        raise ValueError(f"is not a duration ({DURATION_HINT})")
    parts = _DURATION_PART.findall(text)
    if not parts:
        return float(Decimal(text.strip()))
    order = list(_DURATION_UNITS)
    places = [order.index(unit) for _, unit in parts]
    if places != sorted(set(places)):
        raise ValueError('has units repeated or out of order; write it as in "1h30m15s"')
    return float(sum(Decimal(number) * _DURATION_UNITS[unit] for number, unit in parts))


def parse_instant(text: str) -> float:
    """Parse an ISO 8601 date or time, and return unix seconds. If it has no offset, UTC is used."""
    found = datetime.fromisoformat(text.strip())
    try:
        return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    except OverflowError as error:
        raise ValueError("is outside the supported years") from error


def format_duration(seconds: float) -> str:
    """Return the shortest string that `parse_duration` converts back to exactly `seconds`."""
    rest = Decimal(repr(seconds))
    if rest == 0:
        return "0s"
    text = ""
    for unit in ("d", "h", "m"):
        count, rest = divmod(rest, _DURATION_UNITS[unit])
        if count:
            text += f"{int(count)}{unit}"
    if rest and not text and rest < 1:
        return f"{_format_plain(rest * 1000)}ms"
    return text + (f"{_format_plain(rest)}s" if rest else "")


def parse_size(value: object) -> int:
    """Return the number of bytes in an integer or a string.

    For example, "64MiB" uses powers of 1024, and "4MB" powers of 1000.
    """
    if isinstance(value, str):
        if not _SIZE.match(value):
            raise ValueError(f"is not a size ({SIZE_HINT})")
        number, unit = _split_unit(value.strip())
        size = Decimal(number) * _SIZE_UNITS[unit]
        if size != int(size):
            raise ValueError(f"must be an integer number of bytes ({SIZE_HINT})")
        return int(size)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"is not a size ({SIZE_HINT})")
    return value


def _split_unit(text: str) -> tuple[str, str]:
    for unit in _SIZE_UNITS:
        if text.endswith(unit):
            return text.removesuffix(unit).strip(), unit
    return text, "B"


def format_size(size: int) -> str:
    """Return the shortest string with a binary unit that `parse_size` converts back to `size`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit}"
    return f"{size}B"


def parse_rate(text: str) -> float:
    """Return the runs per second in a string that matches `RATE_PATTERN`, such as "5/m"."""
    number, _, unit = text.partition("/")
    return float(Decimal(number) / _DURATION_UNITS[unit])


def _format_plain(number: Decimal) -> str:
    return format(number.normalize(), "f")
