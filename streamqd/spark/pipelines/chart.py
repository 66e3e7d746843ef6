"""Draw a bar chart over time as SVG, in the colors of the surrounding page.

A chart contains only numbers and times, so nothing needs to be escaped. This module does no I/O.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping

WIDTH, HEIGHT = 440, 180  # size in px
_RIGHT, _TOP, _BOTTOM = 14, 12, 38  # margins in px (the left margin depends on the labels)
_CHARACTER = 7.5  # width of a character in a label, in px
_LABEL = 72  # minimum px between two labels on the time axis
_ROWS = 4  # maximum number of steps on the axis of counts
_DAY = 86_400
_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * each for each in (1, 2, 5, 10, 15, 30)),
    *(3_600 * each for each in (1, 2, 3, 6, 12)),
    *(_DAY * each for each in (1, 2, 7, 14)),
)  # possible steps on the time axis, in seconds
_MONTHS = (1, 3, 6, 12, 24, 60, 120, 600, 1_200, 6_000, 12_000)  # longer steps, in calendar months
_MONTH = 30.4 * _DAY  # approximate length of a month, in seconds


def bars(counts: Mapping[int, int], width_ms: int, name: str) -> str:
    """Return a bar chart of counts. Each count is given by the start of its bucket (Unix ms, UTC).

    Returns '' if there are no counts, or if a time cannot be represented as a date.
    """
    if not counts:
        return ""
    first, last = min(counts), max(counts) + width_ms
    if _moment(first) is None or _moment(last) is None:
        return ""
    step = count_step(max(counts.values()))
    top = step * max(1, -(-max(counts.values()) // step))
    left = max(34.0, 10 + _CHARACTER * len(f"{top:,}"))
    high, wide = HEIGHT - _TOP - _BOTTOM, WIDTH - left - _RIGHT
    floor = _TOP + high

    def x(at: int) -> float:
        return left + wide * (at - first) / (last - first)

    label = name.replace("_", " ")
    about = f'class="plot {name}" role="img" aria-label="{label} over time"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {about}>']
    for value in range(0, top + 1, step):
        y = floor - high * value / top
        parts.append(f'<line class="guide" x1="{left:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}"'
                     f' y2="{y:.1f}"/>')  # fmt: skip
        parts.append(f'<text class="y" x="{left - 6:.1f}" y="{y + 4:.1f}">{value:,}</text>')
    for at, count in sorted(counts.items()):
        tall = high * count / top
        begin, end = x(at), x(at + width_ms)
        parts.append(
            f'<rect x="{begin:.1f}" y="{floor - tall:.1f}" height="{tall:.1f}"'
            f' width="{max(1.0, 0.88 * (end - begin)):.1f}">'
            f"<title>{_moment(at):%Y-%m-%d %H:%M:%S}: {count:,}</title></rect>"
        )
    for at, label, under in time_labels(first, last, wide / _LABEL):
        parts.append(f'<line class="tick" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{floor}"'
                     f' y2="{floor + 4}"/>')  # fmt: skip
        for text, y in ((label, floor + 17), (under, floor + 32)):
            half = len(text) * _CHARACTER / 2
            middle = min(max(x(at), half), WIDTH - half)  # keeps the label within both edges
            if text:
                parts.append(f'<text class="x" x="{middle:.1f}" y="{y}">{text}</text>')
    return "".join((*parts, "</svg>"))


def count_step(most: int) -> int:
    """Return the step on the axis of counts: 1, 2 or 5 times a power of ten.

    The step is chosen so that the axis has at most four steps.
    """
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size * _ROWS >= most:
                return factor * size
        size *= 10


def time_labels(first: int, last: int, most: float) -> Iterator[tuple[int, str, str]]:
    """Yield round times (Unix ms) from `first` to before `last`, each with a label of two lines.

    The step is the smallest one with no more than `most` labels. The first line of a label has the
    resolution of the step, so all labels differ. The second line contains the date or the year, but
    is empty if it would be the same as in the previous label. If the step is in months, each label
    is at the first day of a month.
    """
    span = (last - first) / 1000
    step = next((each for each in _STEPS if span / each <= most), 0)
    if not step:
        months = next((each for each in _MONTHS if span / _MONTH / each <= most), _MONTHS[-1])
        yield from _month_labels(first, last, months)
        return
    if step < 60:
        form, below = "%H:%M:%S", "%Y-%m-%d"
    elif step < _DAY:
        form, below = "%H:%M", "%Y-%m-%d"
    else:
        form, below = "%m-%d", "%Y"
    before = ""
    for at in range(-(-first // (1000 * step)) * 1000 * step, last, 1000 * step):
        moment = _moment(at)
        if moment is None:
            return
        under = moment.strftime(below)
        yield at, moment.strftime(form), "" if under == before else under
        before = under


def _month_labels(first: int, last: int, months: int) -> Iterator[tuple[int, str, str]]:
    """Yield a label every `months` months: a month above its year, or only a year."""
    start = dt.datetime.fromtimestamp(first // 1000, dt.UTC)
    number = (start.year * 12 + start.month - 1) // months * months  # months since the year 0
    before = ""
    while (year := number // 12) <= dt.MAXYEAR:
        if year >= dt.MINYEAR:
            moment = dt.datetime(year, number % 12 + 1, 1, tzinfo=dt.UTC)
            at = round(moment.timestamp()) * 1000
            if at >= last:
                return
            if at >= first:
                label, under = (f"{year}", "") if months >= 12 else (f"{moment:%b}", f"{year}")
                yield at, label, "" if under == before else under
                before = under
        number += months


def _moment(unix_ms: int) -> dt.datetime | None:
    """Return a time in UTC, or None if it cannot be represented as a date."""
    try:
        return dt.datetime.fromtimestamp(unix_ms // 1000, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None
