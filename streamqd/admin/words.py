"""Numbers for people: partitions, durations, plurals, sums."""

from __future__ import annotations

from collections.abc import Iterable

PARTITIONS_SHOWN = 12  # runs of partition numbers in one sentence


def spans(numbers: Iterable[int]) -> str:
    """Numbers in words: `partition 3`, `partitions 0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"partition {runs[0][0]}"
    told = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    more = f" and {len(told) - PARTITIONS_SHOWN} more" if len(told) > PARTITIONS_SHOWN else ""
    return f"partitions {', '.join(told[:PARTITIONS_SHOWN])}{more}"


def roughly(seconds: float) -> str:
    """About how long: `3 minutes`, `5 days`."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:,.0f} seconds"


def plural(number: int, noun: str) -> str:
    """`1 message`, `3 messages`; 'entry' becomes 'entries'."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"


def lasting(seconds: float) -> str:
    """A duration in a sentence: `75 s`, `16 min 53 s`, `3 h 5 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def known_sum(values: Iterable[int | None]) -> int | None:
    """The sum; None when one of the values is not known."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
