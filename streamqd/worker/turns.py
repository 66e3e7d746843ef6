"""The steps and waits that serving (`worker`) and recovery (`recovery`) share.

One turn of either loop follows the supervisor's command, collects finished runs, starts ready
entries, and settles verdicts that are due. `worker` adds reads, and `recovery` adds the pending
entries.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from streamqd.scoreboard import WORD_COMMAND, now_ns
from streamqd.worker.context import WorkerContext
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.executor import Executor
from streamqd.worker.fenced import Fenced
from streamqd.worker.guards import Guards
from streamqd.worker.prefetch import PrefetchController
from streamqd.worker.reader import Reader
from streamqd.worker.settler import DEFER_SECONDS
from streamqd.worker.verdicts import Verdicts

BLOCK_SECONDS = 15.0  # longest wait of one long poll
PUBLISH_NS = 1_000_000_000


class Reconnect(Exception):  # noqa: N818 - nothing is wrong
    """Raised to continue with a new connection, although nothing is wrong with the old one.

    A long poll may still occupy the old connection.
    """


@dataclass
class Turns:
    """Runs the turns of one worker's loops. Only the main thread may use it."""

    context: WorkerContext
    reader: Reader
    executor: Executor
    verdicts: Verdicts
    guards: Guards | None
    prefetch: PrefetchController

    def __post_init__(self) -> None:
        context = self.context
        self._slot, self._channel, self._settler = context.slot, context.channel, context.settler
        self._consumer, self._link = context.consumer, self.reader.link
        self._published_ns = 0

    def follow_and_collect(self) -> None:
        """Follow the supervisor's command, and collect the runs that have finished.

        If the flood guard requires it, this also pauses the partition. Raises Stop if the process
        must exit.
        """
        self.follow_command()
        self.executor.collect_finished()
        self.check_message_limit()
        if self.guards is not None:
            self.guards.record_settled()
            if self.guards.must_pause:
                self.finish_running(commanded=False)
                self.guards.pause_partition()
        if now_ns() - self._published_ns > PUBLISH_NS:
            self.publish()

    def follow_command(self) -> None:
        """If the supervisor commands a stop or a pause, wait for the active runs and follow it.

        Raises Stop. After a pause, raises Reconnect if a long poll was waiting, because the long
        poll had to be abandoned.
        """
        if not self._slot.words[WORD_COMMAND]:
            return
        self.finish_running()
        waited = self.reader.poll.is_waiting
        if waited:
            # The read that follows the poll may already have fetched entries. They are found the
            # next time the pending entries are listed.
            self.reader.poll.abandon()
            self._link.close()
        self._channel.check(self.executor.in_flight.entries)
        if waited:
            raise Reconnect

    def check_message_limit(self) -> None:
        """Raise Stop if this process has handled `max_messages`."""
        if 0 < self._consumer.max_messages <= self.context.counts.handled:
            raise Stop(ExitCode.RECYCLE)

    def has_command(self) -> bool:
        """Return True if the worker must stop or pause before the next read.

        Check this again after each run, because a run can take hours.
        """
        must_pause = self.guards is not None and self.guards.must_pause
        return must_pause or self._slot.words[WORD_COMMAND] != 0

    def publish(self) -> None:
        """Publish the counts and durations of runs in the slot, and log how many lines are missing.

        Lines are missing from the log if too many messages failed or expired.
        """
        if self.guards is not None:
            self.guards.record_settled()
        now = self._published_ns = now_ns()
        self.context.counts.publish(self._slot)
        self._slot.progress_ns = now
        self.verdicts.catch_up()

    def start_and_settle(self) -> None:
        """Start ready entries, and settle the verdicts that are due."""
        self.executor.start()
        due = self._settler.is_due(now_ns())
        self._settler.settle(read_follows=due and self.may_read_for_acks())

    def advance(self) -> None:
        """Run one turn: follow the command, collect finished runs, start entries, and settle."""
        self.follow_and_collect()
        self.start_and_settle()

    # --- waiting ---

    def await_capacity(self) -> None:
        """Run fetched messages, including held ones, until there is room to fetch more."""
        while not self.executor.room():
            self.advance()
            if not self.executor.room():
                self.wait()

    def finish_running(self, *, commanded: bool = True) -> None:
        """Wait until no handler is running. Finished runs are settled during the wait.

        If `commanded` is true, also stop waiting if there is no command of the supervisor, or if
        the supervisor withdraws it.
        """
        while self.executor.in_flight.running and (self._slot.words[WORD_COMMAND] or not commanded):
            self.settle_next_finished()

    def settle_next_finished(self, *, held: bool = True) -> None:
        """Wait for an event as `wait` does, and then try to settle the runs that have finished."""
        self.wait(held=held)
        self.executor.collect_finished()
        with contextlib.suppress(Fenced):
            self._settler.try_to_flush()

    def run_alone(self) -> None:
        """Run all entries in flight until none is left, and settle them. Held ones do not start."""
        executor = self.executor
        while executor.in_flight.entries:
            self.follow_and_collect()
            executor.start(held=False)
            self._settler.settle(read_follows=False)
            if executor.in_flight.entries:
                self.wait(held=False)
        executor.collect_finished()
        self._settler.flush()

    def wait(self, *descriptors: int, held: bool = True) -> set[int]:
        """Wait until a run finishes, a descriptor is readable, or `wait_seconds` have passed.

        The supervisor can also end the wait. Return the descriptors that are readable.
        """
        seconds = self.wait_seconds(held=held)
        return self._channel.await_any([*self.executor.wake_fds, *descriptors], seconds)

    def wait_seconds(self, *, held: bool = True) -> float:
        """Return how many seconds the loop may wait for an event.

        It must not wait longer than until a settlement or a check of the connection is due, or an
        entry can start. If `held` is true, this includes held entries.
        """
        seconds, poll, now = self.longest_wait, self.reader.poll, now_ns()
        if poll.is_waiting:
            seconds = min(seconds, poll.seconds_left() + 0.001)
        if not self.is_link_taken:
            # No run starts while a command is active.
            start = (
                None if self._slot.words[WORD_COMMAND] else self.executor.next_due(now, held=held)
            )
            for due in (self._settler.next_due(now), start):
                if due is not None:
                    seconds = min(seconds, max(0.0, (due - now) / 1e9))
        return seconds

    @property
    def longest_wait(self) -> float:
        """The number of seconds that the worker may wait before it must send something to Redis."""
        return DEFER_SECONDS if self._settler.items else BLOCK_SECONDS

    @property
    def is_link_taken(self) -> bool:
        """True while a long poll occupies the connection over which verdicts are settled.

        Such a poll is sent with a time limit, so that it ends before the next verdict is due.
        """
        return self.reader.poll.is_waiting and self._settler.link is self._link

    # --- room for more ---

    def wants_entries(self, count: int = 0) -> bool:
        """Return True if there is room for more entries, and fewer than `count` are ready.

        If `count` is 0, the number of lanes is used instead. The result is False while a long poll
        is waiting, because the poll will return entries anyway.
        """
        if self.reader.poll.is_waiting:
            return False
        return self.executor.room(count or self._consumer.lanes) > 0

    def may_read_for_acks(self) -> bool:
        """Return True if a read may be sent only because of the acknowledgments that it carries.

        No lane needs the entries that such a read returns. So it is sent only if fewer entries are
        ready than one read fetches.
        """
        return self.wants_entries(max(self.prefetch.count, self._consumer.lanes))

    def await_room(self) -> int:
        """Return how many entries may be fetched from each stream (at least 1).

        If Redis refuses retries and dead letters, wait until fewer of them are unsettled. During
        the wait, acknowledgments are still sent, because they free memory. Raises Stop, and the
        errors of `Settler.flush`.
        """
        settler, most = self._settler, self._consumer.prefetch_max
        while (room := most - len(settler.items)) <= 0:
            settler.flush()
            if settler.items:
                self._channel.sleep(0.2)
        return max(1, min(room, self.prefetch.batch_max, self.executor.room()))
