"""The scoreboard: a process reads another one's values, even if that one died while writing."""

from __future__ import annotations

import os
import signal

import pytest

from streamqd import scoreboard
from streamqd.idle_reason import CIRCUIT, FLOOD, SETTLED_SO_FAR
from streamqd.model import LANES_MAX, Assignment
from streamqd.scoreboard import (
    BOARD_COUNTERS,
    BUCKETS,
    CLEARED,
    COUNTERS,
    DONE,
    ENTRIES_MAX,
    FAILED,
    PLACE_BYTES_MAX,
    RUNNING,
    WAITING,
    WORD_COMMAND,
    Batch,
    InstanceFlags,
    RunningEntry,
    Scoreboard,
    WorkerCommand,
    WorkerSlot,
    WorkerState,
    table_size,
)

ASSIGNMENT = Assignment("access", 3, "hits")
PLACES = [b"m:1763640000000-0", b"r:1763640000000-0", b"m:1763640000000-1", b"m:1-2", b"m:1-3"]


@pytest.fixture
def board() -> Scoreboard:
    return Scoreboard(slots=4)


@pytest.fixture
def slot(board: Scoreboard) -> WorkerSlot:
    return board.allot(ASSIGNMENT)


# --- slots ----------------------------------------------------------------------------------------


def test_assignment_keeps_its_slot(board: Scoreboard):
    first = board.allot(ASSIGNMENT)
    second = board.allot(Assignment("access", 3, "agents"))
    assert (first.index, second.index) == (0, 1)
    assert board.allot(ASSIGNMENT) is first
    assert [slot.assignment for slot in board.slots()] == [
        ASSIGNMENT,
        Assignment("access", 3, "agents"),
    ]
    assert board.used == 2


def test_unused_slot_has_no_assignment(board: Scoreboard):
    assert board.slot(2).assignment is None


def test_slot_fits_the_longest_names(board: Scoreboard):
    assignment = Assignment("t" * 64, 4095, "g" * 64)
    assert board.allot(assignment).assignment == assignment


def test_full_scoreboard_raises(board: Scoreboard):
    for number in range(4):
        board.allot(Assignment("a", number, "g"))
    with pytest.raises(ValueError, match="all 4 slots"):
        board.allot(Assignment("a", 4, "g"))


def test_slots_do_not_overlap(board: Scoreboard):
    slots = [board.allot(Assignment("a", number, "g")) for number in range(4)]
    for number, one in enumerate(slots):
        one.post_batch([b"m:%d-%d" % (2**63 + number, entry) for entry in range(ENTRIES_MAX)])
        one.states[ENTRIES_MAX - 1] = DONE
        one.lanes[-1] = 2**64 - 1
        one.ack_histogram[-1] = number
        one.delay_histogram[-1] = number
        for name in COUNTERS:
            one.add(name, number + 1)
    for number, one in enumerate(slots):
        assert one.assignment == Assignment("a", number, "g")
        assert one.batch().done == [b"m:%d-%d" % (2**63 + number, ENTRIES_MAX - 1)]
        assert {one.counter(name) for name in COUNTERS} == {number + 1}
        assert one.histogram("ack")[1] == number / 1e9
        assert one.histogram("delay")[1] == number / 1e3
        assert one.blocker == ""
        assert one.histogram("handle") == ([0] * (len(BUCKETS) + 1), 0.0)


# --- reading from another process -----------------------------------------------------------------


def run_in_child(work) -> int:
    """Run `work` in a forked process. Return the process's status as waitpid reports it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_parent_reads_the_batch_of_a_killed_child(slot: WorkerSlot):
    def work() -> None:
        slot.post_batch(PLACES)
        slot.states[0] = CLEARED
        slot.states[1] = DONE
        slot.states[2] = FAILED
        slot.lanes[0], slot.lanes[1] = 3, 777
        slot.states[3] = RUNNING
        slot.add("fetched", 5)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(run_in_child(work)) == signal.SIGKILL
    assert slot.batch() == Batch([PLACES[1]], [PLACES[3]])
    assert slot.running == [RunningEntry(PLACES[3], 777, slot.run_seq)]
    assert slot.unfinished == 2  # the entry that is running and the next one
    assert slot.counter("fetched") == 5


def test_half_written_batch_is_read_as_empty(slot: WorkerSlot):
    """A half-written batch counts as empty.

    It may combine new places with old states, which would charge a wrong message.
    """
    slot.post_batch(PLACES)
    slot.states[0] = RUNNING

    class DiedError(Exception):
        pass

    class Places(list):  # kills its own process between the two halves of a write
        def __len__(self) -> int:
            if slot.generation % 2:
                raise DiedError
            return super().__len__()

    with pytest.raises(DiedError):
        slot.post_batch(Places(reversed(PLACES)))
    assert slot.generation % 2 == 1
    assert slot.batch() == Batch([], [])
    assert slot.running == []


def test_generation_is_even_after_a_half_written_batch(slot: WorkerSlot):
    slot.generation = 7
    slot.clear()
    assert slot.generation % 2 == 0
    slot.post_batch(PLACES[:1])
    slot.states[0] = RUNNING
    assert slot.batch().running == PLACES[:1]


def test_new_batch_clears_the_previous_states(slot: WorkerSlot):
    slot.post_batch(PLACES)
    for index in range(len(PLACES)):
        slot.states[index] = RUNNING
    slot.post_batch(PLACES[:2])
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == 2
    slot.post_batch(PLACES)
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == 5


def test_empty_batch_is_empty(slot: WorkerSlot):
    slot.post_batch(PLACES)
    slot.post_batch([])
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == 0


def test_oversized_batch_is_refused_before_a_write(slot: WorkerSlot):
    slot.post_batch(PLACES)
    with pytest.raises(ValueError, match=f"{ENTRIES_MAX + 1} entries"):
        slot.post_batch([b"m:1-1"] * (ENTRIES_MAX + 1))
    assert slot.unfinished == len(PLACES)


def test_slot_fits_the_longest_entry_ids(slot: WorkerSlot):
    longest = b"m:18446744073709551615-18446744073709551615"
    slot.post_batch([longest] * ENTRIES_MAX)
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == ENTRIES_MAX
    slot.states[ENTRIES_MAX - 1] = RUNNING
    assert slot.batch().running == [longest]


def test_slot_records_each_concurrent_run(slot: WorkerSlot):
    slot.open_table(2)
    slot.put(0, *PLACES)
    for lane, index in enumerate((1, 3)):
        slot.lanes[2 * lane], slot.lanes[2 * lane + 1] = index, 100 + lane
        slot.sequences[lane] = 7 + lane
        slot.states[index] = RUNNING
    slot.run_seq = 8
    assert slot.running == [RunningEntry(PLACES[1], 100, 7), RunningEntry(PLACES[3], 101, 8)]
    assert slot.running_in(7) == [PLACES[1]]
    assert slot.running_in(9) == []


def test_batch_runs_in_one_lane(slot: WorkerSlot):
    slot.post_batch(PLACES)
    slot.lanes[0], slot.lanes[1], slot.run_seq = 1, 100, 7
    slot.states[1] = slot.states[2] = RUNNING
    assert slot.running == [RunningEntry(PLACES[1], 100, 7), RunningEntry(PLACES[2], 100, 7)]


def test_slot_table_entries_are_added_and_removed_singly(slot: WorkerSlot):
    slot.open_table(LANES_MAX)
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == 0
    longest = b"r:18446744073709551615-18446744073709551615"
    slot.put(ENTRIES_MAX - 1, longest)
    slot.put(3, PLACES[0])
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == 2
    slot.states[ENTRIES_MAX - 1], slot.states[3] = RUNNING, DONE
    assert slot.batch() == Batch([PLACES[0]], [longest])
    assert slot.unfinished == 1
    slot.states[3] = CLEARED
    slot._places[3 * PLACE_BYTES_MAX + 1 : 3 * PLACE_BYTES_MAX + 2] = b" "  # a torn write
    assert slot.batch() == Batch([], [longest])
    assert slot.unfinished == 1
    slot.put(3, PLACES[1])
    assert slot.unfinished == 2


@pytest.mark.parametrize("lanes", [2, 128, 600, LANES_MAX])
def test_slot_table_size_follows_its_lanes(slot: WorkerSlot, lanes: int):
    """The slot of a worker takes little memory if the worker has few lanes."""
    slot.open_table(lanes)
    last = table_size(lanes) - 1
    assert slot.in_flight == last + 1
    slot.put(last, PLACES[0])
    slot.states[last], slot.run_seq = RUNNING, 9
    slot.lanes[2 * lanes - 2], slot.lanes[2 * lanes - 1] = last, 100
    slot.sequences[lanes - 1] = 9
    assert slot.running == [RunningEntry(PLACES[0], 100, 9)]
    assert slot.unsettled_places() == [PLACES[0]]
    assert slot.checked_batch() == Batch([], [PLACES[0]])
    slot.vacate()
    assert set(slot.lanes.tolist()) == set(slot.sequences.tolist()) == {0}
    assert slot.batch() == Batch([], [PLACES[0]])


def test_slot_memory_follows_its_lanes():
    """The memory of a slot depends on its lanes.

    A slot for 4,096 coroutines is large, and a board may have 4,096 slots.
    """
    descriptor = os.memfd_create("board")
    try:
        board = scoreboard.Scoreboard(4, descriptor)

        def taken() -> int:
            return os.fstat(descriptor).st_blocks * 512

        few, many, none = (board.allot(Assignment("orders", number, "bill")) for number in range(3))
        before = taken()
        few.reserve(128)
        few.reserve(1)
        assert taken() - before <= 72 << 10
        few.open_table(128)
        few.clear()
        assert taken() - before <= 72 << 10, "nothing was written beside it"
        none.clear()
        assert none.running == []
        assert taken() - before <= 72 << 10, "no worker used it"
        many.reserve(LANES_MAX)
        whole = taken()
        many.open_table(LANES_MAX)
        many.run_seq = 1
        many.clear()
        none.restore([PLACES[0]], [])
        assert taken() - whole <= 72 << 10
    finally:
        os.close(descriptor)


def test_slot_table_accepts_several_entries_together(slot: WorkerSlot):
    slot.open_table(LANES_MAX)
    slot.put(3, PLACES[3])
    slot.put(4, *PLACES[:3])
    assert slot.unfinished == 4
    slot.states[4:7] = bytes([DONE, RUNNING, DONE])
    assert slot.batch() == Batch([PLACES[0], PLACES[2]], [PLACES[1]])
    assert slot.unfinished == 2


def test_clear_resets_the_process_but_keeps_the_counters(slot: WorkerSlot):
    slot.post_batch(PLACES)
    slot.pid, slot.state, slot.command, slot.soft_kill_seq = (
        9,
        WorkerState.READY,
        WorkerCommand.STOP,
        4,
    )
    slot.run_seq = 17
    slot.add("acked", 3)
    slot.clear()
    assert (slot.pid, slot.state, slot.command) == (0, WorkerState.GONE, WorkerCommand.NONE)
    assert slot.soft_kill_seq == 0
    assert slot.batch() == Batch([], [])
    assert slot.unfinished == 0
    assert slot.counter("acked") == 3
    assert slot.run_seq == 17, "a run sequence is never used again"


def test_zeroed_memory_means_waiting():
    assert WAITING == 0


# --- the instance ---------------------------------------------------------------------------------


def test_board_stores_flags_progress_and_counters(board: Scoreboard):
    board.flags = InstanceFlags.STARTED | InstanceFlags.STANDBY
    board.progress_ns = 5
    board.housekeeper_progress_ns = 6
    for number, name in enumerate(BOARD_COUNTERS, 1):
        board.add(name, number)
    assert board.flags == InstanceFlags.STARTED | InstanceFlags.STANDBY
    assert (board.progress_ns, board.housekeeper_progress_ns) == (5, 6)
    assert [board.counter(n) for n in BOARD_COUNTERS] == list(range(1, len(BOARD_COUNTERS) + 1))
    assert board.used == 0


def test_unknown_slot_counter_is_an_error(board: Scoreboard, slot: WorkerSlot):
    with pytest.raises(ValueError, match="not in tuple"):
        slot.add("nonsense")
    with pytest.raises(ValueError, match="not in tuple"):
        board.add("nonsense")


def test_slot_fields_do_not_overlap():
    fields = [value for value in vars(WorkerSlot).values() if isinstance(value, scoreboard._Field)]
    # Two words are used only by methods, and have no attribute.
    own = [scoreboard._PLACES_SIZE, scoreboard._LANES]
    numbers = [*own, *(field.index for field in fields)]
    assert len(numbers) == len(set(numbers))
    poll, waits = range(64)[WorkerSlot._POLL], range(64)[WorkerSlot._WAITS]
    assert not set(poll) & {*numbers, *waits}
    assert not set(waits) & set(numbers)
    kept = [word for words in (CIRCUIT, FLOOD, SETTLED_SO_FAR) for word in words]
    assert len(kept) == len(set(kept))
    assert max(kept) < len(waits)


def test_bucket_bounds_equal_the_shifted_values():
    for seconds in (0.0, 5e-7, 1.023e-6, 1.025e-6, 0.003, 1.0, 20.0, 5000.0):
        index = min((int(seconds * 1e9) >> 10).bit_length(), len(BUCKETS))
        assert index == len(BUCKETS) or seconds < BUCKETS[index]
        assert index == 0 or seconds >= BUCKETS[index - 1]


def test_first_entry_of_a_batch_has_its_start(slot: WorkerSlot):
    """The first entry of a batch has its start.

    Unused lanes also contain index 0, and must not hide it.
    """
    slot.post_batch(PLACES)
    slot.lanes[0], slot.lanes[1] = 0, 777
    slot.states[0] = RUNNING
    assert slot.running == [RunningEntry(PLACES[0], 777, slot.run_seq)]


def test_detached_slot_writes_to_private_memory():
    """Writes of a forked child never reach the process that owns the slot."""
    board = Scoreboard(slots=4)
    slot, other = board.allot(Assignment("a", 0, "g")), board.allot(Assignment("a", 1, "g"))
    slot.words[WORD_COMMAND], slot.states[5] = 2, RUNNING
    words, states = slot.words, slot.states
    child = os.fork()
    if child == 0:
        slot.detach()
        clean = not any(words) and not any(states)
        words[WORD_COMMAND], states[5] = 7, DONE
        os._exit(0 if clean and slot.words[WORD_COMMAND] == 7 and other.assignment else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (slot.words[WORD_COMMAND], slot.states[5]) == (2, RUNNING)
