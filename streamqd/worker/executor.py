"""The interface between the worker's loop and its executor, and the choice of an executor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from streamqd import handlers
from streamqd.config import Consumer
from streamqd.errors import HandlerLoadError
from streamqd.model import BLOCK, HOLD_KEY, REQUEUE
from streamqd.store.fetch import FetchResult
from streamqd.worker.batches import BatchRunner
from streamqd.worker.blocking import BlockedPartition
from streamqd.worker.concurrent import ConcurrentExecutor
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry, InFlight
from streamqd.worker.gates import Gates
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.hooks import Hooks
from streamqd.worker.lanes import Lanes, TaskLanes, ThreadLanes
from streamqd.worker.ordering import ORDERINGS
from streamqd.worker.prefetch import PrefetchController
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.runs import SingleRunner
from streamqd.worker.serial import Runner, SerialExecutor
from streamqd.worker.verdicts import Verdicts


class Executor(Protocol):
    """Holds the fetched entries and runs the handler for them.

    It passes handled entries to the settler, and failed ones to the verdicts. Only the main thread
    may call the methods.
    """

    @property
    def wake_fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when a run has finished."""

    # --- intake ---

    def admit(self, listed: list[FetchedEntry], read: FetchResult | None = None) -> None:
        """Accept entries to run.

        `listed` holds entries that were already pending, and `read` is the result of a read, which
        contains new entries.
        """

    def drop_unstarted(self) -> None:
        """Drop the entries that have not started.

        They stay pending in Redis, and the worker finds them when it lists its pending entries.
        """

    # --- running ---

    def start(self, *, held: bool = True) -> None:
        """Start the entries that can start now.

        If `held` is true, this includes entries of held keys that are due.
        """

    def collect_finished(self) -> None:
        """Collect the runs that have finished since the last call, and determine their verdicts."""

    # --- entries in flight, and room for more ---

    @property
    def in_flight(self) -> InFlight:
        """The number of running, waiting and startable entries."""

    @property
    def places(self) -> Collection[bytes]:
        """The places of the entries that the executor keeps after a lost connection."""

    def room(self, ready: int | None = None) -> int:
        """Return how many more entries may be fetched from each stream, or 0 for none.

        If `ready` is given, also return 0 while that many entries are ready to start, or while slow
        runs occupy all lanes.
        """

    def next_due(self, now: int, *, held: bool = True) -> int | None:
        """Return the time (`now_ns`) at which to try to start another entry.

        Return None if no entry can start before an event, such as the end of a run. If `held` is
        false, held entries are ignored.
        """

    def close(self) -> None:
        """Release the executor's resources.

        No handler may be running, unless the process exits because of an unexpected error.
        """


def executor_for(
    context: WorkerContext,
    hooks: Hooks,
    verdicts: Verdicts,
    gates: Gates,
    quarantine: Quarantine,
    prefetch: PrefetchController,
) -> Executor:
    """Create the executor that the consumer's settings and its handler require."""
    consumer, on_error = context.consumer, context.consumer.on_error
    held = HeldKeys(context, quarantine) if on_error == HOLD_KEY else None
    if consumer.lanes > 1:
        lanes = _lanes(context, hooks)
        ordering = ORDERINGS[consumer.order]()
        return ConcurrentExecutor(context, lanes, ordering, verdicts, gates, held, prefetch)
    context.limit.interrupt = hooks.interrupt
    context.limit.listen()
    runner: Runner
    if hooks.loaded.signature.batch:
        runner = BatchRunner(context, hooks.function, verdicts, gates, quarantine.width)
    else:
        in_place = BlockedPartition(context, quarantine) if on_error == BLOCK else held
        runner = SingleRunner(context, hooks.function, verdicts, gates, in_place)
    return SerialExecutor(context, runner, verdicts, held, prefetch)


def _lanes(context: WorkerContext, hooks: Hooks) -> Lanes:
    function, consumer = hooks.loaded.function, context.consumer
    if not hooks.loaded.signature.asynchronous:
        return ThreadLanes(context.slot, function, consumer.lanes)
    assert hooks.loop is not None
    limited = consumer.timeout is not None
    return TaskLanes(context.slot, function, hooks.loop, limited=limited)


def check_signature(consumer: Consumer, hooks: Hooks) -> None:
    """Raise HandlerLoadError if the kind of handler does not support the consumer's settings."""
    form = hooks.loaded.signature
    if clause := handlers.too_many_threads(consumer.lanes, asynchronous=form.asynchronous):
        raise HandlerLoadError(f"{consumer.handler} {clause}")
    if not form.batch:
        return
    if consumer.lanes > 1:
        raise HandlerLoadError(
            f"{consumer.handler} is a batch handler, and batches run one at a time; remove"
            " concurrency, or change the handler to take one message"
        )
    if consumer.on_error != REQUEUE:
        raise HandlerLoadError(
            f"{consumer.handler} is a batch handler, whose messages fail separately; remove "
            f'on_error = "{consumer.on_error}", or write the handler for single messages'
        )
