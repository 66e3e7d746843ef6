"""Formats durations, sizes, plurals and partition numbers for people."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Characters without a width, as a class for regular expressions. They can make strings differ that
# look the same. They are Unicode's Default_Ignorable_Code_Point, except for joiners and variation
# selectors.
INVISIBLE = (
    "\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b\\u200e\\u200f\\u202a-\\u202e"
    "\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a"
    "\\U000e0000-\\U000e00ff\\U000e01f0-\\U000e0fff"
)
# Joiners and variation selectors shape emoji and the letters of many scripts. They have no effect
# next to a Latin, Greek or Cyrillic letter, at the start or the end of a text, or if they are
# doubled. In these places, they are treated as invisible characters.
_PLAIN = "\\x20-\\x7e\\u00a0-\\u052f"
HIDING_JOINERS = (
    f"(?:(?:^|(?<=[{_PLAIN}\\u200c\\u200d]))[\\u200c\\u200d]|[\\u200c\\u200d](?:$|(?=[{_PLAIN}]))"
    "|(?:^|(?<=[A-Za-z\\u00c0-\\u052f]))[\\ufe00-\\ufe0f\\U000e0100-\\U000e01ef])"
)
HIDDEN = re.compile(f"[{INVISIBLE}]|{HIDING_JOINERS}")

PARTITIONS_SHOWN = 12  # maximum number of ranges of partition numbers in one sentence


def spans(numbers: Iterable[int]) -> str:
    """Return partition numbers in words, such as `partition 3` or `partitions 0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"partition {runs[0][0]}"
    ranges = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    more = f" and {len(ranges) - PARTITIONS_SHOWN} more" if len(ranges) > PARTITIONS_SHOWN else ""
    return f"partitions {', '.join(ranges[:PARTITIONS_SHOWN])}{more}"


def rough_duration(seconds: float) -> str:
    """Return an approximate duration, such as `1 second`, `3 minutes` or `5 days`."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}s"
    return plural(round(seconds), "second")


def plural(number: int, noun: str) -> str:
    """Return a number and a noun, such as `1 message` or `3 messages`.

    'entry' becomes 'entries'.
    """
    return f"1 {noun}" if number == 1 else f"{number:,} {_many(noun)}"


def count(number: int, noun: str) -> str:
    """Return a number and a noun, as `1 dead letter`, `3 dead letters` or `no dead letters`."""
    return plural(number, noun) if number else f"no {_many(noun)}"


def _many(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"


def age(milliseconds: float | None) -> str:
    """Return a duration or an age in one or two units, such as `3h12m`, or `-` for None."""
    if milliseconds is None:
        return "-"
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for unit, size, lower, lower_size in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // lower_size if whole < 100 * size else 0
            return f"{whole // size}{unit}" + (f"{rest}{lower}" if rest else "")
    return f"{whole}s"


def short_duration(seconds: float | None) -> str:
    """Return a duration in at most six characters, such as 850us, 12ms, 1.4s or 3m10s."""
    if seconds is None:
        return "-"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f}us"
    return f"{seconds * 1e3:.0f}ms" if seconds < 0.9995 else age(seconds * 1000)


def escape_unprintable(text: str) -> str:
    """Escape unprintable and invisible characters in a text for a log or an error.

    This is stricter than `cli.output.printable`, which keeps the joiners and wide spaces that are
    part of a message's script.
    """
    if text.isascii() and text.isprintable():
        return text
    visible = (
        text
        if text.isprintable()
        else "".join(each if each.isprintable() else _escape(each) for each in text)
    )
    return HIDDEN.sub(lambda found: _escape(found[0]), visible)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def memory(size: int | None) -> str:
    """Return a size in bytes in a readable unit, such as `12.3 MiB`, or `-` for None."""
    if size is None:
        return "-"
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def precise_duration(seconds: float) -> str:
    """Return a duration for a sentence, such as `75 s`, `16 min 53 s` or `3 h 5 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def known_sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values, or None if one of them is None."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
