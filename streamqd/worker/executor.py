"""Who runs what a worker has read or listed: the part that differs between its shapes.

`SerialExecutor` runs messages one after the other, `ConcurrentExecutor` several at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from streamqd.config import Consumer
from streamqd.errors import HandlerLoadError
from streamqd.message import Message
from streamqd.model import BLOCK, HOLD_KEY, REQUEUE
from streamqd.store.fetch import FetchResult
from streamqd.worker.batches import BatchRunner
from streamqd.worker.blocking import BlockedOrder
from streamqd.worker.concurrent import ConcurrentExecutor
from streamqd.worker.context import WorkerContext
from streamqd.worker.guards import Guards
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.hooks import Hooks
from streamqd.worker.lanes import Lanes, TaskRuns, ThreadRuns
from streamqd.worker.pending_entry import PendingEntry
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.runs import Runner
from streamqd.worker.serial import SerialExecutor, SerialRunner
from streamqd.worker.throttle import RateLimiter
from streamqd.worker.verdicts import Verdicts


class Executor(Protocol):
    """Takes entries, runs the handler for them in their order, and settles how that ended."""

    alone: bool  # nothing begins but what was added since

    @property
    def at_once(self) -> bool:
        """Whether what was added has run when `finish` returns, over the worker's connection."""

    # --- what comes ---

    def restart(self) -> None:
        """A list of what is pending comes: forget what has not begun."""

    def expect(self, places: list[bytes]) -> None:
        """Entries at these places are admitted next."""

    def admit(self, position: int, place: bytes) -> int:
        """Take the entry at `position` of those expected; return its index in the slot."""

    def add(self, index: int, entry: PendingEntry, message: Message) -> None:
        """Run an entry that was pending before, when its turn comes."""

    def finish(self) -> None:
        """No more comes for now."""

    def take(self, fetched: FetchResult) -> tuple[int, int]:
        """Take what was read. Returns its bytes, and the nanoseconds of work that it is."""

    # --- runs and their ends ---

    def start_ready(self) -> None:
        """Begin with what may begin."""

    def collect(self) -> None:
        """Note how the runs have ended that have ended."""

    def settle(self, *, read_follows: bool) -> None:
        """Settle what is due; a read that follows takes plain acknowledgements along."""

    def close(self) -> None:
        """Give up what it needs. Nothing runs any more."""

    # --- what the worker asks ---

    @property
    def bells(self) -> Sequence[int]:
        """Descriptors that are readable when a run has ended."""

    @property
    def running(self) -> int:
        """How many handlers run."""

    @property
    def waiting(self) -> int:
        """How many entries in hand have not begun."""

    @property
    def busy(self) -> bool:
        """Whether anything in hand runs, or has yet to."""

    @property
    def places(self) -> Iterable[bytes]:
        """The places of what stays in hand when the connection is lost."""

    @property
    def spent(self) -> bool:
        """Whether the worker has handled as many messages as it may."""

    @property
    def about_to_begin(self) -> int:
        """How many `start_ready` would begin now without any wait."""

    @property
    def settling_is_due(self) -> bool:
        """Whether a read, or a script, must go out now for what has ended."""

    @property
    def throttled(self) -> float:
        """Seconds for which the rate, or a circuit, holds what could begin."""

    @property
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""

    def wants(self, count: int) -> bool:
        """Whether fewer than `count` will be ready soon."""

    def is_full(self) -> bool:
        """Whether nothing more may come into hand."""

    def patience(self, seconds: float) -> float:
        """How much of a wait is over before something in hand could begin, or must be settled."""


def executor_for(
    context: WorkerContext,
    hooks: Hooks,
    verdicts: Verdicts,
    guards: Guards | None,
    throttle: RateLimiter | None,
    quarantine: Quarantine,
) -> Executor:
    """Make the executor that a consumer asks for."""
    consumer, slot = context.consumer, context.slot
    if consumer.lanes > 1:
        lanes: Lanes
        if hooks.loaded.form.asynchronous:
            assert hooks.loop is not None
            limited = consumer.timeout is not None
            lanes = TaskRuns(slot, hooks.loaded.function, hooks.loop, limited=limited)
        else:
            lanes = ThreadRuns(slot, hooks.loaded.function, consumer.lanes)
        return ConcurrentExecutor(context, lanes, verdicts, guards, throttle, quarantine)
    context.limit.interrupt = hooks.interrupt
    context.limit.listen()
    runner: SerialRunner
    if hooks.loaded.form.batch:
        runner = BatchRunner(context, hooks.function, verdicts, guards, throttle)
        return SerialExecutor(context, runner, verdicts, None)
    held = HeldKeys(context, quarantine) if consumer.on_error == HOLD_KEY else None
    blocked = BlockedOrder(context, quarantine) if consumer.on_error == BLOCK else None
    runner = Runner(context, hooks.function, verdicts, guards, throttle, held or blocked)
    return SerialExecutor(context, runner, verdicts, held)


def check_form(consumer: Consumer, hooks: Hooks) -> None:
    """Raise HandlerLoadError when a consumer asks for what its handler cannot do."""
    if not hooks.loaded.form.batch:
        return
    if consumer.lanes > 1:
        raise HandlerLoadError(
            f"{consumer.handler} takes batches, which are handled one at a time: remove "
            "concurrency, or write it for one message"
        )
    if consumer.on_error != REQUEUE:
        raise HandlerLoadError(
            f"{consumer.handler} takes batches, whose messages fail each by itself: remove "
            f'on_error = "{consumer.on_error}", or write it for one message'
        )
