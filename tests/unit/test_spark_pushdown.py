"""The Spark source accepts filters, and none of them loses a row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.spark import offsets
from streamqd.spark.offsets import Span
from streamqd.spark.pushdown import PushedFilters

datasource = pytest.importorskip("pyspark.sql.datasource")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COMPARE: dict[str, Any] = {
    "EqualTo": lambda one, other: one == other,
    "GreaterThan": lambda one, other: one > other,
    "GreaterThanOrEqual": lambda one, other: one >= other,
    "LessThan": lambda one, other: one < other,
    "LessThanOrEqual": lambda one, other: one <= other,
}
WHOLE = Span(("access", 0), offsets.ZERO, (100, 0), 50, 0)


def make_filter(kind: str, column: str, value: Any) -> Any:
    return getattr(datasource, kind)((column,), value)


def test_partition_filters_are_pushed_down() -> None:
    pushed = PushedFilters()
    rest = pushed.push(
        [make_filter("In", "partition", [0, 2]), make_filter("EqualTo", "Topic", "access")]
    )
    assert rest == []
    places = [("access", 0), ("access", 1), ("access", 2), ("orders", 0)]
    assert [place for place in places if pushed.may_match(place)] == [places[0], places[2]]
    assert pushed.spans([WHOLE, WHOLE._replace(place=("access", 1))]) == [WHOLE]


def test_unsupported_filter_is_left_to_spark() -> None:
    offered = [
        make_filter("GreaterThan", "partition", 1),
        make_filter("EqualTo", "value", b"x"),
        datasource.IsNotNull(("partition",)),
        datasource.Not(make_filter("EqualTo", "partition", 1)),
        make_filter("EqualTo", "id", "5-0"),
        datasource.EqualTo(("partition", "deeper"), 1),
    ]
    pushed = PushedFilters()
    assert pushed.push(offered) == offered
    assert pushed.spans([WHOLE]) == [WHOLE]


@given(st.sampled_from(sorted(COMPARE)), st.integers(0, 12_000), st.booleans())
def test_time_filter_keeps_every_matching_row(kind: str, micros: int, elsewhere: bool) -> None:
    value = EPOCH + timedelta(microseconds=micros)
    if elsewhere:
        value = value.astimezone(timezone(timedelta(hours=5)))
    pushed = PushedFilters()
    offered = [make_filter(kind, "timestamp", value)]
    assert pushed.push(offered) == offered
    kept = pushed.spans([WHOLE])
    for ms in range(1, 15):
        if COMPARE[kind](EPOCH + timedelta(milliseconds=ms), value):
            assert any(span.start < (ms, 0) and (ms, 9) <= span.end for span in kept)
        elif abs(ms - micros / 1000) > 1:
            assert not any(span.start < (ms, 9) and (ms, 0) <= span.end for span in kept)


@given(st.sampled_from(sorted(COMPARE)), st.integers(0, 12))
def test_millisecond_filter_keeps_every_matching_row(kind: str, value: int) -> None:
    pushed = PushedFilters()
    pushed.push([make_filter(kind, "id_ms", value)])
    kept = pushed.spans([WHOLE])
    for ms in range(1, 15):
        if COMPARE[kind](ms, value):
            assert any(span.start < (ms, 0) and (ms, 9) <= span.end for span in kept)


def test_narrowed_span_has_no_row_count() -> None:
    pushed = PushedFilters()
    pushed.push(
        [make_filter("GreaterThanOrEqual", "id_ms", 5), make_filter("LessThan", "id_ms", 9)]
    )
    (kept,) = pushed.spans([WHOLE])
    assert (kept.start, kept.rows, kept.removed) == ((4, offsets.PART_MAX), None, 0)


def test_unsupported_time_filters_are_left_to_spark() -> None:
    pushed = PushedFilters()
    naive = datetime(2026, 1, 1)  # noqa: DTZ001
    pushed.push(
        [
            make_filter("GreaterThan", "timestamp", naive),
            make_filter("LessThan", "timestamp", EPOCH - timedelta(days=1)),
            make_filter("LessThan", "id_ms", -1),
        ]
    )
    assert pushed.spans([WHOLE]) == [WHOLE]
