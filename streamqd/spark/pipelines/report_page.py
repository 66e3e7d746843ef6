"""Render a report as one self-contained page, without scripts or network access.

Texts from messages are untrusted, so the template escapes every value for HTML. `_format_value`
also escapes characters that are harmful on a terminal. The only I/O is to read the template.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from streamqd.admin.condition import describe_condition
from streamqd.spark.pipelines.chart import bars
from streamqd.words import age, escape_unprintable, memory

TEXT_MAX = 300  # maximum characters of a value that are shown
_TIMES = (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))
_UNITS = ((86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1000, "second"))  # ms


def page(document: Mapping[str, Any]) -> str:
    """Render a document from `report` as an HTML page."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_format_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"age": age, "describe_condition": describe_condition, "memory": memory}
    environment.filters |= {"plot": _plot, "time": _time, "breakable": _breakable}
    environment.filters |= {"period": period, "took": _format_duration}
    environment.filters |= {"slowest": _slowest, "run_time": run_time}
    template = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    return environment.from_string(template).render(document)


def _format_value(value: Any) -> Any:
    """Return a value in readable form. Escape characters that reverse or hide other text."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    text = str(value)
    return escape_unprintable(text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…")


def _slowest(history: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a chart of the 99th percentile over time and its unit, or None without runs."""
    found = {
        row["at_unix_ms"]: row["p99_seconds"]
        for row in history["timeline"]
        if row["p99_seconds"] is not None
    }
    if not found:
        return None
    unit, size = next(
        each for each in _TIMES if max(found.values()) >= 10 * each[1] or each[1] < 1e-5
    )
    counts = {at: max(1, round(seconds / size)) for at, seconds in found.items()}
    plot = bars(counts, history["width_ms"], "p99_of_run_times")
    return {"unit": unit, "plot": Markup(plot)}  # noqa: S704 - numbers and times


def run_time(seconds: float | None) -> str | None:
    """Return a run time with two digits and a unit, such as 34 ms, 1.1 s or 4.1 µs."""
    if seconds is None:
        return None
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, size = next((each for each in units if seconds >= each[1]), units[-1])
    number = seconds / size
    return f"{number:,.2g} {unit}" if number < 99.5 else f"{number:,.0f} {unit}"


def period(milliseconds: int) -> str:
    """Return the width of a bar in words that can follow "per", such as second or 5 minutes."""
    for size, unit in _UNITS:
        if milliseconds % size == 0:
            count = milliseconds // size
            return unit if count == 1 else f"{count} {unit}s"
    return f"{milliseconds:,} ms"


def _format_duration(milliseconds: int | None) -> str | None:
    """Return a duration with its unit, which is milliseconds for less than a second."""
    if milliseconds is None or milliseconds >= 1000:
        return age(milliseconds)
    return f"{milliseconds} ms"


def _breakable(text: Any) -> Markup:
    """Return a text whose lines may break after dots, colons and slashes in long names."""
    return Markup(re.sub(r"(?<=\w)([.:/])(?=\w)", r"\1<wbr>", str(escape(_format_value(text)))))  # noqa: S704 - escaped


def _time(unix_ms: int | None) -> str | None:
    """Format a time (Unix ms) as `2025-11-20 10:00:05`.

    Return None if it is not a possible date.
    """
    if unix_ms is None:
        return None
    try:
        return f"{dt.datetime.fromtimestamp(unix_ms // 1000, dt.UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return None


def _plot(topic: Mapping[str, Any], of: str) -> Markup:
    """Return a chart of entries or dead letters over time, or '' if there are no valid times."""
    found = {row["at_unix_ms"]: row[of] for row in topic["timeline"]}
    return Markup(bars(found, topic["width_ms"], of))  # noqa: S704 - numbers and times
