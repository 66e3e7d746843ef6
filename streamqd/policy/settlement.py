"""Decide a message's next state from the outcome of its failed run. No I/O: no Redis, no clock.

Failed runs (`attempt`) and runs that crashed their process (`crashes`) are counted apart. A release
(a drain, a rebalance) counts as neither. Limits count runs: with `max_attempts` 5 the fifth failure
is the last. A limit of 0 means unlimited.

No decision is needed for a message that is missing, expired or too large: `worker.verdicts`
finishes it without a run.

Among `retry_on` and `dead_on`, the class nearest to the exception applies, in Python's method
resolution order. For example, with `dead_on` OSError and `retry_on` ConnectionError, a refused
connection is retried and a missing file is dead-lettered.
"""

from __future__ import annotations

from streamqd.model import (
    BLOCK,
    HOLD_KEY,
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
from streamqd.policy import backoff


def decide(
    outcome: Outcome,
    *,
    attempt: int,
    crashes: int,
    age: float,
    policy: RetryPolicy,
    jitter: float,
    keyed: bool = True,
    exempt: bool = False,
) -> Verdict:
    """Return the verdict on a message whose run number `attempt` (from 1) failed with `outcome`.

    `crashes` counts the crashes charged to the message. `age` is in seconds since its first write.
    `jitter` is a random number from 0 to 1. `keyed` is True if the message has a key, and `exempt`
    if a guard attributes the failure to a dependency of the handler.

    1. `Dead` is dead-lettered, and a release changes nothing.
    2. A failure whose class the policy does not retry is dead-lettered. `Retry` skips this rule.
    3. A message at a limit is dead-lettered: attempts, then crashes, then age.
    4. Any other message is retried, after the delay of `Retry` or the policy's backoff.
    5. An exempt failure of a retried class counts against `max_age` only.
    6. `waits_in_place` decides where the message waits, after a release too.
    """
    match outcome:
        case DeadAsked():
            return DeadVerdict(outcome.reason)
        case ReleaseAsked():
            return ReleaseVerdict(waits_in_place(policy.on_error, keyed=keyed))
        case Failed():
            if not retries(outcome, policy):
                return DeadVerdict("not-retried")
            after = None
        case RetryAsked():
            after = outcome.after
    if not exempt:
        if policy.max_attempts and attempt >= policy.max_attempts:
            return DeadVerdict("attempts")
        dead = before_run(crashes, policy)
        if dead is not None:
            return dead
    if policy.max_age is not None and age >= policy.max_age:
        return DeadVerdict("too-old")
    if after is None:
        after = backoff.delay(policy.backoff, attempt, jitter)
    return RetryVerdict(max(after, 0.0), waits_in_place(policy.on_error, keyed=keyed))


def before_run(crashes: int, policy: RetryPolicy) -> DeadVerdict | None:
    """Return the verdict on a message before its run: dead after `max_crashes` crashes."""
    if policy.max_crashes and crashes >= policy.max_crashes:
        return DeadVerdict("crashes")
    return None


def waits_in_place(on_error: str, *, keyed: bool) -> bool:
    """Return True if a message waits in its worker, which keeps its order, and not in Redis.

    With hold-key, a message without a key has no order to keep.
    """
    return on_error == BLOCK or (on_error == HOLD_KEY and keyed)


def retries(failure: Failed, policy: RetryPolicy) -> bool:
    """Return True if the policy retries this class of failure.

    The handler itself does not raise the error of an exceeded time limit, so `retry_on` does not
    need to list it. `dead_on` can list its class.
    """
    if not policy.dead_on and not policy.retry_on:
        return True
    for name in failure.lineage:
        if name in policy.dead_on:
            return False
        if name in policy.retry_on:
            return True
    return not policy.retry_on or failure.timed_out
