"""Compute the times at which an instance sends heartbeats.

After each heartbeat, an instance reads every partition, so heartbeats cause most of a fleet's load
on Redis. Without wake-ups, an instance sends slightly more than one heartbeat per interval. A
wake-up, for example after a partition was released or an operator gave a directive, requests a
heartbeat from every instance. A small fleet sends these heartbeats immediately. A large fleet
spreads them over time, and each heartbeat then serves all wake-ups that arrived before it.

This module does no I/O. For each call, the caller passes a random number from 0 to 1 as `jitter`.
"""

from __future__ import annotations

# The approximate number of heartbeats per second that wake-ups may cause in the whole fleet.
WOKEN_PER_SECOND = 100.0


def next_heartbeat(now: float, interval: float, jitter: float) -> float:
    """Return the time of the next heartbeat if the last one was answered at `now`."""
    return now + interval * (0.8 + 0.2 * jitter)


def woken_heartbeat(last: float, interval: float, members: int, jitter: float) -> float:
    """Return the earliest time for a heartbeat after a wake-up.

    `last` is the time of the last heartbeat, and `members` the number of instances in the fleet.
    """
    return last + min(members / WOKEN_PER_SECOND * (0.5 + jitter), interval)
