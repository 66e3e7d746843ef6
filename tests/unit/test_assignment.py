"""The assignment is balanced, sticky, deterministic, and fast enough for a large fleet."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import Assignment
from streamqd.policy.assignment import Member, assign

A, B, C, D = (("access", "hits"), ("access", "audit"), ("orders", "mail"), ("orders", "ship"))
PAIRS = (A, B, C, D)


def member(name: str, *offers: tuple[str, str], weight: int = 1, cap: int = 0) -> Member:
    return Member(name, weight, cap, frozenset(offers or PAIRS))


def make_assignments(counts: Mapping[tuple[str, str], int]) -> list[Assignment]:
    return [
        Assignment(topic, number, group)
        for (topic, group), count in counts.items()
        for number in range(count)
    ]


def count_loads(members: Sequence[Member], wanted: Mapping[Assignment, str]) -> dict[str, int]:
    counts = Counter(wanted.values())
    return {each.id: counts[each.id] for each in members}


def moved_assignments(
    before: Mapping[Assignment, str], now: Mapping[Assignment, str]
) -> list[Assignment]:
    return [assignment for assignment, owner in before.items() if now.get(assignment) != owner]


# --- simple expectations --------------------------------------------------------------------------


def test_assign_without_members_or_assignments_is_empty() -> None:
    assert assign([], make_assignments({A: 2}), {}) == {}
    assert assign([member("a")], [], {}) == {}


def test_single_member_gets_every_assignment() -> None:
    assignments = make_assignments({A: 3, B: 2})
    assert assign([member("a")], assignments, {}) == dict.fromkeys(assignments, "a")


def test_two_members_split_each_topic_and_group() -> None:
    members = [member("a"), member("b")]
    wanted = assign(members, make_assignments({A: 4, B: 4, C: 4}), {})
    spread = Counter(
        (assignment.topic, assignment.group, owner) for assignment, owner in wanted.items()
    )
    assert set(spread.values()) == {2}
    assert len(spread) == 6


def test_odd_partition_counts_balance_in_total() -> None:
    members = [member("a"), member("b")]
    wanted = assign(members, make_assignments({A: 3, B: 3, C: 1, D: 1}), {})
    assert count_loads(members, wanted) == {"a": 4, "b": 4}
    for pair in (A, B):
        counts = Counter(
            wanted[assignment]
            for assignment in wanted
            if (assignment.topic, assignment.group) == pair
        )
        assert sorted(counts.values()) == [1, 2]


def test_joining_member_gets_its_share_of_each_topic_and_group() -> None:
    assignments = make_assignments({A: 4, B: 4})
    before = assign([member("a")], assignments, {})
    members = [member("a"), member("b")]
    now = assign(members, assignments, before)
    assert count_loads(members, now) == {"a": 4, "b": 4}
    assert Counter(
        (assignment.topic, assignment.group) for assignment in moved_assignments(before, now)
    ) == {
        A: 2,
        B: 2,
    }


def test_members_keep_their_lowest_partitions() -> None:
    assignments = make_assignments({A: 5})
    before = assign([member("a")], assignments, {})
    now = assign([member("a"), member("b")], assignments, before)
    assert now == {
        assignment: "a" if assignment.partition < 3 else "b" for assignment in assignments
    }
    # If there are no owners, the first member gets the lowest partitions.
    assert assign([member("b"), member("a")], assignments, {}) == now


def test_free_partitions_are_assigned_in_order() -> None:
    assignments = make_assignments({A: 6})
    before = {assignment: "a" for assignment in assignments if assignment.partition < 4}
    now = assign([member("a"), member("b"), member("c")], assignments, before)
    assert now == {assignment: "aabbcc"[assignment.partition] for assignment in assignments}


def test_leaving_member_moves_only_its_own_assignments() -> None:
    assignments = make_assignments({A: 6, B: 6})
    members = [member("a"), member("b"), member("c")]
    before = assign(members, assignments, {})
    now = assign(members[:2], assignments, before)
    assert count_loads(members[:2], now) == {"a": 6, "b": 6}
    assert set(moved_assignments(before, now)) == {
        assignment for assignment, owner in before.items() if owner == "c"
    }
    for pair in (A, B):
        counts = Counter(
            now[assignment] for assignment in now if (assignment.topic, assignment.group) == pair
        )
        assert counts == {"a": 3, "b": 3}


def test_weights_split_each_topic_and_group() -> None:
    members = [member("a", weight=1), member("b", weight=3)]
    wanted = assign(members, make_assignments({A: 4, B: 8}), {})
    assert count_loads(members, wanted) == {"a": 3, "b": 9}
    spread = Counter(
        (assignment.topic, assignment.group, owner) for assignment, owner in wanted.items()
    )
    assert spread[*A, "a"] == 1
    assert spread[*B, "a"] == 2


def test_large_weight_gets_at_most_its_rounded_share() -> None:
    # A method that divides step by step would give the large member 96 here.
    members = [member("big", weight=940), *(member(f"m{n}", weight=10) for n in range(6))]
    wanted = assign(members, make_assignments({A: 96}), {})
    assert count_loads(members, wanted)["big"] == 90 or count_loads(members, wanted)["big"] == 91


def test_assignment_respects_caps() -> None:
    members = [member("a", cap=1), member("b"), member("c")]
    assert count_loads(members, assign(members, make_assignments({A: 9}), {})) == {
        "a": 1,
        "b": 4,
        "c": 4,
    }


def test_assignments_above_all_caps_are_dropped_evenly() -> None:
    members = [member("a", cap=2), member("b", cap=2)]
    assignments = make_assignments({A: 4, B: 4})
    wanted = assign(members, assignments, {})
    assert Counter((assignment.topic, assignment.group) for assignment in wanted) == {A: 2, B: 2}
    assert assign(members, assignments, wanted) == wanted


def test_lowered_cap_sheds_only_the_excess() -> None:
    assignments = make_assignments({A: 4, B: 4})
    before = dict.fromkeys(assignments, "a")
    now = assign([member("a", cap=6)], assignments, before)
    assert Counter((assignment.topic, assignment.group) for assignment in now) == {A: 3, B: 3}


def test_assignments_go_only_to_members_with_a_consumer() -> None:
    members = [member("old", A), member("new", A, B)]
    wanted = assign(members, make_assignments({A: 4, B: 2, C: 1}), {})
    assert count_loads(members, wanted) == {"old": 3, "new": 3}
    assert all(wanted[assignment] == "new" for assignment in make_assignments({B: 2}))
    assert Assignment("orders", 0, "mail") not in wanted


def test_owner_without_a_consumer_loses_the_assignment() -> None:
    assignments = make_assignments({A: 2})
    assert assign(
        [member("a", B), member("b", A)], assignments, dict.fromkeys(assignments, "a")
    ) == (dict.fromkeys(assignments, "b"))


def test_assignment_balances_through_intermediate_members() -> None:
    # Only b can take assignments from a, and only c can relieve b.
    members = [member("a", A), member("b", A, B), member("c", B)]
    assignments = make_assignments({A: 6, B: 3})
    before = {
        assignment: ("a" if assignment.group == A[1] and assignment.partition < 3 else "b")
        for assignment in assignments
    }
    assert count_loads(members, before) == {"a": 3, "b": 6, "c": 0}
    assert count_loads(members, assign(members, assignments, before)) == {"a": 3, "b": 3, "c": 3}


def test_assign_finds_a_chain_of_moves() -> None:
    members = [member("a", A), member("b", A, B), member("c", B)]
    assignments = make_assignments({A: 4, B: 5})
    before = {assignment: "a" if assignment.group == A[1] else "b" for assignment in assignments}
    before |= {Assignment(B[0], 3, B[1]): "c", Assignment(B[0], 4, B[1]): "c"}
    assert count_loads(members, before) == {"a": 4, "b": 3, "c": 2}
    now = assign(members, assignments, before)
    assert count_loads(members, now) == {"a": 3, "b": 3, "c": 3}
    assert len(moved_assignments(before, now)) == 2


def test_assign_makes_room_through_intermediate_members() -> None:
    # b is full with assignments that a could take, and b is the only one to offer B.
    members = [member("a", A, cap=4), member("b", A, B, cap=2), member("c", C)]
    assignments = make_assignments({A: 2, B: 2, C: 1})
    before = {assignment: "b" for assignment in assignments if assignment.group == A[1]}
    now = assign(members, assignments, before)
    assert len(now) == 5
    assert count_loads(members, now) == {"a": 2, "b": 2, "c": 1}


# --- properties -----------------------------------------------------------------------------------

counts_of_assignments = st.dictionaries(st.sampled_from(PAIRS), st.integers(0, 12), max_size=4)
same_offers = st.lists(st.integers(1, 5), min_size=1, max_size=8).map(
    lambda weights: [member(f"m{number}", weight=w) for number, w in enumerate(weights)]
)
# If offers are narrow, a fleet can be balanced only by moving assignments through other members.
offers = st.one_of(
    st.frozensets(st.sampled_from(PAIRS)),
    st.sampled_from([frozenset(two) for two in itertools.pairwise(PAIRS)]),
    st.sampled_from([frozenset({one}) for one in PAIRS]),
)
any_offers = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 0, 1, 3, 8]), offers), max_size=7
).map(lambda rows: [Member(f"m{n}", w, cap, offers) for n, (w, cap, offers) in enumerate(rows)])


@st.composite
def fleets(
    draw: st.DrawFn, members_of: st.SearchStrategy[list[Member]]
) -> tuple[list[Member], list[Assignment], dict[Assignment, str]]:
    """Draw members, assignments and owners.

    An owner may be a member, an unknown instance, or absent.
    """
    members = draw(members_of)
    assignments = make_assignments(draw(counts_of_assignments))
    names = [each.id for each in members] + ["stranger", ""]
    owners = {assignment: draw(st.sampled_from(names)) for assignment in assignments}
    return (
        members,
        assignments,
        {assignment: owner for assignment, owner in owners.items() if owner},
    )


Fleet = tuple[list[Member], list[Assignment], dict[Assignment, str]]


@given(fleets(same_offers))
def test_each_member_is_within_one_of_its_share(fleet: Fleet) -> None:
    members, assignments, owners = fleet
    wanted = assign(members, assignments, owners)
    assert sorted(wanted) == sorted(assignments)
    total = sum(each.weight for each in members)
    for each in members:
        share = Fraction(len(assignments) * each.weight, total)
        assert abs(count_loads(members, wanted)[each.id] - share) < 1


@given(fleets(same_offers))
def test_assignment_uses_the_fewest_moves(fleet: Fleet) -> None:
    members, assignments, owners = fleet
    wanted = assign(members, assignments, owners)
    names = {each.id for each in members}
    owned = {assignment: owner for assignment, owner in owners.items() if owner in names}
    before, now = count_loads(members, owned), count_loads(members, wanted)
    # A member that gives assignments away takes none, and keeps everything that is part of its
    # share. With fewer moves, some member would be more than one assignment away from its share.
    total = sum(each.weight for each in members)
    over = at_top = 0
    fractional = []
    for each in members:
        lost = sum(1 for assignment in owned if owned[assignment] == each.id != wanted[assignment])
        assert lost == max(0, before[each.id] - now[each.id])
        share = Fraction(len(assignments) * each.weight, total)
        floor = share.numerator // share.denominator
        over += max(0, before[each.id] - floor)
        if share != floor:
            fractional.append(before[each.id] > floor)
            at_top += before[each.id] > floor
    spare = len(assignments) - sum(len(assignments) * each.weight // total for each in members)
    assert len(moved_assignments(owned, wanted)) == over - min(spare, at_top)
    assert spare <= len(fractional)


@given(fleets(st.one_of(same_offers, any_offers)))
def test_assign_is_stable_when_repeated(fleet: Fleet) -> None:
    members, assignments, owners = fleet
    wanted = assign(members, assignments, owners)
    assert assign(members, assignments, wanted) == wanted


@given(fleets(st.one_of(same_offers, any_offers)), st.randoms(use_true_random=False))
def test_assignment_ignores_the_argument_order(fleet: Fleet, shuffler: random.Random) -> None:
    members, assignments, owners = fleet
    mixed_members, mixed_units, mixed_owners = (
        list(members),
        list(assignments),
        list(owners.items()),
    )
    for each in (mixed_members, mixed_units, mixed_owners):
        shuffler.shuffle(each)
    assert assign(mixed_members, mixed_units, dict(mixed_owners)) == assign(
        members, assignments, owners
    )


def test_assignment_is_the_same_in_every_process() -> None:
    """The assignment is the same in every process.

    Each one iterates over sets in its own order, but all hosts must agree.
    """
    program = """
from streamqd.model import Assignment
from streamqd.policy.assignment import Member, assign
pairs = [(f"topic{n}", "group") for n in range(6)]
assignments = {Assignment(topic, p, group) for topic, group in pairs for p in range(5)}
offers = [frozenset(pairs), frozenset(pairs[:4]), frozenset(pairs[2:]), frozenset(pairs)]
members = {Member(f"m{n}", 1 + n % 2, 0, offers[n]) for n in range(4)}
before = {assignment: "m0" for assignment in assignments if assignment.partition < 3}
print(sorted(assign(members, assignments, before).items()))
"""
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(answers) == 1


@given(fleets(any_offers))
def test_offers_and_caps_are_respected(fleet: Fleet) -> None:
    members, assignments, owners = fleet
    wanted = assign(members, assignments, owners)
    by_id = {each.id: each for each in members}
    for assignment, owner in wanted.items():
        assert assignment in assignments
        assert (assignment.topic, assignment.group) in by_id[owner].offers
    for each in members:
        assert not each.cap or count_loads(members, wanted)[each.id] <= each.cap


def reachable_members(
    members: Sequence[Member], wanted: Mapping[Assignment, str], start: str
) -> set[str]:
    """Return the members that an assignment of `start` can reach, directly or through others."""
    held: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for assignment, owner in wanted.items():
        held[owner].add((assignment.topic, assignment.group))
    found, todo = {start}, [start]
    while todo:
        here = todo.pop()
        for each in members:
            if each.id not in found and each.offers & held[here]:
                found.add(each.id)
                todo.append(each.id)
    return found - {start}


def has_room(each: Member, counts: Mapping[str, int]) -> bool:
    return not each.cap or counts[each.id] < each.cap


@given(fleets(any_offers))
def test_assign_leaves_no_balancing_chain_of_moves(fleet: Fleet) -> None:
    members, assignments, owners = fleet
    members = [Member(each.id, 1, each.cap, each.offers) for each in members]
    wanted = assign(members, assignments, owners)
    counts = count_loads(members, wanted)
    by_id = {each.id: each for each in members}
    for each in members:
        for other in reachable_members(members, wanted, each.id):
            if has_room(by_id[other], counts):
                assert counts[each.id] - counts[other] <= 1


@given(fleets(any_offers), st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_immovable_assignments_count_for_the_share(fleet: Fleet, elsewhere: list[int]) -> None:
    members, assignments, owners = fleet
    members = [replace(each, cap=0) for each in members]
    elsewhere = elsewhere[: len(members)]
    told = [replace(m, owned_elsewhere=n) for m, n in zip(members, elsewhere, strict=True)]
    # The result is the same with more assignments, which no other member offers and which sort
    # after all others.
    shown = [replace(m, offers=m.offers | {("~", m.id)}) for m in members]
    hidden = [
        Assignment("~", number, each.id)
        for each, count in zip(members, elsewhere, strict=True)
        for number in range(max(count, 1))
    ]
    told = [replace(m, owned_elsewhere=max(m.owned_elsewhere, 1)) for m in told]
    wanted = assign(
        shown,
        [*assignments, *hidden],
        owners | {assignment: assignment.group for assignment in hidden},
    )
    assert assign(told, assignments, owners) == {
        u: to for u, to in wanted.items() if u.topic != "~"
    }


@given(fleets(any_offers))
def test_assignment_is_dropped_only_without_a_chain(fleet: Fleet) -> None:
    members, assignments, owners = fleet
    wanted = assign(members, assignments, owners)
    counts = count_loads(members, wanted)
    for assignment in set(assignments) - set(wanted):
        for each in members:
            if (assignment.topic, assignment.group) in each.offers:
                assert not has_room(each, counts)
                for other in reachable_members(members, wanted, each.id):
                    assert not has_room(next(m for m in members if m.id == other), counts)


@given(st.integers(1, 8), counts_of_assignments, st.data())
def test_assignment_from_scratch_spreads_within_one(
    count: int, counts: dict[tuple[str, str], int], data: st.DataObject
) -> None:
    members = [member(f"m{number}") for number in range(count)]
    wanted = assign(members, make_assignments(counts), {})
    for pair in counts:
        of_pair = {
            assignment: owner for assignment, owner in wanted.items() if assignment[::2] == pair
        }
        spread = count_loads(members, of_pair).values()
        assert max(spread) - min(spread) <= 1


@given(st.integers(2, 8), counts_of_assignments, st.data())
def test_leave_moves_only_the_assignments_of_the_member(
    count: int, counts: dict[tuple[str, str], int], data: st.DataObject
) -> None:
    members = [member(f"m{number}") for number in range(count)]
    assignments = make_assignments(counts)
    before = assign(members, assignments, {})
    leaver = data.draw(st.sampled_from(members))
    now = assign([each for each in members if each is not leaver], assignments, before)
    assert {before[assignment] for assignment in moved_assignments(before, now)} <= {leaver.id}


@given(st.integers(1, 8), counts_of_assignments)
def test_join_moves_assignments_only_to_the_new_member(
    count: int, counts: dict[tuple[str, str], int]
) -> None:
    members = [member(f"m{number}") for number in range(count)]
    assignments = make_assignments(counts)
    before = assign(members, assignments, {})
    now = assign([*members, member("new")], assignments, before)
    gone = moved_assignments(before, now)
    assert {now[assignment] for assignment in gone} <= {"new"}
    assert len(gone) == len(assignments) // (count + 1)


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["same offers", "different offers"])
def test_assignment_of_a_large_fleet_is_fast(kind: str) -> None:
    pairs = [(f"topic{number}", "group") for number in range(40)]
    assignments = make_assignments(dict.fromkeys(pairs, 250))
    chance = random.Random(7)
    members = [
        Member(
            f"m{number:03}",
            1 + number % 3,
            0,
            frozenset(pairs if kind == "same offers" else chance.sample(pairs, 20)),
        )
        for number in range(500)
    ]
    before = assign(members, assignments, {})
    assert len(before) == 10_000
    # First, a tenth of the fleet is lost, and then nearly all of it.
    for owners in (before, dict.fromkeys(assignments, "m000")):
        started = time.process_time()
        now = assign(members[50:] if owners is before else members, assignments, owners)
        spent = time.process_time() - started
        assert len(now) == 10_000
        assert spent < 1.0
