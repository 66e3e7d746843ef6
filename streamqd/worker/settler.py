"""What a worker still owes Redis: acknowledgements, retries and dead letters, sent in batches.

The decision was made in `policy.settlement`; this carries it out. Until an entry's settlement is
confirmed, its state byte in the scoreboard says so (DONE or FAILED), and the entry stays here.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import NamedTuple

from streamqd import logs
from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind
from streamqd.model import Lease
from streamqd.scoreboard import BUCKETS, CLEARED, DONE, FAILED, WorkerSlot, now_ns
from streamqd.store import messages
from streamqd.store.client import Connection
from streamqd.store.fetch import CONSUMER
from streamqd.store.items import portions
from streamqd.store.keys import Keys
from streamqd.store.messages import place_of
from streamqd.store.replies import accepted
from streamqd.store.scripts import Call, Reply
from streamqd.worker.dead_letters import within_limit
from streamqd.worker.fenced import FencedCalls

BATCH_MAX = 128  # items of one settle script; bounds how long one call occupies the server
DEFER_SECONDS = 1.0  # between two tries to settle what the server refused

# The server takes no writes at all for now. Any other refusal may be about one entry or one key.
_NO_WRITES = (RefusalKind.FULL, RefusalKind.NO_REPLICAS)


class FailedEntry(NamedTuple):
    """One entry on its way to a retry or to the dead letters.

    `fields` are the changed fields, `body` all fields of the entry as they were read: needed only
    when the server cannot give them, because the entry has been trimmed away or is too wide.
    `size` of these in bytes, about. `read` names the read that has brought it, 0 where it was
    listed, or taken one by one.
    """

    place: bytes
    at: int  # index in the batch
    delay: float | None  # seconds; None = dead
    fields: dict[bytes, bytes]
    body: list[bytes]
    size: int
    read: int = 0

    def bytes_moved(self) -> int:
        """Return how many bytes go into its next place, about."""
        return self.size + sum(map(len, self.fields.values()))

    def whole(self) -> FailedEntry:
        """Return the item with all the fields that its next place gets."""
        body = within_limit(dict(zip(self.body[::2], self.body[1::2], strict=False)))
        return self._replace(fields={b"payload": b"", **body, **self.fields})


@dataclass
class Settler:
    """Collects verdicts and settles them. Lives as long as its worker, over reconnects."""

    link: Connection
    keys: Keys
    lease: Lease
    slot: WorkerSlot

    def __post_init__(self) -> None:
        self._calls = FencedCalls(self.link, self.slot)
        self.main_acks: list[bytes] = []
        self.retry_acks: list[bytes] = []
        self._ack_indexes: list[int] = []
        # Acknowledgements of entries that have counters in Redis also clear those, so they never
        # ride on the next read.
        self._with_counters: list[tuple[bytes, int]] = []
        self.items: list[FailedEntry] = []
        self.read = 0  # generation of the current read; see `FailedEntry`
        self.since_ns = 0  # when the oldest unsettled verdict was noted, 0 = there is none
        # Failures in place of entries that stay in hand, and when they run again.
        self._notes: dict[bytes, tuple[int, int]] = {}
        self.kept = 0  # how many entries stay in hand for a later run
        self._deferred: set[bytes] = set()  # places of the items that were refused
        self._deferred_until_ns = 0

    # --- noting ---

    def ack(self, entry_id: bytes, index: int, now: int, retried: bool, has_counters: bool) -> None:
        """Note that an entry is done."""
        if has_counters:
            self._with_counters.append((place_of(entry_id, retried=retried), index))
        else:
            (self.retry_acks if retried else self.main_acks).append(entry_id)
            self._ack_indexes.append(index)
        if not self.since_ns:
            self.since_ns = now

    def fail(self, item: FailedEntry, now: int) -> None:
        """Note that an entry is to be retried or dead-lettered."""
        self.items.append(item)
        if not self.since_ns:
            self.since_ns = now

    def note(self, place: bytes, failures: int, due: int, now: int) -> None:
        """Note how often an entry has failed that stays in hand, and when it runs again."""
        self._notes[place] = failures, due
        if not self.since_ns:
            self.since_ns = now

    @property
    def owed(self) -> int:
        """How many entries are not settled yet."""
        return len(self._ack_indexes) + len(self._with_counters) + len(self.items)

    @property
    def acks_owed(self) -> bool:
        """Whether acknowledgements wait for the next exchange."""
        return bool(self._ack_indexes or self._with_counters)

    @property
    def only_plain_acks(self) -> bool:
        """Whether all that is owed may ride on the next read."""
        return not (self._with_counters or self.items or self._notes)

    @property
    def deferred_places(self) -> list[bytes]:
        """Places of entries that stay in hand over a batch, because Redis refused to take them."""
        return [item.place for item in self.items]

    def renumber_deferred(self, first: int) -> None:
        """The slot has a new batch, with the deferred entries at its end, from index `first`."""
        self.read = 0
        self.items = [
            item._replace(at=first + offset, read=0) for offset, item in enumerate(self.items)
        ]
        for item in self.items:
            self.slot.states[item.at] = FAILED

    # --- settling ---

    def acks_confirmed(self, now: int) -> None:
        """The acknowledgements that rode on a read were executed."""
        count = len(self._ack_indexes)
        if not count:
            return
        self.slot.add("acked", count)
        self._observe_ack(now, count)
        self._acks_settled()
        if not self._notes:
            self._restart_clock()

    def flush(self) -> None:
        """Settle everything by scripts, acknowledgements first: they may be what frees memory.

        Retries and dead letters that Redis refuses are deferred. Raises Fenced, RedisUnavailable,
        and RedisRefused when acknowledging is refused.
        """
        self._flush_acks()
        self.flush_verdicts()

    def flush_last(self) -> None:
        """`flush` before the worker ends; what is deferred is tried once more.

        An unsettled failure runs again at the next owner, so a lost connection or a lost answer is
        worth one retry on a new connection. It gives up if the server is unreachable.
        """
        self._deferred_until_ns = min(self._deferred_until_ns, now_ns())
        connected = self.link.connected
        try:
            self.flush()
        except RedisUnavailable as error:
            if not (error.sent or connected):
                raise
            self.flush()

    def try_to_flush(self) -> None:
        """Settle what can be settled now; the rest waits in the slot as before. Raises Fenced."""
        with contextlib.suppress(RedisUnavailable, RedisRefused):
            self.flush()

    def _flush_acks(self) -> None:
        if not self._ack_indexes:
            return
        places = [place_of(i, retried=False) for i in self.main_acks]
        places += [place_of(i, retried=True) for i in self.retry_acks]
        for start in range(0, len(places), BATCH_MAX):
            call = messages.ack(self.keys, self.lease, places[start : start + BATCH_MAX])
            self._calls.run(call)
        self.acks_confirmed(now_ns())

    def flush_verdicts(self) -> None:
        """Settle retries, dead letters and charged acknowledgements; plain ones may ride."""
        self._flush_counted_acks()
        if self._notes:
            self._write_notes()
        if self.items and now_ns() >= self._deferred_until_ns:
            self._settle_items()
        self._restart_clock()

    def _flush_counted_acks(self) -> None:
        """Acknowledge the entries whose counters go with them, a call for each part.

        What has been confirmed is not owed any longer, also when a later part is not answered.
        """
        while self._with_counters:
            part = self._with_counters[:BATCH_MAX]
            call = messages.ack(self.keys, self.lease, [], charged=[place for place, _ in part])
            self._calls.run(call)
            self.slot.add("acked", len(part))
            for _, index in part:
                self.slot.states[index] = CLEARED
            del self._with_counters[:BATCH_MAX]

    def _write_notes(self) -> None:
        """Write the failures in place down. A server without memory is told with the next ones."""
        now = now_ns()
        notes = [
            (place, failures, max(0, due - now) / 1e9)
            for place, (failures, due) in self._notes.items()
        ]
        for start in range(0, len(notes), BATCH_MAX):
            call = messages.note(self.keys, self.lease, notes[start : start + BATCH_MAX])
            try:
                self._calls.run(call)
            except RedisRefused as error:
                if error.kind not in _NO_WRITES:
                    raise
                return
        self._notes.clear()

    def _settle_items(self) -> None:
        deferred: list[FailedEntry] = []
        batches = _batches(self.items)
        while batches:
            calls = [self._call(dead, items) for dead, items in batches]
            replies = self._calls.run_many(calls)
            again: list[_Batch] = []
            for (dead, items), reply in zip(batches, replies, strict=True):
                if not isinstance(reply, RedisRefused):
                    again += _batches(self._moved(reply, items, dead=dead))
                elif len(items) > 1 and reply.kind not in _NO_WRITES:
                    # Perhaps only one of them is refused: it must not hold the others.
                    again += [(dead, [item]) for item in items]
                else:
                    deferred += items
                    self._defer(reply, items)
            batches = again
        self.items = deferred

    def _call(self, dead: bool, items: list[FailedEntry]) -> Call:
        if dead:
            return messages.dead(
                self.keys,
                self.lease,
                [(item.place, item.fields) for item in items],
                adjacent=_adjacent(items),
            )
        return messages.retry(
            self.keys,
            self.lease,
            [(item.place, item.delay or 0.0, item.fields) for item in items],
            adjacent=_adjacent(items),
        )

    def _moved(self, reply: Reply, items: list[FailedEntry], *, dead: bool) -> list[FailedEntry]:
        """Record the reply; return the items that must be sent again with their bodies."""
        again = []
        moved = 0
        settled = messages.SettledReply.parse(reply)
        for item, word in zip(items, settled.words, strict=True):
            if word == "GHOST":
                again.append(item.whole())
                continue
            # GONE: an earlier copy of this call did it, or someone acknowledged it by hand.
            moved += word == "MOVED"
            self.slot.states[item.at] = CLEARED
        self.slot.add("dead" if dead else "retried", moved)
        due = settled.next_due_unix_ms
        if due is not None:
            # The script answered the earliest of all delayed entries: nothing is due before it.
            self.slot.next_due_unix_ms = due
        return again

    def _defer(self, error: RedisRefused, items: list[FailedEntry]) -> None:
        """Let what Redis does not take wait: it stays pending, others go on."""
        if not self._deferred_until_ns:
            logs.event(
                "message.parked",
                logging.WARNING,
                unit=self.lease.unit,
                entries=len(items),
                error=str(error),
            )
        fresh = {item.place for item in items} - self._deferred
        self.slot.add("parked", len(fresh))
        self._deferred |= fresh
        self._deferred_until_ns = now_ns() + int(DEFER_SECONDS * 1e9)

    def pending_differs(self) -> bool:
        """Compare the server's count of our pending entries with what is owed."""
        unit = self.lease.unit
        commands = [
            ("XPENDING", self.keys.source(*unit), unit.group),
            ("XPENDING", self.keys.retry_stream(*unit), unit.group),
        ]
        pending = 0
        for reply in accepted(self.link.pipeline(commands)):
            ours = CONSUMER.encode()
            pending += sum(int(count) for name, count in reply[3] or () if name == ours)
        return pending != self.owed + self.kept

    # --- book-keeping ---

    def _acks_settled(self) -> None:
        states, indexes = self.slot.states, self._ack_indexes
        first, end = min(indexes), max(indexes) + 1
        if end - first == len(indexes) == bytes(states[first:end]).count(DONE):
            states[first:end] = bytes([CLEARED]) * len(indexes)  # the usual case
        else:
            for index in indexes:
                if states[index] == DONE:
                    states[index] = CLEARED
        self.main_acks.clear()
        self.retry_acks.clear()
        self._ack_indexes.clear()

    def _restart_clock(self) -> None:
        if not self.items:
            self._deferred_until_ns = 0
            self._deferred.clear()
        waiting = (
            self._ack_indexes or self._with_counters or (self.items and not self._deferred_until_ns)
        )
        if not waiting:
            self.since_ns = 0

    def _observe_ack(self, now: int, count: int) -> None:
        # One clock reading per batch: every entry is booked with the wait of the oldest, so the
        # histogram is an upper bound.
        waited = max(0, now - self.since_ns) if self.since_ns else 0
        histogram = self.slot.ack_histogram
        histogram[min((waited >> 10).bit_length(), len(BUCKETS))] += count
        histogram[len(BUCKETS) + 1] += waited * count


# Whether they are dead, and so many items as one call takes.
_Batch = tuple[bool, list[FailedEntry]]


def _batches(items: list[FailedEntry]) -> list[_Batch]:
    batches: list[_Batch] = []
    for dead in (False, True):
        alike = [item for item in items if (item.delay is None) is dead]
        batches += [(dead, part) for part in portions(alike, FailedEntry.bytes_moved, BATCH_MAX)]
    return batches


def _adjacent(items: list[FailedEntry]) -> bool:
    """Whether the items lie side by side in their streams: then they did in the read."""
    first = items[0]
    return first.read > 0 and all(
        item.read == first.read and item.at == at for at, item in enumerate(items, first.at)
    )
