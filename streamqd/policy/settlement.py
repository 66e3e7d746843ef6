"""What becomes of a message. The only place that knows when a message dies.

Three counts never mix: failed runs (`attempt`), runs that killed their process (`crashes`), and
releases (a drain, a rebalance), which are not seen here because they cost nothing. Limits count
runs: with `max_attempts` 5 the fifth failure is the last; 0 means that there is no limit.
"""

from __future__ import annotations

from streamqd.model import (
    Ack,
    DeadAsked,
    DeadVerdict,
    Failed,
    Leave,
    Outcome,
    ReleaseAsked,
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
) -> Verdict:
    """The verdict on a message whose `attempt`-th run (from 1) ended with `outcome`.

    `crashes` counts the runs charged to it, `age` is the time in seconds since its first write,
    `jitter` a number from 0 to 1 that the caller draws.

    1. What succeeded is done, what asked to be dead is dead, what was released stays as it is.
    2. A failure is dead at once when the policy does not retry its class. A handler that raises
       Retry has decided that itself.
    3. Anything else is dead when a limit is reached: attempts, then crashes, then age.
    4. The rest is tried again, after what Retry asked for, else after the policy's backoff.
    """
    match outcome:
        case Succeeded():
            return Ack()
        case DeadAsked():
            return DeadVerdict(outcome.reason)
        case ReleaseAsked():
            return Leave()
        case Failed():
            if not _retried(outcome, policy):
                return DeadVerdict("not-retried")
            after = None
        case RetryAsked():
            after = outcome.after
    if policy.max_attempts and attempt >= policy.max_attempts:
        return DeadVerdict("attempts")
    spent = before_run(crashes, policy)
    if spent is not None:
        return spent
    if policy.max_age is not None and age >= policy.max_age:
        return DeadVerdict("too-old")
    if after is None:
        return RetryVerdict(backoff.delay(policy.backoff, attempt, jitter))
    return RetryVerdict(max(after, 0.0))


def before_run(crashes: int, policy: RetryPolicy) -> DeadVerdict | None:
    """The verdict on a message that is about to run: dead when it killed too many processes."""
    if policy.max_crashes and crashes >= policy.max_crashes:
        return DeadVerdict("crashes")
    return None


def _retried(failure: Failed, policy: RetryPolicy) -> bool:
    """Whether the policy retries this class of failure. `dead_on` wins over `retry_on`.

    An overrun time limit is nothing that the handler raised: `retry_on` does not list it and does
    not exclude it, but `dead_on` may name its class.
    """
    if any(name in failure.lineage for name in policy.dead_on):
        return False
    if not policy.retry_on or failure.timed_out:
        return True
    return any(name in failure.lineage for name in policy.retry_on)
