"""The statements in docs/internals/cost-by-size.md follow from the measured figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks import growth_page


def shape(
    topics: int, groups: int = 1, *, ours: float, worker: float = 2.0, redis: float = 2.0
) -> dict[str, Any]:
    return {
        "shape": f"{topics}x1x{groups}",
        "topics": topics,
        "partitions": 1,
        "groups": groups,
        "units": topics * groups,
        "rest": {"ours, ms/s": ours, "redis, ms/s": ours / 2, "commands/s": 1234.4},
        "work": {
            "messages/s": 5678,
            "workers, us/message": worker,
            "redis, us/message": redis,
            "commands/message": 0.0254,
        },
    }


def cost_row(amount: int, ours: float, redis: float = 10.0) -> dict[str, Any]:
    rates = {"ours, ms/s": ours, "redis, ms/s": redis, "commands/s": 1000.0}
    return {"amount": amount, **rates, "redis, MiB": 2.5}


RESULTS: dict[str, Any] = {
    "machine": {"cpu": "a processor", "cores": 2, "python": "3.11", "server": "valkey 9"},
    "date": "2026-01-02",
    "seconds": 8.0,
    "messages": 200_000,
    "least": 10_000,
    "bytes": 100,
    "shape": "4x1x1",
    "units": [
        shape(1, ours=10.0),
        shape(16, ours=13.0),
        shape(256, ours=61.0, worker=3.0),
        shape(16, 8, ours=24.2, redis=1.0),
    ],
    "amounts": {
        "backlog": [cost_row(0, 20.0), cost_row(1_000, 10.0), cost_row(1_000_000, 12.5, redis=9.0)],
    },
}


def words(text: str) -> str:
    """Return a text on one line."""
    return " ".join(text.split())


def test_cost_by_partitions_omits_runs_with_more_groups() -> None:
    """The figures come only from runs with one group. 255 more assignments cost 51 ms."""
    text = words(growth_page.render_page(RESULTS))

    assert "**More partitions**, from 1 to 256 assignments." in text
    assert "While idle, streamqd uses 10.0 ms/s in total at the smallest size and 61.0 ms/s" in text
    assert "adds 200 µs per second in streamqd and 100 µs per second in Redis." in text
    assert "the cost per assignment changes from 10,000 to 238 µs per second." in text
    assert "4.0 µs per message at the smallest size and 5.0 µs at the largest (+25%)" in text


def test_growth_page_compares_groups_on_equal_partitions() -> None:
    """Only runs with equally many partitions are compared. 112 more assignments cost 11.2 ms."""
    text = words(growth_page.render_page(RESULTS))

    assert "**More groups**, from 16 to 128 assignments." in text
    assert "While idle, streamqd uses 13.0 ms/s in total at the smallest size and 24.2 ms/s" in text
    assert "adds 100 µs per second in streamqd and 50 µs per second in Redis." in text
    assert "4.0 µs per message at the smallest size and 3.0 µs at the largest (-25%)" in text


def test_growth_page_without_groups_has_one_curve() -> None:
    rows = [row for row in RESULTS["units"] if row["groups"] == 1]

    assert growth_page.group_by_growth(reversed(rows)) == {"partitions": rows}


def test_growth_page_compares_with_the_smallest_amount() -> None:
    text = words(growth_page.render_page(RESULTS))

    assert (
        "**Backlog**, from 1,000 to 1,000,000 messages. The idle CPU time of streamqd changes"
        " from 10.00 to 12.50 ms/s (+25%), and that of Redis from 10.00 to 9.00 ms/s (-10%)."
    ) in text


def test_growth_page_has_a_row_per_result() -> None:
    text = growth_page.render_page(RESULTS)

    assert "| 16x1x8 | 128 | 24.2 | 0.19 | 12.1 | 1,234 |" in text
    assert "| 256x1x1 | 256 | 5,678 | 3.00 | 2.00 | 5.00 | 0.025 |" in text
    assert "| backlog | 0 | 20.0 | 10.0 | 1,000 | 2.5 |" in text
    assert "idle for 8 seconds" in words(text)
    assert "200,000 messages of 100 bytes" in words(text)


def test_growth_page_is_current() -> None:
    """The page is current. To update it, run `make bench NAME=growth-page`."""
    if not growth_page.RESULTS.exists():
        pytest.skip("make bench NAME=growth has not been run")
    results = json.loads(growth_page.RESULTS.read_text())
    page = growth_page.page_path(growth_page.RESULTS)

    assert page.read_text() == growth_page.render_page(results)
