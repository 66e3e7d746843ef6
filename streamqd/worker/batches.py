"""Batches: the handler is called for many messages at once, and each of them is settled by itself.

While it runs, all of its entries are RUNNING: a process that dies in it has as many suspects. None
is charged; the next process runs them in smaller batches (`policy/rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from streamqd import handlers, logs
from streamqd.config import Consumer
from streamqd.message import Message, restored
from streamqd.scoreboard import DONE, FAILED, RUNNING, WORD_RUN_SEQ, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.gates import Gates
from streamqd.worker.runs import RunPace
from streamqd.worker.verdicts import Verdicts

BATCH = 100  # messages at once, where the consumer does not say


def batch_size(consumer: Consumer) -> int:
    """Return how many messages a call of the handler takes at most."""
    return consumer.batch or BATCH


class BatchRunner:
    """Collects messages, and runs the handler when the batch is full or nothing more comes."""

    def __init__(
        self,
        context: WorkerContext,
        function: Callable[..., object],
        verdicts: Verdicts,
        gates: Gates,
        size: int,
    ) -> None:
        """`size`: how many messages a call takes at most, by `batch_size` and the rate."""
        self._context = context
        self._function = function
        self._verdicts = verdicts
        self._gates = gates
        self._pace = RunPace(context)
        self._last_run_ns = 0
        self._taken: list[FetchedEntry] = []
        self._size = min(size, context.consumer.max_messages or size)

    def handle(self, entry: FetchedEntry) -> None:
        """Take an entry into the batch; run the handler when that fills it."""
        if entry.message.expires_at is not None and self._verdicts.skip_expired(entry):
            return
        self._taken.append(entry)
        if self._gates.one_by_one or len(self._taken) >= self._size:
            self.run_collected()

    def run_many(self, _messages: list[Message], _start: int, _first: int, _retried: bool) -> int:
        """Run none: each is collected."""
        return 0

    def drop_collected(self) -> None:
        """Forget what was collected. It stays pending."""
        self._taken = []

    def run_collected(self) -> None:
        """Run the handler for what was collected."""
        batch, self._taken = self._taken, []
        if not batch:
            return
        now, settler = now_ns(), self._context.settler
        if settler.items or settler.since_ns:
            now = self._pace.settle_first(now, self._last_run_ns)
        now = self._gates.await_turn(now, len(batch))
        self._note(batch, self._run(batch, now))
        limit, handled = self._context.consumer.max_messages, self._context.counts.handled
        if limit and handled >= limit:
            raise Stop(ExitCode.RECYCLE)
        if limit:
            self._size = min(self._size, limit - handled)

    def _run(self, batch: list[FetchedEntry], now: int) -> list[BaseException | None]:
        """Call the handler. Returns what is wrong with each message, None for those done."""
        slot, soft = self._context.slot, self._context.limit
        states, words, lanes = slot.states, slot.words, slot.lanes
        lanes[0], lanes[1] = batch[0].index, now
        words[WORD_RUN_SEQ] += 1
        for taken in batch:
            states[taken.index] = RUNNING
        messages = [taken.message for taken in batch]
        logs.current.message = messages[0] if len(messages) == 1 else logs.Several(messages)
        end: object = None
        try:
            soft.in_handler = True
            try:
                end = self._function(list(messages))
            finally:
                soft.in_handler = False
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything
            end = raised
        logs.current.message = None
        errors = soft.judge(errors_of, end, messages)
        if isinstance(errors, BaseException):
            errors = [errors] * len(batch)
        for taken, error in zip(batch, errors, strict=True):
            # One that has failed is RUNNING again while its own verdict is found: each for itself.
            states[taken.index] = DONE if error is None else FAILED
        self._last_run_ns = now_ns() - now
        self._context.counts.note_time(self._last_run_ns, len(batch))
        return errors

    def _note(self, batch: list[FetchedEntry], errors: list[BaseException | None]) -> None:
        ended, settler = now_ns(), self._context.settler
        for entry, error in zip(batch, errors, strict=True):
            # What is settled is named by what is known before the run.
            entry_id, retried = entry.place[2:], entry.retried
            self._context.counts.handled += 1
            if error is None:
                settler.ack(entry_id, entry.index, ended, retried, entry.has_counters)
            else:
                self._context.slot.states[entry.index] = RUNNING
                entry.message = restored(
                    entry.message, entry_id, retried=retried, noted=entry.noted
                )
                self._verdicts.failed(entry, error)


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
