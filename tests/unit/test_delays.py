"""Delays that are counted by milliseconds equal the delays that are counted run by run."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest

from streamqd.message import Delivery, Message
from streamqd.model import Assignment, RawEntry
from streamqd.scoreboard import DELAY_BUCKETS, WORD_RUN_SEQ, Scoreboard, WorkerSlot
from streamqd.worker.delays import StartDelays
from streamqd.worker.entry import FetchedEntry
from streamqd.worker.runs import RunStarts
from streamqd.worker.server_clock import ServerClock

ASSIGNMENT = Assignment("access", 0, "hits")
AT_MS = 1_763_632_800_000
START = 5_000_000_300_000  # the `now_ns` clock at AT_MS
MS = 1_000_000


@pytest.fixture
def slot() -> WorkerSlot:
    return Scoreboard(1).allot(ASSIGNMENT)


@pytest.fixture
def delays() -> StartDelays:
    clock = ServerClock()
    clock.offset_ns = AT_MS * MS - START
    return StartDelays(clock)


def entry(written_ms: int, *, retried: bool = False, crashes: int = 0) -> FetchedEntry:
    message = Message(Delivery(ASSIGNMENT, "web-1", 1, lambda: None), b"", [], retried=retried)
    return FetchedEntry(0, b"m:%d-0" % written_ms, message, retried, crashes)


def raw(*ids: bytes) -> list[RawEntry]:
    return [[each, []] for each in ids]


def delay_counts(slot: WorkerSlot) -> dict[int, int]:
    counts, _ = slot.histogram("delay")
    return {bucket: count for bucket, count in enumerate(counts) if count}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_delay_counts_equal_one_count_per_run(
    delays: StartDelays, slot: WorkerSlot, seed: int, together: bool
) -> None:
    chance = random.Random(seed)
    expected: dict[int, int] = {}
    seconds = 0.0
    for _ in range(5):
        count = chance.choice((1, 2, 7, 128, 1_000))
        spread = 10 ** chance.uniform(0, 9)  # milliseconds, up to 12 days
        written = [AT_MS - int(chance.uniform(-0.1, 1) * spread) for _ in range(count)]
        if together:
            start = START + int(chance.uniform(0, 1_000 * MS))
            starts = [start] * count
            delays.note_all([entry(each) for each in written], start)
        else:
            written.sort()
            most = chance.choice((1, 1_000)) * MS
            starts = sorted(START + int(chance.uniform(0, most)) for _ in range(count))
            ids = [b"%d-%d" % (each, chance.randrange(99)) for each in written]
            delays.note_each(raw(b"1-1", *ids, b"9999999999999-0"), 1, starts)
        for one, start in zip(written, starts, strict=True):
            delay = max(0, AT_MS - one + (start - START) // MS) / 1_000
            bucket = bisect_right(DELAY_BUCKETS, delay)
            expected[bucket] = expected.get(bucket, 0) + 1
            seconds += delay
    delays.publish(slot)
    assert delay_counts(slot) == expected
    assert slot.histogram("delay")[1] == pytest.approx(seconds, rel=0.5)
    delays.publish(slot)
    assert delay_counts(slot) == expected


@pytest.mark.parametrize("seed", range(40))
def test_unrecorded_starts_are_counted_exactly(
    delays: StartDelays, slot: WorkerSlot, seed: int
) -> None:
    """Starts that are not recorded are counted exactly.

    The worker reads the clock before a start if its last reading is more than 20 ms old.
    """
    chance = random.Random(seed)
    expected: dict[int, int] = {}
    starts, now = RunStarts(slot, delays), START
    for _ in range(20):
        age = chance.choice((1, 100, 2_000, 4_050, 60_000))
        ended = AT_MS + (now - START) // MS - age
        spread = chance.choice((1, 900))
        written = sorted(ended - chance.randrange(spread) for _ in range(60))
        starts.look_ahead(b"%d-0" % written[0], b"%d-0" % written[-1], now)
        note, looked = starts.note, now
        pace = chance.choice((1_000, 100_000, 3 * MS, 40 * MS))
        for each in written[: chance.choice((0, 1, 60))]:
            now += int(chance.uniform(0, 2) * pace)
            if now - looked > 20 * MS:
                note, looked = starts.choose_note(now), now
            if chance.random() < 0.01:
                note = starts.record()
                now += int(chance.uniform(0, 3_000)) * MS  # waits until the lease is trusted
                looked = now
            note(now)
            slot.lanes[1] = now
            slot.words[WORD_RUN_SEQ] += 1
            delay = max(0, AT_MS - each + (now - START) // MS) / 1_000
            bucket = bisect_right(DELAY_BUCKETS, delay)
            expected[bucket] = expected.get(bucket, 0) + 1
        starts.count(raw(b"1-1", *(b"%d-0" % each for each in written)), 1)
    delays.publish(slot)
    assert delay_counts(slot) == expected


def test_message_from_the_future_has_no_delay(delays: StartDelays, slot: WorkerSlot) -> None:
    """A message whose ID is in the future has no delay.

    Either the worker's estimate of the server's clock is late, or a producer chose the ID.
    """
    delays.note_each(raw(b"%d-0" % (AT_MS + 5), b"18446744073709551615-0"), 0, [START, START])
    delays.publish(slot)
    assert slot.histogram("delay") == ([2, *[0] * len(DELAY_BUCKETS)], 0.0)


def test_delay_counter_wraps_within_64_bits(delays: StartDelays, slot: WorkerSlot) -> None:
    slot.delay_histogram[-1] = 2**64 - 1
    delays.note_each(raw(*(b"1-%d" % each for each in range(1_000))), 0, [START] * 1_000)
    delays.publish(slot)
    assert delay_counts(slot) == {len(DELAY_BUCKETS): 1_000}


def test_ids_of_any_length_are_counted_once(delays: StartDelays, slot: WorkerSlot) -> None:
    delays.note_each(raw(b"5-1", b"70-1", b"%d-1" % (AT_MS - 3)), 0, [START] * 3)
    delays.publish(slot)
    assert delay_counts(slot) == {len(DELAY_BUCKETS): 2, bisect_right(DELAY_BUCKETS, 0.003): 1}


def test_only_first_attempts_have_a_delay(delays: StartDelays, slot: WorkerSlot) -> None:
    """Only first attempts have a delay.

    Retries, messages that crashed a process, and messages that waited in place have none.
    """
    kept = entry(AT_MS - 70_000)
    kept.keep(0, START)
    others = [entry(AT_MS - 9_000, retried=True), entry(AT_MS - 9_000, crashes=1), kept]
    delays.note_all([entry(AT_MS - 3), *others, entry(AT_MS - 9_500)], START)
    delays.publish(slot)
    assert delay_counts(slot) == {bisect_right(DELAY_BUCKETS, each): 1 for each in (0.003, 9.5)}
