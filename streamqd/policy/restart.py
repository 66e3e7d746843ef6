"""When a worker that died is started again: at once, later, or given up for a while.

Why processes die decides how much a death counts, its weight:

- A worker that was told to end, or whose lease was lost, did nothing wrong: 0.
- A crash at boot or between messages is the fault of the code or the host: 1.
- A crash while handling is most likely the fault of a message, which is dead after `max_crashes`
  of them: 1 / (max_crashes + 1). So one poison message never weighs as much as one crash at boot:
  it costs no wait and never opens the breaker, while code that crashes on every message does.

Weights add up over a streak of crashes. A streak ends with a sign of health: an ordered end of a
worker that was ready, a run of `healthy_after` seconds, or messages settled before a crash in a
handler. (Not before a crash between messages: background threads kill working workers too.)

Up to weight 1 a worker is restarted at once, so a lone crash, or a `kill -9` by hand, costs
nothing. Above, the waits grow by the backoff. At `crash_loop` the breaker opens: the lease is
released, and after the cooldown one try is made, whose crash opens it again at once.
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
    """What a worker was doing when it ended."""

    ORDERED = "ordered"  # told to end, recycled, fenced: not a crash
    BOOT = "boot"  # importing, starting hooks, or connecting
    IDLE = "idle"  # between messages, or while fetching or settling
    HANDLING = "handling"  # a message was running, or several; also killed for hard_timeout


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One end of a worker. `at` in seconds of the caller's monotonic clock.

    `lived` counts from when the worker was ready, and is 0 when it never was; `settled` is the
    number of messages that it settled.
    """

    at: float
    cause: ExitCause
    lived: float = 0.0
    settled: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the worker in `after` seconds; 0 means now."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The breaker is open: release the lease, try again at `until` (the caller's clock)."""

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
    """What to do with a worker whose ends so far are `exits`, oldest first.

    Keep the last `history_max` of them. `jitter` (0 to 1) is drawn by the caller once per exit.
    Durations in seconds. Ask again whenever; the answer counts down with `now`.
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
    # Weight 2 is the first wait; a fraction more does not lengthen it.
    wait = waiting.delay(backoff, math.ceil(weight) - 1, jitter)
    return Restart(max(0.0, ended + wait - now))


def streak_weight(exits: Sequence[WorkerExit], *, max_crashes: int, healthy_after: float) -> float:
    """Sum of the weights of the crashes since the last sign of health."""
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
        # This crash counts, but what was before it is over: the worker had been well since.
        if end.cause is not ExitCause.BOOT and end.lived >= healthy_after:
            break
        if end.cause is ExitCause.HANDLING and end.settled > 0:
            break
    # One division: a sum of fractions would miss the limit by rounding.
    return whole + handling / _handling_crashes(max_crashes)


def history_max(*, crash_loop: int, max_crashes: int) -> int:
    """How many exits have to be kept for the breaker to see a whole streak."""
    return min(_HISTORY_MAX, crash_loop * _handling_crashes(max_crashes) + 1)


def _handling_crashes(max_crashes: int) -> int:
    """Crashes while handling that weigh as much as one other crash."""
    return (max_crashes or _CRASHES_WITHOUT_LIMIT) + 1
