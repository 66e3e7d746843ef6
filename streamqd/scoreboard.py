"""The scoreboard: how the processes of one instance tell each other things.

One shared mapping, made by the supervisor before its first fork: of a file in a memory file system
(`supervisor/scoreboard_file.py`), so that it outlives a killed supervisor, or anonymous where
there is none.
Every (topic, partition, group) unit that this instance ever owned has a slot, and keeps it for the
supervisor's life, so counters survive a crashed worker. Untouched slots cost no memory.

There are no locks. While a process works in a slot, each field has one writer: the worker, the
supervisor or the housekeeper, as `WorkerSlot` says. Once it has ended, is quiet or was abandoned,
the supervisor also writes what the worker had written: its state, its batch, some counters and the
recent failures. `warm_pid` has two writers too: a standby sets it, and the supervisor clears it.

A slot also holds the fetched batch: the places of all entries in flight, written once per batch,
and one state byte per entry. After a worker's death the supervisor reads from it what had finished
and what was running, which is what makes blame exact.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from streamqd import failures
from streamqd.idle_reason import IdleReason
from streamqd.long_poll import PollWords
from streamqd.model import ENTRIES_MAX, FETCHED_MAX, LANES_MAX, Lease, Unit

LAYOUT = 3  # of the bytes of a board: a change of what is where, or of what it means, is a new one
SLOT_COUNT = 4096
LOOP_BEAT_SECONDS = 0.125  # between two beats of an event loop with open runs
PLACE_BYTES_MAX = 44  # "m:" + 20 digits + "-" + 20 digits + separator

_WORDS = 64
_COUNTERS = 32
_NAME_BYTES = 192
_BUCKET_COUNT = 34

# Histogram bucket k holds durations below 1024 ns << k: the index is one shift and one
# bit_length, far cheaper per message than a search.
BUCKETS: tuple[float, ...] = tuple((1 << (10 + k)) / 1e9 for k in range(_BUCKET_COUNT - 1))


def _paged(offset: int) -> int:
    """Return the beginning of the next page."""
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


# Fields read before a worker has run come first. Behind them are four tables, as long as the
# greatest concurrency needs. Each begins a page: of those of most workers only some are touched.
_OFFSET_COUNTERS = _WORDS * 8
_OFFSET_HISTOGRAMS = _OFFSET_COUNTERS + _COUNTERS * 8
_HISTOGRAM_WORDS = _BUCKET_COUNT + 1  # the last word is the sum in ns
_OFFSET_NAME = _OFFSET_HISTOGRAMS + 2 * _HISTOGRAM_WORDS * 8
_OFFSET_LEASE = _OFFSET_NAME + _NAME_BYTES
_LEASE_BYTES = 128
_OFFSET_FAILURES = _OFFSET_LEASE + _LEASE_BYTES
_OFFSET_BLOCKER = _OFFSET_FAILURES + failures.BYTES
_BLOCKER_BYTES = 256
HEAD_BYTES = _paged(_OFFSET_BLOCKER + _BLOCKER_BYTES)
_OFFSET_STATES = HEAD_BYTES
_OFFSET_SEQUENCES = _paged(_OFFSET_STATES + ENTRIES_MAX)
_OFFSET_LANES = _paged(_OFFSET_SEQUENCES + LANES_MAX * 8)
_OFFSET_PLACES = _paged(_OFFSET_LANES + LANES_MAX * 2 * 8)
_USED_BYTES = _OFFSET_PLACES + ENTRIES_MAX * PLACE_BYTES_MAX
SLOT_BYTES = _paged(_USED_BYTES)
BOARD_BYTES = mmap.PAGESIZE
HEADER_OFFSET = 1024  # in the board's page: what a file says of itself

_LEASE = struct.Struct("<32s32sQI")  # two tokens, epoch, and the check sum of them and the unit
_TOKEN_BYTES = 32
_PLACE = re.compile(rb"[mr]:[0-9]{1,20}-[0-9]{1,20}")

_MAP_FIXED = 0x10
_OURS_ALONE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)

_NO_PLACE = b"-".ljust(PLACE_BYTES_MAX)

# State bytes of an entry in flight. CLEARED: nothing is owed for it here, as it is settled,
# released, or waits with its key; or there is no entry at this index of a table.
WAITING, RUNNING, DONE, FAILED, CLEARED = range(5)

COUNTERS = (
    *("fetched", "acked", "retried", "dead", "failed", "timeouts", "released", "fenced", "ghosts"),
    *("reclaimed", "round_trips", "bytes", "crashes", "restarts", "charged", "recycled"),
    *("redis_errors", "parked", "given_up", "expired", "throttled_ns"),
    *("assignment_errors", "loop_blocked"),
)
BOARD_COUNTERS = (
    *("rebalance_acquired", "rebalance_shed", "renew_late", "lease_lost", "exchanges"),
    *("exchange_errors", "housekeeper_restarts", "log_dropped", "groups_restored"),
    "unstartable",
)


def now_ns() -> int:
    """Return the clock of all deadlines: it counts suspended time and all processes share it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def entries_of(lanes: int) -> int:
    """Return how many entries a worker of so many lanes may have in flight."""
    return FETCHED_MAX + max(FETCHED_MAX, lanes)


class WorkerState(enum.IntEnum):
    """What the process of a slot is doing."""

    GONE = 0
    BOOTING = 1
    READY = 2
    PAUSED = 3
    QUIET = 4
    BROKEN = 5
    FAILED = 6  # an error of streamqd itself: the supervisor has given the assignment up


class WorkerCommand(enum.IntEnum):
    """What the supervisor wants of a worker; read between two messages."""

    NONE = 0
    PAUSE = 1
    STOP = 2


class _Field:
    """One unsigned 64-bit word of a slot, or of the board, as an attribute."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, holder: WorkerSlot | Scoreboard, owner: type) -> int:
        return holder.words[self.index]

    def __set__(self, holder: WorkerSlot | Scoreboard, value: int) -> None:
        holder.words[self.index] = value


class RunningEntry(NamedTuple):
    """An entry whose handler is running: its place, start (`now_ns` clock) and run sequence."""

    place: bytes
    started_ns: int
    sequence: int


class Batch(NamedTuple):
    """The entries in flight that a dead worker had finished, and those that it ran."""

    done: list[bytes]
    running: list[bytes]


class RecordedLease(NamedTuple):
    """The lease under which a unit's worker works; `next_token` is to replace its token, or ''."""

    lease: Lease
    next_token: str


# Word numbers that the hot path, or whoever writes a batch, reads and writes directly.
WORD_TRUSTED_UNTIL, WORD_COMMAND, WORD_RUN_SEQ = 5, 6, 10
_GENERATION, _IN_HAND = 12, 13
_PLACES_SIZE = 18  # bytes of the places in hand
_LANES = 29  # how many a worker uses that runs several messages at a time


class WorkerSlot:
    """One unit's pages. The fields are the map of its words: 64, of which some are unused.

    `words`, `lanes` and `states` are public for the worker's hot path.

    A lane is a place for one running entry: `lanes[2 * k]` is the entry's index in the batch and
    `lanes[2 * k + 1]` its start. A worker that runs one message at a time uses lane 0 alone, and
    so does one that runs a batch at a time, for all of its entries. One that runs several writes
    `sequences[k]` too: the run sequence of the lane's entry, 0 while the lane is free.
    """

    # written by the supervisor
    pid = _Field(0)
    owned = _Field(2)
    epoch = _Field(3)
    since_unix_ms = _Field(4)
    trusted_until_ns = _Field(WORD_TRUSTED_UNTIL)
    command = _Field(WORD_COMMAND)
    soft_kill_seq = _Field(7)  # the run that a soft-limit signal is meant for
    rss = _Field(8)
    rss_baseline = _Field(9)
    standby_pid, leaving_pid = _Field(21), _Field(22)  # the worker after this one, and before it
    partitions = _Field(26)  # of the topic, as this supervisor knows it
    loop_blocked_ns = _Field(27)  # since when the event loop has not turned; 0 = it turns
    loop_turned_ns = _Field(28)  # when it turned again after it was blocked last; 0 = never
    warm_pid = _Field(23)  # set by the standby: it has booted, and waits for its assignment
    # written by the worker; `state` and the batch by the supervisor while no worker uses the slot
    state = _Field(1)
    run_seq = _Field(WORD_RUN_SEQ)  # grows by one per handler run, over all incarnations
    generation = _Field(_GENERATION)  # odd while the batch is being written
    in_hand = _Field(_IN_HAND)
    next_due_unix_ms = _Field(14)
    progress_ns = _Field(15)  # last completed exchange or handler run
    reclaim_done = _Field(16)
    rate_due_ns = _Field(24)  # state of the rate, kept from worker to worker; 0 = there is none
    rate_micro = _Field(25)  # runs per second that may begin, in millionths; 0 = no limit
    beat_ns = _Field(17)  # when a handler has last reported progress
    loop_thread = _Field(11)  # thread ID of the event loop
    loop_beat_ns = _Field(19)  # when the event loop turned last; 0 = no coroutine runs
    suspects_left = _Field(57)  # that have not run since a crash; set by the supervisor at a fork
    round_size = _Field(58)  # how many of them run now
    suspects = _Field(59)  # how many there were, with those that have run
    # written by the housekeeper
    reclaim_requested = _Field(20)
    # written once, when the slot gets its unit
    _name_length = _Field(30)
    # what other files divide up
    _POLL = slice(31, 37)
    _WAITS = slice(40, 54)

    def __init__(self, view: memoryview, index: int, board: Scoreboard) -> None:
        self.index, self.board = index, board
        self._unit: Unit | None = None
        self._reserved = 0  # lanes for which there is memory
        self.words: memoryview[int] = view[:_OFFSET_COUNTERS].cast("Q")
        self.poll = PollWords(self.words[self._POLL])
        self.waits = IdleReason(self.words[self._WAITS])
        self.counters: memoryview[int] = view[_OFFSET_COUNTERS:_OFFSET_HISTOGRAMS].cast("Q")
        histograms = view[_OFFSET_HISTOGRAMS:_OFFSET_NAME].cast("Q")
        self.handle_histogram: memoryview[int] = histograms[:_HISTOGRAM_WORDS]
        self.ack_histogram: memoryview[int] = histograms[_HISTOGRAM_WORDS:]
        self.lanes: memoryview[int] = view[_OFFSET_LANES:_OFFSET_PLACES].cast("Q")
        self._name = view[_OFFSET_NAME:_OFFSET_LEASE]
        self._lease = view[_OFFSET_LEASE:_OFFSET_FAILURES]
        self.failures = failures.RecentFailures(view[_OFFSET_FAILURES:_OFFSET_BLOCKER])
        self._blocker = view[_OFFSET_BLOCKER : _OFFSET_BLOCKER + _BLOCKER_BYTES]
        self.sequences: memoryview[int] = view[_OFFSET_SEQUENCES:_OFFSET_LANES].cast("Q")
        self.states = view[_OFFSET_STATES : _OFFSET_STATES + ENTRIES_MAX]
        self._places = view[_OFFSET_PLACES:_USED_BYTES]

    @property
    def unit(self) -> Unit | None:
        """The unit that the slot belongs to, None while it is unused."""
        # A name never changes, and everybody asks for it all the time.
        if self._unit is None and (length := self._name_length):
            topic, partition, group = bytes(self._name[:length]).decode().split("\n")
            self._unit = Unit(topic, int(partition), group)
        return self._unit

    def name(self, unit: Unit) -> None:
        """Give the slot to a unit, for good."""
        raw = f"{unit.topic}\n{unit.partition}\n{unit.group}".encode()
        self._name[: len(raw)] = raw
        self._name_length = len(raw)

    def counter(self, name: str) -> int:
        """Return a counter's value; names are in `COUNTERS`."""
        return self.counters[COUNTERS.index(name)]

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter. A counter is written by one process at a time."""
        self.counters[COUNTERS.index(name)] += amount

    def histogram(self, name: str) -> tuple[list[int], float]:
        """Return (counts per bucket, one more than `BUCKETS` for +Inf; sum in seconds)."""
        words = self.handle_histogram if name == "handle" else self.ack_histogram
        values = words.tolist()
        return values[:-1], values[-1] / 1e9

    def beat(self) -> None:
        """Note that a handler makes progress."""
        self.beat_ns = now_ns()

    @property
    def blocker(self) -> str:
        """The code that blocked the event loop last, as `FILE:LINE in FUNCTION`; '' = unknown."""
        return bytes(self._blocker).rstrip(b"\0").decode("utf-8", "replace")

    def note_blocker(self, place: str) -> None:
        """Note the code that blocks the event loop. Its end is kept if it is too long."""
        raw = place.encode("utf-8", "replace")[-_BLOCKER_BYTES:]
        self._blocker[:] = raw.ljust(_BLOCKER_BYTES, b"\0")

    def leave(self) -> None:
        """In a forked child: have memory of our own, all zero, in the place of the shared page.

        All views of the slot show it. OSError: the system has none.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(address, SLOT_BYTES, protection, _OURS_ALONE, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "no memory for a slot of our own")

    # --- the lease: only a successor of the supervisor reads it ---

    def note_lease(self, lease: Lease, next_token: str = "") -> None:
        """Write down the lease of the unit's worker, and the token that is about to replace its.

        Before the call that does so is sent: whoever comes after a killed supervisor repeats that
        very call, which acknowledges and charges once.
        """
        self.epoch = lease.epoch
        raw = lease.token.encode(), next_token.encode()
        if max(map(len, raw)) > _TOKEN_BYTES:
            raise ValueError(f"a token of more than {_TOKEN_BYTES} bytes")
        padded = [each.ljust(_TOKEN_BYTES, b"\0") for each in raw]
        checked = self._lease_sum(padded[0], padded[1], self.epoch)
        self._lease[: _LEASE.size] = _LEASE.pack(*padded, self.epoch, checked)

    def forget_lease(self) -> None:
        """Write down that the unit is not held."""
        self._lease[: _LEASE.size] = bytes(_LEASE.size)

    def lease(self) -> RecordedLease | None:
        """Read what `note_lease` wrote, None for no lease. Raises ValueError when it is torn."""
        unit = self.unit
        token, next_token, epoch, found = _LEASE.unpack(self._lease[: _LEASE.size])
        if unit is None or token == next_token == bytes(_TOKEN_BYTES):
            return None
        if found != self._lease_sum(token, next_token, epoch):
            raise ValueError("its tokens do not match their check sum")
        texts = [raw.rstrip(b"\0").decode("ascii") for raw in (token, next_token)]
        return RecordedLease(Lease(unit, texts[0], epoch), texts[1])

    def _lease_sum(self, token: bytes, next_token: bytes, epoch: int) -> int:
        name = bytes(self._name[: self._name_length])
        return zlib.crc32(name + token + next_token + epoch.to_bytes(8, "little"))

    # --- the batch ---

    def post_batch(self, places: list[bytes]) -> None:
        """Write the places of all entries in flight; every state becomes WAITING."""
        raw = b" ".join(places)
        if len(places) > ENTRIES_MAX:
            raise ValueError(f"{len(places)} entries in hand, the slot holds {ENTRIES_MAX}")
        generation = self.words[_GENERATION]
        self.words[_GENERATION] = generation + 1
        self.states[: len(places)] = bytes(len(places))
        self._places[: len(raw)] = raw
        self.words[_PLACES_SIZE] = len(raw)
        self.words[_IN_HAND] = len(places)
        self.words[_GENERATION] = generation + 2

    def open_table(self, lanes: int) -> None:
        """Make the batch a table: entries come and go one by one, each at an index of its own.

        It is as long as `lanes` that run at a time need, see `entries_of`.
        """
        count = entries_of(lanes)
        self.states[:count] = bytes([CLEARED]) * count
        self._places[: count * PLACE_BYTES_MAX] = _NO_PLACE * count
        self.words[_LANES] = lanes
        self.words[_PLACES_SIZE] = count * PLACE_BYTES_MAX
        self.words[_IN_HAND] = count

    def put(self, index: int, *places: bytes) -> None:
        """Write entries into the table, from a CLEARED index on. Their states become WAITING."""
        start, raw = index * PLACE_BYTES_MAX, b"".join([p.ljust(PLACE_BYTES_MAX) for p in places])
        self._places[start : start + len(raw)] = raw
        self.states[index : index + len(places)] = bytes(len(places))

    def batch(self) -> Batch:
        """Read the batch of a worker that is dead.

        A batch that was being written counts as empty: the one before it was settled in the very
        exchange that brought the new one, and nothing of the new one had begun.
        """
        count = self.in_hand
        if self.generation % 2 or not count:
            return Batch([], [])
        places = self._read_places()
        states = bytes(self.states[:count])
        batch = Batch([], [])
        by_state = {DONE: batch.done, RUNNING: batch.running}
        for place, state in zip(places, states, strict=True):
            by_state.get(state, []).append(place)
        return batch

    def unsettled(self) -> list[bytes]:
        """Return the places of what is in flight and has not ended well, to the worker itself."""
        states = bytes(self.states[: self.in_hand])
        return [
            place
            for place, state in zip(self._read_places(), states, strict=False)
            if state not in (DONE, CLEARED)
        ]

    def _read_places(self) -> list[bytes]:
        raw = bytes(self._places[: self.words[_PLACES_SIZE]])
        if len(raw) != self.words[_IN_HAND] * PLACE_BYTES_MAX:
            return raw.split(b" ")  # a batch, whose places have no separator behind the last
        # A table. By width, for a place that was being written may be two halves.
        starts = range(0, len(raw), PLACE_BYTES_MAX)
        return [raw[start : start + PLACE_BYTES_MAX].rstrip() for start in starts]

    @property
    def unfinished(self) -> int:
        """How many entries in flight wait for their handler or run in it, to an outside look.

        A batch stays on the page until the next one comes; what has ended no longer counts.
        """
        states = bytes(self.states[: self.in_hand])
        return states.count(WAITING) + states.count(RUNNING)

    @property
    def running(self) -> list[RunningEntry]:
        """The entries whose handler is running now, as far as an outside look can tell."""
        count = self.in_hand
        if self.generation % 2 or not count:
            return []
        indexes = [i for i, state in enumerate(bytes(self.states[:count])) if state == RUNNING]
        if not indexes:
            return []
        used, latest = self._lanes_used, self.run_seq
        lanes = self.lanes[: 2 * used].tolist()
        # An unused lane reads (0, 0), which must not pass for the start of entry 0.
        runs = {
            i: (start, sequence or latest)
            for i, start, sequence in zip(
                lanes[0::2], lanes[1::2], self.sequences[:used].tolist(), strict=True
            )
            if start
        }
        first = (lanes[1], latest)  # a batch has one lane for all
        places = self._read_places()
        return [RunningEntry(places[i], *runs.get(i, first)) for i in indexes if i < len(places)]

    def running_in(self, sequence: int) -> list[bytes]:
        """Return the places of what runs in one run: none when it is over."""
        return [each.place for each in self.running if each.sequence == sequence]

    def checked_batch(self) -> Batch:
        """Read the batch of a slot that a killed supervisor left. Raises ValueError if it is torn.

        Unlike `batch`, which reads what our own worker wrote, it trusts nothing.
        """
        if self.in_hand > ENTRIES_MAX or self.words[_PLACES_SIZE] > len(self._places):
            raise ValueError("its batch is longer than a slot")
        batch = self.batch()
        for place in (*batch.done, *batch.running):
            if not _PLACE.fullmatch(place):
                raise ValueError("an entry in hand has no place")
        return batch

    def restore(self, done: list[bytes], running: list[bytes]) -> None:
        """Write what a predecessor had finished, and what it ran, as the batch of this slot.

        Raises OSError if there is no memory for it.
        """
        self.reserve(max(1, len(done) + len(running) - FETCHED_MAX))
        self.post_batch([*done, *running])
        self.states[: len(done)] = bytes([DONE]) * len(done)
        self.states[len(done) : len(done) + len(running)] = bytes([RUNNING]) * len(running)

    def acquit(self, suspects: Collection[bytes]) -> None:
        """Let the batch show only these as running: the process of the others ended well."""
        count = self.in_hand
        if self.generation % 2 or not count:
            return
        for index, place in enumerate(self._read_places()[:count]):
            if self.states[index] == RUNNING and place not in suspects:
                self.states[index] = WAITING

    def forget_batch(self) -> None:
        """Forget what was in flight: it is settled, or of a process of the past."""
        self.words[_IN_HAND] = 0
        self.words[_PLACES_SIZE] = 0
        generation = self.words[_GENERATION]
        self.words[_GENERATION] = generation + generation % 2

    def vacate(self) -> None:
        """Forget the process; counters stay, and so does the batch until it is settled."""
        self.pid = 0
        self.state = WorkerState.GONE
        self.command = WorkerCommand.NONE
        self.soft_kill_seq = 0
        self.poll.end()
        self.loop_beat_ns = 0
        # Lanes of a worker that ran several are nothing to the next one.
        if not self.run_seq:
            return  # no worker used the slot, and its tables may have no memory
        used = self._lanes_used
        self.lanes[: 2 * used] = memoryview(bytes(8 * 2 * used)).cast("Q")
        self.sequences[:used] = memoryview(bytes(8 * used)).cast("Q")
        self.words[_LANES] = 0

    def clear(self) -> None:
        """Forget the batch and the process; counters stay. Called after the death was settled."""
        self.forget_batch()
        self.vacate()

    @property
    def _lanes_used(self) -> int:
        return min(max(1, self.words[_LANES]), LANES_MAX)

    def reserve(self, lanes: int) -> None:
        """Make sure that a worker of so many lanes can write all of its slot. Raises OSError.

        A page that a full file system cannot give kills the process that writes to it.
        """
        if lanes > self._reserved:
            count = entries_of(lanes)
            self.board.reserve(self.index, HEAD_BYTES + count)
            for offset, size in (
                (_OFFSET_SEQUENCES, 8 * lanes),
                (_OFFSET_LANES, 16 * lanes),
                (_OFFSET_PLACES, PLACE_BYTES_MAX * count),
            ):
                self.board.reserve(self.index, size, offset)
            self._reserved = lanes


class Scoreboard:
    """The mapping and its slots. `used` slots are named; a name never changes.

    `descriptor` is that of an empty file in memory, -1 for none. Raises OSError when there is no
    room for it.
    """

    used = _Field(0)  # number of named slots
    _flags = _Field(1)
    progress_ns = _Field(2)  # when the supervisor last finished a tick (`now_ns` clock)
    housekeeper_progress_ns = _Field(3)  # when the housekeeper last finished a round, or was forked

    def __init__(self, slots: int = SLOT_COUNT, descriptor: int = -1) -> None:
        self._descriptor = descriptor
        size = BOARD_BYTES + slots * SLOT_BYTES
        if descriptor >= 0:
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, BOARD_BYTES)
        self._map = mmap.mmap(descriptor, size)
        self._view = memoryview(self._map)
        self.words: memoryview[int] = self._view[: _WORDS * 8].cast("Q")
        counters = self._view[_WORDS * 8 : (_WORDS + _COUNTERS) * 8]
        self._counters: memoryview[int] = counters.cast("Q")
        self.size = slots
        # Where the file of the scoreboard before this one was put aside, if it could not be used.
        self.refused_file: Path | None = None
        self._slots: dict[int, WorkerSlot] = {}
        self._allotted: dict[Unit, WorkerSlot] = {}

    @property
    def flags(self) -> InstanceFlags:
        """The instance's state as the supervisor sees it."""
        return InstanceFlags(self._flags)

    @flags.setter
    def flags(self, value: InstanceFlags) -> None:
        self._flags = value

    def slot(self, index: int) -> WorkerSlot:
        """Return slot `index`."""
        found = self._slots.get(index)
        if found is None:
            start = BOARD_BYTES + index * SLOT_BYTES
            found = self._slots[index] = WorkerSlot(
                self._view[start : start + SLOT_BYTES], index, self
            )
        return found

    def slots(self) -> list[WorkerSlot]:
        """Return the named slots."""
        return [self.slot(index) for index in range(self.used)]

    def allot(self, unit: Unit) -> WorkerSlot:
        """Return the unit's slot, naming a fresh one at its first call. Supervisor only."""
        if unit not in self._allotted:
            if self.used == self.size:
                raise ValueError(f"all {self.size} slots of the scoreboard are in use")
            self.reserve(self.used, HEAD_BYTES)
            slot = self._allotted[unit] = self.slot(self.used)
            slot.name(unit)
            self.used += 1
        return self._allotted[unit]

    def reserve(self, index: int, size: int, offset: int = 0) -> None:
        """Take the memory of `size` bytes of a slot from an offset on now. Raises OSError."""
        if self._descriptor >= 0:
            start = BOARD_BYTES + index * SLOT_BYTES + offset
            os.posix_fallocate(self._descriptor, start, size)

    def head(self, raw: bytes) -> None:
        """Write what the file says of itself. Raises ValueError when it is too long."""
        if len(raw) > BOARD_BYTES - HEADER_OFFSET:
            raise ValueError("the header of the scoreboard is too long")
        self._view[HEADER_OFFSET : HEADER_OFFSET + len(raw)] = raw

    def counter(self, name: str) -> int:
        """Return an instance-wide counter; names are in `BOARD_COUNTERS`."""
        return self._counters[BOARD_COUNTERS.index(name)]

    def add(self, name: str, amount: int = 1) -> None:
        """Add to an instance-wide counter."""
        self._counters[BOARD_COUNTERS.index(name)] += amount


class InstanceFlags(enum.IntFlag):
    """The instance's condition, for health answers."""

    NONE = 0
    STARTED = 1
    REDIS_OK = 2
    DRAINING = 4
    PAUSED = 8
    STANDBY = 16  # healthy, owning nothing because others own everything
    DRAINED = 32  # an operator wants it to own nothing
    LIMITED = 64  # the system refuses it processes that it should start
    MEMBER = 128  # Redis accepted its last heartbeat, so its name in the fleet is its own
    DUPLICATE = 256  # another run has its name and sends heartbeats
