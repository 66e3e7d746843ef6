"""One run: the handler is called for one message, and its end becomes a verdict.

The state byte of the entry is RUNNING before anything of the message is decoded. A handler that
returns ends the run; one that fails does not, for the words of its error are the user's code too:
the byte stays RUNNING until the verdict is written down. It decides who is to blame for a crash,
and what the time limits count.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from time import CLOCK_BOOTTIME, clock_gettime_ns
from typing import Any

from streamqd import handlers, logs
from streamqd.config import Consumer
from streamqd.message import Delivery, Entry, Message, of_read, remembered, restored
from streamqd.model import EACH
from streamqd.scoreboard import (
    BUCKETS,
    DONE,
    RUNNING,
    WORD_COMMAND,
    WORD_RUN_SEQ,
    WORD_TRUSTED_UNTIL,
    WorkerSlot,
    now_ns,
)
from streamqd.worker.control_channel import ControlChannel, ExitCode, Stop
from streamqd.worker.settler import Settler
from streamqd.worker.throttle import RateLimiter
from streamqd.worker.verdicts import Verdicts

ACK_DELAY_NS = 20_000_000  # no run begins while the end of another is older and not settled
ACK_SHARE = 20  # an end waits for nothing when settling takes less than such a part of its run
RELEASE_SECONDS = 1.0  # between a handler's Release and the next look at what is pending
QUICK_RUN_NS = 2_000_000  # after a run shorter than this its end may wait for the next one


class Runner(Verdicts):
    """Runs the handler, one message at a time, and keeps the counters of its unit."""

    def __init__(
        self,
        consumer: Consumer,
        delivery: Delivery,
        slot: WorkerSlot,
        gate: ControlChannel,
        settler: Settler,
    ) -> None:
        super().__init__(consumer, delivery, slot, gate, settler)
        self.function: Callable[..., object] = _not_loaded
        # How a run is interrupted that does not run in the main thread.
        self.interrupt: Callable[[BaseException], None] | None = None
        self.throttle = RateLimiter.of(consumer, slot, gate, settler)
        self.handled = 0
        self._last_run_ns = 0
        self._settling_ns = QUICK_RUN_NS // ACK_SHARE  # what settling took last
        self.ack_each = consumer.ack == EACH
        self._times = [0] * 64  # runs since `publish`, by the bits of their microseconds
        self._times_ns = 0  # and all of them together

    def handle(
        self, index: int, message: Message, retried: bool, crashes: int, charged: bool = False
    ) -> None:
        """Run the handler for the entry at `index` of the batch, and note the verdict.

        `crashes` are those charged to the entry itself, on top of what its fields carry; `charged`
        tells that it has other counters in Redis.
        """
        if message.expires_at is None or not self.pass_over(index, message, retried, crashes):
            kept = message.failures_in_place or self.guards is not None
            noted = remembered(message) if kept else None
            self._run_each((message,), index, retried, crashes, charged or crashes > 0, noted)

    def handle_read(self, entries: list[Entry], first: int, retried: bool, received: int) -> None:
        """Handle what a read of `received` bytes has brought, the entries of one stream.

        They are at `first` of the batch and after it. Obeys the supervisor before each.
        """
        self.settler.read = self.slot.generation
        messages, may_expire = of_read(self.delivery, entries, retried)
        words, giants = self.slot.words, received > self.bytes_max  # giants: there may be some
        if type(self).handle is Runner.handle and not giants and not may_expire:
            self._run_each(messages, first, retried)
            return
        for index, message in enumerate(messages, first):
            if words[WORD_COMMAND]:
                self.gate.check(self.slot.unfinished)
            if not giants or not self.bury_giant(index, message, retried, 0):
                self.handle(index, message, retried, 0)

    def _run_each(
        self,
        messages: Sequence[Message],
        first: int,
        retried: bool,
        crashes: int = 0,
        charged: bool = False,
        noted: dict[str, Any] | None = None,
    ) -> None:
        """Run the handler for messages whose entries are at `first` of the batch and after it.

        The hot path: what does not change from one message to the next is looked up once.
        """
        slot, settler, function, current = self.slot, self.settler, self.function, logs.current
        words, states, lanes, times = slot.words, slot.states, slot.lanes, self._times
        limit, throttled = self.consumer.max_messages, self.throttle is not None
        quick_ns = -1 if self.ack_each else QUICK_RUN_NS
        sequence, elapsed = words[WORD_RUN_SEQ], self._last_run_ns
        for index, message in enumerate(messages, first):
            if words[WORD_COMMAND] and index > first:
                self.gate.check(slot.unfinished)
            now = clock_gettime_ns(CLOCK_BOOTTIME)
            if settler.since_ns and (elapsed > quick_ns or now - settler.since_ns > ACK_DELAY_NS):
                now = self._settle_first(now)
            if throttled or now > words[WORD_TRUSTED_UNTIL]:
                now = self._await_turn(now)
            lanes[1] = now
            words[WORD_RUN_SEQ] = sequence = sequence + 1
            states[index] = RUNNING
            current.message, entry_id = message, message.id_bytes
            end: object = None  # what it returned, or raised
            try:
                self._in_handler = True
                try:
                    end = function(message)
                finally:
                    self._in_handler = False
            except BaseException as raised:  # noqa: BLE001 - user code may raise anything
                end = raised
            if end is None:
                states[index] = DONE
            ended = clock_gettime_ns(CLOCK_BOOTTIME)
            current.message = None
            self._last_run_ns = elapsed = ended - now
            times[(elapsed >> 10).bit_length()] += 1
            self._times_ns += elapsed
            self.handled += 1
            if end is None:
                settler.ack(entry_id, index, ended, retried, charged)
            elif (error := self._error_of(end)) is None:
                states[index] = DONE
                settler.ack(entry_id, index, ended, retried, charged)
            else:
                message = restored(message, entry_id, retried=retried, noted=noted)
                self._failed(index, message, retried, crashes + message.crash_count, error)
                if self.guards is not None:
                    self.guards.heed(more=slot.unfinished > 0)
            if self.handled == limit:
                raise Stop(ExitCode.RECYCLE)

    def _settle_first(self, now: int) -> int:
        """Settle what has failed, and what is due, before the next run: that may take hours."""
        waited = now - self.settler.since_ns
        due = self.ack_each or is_due(self._last_run_ns, waited, self._settling_ns)
        if self.settler.items or due:
            self.settler.flush()
            settled = now_ns()
            self._settling_ns = settled - now
            return settled
        return now

    def _await_turn(self, now: int) -> int:
        """Wait until the lease is sure and the rate allows a run; return that instant."""
        if now > self.slot.words[WORD_TRUSTED_UNTIL]:
            # Looked at last: what comes before may take as long as Redis lets it.
            now = self.gate.await_trust()
        return now if self.throttle is None else self.throttle.heed(now)

    def begin(self) -> None:
        """Entries of a new read are in hand; those of the one before are forgotten."""
        if self.guards is not None:
            self.guards.heed()

    def finish(self) -> None:
        """Handle what `handle` has only collected: nothing, where it handles at once."""

    def publish(self) -> None:
        """Add the run times since the last call to the unit's histogram."""
        if self.guards is not None:
            self.guards.look()
        shared, longest = self.slot.handle_histogram, len(BUCKETS)
        for bits, count in enumerate(self._times):
            if count:
                shared[min(bits, longest)] += count
                self._times[bits] = 0
        shared[longest + 1] += self._times_ns
        self._times_ns = 0
        self.slot.progress_ns = now_ns()
        self._catch_up()

    def _note_time(self, elapsed: int, runs: int = 1) -> None:
        """Note how long a run took that has handled so many messages."""
        self._last_run_ns = elapsed
        self._times[(elapsed >> 10).bit_length()] += runs
        self._times_ns += elapsed * runs

    def listen_for_soft_limit(self) -> None:
        """Let the supervisor interrupt a run that is over its soft time limit."""
        signal.signal(signal.SIGUSR1, self._on_soft_limit)

    def _on_soft_limit(self, _number: int, _frame: object) -> None:
        # The supervisor names the run that it means; by now another one may be running, or none.
        if self._in_handler and self.slot.soft_kill_seq == self.slot.words[WORD_RUN_SEQ]:
            # Cleared here too: raised at the first instruction of `finally`, it skips the rest.
            self._in_handler = False
            if self.interrupt is None or self._judging:
                raise self.soft_timeout()
            self.interrupt(self.soft_timeout())

    def soft_timeout(self) -> handlers.SoftTimeout:
        """The exception of a run that is over its soft limit."""
        return handlers.SoftTimeout(
            f"the handler ran longer than its time limit of {self.consumer.timeout:g} s"
        )


def is_due(ran: int, waited: int, settling: int) -> bool:
    """Whether to settle before the next run, all in nanoseconds.

    `ran` is how long the last run took, `waited` for how long the oldest end has, `settling` how
    long it took to settle the last time: where Redis is far away, more runs are quick beside it.
    """
    worth = max(QUICK_RUN_NS, min(ACK_SHARE * settling, ACK_DELAY_NS))
    return ran > worth or waited > ACK_DELAY_NS


def _not_loaded(_message: Message) -> object:
    raise RuntimeError("the handler is not loaded yet")
