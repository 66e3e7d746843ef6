"""Batches: one call of the handler gets many messages, and each message is settled separately.

While a batch runs, all its entries are RUNNING. If the process dies, every entry is a suspect and
none is charged. The next process runs them in smaller batches (`policy/rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streamqd import handlers, logs
from streamqd.config import Consumer
from streamqd.message import Message
from streamqd.model import RawEntry
from streamqd.scoreboard import DONE, FAILED, RUNNING, WORD_RUN_SEQ, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.gates import Gates
from streamqd.worker.runs import RunPace
from streamqd.worker.verdicts import Verdicts

BATCH = 100  # messages in one call, unless the consumer sets `batch`


def batch_size(consumer: Consumer) -> int:
    """Return the maximum number of messages in one call of the handler."""
    return consumer.batch or BATCH


class BatchRunner:
    """Collects messages, and runs the handler when the batch is full or no message is left."""

    def __init__(
        self,
        context: WorkerContext,
        function: Callable[..., object],
        verdicts: Verdicts,
        gates: Gates,
        size: int,
    ) -> None:
        """Start empty. `size` is the largest batch that `batch_size` and the rate allow."""
        self._context = context
        self._function = function
        self._verdicts = verdicts
        self._gates = gates
        self._pace = RunPace(context)
        self._last_run_ns = 0
        self._taken: list[FetchedEntry] = []
        self._size = min(size, context.consumer.max_messages or size)

    def handle(self, entry: FetchedEntry) -> None:
        """Add an entry to the batch, and run the handler when the batch is full."""
        if entry.message.expires_at is not None and self._verdicts.skip_expired(entry):
            return
        self._taken.append(entry)
        if self._gates.one_by_one or len(self._taken) >= self._size:
            self.run_collected()

    def run_many(
        self,
        _messages: list[Message],
        _entries: Sequence[RawEntry],
        _start: int,
        _first: int,
        _retried: bool,
    ) -> int:
        """Run no message, because each one is collected. Return 0."""
        return 0

    def drop_collected(self) -> None:
        """Drop the collected entries. They stay pending."""
        self._taken = []

    def run_collected(self) -> None:
        """Run the handler for the collected entries."""
        batch, self._taken = self._taken, []
        if not batch:
            return
        now, settler = now_ns(), self._context.settler
        if settler.items or settler.since_ns:
            now = self._pace.settle_first(now, self._last_run_ns)
        now = self._gates.await_start(now, len(batch))
        self._note(batch, self._run(batch, now))
        limit, handled = self._context.consumer.max_messages, self._context.counts.handled
        if limit and handled >= limit:
            raise Stop(ExitCode.RECYCLE)
        if limit:
            self._size = min(self._size, limit - handled)

    def _run(self, batch: list[FetchedEntry], now: int) -> list[BaseException | None]:
        """Call the handler. Return the error of each message, or None for a handled message."""
        slot, soft = self._context.slot, self._context.limit
        states, words, lanes = slot.states, slot.words, slot.lanes
        lanes[0], lanes[1] = batch[0].index, now
        words[WORD_RUN_SEQ] += 1
        for taken in batch:
            states[taken.index] = RUNNING
        self._context.counts.delays.note_all(batch, now)
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
        errors = soft.run_bounded(errors_of, end, messages)
        if isinstance(errors, BaseException):
            errors = [errors] * len(batch)
        for taken, error in zip(batch, errors, strict=True):
            # While the verdict on a failed entry is found, that entry alone is RUNNING again.
            states[taken.index] = DONE if error is None else FAILED
        self._last_run_ns = now_ns() - now
        self._context.counts.note_time(self._last_run_ns, len(batch))
        return errors

    def _note(self, batch: list[FetchedEntry], errors: list[BaseException | None]) -> None:
        ended, settler = now_ns(), self._context.settler
        for entry, error in zip(batch, errors, strict=True):
            # The id comes from the fetch, because the handler may have changed the message.
            entry_id = entry.id
            self._context.counts.handled += 1
            if error is None:
                settler.ack(entry_id, entry.index, ended, entry.retried, entry.has_counters)
            else:
                entry.restore()
                self._verdicts.settle_failure(entry, error)


def errors_of(end: object, batch: list[Message]) -> list[BaseException | None]:
    """Return the error of each message of a batch from the result of its run, None if handled.

    If the handler names a message outside the batch, the whole batch fails.
    """
    error = handlers.error_of(end)
    if not isinstance(error, handlers.Failures):
        return [error] * len(batch)
    failed = getattr(error, "failed", None)  # a subclass may not have called `super().__init__()`
    if not isinstance(failed, dict):
        return [error] * len(batch)
    if not set(failed) <= set(batch):
        return [ValueError("Failures names a message that is not of this batch")] * len(batch)
    errors = [failed.get(message) for message in batch]
    return [None if each is None else handlers.error_of(each) for each in errors]
