"""Run the handler for one message at a time, and turn the result into a verdict.

Each entry has a state byte in the slot. As long as it is RUNNING, a crash is charged to the entry,
and the time counts towards its limits. It becomes RUNNING before the message is decoded. If the
handler returns, the run is over. If the handler raises, the run lasts until its verdict is
recorded, because getting the text of the error runs user code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import CLOCK_BOOTTIME, clock_gettime_ns
from typing import Protocol

from streamqd import logs
from streamqd.message import Message, restore_message
from streamqd.model import EACH, RawEntry
from streamqd.scoreboard import (
    DONE,
    RUNNING,
    WORD_COMMAND,
    WORD_RUN_SEQ,
    WORD_TRUSTED_UNTIL,
    WorkerSlot,
    now_ns,
)
from streamqd.store.messages import entry_place
from streamqd.worker.context import WorkerContext
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.delays import StartDelays
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.gates import Gates
from streamqd.worker.verdicts import Verdicts

ACK_DELAY_NS = 20_000_000  # settle before the next run if an unsettled run is older than this
ACK_SHARE = 20  # settle before the next run if that takes less than 1/20 of the last run's time
QUICK_RUN_NS = 2_000_000  # run time up to which settling can wait for the next run
# Longest time for which a pass (see `RunStarts`) runs without checking its delays.
UNSEEN_NS = ACK_DELAY_NS + 3 * QUICK_RUN_NS


class RunPace:
    """Settles finished runs before the next run, if they should not wait any longer."""

    def __init__(self, context: WorkerContext) -> None:
        self._settler = context.settler
        self._ack_each = context.consumer.ack == EACH
        self._settling_ns = QUICK_RUN_NS // ACK_SHARE  # duration of the last settlement

    def settle_first(self, now: int, ran_ns: int) -> int:
        """Settle failures and due verdicts before the next run, because that run may take hours.

        `now` is the current time (`now_ns`), and `ran_ns` is the duration of the last run. Return
        the time after settling.
        """
        settler = self._settler
        due = self._ack_each or must_settle_first(ran_ns, now - settler.since_ns, self._settling_ns)
        if settler.items or due:
            settler.flush()
            settled = now_ns()
            self._settling_ns = settled - now
            return settled
        return now


class InPlace(Protocol):
    """Runs a failed message again in its place, before the messages that must not overtake it."""

    def count_free(self, messages: list[Message], start: int) -> int:
        """Return how many of the new messages may run one after another, starting at `start`."""

    def may_run(self, entry: FetchedEntry) -> bool:
        """Return True if an entry may run now. This may wait until the entry is due.

        If the result is False, the entry was stored, and runs later.
        """

    def keep(self, entry: FetchedEntry) -> None:
        """Keep a failed entry in its place. It must wait until `may_run` returns True for it."""

    def forget(self, entry: FetchedEntry) -> None:
        """Forget an entry that has failed and will not run again in its place."""


class RunStarts:
    """The start times of runs whose delays have not been counted yet.

    A pass runs the new entries of one read. As long as the delays of all these entries belong to
    the same bucket of the delay histogram, only the first and the last start time are kept, which
    saves time in the hot loop. After each settlement, the pass checks if a delay is about to leave
    that bucket. From then on, it records the time of each start.
    """

    def __init__(self, slot: WorkerSlot, delays: StartDelays) -> None:
        self._slot = slot
        self._delays = delays
        self._recorded: list[int] = []
        self._unrecorded = 0  # number of runs before the recorded ones
        self._first = self._last = 0  # starts of the first and the last unrecorded run (`now_ns`)
        self._sequence = self._same_bucket_until = 0
        self.note: Callable[[int], None] = self._recorded.append

    def look_ahead(self, oldest: bytes, newest: bytes, now: int) -> None:
        """Begin a pass: record no start times as long as all delays stay in one histogram bucket.

        `oldest` and `newest` are the IDs of the first and the last entry of the pass.
        """
        until = self._delays.same_bucket_until(oldest, newest, now) - UNSEEN_NS
        if until > now:
            self._first, self._same_bucket_until = now, until
            self._sequence = self._slot.words[WORD_RUN_SEQ]
            self.note = _forget

    def choose_note(self, now: int) -> Callable[[int], None]:
        """Return the function to call with each start time from now on. It may ignore the time.

        Call this again after each settlement, because a delay may by then be about to leave its
        bucket.
        """
        return self.record() if now > self._same_bucket_until else self.note

    def record(self) -> Callable[[int], None]:
        """Record each start time from now on. Return the function to call with each of them."""
        if self.note is _forget:
            self.note = self._recorded.append
            self._last = self._slot.lanes[1]
            self._unrecorded = self._slot.words[WORD_RUN_SEQ] - self._sequence
        return self.note

    def count(self, entries: Sequence[RawEntry], start: int) -> None:
        """Count the delays of the runs that have started. The first of them ran `entries[start]`.

        `entries` holds the entries as they were fetched, because a handler may have changed its
        message. If it is empty, nothing is counted.
        """
        self.record()
        count, self._unrecorded = self._unrecorded, 0
        if entries and count:
            self._delays.note_each(entries, start, [self._first, *[self._last] * (count - 1)])
        if entries:
            self._delays.note_each(entries, start + count, self._recorded)
        self._recorded.clear()


_forget: Callable[[int], None] = deque[int](maxlen=0).append


class SingleRunner:
    """Runs the handler, one message at a time."""

    def __init__(
        self,
        context: WorkerContext,
        function: Callable[..., object],
        verdicts: Verdicts,
        gates: Gates,
        in_place: InPlace | None,
    ) -> None:
        self._context = context
        self._function = function
        self._verdicts = verdicts
        self._gates = gates
        self._in_place = in_place
        self._pace = RunPace(context)
        self._last_run_ns = 0
        self._starts = RunStarts(context.slot, context.counts.delays)
        self._waits_in_place = False  # True if the last message failed and now waits in its place
        self._ack_each = context.consumer.ack == EACH

    def handle(self, entry: FetchedEntry) -> None:
        """Run the handler for an entry of the batch.

        If the entry fails and waits in its place, run it again as long as `InPlace.may_run` permits
        this. `may_run` may also store the entry for later.
        """
        if self._in_place is None:
            self._run(entry)
            return
        while self._in_place.may_run(entry) and self._run(entry):
            pass

    def _run(self, entry: FetchedEntry) -> bool:
        """Run the handler for an entry. Return True if it has failed and waits in its place."""
        message, self._waits_in_place = entry.message, False
        if message.expires_at is None or not self._verdicts.skip_expired(entry):
            entries: list[RawEntry] = [] if entry.has_run else [[entry.id, []]]
            try:
                self._run_each((message,), entry.index, entry.retried, entry)
            finally:
                self._starts.count(entries, 0)
        return self._waits_in_place

    def run_many(
        self,
        messages: list[Message],
        entries: Sequence[RawEntry],
        start: int,
        first: int,
        retried: bool,
    ) -> int:
        """Run the handler for new messages, starting with `messages[start]`. Return how many ran.

        `entries` holds the entries of the same messages, and `first` is the index of `messages[0]`
        in the batch. If not all messages have run, the caller must pass the next one to `handle`,
        because it may have to wait.
        """
        in_place = self._in_place
        count = len(messages) - start if in_place is None else in_place.count_free(messages, start)
        if not count:
            return 0
        if not (retried or self._gates.has_gates):
            oldest, newest = entries[start][0], entries[start + count - 1][0]
            self._starts.look_ahead(oldest, newest, now_ns())
        try:
            return self._run_each(messages[start : start + count], first + start, retried)
        finally:
            self._starts.count([] if retried else entries, start)

    def _run_each(
        self,
        messages: Sequence[Message],
        first: int,
        retried: bool,
        entry: FetchedEntry | None = None,
    ) -> int:
        """Run the handler for messages. `first` is the index of the first one in the batch.

        Return the number of messages that have run. If a message fails and waits in its place, stop
        after it, because the others may also have to wait. `entry` is set only for a single
        message. This is the hot path, so values that all messages share are looked up only once.
        """
        context, function, current, pace = self._context, self._function, logs.current, self._pace
        gates, gated = self._gates, self._gates.has_gates
        slot, settler, counts, soft = context.slot, context.settler, context.counts, context.limit
        words, states, lanes, times = slot.words, slot.states, slot.lanes, counts.times
        limit, quick_ns = context.consumer.max_messages, -1 if self._ack_each else QUICK_RUN_NS
        sequence, elapsed, note_start = words[WORD_RUN_SEQ], self._last_run_ns, self._starts.note
        counters = entry is not None and entry.has_counters
        for index, message in enumerate(messages, first):
            # Before the run, follow a command, settle runs that must not wait, and await the gates.
            if words[WORD_COMMAND] and index > first:
                context.channel.check(slot.unfinished)
            now = clock_gettime_ns(CLOCK_BOOTTIME)
            if settler.since_ns and (elapsed > quick_ns or now - settler.since_ns > ACK_DELAY_NS):
                now = pace.settle_first(now, elapsed)
                note_start = self._starts.choose_note(now)
            if gated or now > words[WORD_TRUSTED_UNTIL]:
                note_start = self._starts.record()
                now = gates.await_start(now)
            # Mark the entry as RUNNING before anything that the message can influence, so that a
            # crash is charged to it.
            lanes[1] = now
            note_start(now)
            words[WORD_RUN_SEQ] = sequence = sequence + 1
            states[index] = RUNNING
            current.message, entry_id = message, message.id_bytes
            end: object = None  # the handler's return value, or its exception
            try:
                soft.in_handler = True
                try:
                    end = function(message)
                finally:
                    soft.in_handler = False
            except BaseException as raised:  # noqa: BLE001 - user code may raise anything
                end = raised
            if end is None:
                states[index] = DONE
            # After the run, count it. Then acknowledge the message, or find its verdict.
            ended = clock_gettime_ns(CLOCK_BOOTTIME)
            current.message = None
            self._last_run_ns = elapsed = ended - now
            times[(elapsed >> 10).bit_length()] += 1
            counts.times_ns += elapsed
            counts.handled += 1
            if end is None:
                settler.ack(entry_id, index, ended, retried, counters)
            elif (error := self._verdicts.run_error(end)) is None:
                states[index] = DONE
                settler.ack(entry_id, index, ended, retried, counters)
            else:
                if entry is not None:
                    entry.restore()
                failed = entry or _make_entry(message, entry_id, index, retried)
                if self._settle_failure(failed, error) and counts.handled != limit:
                    return index - first + 1
            if counts.handled == limit:
                raise Stop(ExitCode.RECYCLE)
        return len(messages)

    def _settle_failure(self, entry: FetchedEntry, error: BaseException) -> bool:
        """Record the verdict on a failed run. Return True if the entry waits in its place."""
        self._waits_in_place = self._verdicts.settle_failure(entry, error)
        if self._waits_in_place:
            assert self._in_place is not None
            self._in_place.keep(entry)
        elif self._in_place is not None:
            self._in_place.forget(entry)
        return self._waits_in_place

    def run_collected(self) -> None:
        """Do nothing, because `handle` runs each message immediately."""

    drop_collected = run_collected


def _make_entry(message: Message, entry_id: bytes, index: int, retried: bool) -> FetchedEntry:
    own = restore_message(message, entry_id, retried=retried)
    return FetchedEntry(index, entry_place(entry_id, retried=retried), own, retried)


def must_settle_first(ran: int, waited: int, settling: int) -> bool:
    """Return True if finished runs must be settled before the next run.

    All arguments are in nanoseconds. `ran` is the duration of the last run, `waited` is the age of
    the oldest unsettled run, and `settling` is the duration of the last settlement. After a quick
    run, settling can wait. If settling is slow, longer runs also count as quick.
    """
    worth = max(QUICK_RUN_NS, min(ACK_SHARE * settling, ACK_DELAY_NS))
    return ran > worth or waited > ACK_DELAY_NS
