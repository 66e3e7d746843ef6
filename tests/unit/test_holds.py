"""Held keys keep their entries in order, after any failure and with any due times."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from streamqd.worker.held_keys import KeyBlocker


class HeldEntry(NamedTuple):
    number: int
    key: str
    size: int = 10


def test_held_key_is_due_on_time_with_its_entries_in_order():
    holds: KeyBlocker[HeldEntry] = KeyBlocker()
    first, second = HeldEntry(1, "a"), HeldEntry(2, "a")
    holds.hold("a", first, 5.0)
    holds.append("a", second)
    assert ("a" in holds, "b" in holds) == (True, False)
    assert (holds.entries, holds.keys, holds.size) == (2, 1, 20)
    assert holds.take(4.9) is None
    assert holds.next_due() == 5.0
    assert holds.take(5.0) == "a"
    assert holds.take(9.0) is None, "it is under way"
    assert holds.first_entries("a", 10) == [first, second]
    assert holds.first_entries("a", 1) == [first]


def test_held_entry_that_fails_again_stays_first():
    holds: KeyBlocker[HeldEntry] = KeyBlocker()
    holds.hold("a", HeldEntry(1, "a"), 1.0)
    holds.append("a", HeldEntry(2, "a"))
    assert holds.take(1.0) == "a"
    holds.hold("a", HeldEntry(1, "a"), 7.0)
    holds.reschedule("a", 2.0)
    assert holds.next_due() == 7.0
    assert [each.number for each in holds.first_entries("a", 9)] == [1, 2]
    assert holds.entries == 2


def test_held_key_is_free_without_waiting_entries():
    holds: KeyBlocker[HeldEntry] = KeyBlocker()
    holds.hold("a", HeldEntry(1, "a"), 1.0)
    holds.append("a", HeldEntry(2, "a"))
    holds.take(1.0)
    holds.remove_first("a")
    holds.reschedule("a", 3.0)
    assert holds.take(3.0) == "a", "the next one is due at once"
    holds.remove_first("a")
    assert "a" in holds, "a new entry must not pass the entry that has just run"
    holds.reschedule("a", 4.0)
    assert "a" not in holds
    assert (holds.entries, holds.size, holds.keys, holds.next_due()) == (0, 0, 0, None)


def test_held_keys_are_taken_in_due_order():
    holds: KeyBlocker[HeldEntry] = KeyBlocker()
    for key, due in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        holds.hold(key, HeldEntry(0, key), due)
    assert [holds.take(9.0) for _ in range(4)] == ["b", "c", "a", None]


def test_taken_entry_is_due_again_but_a_running_one_is_not():
    holds: KeyBlocker[HeldEntry] = KeyBlocker()
    for key in "abc":
        holds.hold(key, HeldEntry(0, key), 1.0)
    holds.take(1.0)
    holds.take(1.0)
    holds.restart(2.0, busy=["b"])
    assert holds.take(1.0) == "c"
    assert holds.take(2.0) == "a"
    assert holds.take(9.0) is None


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=40),
    st.lists(st.floats(0, 5), max_size=40),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_every_held_key_finishes_in_order(
    stream: list[tuple[str, int]], delays: list[float], longest: int, chance: object
):
    """Every held key finishes in order.

    Entries arrive, fail a number of times, and run when they are due. Some runs never start.
    """
    holds: KeyBlocker[HeldEntry] = KeyBlocker()
    left = {number: times for number, (_, times) in enumerate(stream)}
    ended: dict[str, list[int]] = defaultdict(list)
    waits = deque(delays)
    now = 0.0

    def run(one: HeldEntry) -> bool:
        if left[one.number]:
            left[one.number] -= 1
            holds.hold(one.key, one, now + (waits.popleft() if waits else 0.0))
            return False
        ended[one.key].append(one.number)
        return True

    def run_due() -> None:
        while (key := holds.take(now)) is not None:
            if chance.random() < 0.2:  # type: ignore[attr-defined]
                holds.restart(now)  # as after a connection that was lost before any entry ran
                continue
            for one in holds.first_entries(key, longest):  # type: ignore[arg-type]
                if not run(one):
                    break
                holds.remove_first(key)
            holds.reschedule(key, now)

    for number, (key, _) in enumerate(stream):
        one = HeldEntry(number, key)
        if key in holds:
            holds.append(key, one)
        else:
            run(one)
        now += 0.5
        run_due()
    while holds.keys:
        due = holds.next_due()
        assert due is not None, "a held key that never becomes due"
        now = max(now, due)
        run_due()
    for key in "abcd":
        assert ended[key] == [number for number, (each, _) in enumerate(stream) if each == key]
    assert (holds.entries, holds.size) == (0, 0)
