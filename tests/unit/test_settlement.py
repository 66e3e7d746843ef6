"""The verdict for every outcome, attempt, crash count and age, by a second implementation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import (
    BLOCK,
    HOLD_KEY,
    REQUEUE,
    Backoff,
    DeadAsked,
    DeadVerdict,
    Failed,
    Outcome,
    ReleaseAsked,
    ReleaseVerdict,
    RetryAsked,
    RetryPolicy,
    RetryVerdict,
    Verdict,
)
from streamqd.policy.settlement import before_run, decide

POLICY = RetryPolicy(
    max_attempts=5,
    max_crashes=3,
    backoff=Backoff(kind="exponential", base=1.0, max=300.0, jitter="none"),
)
LINEAGE = ("shop.PaymentError", "PaymentError", "builtins.OSError", "OSError", "Exception")
FAILED = Failed("shop.PaymentError", "no answer", "Traceback ...", LINEAGE)
TIMED_OUT = Failed("streamqd.SoftTimeout", "", "", ("streamqd.SoftTimeout", "SoftTimeout"), True)


def verdict(
    outcome: Outcome,
    attempt: int = 1,
    crashes: int = 0,
    age: float = 0.0,
    policy: RetryPolicy = POLICY,
    jitter: float = 1.0,
) -> Verdict:
    return decide(outcome, attempt=attempt, crashes=crashes, age=age, policy=policy, jitter=jitter)


# --- the table: every outcome with every attempt, crash count and age -----------------------------

OUTCOMES: dict[str, Outcome] = {
    "failed": FAILED,
    "timed out": TIMED_OUT,
    "retry": RetryAsked(None, FAILED),
    "retry after": RetryAsked(7.0, FAILED),
    "dead": DeadAsked("dead", FAILED),
    "undecodable": DeadAsked("undecodable", FAILED),
    "release": ReleaseAsked(),
}
WAITS = {1: 1.0, 2: 2.0, 3: 4.0, 4: 8.0}


def expected_verdict(name: str, attempt: int, crashes: int, age: float) -> Verdict:
    """Return the verdict that the documentation promises, according to its text."""
    if name in ("dead", "undecodable"):
        return DeadVerdict(name)
    if name == "release":
        return ReleaseVerdict()
    if attempt >= 5:
        return DeadVerdict("attempts")
    if crashes >= 3:
        return DeadVerdict("crashes")
    if age >= 100.0:
        return DeadVerdict("too-old")
    return RetryVerdict(7.0 if name == "retry after" else WAITS[attempt])


@pytest.mark.parametrize("name", OUTCOMES)
def test_verdict_matches_its_table(name: str) -> None:
    policy = dataclasses.replace(POLICY, max_age=100.0)
    for attempt, crashes, age in itertools.product(range(1, 8), range(6), (0.0, 99.9, 100.0, 1e9)):
        found = verdict(OUTCOMES[name], attempt, crashes, age, policy)
        assert found == expected_verdict(name, attempt, crashes, age), (attempt, crashes, age)


def test_verdict_table_covers_every_outcome() -> None:
    assert {type(outcome) for outcome in OUTCOMES.values()} == set(get_args(Outcome))


# --- limits --------------------------------------------------------------------------------------


def test_fifth_failure_is_the_last() -> None:
    assert isinstance(verdict(FAILED, attempt=4), RetryVerdict)
    assert verdict(FAILED, attempt=5) == DeadVerdict("attempts")


def test_max_attempts_of_one_means_no_retry() -> None:
    once = dataclasses.replace(POLICY, max_attempts=1)
    assert verdict(FAILED, attempt=1, policy=once) == DeadVerdict("attempts")


def test_zero_max_attempts_retries_forever() -> None:
    ever = dataclasses.replace(POLICY, max_attempts=0)
    assert verdict(FAILED, attempt=10**9, policy=ever) == RetryVerdict(300.0)


def test_zero_max_crashes_retries_forever() -> None:
    ever = dataclasses.replace(POLICY, max_crashes=0)
    assert before_run(10**9, ever) is None
    assert isinstance(verdict(FAILED, crashes=10**9, policy=ever), RetryVerdict)


@pytest.mark.parametrize("crashes", range(6))
def test_third_crash_is_dead_lettered_before_a_run(crashes: int) -> None:
    assert before_run(crashes, POLICY) == (DeadVerdict("crashes") if crashes >= 3 else None)


def test_old_message_is_retried_without_max_age() -> None:
    assert isinstance(verdict(FAILED, age=1e12), RetryVerdict)


# --- Retry ---------------------------------------------------------------------------------------


def test_retry_after_is_neither_jittered_nor_capped() -> None:
    assert verdict(RetryAsked(1000.0, FAILED), jitter=0.0) == RetryVerdict(1000.0)
    assert verdict(RetryAsked(0.0, FAILED)) == RetryVerdict(0.0)


def test_retry_after_respects_max_attempts() -> None:
    assert verdict(RetryAsked(1.0, FAILED), attempt=5) == DeadVerdict("attempts")


def test_retry_in_the_past_is_now() -> None:
    assert verdict(RetryAsked(-3.0, FAILED)) == RetryVerdict(0.0)


def test_jitter_is_applied_to_the_backoff() -> None:
    policy = dataclasses.replace(POLICY, backoff=Backoff(base=8.0, jitter="full"))
    assert verdict(FAILED, policy=policy, jitter=0.25) == RetryVerdict(2.0)


# --- classes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINEAGE)
def test_policy_matches_any_base_class(name: str) -> None:
    dead = dataclasses.replace(POLICY, dead_on=(name,))
    assert verdict(FAILED, policy=dead) == DeadVerdict("not-retried")
    retried = dataclasses.replace(POLICY, retry_on=("KeyError", name))
    assert isinstance(verdict(FAILED, policy=retried), RetryVerdict)


def test_error_outside_retry_on_is_dead_immediately() -> None:
    policy = dataclasses.replace(POLICY, retry_on=("KeyError",))
    assert verdict(FAILED, policy=policy) == DeadVerdict("not-retried")


def test_policy_does_not_match_a_part_of_a_name() -> None:
    policy = dataclasses.replace(POLICY, dead_on=("Payment", "shop", "oserror"))
    assert isinstance(verdict(FAILED, policy=policy), RetryVerdict)


def test_most_derived_class_decides() -> None:
    policy = dataclasses.replace(POLICY, retry_on=("OSError",), dead_on=("PaymentError",))
    assert verdict(FAILED, policy=policy) == DeadVerdict("not-retried")
    policy = dataclasses.replace(POLICY, retry_on=("PaymentError",), dead_on=("OSError",))
    assert isinstance(verdict(FAILED, policy=policy), RetryVerdict)
    policy = dataclasses.replace(POLICY, retry_on=("KeyError",), dead_on=("Exception",))
    assert verdict(FAILED, policy=policy) == DeadVerdict("not-retried")


def test_error_outside_dead_on_is_retried() -> None:
    policy = dataclasses.replace(POLICY, dead_on=("KeyError",))
    assert isinstance(verdict(FAILED, policy=policy), RetryVerdict)


def test_explicit_retry_ignores_the_error_class() -> None:
    policy = dataclasses.replace(POLICY, retry_on=("KeyError",), dead_on=("OSError",))
    assert verdict(RetryAsked(2.0, FAILED), policy=policy) == RetryVerdict(2.0)


def test_timeout_is_retried_unless_dead_on_names_it() -> None:
    policy = dataclasses.replace(POLICY, retry_on=("KeyError",))
    assert isinstance(verdict(TIMED_OUT, policy=policy), RetryVerdict)
    policy = dataclasses.replace(POLICY, dead_on=("SoftTimeout",))
    assert verdict(TIMED_OUT, policy=policy) == DeadVerdict("not-retried")


# --- the place of the wait -----------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [FAILED, TIMED_OUT, RetryAsked(7.0, FAILED)])
def test_on_error_decides_where_a_retry_waits(outcome: Outcome) -> None:
    delay = 7.0 if isinstance(outcome, RetryAsked) else 1.0
    for on_error, keyed, expected in (
        (REQUEUE, True, RetryVerdict(delay)),
        (REQUEUE, False, RetryVerdict(delay)),
        (BLOCK, True, RetryVerdict(delay, in_place=True)),
        (BLOCK, False, RetryVerdict(delay, in_place=True)),
        (HOLD_KEY, True, RetryVerdict(delay, in_place=True)),
        (HOLD_KEY, False, RetryVerdict(delay)),
    ):
        policy = dataclasses.replace(POLICY, on_error=on_error)
        found = decide(
            outcome, attempt=1, crashes=0, age=0.0, policy=policy, jitter=1.0, keyed=keyed
        )
        assert found == expected


@pytest.mark.parametrize("on_error", [REQUEUE, BLOCK, HOLD_KEY])
def test_on_error_does_not_change_other_verdicts(on_error: str) -> None:
    policy = dataclasses.replace(POLICY, on_error=on_error)
    assert verdict(ReleaseAsked(), policy=policy) == ReleaseVerdict(on_error != REQUEUE)
    assert verdict(DeadAsked("dead", FAILED), policy=policy) == DeadVerdict("dead")
    assert verdict(FAILED, attempt=5, policy=policy) == DeadVerdict("attempts")


def test_exempt_failure_respects_only_age_and_class() -> None:
    policy = RetryPolicy(max_attempts=1, max_age=10.0, backoff=Backoff())

    def found(outcome: Outcome, on_error: str = REQUEUE, age: float = 9.0, **more: Any) -> Verdict:
        return decide(
            outcome,
            attempt=9,
            crashes=9,
            age=age,
            policy=dataclasses.replace(policy, on_error=on_error, **more),
            jitter=1.0,
            exempt=True,
        )

    assert found(FAILED) == RetryVerdict(256.0)
    assert found(FAILED, HOLD_KEY) == RetryVerdict(256.0, in_place=True)
    assert found(DeadAsked("dead", FAILED)) == DeadVerdict("dead")
    assert found(FAILED, age=10.0) == DeadVerdict("too-old")
    assert found(FAILED, retry_on=("KeyError",)) == DeadVerdict("not-retried")
    assert found(FAILED, dead_on=("OSError",)) == DeadVerdict("not-retried")


# --- properties ----------------------------------------------------------------------------------

names = st.sampled_from([*LINEAGE, "KeyError", "SoftTimeout"])
policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(0, 8),
    max_crashes=st.integers(0, 5),
    backoff=st.builds(Backoff, base=st.floats(0, 10), max=st.floats(10, 1000)),
    max_age=st.none() | st.floats(0.001, 1e6),
    retry_on=st.lists(names, max_size=2).map(tuple),
    dead_on=st.lists(names, max_size=2).map(tuple),
    on_error=st.sampled_from([REQUEUE, BLOCK, HOLD_KEY]),
)


@given(
    st.sampled_from(list(OUTCOMES.values())),
    st.integers(1, 100),
    st.integers(0, 100),
    st.floats(0, 1e9),
    policies,
    st.floats(0, 1),
)
def test_verdict_always_has_a_known_reason(
    outcome: Outcome, attempt: int, crashes: int, age: float, policy: RetryPolicy, jitter: float
) -> None:
    found = verdict(outcome, attempt, crashes, age, policy, jitter)
    if isinstance(found, RetryVerdict | ReleaseVerdict):
        assert found.in_place == (policy.on_error != REQUEUE)
    if isinstance(found, RetryVerdict):
        assert found.delay >= 0
        assert not policy.max_attempts or attempt < policy.max_attempts
        assert before_run(crashes, policy) is None
    if isinstance(found, DeadVerdict):
        assert found.reason in (
            "dead",
            "undecodable",
            "attempts",
            "crashes",
            "too-old",
            "not-retried",
        )


@given(policies, st.floats(0, 1))
def test_message_is_dead_after_exactly_max_attempts_failures(
    policy: RetryPolicy, jitter: float
) -> None:
    policy = dataclasses.replace(policy, max_age=None, retry_on=(), dead_on=())
    failures = 0
    while failures < 20:
        failures += 1
        if isinstance(verdict(FAILED, attempt=failures, policy=policy, jitter=jitter), DeadVerdict):
            break
    assert failures == (policy.max_attempts or 20)
