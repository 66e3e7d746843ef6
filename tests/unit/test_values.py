"""Durations and sizes are read in every spelling, refused otherwise, and written."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.config.values import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (30, 30.0),
        (0, 0.0),
        (0.25, 0.25),
        ("30", 30.0),
        ("1.5", 1.5),
        ("30s", 30.0),
        ("1m30s", 90.0),
        ("1m 30s", 90.0),
        (" 1h ", 3600.0),
        ("500ms", 0.5),
        ("1s500ms", 1.5),
        ("0.5ms", 0.0005),
        ("24h", 86_400.0),
        ("1w2d", 777_600.0),
        ("1.5h", 5_400.0),
        ("0s", 0.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_parse_duration_accepts_each_spelling(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        *("", "s", "abc", "-1s", "1 parsec", "1e3s", "30sec", "1,5s", "\u0661s", "1s\n2"),
        *(-1, -0.1, float("nan"), float("inf"), 10**400, timedelta(-1)),
        *(True, None, [], {"s": 1}),
    ],
    ids=lambda written: repr(written)[:20],
)
def test_invalid_duration_error_shows_the_format(written: object) -> None:
    with pytest.raises(ValueError, match=r"is (not|out of range for) a duration \(write"):
        parse_duration(written)


@pytest.mark.parametrize("written", ["30s1m", "1s1s", "1ms1h"])
def test_duration_with_unordered_units_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="repeated or out of order"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, "0s"),
        (0.5, "500ms"),
        (0.0005, "0.5ms"),
        (1.5, "1.5s"),
        (90.0, "1m30s"),
        (3600.0, "1h"),
        (86_400.0, "1d"),
        (93_784.25, "1d2h3m4.25s"),
    ],
)
def test_format_duration_uses_the_shortest_form(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


@given(st.floats(min_value=0.0005, max_value=1e9) | st.integers(0, 10**9).map(float))
def test_formatted_duration_parses_to_the_same_value(seconds: float) -> None:
    # A setting may have 15 digits after the decimal point.
    seconds = round(seconds, 12)
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("12B", 12),
        ("64MiB", 64 << 20),
        ("64 MiB", 64 << 20),
        ("4MB", 4_000_000),
        ("4kB", 4_000),
        ("4KB", 4_000),
        ("1.5GiB", 3 << 29),
        ("1TiB", 1 << 40),
    ],
)
def test_parse_size_accepts_each_spelling(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written", ["", "MiB", "4M", "4mib", "4Mb", "-1B", "1e3", -1, 1.5, True, None, [4]]
)
def test_invalid_size_error_shows_the_format(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a size \(write an integer number of bytes"):
        parse_size(written)


def test_parse_size_refuses_a_fraction_of_a_byte() -> None:
    with pytest.raises(ValueError, match="must be an integer number of bytes"):
        parse_size("1.0001KiB")


@pytest.mark.parametrize(
    ("size", "written"), [(0, "0B"), (1000, "1000B"), (1 << 20, "1MiB"), (3 << 29, "1536MiB")]
)
def test_format_size_uses_binary_units(size: int, written: str) -> None:
    assert format_size(size) == written


@given(st.integers(0, 10**15 - 1))
def test_formatted_size_parses_to_the_same_value(size: int) -> None:
    assert parse_size(format_size(size)) == size
