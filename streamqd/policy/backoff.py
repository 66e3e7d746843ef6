"""Compute the delay between a failure and its retry."""

from __future__ import annotations

from streamqd.model import Backoff

# 2.0 ** 1000 is still a valid float. Larger exponents would raise an error before the delay is
# limited to `policy.max`.
_EXPONENT_MAX = 1000
_FACTOR_MAX = 10**15


def delay(policy: Backoff, attempt: int, jitter: float) -> float:
    """Return the seconds to wait after failure number `attempt`, counted from 1.

    The result is never more than `policy.max`. `jitter` is a random number from 0 to 1. If the
    policy uses full jitter, the wait is this fraction of the delay, so that messages that failed at
    the same time are not all retried at the same time.
    """
    failures = max(attempt, 1)
    match policy.kind:
        case "fixed":
            wait = policy.base
        case "linear":
            wait = policy.base * min(failures, _FACTOR_MAX)
        case "exponential":
            wait = policy.base * 2.0 ** min(failures - 1, _EXPONENT_MAX)
        case _:
            raise ValueError(f"unknown kind of backoff: {policy.kind}")
    wait = min(wait, policy.max)
    return wait * min(max(jitter, 0.0), 1.0) if policy.jitter == "full" else wait
