"""Heartbeats come soon after a wake-up in a small fleet, and are spread in a large one."""

from __future__ import annotations

import pytest

from streamqd.policy import heartbeats

INTERVAL = 3.0


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_idle_heartbeat_is_sent_within_its_interval(jitter: float) -> None:
    assert 0.8 * INTERVAL <= heartbeats.next_heartbeat(10.0, INTERVAL, jitter) - 10.0 <= INTERVAL


def test_wake_up_in_a_small_fleet_sends_immediately() -> None:
    assert heartbeats.woken_heartbeat(10.0, INTERVAL, 3, 1.0) - 10.0 < 0.05


def test_wake_ups_of_a_large_fleet_are_spread_over_an_interval() -> None:
    gaps = [heartbeats.woken_heartbeat(0.0, INTERVAL, 100, n / 10) for n in range(11)]
    assert gaps[0] >= 0.5
    assert gaps == sorted(gaps)
    assert sum(gaps) / len(gaps) == pytest.approx(100 / heartbeats.WOKEN_PER_SECOND)
    assert heartbeats.woken_heartbeat(0.0, INTERVAL, 10_000, 1.0) == INTERVAL


def test_overdue_heartbeat_is_sent_immediately() -> None:
    assert heartbeats.woken_heartbeat(5.0, INTERVAL, 200, 1.0) <= 8.0
