"""The circuit breaker makes sure that an outage costs no attempt, while a bad message does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamqd.policy.circuit import NOTHING, REMEMBERED, Circuit, CircuitMemory, CircuitState


def circuit(failures: int = 3, window: float = 10.0, probe_every: float = 5.0) -> Circuit:
    return Circuit(failures, window, probe_every)


def open_circuit(*, at: float = 0.0) -> Circuit:
    one = circuit()
    for uid in "abc":
        one.record_failure(uid, at, 0)
    assert one.state is CircuitState.OPEN
    return one


def test_circuit_opens_after_enough_failures_in_its_window():
    one = circuit()
    for at, uid in ((0.0, "a"), (1.0, "b")):
        one.record_failure(uid, at, 0)
        assert one.state is CircuitState.CLOSED
        assert one.seconds_until_start(at) == 0
    one.record_failure("c", 10.0, 0)
    assert one.state is CircuitState.OPEN
    assert one.seconds_until_start(10.0) == 5.0
    assert one.seconds_until_start(14.0) == 1.0
    assert one.seconds_until_start(15.0) == one.seconds_until_start(99.0) == 0


def test_failures_outside_the_window_do_not_open_circuit():
    one = circuit()
    for number in range(20):
        one.record_failure(str(number), number * 5.1, number)
        assert one.state is CircuitState.CLOSED


def test_circuit_closes_after_a_successful_probe():
    one = open_circuit()
    one.start_probe(5.0)
    assert one.state is CircuitState.HALF_OPEN
    assert one.seconds_until_start(5.0) == 0
    one.close()
    assert one.state is CircuitState.CLOSED
    for uid in "de":
        one.record_failure(uid, 5.1, 1)
        assert one.state is CircuitState.CLOSED, "counting begins anew"


def test_circuit_reopens_after_a_failed_probe():
    one = open_circuit()
    for number in range(1, 10):
        at = number * 5.0
        assert one.seconds_until_start(at) == 0
        one.start_probe(at)
        assert not one.record_failure("a", at, 0), "it costs nothing"
        assert one.state is CircuitState.OPEN
        assert one.seconds_until_start(at) == 5.0


def test_circuit_forgives_a_message_only_once():
    one = circuit(failures=100)
    assert [one.record_failure("a", at, 0) for at in (0.0, 1.0, 2.0)] == [False, True, True]
    assert not one.record_failure("b", 3.0, 0)


def test_failure_before_the_circuit_opened_is_forgiven():
    one = circuit()
    one.record_failure("a", 0.0, 0)
    assert one.record_failure("a", 0.1, 0), "nobody knows yet"
    one.record_failure("b", 0.2, 0)
    assert one.state is CircuitState.OPEN
    one.start_probe(5.2)
    one.close()
    assert not one.record_failure("a", 6.0, 1), "the circuit was open in between"
    assert one.record_failure("a", 6.1, 1)


def test_one_failing_message_among_successes_counts_once():
    one = circuit(failures=3)
    for number in range(1, 50):
        one.record_failure("a", number * 0.01, number)
        assert one.state is CircuitState.CLOSED
    one.record_failure("b", 0.5, 50)
    one.record_failure("c", 0.5, 50)
    assert one.state is CircuitState.OPEN


def test_single_failing_message_opens_the_circuit():
    one = circuit(failures=3)
    for at in (0.0, 1.0, 2.0):
        one.record_failure("a", at, 7)
    assert one.state is CircuitState.OPEN


def test_new_circuit_continues_with_the_saved_state():
    one = circuit()
    assert one.memory == NOTHING
    one.record_failure("a", 1.0, 0)
    one.record_failure("b", 3.0, 0)
    assert one.memory == CircuitMemory(2, 1.0, 0.0, False)
    after = Circuit(3, 10.0, 5.0, one.memory)
    assert not after.record_failure("c", 11.0, 0)
    assert after.state is CircuitState.OPEN
    last = Circuit(3, 10.0, 5.0, after.memory)
    assert last.state is CircuitState.OPEN
    assert last.seconds_until_start(12.0) == 4.0
    last.start_probe(16.0)
    assert last.memory.is_open, "its probe has no result yet"
    last.close()
    assert Circuit(3, 10.0, 5.0, last.memory).state is CircuitState.CLOSED
    assert last.memory == CircuitMemory(0, 0.0, 16.0, False)


def test_restored_failures_are_as_old_as_the_oldest():
    after = Circuit(3, 10.0, 5.0, CircuitMemory(2, 1.0))
    after.record_failure("c", 11.1, 0)
    assert after.state is CircuitState.CLOSED
    assert after.memory == CircuitMemory(1, 11.1)


def test_circuit_charges_a_message_forgiven_before():
    assert circuit().record_failure("a", 9.0, 0, forgiven=8.0)
    for forgiven, pays in ((5.1, True), (4.9, False)):
        one = Circuit(3, 10.0, 5.0, CircuitMemory(opened=5.0))
        assert one.record_failure("a", 9.0, 0, forgiven=forgiven) is pays
    one = circuit()
    one.record_failure("a", 9.0, 0)
    assert one.record_failure("a", 10.0, 0, forgiven=None)


def test_circuit_state_is_bounded():
    one = circuit(failures=2 * REMEMBERED, window=1e9)
    for number in range(REMEMBERED + 1):
        assert not one.record_failure(str(number), 0.0, 0)
    assert one.record_failure("1", 1.0, 0)
    assert not one.record_failure("0", 1.0, 0), "forgotten"


@given(
    st.lists(
        # Each run takes some time, so no two runs end at the same instant.
        st.tuples(st.sampled_from("abcde"), st.floats(0.001, 3), st.booleans()),
        min_size=1,
        max_size=80,
    ),
    st.integers(1, 6),
)
def test_circuit_charges_a_message_once_per_outage(runs: list[tuple[str, float, bool]], limit: int):
    """Between two openings, a message is charged for all of its failures except the first."""
    one = circuit(failures=limit, window=5.0, probe_every=1.0)
    now, successes = 0.0, 0
    since_open: dict[str, int] = {}
    for uid, step, succeeds in runs:
        now += step
        now += one.seconds_until_start(now)
        if one.state is CircuitState.OPEN:
            one.start_probe(now)
        if succeeds:
            successes += 1
            if one.state is CircuitState.HALF_OPEN:
                one.close()
            assert one.state is CircuitState.CLOSED
            continue
        counts = one.record_failure(uid, now, successes)
        if one.state is CircuitState.OPEN:
            since_open.clear()
            assert not counts
        else:
            assert counts == (since_open.get(uid, 0) > 0)
            since_open[uid] = since_open.get(uid, 0) + 1
