"""Run several messages at a time. Fetched entries wait for a free lane.

This executor uses the slot's batch as a table, in which an entry keeps its index until it is
settled. The lanes run the handler. Only the main thread adds entries to the table and uses Redis.
Finished runs are settled over a separate connection, so that they need not wait for a read that is
waiting for new entries.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress

from streamqd.config import Consumer
from streamqd.model import EACH, RawEntry
from streamqd.scoreboard import (
    CLEARED,
    RUNNING,
    WAITING,
    WORD_RUN_SEQ,
    now_ns,
)
from streamqd.store.fetch import FetchResult
from streamqd.worker.context import WorkerContext
from streamqd.worker.entry import FetchedEntry, InFlight, entries_of_read
from streamqd.worker.gates import Gates
from streamqd.worker.held_keys import HeldKeys
from streamqd.worker.lanes import Lanes
from streamqd.worker.ordering import Ordering
from streamqd.worker.prefetch import WORK_IN_FLIGHT_NS, PrefetchController
from streamqd.worker.runs import QUICK_RUN_NS
from streamqd.worker.verdicts import Verdicts

_IS_FREE = bytes(state == CLEARED for state in range(256))
RUN_DECAY = 7 / 8  # weight of the old mean run time when another run is added


class ConcurrentExecutor:
    """Queues the fetched entries, and starts them in the lanes as lanes become free."""

    def __init__(
        self,
        context: WorkerContext,
        lanes: Lanes,
        ordering: Ordering[FetchedEntry],
        verdicts: Verdicts,
        gates: Gates,
        held: HeldKeys | None,
        prefetch: PrefetchController,
    ) -> None:
        self._context = context
        self._consumer: Consumer = context.consumer
        self._slot = context.slot
        self._settler = context.settler
        self._lanes = lanes
        self._verdicts = verdicts
        self._gates = gates
        self._ordering = ordering
        self._held = held
        self._prefetch = prefetch
        self._bytes_max = context.settings.daemon.max_message_bytes
        self._ack_each = context.consumer.ack == EACH
        self._running: set[FetchedEntry] = set()
        self._bytes_in_flight = 0
        self._run_ns = 0.0  # moving mean of the run time
        self._may_expire = False  # True once a fetched message may have an expiry
        self._free = list(range(context.consumer.lanes))
        self._indexes: list[int] = []  # free indexes that were found and not used yet
        self._inspected: FetchedEntry | None = None  # the entry whose verdict is being determined
        self.wake_fds = (lanes.ends.wake_fd,)  # readable when a run has finished
        context.slot.open_table(context.consumer.lanes)
        self._table = context.slot.states[: context.slot.in_flight]
        context.limit.listen(self._on_soft_limit)

    # --- intake ---

    def drop_unstarted(self) -> None:
        """Drop the entries that have not started. They stay pending, and are then listed again."""
        self.collect_finished()
        for entry in self._ordering.drop():
            self._slot.states[entry.index] = CLEARED
            self._bytes_in_flight -= entry.size
        if self._held is not None:
            self._held.restart(self._running)

    def admit(self, listed: list[FetchedEntry], read: FetchResult | None = None) -> None:
        """Accept listed and newly read entries, and queue them for the lanes."""
        if listed:
            self._may_expire |= any(entry.message.expires_at is not None for entry in listed)
            self._index(listed)
            self._queue(listed)
        if read is not None:
            self._take_read(read)

    def _take_read(self, fetched: FetchResult) -> None:
        retried, main = fetched.retried, fetched.main
        size = self._take_stream(retried, True) + self._take_stream(main, False)
        total = len(retried) + len(main)
        self._slot.add("fetched", total)
        self._slot.add("bytes", size)
        # The entries have not run yet, so their run time is an estimate from the mean.
        took_ns = int(self._run_ns * total / self._consumer.lanes)
        self._prefetch.observe(total, size, took_ns, fetched.received)

    def _take_stream(self, entries: list[RawEntry], retried: bool) -> int:
        """Accept the entries that were read from one stream. Return their size in bytes."""
        if not entries:
            return 0
        found, may_expire = entries_of_read(self._context.delivery, entries, retried)
        self._may_expire |= may_expire
        sizes, bytes_max = [entry.size for entry in found], self._bytes_max
        # If the read contains an oversized entry, accept one entry at a time. Dead-lettering such
        # an entry can raise, and in that case, the entries after it must not be accepted yet.
        step = 1 if max(sizes) > bytes_max else len(found)
        for start in range(0, len(found), step):
            taken = found[start : start + step]
            self._index(taken)
            if taken[0].size > bytes_max and self._verdicts.dead_letter_oversized(taken[0]):
                continue
            self._queue(taken)
        return sum(sizes)

    def _index(self, entries: list[FetchedEntry]) -> None:
        """Write entries into the slot's table, which must have enough free indexes for them."""
        count = len(entries)
        if count > len(self._indexes):
            free = bytes(self._table).translate(_IS_FREE)
            self._indexes = list(compress(range(len(free)), free))
        indexes, self._indexes = self._indexes[:count], self._indexes[count:]
        for entry, index in zip(entries, indexes, strict=True):
            entry.index = index
        # If the indexes are consecutive, as in most reads, one call writes all entries.
        if entries and indexes[-1] - indexes[0] < count:
            self._slot.put(indexes[0], *[entry.place for entry in entries])
        else:
            for entry in entries:
                self._slot.put(entry.index, entry.place)

    def _queue(self, entries: list[FetchedEntry]) -> None:
        """Queue entries for the lanes, except those that must wait for a failed message.

        An entry waits if the failed message has the same key. It is then added to the held entries
        of the key instead.
        """
        if self._held is None:
            self._bytes_in_flight += sum([entry.size for entry in entries])
            self._ordering.add(entries)
            return
        for entry in entries:
            if self._held.may_run(entry, queued=self._ordering.is_key_taken(entry.key)):
                self._bytes_in_flight += entry.size
                self._ordering.add([entry])

    # --- entries in flight, and room for more ---

    @property
    def in_flight(self) -> InFlight:
        """The number of running, waiting and startable entries."""
        return InFlight(len(self._running), self._ordering.waiting, self._startable)

    @property
    def places(self) -> Collection[bytes]:
        """The places of the running entries and of the held ones."""
        held = () if self._held is None else self._held.places
        return [*(entry.place for entry in self._running), *held]

    @property
    def _startable(self) -> int:
        """The number of ready entries that start in this turn, so that they need no room to wait.

        For example, suppose that 3 of 8 lanes are free, `prefetch_max` is 16, and 10 entries are
        ready. Then 3 entries are startable and 7 have to wait, so `room()` returns 9 (16 - 7).
        `room(4)` returns 0 for either of two reasons: if runs are slow, each free lane already has
        an entry, and if they are quick, 7 entries will be ready, which is more than 4.
        """
        if self._ack_each or self._held is not None or not self._starts_together:
            return 0
        return min(self._lanes_free, self._ordering.ready)

    def room(self, ready: int | None = None) -> int:
        """Return how many more entries may be fetched from each stream, or 0 for none.

        If `ready` is given, also return 0 while that many entries are ready to start, or while slow
        runs occupy all lanes.
        """
        if self._is_full() or (ready is not None and not self._is_running_low(ready)):
            return 0
        waiting, held = self._ordering.waiting, self._held
        # Divide the free indexes by two, because a read can return this number of entries from each
        # of the two streams.
        room = min(self._consumer.prefetch_max - waiting + self._startable, self._free_indexes // 2)
        return max(1, room if held is None else min(room, held.room(waiting)))

    def _is_full(self) -> bool:
        """Return True if the number or the size of the fetched entries has reached its limit."""
        consumer, waiting = self._consumer, self._ordering.waiting
        full = self._held is not None and self._held.is_full(waiting)
        full |= self._bytes_in_flight >= consumer.prefetch_bytes
        return full or waiting - self._startable >= consumer.prefetch_max

    def _is_running_low(self, count: int) -> bool:
        """Return True if fewer than `count` entries are ready, and more should be fetched now.

        For a quick handler, entries are fetched before a lane is free. For a slow handler, they
        stay in the stream until a lane is free, so that another worker can fetch them. For the same
        reason, no more entries are fetched than the rate limit allows to start within a second.
        """
        if self._held is not None:
            # Do not fetch an entry for every lane, so that some lanes stay free for held keys that
            # become due.
            return bool(self._free) and self._ordering.ready <= self._consumer.lanes // 2
        quick, begin = self._run_ns < WORK_IN_FLIGHT_NS, self._startable
        ready = self._ordering.ready - begin
        return (quick or len(self._free) > begin) and ready < min(count, self._prefetch.rated)

    @property
    def _free_indexes(self) -> int:
        """The number of entries that can still be added to the slot's table."""
        return bytes(self._table).count(CLEARED)

    def next_due(self, now: int, *, held: bool = True) -> int | None:
        """Return the time (`now_ns`) at which to try to start another entry.

        Return None if no entry can start before an event, such as the end of a run. If `held` is
        false, held entries are ignored.
        """
        due = None
        if held and self._held is not None and self._may_take_due(self._held):
            due = self._held.next_due()
        if self._free and self._ordering.ready:
            gated = self._gates.held_ns(now)
            if gated or self._may_start():  # the gate that delayed the entry may be open by now
                due = min(due or now + gated, now + gated)
        return due

    # --- running ---

    def start(self, *, held: bool = True) -> None:
        """Start a ready entry in each free lane.

        If `held` is true, this includes held entries that are due.
        """
        if self._ack_each and self._settler.since_ns:
            self._settler.flush()  # settle each finished run before its lane starts another
        if held and self._held is not None:
            self._take_due(self._held)
        ordering = self._ordering
        if ordering.ready:
            self._gates.await_trust(now_ns())
        if self._starts_together:
            begun = ordering.take(self._lanes_free)
            self._mark_running(begun)
        else:
            begun = self._start_each()
        if begun:
            self._lanes.start(begun)

    def _take_due(self, held: HeldKeys) -> None:
        """Queue the first entry of each held key that is due, as long as lanes are free."""
        while self._may_take_due(held) and self._free_indexes and (found := held.take(1)):
            entry = found[0]
            held.mark_for_rerun(entry)
            self._index([entry])
            entry.interrupted = False
            self._bytes_in_flight += entry.size
            self._ordering.add([entry])

    def _may_take_due(self, held: HeldKeys) -> bool:
        if not held.keys or (held.one_by_one and self.in_flight.entries):
            return False
        return self._ordering.ready < len(self._free)

    @property
    def _starts_together(self) -> bool:
        """True if entries can start together, because none has an expiry and there are no gates.

        In that case, only `_lanes_free` limits how many of them start.
        """
        return not (self._may_expire or self._gates.has_gates)

    def _start_each(self) -> list[FetchedEntry]:
        begun = []
        while self._may_start():
            (entry,) = self._ordering.take(1)
            if entry.message.expires_at is not None and self._verdicts.skip_expired(entry):
                self._remove_finished([entry])
            else:
                self._mark_running([entry])
                self._gates.note_start(entry.started_ns)
                begun.append(entry)
        return begun

    @property
    def _lanes_free(self) -> int:
        """The number of runs that the free lanes and `max_messages` allow to start now."""
        free, limit = len(self._free), self._consumer.max_messages
        if not limit:
            return free
        # Start no more messages than the process may still handle. When it has reached
        # `max_messages`, it exits as soon as the running messages have finished.
        return min(free, max(0, limit - self._context.counts.handled - len(self._running)))

    def _may_start(self) -> bool:
        if not self._ordering.ready or not self._lanes_free:
            return False
        return self._gates.admits(len(self._running))

    def _mark_running(self, entries: list[FetchedEntry]) -> None:
        """Assign lanes to entries, and mark the entries as RUNNING.

        This must happen before the lanes start the entries, so that a crash is charged to them.
        """
        slot, free = self._slot, self._free
        words, lanes, sequences, states = slot.words, slot.lanes, slot.sequences, slot.states
        sequence, now = words[WORD_RUN_SEQ], now_ns()
        words[WORD_RUN_SEQ] = sequence + len(entries)
        for entry in entries:
            sequence += 1
            lane = entry.lane = free.pop()
            index = lanes[2 * lane] = entry.index
            lanes[2 * lane + 1] = entry.started_ns = now
            sequences[lane] = entry.sequence = sequence
            states[index] = RUNNING
        self._running.update(entries)
        self._context.counts.delays.note_all(entries, now)

    # --- finished runs ---

    def collect_finished(self) -> None:
        """Collect the runs that have finished since the last call, and determine their verdicts."""
        if ended := self._lanes.ends.take():
            self._collect(ended)

    def _collect(self, ended: list[FetchedEntry]) -> None:
        counts, lanes, free = self._context.counts, self._slot.lanes, self._free
        times, total, handled = counts.times, 0, list[FetchedEntry]()
        for entry in ended:
            elapsed = entry.ended_ns - entry.started_ns
            times[(elapsed >> 10).bit_length()] += 1
            total += elapsed
            if entry.end is None:
                handled.append(entry)
            else:
                # First record the handled entries that finished before this one, because the guards
                # must see all runs in the order in which they finished.
                self._note_handled(handled)
                handled = []
                self._note_failed(entry, entry.end)
            # Free the lane only now, because the entry counts as running until its verdict is
            # recorded.
            lane = entry.lane
            lanes[2 * lane + 1] = 0
            free.append(lane)
        self._note_handled(handled)
        counts.times_ns += total
        self._run_ns += (total / len(ended) - self._run_ns) * (1 - RUN_DECAY ** len(ended))
        self._remove_finished(ended)

    def _note_handled(self, entries: list[FetchedEntry]) -> None:
        if entries:
            self._running.difference_update(entries)
            self._context.counts.handled += len(entries)
            self._settler.ack_all(entries)

    def _remove_finished(self, entries: list[FetchedEntry]) -> None:
        """Record that entries are finished, with or without a run, which makes their keys free."""
        self._bytes_in_flight -= sum([entry.size for entry in entries])
        self._ordering.mark_finished(entries)
        if self._held is not None:
            self._held.finish_runs(entries)

    def _note_failed(self, entry: FetchedEntry, error: BaseException) -> None:
        """Find and record the verdict on a failed run."""
        self._running.discard(entry)
        self._context.counts.handled += 1
        entry.end = None  # break the reference cycle traceback -> entry
        entry.restore()
        self._inspected = entry
        # Failures of quick runs are settled together, and other failures immediately. The serial
        # executor does the same.
        if entry.ended_ns - entry.started_ns > QUICK_RUN_NS:
            self._settler.make_failures_due()
        if self._verdicts.settle_failure(entry, error):
            assert self._held is not None
            followers = self._ordering.take_waiting(entry)
            self._bytes_in_flight -= sum([other.size for other in followers])
            self._held.keep(entry, followers)
        self._inspected = None

    def _on_soft_limit(self, _number: int, _frame: object) -> None:
        # All runs have the same limit. So if the supervisor found that one run exceeds it, all runs
        # that started before that run also exceed it.
        limit, last = self._context.limit, self._slot.soft_kill_seq
        for entry in list(self._running):
            if entry.sequence <= last and not entry.interrupted:
                entry.interrupted = True
                self._lanes.interrupt(entry, limit.error())
        inspected = self._inspected if limit.in_handler else None
        if inspected and inspected.sequence <= last and not inspected.interrupted:
            inspected.interrupted, limit.in_handler = True, False
            raise limit.error()

    def close(self) -> None:
        """Close the lanes, unless handlers are still running.

        Handlers can only be running if the process exits because of an error in the worker itself.
        Their entries are marked as not started, so that the exit is not charged to them. An entry
        whose verdict is being determined stays RUNNING, because the user's code that inspects its
        error may have caused the exit.
        """
        if not self._running:
            self._lanes.close()
        states = self._slot.states
        for entry in self._running:
            if states[entry.index] == RUNNING:
                states[entry.index] = WAITING
