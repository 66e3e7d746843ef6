"""Compute the times of heartbeats. No I/O: the caller draws `jitter` (0 to 1) for each call.

After each heartbeat, the instance reads every partition, so heartbeats cause most of a fleet's load
on Redis. Without wake-ups, an instance sends slightly more than one per interval. A wake-up, for
example after a released partition or a new directive, requests a heartbeat from every instance. A
small fleet sends them immediately. A large fleet spreads them over time, and one heartbeat then
serves all wake-ups that arrive before it.
"""

from __future__ import annotations

# Heartbeats per second that wake-ups may cause in a whole fleet.
WOKEN_PER_SECOND = 100.0


def next_heartbeat(now: float, interval: float, jitter: float) -> float:
    """Return the time of the next heartbeat. The last one was answered at `now`."""
    return now + interval * (0.8 + 0.2 * jitter)


def woken_heartbeat(last: float, interval: float, members: int, jitter: float) -> float:
    """Return the earliest time for a heartbeat after a wake-up. `last` is the last heartbeat."""
    return last + min(members / WOKEN_PER_SECOND * (0.5 + jitter), interval)
