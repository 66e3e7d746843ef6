"""Batches: the handler is called for many messages at once, and each of them is settled by itself.

While it runs, all of its entries are RUNNING: a process that dies in it has as many suspects. None
is charged; the next process runs each of them alone, as it does what has been charged before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamqd import handlers, logs
from streamqd.config import Consumer
from streamqd.message import Delivery, Message, remembered, restored
from streamqd.scoreboard import (
    DONE,
    FAILED,
    RUNNING,
    WORD_RUN_SEQ,
    WORD_TRUSTED_UNTIL,
    WorkerSlot,
    now_ns,
)
from streamqd.worker.control_channel import ControlChannel, ExitCode, Stop
from streamqd.worker.runs import Runner
from streamqd.worker.settler import Settler
from streamqd.worker.throttle import RateLimiter

BATCH = 100  # messages at once, where the consumer does not say


@dataclass(frozen=True, slots=True)
class Taken:
    """A message that waits for its batch to be full."""

    index: int
    message: Message
    retried: bool
    crashes: int
    charged: bool  # it has counters in Redis
    noted: dict[str, Any] | None  # as `restored` takes it


class BatchRunner(Runner):
    """Collects messages, and runs the handler when the batch is full or nothing more comes."""

    def __init__(
        self,
        consumer: Consumer,
        delivery: Delivery,
        slot: WorkerSlot,
        gate: ControlChannel,
        settler: Settler,
    ) -> None:
        super().__init__(consumer, delivery, slot, gate, settler)
        self._taken: list[Taken] = []
        self._size = consumer.batch or BATCH
        self.throttle = RateLimiter.of(consumer, slot, gate, settler, self._size)
        if self.throttle is not None:
            self._size = min(self._size, self.throttle.burst)
        self._size = min(self._size, consumer.max_messages or self._size)

    def handle(
        self, index: int, message: Message, retried: bool, crashes: int, charged: bool = False
    ) -> None:
        """Take the entry at `index` into the batch; run the handler when that fills it."""
        if message.expires_at is not None and self.pass_over(index, message, retried, crashes):
            return
        noted = remembered(message) if message.failures_in_place else None
        charged = charged or crashes > 0
        self._taken.append(Taken(index, message, retried, crashes, charged, noted))
        alone = self.guards is not None and self.guards.probing
        if alone or len(self._taken) >= self._size:
            self.finish()

    def begin(self) -> None:
        """Forget what was collected of an earlier read."""
        super().begin()
        self._taken = []

    def finish(self) -> None:
        """Run the handler for what was collected."""
        batch, self._taken = self._taken, []
        if not batch:
            return
        now = now_ns()
        if self.settler.items or self.settler.since_ns:
            now = self._settle_first(now)
        if now > self.slot.words[WORD_TRUSTED_UNTIL]:
            # Looked at last: what comes before may take as long as Redis lets it.
            now = self.gate.await_trust()
        if self.throttle is not None:
            now = self.throttle.heed(now, len(batch))
        # What is settled is named by what is known before the run.
        ids = [taken.message.id_bytes for taken in batch]
        errors = self._run(batch, now)
        self._note(batch, ids, errors)
        if self.guards is not None:
            self.guards.heed(more=self.slot.unfinished > 0)
        limit = self.consumer.max_messages
        if limit and self.handled >= limit:
            raise Stop(ExitCode.RECYCLE)
        if limit:
            self._size = min(self._size, limit - self.handled)

    def _run(self, batch: list[Taken], now: int) -> list[BaseException | None]:
        """Call the handler. Returns what is wrong with each message, None for those done."""
        states, words, lanes = self.slot.states, self.slot.words, self.slot.lanes
        lanes[0], lanes[1] = batch[0].index, now
        words[WORD_RUN_SEQ] += 1
        for taken in batch:
            states[taken.index] = RUNNING
        messages = [taken.message for taken in batch]
        logs.current.message = messages[0] if len(messages) == 1 else logs.Several(messages)
        end: object = None
        try:
            self._in_handler = True
            try:
                end = self.function(list(messages))
            finally:
                self._in_handler = False
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything
            end = raised
        logs.current.message = None
        errors = self._judge(errors_of, end, messages)
        if isinstance(errors, BaseException):
            errors = [errors] * len(batch)
        for taken, error in zip(batch, errors, strict=True):
            # One that has failed is RUNNING again while its own verdict is found: each for itself.
            states[taken.index] = DONE if error is None else FAILED
        elapsed = now_ns() - now
        self._note_time(elapsed, len(batch))
        return errors

    def _note(
        self, batch: list[Taken], ids: list[bytes], errors: list[BaseException | None]
    ) -> None:
        ended = now_ns()
        for taken, entry_id, error in zip(batch, ids, errors, strict=True):
            index, retried = taken.index, taken.retried
            self.handled += 1
            if error is None:
                self.settler.ack(
                    entry_id, retried=retried, index=index, charged=taken.charged, now=ended
                )
            else:
                self.slot.states[index] = RUNNING
                message = restored(taken.message, entry_id, retried=retried, noted=taken.noted)
                self._failed(index, message, retried, taken.crashes + message.crash_count, error)


def errors_of(end: object, batch: list[Message]) -> list[BaseException | None]:
    """Return what the end of a batch means for each of its messages, None for those done.

    Whoever names a message that is not of the batch has mixed something up: then none is done.
    """
    error = handlers.error_of(end)
    if not isinstance(error, handlers.Failures):
        return [error] * len(batch)
    failed = getattr(error, "failed", None)  # a subclass may never have called our __init__
    if not isinstance(failed, dict):
        return [error] * len(batch)
    if not set(failed) <= set(batch):
        return [ValueError("Failures names a message that is not of this batch")] * len(batch)
    errors = [failed.get(message) for message in batch]
    return [None if each is None else handlers.error_of(each) for each in errors]
