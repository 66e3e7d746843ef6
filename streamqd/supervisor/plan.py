"""The actions that the supervisor can apply in a tick, and the choice between conflicting ones.

The parts of the supervisor (drain, rebalance, capacity, limits, rolling replacement) look at the
partitions and propose actions, but never act themselves. If they propose several actions for the
same partition, `merge` chooses one of them, and the supervisor applies the result.

Precedence, highest first:

1. Kill: a process that must exit now gets no other command.
2. Drain: stop the worker, or release the partition.
3. Stop a worker whose lease is lost.
4. Hand over: another instance should own the partition, or no consumer needs it now.
5. Dismiss a quiet worker, so that its successor gets a new token without waiting for its exit.
6. Stop a worker, because it is being replaced.
7. Start a process: adopt a standby, fork a worker, or fork a standby.
8. Acquire a partition.

The other actions are dropped. If a dropped action is still needed at the next tick, its part
proposes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment


class Acquire(NamedTuple):
    """Acquire a partition, unless its epoch in Redis has changed since it was read.

    `dead_token` is the token of an owner that has exited, or ''.
    """

    assignment: Assignment
    epoch: int
    dead_token: str = ""


class ReleaseLease(NamedTuple):
    """Release a partition that has no worker process."""

    assignment: Assignment
    reason: str  # drain | shed | unstartable | broken


class DismissWorker(NamedTuple):
    """Detach a quiet worker, which exits while its successor works under a new token."""

    assignment: Assignment
    unexplained: bool = False  # True if it was not asked to stop, so its group may be missing


class ForkWorker(NamedTuple):
    """Start the worker process of an owned partition."""

    assignment: Assignment


class AdoptStandby(NamedTuple):
    """Hand an owned partition to its warm standby."""

    assignment: Assignment


class ForkStandby(NamedTuple):
    """Start a process that boots next to the worker and will replace it."""

    assignment: Assignment


class StopWorker(NamedTuple):
    """Command a worker to finish its current message and exit."""

    assignment: Assignment
    reason: str  # drain | shed | lost | reload | recycle


class KillWorker(NamedTuple):
    """Kill a worker. `run_seq` is the number of the run that exceeded its hard limit, if any."""

    assignment: Assignment
    reason: str  # hard-limit | boot | stalled | on_stop | deadline | quit
    run_seq: int | None = None


class KillStandby(NamedTuple):
    """Kill a standby that takes too long to boot."""

    assignment: Assignment


class DismissStandby(NamedTuple):
    """Stop a standby that is no longer needed."""

    assignment: Assignment


class InterruptRun(NamedTuple):
    """Interrupt a run that has exceeded its soft limit, and all runs that started before it."""

    assignment: Assignment
    run_seq: int


class PauseWorker(NamedTuple):
    """Command a worker to pause or to resume."""

    assignment: Assignment
    paused: bool


class WakeWorker(NamedTuple):
    """Wake a worker that waits for messages, because the housekeeper has made a request."""

    assignment: Assignment
    wanted: tuple[int, int]  # identifies the request, so that the worker is woken only once for it


Action = (
    Acquire
    | ReleaseLease
    | DismissWorker
    | ForkWorker
    | AdoptStandby
    | ForkStandby
    | StopWorker
    | KillWorker
    | KillStandby
    | DismissStandby
    | InterruptRun
    | PauseWorker
    | WakeWorker
)

_KILL, _DRAIN, _LOST, _HAND_OVER, _DISMISS, _REPLACE, _START, _ACQUIRE = range(8)
_RANK: Mapping[type, int] = MappingProxyType(
    {
        KillWorker: _KILL,
        ReleaseLease: _HAND_OVER,
        DismissWorker: _DISMISS,
        StopWorker: _REPLACE,
        AdoptStandby: _START,
        ForkWorker: _START,
        ForkStandby: _START,
        Acquire: _ACQUIRE,
    }
)
_REASON_RANKS = MappingProxyType({"drain": _DRAIN, "lost": _LOST, "shed": _HAND_OVER})
# These actions are always applied, next to the action that is chosen for the same partition.
_UNORDERED = (DismissStandby, KillStandby, InterruptRun, PauseWorker, WakeWorker)


def merge(actions: Iterable[Action], isolate: Isolate[Assignment] = run_directly) -> list[Action]:
    """Return the actions to apply, with only the most important one for each partition.

    If a standby must exit, it is not adopted, and the next tick forks a worker instead.

    The result is in order of precedence, so that nothing but Acquire comes after the first fork.
    This saves memory, because any memory that the supervisor writes to between two forks is copied.
    """
    beside: list[Action] = []
    chosen: dict[Assignment, tuple[int, Action]] = {}
    for action in actions:
        if isinstance(action, _UNORDERED):
            beside.append(action)
            continue
        rank = isolate(action.assignment, _rank, action)
        if rank is None:
            continue
        before = chosen.get(action.assignment)
        if before is None or rank < before[0]:
            chosen[action.assignment] = rank, action
    ordered = sorted(chosen.values(), key=lambda each: each[0])
    ending = {
        action.assignment for action in beside if isinstance(action, DismissStandby | KillStandby)
    }
    return [
        *beside,
        *(
            action
            for _, action in ordered
            if not (isinstance(action, AdoptStandby) and action.assignment in ending)
        ),
    ]


def _rank(action: Action) -> int:
    if isinstance(action, StopWorker | ReleaseLease):
        return _REASON_RANKS.get(action.reason, _RANK[type(action)])
    return _RANK[type(action)]
