"""Which runner a consumer needs, of those that handle one message or one batch at a time."""

from __future__ import annotations

from streamqd.config import Consumer
from streamqd.errors import HandlerLoadError
from streamqd.handlers import Signature
from streamqd.model import BLOCK, HOLD_KEY, REQUEUE
from streamqd.worker.batches import BatchRunner
from streamqd.worker.blocking import BlockingRunner
from streamqd.worker.holding import HoldingRunner
from streamqd.worker.runs import Runner

_SINGLE = {REQUEUE: Runner, BLOCK: BlockingRunner, HOLD_KEY: HoldingRunner}


def runner_class(consumer: Consumer, form: Signature) -> type[Runner]:
    """Return the class of the runner. Raises HandlerLoadError when there is none."""
    if not form.batch:
        return _SINGLE[consumer.on_error]
    if consumer.on_error != REQUEUE:
        raise HandlerLoadError(
            f"{consumer.handler} takes batches, whose messages fail each by itself: remove "
            f'on_error = "{consumer.on_error}", or write it for one message'
        )
    return BatchRunner
