"""Decide when to restart a worker that exited: immediately, later, or after a cooldown.

Each exit has a weight, which depends on its cause:

- A worker that was stopped, or whose lease was lost, did nothing wrong: 0.
- A crash at boot or between messages is the fault of the code or the host: 1.
- A crash in a handler is most likely the fault of a message, which is dead-lettered after
  `max_crashes` crashes: 1 / (max_crashes + 1). So one poison message always weighs less than one
  crash at boot: it causes no wait and never opens the breaker. Code that crashes on every message
  does.

Weights add up over a streak of crashes. A sign of health resets the streak: a planned exit of a
worker that was ready, a run of `healthy_after` seconds, or messages settled before a crash in a
handler. (Not before a crash between messages: background threads can crash a working worker too.)

Up to weight 1 a worker is restarted immediately, so a lone crash, or a `kill -9` by hand, costs
nothing. Above 1, the waits grow by the backoff. At `crash_loop` the breaker opens: the lease is
released. After the cooldown one try is made, and its crash opens the breaker again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from streamqd.model import Backoff
from streamqd.policy import backoff as waiting

HEALTHY_AFTER = 30.0
# With max_crashes = 0 a poison message runs forever, so its crashes must count.
_CRASHES_WITHOUT_LIMIT = 3
_HISTORY_MAX = 10_000


class ExitCause(enum.Enum):
    """The activity of a worker when it exited."""

    ORDERED = "ordered"  # stopped, recycled or fenced: not a crash
    BOOT = "boot"  # importing, starting hooks, or connecting
    IDLE = "idle"  # between messages, or while fetching or settling
    HANDLING = "handling"  # running one or more messages, also if killed at hard_timeout


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One exit of a worker. `at` is in seconds on the caller's monotonic clock.

    `lived` counts from when the worker was ready, 0 if it never was. `settled` is the number of
    messages that it settled.
    """

    at: float
    cause: ExitCause
    lived: float = 0.0
    settled: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the worker in `after` seconds, 0 for now."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The breaker is open: release the lease, and try again at `until` (the caller's clock)."""

    until: float


def decide(
    exits: Sequence[WorkerExit],
    now: float,
    *,
    backoff: Backoff,
    crash_loop: int,
    cooldown: float,
    max_crashes: int,
    jitter: float,
    healthy_after: float = HEALTHY_AFTER,
) -> Restart | GiveUp:
    """Return the decision on a worker whose exits so far are `exits`, oldest first.

    Pass the last `history_max` exits. The caller draws `jitter` (0 to 1) once per exit. Durations
    are in seconds. The call may be repeated: the wait shrinks as `now` advances.
    """
    if not exits:
        return Restart(0.0)
    ended = exits[-1].at
    weight = streak_weight(exits, max_crashes=max_crashes, healthy_after=healthy_after)
    if weight >= crash_loop:
        until = ended + cooldown
        return GiveUp(until) if now < until else Restart(0.0)
    if weight <= 1.0:
        return Restart(0.0)
    # Weight 2 causes the first wait. A fraction more does not lengthen it.
    wait = waiting.delay(backoff, math.ceil(weight) - 1, jitter)
    return Restart(max(0.0, ended + wait - now))


def streak_weight(exits: Sequence[WorkerExit], *, max_crashes: int, healthy_after: float) -> float:
    """Return the sum of the weights of all crashes since the last sign of health."""
    whole = handling = 0
    for end in reversed(exits):
        if end.cause is ExitCause.ORDERED:
            if end.lived > 0:
                break
            continue
        if end.cause is ExitCause.HANDLING:
            handling += 1
        else:
            whole += 1
        # This crash counts, but earlier ones do not: the worker was healthy in between.
        if end.cause is not ExitCause.BOOT and end.lived >= healthy_after:
            break
        if end.cause is ExitCause.HANDLING and end.settled > 0:
            break
    # One division: a sum of fractions would miss the limit by rounding.
    return whole + handling / _handling_crashes(max_crashes)


def history_max(*, crash_loop: int, max_crashes: int) -> int:
    """Return the number of exits that the breaker needs for a whole streak."""
    return min(_HISTORY_MAX, crash_loop * _handling_crashes(max_crashes) + 1)


def _handling_crashes(max_crashes: int) -> int:
    """Return the number of crashes in a handler that weigh as much as one other crash."""
    return (max_crashes or _CRASHES_WITHOUT_LIMIT) + 1
