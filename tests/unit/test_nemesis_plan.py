"""The plan of the nemesis depends only on its seed, and contains every kind of fault."""

from __future__ import annotations

from collections import Counter

from tests.support.nemesis import FAULTS, plan


def make_plan(seed: int, seconds: float = 600.0):
    return plan(seed, seconds, every=1.5, lasting=(0.5, 6.0), kinds=FAULTS)


def test_equal_seeds_give_equal_plans():
    assert make_plan(1) == make_plan(1) != make_plan(2)


def test_longer_plan_starts_like_a_shorter_one():
    shorter = make_plan(1, 60.0)
    assert make_plan(1)[: len(shorter)] == shorter


def test_plan_uses_each_kind_before_repeating_one():
    strokes = make_plan(1)
    kinds = [stroke.kind for stroke in strokes]
    for turn in range(len(kinds) // len(FAULTS)):
        once = kinds[turn * len(FAULTS) :][: len(FAULTS)]
        assert Counter(once) == Counter(FAULTS)


def test_planned_strokes_respect_interval_and_duration():
    strokes = make_plan(3)
    assert 300 < len(strokes) < 600
    assert [stroke.at for stroke in strokes] == sorted(stroke.at for stroke in strokes)
    assert all(0 < stroke.at < 600 for stroke in strokes)
    assert all(0.5 <= stroke.seconds <= 6.0 and 0 <= stroke.chance < 1 for stroke in strokes)
