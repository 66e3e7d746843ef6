"""Decide what happens to a message whose run failed.

Runs that failed (`attempt`) and runs that crashed their process (`crashes`) are counted separately.
A release, for example during a drain or a rebalance, counts as neither. Limits count runs, so with
`max_attempts` 5, the fifth failure is the last one. A limit of 0 means unlimited.

A message that is missing, expired or too large needs no decision, because `worker.verdicts`
finishes it without a run.

If `retry_on` and `dead_on` both match an exception, the class that is nearest to the exception in
Python's method resolution order applies. For example, with `dead_on` OSError and `retry_on`
ConnectionError, a refused connection is retried and a missing file is dead-lettered.

This module does no I/O, and reads no clock.
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
    """Return the verdict on a message whose run failed with `outcome`.

    `attempt` is the number of this run, counted from 1. `crashes` is the number of crashes charged
    to the message, and `age` the number of seconds since it was first written. `jitter` is a random
    number from 0 to 1. `keyed` is True if the message has a key. `exempt` is True if the circuit
    breaker forgives the failure, because a dependency of the handler may have caused it.

    1. If the handler raised `Dead`, the message is dead-lettered. If it raised `Release`, the
       message is released unchanged.
    2. If the policy does not retry the class of the failure, the message is dead-lettered. This
       rule does not apply if the handler raised `Retry`.
    3. If the message has reached a limit, it is dead-lettered. The limits are checked in this
       order: attempts, crashes, age. For an exempt failure, only the age is checked.
    4. Any other message is retried after the delay of `Retry` or, without one, the backoff of the
       policy.
    5. `waits_in_place` decides where a retried or released message waits.
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
    """Return the verdict on a message that has reached `max_crashes`, or None if it may run."""
    if policy.max_crashes and crashes >= policy.max_crashes:
        return DeadVerdict("crashes")
    return None


def waits_in_place(on_error: str, *, keyed: bool) -> bool:
    """Return True if a message waits for its retry in the worker instead of in Redis.

    Waiting in the worker keeps the order of messages. If `on_error` is "hold-key", a message
    without a key waits in Redis, because it has no order to keep.
    """
    return on_error == BLOCK or (on_error == HOLD_KEY and keyed)


def retries(failure: Failed, policy: RetryPolicy) -> bool:
    """Return True if the policy retries a failure of this class.

    An exceeded time limit is retried even if `retry_on` does not list its class, because the
    handler itself does not raise this error. It is not retried if `dead_on` lists the class.
    """
    if not policy.dead_on and not policy.retry_on:
        return True
    for name in failure.lineage:
        if name in policy.dead_on:
            return False
        if name in policy.retry_on:
            return True
    return not policy.retry_on or failure.timed_out
