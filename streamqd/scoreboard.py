"""The scoreboard: memory through which the processes of one instance share their state.

The supervisor creates one shared mapping before its first fork. A file in a memory file system
(`supervisor/scoreboard_file.py`) backs the mapping, so that it survives if the supervisor is
killed. If there is no such file system, the mapping is anonymous. Every (topic, partition, group)
assignment that this instance has ever owned has a slot, and keeps it as long as the supervisor
runs. Its counters therefore survive a crash of the worker. Slots that are not used cost no memory.

The scoreboard uses no locks. While a process works in a slot, each field has a single writer: the
worker, the supervisor or the housekeeper, as listed in `WorkerSlot`. After the worker has exited,
gone quiet or been abandoned, the supervisor also writes the worker's fields: its state, its batch,
some counters and the recent failures. `warm_pid` has two writers, because a standby sets it and the
supervisor clears it.

A slot also contains the fetched batch: the places of all entries in flight, which are written once
per batch, and one state byte per entry. When a worker has died, the supervisor finds in the slot
which entries were finished and which were running. It then counts the crash against exactly those
messages that may have caused it.
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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from streamqd import failures
from streamqd.idle_reason import IdleReason
from streamqd.long_poll import PollWords
from streamqd.model import ENTRIES_MAX, FETCHED_MAX, LANES_MAX, Assignment, Lease

LAYOUT = 3  # version of the byte layout; raise it if a field changes its place or meaning
SLOT_COUNT = 4096
LOOP_HEARTBEAT_SECONDS = 0.125  # seconds between heartbeats of an event loop that runs handlers
PLACE_BYTES_MAX = 44  # "m:" + 20 digits + "-" + 20 digits + separator

_WORDS = 64
_COUNTERS = 32
_NAME_BYTES = 192
_BUCKET_COUNT = 34

# Histogram bucket k counts durations below 1024 ns << k. Its index is computed with one shift and
# one bit_length, which costs far less per message than a search.
BUCKETS: tuple[float, ...] = tuple((1 << (10 + k)) / 1e9 for k in range(_BUCKET_COUNT - 1))
# Bucket k counts delays below 1 ms << k, because entry IDs are in milliseconds and a backlog can be
# weeks old.
DELAY_BUCKETS = tuple((1 << k) / 1e3 for k in range(_BUCKET_COUNT - 1))


def quantile(
    runs: Mapping[int, float], share: float, bounds: Sequence[float] = BUCKETS
) -> float | None:
    """Return the upper bound (seconds) of a quantile's bucket, or None if there were no runs.

    `runs` maps the index of each bucket to its number of runs.
    """
    total, seen = sum(runs.values()), 0.0
    for index in sorted(runs):
        seen += runs[index]
        if seen and seen >= total * share:
            return bounds[min(index, len(bounds) - 1)]
    return None


def _page_end(offset: int) -> int:
    """Return the offset, rounded up to the next page boundary."""
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


# Fields that are read before a worker runs come first. Four tables follow, which are sized for the
# highest concurrency. Each table starts on its own page, because most workers use only a few pages.
_OFFSET_COUNTERS = _WORDS * 8
_OFFSET_HISTOGRAMS = _OFFSET_COUNTERS + _COUNTERS * 8
# The last word is the sum, in ms for delays and otherwise in ns.
_HISTOGRAM_WORDS = _BUCKET_COUNT + 1
_OFFSET_NAME = _OFFSET_HISTOGRAMS + 2 * _HISTOGRAM_WORDS * 8
_OFFSET_LEASE = _OFFSET_NAME + _NAME_BYTES
_LEASE_BYTES = 128
_OFFSET_FAILURES = _OFFSET_LEASE + _LEASE_BYTES
_OFFSET_BLOCKER = _OFFSET_FAILURES + failures.BYTES
_BLOCKER_BYTES = 256
# This histogram fits into the rest of the page, so all other fields have the same place as in older
# versions.
_OFFSET_DELAYS = _OFFSET_BLOCKER + _BLOCKER_BYTES
_HEAD_END = _OFFSET_DELAYS + _HISTOGRAM_WORDS * 8
HEAD_BYTES = _page_end(_HEAD_END)
_OFFSET_STATES = HEAD_BYTES
_OFFSET_SEQUENCES = _page_end(_OFFSET_STATES + ENTRIES_MAX)
_OFFSET_LANES = _page_end(_OFFSET_SEQUENCES + LANES_MAX * 8)
_OFFSET_PLACES = _page_end(_OFFSET_LANES + LANES_MAX * 2 * 8)
_USED_BYTES = _OFFSET_PLACES + ENTRIES_MAX * PLACE_BYTES_MAX
SLOT_BYTES = _page_end(_USED_BYTES)
BOARD_BYTES = mmap.PAGESIZE
HEADER_OFFSET = 1024  # offset of the file's header in the board's page

_LEASE = struct.Struct(
    "<32s32sQI"
)  # two tokens, the epoch, and a checksum that includes the assignment
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
_PLACE_FORMAT = b"%%-%db" % PLACE_BYTES_MAX

# State bytes of an entry in flight. CLEARED means that this worker has nothing left to do for the
# entry, because it is settled, released or held with its key. The unused indexes of a table are
# CLEARED as well.
WAITING, RUNNING, DONE, FAILED, CLEARED = range(5)

COUNTERS = (
    *("fetched", "acked", "retried", "dead_lettered", "failed", "timeouts", "released", "fenced"),
    *(
        "missing_entries",
        "reclaimed",
        "round_trips",
        "bytes",
        "crashes",
        "restarts",
        "charged",
        "recycled",
    ),
    *("redis_errors", "deferred", "given_up", "expired", "throttled_ns"),
    *("assignment_errors", "loop_blocked"),
)
BOARD_COUNTERS = (
    *("rebalance_acquired", "rebalance_shed", "renew_late", "lease_lost", "round_trips"),
    *("round_trip_errors", "housekeeper_restarts", "log_dropped", "groups_restored"),
    "unstartable",
)


def now_ns() -> int:
    """Return the time on the clock that all deadlines use (ns, CLOCK_BOOTTIME).

    The clock keeps running while the host is suspended, and is the same for all processes of the
    host.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def table_size(lanes: int) -> int:
    """Return how many entries a worker with this number of lanes can have in flight."""
    return FETCHED_MAX + max(FETCHED_MAX, lanes)


class WorkerState(enum.IntEnum):
    """The state of the process that uses a slot."""

    GONE = 0
    BOOTING = 1
    READY = 2
    PAUSED = 3
    QUIET = 4
    BROKEN = 5
    FAILED = 6  # an error in streamqd itself, after which the supervisor gave up the assignment


class WorkerCommand(enum.IntEnum):
    """A command from the supervisor to a worker, which reads it between two messages."""

    NONE = 0
    PAUSE = 1
    STOP = 2


class _Field:
    """One unsigned 64-bit word of a slot or of the board, as an attribute."""

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
    """The finished and the running entries among those that a dead worker had in flight."""

    done: list[bytes]
    running: list[bytes]


class RecordedLease(NamedTuple):
    """The lease of an assignment, as recorded in its slot.

    `next_token` is the token that is about to replace the lease's token, or '' if no change is in
    progress.
    """

    lease: Lease
    next_token: str


# Indexes of words that the hot path and the writer of a batch access directly.
WORD_TRUSTED_UNTIL, WORD_COMMAND, WORD_RUN_SEQ = 5, 6, 10
_GENERATION, _IN_FLIGHT = 12, 13
_PLACES_SIZE = 18  # bytes used by the places of all entries in flight
_LANES = 29  # number of lanes in use, for a worker that runs several messages at a time


class WorkerSlot:
    """The part of the scoreboard that belongs to one assignment.

    Its fields are 64-bit integers, called words. `words`, `lanes` and `states` are public because
    the worker's hot path accesses them directly.

    A lane has room for one running entry: `lanes[2 * k]` is the entry's index in the batch, and
    `lanes[2 * k + 1]` is its start. A worker that runs one message at a time uses only lane 0, and
    so does one that runs one batch at a time, for all entries of the batch. A worker that runs
    several messages at a time also writes `sequences[k]`, the run sequence of the lane's entry. A
    lane is free if its start is 0. Its other words then still belong to its last run.
    """

    # written by the supervisor
    pid = _Field(0)
    owned = _Field(2)
    epoch = _Field(3)
    since_unix_ms = _Field(4)
    trusted_until_ns = _Field(WORD_TRUSTED_UNTIL)
    command = _Field(WORD_COMMAND)
    soft_kill_seq = _Field(7)  # run sequence to which the last soft-limit signal was sent
    rss = _Field(8)
    rss_baseline = _Field(9)
    standby_pid, leaving_pid = _Field(21), _Field(22)  # pids of the next and the previous worker
    partitions = _Field(26)  # the topic's partition count, as this supervisor knows it
    loop_blocked_ns = _Field(27)  # time at which the event loop was blocked, or 0 while it runs
    loop_turned_ns = _Field(28)  # time at which it last ran again after a block, or 0
    warm_pid = _Field(23)  # pid of a standby that has booted and waits for its assignment
    # written by the worker, while `state` and the batch are also written by the supervisor when no
    # worker uses them
    state = _Field(1)
    run_seq = _Field(WORD_RUN_SEQ)  # grows by one with each run, across all workers
    generation = _Field(_GENERATION)  # odd while the batch is being written
    in_flight = _Field(_IN_FLIGHT)
    next_due_unix_ms = _Field(14)
    progress_ns = _Field(15)  # time of the last completed round trip or handler run
    reclaim_done = _Field(16)
    rate_due_ns = _Field(24)  # state of the rate limit for the next worker, or 0
    rate_micro = _Field(25)  # starts allowed per second, in millionths, or 0 for no limit
    heartbeat_ns = _Field(17)  # time at which a handler last reported progress
    loop_thread = _Field(11)  # ID of the thread that runs the event loop
    # Time of the event loop's last heartbeat, or 0 while no coroutine runs.
    loop_heartbeat_ns = _Field(19)
    suspects_left = _Field(57)  # suspects not run since a crash, set by the supervisor at a fork
    round_size = _Field(58)  # number of suspects that are running now
    suspects = _Field(59)  # number of all suspects, including those already run
    # written by the housekeeper
    reclaim_requested = _Field(20)
    # written once, when the slot gets its assignment
    _name_length = _Field(30)
    # words whose layout is defined in other modules
    _POLL = slice(31, 37)
    _WAITS = slice(40, 54)

    def __init__(self, view: memoryview, index: int, board: Scoreboard) -> None:
        self.index, self.board = index, board
        self._assignment: Assignment | None = None
        self._reserved = 0  # number of lanes whose memory is reserved
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
        self._blocker = view[_OFFSET_BLOCKER:_OFFSET_DELAYS]
        self.delay_histogram: memoryview[int] = view[_OFFSET_DELAYS:_HEAD_END].cast("Q")
        self.sequences: memoryview[int] = view[_OFFSET_SEQUENCES:_OFFSET_LANES].cast("Q")
        self.states = view[_OFFSET_STATES : _OFFSET_STATES + ENTRIES_MAX]
        self._places = view[_OFFSET_PLACES:_USED_BYTES]

    @property
    def assignment(self) -> Assignment | None:
        """The assignment that the slot belongs to, or None while the slot is unused."""
        # Every process reads the name often. It never changes, so it is parsed only once.
        if self._assignment is None and (length := self._name_length):
            topic, partition, group = bytes(self._name[:length]).decode().split("\n")
            self._assignment = Assignment(topic, int(partition), group)
        return self._assignment

    def name(self, assignment: Assignment) -> None:
        """Give the slot to an assignment, permanently."""
        raw = f"{assignment.topic}\n{assignment.partition}\n{assignment.group}".encode()
        self._name[: len(raw)] = raw
        self._name_length = len(raw)

    def counter(self, name: str) -> int:
        """Return the value of a counter. `COUNTERS` lists the names."""
        return self.counters[COUNTERS.index(name)]

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter. Only one process at a time may write to it."""
        self.counters[COUNTERS.index(name)] += amount

    def histogram(self, name: str) -> tuple[list[int], float]:
        """Return the count of each bucket, including one for +Inf, and the sum in seconds.

        `name` is "handle" or "ack", whose bounds are `BUCKETS`, or "delay", whose bounds are
        `DELAY_BUCKETS`.
        """
        if name == "delay":
            delays = self.delay_histogram.tolist()
            return delays[:-1], delays[-1] / 1e3
        words = self.handle_histogram if name == "handle" else self.ack_histogram
        values = words.tolist()
        return values[:-1], values[-1] / 1e9

    def heartbeat(self) -> None:
        """Record that a handler is making progress."""
        self.heartbeat_ns = now_ns()

    @property
    def blocker(self) -> str:
        """The code that last blocked the event loop, as `FILE:LINE in FUNCTION`, or ''."""
        return bytes(self._blocker).rstrip(b"\0").decode("utf-8", "replace")

    def note_blocker(self, place: str) -> None:
        """Record the code that is blocking the event loop. Only its last 256 bytes are kept."""
        raw = place.encode("utf-8", "replace")[-_BLOCKER_BYTES:]
        self._blocker[:] = raw.ljust(_BLOCKER_BYTES, b"\0")

    def detach(self) -> None:
        """Replace the shared pages with private memory full of zeros.

        All existing views of the slot then show the private memory. Call this only in a forked
        child. Raises OSError if the operating system has no memory left.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.words))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(address, SLOT_BYTES, protection, _OURS_ALONE, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "no memory for a slot of our own")

    # --- the lease, which only the supervisor's successor reads ---

    def note_lease(self, lease: Lease, next_token: str = "") -> None:
        """Record the worker's lease, and the token that is about to replace its token.

        Call this before sending the command that replaces the token. If the supervisor is killed,
        its successor repeats the command, which acknowledges messages and counts crashes only once.
        Raises ValueError if a token is longer than 32 bytes.
        """
        self.epoch = lease.epoch
        raw = lease.token.encode(), next_token.encode()
        if max(map(len, raw)) > _TOKEN_BYTES:
            raise ValueError(f"a token of more than {_TOKEN_BYTES} bytes")
        padded = [each.ljust(_TOKEN_BYTES, b"\0") for each in raw]
        checked = self._lease_sum(padded[0], padded[1], self.epoch)
        self._lease[: _LEASE.size] = _LEASE.pack(*padded, self.epoch, checked)

    def forget_lease(self) -> None:
        """Record that the assignment has no owner here."""
        self._lease[: _LEASE.size] = bytes(_LEASE.size)

    def lease(self) -> RecordedLease | None:
        """Return the lease that `note_lease` has written, or None if there is none.

        Raises ValueError if the record is damaged, for example because it was only partly written.
        """
        assignment = self.assignment
        token, next_token, epoch, found = _LEASE.unpack(self._lease[: _LEASE.size])
        if assignment is None or token == next_token == bytes(_TOKEN_BYTES):
            return None
        if found != self._lease_sum(token, next_token, epoch):
            raise ValueError("token checksum mismatch")
        texts = [raw.rstrip(b"\0").decode("ascii") for raw in (token, next_token)]
        return RecordedLease(Lease(assignment, texts[0], epoch), texts[1])

    def _lease_sum(self, token: bytes, next_token: bytes, epoch: int) -> int:
        name = bytes(self._name[: self._name_length])
        return zlib.crc32(name + token + next_token + epoch.to_bytes(8, "little"))

    # --- the batch ---

    def post_batch(self, places: list[bytes]) -> None:
        """Write the places of all entries in flight, and set all states to WAITING."""
        raw = b" ".join(places)
        if len(places) > ENTRIES_MAX:
            raise ValueError(
                f"{len(places)} entries in flight, but a slot has room for {ENTRIES_MAX}"
            )
        generation = self.words[_GENERATION]
        self.words[_GENERATION] = generation + 1
        self.states[: len(places)] = bytes(len(places))
        self._places[: len(raw)] = raw
        self.words[_PLACES_SIZE] = len(raw)
        self.words[_IN_FLIGHT] = len(places)
        self.words[_GENERATION] = generation + 2

    def open_table(self, lanes: int) -> None:
        """Turn the batch into a table with `table_size(lanes)` rows.

        In a table, each entry has its own row, so a worker that runs several messages at a time can
        replace single entries (see `put`) instead of the whole batch.
        """
        count = table_size(lanes)
        self.states[:count] = bytes([CLEARED]) * count
        self._places[: count * PLACE_BYTES_MAX] = _NO_PLACE * count
        self.words[_LANES] = lanes
        self.words[_PLACES_SIZE] = count * PLACE_BYTES_MAX
        self.words[_IN_FLIGHT] = count

    def put(self, index: int, *places: bytes) -> None:
        """Write entries to the table, starting at a CLEARED index. Their state becomes WAITING."""
        start, raw = index * PLACE_BYTES_MAX, _PLACE_FORMAT * len(places) % places
        self._places[start : start + len(raw)] = raw
        self.states[index : index + len(places)] = bytes(len(places))

    def batch(self) -> Batch:
        """Return the batch of a dead worker.

        A batch that is only partly written counts as empty, because none of its entries has been
        started yet, and the previous batch was settled in the round trip that fetched this one.
        """
        count = self.in_flight
        if self.generation % 2 or not count:
            return Batch([], [])
        places = self._read_places()
        states = bytes(self.states[:count])
        batch = Batch([], [])
        by_state = {DONE: batch.done, RUNNING: batch.running}
        for place, state in zip(places, states, strict=True):
            by_state.get(state, []).append(place)
        return batch

    def unsettled_places(self) -> list[bytes]:
        """Return the places of entries in flight that have neither succeeded nor been cleared.

        Call this only in the worker.
        """
        states = bytes(self.states[: self.in_flight])
        return [
            place
            for place, state in zip(self._read_places(), states, strict=False)
            if state not in (DONE, CLEARED)
        ]

    def _read_places(self) -> list[bytes]:
        raw = bytes(self._places[: self.words[_PLACES_SIZE]])
        if len(raw) != self.words[_IN_FLIGHT] * PLACE_BYTES_MAX:
            return raw.split(b" ")  # a batch, whose last place has no separator after it
        # This is a table, whose rows have a fixed width. A half-written place may contain a space.
        starts = range(0, len(raw), PLACE_BYTES_MAX)
        return [raw[start : start + PLACE_BYTES_MAX].rstrip() for start in starts]

    @property
    def unfinished(self) -> int:
        """The number of entries in flight that are waiting or running, for other processes.

        A batch stays in the slot until the next one replaces it, but finished entries in it do not
        count.
        """
        states = bytes(self.states[: self.in_flight])
        return states.count(WAITING) + states.count(RUNNING)

    @property
    def running(self) -> list[RunningEntry]:
        """The entries whose handler is running, as another process sees them without a lock."""
        count = self.in_flight
        if self.generation % 2 or not count:
            return []
        indexes = [i for i, state in enumerate(bytes(self.states[:count])) if state == RUNNING]
        if not indexes:
            return []
        used, latest = self._lanes_used, self.run_seq
        lanes = self.lanes[: 2 * used].tolist()
        # An unused lane contains (0, 0), which must not be taken for a run of entry 0.
        runs = {
            i: (start, sequence or latest)
            for i, start, sequence in zip(
                lanes[0::2], lanes[1::2], self.sequences[:used].tolist(), strict=True
            )
            if start
        }
        first = (lanes[1], latest)  # all entries of a batch share one lane
        places = self._read_places()
        return [RunningEntry(places[i], *runs.get(i, first)) for i in indexes if i < len(places)]

    def running_in(self, sequence: int) -> list[bytes]:
        """Return the places of the entries in one run, or an empty list once the run is over."""
        return [each.place for each in self.running if each.sequence == sequence]

    def checked_batch(self) -> Batch:
        """Return the batch in a slot that a killed supervisor has left.

        This method validates everything. `batch` does not, because it reads data of a worker of
        this supervisor. Raises ValueError if the batch is damaged.
        """
        if self.in_flight > ENTRIES_MAX or self.words[_PLACES_SIZE] > len(self._places):
            raise ValueError("batch is longer than a slot")
        batch = self.batch()
        for place in (*batch.done, *batch.running):
            if not _PLACE.fullmatch(place):
                raise ValueError("an entry in flight has no place")
        return batch

    def restore(self, done: list[bytes], running: list[bytes]) -> None:
        """Write the finished and running entries of a predecessor as the batch of this slot.

        Raises OSError if the memory file system is full.
        """
        self.reserve(max(1, len(done) + len(running) - FETCHED_MAX))
        self.post_batch([*done, *running])
        self.states[: len(done)] = bytes([DONE]) * len(done)
        self.states[len(done) : len(done) + len(running)] = bytes([RUNNING]) * len(running)

    def acquit(self, suspects: Collection[bytes]) -> None:
        """Set running entries that are not suspects to WAITING, so that none of them is charged."""
        count = self.in_flight
        if self.generation % 2 or not count:
            return
        for index, place in enumerate(self._read_places()[:count]):
            if self.states[index] == RUNNING and place not in suspects:
                self.states[index] = WAITING

    def forget_batch(self) -> None:
        """Clear the batch, because its entries are settled or belong to an earlier process."""
        self.words[_IN_FLIGHT] = 0
        self.words[_PLACES_SIZE] = 0
        generation = self.words[_GENERATION]
        self.words[_GENERATION] = generation + generation % 2

    def vacate(self) -> None:
        """Clear the process. The counters stay, and so does the batch until it has been settled."""
        self.pid = 0
        self.state = WorkerState.GONE
        self.command = WorkerCommand.NONE
        self.soft_kill_seq = 0
        self.poll.end()
        self.loop_heartbeat_ns = 0
        # The next worker must not see the runs in these lanes, so they are cleared.
        if not self.run_seq:
            return  # the slot was never used, so its tables may have no memory
        used = self._lanes_used
        self.lanes[: 2 * used] = memoryview(bytes(8 * 2 * used)).cast("Q")
        self.sequences[:used] = memoryview(bytes(8 * used)).cast("Q")
        self.words[_LANES] = 0

    def clear(self) -> None:
        """Clear the batch and the state of the exited process, but keep the counters.

        Call this after the messages of the dead worker have been settled.
        """
        self.forget_batch()
        self.vacate()

    @property
    def _lanes_used(self) -> int:
        return min(max(1, self.words[_LANES]), LANES_MAX)

    def reserve(self, lanes: int) -> None:
        """Reserve the memory that a worker with this number of lanes may write to in this slot.

        Without a reservation, writing to a page would kill the process (SIGBUS) if the file system
        is full. Raises OSError if the file system is already full.
        """
        if lanes > self._reserved:
            count = table_size(lanes)
            self.board.reserve(self.index, HEAD_BYTES + count)
            for offset, size in (
                (_OFFSET_SEQUENCES, 8 * lanes),
                (_OFFSET_LANES, 16 * lanes),
                (_OFFSET_PLACES, PLACE_BYTES_MAX * count),
            ):
                self.board.reserve(self.index, size, offset)
            self._reserved = lanes


class Scoreboard:
    """The mapping and its slots. The first `used` slots have a name, which never changes.

    `descriptor` is the file descriptor of an empty memory file, or -1 for an anonymous mapping.
    Raises OSError if there is not enough memory.
    """

    used = _Field(0)  # number of slots that have a name
    _flags = _Field(1)
    progress_ns = _Field(2)  # end of the supervisor's last tick, `now_ns` clock
    housekeeper_progress_ns = _Field(3)  # end of the housekeeper's last round, or its fork
    unowned = _Field(4)  # number of wanted assignments without an owner at the last check

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
        # If the previous supervisor's scoreboard file could not be used, the path to which it was
        # moved.
        self.refused_file: Path | None = None
        self._slots: dict[int, WorkerSlot] = {}
        self._allotted: dict[Assignment, WorkerSlot] = {}

    @property
    def flags(self) -> InstanceFlags:
        """The state of the instance, as the supervisor knows it."""
        return InstanceFlags(self._flags)

    @flags.setter
    def flags(self, value: InstanceFlags) -> None:
        self._flags = value

    def slot(self, index: int) -> WorkerSlot:
        """Return the slot with this index."""
        found = self._slots.get(index)
        if found is None:
            start = BOARD_BYTES + index * SLOT_BYTES
            found = self._slots[index] = WorkerSlot(
                self._view[start : start + SLOT_BYTES], index, self
            )
        return found

    def slots(self) -> list[WorkerSlot]:
        """Return all slots that have a name."""
        return [self.slot(index) for index in range(self.used)]

    def allot(self, assignment: Assignment) -> WorkerSlot:
        """Return the assignment's slot. At the first call for an assignment, give it an unused one.

        Only the supervisor may call this. Raises ValueError if all slots are in use, and OSError if
        there is not enough memory.
        """
        if assignment not in self._allotted:
            if self.used == self.size:
                raise ValueError(f"all {self.size} slots of the scoreboard are in use")
            self.reserve(self.used, HEAD_BYTES)
            slot = self._allotted[assignment] = self.slot(self.used)
            slot.name(assignment)
            self.used += 1
        return self._allotted[assignment]

    def reserve(self, index: int, size: int, offset: int = 0) -> None:
        """Allocate `size` bytes of a slot, starting at `offset`.

        Raises OSError if the memory is full.
        """
        if self._descriptor >= 0:
            start = BOARD_BYTES + index * SLOT_BYTES + offset
            os.posix_fallocate(self._descriptor, start, size)

    def write_header(self, raw: bytes) -> None:
        """Write the header of the scoreboard file. Raises ValueError if it is too long."""
        if len(raw) > BOARD_BYTES - HEADER_OFFSET:
            raise ValueError("the header of the scoreboard is too long")
        self._view[HEADER_OFFSET : HEADER_OFFSET + len(raw)] = raw

    def counter(self, name: str) -> int:
        """Return the value of an instance-wide counter. `BOARD_COUNTERS` lists the names."""
        return self._counters[BOARD_COUNTERS.index(name)]

    def add(self, name: str, amount: int = 1) -> None:
        """Add to an instance-wide counter."""
        self._counters[BOARD_COUNTERS.index(name)] += amount


class InstanceFlags(enum.IntFlag):
    """The condition of the instance, for health checks."""

    NONE = 0
    STARTED = 1
    REDIS_OK = 2
    DRAINING = 4
    PAUSED = 8
    STANDBY = 16  # healthy without assignments, because others own every partition
    DRAINED = 32  # an operator has set it to own nothing
    LIMITED = 64  # the operating system refuses to start more processes
    MEMBER = 128  # Redis accepted its last heartbeat, so its name is unique
    DUPLICATE = 256  # another run uses its name and is sending heartbeats
