"""The housekeeper's figures for `top`: failures by class, trends, and the latency of handlers."""

from __future__ import annotations

import pytest

from streamqd.failures import BYTES, ROWS, RecentFailures
from streamqd.housekeeper.pace import LATENCY_SECONDS, Drift, Latency, Trend
from streamqd.model import Assignment
from streamqd.scoreboard import BUCKETS, ENTRIES_MAX, Scoreboard

SECOND = 1_000_000_000


def test_failures_are_counted_by_name_latest_first() -> None:
    table = RecentFailures(memoryview(bytearray(BYTES)))
    for now, name in enumerate(("OSError", "KeyError", "OSError"), start=1):
        table.note(name, now)

    assert table.recent() == [("OSError", 2, 3), ("KeyError", 1, 2)]


def test_new_failure_replaces_the_least_recent_row() -> None:
    table = RecentFailures(memoryview(bytearray(BYTES)))
    for number in range(ROWS):
        table.note(f"E{number}", number + 1)
    table.note("E0", 100)
    table.note("new", 101)

    names = {each.name for each in table.recent()}
    assert names == {"new", "E0", *(f"E{n}" for n in range(2, ROWS))}


@pytest.mark.parametrize("name", ["x" * 500, "日" * 100, "", "a\ud800b"])
def test_failure_names_of_any_kind_round_trip(name: str) -> None:
    table = RecentFailures(memoryview(bytearray(BYTES)))
    table.note(name, 1)
    table.note(name, 2)

    (found,) = table.recent()
    assert found.times == 2
    assert len(found.name.encode()) <= 80


def test_failure_rows_do_not_overlap_the_entry_ids() -> None:
    slot = Scoreboard(2).allot(Assignment("t", 0, "g"))
    for number in range(ROWS):
        slot.failures.note(f"{number:x}" * 80, number + 1)
    slot.post_batch([b"m:%020d-%020d" % (n, n) for n in range(ENTRIES_MAX)])

    assert len(slot.failures.recent()) == ROWS
    assert slot.unfinished == ENTRIES_MAX


def test_trend_is_the_slope_of_recent_values() -> None:
    trend = Trend(10.0)
    trend.observe({"a": 0}, 0)
    assert trend.get("a") is None
    for second in range(1, 6):
        trend.observe({"a": 5.0 * second}, second * SECOND)
    assert trend.get("a") == 5.0
    for second in range(6, 106):
        trend.observe({"a": 25.0}, second * SECOND)
    assert trend.get("a") == pytest.approx(0.0, abs=0.01)
    trend.observe({}, 107 * SECOND)
    assert trend.get("a") is None


def test_burst_is_not_growth() -> None:
    drift = Drift(7)
    for second, lag in enumerate((0, 0, 1500)):
        drift.observe({"a": lag}, second * SECOND)
    assert drift.get("a") == 0.0
    for second, lag in enumerate((1450, 1400), start=3):
        drift.observe({"a": lag}, second * SECOND)
    assert drift.get("a") == 0.0
    drift.observe({"a": 1350}, 5 * SECOND)
    assert drift.get("a") == -50.0


def test_steady_growth_is_reported_from_the_third_sample() -> None:
    drift = Drift(7)
    found = []
    for second in range(20):
        drift.observe({"a": 30 * second, "b": 1.0}, 3 * second * SECOND)
        found.append(drift.get("a"))
    assert found == [None, None, *[10.0] * 18]
    drift.observe({"b": 1.0}, 99 * SECOND)
    assert drift.get("a") is None


def histogram(bucket: int, runs: int) -> list[int]:
    counts = [0] * (len(BUCKETS) + 1)
    counts[bucket] = runs
    return counts


def test_latency_covers_the_last_minute() -> None:
    latency = Latency()
    assert latency.get(0) is None
    latency.observe(0, histogram(5, 0), 0.0, 0)
    latency.observe(0, histogram(20, 100), 100.0, SECOND)
    slow = latency.get(0)
    assert slow is not None
    assert slow.p50 == slow.p99 == round(BUCKETS[20], 6)
    assert slow.mean == pytest.approx(1.0)

    quick = histogram(20, 100)
    quick[5] = 1000
    latency.observe(0, quick, 100.1, int((1 + 10 * LATENCY_SECONDS) * SECOND))
    found = latency.get(0)
    assert found is not None
    assert found.p99 == round(BUCKETS[5], 6)


def test_latency_expires_a_minute_after_the_last_run() -> None:
    """Even the figures of 10,000 runs expire within a minute, and not after 14 minutes."""
    latency = Latency()
    latency.observe(0, histogram(3, 1), 0.1, 0)
    latency.observe(0, histogram(3, 10_001), 1.0, SECOND)
    latency.observe(0, histogram(3, 10_001), 1.0, int(0.9 * LATENCY_SECONDS * SECOND))
    assert latency.get(0) is not None
    latency.observe(0, histogram(3, 10_001), 1.0, int((LATENCY_SECONDS + 2) * SECOND))
    assert latency.get(0) is None


def test_latency_without_recent_runs_is_none() -> None:
    latency = Latency()
    latency.observe(0, histogram(3, 1), 0.1, 0)
    latency.observe(0, histogram(3, 2), 0.2, SECOND)
    assert latency.get(0) is not None
    latency.observe(0, histogram(3, 2), 0.2, int(20 * LATENCY_SECONDS * SECOND))

    assert latency.get(0) is None
