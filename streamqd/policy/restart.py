"""Decide whether an exited worker is restarted immediately, later, or after a cooldown.

Each exit has a weight, which depends on its cause:

- If a worker was stopped or its lease was lost, the worker did nothing wrong. The weight is 0.
- A crash at boot or between messages is the fault of the code or the host. The weight is 1.
- A crash in a handler is most likely the fault of a message, which is dead-lettered after
  `max_crashes` crashes. The weight is 1 / (max_crashes + 1). All crashes of one poison message
  together therefore weigh less than one crash at boot, so they cause no wait and never open the
  breaker. If the code crashes on every message, the weights add up, and the breaker opens.

Weights add up over a streak of crashes, until a sign of health resets the streak. There are three
such signs: a planned exit of a worker that was ready, a run of `healthy_after` seconds, and a crash
in a handler after the worker had settled messages. Messages that were settled before a crash
between messages are no sign of health, because background threads can crash a working worker too.

Up to a total weight of 1, a worker is restarted immediately, so a single crash or a manual
`kill -9` causes no delay. Above 1, the wait grows with the backoff. At a total weight of
`crash_loop`, the breaker opens, and the instance releases the lease. After the cooldown, the worker
is started once. If it crashes, the breaker opens again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from streamqd.model import Backoff
from streamqd.policy import backoff as waiting

HEALTHY_AFTER = 30.0
# With max_crashes = 0, a poison message is never dead-lettered, so its crashes must count here.
_CRASHES_WITHOUT_LIMIT = 3
_HISTORY_MAX = 10_000


class ExitCause(enum.Enum):
    """The activity of a worker at the time of its exit."""

    ORDERED = "ordered"  # the worker was stopped, recycled or fenced, so it did not crash
    BOOT = "boot"  # it was importing code, running start hooks, or connecting
    IDLE = "idle"  # it was between messages, or was fetching or settling
    HANDLING = "handling"  # it was running messages, which includes a kill at hard_timeout


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One exit of a worker.

    `at` is the time of the exit in seconds, on the caller's monotonic clock. `lived` is the number
    of seconds since the worker was ready, or 0 if it never was. `settled` is the number of messages
    that it had settled.
    """

    at: float
    cause: ExitCause
    lived: float = 0.0
    settled: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """The decision to start the worker in `after` seconds, or immediately if `after` is 0."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The decision to release the lease, because the breaker is open.

    The next attempt is due at `until`, on the caller's clock.
    """

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
    """Decide when to restart a worker.

    `exits` holds the last `history_max` exits of the worker, oldest first. `jitter` is a random
    number from 0 to 1, which the caller draws once for each exit. All durations are in seconds. The
    caller may repeat the call with a later `now`, and then gets the rest of the wait.
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
    # Up to weight 2, the first step of the backoff applies, and up to weight 3 the second one.
    wait = waiting.delay(backoff, math.ceil(weight) - 1, jitter)
    return Restart(max(0.0, ended + wait - now))


def streak_weight(exits: Sequence[WorkerExit], *, max_crashes: int, healthy_after: float) -> float:
    """Return the total weight of all crashes since the last sign of health."""
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
        # This crash counts, but earlier ones do not, because the worker was healthy in between.
        if end.cause is not ExitCause.BOOT and end.lived >= healthy_after:
            break
        if end.cause is ExitCause.HANDLING and end.settled > 0:
            break
    # Divide only once, because a sum of rounded fractions could miss the limit.
    return whole + handling / _handling_crashes(max_crashes)


def history_max(*, crash_loop: int, max_crashes: int) -> int:
    """Return the number of exits that must be kept, so that a streak can open the breaker."""
    return min(_HISTORY_MAX, crash_loop * _handling_crashes(max_crashes) + 1)


def _handling_crashes(max_crashes: int) -> int:
    """Return the number of crashes in a handler that weigh as much as one other crash."""
    return (max_crashes or _CRASHES_WITHOUT_LIMIT) + 1
