"""Waits grow as the policy defines, but never exceed the cap and never overflow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import Backoff
from streamqd.policy.backoff import delay

policies = st.builds(
    Backoff,
    kind=st.sampled_from(["fixed", "linear", "exponential"]),
    base=st.floats(0, 1e6),
    max=st.floats(0, 1e6),
    jitter=st.sampled_from(["full", "none"]),
)
attempts = st.integers(1, 10**30)


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("fixed", [2, 2, 2, 2, 2, 2]),
        ("linear", [2, 4, 6, 8, 10, 10]),
        ("exponential", [2, 4, 8, 10, 10, 10]),
    ],
)
def test_backoff_kinds_grow_as_documented(kind: str, waits: list[float]) -> None:
    policy = Backoff(kind=kind, base=2.0, max=10.0, jitter="none")
    assert [delay(policy, attempt, 0.5) for attempt in range(1, 7)] == waits


def test_full_jitter_is_a_fraction_of_the_capped_delay() -> None:
    policy = Backoff(kind="exponential", base=1.0, max=60.0, jitter="full")
    assert delay(policy, 4, 0.0) == 0.0
    assert delay(policy, 4, 0.25) == 2.0
    assert delay(policy, 4, 1.0) == 8.0
    assert delay(policy, 100, 0.5) == 30.0


def test_delay_without_jitter_ignores_the_random_number() -> None:
    policy = Backoff(kind="fixed", base=3.0, max=60.0, jitter="none")
    assert {delay(policy, 1, draw) for draw in (0.0, 0.3, 1.0)} == {3.0}


def test_backoff_of_an_attempt_below_one_equals_the_first() -> None:
    policy = Backoff(kind="exponential", base=4.0, max=60.0, jitter="none")
    assert delay(policy, 0, 1.0) == delay(policy, -5, 1.0) == delay(policy, 1, 1.0) == 4.0


def test_unknown_backoff_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of backoff: cubic"):
        delay(Backoff(kind="cubic"), 1, 0.0)


@given(policies, attempts, st.floats(0, 1))
def test_backoff_stays_within_bounds(policy: Backoff, attempt: int, jitter: float) -> None:
    wait = delay(policy, attempt, jitter)
    assert math.isfinite(wait)
    assert 0 <= wait <= policy.max
    if policy.jitter == "none":
        assert wait >= min(policy.base, policy.max)


@given(policies, st.integers(1, 5000), st.floats(0, 1))
def test_delay_never_shrinks_with_the_attempt(policy: Backoff, attempt: int, jitter: float) -> None:
    assert delay(policy, attempt + 1, jitter) >= delay(policy, attempt, jitter)


@given(policies, attempts, st.floats(0, 1), st.floats(0, 1))
def test_delay_never_shrinks_with_the_jitter(
    policy: Backoff, attempt: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert delay(policy, attempt, low) <= delay(policy, attempt, high)
