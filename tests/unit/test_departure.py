"""If an instance leaves, others take over its assignments, except those that none can take."""

from __future__ import annotations

import pytest

from streamqd.admin.directives import DepartingAssignment, Departure, predict_takers
from streamqd.cli import fleet
from streamqd.model import Assignment
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import MemberView

HITS = [Assignment("access", number, "hits") for number in range(4)]
MAIL = Assignment("orders", 0, "mail")


def member_view(
    name: str, *, cap: int = 0, broken: tuple[Assignment, ...] = (), mail: bool = False
) -> MemberView:
    offers = {("access", "hits")} | ({("orders", "mail")} if mail else set())
    return MemberView(Member(name, 1, cap, frozenset(offers)), 0, False, frozenset(broken))


def test_remaining_members_share_the_assignments() -> None:
    owners = dict.fromkeys(HITS, "a")

    taken = predict_takers("a", [member_view("b"), member_view("c")], HITS, owners, {})

    assert sorted(to for to, _ in taken.values()) == ["b", "b", "c", "c"]
    assert {why for _, why in taken.values()} == {""}


def test_departure_lists_only_assignments_of_the_member() -> None:
    owners = {HITS[0]: "a", HITS[1]: "b", HITS[2]: "b"}

    assert predict_takers("a", [member_view("b")], HITS, owners, {}) == {HITS[0]: ("b", "")}


def test_assignment_without_another_consumer_is_stranded() -> None:
    owners = {HITS[0]: "a", MAIL: "a"}

    taken = predict_takers("a", [member_view("b")], [*HITS, MAIL], owners, {})

    assert taken == {HITS[0]: ("b", ""), MAIL: ("", "no-consumer")}


def test_assignments_above_all_caps_are_stranded() -> None:
    owners = {HITS[0]: "a", HITS[1]: "a", HITS[2]: "b", HITS[3]: "b"}

    taken = predict_takers("a", [member_view("b", cap=3)], HITS, owners, {})

    assert sorted(taken.values()) == [("", "max-partitions"), ("b", "")]


def test_assignments_broken_on_others_are_stranded() -> None:
    owners = dict.fromkeys(HITS, "a")

    taken = predict_takers("a", [member_view("b", broken=(HITS[2],))], HITS, owners, {})

    assert taken[HITS[2]] == ("", "broken")
    assert taken[HITS[1]] == ("b", "")


def test_move_directive_overrides_the_balance() -> None:
    owners = dict.fromkeys(HITS[:2], "a")

    taken = predict_takers(
        "a", [member_view("b"), member_view("c")], HITS[:2], owners, dict.fromkeys(HITS[:2], "c")
    )

    assert {to for to, _ in taken.values()} == {"c"}


def test_last_instance_strands_all_assignments() -> None:
    assert predict_takers("a", [], HITS, {HITS[0]: "a"}, {}) == {HITS[0]: ("", "no-consumer")}


def test_many_stranded_assignments_are_summarized(capsys: pytest.CaptureFixture[str]) -> None:
    def assignment(number: int, to: str, stranded: str) -> DepartingAssignment:
        return DepartingAssignment("access", number, "hits", to, stranded, None, None)

    assignments = [assignment(n, "", "no-consumer") for n in range(8)]
    assignments += [assignment(n, "b", "") for n in range(8, 40)]

    fleet.show_departure(Departure("a", False, assignments, None, ""))

    said = capsys.readouterr().out.splitlines()
    shown = ", ".join(f"access/{number}/hits" for number in range(5))
    assert said[0] == (
        "! 8 partitions without a new owner, because no other instance has their consumer:"
        f" {shown}, and 3 more"
    )
    assert said[1].startswith("b takes 32 partitions: access/8/hits, ")
    assert said[1].endswith("access/27/hits, and 12 more")
