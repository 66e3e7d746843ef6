"""Send acknowledgments, retries, dead letters and failure counts to Redis, in parts.

`policy.settlement` decides what happens to a message, and `Settler` carries out the decision. It
keeps the verdicts that are not settled yet, together with each entry's index in the slot. It also
decides when to send them, and splits them into calls of limited length.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from streamqd import logs
from streamqd.errors import RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.model import Lease
from streamqd.scoreboard import BUCKETS, CLEARED, DONE, FAILED, WorkerSlot, now_ns
from streamqd.store import messages
from streamqd.store.client import Connection
from streamqd.store.fetch import CONSUMER
from streamqd.store.items import portions
from streamqd.store.keys import Keys
from streamqd.store.messages import entry_place
from streamqd.store.replies import check_replies
from streamqd.store.scripts import Call, Reply
from streamqd.worker.dead_letters import within_limit
from streamqd.worker.entry import NOWHERE, FetchedEntry
from streamqd.worker.fenced import FencedCalls

BATCH_MAX = 128  # entries per call, which limits how long one call occupies the server
GRACE_NS = 1_000_000  # a wait for events may last this much longer than an acknowledgment may wait
DEFER_SECONDS = 1.0  # pause between attempts to settle entries that the server refused

# These refusals mean that the server accepts no writes at all now. Any other refusal may be caused
# by a single entry or key.
_NO_WRITES = (RefusalKind.FULL, RefusalKind.NO_REPLICAS)


class FailedEntry(NamedTuple):
    """A failed entry that becomes a retry or a dead letter.

    Usually, the server copies the entry to its next stream, so only the fields that change are sent
    (`fields`). `body` contains all fields as they were read, as a flat list of names and values. It
    is sent only if the server cannot copy the entry, because the entry was trimmed or has too many
    fields. `size` is the approximate size of the body in bytes. `number` is the position of the
    entry among all entries that the worker has read, or 0 if the entry was listed or handled alone.
    """

    place: bytes
    at: int  # index in the slot, or NOWHERE
    delay: float | None  # seconds, or None for a dead letter
    fields: dict[bytes, bytes]
    body: list[bytes]
    size: int
    number: int = 0

    def bytes_moved(self) -> int:
        """Return the approximate size in bytes that the entry will have in its next stream."""
        return self.size + sum(map(len, self.fields.values()))

    def with_body(self) -> FailedEntry:
        """Return the entry with all its fields in `fields`, for a server that cannot copy them."""
        body = within_limit(dict(zip(self.body[::2], self.body[1::2], strict=False)))
        return self._replace(fields={b"payload": b"", **body, **self.fields})


@dataclass
class Settler:
    """Collects verdicts and settles them. A worker keeps its settler when it reconnects.

    An entry's state byte stays DONE or FAILED until Redis has confirmed that its verdict is
    settled. So if the process exits before that, the supervisor can still find the entry in the
    slot. Only the main thread may use the settler.
    """

    link: Connection
    keys: Keys
    lease: Lease
    slot: WorkerSlot
    linger_ns: int = 0  # how long an acknowledgment may wait for a read that can carry it

    def __post_init__(self) -> None:
        self._calls = FencedCalls(self.link, self.slot)
        self.main_acks: list[bytes] = []
        self.retry_acks: list[bytes] = []
        self._ack_indexes: list[int] = []
        # Acknowledgments that also clear counters in Redis. They need a script, so they cannot be
        # sent together with a read.
        self._with_counters: list[tuple[bytes, int]] = []
        self.items: list[FailedEntry] = []
        self._read_count = 0  # number of entries read so far
        # The `number` of the first entry in the batch, 0 if the batch does not come from a read.
        self._first = 0
        self.since_ns = 0  # time of the oldest unsettled verdict (`now_ns`), or 0
        self._failures_due = False  # True if failures must be settled without waiting `linger_ns`
        # Maps the place of each entry that waits there to its failure count and due time
        # (`now_ns`).
        self._notes: dict[bytes, tuple[int, int]] = {}
        self._deferred: set[bytes] = set()  # places of refused entries
        self._deferred_until_ns = 0

    # --- record ---

    def ack(self, entry_id: bytes, index: int, now: int, retried: bool, has_counters: bool) -> None:
        """Record that an entry was handled, in a run that finished at `now` (`now_ns`)."""
        if has_counters:
            self._with_counters.append((entry_place(entry_id, retried=retried), index))
        else:
            (self.retry_acks if retried else self.main_acks).append(entry_id)
            self._ack_indexes.append(index)
        if not self.since_ns:
            self.since_ns = now

    def ack_all(self, entries: list[FetchedEntry]) -> None:
        """Record that entries were handled, in the order in which their runs finished."""
        acks, indexes = self.main_acks, self._ack_indexes
        for entry in entries:
            if entry.retried or entry.has_counters:
                self.ack(entry.id, entry.index, entry.ended_ns, entry.retried, entry.has_counters)
            else:
                acks.append(entry.id)
                indexes.append(entry.index)
        if entries and not self.since_ns:
            self.since_ns = entries[0].ended_ns

    def number(self, index: int) -> int:
        """Return the `FailedEntry.number` of the entry at an index of the batch."""
        return self._first + index if self._first and index != NOWHERE else 0

    def fail(self, item: FailedEntry, now: int) -> None:
        """Record that an entry must be retried or dead-lettered.

        This ends its run, so that a later crash is not charged to it.
        """
        self._mark(item.at, FAILED)
        self.items.append(item)
        if not self.since_ns:
            self.since_ns = now

    def skip(self, entry: FetchedEntry) -> None:
        """Record that an entry must be acknowledged without a run."""
        self._mark(entry.index, DONE)
        self.ack(entry.id, entry.index, now_ns(), entry.retried, entry.has_counters)

    def _mark(self, index: int, state: int) -> None:
        if index != NOWHERE:
            self.slot.states[index] = state

    def note(self, place: bytes, failures: int, due: int, now: int) -> None:
        """Record the failure count and the due time of an entry that waits in its place."""
        self._notes[place] = failures, due
        if not self.since_ns:
            self.since_ns = now

    @property
    def unsettled_count(self) -> int:
        """The number of entries whose verdicts are not settled yet."""
        return len(self._ack_indexes) + len(self._with_counters) + len(self.items)

    @property
    def has_unconfirmed_acks(self) -> bool:
        """True if any recorded acknowledgment was not confirmed by Redis yet."""
        return bool(self._ack_indexes or self._with_counters)

    @property
    def only_plain_acks(self) -> bool:
        """True if nothing but plain acknowledgments is unsettled.

        These can be sent together with the next read. Anything else needs a script.
        """
        return not (self._with_counters or self.items or self._notes)

    @property
    def deferred_places(self) -> list[bytes]:
        """The places of failed entries that are not settled yet, perhaps because of a refusal."""
        return [item.place for item in self.items]

    def begin_batch(self, places: list[bytes], *, read: bool = False) -> None:
        """Write a new batch to the slot, followed by the failed entries that are not settled yet.

        `read` must be True if all places come from one read and are in the order of that read.
        """
        self.slot.post_batch(places + self.deferred_places)
        self._first = self._read_count + 1 if read else 0
        self._read_count += len(places) if read else 0
        self.items = [item._replace(at=at) for at, item in enumerate(self.items, len(places))]
        for item in self.items:
            self.slot.states[item.at] = FAILED

    # --- when ---
    #
    # | Unsettled                       | `since_ns`    | `_failures_due` | Due               |
    # | nothing                         | 0             | no              | never             |
    # | verdicts of quick runs          | of the oldest | no              | after `linger_ns` |
    # | a failure of a longer run       | of the oldest | yes             | immediately       |
    # | only entries that Redis refused | 0             | no              | at each `settle`  |
    #
    # Because of `_deferred_until_ns`, refused entries are sent no more than once per DEFER_SECONDS.

    def make_failures_due(self) -> None:
        """Make all recorded failures due now. Call this after a run that was not quick."""
        self._failures_due = True

    def is_due(self, now: int) -> bool:
        """Return True if verdicts must be settled now, either with a read or through scripts."""
        since = self.since_ns
        return since > 0 and (self._has_due_failure or now - since >= self.linger_ns)

    def next_due(self, now: int) -> int | None:
        """Return when the next settlement is due (`now_ns`), or None if none is planned."""
        if not self.since_ns:
            return None
        return now if self._has_due_failure else self.since_ns + self.linger_ns + GRACE_NS

    @property
    def _has_due_failure(self) -> bool:
        return self._failures_due and not self.only_plain_acks

    def settle(self, *, read_follows: bool) -> None:
        """Settle the verdicts that are due.

        `read_follows` must be true if the caller sends a read next. The plain acknowledgments are
        then left to that read. Raises the errors of `flush`.
        """
        due, self._failures_due = self.is_due(now_ns()), False
        if due and not read_follows:
            self.flush()
        elif (due or (self.items and not self.since_ns)) and not self.only_plain_acks:
            self.flush_verdicts()

    # --- settling ---

    def confirm_acks(self, now: int) -> None:
        """Record that Redis has executed all plain acknowledgments, in a script or with a read."""
        count = len(self._ack_indexes)
        if not count:
            return
        self.slot.add("acked", count)
        self._observe_ack(now, count)
        self._clear_acks()
        if not self._notes:
            self._restart_clock()

    def flush(self) -> None:
        """Settle everything through scripts, acknowledgments first, because they may free memory.

        If Redis refuses retries or dead letters, they stay here and are sent again later. The same
        applies to failure counts while Redis accepts no writes. Raises Fenced if the lease is lost,
        RedisUnavailableError if Redis does not answer, and RedisResponseError if it refuses another
        call. Verdicts that Redis has confirmed before the error are settled.
        """
        self._flush_acks()
        self.flush_verdicts()

    def flush_last(self) -> None:
        """Settle everything before the worker exits, including entries that Redis has refused.

        If the connection is lost, try a second time on a new one. The next owner runs a failed
        message again if its failure is not settled. Raises the errors of `flush`.
        """
        self._deferred_until_ns = min(self._deferred_until_ns, now_ns())
        connected = self.link.connected
        try:
            self.flush()
        except RedisUnavailableError as error:
            if not (error.sent or connected):
                raise
            self.flush()

    def try_to_flush(self) -> None:
        """Settle as much as Redis accepts now, and keep the rest.

        Raises Fenced if the lease is lost. Other errors are ignored.
        """
        with contextlib.suppress(RedisUnavailableError, RedisResponseError):
            self.flush()

    def _flush_acks(self) -> None:
        if not self._ack_indexes:
            return
        places = [entry_place(i, retried=False) for i in self.main_acks]
        places += [entry_place(i, retried=True) for i in self.retry_acks]
        for part in _parts(places):
            self._calls.run(messages.ack(self.keys, self.lease, part))
        self.confirm_acks(now_ns())

    def flush_verdicts(self) -> None:
        """Settle everything except plain acknowledgments, which can be sent with the next read.

        Raises the errors of `flush`.
        """
        self._flush_counted_acks()
        if self._notes:
            self._write_notes()
        if self.items and now_ns() >= self._deferred_until_ns:
            self._settle_items()
        self._restart_clock()

    def _flush_counted_acks(self) -> None:
        """Acknowledge the entries that have counters in Redis, and clear the counters."""
        for part in _parts(self._with_counters):
            call = messages.ack(self.keys, self.lease, [], charged=[place for place, _ in part])
            self._calls.run(call)
            self.slot.add("acked", len(part))
            for _, index in part:
                self._mark(index, CLEARED)
            del self._with_counters[: len(part)]

    def _write_notes(self) -> None:
        """Write the failure counts and due times of entries that wait in their places.

        If Redis accepts no writes now, keep them for a later call.
        """
        now = now_ns()
        notes = [
            (place, failures, max(0, due - now) / 1e9)
            for place, (failures, due) in self._notes.items()
        ]
        for part in _parts(notes):
            try:
                self._calls.run(messages.note(self.keys, self.lease, part))
            except RedisResponseError as error:
                if error.kind not in _NO_WRITES:
                    raise
                return
        self._notes.clear()

    def _settle_items(self) -> None:
        """Send retries and dead letters, and keep those that Redis refuses for a later call."""
        deferred: list[FailedEntry] = []
        batches = _batches(self.items)
        while batches:
            calls = [self._call(dead, items) for dead, items in batches]
            replies = self._calls.run_many(calls)
            again: list[_Batch] = []
            for (dead, items), reply in zip(batches, replies, strict=True):
                if not isinstance(reply, RedisResponseError):
                    again += _batches(self._record_moved(reply, items, dead=dead))
                elif len(items) > 1 and reply.kind not in _NO_WRITES:
                    # A single item may have caused the refusal, so send each one in its own call.
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
                adjacent=_are_adjacent(items),
            )
        return messages.retry(
            self.keys,
            self.lease,
            [(item.place, item.delay or 0.0, item.fields) for item in items],
            adjacent=_are_adjacent(items),
        )

    def _record_moved(
        self, reply: Reply, items: list[FailedEntry], *, dead: bool
    ) -> list[FailedEntry]:
        """Mark the entries that are settled, and return the others with all their fields.

        The server could not copy the latter, so they must be sent again.
        """
        again = []
        moved = 0
        settled = messages.SettledReply.parse(reply)
        for item, word in zip(items, settled.words, strict=True):
            if word == "MISSING":
                again.append(item.with_body())
                continue
            # The word GONE means that an earlier copy of this call has moved the entry, or that
            # another client has acknowledged it.
            moved += word == "MOVED"
            self._mark(item.at, CLEARED)
        self.slot.add("dead_lettered" if dead else "retried", moved)
        due = settled.next_due_unix_ms
        if due is not None:
            # This is the earliest due time among all waiting retries of the group.
            self.slot.next_due_unix_ms = due
        return again

    def _defer(self, error: RedisResponseError, items: list[FailedEntry]) -> None:
        """Record that entries were refused, so that they are sent again after DEFER_SECONDS."""
        if not self._deferred_until_ns:
            logs.event(
                "message.deferred",
                logging.WARNING,
                assignment=self.lease.assignment,
                entries=len(items),
                error=str(error),
            )
        fresh = {item.place for item in items} - self._deferred
        self.slot.add("deferred", len(fresh))
        self._deferred |= fresh
        self._deferred_until_ns = now_ns() + int(DEFER_SECONDS * 1e9)

    def pending_differs(self, kept: int) -> bool:
        """Return True if Redis counts more or fewer pending entries than the worker knows.

        The worker knows the unsettled entries, and `kept` entries that its executor holds. This
        takes one round trip.
        """
        assignment = self.lease.assignment
        commands = [
            ("XPENDING", self.keys.source(*assignment), assignment.group),
            ("XPENDING", self.keys.retry_stream(*assignment), assignment.group),
        ]
        pending = 0
        for reply in check_replies(self.link.pipeline(commands)):
            ours = CONSUMER.encode()
            pending += sum(int(count) for name, count in reply[3] or () if name == ours)
        return pending != self.unsettled_count + kept

    # --- bookkeeping ---

    def _clear_acks(self) -> None:
        states, indexes = self.slot.states, self._ack_indexes
        first, end = min(indexes), max(indexes) + 1
        if end - first == len(indexes) == bytes(states[first:end]).count(DONE):
            # In most batches, the indexes are consecutive, so that one assignment can clear them.
            states[first:end] = bytes([CLEARED]) * len(indexes)
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
        # Count all entries with the wait of the oldest one, because the clock is read only once per
        # batch. The histogram shows upper bounds for this reason.
        waited = max(0, now - self.since_ns) if self.since_ns else 0
        histogram = self.slot.ack_histogram
        histogram[min((waited >> 10).bit_length(), len(BUCKETS))] += count
        histogram[len(BUCKETS) + 1] += waited * count


# The entries of one call. The Boolean is True for dead letters and False for retries.
_Batch = tuple[bool, list[FailedEntry]]

T = TypeVar("T")


def _parts(owed: list[T]) -> list[list[T]]:
    """Split a list into parts with up to BATCH_MAX elements, one part for each call."""
    return [owed[start : start + BATCH_MAX] for start in range(0, len(owed), BATCH_MAX)]


def _batches(items: list[FailedEntry]) -> list[_Batch]:
    """Split failed entries into parts, one for each call.

    A part contains either retries or dead letters. Both its number of entries and its size in bytes
    are limited.
    """
    batches: list[_Batch] = []
    for dead in (False, True):
        alike = [item for item in items if (item.delay is None) is dead]
        batches += [(dead, part) for part in portions(alike, FailedEntry.bytes_moved, BATCH_MAX)]
    return batches


def _are_adjacent(items: list[FailedEntry]) -> bool:
    """Return True if the entries were read one after another, so they are adjacent in Redis."""
    first = items[0].number
    return first > 0 and all(item.number == at for at, item in enumerate(items, first))
