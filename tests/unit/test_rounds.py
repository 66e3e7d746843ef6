"""Rounds find and charge every poison message alone, while others start only a few times."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamqd.policy import rounds
from tests.support.quick import examples

MAX_CRASHES = 3


class Recovery:
    """A partition with a worker that dies of poison messages, as the supervisor sees it.

    `ends` is the number of messages that finish in a round before its poison kills the process.
    """

    def __init__(self, together: int, poisons: set[bytes], chance: Random, order: list[bytes]):
        self.left = order
        self.poisons, self.chance, self.together = poisons, chance, together
        self.suspects: dict[bytes, int] = {}
        self.starts: Counter[bytes] = Counter()
        self.charges: Counter[bytes] = Counter()
        self.dead: list[bytes] = []
        self.deaths = 0
        self.rounds = 0

    def crashed(self, members: list[bytes]) -> bool:
        """Run messages together, and record the blame. Return True if the process died."""
        self.starts.update(members)
        if not self.poisons & {*members}:
            self.left = [each for each in self.left if each not in members]
            return False
        innocent = [each for each in members if each not in self.poisons]
        ended = self.chance.sample(innocent, self.chance.randint(0, len(innocent)))
        if self.chance.random() < 0.5:
            ended = []
        running = [each for each in members if each not in ended]
        self.left = [each for each in self.left if each not in ended]
        self.deaths += 1
        if len(running) == 1:
            self.charges[running[0]] += 1
        self.suspects = rounds.after_crash(self.suspects, running, 1024)
        return True

    def worker(self) -> bool:
        """Run one worker until it exits. Return True if it died."""
        suspects = []
        for each in list(self.left):
            if self.charges[each] >= MAX_CRASHES:
                self.left.remove(each)
                self.dead.append(each)
            elif each in self.suspects:
                suspects.append(each)
        while suspects:
            largest = [1 if self.charges[each] else self.suspects[each] for each in suspects]
            count = rounds.next_round(largest)
            assert all(count <= most for most in largest[:count])
            members, suspects = suspects[:count], suspects[count:]
            self.rounds += 1
            if self.crashed(members):
                return True
        self.suspects = {}
        while self.left:
            if self.crashed(self.left[: self.together]):
                return True
        return False

    def run(self) -> None:
        while self.worker():
            assert self.deaths < 500


@settings(max_examples=examples(300))
@given(
    st.integers(1, 400), st.integers(2, 128), st.integers(0, 4), st.randoms(use_true_random=False)
)
def test_only_poison_is_charged_and_found(count: int, together: int, bad: int, chance: Random):
    order = [f"m:{number}-0".encode() for number in range(count)]
    poisons = {*chance.sample(order, min(bad, count))}
    recovery = Recovery(together, poisons, chance, order)
    recovery.run()
    assert {*recovery.dead} == poisons
    assert {*recovery.charges} <= poisons, "an innocent message was charged"
    assert {*recovery.charges.values()} <= {MAX_CRASHES}
    assert recovery.left == []
    innocent = {each: n for each, n in recovery.starts.items() if each not in poisons}
    assert max(innocent.values(), default=0) <= 8


@pytest.mark.parametrize("poisons", [1, 2])
def test_each_of_128_messages_starts_at_most_eight_times(poisons: int):
    """No message starts more than eight times here, while the documented bound is 9."""
    worst = 0
    for seed in range(300):
        chance = Random(seed)
        order = [f"m:{number}-0".encode() for number in range(400)]
        recovery = Recovery(128, {*chance.sample(order, poisons)}, chance, order)
        recovery.run()
        innocent = [n for each, n in recovery.starts.items() if each not in recovery.poisons]
        worst = max(worst, *innocent)
    assert worst <= 8


def test_single_kill_costs_two_rounds():
    """A single kill costs only two rounds.

    It came from outside, for example from the OOM killer, so there is no poison message to find.
    """
    members = [f"m:{number}-0".encode() for number in range(128)]
    suspects = rounds.after_crash({}, members, 1024)
    sizes = []
    while members:
        sizes.append(rounds.next_round([suspects[each] for each in members]))
        members = members[sizes[-1] :]
    assert sizes == [64, 64]


def test_suspect_of_two_crashes_keeps_the_smaller_round():
    first = rounds.after_crash({}, [b"m:1-0", b"m:2-0", b"m:3-0", b"m:4-0"], 1024)
    assert set(first.values()) == {2}
    second = rounds.after_crash(first, [b"m:1-0", b"m:2-0"], 1024)
    assert second == {b"m:1-0": 1, b"m:2-0": 1, b"m:3-0": 2, b"m:4-0": 2}
    others = [f"m:{number}-0".encode() for number in range(1, 20)]
    assert rounds.after_crash(second, others, 1024)[b"m:1-0"] == 1


def test_suspects_of_the_last_crash_are_kept_first():
    first = rounds.after_crash({}, [b"m:1-0", b"m:2-0"], 3)
    assert [*rounds.after_crash(first, [b"m:3-0", b"m:4-0"], 3)] == [b"m:3-0", b"m:4-0", b"m:1-0"]


def test_crash_narrows_only_the_known_suspects():
    suspects = {b"m:1-0": 2, b"m:2-0": 2}
    assert rounds.narrows(suspects, [b"m:1-0", b"m:2-0"])
    assert not rounds.narrows(suspects, [b"m:1-0"]), "alone it is charged"
    assert not rounds.narrows(suspects, [b"m:1-0", b"m:3-0"])
