"""The flood guard stops a partition if many dead letters come among few handled messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamqd.policy.dead_letter_rate import NOTHING, DeadLetterRate, DeadLetterRateMemory


def test_many_dead_letters_in_the_window_are_a_flood():
    flood = DeadLetterRate(dead_letters=3, window=10.0, share=0.5)
    assert [flood.record_dead_letter(at, n) for n, at in enumerate((0.0, 5.0, 10.0), 1)] == [
        False,
        False,
        True,
    ]


def test_slow_dead_letters_are_no_flood():
    flood = DeadLetterRate(dead_letters=3, window=10.0, share=0.5)
    assert not any(flood.record_dead_letter(number * 5.1, number) for number in range(1, 50))


def test_dead_letters_among_many_successes_are_no_flood():
    flood = DeadLetterRate(dead_letters=3, window=10.0, share=0.5)
    assert not any(flood.record_dead_letter(number * 0.01, 3 * number) for number in range(1, 50))


def test_dead_letters_at_exactly_the_share_are_a_flood():
    flood = DeadLetterRate(dead_letters=3, window=10.0, share=0.5)
    # Three of six messages are dead, counted from the first dead letter.
    assert [flood.record_dead_letter(0.0, settled) for settled in (10, 13, 15)] == [
        False,
        False,
        True,
    ]
    flood = DeadLetterRate(dead_letters=3, window=10.0, share=0.5)
    assert [flood.record_dead_letter(0.0, settled) for settled in (10, 13, 16)] == [
        False,
        False,
        False,
    ]


def test_share_of_zero_counts_dead_letters_only():
    flood = DeadLetterRate(dead_letters=2, window=10.0, share=0.0)
    assert [flood.record_dead_letter(0.0, 1), flood.record_dead_letter(1.0, 10**9)] == [False, True]


def test_dead_letter_count_restarts_after_a_flood():
    flood = DeadLetterRate(dead_letters=2, window=10.0, share=0.5)
    assert [flood.record_dead_letter(0.0, n) for n in range(1, 7)] == [False, True] * 3


def test_new_flood_guard_continues_the_count():
    one = DeadLetterRate(dead_letters=3, window=10.0, share=0.5)
    assert one.memory == NOTHING
    one.record_dead_letter(1.0, 7)
    one.record_dead_letter(4.0, 8)
    assert one.memory == DeadLetterRateMemory(2, 1.0, 7)
    assert DeadLetterRate(3, 10.0, 0.5, one.memory).record_dead_letter(11.0, 12)
    assert not DeadLetterRate(3, 10.0, 0.5, one.memory).record_dead_letter(11.0, 13), (
        "too many live"
    )
    late = DeadLetterRate(3, 10.0, 0.5, one.memory)
    assert not late.record_dead_letter(11.1, 9)
    assert late.memory == DeadLetterRateMemory(1, 11.1, 9)


@given(
    st.lists(st.tuples(st.floats(0, 4), st.integers(1, 5)), max_size=60),
    st.integers(1, 8),
    st.floats(0, 1),
)
def test_flood_guard_equals_a_direct_count(
    steps: list[tuple[float, int]], letters: int, share: float
):
    flood = DeadLetterRate(letters, 10.0, share)
    now, settled = 0.0, 0
    deaths: list[tuple[float, int]] = []
    for seconds, others in steps:
        now, settled = now + seconds, settled + others
        deaths.append((now, settled))
        last = deaths[-letters:]
        among = last[-1][1] - last[0][1] + 1
        expected = (
            len(last) == letters and now - last[0][0] <= 10.0 and letters >= share * max(1, among)
        )
        assert flood.record_dead_letter(now, settled) == expected
        if expected:
            deaths.clear()
