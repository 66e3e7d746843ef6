"""The lifecycle of a worker: it connects, runs pending entries, serves new ones, and exits.

`WorkerLoop._serve` is the serving loop, which is the same for all executors. It shows the life of a
message: the message is read, becomes WAITING, then RUNNING, then DONE or FAILED, and is settled.
"""

from __future__ import annotations

import enum
import logging
from random import random

from streamqd import logs
from streamqd.errors import (
    RedisResponseError,
    RedisUnavailableError,
    RefusalKind,
    SilentConnectionError,
)
from streamqd.scoreboard import WorkerState, now_ns
from streamqd.store import items, messages
from streamqd.store.fetch import FetchResult
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.fenced import Fenced
from streamqd.worker.forks import fork_role
from streamqd.worker.hooks import Hooks
from streamqd.worker.reclaim import Reclaim
from streamqd.worker.recovery import Recovery
from streamqd.worker.turns import Reconnect, Turns
from streamqd.worker.verdicts import RELEASE_SECONDS

IDLE_CHECK_SECONDS = 30.0
RECONNECT_SECONDS = (0.05, 2.0)  # first and longest wait between two connection attempts


class Step(enum.Enum):
    """A step of the serving loop (see `WorkerLoop._next_step`)."""

    LIST_PENDING = enum.auto()
    RECLAIM = enum.auto()
    ANSWER = enum.auto()
    WAIT = enum.auto()
    POLL = enum.auto()
    READ = enum.auto()


class WorkerLoop:
    """Handles one assignment, from the worker's first connection to its exit.

    `assembly` builds its parts.
    """

    def __init__(self, hooks: Hooks, turns: Turns, recovery: Recovery) -> None:
        context = self.context = turns.context
        self.slot, self.channel, self.settler = context.slot, context.channel, context.settler
        self.reader, self.executor = turns.reader, turns.executor
        self.lease, self.assignment, self.link = (
            self.reader.lease,
            context.assignment,
            self.reader.link,
        )
        self._hooks = hooks
        self._turns = turns
        self._recovery = recovery
        self._reclaim = Reclaim(context, self.reader.calls)
        self._episode = logs.Episode("worker.stalled", "worker.resumed")
        self.reconnect_wait = 0.0  # seconds until the next attempt, 0 after a successful read
        self._listed = False  # True if all pending entries were listed on this connection
        self._idle_since = 0

    def run(self) -> ExitCode:
        """Run until the worker must exit, and return the exit code.

        An unexpected error, such as an invalid reply from a script, is raised and ends the process.
        In that case, `Executor.close` makes sure that it is not charged to a running message.
        """
        try:
            return self._run_ready()
        finally:
            self.executor.close()
            if self.settler.link is not self.link:
                self.settler.link.close()

    def _run_ready(self) -> ExitCode:
        self.slot.state = WorkerState.READY
        self.channel.wake_supervisor()
        try:
            try:
                code = self._serve_until_stop()
            except Stop as stop:
                code = stop.code
            self._turns.finish_running(commanded=False)
        finally:
            fork_role.end_child()
            self._recovery.end_turn()
        if code is not ExitCode.FENCED:
            try:
                self.settler.flush_last()
            except Fenced:
                code = self._exit_superseded()
            except (RedisUnavailableError, RedisResponseError):
                pass  # the supervisor finds handled entries in the slot and acknowledges them
        if code is ExitCode.RECYCLE:
            self.slot.add("recycled")
        self._turns.publish()
        self._hooks.show_loop(None)
        # Do not write to the slot after this, because it may then belong to a successor.
        self.slot.state = WorkerState.QUIET
        self.channel.wake_supervisor()
        self._hooks.stop()
        return code

    def _serve_until_stop(self) -> ExitCode:
        """Serve, and reconnect after each connection problem, until the worker must exit.

        Return the exit code if the lease or the consumer group is lost. Raises Stop on a command to
        stop, or when `max_messages` is reached.
        """
        self.slot.waits.reset()
        while True:
            try:
                self.channel.sleep(self.reconnect_wait * (1 + random()))
                self._attach()
                self._serve()
            except Fenced:
                return self._exit_superseded()
            except Reconnect:
                self.link.close()
            except (RedisUnavailableError, RedisResponseError) as error:
                if isinstance(error, RedisResponseError) and error.kind is RefusalKind.NO_GROUP:
                    if not self._restore_group():
                        return ExitCode.NO_GROUP
                    self.link.close()
                    continue
                self._back_off(error)
            finally:
                self.reader.poll.abandon()

    def _back_off(self, error: RedisUnavailableError | RedisResponseError) -> None:
        """Close the connection, and double the wait before the next attempt to connect."""
        self.slot.add("redis_errors")
        self._episode.log_failure(assignment=self.assignment, error=str(error))
        self.link.close()
        if isinstance(error, SilentConnectionError):
            # Connections usually fail together. So also replace the one for settling, instead of
            # finding out a second later that it is dead. No reply is outstanding on it.
            self.settler.link.close()
        first, longest = RECONNECT_SECONDS
        self.reconnect_wait = min(max(first, self.reconnect_wait * 2), longest)

    def _restore_group(self) -> bool:
        """Re-create a destroyed group at its old position. Return False if this is not possible.

        The position is unknown if pending entries were released or have not been listed yet. In
        that case, the supervisor creates the group at the oldest entry that may not be handled yet,
        so that no entry is skipped. The call is repeated until Redis answers. Giving up would leave
        the group to the supervisor, and entries that were already acknowledged would run again.
        """
        if not self._listed or self._turns.verdicts.released:
            return False
        reply = None
        while reply is None:
            in_flight = {
                *self.slot.unsettled_places(),
                *self.settler.deferred_places,
                *self.executor.places,
            }
            call = messages.restore_group(
                self.reader.keys,
                self.lease,
                self.reader.last_main,
                self.reader.last_retry,
                sorted(in_flight),
            )
            try:
                reply = self.link.run(call)
            except RedisUnavailableError as error:
                self._back_off(error)
                self.channel.sleep(self.reconnect_wait * (1 + random()))
            except RedisResponseError:
                return False
        if reply.word != "OK":
            return False  # the assignment has another owner, which the next call will report
        self.slot.add("round_trips")
        logs.event(
            "group.restored",
            logging.WARNING,
            assignment=self.assignment,
            after=reply.values[0].decode() or None,
            retries_after=reply.values[1].decode() or None,
            in_flight=len(in_flight),
        )
        return True

    def _exit_superseded(self) -> ExitCode:
        """Log that the assignment has a newer owner, which now handles all entries fetched here."""
        self.slot.add("fenced")
        logs.event(
            "request.fenced", logging.WARNING, assignment=self.assignment, epoch=self.lease.epoch
        )
        return ExitCode.FENCED

    def _attach(self) -> None:
        """Run the pending entries, and prepare the first read.

        Call this first on each new connection.
        """
        self._listed = False
        self.reader.poll.abandon()
        self._recovery.run_all()
        self._listed = True
        if not self.reader.watch():
            raise Fenced

    # --- serve ---

    def _serve(self) -> None:
        """Read, run and settle messages in a loop.

        Each comment shows the state that messages have after the line. With the serial executor,
        all runs start and finish within `Executor.start`.
        """
        turns = self._turns
        empty = False  # True if the last read returned no entry
        while True:
            turns.follow_and_collect()  # DONE, or FAILED with its verdict
            ahead = self._reads_ahead(empty)
            if not (ahead or turns.is_link_taken):
                turns.start_and_settle()  # `Executor.start`: RUNNING. `Settler.settle`: settled
                if turns.has_command():
                    continue
            fetched = self._step(Step.READ if ahead else self._next_step(empty))
            if fetched is not None:
                empty = not (fetched.retried or fetched.main)
                self._admit(fetched)  # `Executor.admit`: WAITING

    def _step(self, step: Step) -> FetchResult | None:
        """Execute a step. Return the answer to a read if the step has received one, or None."""
        match step:
            case Step.LIST_PENDING:
                self._list_released()
            case Step.RECLAIM if self.reader.poll.is_waiting:
                raise Reconnect  # because the long poll may occupy the connection for seconds
            case Step.RECLAIM:
                self._idle_since = 0
                self._recovery.take_over(self._reclaim)
            case Step.ANSWER:
                return self._await_poll()
            case Step.WAIT:
                self._turns.wait()
            case Step.POLL:
                self._start_poll()
            case Step.READ:
                self._reclaim.record_read()
                return self._read()
        return None

    def _reads_ahead(self, empty: bool) -> bool:
        """Return True if the next read should be sent before the ready entries start.

        To save time, the entries then start while Redis is answering the read.
        """
        if empty or self._turns.verdicts.released or self._reclaim.is_requested:
            return False
        return bool(
            self.executor.in_flight.startable
            and self.settler.only_plain_acks
            and self._turns.wants_entries()
        )

    def _next_step(self, empty: bool) -> Step:
        """Choose the next step from the first line of this table that applies.

        | State                                                | Step         |
        | a handler released a message                         | LIST_PENDING |
        | the housekeeper saw entries of other clients         | RECLAIM      |
        | a long poll is waiting                               | ANSWER       |
        | no entries wanted, and no acknowledgment due         | WAIT         |
        | the last read was empty, and nothing is due          | POLL         |
        | else                                                 | READ         |
        """
        if self._turns.verdicts.released:
            return Step.LIST_PENDING
        wants = self._turns.wants_entries()
        if self._reclaim.is_turn(reading=wants):
            return Step.RECLAIM
        if self.reader.poll.is_waiting:
            return Step.ANSWER
        due = self.settler.is_due(now_ns())
        if not (
            wants or (due and self.settler.only_plain_acks and self._turns.may_read_for_acks())
        ):
            return Step.WAIT
        return Step.POLL if empty and not (due or self._reclaim.is_requested) else Step.READ

    def _list_released(self) -> None:
        """Run the entries again that handlers have released, after RELEASE_SECONDS.

        To find them, list all pending entries.
        """
        self._turns.run_alone()
        self.settler.flush()
        self._turns.verdicts.released = 0
        self.channel.sleep(RELEASE_SECONDS)
        if self.reader.poll.is_waiting:
            raise Reconnect
        self._attach()

    # --- reading ---

    def _read(self) -> FetchResult:
        """Send a read together with acknowledgments, and start entries while Redis is answering."""
        settler, executor, reader = self.settler, self.executor, self.reader
        count = min(self._turns.prefetch.count, self._turns.await_room())
        reader.send(settler.main_acks, settler.retry_acks, count)
        if executor.in_flight.startable:
            executor.start()  # must not change the acknowledgments that were just sent
        fetched = reader.receive()
        if fetched.executed and settler.has_unconfirmed_acks:
            settler.confirm_acks(now_ns())
        return reader.accept(fetched) or self._read_when_full(count)

    def _read_when_full(self, count: int) -> FetchResult:
        """Settle and read with scripts, because the server's memory is full."""
        self.settler.flush()
        share = max(1, count * items.BYTES_MAX // self.context.consumer.prefetch_bytes)
        return self.reader.read_by_script(min(count, share))

    def _start_poll(self) -> None:
        """Send a long poll: a read that waits at the server for new entries."""
        seconds = self._turns.longest_wait
        if self.settler.link is self.link:
            seconds = max(0.001, self._turns.wait_seconds())
        self.reader.start_poll(min(self._turns.prefetch.count, self._turns.await_room()), seconds)

    def _await_poll(self) -> FetchResult | None:
        """Wait for the answer to the long poll or another event. Return None in the latter case."""
        poll = self.reader.poll
        if poll.fileno() in self._turns.wait(poll.fileno()):
            return self.reader.accept(poll.answer()) or self._read_when_full(poll.count)
        poll.check()
        return None

    def _admit(self, fetched: FetchResult) -> None:
        """Pass the entries of a read to the executor, or do periodic work if there are none."""
        if self.reconnect_wait:
            self.reconnect_wait = 0.0
            self._episode.log_recovery(assignment=self.assignment)
        retried, main = fetched.retried, fetched.main
        if not retried and not main:
            self._check_pending()
            return
        self._idle_since = 0
        self.reader.record_last_ids(
            retried[-1][0] if retried else b"", main[-1][0] if main else b""
        )
        self.executor.admit([], fetched)
        if self.context.clock.is_old(now_ns()):
            self.context.clock.read(self.link)

    def _check_pending(self) -> None:
        """If the worker has been idle for IDLE_CHECK_SECONDS, look for missed pending entries."""
        now = now_ns()
        # The worker is not idle if entries wait for a rate limit, a circuit or a held key.
        if self.executor.in_flight.entries or self.settler.unsettled_count:
            self._idle_since = 0
            return
        self._turns.publish()
        logs.flush()
        self._idle_since = self._idle_since or now
        if now - self._idle_since > IDLE_CHECK_SECONDS * 1e9:
            self._idle_since = now
            if self.settler.pending_differs(len(self.executor.places)):
                self._attach()
