"""What becomes of a message that has run: whether it dies, and where it waits if not.

Three counts never mix: failed runs (`attempt`), runs that killed their process (`crashes`), and
releases (a drain, a rebalance), which are not seen here because they cost nothing. Limits count
runs: with `max_attempts` 5 the fifth failure is the last; 0 means that there is no limit.

Of the classes in `retry_on` and `dead_on` the one that is nearest to the exception decides, in the
order in which Python looks for methods: with `dead_on` OSError and `retry_on` ConnectionError, a
refused connection is tried again and a missing file is dead.
"""

from __future__ import annotations

from streamqd.model import (
    BLOCK,
    HOLD_KEY,
    Ack,
    DeadAsked,
    DeadVerdict,
    Failed,
    Outcome,
    ReleaseAsked,
    ReleaseVerdict,
    RetryAsked,
    RetryPolicy,
    RetryVerdict,
    Succeeded,
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
    """The verdict on a message whose `attempt`-th run (from 1) ended with `outcome`.

    `crashes` counts the runs charged to it, `age` is the time in seconds since its first write,
    `jitter` a number from 0 to 1 that the caller draws. `keyed` says whether it has a key,
    `exempt` that a failure is not the message's: what its handler depends on is down.

    1. What succeeded is done, what asked to be dead is dead, what was released stays as it is.
    2. A failure is dead at once when the policy does not retry its class. A handler that raises
       Retry has decided that itself.
    3. Anything else is dead when a limit is reached: attempts, then crashes, then age.
    4. The rest is tried again, after what Retry asked for, else after the policy's backoff.
    5. An exempt failure of a class that is retried counts only against `max_age`.
    6. Where it waits for its next run, after a release too, `waits_in_place` says.
    """
    match outcome:
        case Succeeded():
            return Ack()
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
    """The verdict on a message that is about to run: dead when it killed too many processes."""
    if policy.max_crashes and crashes >= policy.max_crashes:
        return DeadVerdict("crashes")
    return None


def waits_in_place(on_error: str, *, keyed: bool) -> bool:
    """Whether a message waits for its next run in its worker, where its order is kept.

    With hold-key a message without a key has no order to keep.
    """
    return on_error == BLOCK or (on_error == HOLD_KEY and keyed)


def retries(failure: Failed, policy: RetryPolicy) -> bool:
    """Whether the policy retries this class of failure: the nearest class that it names decides.

    An overrun time limit is nothing that the handler raised: `retry_on` does not list it and does
    not exclude it, but `dead_on` may name its class.
    """
    if not policy.dead_on and not policy.retry_on:
        return True
    for name in failure.lineage:
        if name in policy.dead_on:
            return False
        if name in policy.retry_on:
            return True
    return not policy.retry_on or failure.timed_out
