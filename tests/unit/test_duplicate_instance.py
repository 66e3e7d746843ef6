"""If a second run has our ID, heartbeats and not timestamps show which of the two is alive."""

from __future__ import annotations

import pytest

from streamqd.policy.silence import SilenceDetector

TTL, INTERVAL = 15.0, 3.0


@pytest.fixture
def duplicate() -> SilenceDetector:
    return SilenceDetector("me", TTL, INTERVAL)


def test_duplicate_with_two_heartbeats_is_lasting(duplicate: SilenceDetector) -> None:
    """Only the second heartbeat proves a duplicate, because a single one may be a late packet."""
    lives, stays = [], []
    for number in range(3):
        assert not duplicate.observe_duplicate(1000 + number, 3.0 * number)
        lives.append(duplicate.is_duplicate_live)
        stays.append(duplicate.is_duplicate_lasting)
    assert (lives, stays) == ([False, True, True], [False, False, True])
    duplicate.forget_duplicate()
    assert not duplicate.is_duplicate_live
    assert not duplicate.is_duplicate_lasting


def test_leaving_duplicate_is_awaited_without_a_limit(duplicate: SilenceDetector) -> None:
    """A run that is draining is awaited without a limit, because it will free the name."""
    for number in range(20):
        assert not duplicate.observe_duplicate(1000 + number, 3.0 * number, leaving=number > 1)
        assert not duplicate.is_duplicate_lasting
    assert not duplicate.is_duplicate_live


def test_duplicate_silent_for_a_ttl_is_dead(duplicate: SilenceDetector) -> None:
    for number in range(6):
        assert not duplicate.observe_duplicate(1000, 100.0 + 3.0 * number)
    assert duplicate.observe_duplicate(1000, 118.0)
    assert not duplicate.is_duplicate_lasting


def test_duplicate_with_one_heartbeat_is_dead(
    duplicate: SilenceDetector,
) -> None:
    dead = [
        duplicate.observe_duplicate(1000 if number < 3 else 1001, 3.0 * number)
        for number in range(10)
    ]
    assert dead == [False] * 9 + [True]
    assert not duplicate.is_duplicate_lasting


def test_duplicate_silence_counts_only_while_observed(duplicate: SilenceDetector) -> None:
    """Silence counts only while it is observed.

    If the server was paused for both runs, the other run may send the next heartbeat.
    """
    duplicate.observe_duplicate(1000, 0.0)
    assert not duplicate.observe_duplicate(1000, 60.0)
    for number in range(1, 6):
        assert not duplicate.observe_duplicate(1000, 60.0 + 3.0 * number)
    assert not duplicate.is_duplicate_lasting
    assert duplicate.observe_duplicate(1000, 78.0)


def test_next_duplicate_is_judged_separately(duplicate: SilenceDetector) -> None:
    for number in range(8):
        duplicate.observe_duplicate(1000 + number, 3.0 * number)
    duplicate.forget_duplicate()
    assert not duplicate.observe_duplicate(2000, 1000.0)
    assert not duplicate.is_duplicate_lasting
