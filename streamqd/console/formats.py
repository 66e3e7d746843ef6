"""The filters of the templates, which format numbers, ages and times. All are pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from streamqd import words

NONE = "\u2013"
# Words that get a capital letter at the start of a sentence. Any other first word may be a name, so
# it is not changed.
_STARTS = frozenset(
    {
        "append-only",
        *(
            "a",
            "all",
            "an",
            "another",
            "check",
            "drained",
            "fix",
            "group",
            "if",
            "instance",
            "look",
        ),
        *("make", "messages", "more", "no", "none", "nothing", "on", "outbox", "paused", "read"),
        *(
            "report",
            "run",
            "schedules",
            "send",
            "start",
            "stop",
            "stopped",
            "table",
            "the",
            "topic",
        ),
        *("wait", "write"),
    }
)

# Dates always have English names, whatever the locale is.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with thousands separators, or a dash for None. Integers are not rounded."""
    if value is None:
        return NONE
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """Return a rate per second: with two decimals below 1, one below 100, and none above."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    return f"{value:,.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share as a percentage, or a dash for None.

    Shares above 0 are never rounded to 0%.
    """
    if share is None:
        return NONE
    if share == 0:
        return "0"
    if share < 0.001:
        return "<0.1%"
    return f"{share * 100:.1f}%" if share < 0.1 else f"{share * 100:.0f}%"


def duration(seconds: float | None) -> str:
    """Return seconds in a short form, such as `850us`, `1.4s` or `3m10s`, or a dash for None."""
    return NONE if seconds is None else words.short_duration(seconds)


def age(milliseconds: float | None) -> str:
    """Return milliseconds in one or two units, such as `3h12m`, or a dash for None."""
    return NONE if milliseconds is None else words.age(milliseconds)


def ago(unix_ms: int | None, now_unix_ms: int) -> str:
    """Return how long ago a time was, such as `3h12m ago`.

    For a time in the future, return `in 5m`.
    """
    if unix_ms is None:
        return NONE
    passed = now_unix_ms - unix_ms
    if -500 <= passed < 1_000:
        return "now"
    return f"in {words.age(-passed)}" if passed < -500 else f"{words.age(passed)} ago"


def instant(unix_ms: int | None) -> str:
    """Return a time in the form `2026-11-28 01:02:03.456 UTC`."""
    if unix_ms is None:
        return NONE
    seconds, rest = divmod(unix_ms, 1000)
    try:
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest:03d} UTC"
    except (ValueError, OverflowError, OSError):
        return str(unix_ms)


def clock(unix_ms: int | None, now_unix_ms: int) -> str:
    """Return the time of day, such as `22:41 UTC`, or '' if it is less than a minute away.

    If the time is not today, the date comes first, as in `Nov 27, 22:41 UTC`.
    """
    if unix_ms is None or abs(now_unix_ms - unix_ms) < 60_000:
        return ""
    try:
        at, now = (time.gmtime(each // 1000) for each in (unix_ms, now_unix_ms))
    except (ValueError, OverflowError, OSError):
        return ""
    day = f"{at.tm_year}-{at.tm_mon:02}-{at.tm_mday:02}"
    if at.tm_year == now.tm_year:
        day = f"{_MONTHS[at.tm_mon - 1]} {at.tm_mday}"
    day = "" if at[:3] == now[:3] else f"{day}, "
    return f"{day}{at.tm_hour:02}:{at.tm_min:02} UTC"


def memory(size: int | None) -> str:
    """Return a size in bytes in a readable unit."""
    return NONE if size is None else words.memory(size)


def plain(text: object) -> str:
    """Return untrusted text in which control characters and invisible characters are escaped."""
    return words.escape_unprintable(str(text))


# The reasons of dead letters, as clauses about the message.
_REASONS = {
    "attempts": "all attempts failed",
    "crashes": "it crashed its worker",
    "dead": "the handler rejected it",
    "undecodable": "it cannot be decoded",
    "too-old": "it failed after retry_max_age",
    "too-large": "it is larger than max_message_bytes",
    "not-retried": "its error is not retried",
    "canceled": "its retry was canceled",
}


def reason(word: str) -> str:
    """Return a dead letter's reason in words. An unknown reason is returned unchanged."""
    return _REASONS.get(word, words.escape_unprintable(word))


def sentence(clause: str) -> str:
    """Return a clause as a sentence that starts with a capital letter and ends with a period.

    If the first word is not all letters, it may be a scope, so it is not changed.
    """
    first = clause.partition(" ")[0].rstrip(":")
    return f"{clause[:1].upper() if first.isalpha() else clause[:1]}{clause[1:]}."


def setting(value: object) -> str:
    """Return a value from a schedule or an audit entry as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(setting(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={setting(each)}" for name, each in value.items())
    return NONE if value is None or value == "" else plain(value)


def prose(text: str, url_for_command: Callable[[str], str] = lambda _command: "") -> Markup:
    """Return one of streamqd's own texts as HTML.

    A first word in `_STARTS` gets a capital letter. Parts in backticks become code. If a part is a
    command, `url_for_command` returns the URL of the page that does the same, or '' if there is
    none.
    """
    first = text.partition(" ")[0]
    parts = plain(first.capitalize() + text[len(first) :] if first in _STARTS else text).split("`")

    def code(part: str) -> Markup:
        url, shown = url_for_command(part), Markup("<code>{}</code>").format(part)
        return Markup('<a href="{}">{}</a>').format(url, shown) if url else shown

    return Markup().join(code(part) if at % 2 else part for at, part in enumerate(parts))


def points(values: list[float | None], width: int = 100, height: int = 20) -> str:
    """Return the points of a sparkline's polyline. A missing value is drawn as 0."""
    known = [each or 0.0 for each in values]
    top = max(known, default=0.0) or 1.0
    step = width / max(1, len(known) - 1)
    return " ".join(
        f"{at * step:.1f},{height - 1 - each / top * (height - 2):.1f}"
        for at, each in enumerate(known)
    )


_ALL = (
    *(number, rate, percent, duration, age, ago, clock, instant, memory),
    *(words.rough_duration, words.plural, plain, reason, setting, prose, points),
)
FILTERS: dict[str, Any] = {each.__name__: each for each in _ALL}
