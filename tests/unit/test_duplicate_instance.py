"""A second run with our id: heartbeats, not timestamps, show which run is alive."""

from __future__ import annotations

import pytest

from streamqd.policy.silence import SilenceDetector

TTL, INTERVAL = 15.0, 3.0


@pytest.fixture
def twin() -> SilenceDetector:
    return SilenceDetector("me", TTL, INTERVAL)


def test_duplicate_with_two_heartbeats_stays(twin: SilenceDetector) -> None:
    """U5: detection took a ttl and an interval (18 s). One heartbeat may be a late packet."""
    lives, stays = [], []
    for number in range(3):
        assert not twin.duplicate_seen(1000 + number, 3.0 * number)
        lives.append(twin.duplicate_lives)
        stays.append(twin.duplicate_stays)
    assert (lives, stays) == ([False, True, True], [False, False, True])
    twin.duplicate_gone()
    assert not twin.duplicate_lives
    assert not twin.duplicate_stays


def test_leaving_duplicate_is_waited_for(twin: SilenceDetector) -> None:
    """U5: a draining run is waited for without a limit, because it frees the name."""
    for number in range(20):
        assert not twin.duplicate_seen(1000 + number, 3.0 * number, leaving=number > 1)
        assert not twin.duplicate_stays
    assert not twin.duplicate_lives


def test_duplicate_silent_for_a_ttl_is_dead(twin: SilenceDetector) -> None:
    for number in range(6):
        assert not twin.duplicate_seen(1000, 100.0 + 3.0 * number)
    assert twin.duplicate_seen(1000, 118.0)
    assert not twin.duplicate_stays


def test_duplicate_with_one_heartbeat_is_dead(
    twin: SilenceDetector,
) -> None:
    dead = [twin.duplicate_seen(1000 if number < 3 else 1001, 3.0 * number) for number in range(10)]
    assert dead == [False] * 9 + [True]
    assert not twin.duplicate_stays


def test_silence_counts_only_while_observed(twin: SilenceDetector) -> None:
    """The server was paused for both runs, and the other run may beat next."""
    twin.duplicate_seen(1000, 0.0)
    assert not twin.duplicate_seen(1000, 60.0)
    for number in range(1, 6):
        assert not twin.duplicate_seen(1000, 60.0 + 3.0 * number)
    assert not twin.duplicate_stays
    assert twin.duplicate_seen(1000, 78.0)


def test_next_duplicate_is_judged_afresh(twin: SilenceDetector) -> None:
    for number in range(8):
        twin.duplicate_seen(1000 + number, 3.0 * number)
    twin.duplicate_gone()
    assert not twin.duplicate_seen(2000, 1000.0)
    assert not twin.duplicate_stays
