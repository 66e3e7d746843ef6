"""The rate of a partition, with a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd import config
from streamqd.errors import ConfigError
from streamqd.policy.rate import Rate

SECOND = 1_000_000_000
START = 77 * SECOND


class Clock:
    """A rate and its state, with a clock on which runs start as early as the rate allows."""

    def __init__(self, rate: Rate, now: int = START) -> None:
        self.rate = rate
        self.now = now
        self.due = 0
        self.starts: list[int] = []

    def run(self, runs: int = 1) -> int:
        """Wait, and start some runs. Return the wait in nanoseconds."""
        wait = self.rate.wait(self.due, self.now, runs)
        self.now += wait
        assert self.rate.wait(self.due, self.now, runs) == 0
        self.due = self.rate.next_due(self.due, self.now, runs)
        self.starts += [self.now] * runs
        return wait

    def fill(self, seconds: float) -> int:
        """Start runs one after another for some seconds. Return their number."""
        end = self.now + int(seconds * SECOND)
        before = len(self.starts)
        while self.now + self.rate.wait(self.due, self.now) < end:
            self.run()
        self.now = end
        return len(self.starts) - before


@pytest.mark.parametrize(
    ("per_second", "seconds", "runs"),
    [(100.0, 10, 1000), (5 / 60, 600, 50), (0.5, 100, 50), (3.0, 10, 30), (10_000.0, 1, 10_000)],
)
def test_rate_counts_are_exact(per_second: float, seconds: int, runs: int):
    assert Clock(Rate(per_second)).fill(seconds) == runs


def test_rate_without_a_burst_spreads_runs_evenly():
    clock = Clock(Rate(100.0))
    clock.fill(2)
    assert {b - a for a, b in zip(clock.starts, clock.starts[1:], strict=False)} == {SECOND // 100}


def test_rate_allows_one_burst_after_idle_time():
    clock = Clock(Rate(10.0, burst=5))
    assert [clock.run() for _ in range(5)] == [0] * 5
    assert clock.run() == SECOND // 10
    clock.now += SECOND // 5  # the burst allows two more runs now
    assert [clock.run() for _ in range(3)] == [0, 0, SECOND // 10]
    clock.now += 3600 * SECOND  # even a long pause restores no more than the burst
    assert [clock.run() for _ in range(6)] == [0] * 5 + [SECOND // 10]


def test_rate_counts_simultaneous_runs_separately():
    clock = Clock(Rate(10.0, burst=4))
    assert clock.run(4) == 0
    assert clock.run(4) == 4 * SECOND // 10
    assert clock.run(1) == SECOND // 10
    assert clock.run(2) == 2 * SECOND // 10


def test_raised_rate_ignores_the_state_of_the_lower_rate():
    slow = Clock(Rate(1 / 3600))
    slow.run()
    fast = Clock(Rate(100.0), slow.now)
    fast.due = fast.rate.inherit(slow.due, fast.now)
    assert fast.run() == SECOND // 100
    assert fast.fill(1) == 99


def test_rate_state_passes_to_the_next_worker():
    first = Clock(Rate(2.0, burst=2))
    first.run(2)
    second = Clock(Rate(2.0, burst=2), first.now)
    second.due = second.rate.inherit(first.due, second.now)
    assert second.run() == SECOND // 2


RATES = st.builds(
    Rate,
    st.sampled_from([0.001, 0.5, 1.0, 3.0, 7.3, 100.0, 12_345.0, 1e6]),
    st.integers(min_value=1, max_value=50),
)


@given(RATES, st.lists(st.tuples(st.floats(0, 3), st.integers(1, 50)), max_size=20))
def test_rate_and_burst_bound_the_runs_of_any_period(rate: Rate, steps: list[tuple[float, int]]):
    clock = Clock(rate)
    begun: list[tuple[int, int]] = []  # time and number of runs
    for rest, runs in steps:
        clock.now += int(rest * rate.interval_ns)
        clock.run(min(runs, rate.burst))
        begun.append((clock.now, min(runs, rate.burst)))
    for first, (begin, _) in enumerate(begun):
        for last in range(first, len(begun)):
            count = sum(runs for _, runs in begun[first : last + 1])
            assert count <= rate.burst + (begun[last][0] - begin) // rate.interval_ns


# --- the setting ----------------------------------------------------------------------------------

WORK = '[[consumers]]\ntopic = "t"\ngroup = "g"\nhandler = "m:f"\n'


def load_config(folder: Path, text: str) -> config.Settings:
    file = folder / "streamq.toml"
    file.write_text(text)
    return config.load(file, {}, {})


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("100/s", 100.0), ("5/m", 5 / 60), ("0.5/s", 0.5), ("36/h", 0.01), ("999999999/s", 999999999)],
)
def test_rate_is_read_from_a_file_and_a_declaration(tmp_path: Path, text: str, per_second: float):
    (stated,) = load_config(tmp_path, f'{WORK}rate = "{text}"\nrate_burst = 7').consumers
    assert stated.rate_per_second(1) == pytest.approx(per_second)
    assert stated.rate_burst == 7
    declared = {"topic": "t", "group": "d", "handler": "m:g", "rate": text}
    *_, other = config.declare_consumers(load_config(tmp_path, WORK), [declared]).consumers
    assert other.rate_per_second(1) == pytest.approx(per_second)
    assert other.rate_burst is None


@pytest.mark.parametrize("text", ['"100"', '"0/s"', '"0.0/m"', '"10/day"', '"-1/s"', '"1e3/s"'])
def test_invalid_rate_error_shows_the_format(tmp_path: Path, text: str):
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path, f"{WORK}rate = {text}")
    (problem,) = raised.value.problems
    assert problem.startswith("consumers[0].rate: ")
    assert 'such as "100/s", "5/m" or "0.5/s"' in problem


def test_rate_burst_without_a_rate_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path, f"{WORK}rate_burst = 5")
    assert raised.value.problems == [
        (
            "consumers[0].rate_burst: has no effect without rate; set rate, or remove it"
            f" (t/g, {tmp_path}/streamq.toml:1)"
        )
    ]


def test_group_rate_is_shared_by_its_partitions(tmp_path: Path):
    """A group's rate is shared equally by its partitions.

    If their number is unknown, each gets the whole rate.
    """
    (shared,) = load_config(tmp_path, f'{WORK}rate = "12/s"\nrate_per = "group"').consumers
    assert [shared.rate_per_second(count) for count in (0, 1, 4, 8)] == [12.0, 12.0, 3.0, 1.5]
    (each,) = load_config(tmp_path, f'{WORK}rate = "12/s"').consumers
    assert each.rate_per_second(8) == 12.0


def test_rate_per_without_a_rate_is_refused(tmp_path: Path):
    """`check` reports a `rate_per` that has no `rate`."""
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path, f'{WORK}rate_per = "group"')
    assert raised.value.problems == [
        (
            "consumers[0].rate_per: has no effect without rate; set rate, or remove it"
            f" (t/g, {tmp_path}/streamq.toml:1)"
        )
    ]


def test_max_age_below_a_second_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path, f'{WORK}max_age = "200ms"')
    assert raised.value.problems == [
        (
            'consumers[0].max_age: "200ms" is too small (minimum: "1s", or 0 for no'
            " limit) (t/g, "
            f"{tmp_path}/streamq.toml:1)"
        )
    ]
    (stated,) = load_config(tmp_path, f"{WORK}max_age = 0").consumers
    assert stated.max_age == 0
