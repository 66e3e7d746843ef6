"""One entry per key may start, in order, no matter in which order the runs finish."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from streamqd.worker.ordering import ByKey, Ordering, Unordered


@dataclass(frozen=True)
class Entry:
    number: int
    key: bytes | None


def take_one(ordering: Ordering[Entry]) -> Entry | None:
    return next(iter(ordering.take(1)), None)


KEYS = st.lists(st.sampled_from([None, b"a", b"b", b"c"]), max_size=60)


@given(KEYS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_ordering_starts_each_key_in_order_one_at_a_time(
    keys: list[bytes | None], lanes: int, chance: random.Random
):
    ordering: Ordering[Entry] = ByKey()
    entries = [Entry(number, key) for number, key in enumerate(keys)]
    coming, running, done = list(entries), [], defaultdict(list)
    dropped = False
    while coming or running or ordering.waiting:
        choice = chance.random()
        if coming and choice < 0.4:
            ordering.add([coming.pop(0)])
        elif len(running) < lanes and (entry := take_one(ordering)) is not None:
            assert entry.key is None or entry.key not in {each.key for each in running}
            running.append(entry)
        elif not dropped and choice > 0.95:
            # Entries that are waiting are dropped, and arrive again in order. Those that are
            # running continue.
            back = sorted(ordering.drop(), key=lambda each: each.number)
            assert (ordering.waiting, ordering.ready) == (0, 0)
            coming = back + coming
            dropped = True
        elif running:
            entry = running.pop(chance.randrange(len(running)))
            done[entry.key].append(entry.number)
            ordering.mark_finished([entry])
    for key in (b"a", b"b", b"c"):
        assert done[key] == [each.number for each in entries if each.key == key]
    assert sorted(number for numbers in done.values() for number in numbers) == list(
        range(len(keys))
    )


def test_entries_without_keys_never_wait():
    ordering: Ordering[Entry] = Unordered()
    for number in range(3):
        ordering.add([Entry(number, b"a")])
    assert [each.number for each in ordering.take(9)] == [0, 1, 2]


def test_ordering_does_not_wait_for_a_slow_key():
    ordering: Ordering[Entry] = ByKey()
    slow, behind, other = Entry(0, b"a"), Entry(1, b"a"), Entry(2, b"b")
    for entry in (slow, behind, other):
        ordering.add([entry])
    assert (take_one(ordering), take_one(ordering), take_one(ordering)) == (slow, other, None)
    ordering.mark_finished([slow])
    assert take_one(ordering) == behind


def test_entries_waiting_for_a_key_can_be_removed():
    ordering: Ordering[Entry] = ByKey()
    for number, key in enumerate((b"a", b"a", b"b", b"a", None)):
        ordering.add([Entry(number, key)])
    first = take_one(ordering)
    assert first is not None
    assert [each.number for each in ordering.take_waiting(first)] == [1, 3]
    assert ordering.waiting == 2
    ordering.mark_finished([first])
    assert [each.number for each in (take_one(ordering), take_one(ordering)) if each] == [2, 4]
    assert take_one(ordering) is None
    ordering.add([Entry(5, b"a")])
    assert take_one(ordering) == Entry(5, b"a"), "its key is free"
    assert ordering.take_waiting(Entry(6, None)) == []


def test_ordering_takes_and_finishes_several_entries():
    ordering: Ordering[Entry] = ByKey()
    entries = [Entry(number, key) for number, key in enumerate((b"a", None, b"a", b"b", b"a"))]
    ordering.add(entries)
    assert (ordering.ready, ordering.waiting) == (3, 5)
    assert ordering.take(2) == entries[:2]
    assert ordering.take(9) == [entries[3]]
    assert (ordering.ready, ordering.waiting) == (0, 2)
    ordering.mark_finished([entries[3], entries[1], entries[0]])
    assert not ordering.is_key_taken(b"b")
    assert ordering.take(9) == [entries[2]], "one of a key at a time"
    ordering.mark_finished([entries[2]])
    assert ordering.take(9) == [entries[4]]
    ordering.mark_finished([entries[4]])
    assert (ordering.waiting, ordering.is_key_taken(b"a")) == (0, False)
