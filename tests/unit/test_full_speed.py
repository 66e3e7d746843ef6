"""Full speed is reached at the end of the last slow window, if enough steady windows follow."""

from __future__ import annotations

import pytest

from tests.support.full_speed import (
    FULL,
    LEAST,
    STEADY_SECONDS,
    WINDOW_SECONDS,
    full_speed,
    seconds_until_full,
)

RATE = 100.0
WANTED = int(FULL * RATE * WINDOW_SECONDS)


def runs(since: float, until: float, rate: float = RATE) -> list[float]:
    """Return the end times of runs that have an even rate."""
    return [since + number / rate for number in range(round((until - since) * rate))]


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (runs(0, 20), 0.0),
        (runs(0, 5) + runs(7, 20), 2.0),
        (runs(0, 5) + runs(5, 7, 40.0) + runs(7, 20), 2.0),
        (runs(0, 5.5) + runs(7, 8) + runs(9, 20), 4.0),
    ],
    ids=["no loss", "a gap", "half the speed", "two gaps, the first after a while"],
)
def test_seconds_until_full_is_computed(times: list[float], seconds: float) -> None:
    found = seconds_until_full(times, 5.0, WANTED)
    assert found == pytest.approx(seconds, abs=0.5)


def test_full_speed_requires_a_steady_rate() -> None:
    gap = runs(0, 5)
    assert seconds_until_full(gap, 5.0, WANTED) is None
    assert seconds_until_full(gap + runs(7, 7 + STEADY_SECONDS / 2), 5.0, WANTED) is None
    assert seconds_until_full(gap + runs(7, 8 + STEADY_SECONDS), 5.0, WANTED) is not None


def test_full_speed_lost_again_does_not_count() -> None:
    """If full speed is lost again, it does not count.

    Entries in memory still run for a while after a connection has died.
    """
    times = runs(0, 6) + runs(8, 20)
    assert seconds_until_full(times, 5.0, WANTED) == pytest.approx(3.0, abs=0.5)


def test_full_speed_is_the_rate_of_the_slowest_window() -> None:
    assert full_speed(runs(0, 3)) == WANTED
    stopped = runs(0, 1) + runs(1.2, 3)
    assert full_speed(stopped) == pytest.approx(0.3 * RATE, abs=1)
    hardly = runs(0, 1) + runs(1.49, 3)
    assert full_speed(hardly) == int(LEAST * len(hardly) / (hardly[-1] - hardly[0]) / 2)


def test_full_speed_works_for_less_than_one_window() -> None:
    assert full_speed(runs(0, WINDOW_SECONDS / 2)) >= 1
