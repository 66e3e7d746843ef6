"""Several runs at once: lanes are given to the entries in hand, and every end becomes a verdict."""

from __future__ import annotations

from collections.abc import Iterable

from streamqd.config import Consumer
from streamqd.message import Delivery, restored
from streamqd.scoreboard import (
    RUNNING,
    SETTLED,
    WORD_RUN_SEQ,
    WORD_TRUSTED_UNTIL,
    WorkerSlot,
    now_ns,
)
from streamqd.worker.control_channel import ControlChannel
from streamqd.worker.lanes import RunningMessage, Runs
from streamqd.worker.ordering import Ordering
from streamqd.worker.prefetch import WORK_IN_HAND_NS, rated
from streamqd.worker.runs import Runner
from streamqd.worker.settler import Settler


class SeveralRunner(Runner):
    """Knows every entry in hand: those that wait, and those that run. Its lanes do the work.

    The slot's batch is a table here, in which an entry keeps its index until it is settled.
    """

    lanes: Runs  # made at boot, when the kind of the handler is known

    def __init__(
        self,
        consumer: Consumer,
        delivery: Delivery,
        slot: WorkerSlot,
        gate: ControlChannel,
        settler: Settler,
    ) -> None:
        super().__init__(consumer, delivery, slot, gate, settler)
        self.ordering: Ordering[RunningMessage] = Ordering(by_key=consumer.order == "key")
        self.running: dict[int, RunningMessage] = {}  # by run sequence
        self.bytes_in_hand = 0
        self.run_ns = 0.0  # moving mean
        self.alone = False  # nothing comes into hand beside what is there
        self.may_expire = False  # whether a message that has come might have an end
        self._rated = rated(consumer)
        self._free = list(range(consumer.lanes))
        self._indexes: list[int] = []  # some that are free
        self._judged: RunningMessage | None = None  # whose verdict is being found
        slot.open_table()

    # --- what is in hand ---

    @property
    def free_lanes(self) -> int:
        """How many more could run."""
        return len(self._free)

    @property
    def free_indexes(self) -> int:
        """How many more entries could be in hand."""
        return bytes(self.slot.states).count(SETTLED)

    @property
    def about_to_begin(self) -> int:
        """How many `start_ready` would begin now; 0 where it may do anything else, or wait."""
        return min(self._startable, self.ordering.ready) if self._begins_at_once else 0

    @property
    def _waiting_on(self) -> int:
        """How many wait and are not about to begin."""
        return self.ordering.waiting - self.about_to_begin

    @property
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""
        return self.consumer.prefetch_max - self._waiting_on

    def wants(self, count: int) -> bool:
        """Whether fewer than so many will be ready, and what is ready does not last for long.

        Quick handlers find the next ones there when their lanes are free. What is slow lies in the
        stream until a lane is free, and what the rate lets wait, where another worker may get it.
        """
        quick, begin = self.run_ns < WORK_IN_HAND_NS, self.about_to_begin
        ready = self.ordering.ready - begin
        return (quick or self.free_lanes > begin) and ready < min(count, self._rated)

    def is_full(self) -> bool:
        """Whether nothing more may come into hand."""
        return self._waiting_on >= self.consumer.prefetch_max

    @property
    def spent(self) -> bool:
        """Whether the worker has handled as many messages as it may."""
        return 0 < self.consumer.max_messages <= self.handled

    def admit(self, place: bytes) -> int:
        """Write an entry into the slot; return its index."""
        return self.admit_all([place])[0]

    def admit_all(self, places: list[bytes]) -> list[int]:
        """Write entries into the slot; return their indexes. There must be room for them."""
        count = len(places)
        if count > len(self._indexes):
            states = enumerate(bytes(self.slot.states))
            self._indexes = [index for index, state in states if state == SETTLED]
        indexes, self._indexes = self._indexes[:count], self._indexes[count:]
        if places and indexes[-1] - indexes[0] < count:  # side by side: the usual case
            self.slot.put(indexes[0], *places)
        else:
            for index, place in zip(indexes, places, strict=True):
                self.slot.put(index, place)
        return indexes

    def add(self, entry: RunningMessage) -> None:
        """Let an entry wait for its turn."""
        self.add_all([entry])

    def add_all(self, entries: list[RunningMessage]) -> None:
        """Let entries wait for their turn."""
        self.bytes_in_hand += sum([entry.size for entry in entries])
        self.ordering.add_all(entries)

    def forget_waiting(self) -> None:
        """Drop what has not begun. It stays pending."""
        for entry in self.ordering.drop():
            self.slot.states[entry.index] = SETTLED
            self.bytes_in_hand -= entry.size

    # --- running ---

    def start_ready(self) -> None:
        """Begin with as many entries as there are lanes for."""
        ordering = self.ordering
        if ordering.ready and now_ns() > self.slot.words[WORD_TRUSTED_UNTIL]:
            self.gate.await_trust()
        if self._begins_at_once:
            begun = ordering.take(self._startable)
            self._mark_running(begun)
        else:
            begun = self._begin_each()
        if begun:
            self.lanes.start(begun)

    @property
    def _begins_at_once(self) -> bool:
        """Whether nothing but lanes decides what begins."""
        return not (self.may_expire or self.guards is not None or self.throttle is not None)

    def _begin_each(self) -> list[RunningMessage]:
        begun = []
        while self._may_begin() and (entry := self.ordering.next()) is not None:
            message = entry.message
            if message.expires_at is not None and self.pass_over(
                entry.index, message, entry.retried, entry.crashes
            ):
                self._all_over([entry])
            else:
                self._mark_running([entry])
                if self.throttle is not None:
                    self.throttle.begun(entry.started_ns)
                begun.append(entry)
        return begun

    @property
    def _startable(self) -> int:
        """How many may begin at most, as far as lanes and the life of the process go."""
        free, limit = len(self._free), self.consumer.max_messages
        # The process ends when those that run have ended.
        return min(free, max(0, limit - self.handled - len(self.running))) if limit else free

    def _may_begin(self) -> bool:
        guards = self.guards
        if not self.ordering.ready or not self._startable:
            return False
        if guards is None and self.throttle is None:
            return True
        return not self.throttled and (guards is None or guards.room(len(self.running)) != 0)

    @property
    def throttled(self) -> float:
        """Seconds for which the rate, or a circuit, holds what could begin; 0 when nothing does."""
        if not self.ordering.ready:
            return 0.0
        if self.guards is not None and (left := self.guards.seconds()):
            return left
        return 0.0 if self.throttle is None else self.throttle.left_ns(now_ns()) / 1e9

    def patience(self, seconds: float) -> float:
        """How much of a wait of so many seconds is over before something could begin."""
        if not self._free or not self.ordering.ready:
            return seconds
        if throttled := self.throttled:
            return min(seconds, throttled)
        return 0.0 if self._may_begin() else seconds  # what held it a moment ago may be over

    def _mark_running(self, entries: list[RunningMessage]) -> None:
        """Give entries their lanes, and write down that they run: what is in doubt is to blame."""
        slot, free, running = self.slot, self._free, self.running
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
            running[sequence] = entry

    def collect(self) -> None:
        """Note the verdicts on the runs that have ended."""
        if ended := self.lanes.ended():
            self._collect(ended)
        if self.guards is not None:
            self.guards.hear()

    def _collect(self, ended: list[RunningMessage]) -> None:
        slot, free, running = self.slot, self._free, self.running
        lanes, sequences, times, ack = slot.lanes, slot.sequences, self._times, self.settler.ack
        mean, total = self.run_ns, 0
        for entry in ended:
            lane, at_ns = entry.lane, entry.ended_ns
            del running[entry.sequence]
            elapsed = at_ns - entry.started_ns
            times[(elapsed >> 10).bit_length()] += 1
            mean += (elapsed - mean) / 8
            total += elapsed
            self.handled += 1
            if entry.end is None:
                ack(entry.place[2:], entry.index, at_ns, entry.retried, entry.charged)
            else:
                self._note_end(entry, entry.end)
            # Last: while a verdict is found the entry runs, by its start and its number.
            lanes[2 * lane + 1] = sequences[lane] = 0
            free.append(lane)
        self.run_ns = mean
        self._times_ns += total
        self._all_over(ended)

    def _all_over(self, entries: list[RunningMessage]) -> None:
        """Entries that were given out are in hand no more, run or not: their keys go on."""
        self.bytes_in_hand -= sum([entry.size for entry in entries])
        self.ordering.all_ended(entries)

    def _note_end(self, entry: RunningMessage, error: BaseException) -> None:
        """Note the verdict on a run that has failed."""
        entry.end = None  # a traceback knows the entry: a circle
        retried, place = entry.retried, entry.place
        message = restored(entry.message, place[2:], retried=retried, noted=entry.noted)
        self.slot.states[entry.index] = RUNNING
        self._judged = entry
        self._failed(entry.index, message, retried, entry.crashes + message.crash_count, error)
        self._judged = None

    def places(self) -> Iterable[bytes]:
        """The places of what runs."""
        return [entry.place for entry in self.running.values()]

    def _on_soft_limit(self, _number: int, _frame: object) -> None:
        # All runs have one limit: those that began before the one that is meant are over it too.
        for sequence, entry in list(self.running.items()):
            if sequence <= self.slot.soft_kill_seq and not entry.interrupted:
                entry.interrupted = True
                self.lanes.interrupt(entry, self.soft_timeout())
        judged = self._judged if self._in_handler else None
        if judged and judged.sequence <= self.slot.soft_kill_seq and not judged.interrupted:
            judged.interrupted, self._in_handler = True, False
            raise self.soft_timeout()
