"""The delay between a failure and its retry."""

from __future__ import annotations

from streamqd.model import Backoff

# 2.0 ** 1000 is still a float. Larger exponents would raise instead of reaching the cap.
_EXPONENT_MAX = 1000
_FACTOR_MAX = 10**15


def delay(policy: Backoff, attempt: int, jitter: float) -> float:
    """Return the seconds to wait after failure number `attempt` (from 1), at most `policy.max`.

    `jitter` is a number from 0 to 1 that the caller draws. With full jitter, the wait is that
    fraction of the delay, so that failures of the same moment do not all return together.
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
