"""Several runs at once: lanes are given to the entries in hand, and every end becomes a verdict."""

from __future__ import annotations

from collections.abc import Iterable

from streamqd import handlers
from streamqd.config import Consumer
from streamqd.message import Delivery
from streamqd.scoreboard import (
    RUNNING,
    SETTLED,
    WORD_RUN_SEQ,
    WORD_TRUSTED_UNTIL,
    Slot,
    now_ns,
)
from streamqd.worker.gate import Gate
from streamqd.worker.lanes import Entry, Lanes
from streamqd.worker.ordering import Ordering
from streamqd.worker.runs import Runner
from streamqd.worker.settler import Settler


class SeveralRunner(Runner):
    """Knows every entry in hand: those that wait, and those that run. Its lanes do the work.

    The slot's batch is a table here, in which an entry keeps its index until it is settled.
    """

    lanes: Lanes  # made at boot, when the kind of the handler is known

    def __init__(
        self, consumer: Consumer, delivery: Delivery, slot: Slot, gate: Gate, settler: Settler
    ) -> None:
        super().__init__(consumer, delivery, slot, gate, settler)
        self.ordering: Ordering[Entry] = Ordering(by_key=consumer.order == "key")
        self.running: dict[int, Entry] = {}  # by run sequence
        self.bytes_in_hand = 0
        self.run_ns = 0.0  # moving mean
        self.alone = False  # nothing comes into hand beside what is there
        self._free = list(range(consumer.lanes))
        self._indexes: list[int] = []  # some that are free
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
    def room(self) -> int:
        """How many more entries of each stream may come into hand."""
        return self.consumer.prefetch_max - self.ordering.waiting

    def is_full(self) -> bool:
        """Whether nothing more may come into hand."""
        return self.ordering.waiting >= self.consumer.prefetch_max

    @property
    def spent(self) -> bool:
        """Whether the worker has handled as many messages as it may."""
        return 0 < self.consumer.max_messages <= self.handled

    def admit(self, place: bytes) -> int:
        """Write an entry into the slot; return its index."""
        if not self._indexes:
            states = enumerate(bytes(self.slot.states))
            self._indexes = [index for index, state in states if state == SETTLED]
        index = self._indexes.pop()
        self.slot.put(index, place)
        return index

    def add(self, entry: Entry) -> None:
        """Let an entry wait for its turn."""
        self.bytes_in_hand += entry.size
        self.ordering.add(entry)

    def forget_waiting(self) -> None:
        """Drop what has not begun. It stays pending."""
        for entry in self.ordering.drop():
            self.slot.states[entry.index] = SETTLED
            self.bytes_in_hand -= entry.size

    # --- running ---

    def start_ready(self) -> None:
        """Begin with as many entries as there are lanes for."""
        if self.ordering.ready and now_ns() > self.slot.words[WORD_TRUSTED_UNTIL]:
            self.gate.await_trust()
        begun = []
        while self._may_begin() and (entry := self.ordering.next()) is not None:
            message = entry.message
            if message.expires_at is not None and self.pass_over(
                entry.index, message, entry.retried, entry.crashes
            ):
                self._over(entry)
            else:
                self._mark_running(entry)
                if self.throttle is not None:
                    self.throttle.begun(entry.started_ns)
                begun.append(entry)
        if begun:
            self.lanes.start(begun)

    def _may_begin(self) -> bool:
        guards, running, limit = self.guards, len(self.running), self.consumer.max_messages
        if not self._free or not self.ordering.ready:
            return False
        if limit and self.handled + running >= limit:
            return False  # the process ends when these have ended
        if guards is None and self.throttle is None:
            return True
        return not self.throttled and (guards is None or guards.room(running) != 0)

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

    def _mark_running(self, entry: Entry) -> None:
        slot, words = self.slot, self.slot.words
        lane = entry.lane = self._free.pop()
        now = entry.started_ns = now_ns()
        sequence = entry.sequence = words[WORD_RUN_SEQ] + 1
        slot.lanes[2 * lane] = entry.index
        slot.lanes[2 * lane + 1] = now
        slot.sequences[lane] = sequence
        words[WORD_RUN_SEQ] = sequence
        slot.states[entry.index] = RUNNING
        self.running[sequence] = entry

    def collect(self) -> None:
        """Note the verdicts on the runs that have ended."""
        for entry, end, at_ns in self.lanes.ended():
            self.slot.lanes[2 * entry.lane + 1] = 0
            self.slot.sequences[entry.lane] = 0
            self._free.append(entry.lane)
            del self.running[entry.sequence]
            self._note(entry, end, at_ns)
            self._over(entry)
        if self.guards is not None:
            self.guards.hear()

    def _over(self, entry: Entry) -> None:
        """An entry that was given out is in hand no more, run or not: its key goes on."""
        self.bytes_in_hand -= entry.size
        self.ordering.ended(entry)

    def _note(self, entry: Entry, end: object, at_ns: int) -> None:
        elapsed = at_ns - entry.started_ns
        self._note_time(elapsed)
        self.run_ns += (elapsed - self.run_ns) / 8
        self.handled += 1
        message, error = entry.message, None if end is None else handlers.error_of(end)
        if error is None:
            self.settler.ack(message.id_bytes, entry.index, at_ns, entry.retried, entry.charged)
        else:
            crashes = entry.crashes + message.crash_count
            self._failed(entry.index, message, entry.retried, crashes, error)

    def places(self) -> Iterable[bytes]:
        """The places of what runs."""
        return [entry.place for entry in self.running.values()]

    def _on_soft_limit(self, _number: int, _frame: object) -> None:
        # All runs have one limit: those that began before the one that is meant are over it too.
        for sequence, entry in list(self.running.items()):
            if sequence <= self.slot.soft_kill_seq and not entry.interrupted:
                entry.interrupted = True
                self.lanes.interrupt(entry, self.soft_timeout())
