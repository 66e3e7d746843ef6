"""Run batches: one call of the handler gets many messages, each of which is settled separately.

While a batch is running, all its entries are RUNNING. If the process crashes, any entry may be
the cause, so all become suspects, and the crash is charged to none. The next process runs
them in smaller batches to find the cause (`policy/rounds.py`).
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

BATCH = 100  # number of messages in one call, unless the consumer sets `batch`


def batch_size(consumer: Consumer) -> int:
    """Return the maximum number of messages in one call of the handler."""
    return consumer.batch or BATCH


class BatchRunner:
    """Collects messages, and calls the handler when the batch is full or no message is left."""

    def __init__(
        self,
        context: WorkerContext,
        function: Callable[..., object],
        verdicts: Verdicts,
        gates: Gates,
        size: int,
    ) -> None:
        """Start with an empty batch.

        `size` is the largest number of messages in a batch. The caller has already lowered it to
        the number that the rate limit allows to start at a time.
        """
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
        """Return 0 without running any message, because `handle` must collect each message."""
        return 0

    def drop_collected(self) -> None:
        """Forget the collected entries. They stay pending in Redis."""
        self._taken = []

    def run_collected(self) -> None:
        """Call the handler for the collected entries, and record the result of each.

        Raises Stop if this process has handled `max_messages` messages after that.
        """
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
        """Call the handler. For each message, return its error, or None if it was handled."""
        slot, soft = self._context.slot, self._context.limit
        states, words, lanes = slot.states, slot.words, slot.lanes
        lanes[0], lanes[1] = batch[0].index, now
        words[WORD_RUN_SEQ] += 1
        for taken in batch:
            states[taken.index] = RUNNING
        self._context.counts.delays.note_all(batch, now)
        messages = [taken.message for taken in batch]
        logs.current.message = messages[0] if len(messages) == 1 else logs.LoggedBatch(messages)
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
        errors = soft.run_bounded(batch_errors, end, messages)
        if isinstance(errors, BaseException):
            errors = [errors] * len(batch)
        for taken, error in zip(batch, errors, strict=True):
            # No entry stays RUNNING. While the verdict on a failed entry is determined, that entry
            # alone becomes RUNNING again, so that a crash is charged to it.
            states[taken.index] = DONE if error is None else FAILED
        self._last_run_ns = now_ns() - now
        self._context.counts.note_time(self._last_run_ns, len(batch))
        return errors

    def _note(self, batch: list[FetchedEntry], errors: list[BaseException | None]) -> None:
        ended, settler = now_ns(), self._context.settler
        for entry, error in zip(batch, errors, strict=True):
            # Use the ID that was fetched, because the handler may have changed the message.
            entry_id = entry.id
            self._context.counts.handled += 1
            if error is None:
                settler.ack(entry_id, entry.index, ended, entry.retried, entry.has_counters)
            else:
                entry.restore()
                self._verdicts.settle_failure(entry, error)


def batch_errors(end: object, batch: list[Message]) -> list[BaseException | None]:
    """Return a list with the error of each message in a batch, or None if it was handled.

    `end` is the handler's return value or its exception. An exception applies to all messages,
    except for `Failures`, which names those that failed. If it names a message that is not in the
    batch, the whole batch fails.
    """
    error = handlers.run_error(end)
    if not isinstance(error, handlers.Failures):
        return [error] * len(batch)
    failed = getattr(error, "failed", None)  # unset if a subclass skipped `super().__init__()`
    if not isinstance(failed, dict):
        return [error] * len(batch)
    if not set(failed) <= set(batch):
        return [ValueError("Failures names a message that is not of this batch")] * len(batch)
    errors = [failed.get(message) for message in batch]
    return [None if each is None else handlers.run_error(each) for each in errors]
