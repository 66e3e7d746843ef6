"""Which executor a consumer needs: it runs what the worker has read or listed."""

from __future__ import annotations

from streamqd.config import Consumer
from streamqd.errors import HandlerLoadError
from streamqd.model import BLOCK, HOLD_KEY, REQUEUE
from streamqd.worker.batches import BatchRunner
from streamqd.worker.blocking import BlockedOrder
from streamqd.worker.concurrent import ConcurrentExecutor
from streamqd.worker.context import WorkerContext
from streamqd.worker.guards import Guards
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.hooks import Hooks
from streamqd.worker.lanes import TaskRuns, ThreadRuns
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.runs import Runner
from streamqd.worker.serial import SerialExecutor
from streamqd.worker.throttle import RateLimiter
from streamqd.worker.verdicts import Verdicts

# Both take entries, run the handler for them in their order, and settle how that ended. The loop of
# the worker asks both the same.
Executor = SerialExecutor | ConcurrentExecutor


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
        lanes: TaskRuns | ThreadRuns
        if hooks.loaded.form.asynchronous:
            assert hooks.loop is not None
            limited = consumer.timeout is not None
            lanes = TaskRuns(slot, hooks.loaded.function, hooks.loop, limited=limited)
        else:
            lanes = ThreadRuns(slot, hooks.loaded.function, consumer.lanes)
        return ConcurrentExecutor(context, lanes, verdicts, guards, throttle, quarantine)
    context.limit.interrupt = hooks.interrupt
    context.limit.listen()
    runner: Runner | BatchRunner
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
