"""A worker's life: boot, attach (what is pending comes first), serve, leave.

One loop serves all shapes: obey the supervisor, note what has ended, begin what can begin, settle
what is due, and read when the executor wants more. The executor has the fetched entries and runs
them; how a run ended goes over `verdicts` to the settler, and from there with the next read, or in
a script, to Redis.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import secrets
from collections.abc import Iterator
from operator import attrgetter
from random import random

from streamqd import logs
from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind
from streamqd.message import Message
from streamqd.policy import rounds
from streamqd.policy.rounds import Suspects
from streamqd.scoreboard import WAITING, WORD_COMMAND, WorkerState, now_ns
from streamqd.store import items, messages
from streamqd.store.fetch import FetchResult
from streamqd.worker.assignment import Reconnect
from streamqd.worker.context import WorkerContext
from streamqd.worker.control_channel import ExitCode, Stop
from streamqd.worker.entry import NOWHERE, FetchedEntry
from streamqd.worker.executor import Executor
from streamqd.worker.fenced import Fenced
from streamqd.worker.forks import family
from streamqd.worker.guards import Guards
from streamqd.worker.hooks import Hooks
from streamqd.worker.prefetch import PrefetchController
from streamqd.worker.quarantine import Quarantine
from streamqd.worker.reader import Reader
from streamqd.worker.reclaim import Reclaim
from streamqd.worker.settler import DEFER_SECONDS
from streamqd.worker.verdicts import RELEASE_SECONDS, Verdicts

BLOCK_SECONDS = 15.0  # longest wait of one long poll
RECOVER_PAGE = 64  # pending entries listed at a time, at most
DOUBT_SECONDS = 1.0  # after which a silent connection is doubted: `store/doubt.py`
IDLE_CHECK_SECONDS = 30.0
RECONNECT_SECONDS = (0.05, 2.0)  # first and longest wait between two connection attempts
PUBLISH_NS = 1_000_000_000
_size = attrgetter("size")


class Step(enum.Enum):
    """What the loop of a worker does next, see `WorkerProcess._next_step`."""

    LIST_PENDING = enum.auto()
    RECLAIM = enum.auto()
    ANSWER = enum.auto()
    WAIT = enum.auto()
    POLL = enum.auto()
    READ = enum.auto()


class WorkerProcess:
    """Handles one unit from its first connection to its exit. See `assembly` for the parts."""

    def __init__(
        self,
        context: WorkerContext,
        hooks: Hooks,
        reader: Reader,
        executor: Executor,
        verdicts: Verdicts,
        guards: Guards | None,
        quarantine: Quarantine,
        prefetch: PrefetchController,
        suspects: Suspects,
    ) -> None:
        """`suspects`: of earlier crashes. They run before all else."""
        self.context = context
        self.slot, self.channel, self.settler = context.slot, context.channel, context.settler
        self.consumer, self.lease, self.unit = context.consumer, reader.lease, context.unit
        self.hooks = hooks
        self.reader, self.link = reader, reader.link
        self.executor = executor
        self.verdicts = verdicts
        self.guards = guards
        self.quarantine = quarantine
        self.reclaim = Reclaim(context, reader.calls)
        self.prefetch = prefetch
        self.suspects = suspects
        self.trouble = logs.Episode("worker.stalled", "worker.resumed")
        self._bad = logs.bad_values()
        self.reconnect_wait = 0.0  # 0 = the last round was completed
        self._listed = False  # all that was pending has been read since the connection was opened
        self._published_ns = 0
        self._idle_since = 0

    def run(self) -> ExitCode:
        """Live until stopped. Returns the exit code."""
        try:
            return self._live()
        finally:
            self.executor.close()
            if self.settler.link is not self.link:
                self.settler.link.close()

    def _live(self) -> ExitCode:
        self.slot.state = WorkerState.READY
        self.channel.wake_supervisor()
        try:
            code = self._work()
        except Stop as stop:
            code = stop.code
        finally:
            self._finish_running(commanded=False)
            family.end_child()
            self.quarantine.end_turn()
        if code is not ExitCode.FENCED:
            try:
                self.settler.flush_last()
            except Fenced:
                code = self._superseded()
            except (RedisUnavailable, RedisRefused):
                pass  # what stays unsettled is in the slot, the supervisor acknowledges it
        if code is ExitCode.RECYCLE:
            self.slot.add("recycled")
        self._publish()
        self.hooks.show_loop(None)
        # From here on the slot may be a successor's: no entry is left, nothing is written.
        self.slot.state = WorkerState.QUIET
        self.channel.wake_supervisor()
        self.hooks.stop()
        return code

    def _work(self) -> ExitCode:
        """Serve until something ends it; every trouble with the connection leads back to attach."""
        self.slot.waits.reset()
        while True:
            try:
                self.channel.sleep(self.reconnect_wait * (1 + random()))
                self._attach()
                self._serve()
            except Fenced:
                return self._superseded()
            except Reconnect:
                self.link.close()
            except (RedisUnavailable, RedisRefused) as error:
                if isinstance(error, RedisRefused) and error.kind is RefusalKind.NO_GROUP:
                    if not self._group_restored():
                        return ExitCode.NO_GROUP
                    self.link.close()
                    continue
                self._failed(error)
            finally:
                self.reader.poll.forget()

    def _failed(self, error: RedisUnavailable | RedisRefused) -> None:
        """Begin with a new connection, after a wait that grows."""
        self.slot.add("redis_errors")
        self.trouble.failed(unit=self.unit, error=str(error))
        self.link.close()
        first, longest = RECONNECT_SECONDS
        self.reconnect_wait = min(max(first, self.reconnect_wait * 2), longest)

    def _group_restored(self) -> bool:
        """Make the group again that was destroyed, where it was. False when that place is unknown.

        Then it begins at its floor: what was pending had not been listed, or was given back, and
        none of it may be skipped. Without an answer the call is repeated: it may not have arrived,
        and then what was acknowledged would be handled once more.
        """
        if not self._listed or self.verdicts.released:
            return False
        reply = None
        while reply is None:
            in_hand = {*self.slot.unsettled(), *self.settler.deferred_places, *self.executor.places}
            call = messages.restore_group(
                self.reader.keys,
                self.lease,
                self.reader.last_main,
                self.reader.last_retry,
                sorted(in_hand),
            )
            try:
                reply = self.link.run(call)
            except RedisUnavailable as error:
                self._failed(error)
                self.channel.sleep(self.reconnect_wait * (1 + random()))
            except RedisRefused:
                return False
        if reply.word != "OK":
            return False  # what follows finds out who has it now
        self.slot.add("round_trips")
        logs.event(
            "group.restored",
            logging.WARNING,
            unit=self.unit,
            after=reply.rest[0].decode() or None,
            retries_after=reply.rest[1].decode() or None,
            in_hand=len(in_hand),
        )
        return True

    def _superseded(self) -> ExitCode:
        """Say that a newer owner exists; every fetched entry is its business now."""
        self.slot.add("fenced")
        logs.event("fenced", logging.WARNING, unit=self.unit, epoch=self.lease.epoch)
        return ExitCode.FENCED

    # --- attach: what is pending comes first ---

    def _attach(self) -> None:
        """Open a session, then handle every pending entry, oldest first, before any fetch.

        Each new connection starts here: a read of an older one that executes late is refused,
        because the session was written into the fence, or its entries are in these lists.
        """
        self._listed = False
        reader = self.reader
        reader.poll.forget()
        self.quarantine.open("")
        self.executor.drop_unstarted()
        self.settler.flush()
        self.context.clock.read(self.link)
        reader.session = secrets.token_hex(8)
        opened = self._run_suspects() if self.suspects else False
        self._run_others(opened=opened)
        self.quarantine.end()
        self.suspects = {}
        self.slot.suspects_left = 0
        self._listed = True
        if not reader.watch():
            raise Fenced

    def _pages(self, *, opened: bool = False) -> Iterator[list[messages.PendingEntry]]:
        """List what is pending, oldest first. `opened`: the session is in the fence already."""
        reader, session = self.reader, self.reader.session
        after = {False: b"", True: b""}
        over = False
        while not over:
            call = messages.recover(
                self.reader.keys,
                self.lease,
                session,
                open=not opened,
                after_main=after[False],
                after_retry=after[True],
                count=self._page(),
            )
            page = messages.Recovered.parse(
                reader.calls.run(call), self.reader.keys.attempts(*self.unit)
            )
            if page.bad:
                self._bad.values(page.bad)
            opened = True
            reader.heard(page.last_retry, page.last_main)
            pending, over = page.in_order()
            for entry in pending:
                after[entry.retried] = entry.id
            self.quarantine.open(session if page.solo else "")
            self.quarantine.accused = page.accused
            yield pending

    def _run_others(self, *, opened: bool) -> None:
        """Handle all that is pending; in quarantine, in rounds that grow."""
        ready: list[messages.PendingEntry] = []
        width, listed = self.quarantine.width, 0
        growing = min(width, 2)
        for pending in self._pages(opened=opened):
            if not self.quarantine.is_open or width == 1:
                self._run_pending(pending)
                self.settler.flush()
                continue
            ready += pending
            listed += len(pending)
            self.slot.suspects_left, self.slot.suspects = len(ready), listed
            while len(ready) >= growing or sum(map(_size, ready)) >= self.consumer.prefetch_bytes:
                ready = self._run_round(ready, growing)
                growing = min(width, 4 * growing)
        while ready:
            ready = self._run_round(ready, growing)
            growing = min(width, 4 * growing)

    def _run_suspects(self) -> bool:
        """Run the suspects of earlier crashes in rounds, before all else that is pending.

        Returns whether a session was opened.
        """
        ready: list[messages.PendingEntry] = []
        size, size_max = 0, self.consumer.prefetch_bytes
        for pending in self._pages():
            if self.quarantine.is_open:
                return True  # all that is inherited runs behind marks
            found = [entry for entry in pending if entry.place in self.suspects]
            ready += found
            size += sum(entry.size for entry in found)
            while ready and size >= size_max:
                ready = self._run_round(ready)
                size = sum(entry.size for entry in ready)
        while ready:
            ready = self._run_round(ready)
        return True

    def _run_round(
        self, ready: list[messages.PendingEntry], most: int = 0
    ) -> list[messages.PendingEntry]:
        """Run the first suspects together, and nothing beside them. Returns the others.

        `most` is the largest round of inherited entries that nobody suspects.
        """
        alone = self.quarantine.accused
        largest = [
            1 if each.crashes or each.place in alone else self.suspects.get(each.place, most)
            for each in ready
        ]
        count = rounds.next_round(largest)
        if self.guards is not None and self.guards.one_by_one:
            count = 1
        self._run_dry()
        self.slot.round_size = count
        if not self.quarantine.is_open:
            self._run_pending(ready[:count])
        elif members := self._runnable(ready[:count]):
            self._run_marked(members)
        self._run_dry()
        self.settler.flush()
        self._await_capacity()
        self.slot.round_size = 0
        self.slot.suspects_left = max(1, self.slot.suspects_left - count)
        return ready[count:]

    def _run_pending(self, found: list[messages.PendingEntry]) -> None:
        """Handle entries that were pending before, those alone that must be alone.

        In quarantine each of them gets a durable mark, and a turn.
        """
        executor, together = self.executor, list[FetchedEntry]()
        for entry in self._runnable(found):
            if not (entry.crashes or self.quarantine.is_open):
                together.append(entry)
                continue
            self._admit_dry(together)
            together = []
            if self.quarantine.is_open:
                self._run_marked([entry])
            else:
                self._admit_dry([entry])
        if together:
            executor.admit(together)
            self._advance()
        self._await_capacity()

    def _await_capacity(self) -> None:
        """Run messages in hand, held ones too, until more may come into hand."""
        while not self.executor.room():
            self._advance()
            if not self.executor.room():
                self._wait()

    def _admit_dry(self, entries: list[FetchedEntry]) -> None:
        """Run entries, and nothing beside them, after all that is in hand."""
        self._run_dry()
        if entries:
            self.executor.admit(entries)
            self._run_dry()

    def _runnable(self, found: list[messages.PendingEntry]) -> list[FetchedEntry]:
        """Return the entries that are to be run and not known yet. Settles the others."""
        known = {*self.settler.deferred_places, *self.executor.places}
        runnable = []
        for entry in found:
            if entry.place in known:
                continue
            self._obey()
            if entry.fields is None:
                self.verdicts.acknowledge_missing(entry)
                continue
            message = self._message(entry)
            fetched = FetchedEntry(
                NOWHERE, entry.place, message, entry.retried, entry.crashes, entry.size
            )
            if not self.verdicts.dead_letter_crashed(fetched, entry.context):
                runnable.append(fetched)
        return runnable

    def _message(self, entry: messages.PendingEntry) -> Message:
        delivery, fields = self.context.delivery, entry.fields or []
        message = Message(delivery, entry.id, fields, retried=entry.retried)
        if entry.failures:
            message.failures_in_place = entry.failures
        if entry.wait_ms:
            message.due_in_place_ns = now_ns() + entry.wait_ms * 1_000_000
        return message

    def _run_marked(self, entries: list[FetchedEntry]) -> None:
        """Run entries behind one mark that names all of them, and nothing beside them.

        Their turn lasts while one of them runs. If a gate holds the others back then, the rest of
        the round gets a turn and a mark of its own.
        """
        executor, states = self.executor, self.slot.states
        self._run_dry()
        executor.admit(entries)
        while left := [each for each in entries if states[each.index] == WAITING]:
            self.quarantine.begin(*left)
            executor.start(held=False)
            while executor.running:
                self._wait(held=False)
                executor.take_ended()
                with contextlib.suppress(Fenced):
                    self.settler.try_to_flush()
                if not self.slot.words[WORD_COMMAND]:
                    executor.start(held=False)
            self._check_life()
            if not executor.in_hand:
                break
        self.quarantine.end_turn()
        self._run_dry()

    def _run_dry(self) -> None:
        """Run all that is in hand, and nothing beside it; then settle it."""
        executor = self.executor
        while executor.in_hand:
            self._look()
            executor.start(held=False)
            self.settler.settle(read_follows=False)
            if executor.in_hand:
                self._wait(held=False)
        executor.take_ended()
        self.settler.flush()

    # --- serve ---

    def _serve(self) -> None:
        """Loop: note what ended, start what can start, and do the one step that is next."""
        empty = False  # the last read brought no entry
        while True:
            self._look()
            fetched = self._step(empty)
            if fetched is not None:
                empty = not (fetched.retried or fetched.main)
                self._take(fetched)

    def _step(self, empty: bool) -> FetchResult | None:
        """Do what `_next_step` chooses. Returns the answer of a read, None when none came."""
        if self._reads_ahead(empty):
            return self._read()
        waiting = self.reader.poll.waiting
        if not self._is_link_taken:
            self._go_on()
            if self._must_look():
                return None
        match self._next_step(empty):
            case Step.LIST_PENDING:
                self._begin_again()
            case Step.RECLAIM if waiting:
                raise Reconnect  # the poll would hold the connection for seconds
            case Step.RECLAIM:
                self._reclaim()
            case Step.ANSWER:
                return self._answer()
            case Step.WAIT:
                self._wait()
            case Step.POLL:
                self._start_poll()
            case Step.READ:
                self.reclaim.give_way()
                return self._read()
        return None

    def _reads_ahead(self, empty: bool) -> bool:
        """Return True if a read goes out first, and entries start while Redis answers."""
        if empty or self.verdicts.released or self.reclaim.wanted:
            return False
        return bool(self.executor.startable and self.settler.only_plain_acks and self._wants())

    def _next_step(self, empty: bool) -> Step:
        """Choose the next step: the first line of this table that applies.

        | State                                                | Step         |
        | a handler released a message                         | LIST_PENDING |
        | the housekeeper saw entries of other clients         | RECLAIM      |
        | a long poll is under way                             | ANSWER       |
        | the executor wants no entries, nothing rides on read | WAIT         |
        | the last read was empty, and nothing is due          | POLL         |
        | else                                                 | READ         |
        """
        if self.verdicts.released:
            return Step.LIST_PENDING
        wants = self._wants()
        reclaims = self.reclaim.wanted
        if reclaims and self.reclaim.is_turn(reading=wants):
            return Step.RECLAIM
        if self.reader.poll.waiting:
            return Step.ANSWER
        due = self.settler.is_due(now_ns())
        if not (wants or (due and self.settler.only_plain_acks and self._takes_along())):
            return Step.WAIT
        return Step.POLL if empty and not (due or reclaims) else Step.READ

    def _wants(self, count: int = 0) -> bool:
        """Return True if a read may bring entries: fewer than `count` are ready, or than lanes."""
        return not self.reader.poll.waiting and self.executor.wants(count or self.consumer.lanes)

    def _takes_along(self) -> bool:
        """Return True if a read may go out for its acknowledgements alone.

        No lane asked for the entries that it brings. With those in hand they must fit in one read.
        """
        return self._wants(max(self.prefetch.count, self.consumer.lanes))

    def _look(self) -> None:
        """Obey, and note what has ended."""
        self._obey()
        self.executor.take_ended()
        self._check_life()
        if self.guards is not None:
            self.guards.look()
            if self.guards.must_pause:
                self._finish_running(commanded=False)
                self.guards.stand_still()
        if now_ns() - self._published_ns > PUBLISH_NS:
            self._publish()

    def _check_life(self) -> None:
        """Raise Stop after `max_messages`."""
        if 0 < self.consumer.max_messages <= self.context.counts.handled:
            raise Stop(ExitCode.RECYCLE)

    def _must_look(self) -> bool:
        """Return True if nothing may be read before `_look`: a run can last for hours."""
        must_pause = self.guards is not None and self.guards.must_pause
        return must_pause or self.slot.words[WORD_COMMAND] != 0

    def _go_on(self) -> None:
        """Start what can start, and settle what is due."""
        self.executor.start()
        due = self.settler.is_due(now_ns())
        self.settler.settle(read_follows=due and self._takes_along())

    def _advance(self) -> None:
        """Obey, note what has ended, begin with what can begin, settle what is due."""
        self._look()
        self._go_on()

    def _publish(self) -> None:
        """Bring what others see of the runs up to date."""
        if self.guards is not None:
            self.guards.look()
        now = self._published_ns = now_ns()
        self.context.counts.publish(self.slot)
        self.slot.progress_ns = now
        self.verdicts.catch_up()

    def _obey(self) -> None:
        """When the supervisor wants a stop or a pause, start nothing and let the runs end."""
        if not self.slot.words[WORD_COMMAND]:
            return
        self._finish_running()
        waited = self.reader.poll.waiting
        if waited:
            # Whatever the long poll has moved meanwhile is found by listing.
            self.reader.poll.forget()
            self.link.close()
        self.channel.check(self.executor.in_hand)
        if waited:
            raise Reconnect

    def _finish_running(self, *, commanded: bool = True) -> None:
        """Wait for the runs to end; `commanded`: as long as the supervisor commands something."""
        while self.executor.running and (self.slot.words[WORD_COMMAND] or not commanded):
            self._wait()
            self.executor.take_ended()
            with contextlib.suppress(Fenced):
                self.settler.try_to_flush()

    def _begin_again(self) -> None:
        """Wait a little, and begin with the oldest pending entry, because some were given back."""
        self._run_dry()
        self.settler.flush()
        self.verdicts.released = 0
        self.channel.sleep(RELEASE_SECONDS)
        if self.reader.poll.waiting:
            raise Reconnect
        self._attach()

    # --- waiting ---

    @property
    def _longest_wait(self) -> float:
        """The longest wait in seconds until the worker must send something to Redis."""
        return DEFER_SECONDS if self.settler.items else BLOCK_SECONDS

    @property
    def _is_link_taken(self) -> bool:
        """True while a long poll has the connection that settling needs.

        Such a poll ends in time for what is due next, see `_start_poll`.
        """
        return self.reader.poll.waiting and self.settler.link is self.link

    def _patience(self, *, held: bool = True) -> float:
        """Return the seconds that the loop may wait for an event.

        At most until something is to be settled, could start (`held` entries too) or is to be
        checked.
        """
        seconds, poll, now = self._longest_wait, self.reader.poll, now_ns()
        if poll.waiting:
            seconds = min(seconds, poll.left() + 0.001)
        if not self._is_link_taken:
            # During a command nothing starts.
            start = (
                None if self.slot.words[WORD_COMMAND] else self.executor.next_due(now, held=held)
            )
            for due in (self.settler.next_due(now), start):
                if due is not None:
                    seconds = min(seconds, max(0.0, (due - now) / 1e9))
        return seconds

    def _wait(self, *descriptors: int, held: bool = True) -> set[int]:
        """Wait for the end of a run, for a descriptor, or for `_patience`.

        Returns the descriptors that are readable.
        """
        seconds = self._patience(held=held)
        return self.channel.await_any([*self.executor.wake_fds, *descriptors], seconds)

    # --- reading ---

    def _page(self) -> int:
        """Return how many pending entries may be listed at a time. May wait, as `_await_room`."""
        return min(RECOVER_PAGE, self.prefetch.count, self._await_room())

    def _await_room(self) -> int:
        """Return how many more entries of each stream may come into hand, at least 1.

        Waits while Redis refuses retries and dead letters. Acknowledgements are still sent, because
        they free memory.
        """
        settler, most = self.settler, self.consumer.prefetch_max
        while (room := most - len(settler.items)) <= 0:
            settler.flush()
            if settler.items:
                self.channel.sleep(0.2)
        return max(1, min(room, self.prefetch.batch_max, self.executor.room()))

    def _read(self) -> FetchResult:
        """Read once. Acknowledgements ride on the read; entries start while Redis answers."""
        settler, executor, reader = self.settler, self.executor, self.reader
        count = min(self.prefetch.count, self._await_room())
        reader.send(settler.main_acks, settler.retry_acks, count)
        if executor.startable:
            executor.start()  # it must not add to what is acknowledged
        fetched = reader.receive()
        if fetched.executed and settler.acks_owed:
            settler.acks_confirmed(now_ns())
        return reader.accept(fetched) or self._read_when_full(count)

    def _read_when_full(self, count: int) -> FetchResult:
        """Settle and read by scripts, because the server's memory is full."""
        self.settler.flush()
        share = max(1, count * items.BYTES_MAX // self.consumer.prefetch_bytes)
        return self.reader.read_by_script(min(count, share))

    def _start_poll(self) -> None:
        """Send a read that waits at the server for new entries."""
        seconds = self._longest_wait
        if self.settler.link is self.link:
            seconds = max(0.001, self._patience())
        self.reader.start_poll(min(self.prefetch.count, self._await_room()), seconds)

    def _answer(self) -> FetchResult | None:
        """Wait for the long poll or another event. Returns None when it has not answered."""
        poll = self.reader.poll
        if poll.fileno() in self._wait(poll.fileno()):
            return self.reader.accept(poll.answer()) or self._read_when_full(poll.count)
        poll.check()
        return None

    def _take(self, fetched: FetchResult) -> None:
        """Take what was read into hand, or see to what is due when nothing happens."""
        if self.reconnect_wait:
            self.reconnect_wait = 0.0
            self.trouble.recovered(unit=self.unit)
        retried, main = fetched.retried, fetched.main
        if not retried and not main:
            self._idle()
            return
        self._idle_since = 0
        self.reader.heard(retried[-1][0] if retried else b"", main[-1][0] if main else b"")
        self.executor.admit_read(fetched)
        if self.context.clock.is_old(now_ns()):
            self.context.clock.read(self.link)

    def _idle(self) -> None:
        """See whether all that is pending is known here, from time to time."""
        now = now_ns()
        # What a rate, a circuit or a held key lets wait is pending, too.
        if self.executor.in_hand or self.settler.owed:
            self._idle_since = 0
            return
        self._publish()
        logs.flush()
        self._idle_since = self._idle_since or now
        if now - self._idle_since > IDLE_CHECK_SECONDS * 1e9:
            self._idle_since = now
            if self.settler.pending_differs():
                self._attach()

    # --- what others left behind ---

    def _reclaim(self) -> None:
        """Take over from foreign consumers, one page at a time."""
        self._idle_since = 0
        self.settler.flush()
        for retried in self.reclaim.pages():
            found = self.reclaim.take(retried, self.reader.session, self._page())
            if found:
                self._run_pending(found)
                self.settler.flush()
