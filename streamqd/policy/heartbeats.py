"""When an instance beats. Pure: `jitter` (0 to 1) is drawn again by the caller each time.

Each beat is followed by a look at every partition, so beats are what a fleet asks most of Redis.
At rest an instance beats a little more often than once per interval. A wake-up (somebody has
released a partition, an operator has ordered something) asks for a beat of every instance at once:
in a small fleet it comes at once, in a large one the beats are spread, and wake-ups that come
meanwhile ask for the same beat.
"""

from __future__ import annotations

# Beats because of wake-ups that a whole fleet makes per second at most.
WOKEN_PER_SECOND = 100.0


def next_beat(now: float, interval: float, jitter: float) -> float:
    """When to beat after a beat that was answered now."""
    return now + interval * (0.8 + 0.2 * jitter)


def woken_beat(last: float, interval: float, members: int, jitter: float) -> float:
    """When to beat at the earliest because of a wake-up, after the last beat."""
    return last + min(members / WOKEN_PER_SECOND * (0.5 + jitter), interval)
