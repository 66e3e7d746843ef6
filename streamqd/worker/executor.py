"""What the worker's loop asks of an executor, and which one a consumer needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from streamqd.config import Consumer
from streamqd.errors import HandlerLoadError
from streamqd.model import BLOCK, HOLD_KEY, REQUEUE
from streamqd.store.fetch import FetchResult
from streamqd.worker.batches import BatchRunner
from streamqd.worker.blocking import BlockedPartition
from streamqd.worker.concurrent import ConcurrentExecutor
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.gates import Gates
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.hooks import Hooks
from streamqd.worker.lanes import Lanes, TaskLanes, ThreadLanes
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.runs import SingleRunner
from streamqd.worker.serial import Runner, SerialExecutor
from streamqd.worker.verdicts import Verdicts


class Executor(Protocol):
    """Takes entries, runs the handler for them, and settles how that ended."""

    alone: bool  # while set, begin with nothing but what was added

    @property
    def inline(self) -> bool:
        """Whether handlers run inside these calls; else beside the loop."""

    @property
    def wake_fds(self) -> tuple[int, ...]:
        """Descriptors that are readable when a run has ended."""

    # --- entries that were pending before ---

    def restart(self) -> None:
        """A list of what is pending begins: drop what has not begun. It stays pending."""

    def expect(self, places: list[bytes]) -> None:
        """These entries come, one by one."""

    def admit(self, position: int, place: bytes) -> int:
        """Write the next of them into the slot. Returns its index there."""

    def add(self, entry: FetchedEntry) -> None:
        """Run one of them, or let it wait for its run."""

    def finish(self) -> None:
        """No more of them come: run what was only collected."""

    # --- entries that were read ---

    def take(self, fetched: FetchResult) -> tuple[int, int]:
        """Run them, or let them wait for their runs.

        Returns their bytes, and the nanoseconds that they took or will take, both about.
        """

    # --- at each turn of the loop ---

    def collect(self) -> None:
        """Note the verdicts on the runs that have ended."""

    def start_ready(self) -> None:
        """Begin with what can begin."""

    def settle(self, *, read_follows: bool) -> None:
        """Settle what is due. Acknowledgements alone may ride on a read that follows."""

    # --- what it has ---

    @property
    def busy(self) -> bool:
        """Whether any fetched entry runs, or has yet to."""

    @property
    def running(self) -> int:
        """How many handlers run."""

    @property
    def waiting(self) -> int:
        """How many fetched entries have not begun."""

    @property
    def places(self) -> Iterable[bytes]:
        """The places of what stays in hand when the connection is lost."""

    @property
    def settling_is_due(self) -> bool:
        """Whether something has waited for its settlement for long enough."""

    # --- how much more it takes, and when ---

    @property
    def about_to_begin(self) -> int:
        """How many `start_ready` would begin while a read is on its way, without I/O."""

    @property
    def throttled(self) -> float:
        """Seconds for which the rate, or a circuit, holds what could begin; 0 when nothing does."""

    @property
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""

    def wants(self, count: int) -> bool:
        """Whether more should come, where fewer than `count` are ready."""

    def is_full(self) -> bool:
        """Whether nothing more may come into hand."""

    def patience(self, seconds: float) -> float:
        """Shorten a wait to the moment when an entry could begin, or must be settled."""

    def close(self) -> None:
        """Give up what it needs. Nothing runs any more."""


def executor_for(
    context: WorkerContext,
    hooks: Hooks,
    verdicts: Verdicts,
    gates: Gates,
    quarantine: Quarantine,
    burst: int,
) -> Executor:
    """Make the executor that a consumer asks for. `burst` as of `BatchRunner`."""
    consumer, on_error = context.consumer, context.consumer.on_error
    held = HeldKeys(context, quarantine) if on_error == HOLD_KEY else None
    if consumer.lanes > 1:
        return ConcurrentExecutor(context, _lanes(context, hooks), verdicts, gates, held)
    context.limit.interrupt = hooks.interrupt
    context.limit.listen()
    runner: Runner
    if hooks.loaded.form.batch:
        runner = BatchRunner(context, hooks.function, verdicts, gates, burst)
    else:
        in_place = BlockedPartition(context, quarantine) if on_error == BLOCK else held
        runner = SingleRunner(context, hooks.function, verdicts, gates, in_place)
    return SerialExecutor(context, runner, verdicts, held)


def _lanes(context: WorkerContext, hooks: Hooks) -> Lanes:
    function, consumer = hooks.loaded.function, context.consumer
    if not hooks.loaded.form.asynchronous:
        return ThreadLanes(context.slot, function, consumer.lanes)
    assert hooks.loop is not None
    limited = consumer.timeout is not None
    return TaskLanes(context.slot, function, hooks.loop, limited=limited)


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
