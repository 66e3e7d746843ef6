"""What the supervisor does in a tick, as a value: the wishes of all its parts, merged into actions.

The parts (drain, rebalance, capacity, limits, rolling replacement) read the partitions and answer
with wishes; none of them acts. `merge` is the one place that decides between wishes for the same
partition, and the supervisor applies the result.

Precedence, the first one wins:

1. Kill: a process that must end now gets no other command.
2. Drain: stop the worker, release the partition.
3. Stop a worker whose lease is lost.
4. Hand over: another instance should own the partition, or no consumer wants it any more.
5. Dismiss a worker that is quiet: its successor gets a new token, and need not wait for its end.
6. Stop a worker for its replacement.
7. Start: adopt a standby, fork a worker, fork a standby.
8. Acquire.

A wish that lost is not remembered. Its part wants it again at the next tick, if it still does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from streamqd.isolate import Isolate, directly
from streamqd.model import Unit


class Acquire(NamedTuple):
    """Own a partition that was seen with this epoch; `dead_token` is that of a dead owner."""

    unit: Unit
    epoch: int
    dead_token: str = ""


class ReleaseLease(NamedTuple):
    """Give a partition back that no process works on."""

    unit: Unit
    reason: str  # drain | shed | unstartable | broken


class DismissWorker(NamedTuple):
    """Go on without a worker that is quiet: it ends beside the work, under a token of the past."""

    unit: Unit
    unexplained: bool = False  # why it has ended is not known: perhaps its group is gone


class ForkWorker(NamedTuple):
    """Start the process of an owned partition."""

    unit: Unit


class AdoptStandby(NamedTuple):
    """Let the warm standby of an owned partition work."""

    unit: Unit


class ForkStandby(NamedTuple):
    """Start a process that boots beside the worker, to follow it."""

    unit: Unit


class StopWorker(NamedTuple):
    """Tell a worker to finish its current message and leave."""

    unit: Unit
    reason: str  # drain | shed | lost | reload | recycle


class KillWorker(NamedTuple):
    """Kill a worker; of a hard limit, because of the run `run_seq`."""

    unit: Unit
    reason: str  # hard-limit | boot | stalled | on_stop | deadline | quit
    run_seq: int | None = None


class KillStandby(NamedTuple):
    """Kill a standby that takes too long to boot."""

    unit: Unit


class DismissStandby(NamedTuple):
    """Let a standby end that is not needed."""

    unit: Unit


class InterruptRun(NamedTuple):
    """Interrupt the run `run_seq` and those that began before it: the soft limit is over."""

    unit: Unit
    run_seq: int


class PauseWorker(NamedTuple):
    """Tell a worker to pause, or to go on."""

    unit: Unit
    paused: bool


class WakeWorker(NamedTuple):
    """Wake a worker that waits for messages: the housekeeper wants something of it."""

    unit: Unit
    wanted: tuple[int, int]  # what, so that it is woken once


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
_RANK_OF_REASON = MappingProxyType({"drain": _DRAIN, "lost": _LOST, "shed": _HAND_OVER})
# These need no arbitration and may accompany any action on the worker.
_BESIDE = (DismissStandby, KillStandby, InterruptRun, PauseWorker, WakeWorker)


def merge(wishes: Iterable[Action], isolate: Isolate[Unit] = directly) -> list[Action]:
    """Return the actions of a tick: of each partition the wish that comes first, see above.

    A standby that should end is not adopted; the next tick forks a worker instead.

    They are in the order of precedence, so only Acquire comes after the forks: what the
    supervisor does between two forks costs each child a copy of the pages on which that is done.
    """
    beside: list[Action] = []
    chosen: dict[Unit, tuple[int, Action]] = {}
    for wish in wishes:
        if isinstance(wish, _BESIDE):
            beside.append(wish)
            continue
        rank = isolate(wish.unit, _rank, wish)
        if rank is None:
            continue
        before = chosen.get(wish.unit)
        if before is None or rank < before[0]:
            chosen[wish.unit] = rank, wish
    ordered = sorted(chosen.values(), key=lambda each: each[0])
    ending = {wish.unit for wish in beside if isinstance(wish, DismissStandby | KillStandby)}
    return [
        *beside,
        *(
            wish
            for _, wish in ordered
            if not (isinstance(wish, AdoptStandby) and wish.unit in ending)
        ),
    ]


def _rank(wish: Action) -> int:
    if isinstance(wish, StopWorker | ReleaseLease):
        return _RANK_OF_REASON.get(wish.reason, _RANK[type(wish)])
    return _RANK[type(wish)]
