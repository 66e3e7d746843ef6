"""Instances decide who is live and what moves: never by age alone, and never all at the same time.

Every test is a small simulation, with heartbeats, views and a clock that the test sets.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import Assignment
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import (
    Constraints,
    MemberView,
    PartitionView,
    Rebalancer,
    may_reload,
    place,
)
from streamqd.policy.silence import FORGET_HEARTBEATS, FORGET_MAX, SilenceDetector

TTL = 15.0
HEARTBEAT = TTL / 5
OFFERS = frozenset({("access", "hits")})
ASSIGNMENTS = [Assignment("access", number, "hits") for number in range(8)]
FREE = PartitionView(epoch=7, owner="", leased=False)


def member(
    name: str, *, heartbeat_unix_ms: int = 0, leaving: bool = False, cap: int = 0
) -> MemberView:
    return MemberView(Member(name, 1, cap, OFFERS), heartbeat_unix_ms, leaving)


def names(seen: list[MemberView]) -> set[str]:
    return {one.member.id for one in seen}


# --- live instances -------------------------------------------------------------------------------


class Watch:
    """Lets `me` send one heartbeat per interval.

    A test sets when the others sent their last ones (seconds).
    """

    def __init__(self) -> None:
        self.silence = SilenceDetector("me", TTL, HEARTBEAT)

    def heartbeat(
        self, at: float, others: dict[str, float], *, server: float | None = None
    ) -> set[str]:
        now_ms = int((at if server is None else server) * 1000)
        seen = [member("me", heartbeat_unix_ms=now_ms)]
        seen += [member(name, heartbeat_unix_ms=int(last * 1000)) for name, last in others.items()]
        return names(self.silence.live(at, now_ms, seen))


def test_member_with_heartbeats_is_live():
    watch = Watch()
    for number in range(20):
        assert watch.heartbeat(number * HEARTBEAT, {"you": number * HEARTBEAT - 1}) == {"me", "you"}


def test_member_is_dead_after_one_ttl_and_two_own_heartbeats():
    watch = Watch()
    alive = {
        number: "you" in watch.heartbeat(number * HEARTBEAT, {"you": 0.0}) for number in range(8)
    }
    # At the sixth look, its heartbeat is exactly one TTL old, and at the seventh, it is older.
    assert alive == {0: True, 1: True, 2: True, 3: True, 4: True, 5: True, 6: False, 7: False}


@pytest.mark.fault("F9")
def test_server_pause_makes_no_member_dead_by_age():
    """The pause makes all heartbeats old.

    If age alone counted, the first instance back would take everything.
    """
    watch = Watch()
    watch.heartbeat(0.0, {"you": 0.0})
    watch.heartbeat(HEARTBEAT, {"you": HEARTBEAT})
    back = HEARTBEAT + 3 * TTL
    assert watch.heartbeat(back, {"you": HEARTBEAT}) == {"me", "you"}
    assert watch.heartbeat(back + HEARTBEAT, {"you": back + 1}) == {"me", "you"}, (
        "it only came second"
    )


def test_server_pause_resets_earlier_silence():
    watch = Watch()
    watch.heartbeat(0.0, {"you": 0.0})
    watch.heartbeat(HEARTBEAT, {"you": 0.0})
    back = HEARTBEAT + 3 * TTL
    assert watch.heartbeat(back, {"you": 0.0}) == {"me", "you"}, "it was silent for one beat only"
    assert watch.heartbeat(back + HEARTBEAT, {"you": back + 1}) == {"me", "you"}, (
        "it only came second"
    )


def test_dead_member_is_found_after_a_server_pause():
    watch = Watch()
    watch.heartbeat(0.0, {"you": 0.0})
    back = 3 * TTL
    looks = [watch.heartbeat(back + number * HEARTBEAT, {"you": 0.0}) for number in range(3)]
    assert [("you" in look) for look in looks] == [True, False, False]


def test_rapid_heartbeats_do_not_prove_silence():
    watch = Watch()
    watch.heartbeat(0.0, {"you": -2 * TTL})
    looks = [watch.heartbeat(0.1 * number, {"you": -2 * TTL}) for number in range(1, 10)]
    assert all("you" in look for look in looks), "ten beats within a second are one proof"
    assert "you" in watch.heartbeat(HEARTBEAT, {"you": -2 * TTL})
    assert "you" not in watch.heartbeat(2 * HEARTBEAT, {"you": -2 * TTL})


def test_dead_member_is_live_after_its_next_heartbeat():
    watch = Watch()
    for number in range(8):
        watch.heartbeat(number * HEARTBEAT, {"you": 0.0})
    assert "you" in watch.heartbeat(8 * HEARTBEAT, {"you": 8 * HEARTBEAT - 0.5})


@pytest.mark.fault("F10")
def test_only_members_observed_silent_are_forgotten():
    """Only members that were observed to be silent are forgotten.

    After a jump of the clock, all of them seem to have been silent for a long time.
    """
    watch, jump = Watch(), 3600.0
    watch.heartbeat(0.0, {"you": 0.0, "dead": 0.0})
    assert watch.heartbeat(
        HEARTBEAT, {"you": HEARTBEAT / 2, "dead": 0.0}, server=HEARTBEAT + jump
    ) == {*("me", "you", "dead")}
    for number in range(2, FORGET_HEARTBEATS + 1):
        at = number * HEARTBEAT
        assert watch.silence.forgettable == []
        watch.heartbeat(at, {"you": at + jump, "dead": 0.0}, server=at + jump)
    assert watch.silence.forgettable == ["dead"]
    dead = {f"dead-{number}": 0.0 for number in range(FORGET_MAX + 50)}
    for number in range(FORGET_HEARTBEATS + 1):
        watch.heartbeat(number * HEARTBEAT + 2 * jump, dead)
    assert len(watch.silence.forgettable) == FORGET_MAX


@pytest.mark.fault("F10")
def test_failed_member_is_detected_despite_a_clock_step_back():
    watch, back = Watch(), -3600.0
    watch.heartbeat(0.0, {"you": 0.0})
    looks = [
        watch.heartbeat(n * HEARTBEAT, {"you": 0.0}, server=n * HEARTBEAT + back)
        for n in range(1, 8)
    ]
    assert [("you" in look) for look in looks] == [True] * 5 + [False] * 2


class Leases:
    """Lets `me` read one lease of `dead` per interval, with its remaining time in seconds."""

    def __init__(self) -> None:
        self.silence = SilenceDetector("me", TTL, HEARTBEAT)
        self.ttl: float | None = TTL

    def look(
        self, at: float, left: float, *, epoch: int = 7, owner: str = "dead", alive: bool = False
    ) -> bool:
        me, dead = member("me"), member("dead")._replace(ttl=self.ttl)
        views = {ASSIGNMENTS[0]: PartitionView(epoch, owner, True, left), ASSIGNMENTS[1]: FREE}
        found = self.silence.find_expired(at, views, [me, dead], [me, dead] if alive else [me])
        assert found <= {ASSIGNMENTS[0]}
        return bool(found)


@pytest.mark.parametrize("tick", [0.0, 1.0], ids=["a clock that stands", "a clock that goes"])
def test_lease_of_a_dead_member_expires_after_two_ttls(tick: float):
    leases = Leases()
    over = [leases.look(n * HEARTBEAT, 3600.0 - tick * n * HEARTBEAT) for n in range(13)]
    assert over == [False] * 11 + [True] * 2


def test_lease_that_may_be_renewed_is_not_expired():
    renewed, slipping, taken, untold, owned, gone = (Leases() for _ in range(6))
    untold.ttl = None
    for n in range(40):
        at = n * HEARTBEAT
        assert not renewed.look(at, 3600.0 - 0.2 * (n % 10)), "renewed at last"
        assert not slipping.look(at, TTL - 0.01 * n), "renewed each time, each time seen later"
        assert not taken.look(at, 3600.0, epoch=7 + n // 10)
        assert not untold.look(at, 3600.0)
        assert not owned.look(at, 3600.0, alive=True)
        assert not gone.look(at, 3600.0, owner="nobody")


def test_unobserved_time_does_not_expire_a_lease():
    rare, often = Leases(), Leases()
    assert not any(rare.look(n * 3 * HEARTBEAT, 3600.0) for n in range(20)), (
        "renewed in between, perhaps"
    )
    assert not any(often.look(n * 0.01, 3600.0) for n in range(20))
    assert not often.look(HEARTBEAT, 3600.0)
    seldom = Leases()
    assert not any(seldom.look(n * 2 * HEARTBEAT, 3600.0) for n in range(10)), "too few looks"
    assert seldom.look(20 * HEARTBEAT, 3600.0)


def test_own_instance_is_always_live():
    silence = SilenceDetector("me", TTL, HEARTBEAT)
    for number in range(5):
        live = silence.live(number * HEARTBEAT, 10**9, [member("me", heartbeat_unix_ms=1)])
        assert names(live) == {"me"}


# --- moves ----------------------------------------------------------------------------------------


class Fleet:
    """Instances that decide about the same assignments, at times that the test chooses."""

    def __init__(self, *ids: str, delay: float = 3.0, hold: float = 10.0, moves: int = 4) -> None:
        self.damping = (delay, hold, moves)
        self.brains: dict[str, Rebalancer] = {}
        self.caps: dict[str, int] = {}
        self.leaving: set[str] = set()
        self.dead: set[str] = set()
        self.constraints = Constraints()
        self.owned: dict[Assignment, tuple[str, float]] = {}
        self.moves: list[tuple[float, str, str, Assignment]] = []
        self.now = 0.0
        for one in ids:
            self.join(one)

    def join(self, name: str) -> None:
        delay, hold, moves = self.damping
        self.brains[name] = Rebalancer(name, delay, hold, moves, grace_seconds=2 * HEARTBEAT)

    def heartbeat(self) -> int:
        """Let each instance decide and act once. Return the number of moves."""
        before = len(self.moves)
        for name, brain in self.brains.items():
            if name in self.dead:
                continue
            live = [
                member(one, leaving=one in self.leaving, cap=self.caps.get(one, 0))
                for one in self.brains
                if one not in self.dead
            ]
            mine = {
                assignment: since
                for assignment, (owner, since) in self.owned.items()
                if owner == name
            }
            views = {
                assignment: self.view(assignment)
                for assignment in ASSIGNMENTS
                if assignment not in mine
            }
            room = (self.caps.get(name, 0) or len(ASSIGNMENTS)) - len(mine)
            decision = brain.decide(
                self.now, live, ASSIGNMENTS, mine, 0, views, room=room, constraints=self.constraints
            )
            for assignment in decision.shed:
                del self.owned[assignment]
                self.moves.append((self.now, "shed", name, assignment))
            for assignment in decision.acquire:
                self.owned[assignment] = (name, self.now)
                self.moves.append((self.now, "acquire", name, assignment))
        self.now += HEARTBEAT
        return len(self.moves) - before

    def view(self, assignment: Assignment) -> PartitionView:
        owner = self.owned.get(assignment, ("", 0.0))[0]
        return PartitionView(1, owner, leased=bool(owner) and owner not in self.dead)

    def settle(self, heartbeats: int = 40) -> None:
        for _ in range(heartbeats):
            self.heartbeat()

    def shares(self) -> dict[str, int]:
        counts = dict.fromkeys(self.brains, 0)
        for owner, _ in self.owned.values():
            counts[owner] += 1
        return counts


def test_single_instance_takes_everything_immediately():
    fleet = Fleet("a")
    assert fleet.heartbeat() == 8
    assert fleet.shares() == {"a": 8}


def test_three_instances_share_eight_partitions_evenly():
    fleet = Fleet("a", "b", "c")
    fleet.heartbeat()
    assert sorted(fleet.shares().values()) == [2, 3, 3]


def test_nothing_moves_in_steady_state():
    fleet = Fleet("a", "b", "c")
    fleet.settle(10)
    fleet.moves.clear()
    fleet.settle(100)
    assert fleet.moves == []


def test_new_member_gets_its_share_gradually_after_the_delay():
    fleet = Fleet("a", delay=3.0, hold=0.0, moves=2)
    fleet.settle(5)
    fleet.join("b")
    joined = fleet.now
    fleet.settle()
    sheds = [move for move in fleet.moves if move[1] == "shed"]
    assert sorted(fleet.shares().values()) == [4, 4]
    assert len(sheds) == 4, "only what balance needs"
    assert all(at >= joined + 3.0 for at, *_ in sheds)
    per_heartbeat = [sum(1 for at, *_ in sheds if at == when) for when in {at for at, *_ in sheds}]
    assert max(per_heartbeat) <= 2


def test_membership_change_within_the_delay_moves_nothing():
    fleet = Fleet("a", delay=2 * HEARTBEAT, hold=0.0)
    fleet.settle(5)
    fleet.moves.clear()
    fleet.join("b")
    fleet.heartbeat()
    fleet.heartbeat()
    del fleet.brains["b"]
    fleet.settle(5)
    fleet.join("b")
    fleet.heartbeat()
    assert fleet.moves == [], "each change restarts the delay"


def test_partition_is_not_moved_within_its_hold_time():
    fleet = Fleet("a", delay=0.0, hold=10 * HEARTBEAT)
    fleet.heartbeat()
    acquired = fleet.moves[0][0]
    fleet.join("b")
    fleet.settle()
    sheds = [at for at, what, *_ in fleet.moves if what == "shed"]
    assert sheds
    assert min(sheds) - acquired >= 10 * HEARTBEAT


def test_leaving_member_owns_assignments_until_released():
    fleet = Fleet("a", "b")
    fleet.heartbeat()
    fleet.leaving.add("b")
    fleet.moves.clear()
    fleet.heartbeat()
    assert [what for _, what, name, _ in fleet.moves if name == "a"] == []
    # b is draining. Its assignments become free one by one, and a takes each at its next look.
    freed = [assignment for assignment, (owner, _) in fleet.owned.items() if owner == "b"]
    for assignment in freed:
        del fleet.owned[assignment]
    fleet.heartbeat()
    assert fleet.shares()["a"] == 8


def test_expired_lease_of_a_live_owner_is_not_taken():
    """An expired lease is not taken from a live owner, which renews it late.

    A pause of the server that is longer than the TTL therefore moves nothing.
    """
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=2 * HEARTBEAT)
    expired, renewed = PartitionView(3, "b", leased=False), PartitionView(3, "b", leased=True)
    live = [member("a"), member("b")]
    for heartbeat in range(20):
        views = {ASSIGNMENTS[0]: renewed if heartbeat % 2 else expired}
        decision = brain.decide(heartbeat * HEARTBEAT, live, ASSIGNMENTS[:1], {}, 0, views, room=8)
        assert decision.acquire == []
    dead = brain.decide(99.0, live[:1], ASSIGNMENTS[:1], {}, 0, {ASSIGNMENTS[0]: expired}, room=8)
    assert dead.acquire == ASSIGNMENTS[:1]


def test_unrenewed_lease_of_a_live_owner_is_taken_later():
    """If an owner restarts with a smaller cap, it sends heartbeats but no longer renews this lease.

    Others then take it.
    """
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=2 * HEARTBEAT)
    live = [member("a"), member("b")]
    views = {ASSIGNMENTS[0]: PartitionView(3, "b", leased=False)}
    taken = [
        brain.decide(heartbeat * HEARTBEAT, live, ASSIGNMENTS[:1], {}, 0, views, room=8).acquire
        for heartbeat in range(3)
    ]
    assert taken == [[], [], ASSIGNMENTS[:1]]


def test_expired_lease_no_longer_offered_is_taken_immediately():
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=2 * HEARTBEAT)
    other = MemberView(Member("b", 1, 0, frozenset()), 0, leaving=False)
    views = {ASSIGNMENTS[0]: PartitionView(3, "b", leased=False)}
    decision = brain.decide(0.0, [member("a"), other], ASSIGNMENTS[:1], {}, 0, views, room=8)
    assert decision.acquire == ASSIGNMENTS[:1]


@pytest.mark.fault("F3")
def test_assignment_is_not_moved_to_an_instance_in_a_crash_loop():
    brain = Rebalancer("a", 0.0, 0.0, 8, grace_seconds=2 * HEARTBEAT)
    mine = dict.fromkeys(ASSIGNMENTS, -100.0)
    healthy = [member("a"), member("b")]
    assert brain.decide(0.0, healthy, ASSIGNMENTS, mine, 0, {}, room=0).shed
    broken = [member("a"), member("b")._replace(broken=frozenset(ASSIGNMENTS))]
    assert brain.decide(HEARTBEAT, broken, ASSIGNMENTS, mine, 0, {}, room=0).shed == []


def test_lowered_cap_hands_over_the_excess():
    brain = Rebalancer("a", 60.0, 60.0, 1, grace_seconds=2 * HEARTBEAT)
    mine = {assignment: float(number) for number, assignment in enumerate(ASSIGNMENTS[:4])}
    decision = brain.decide(0.0, [member("a")], ASSIGNMENTS[:4], mine, 0, {}, room=-3)
    assert decision.shed == ASSIGNMENTS[1:4]


def test_live_lease_is_never_taken():
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=0.0)
    views = {ASSIGNMENTS[0]: PartitionView(3, "gone", leased=True)}
    assert brain.decide(99.0, [member("a")], ASSIGNMENTS[:1], {}, 0, views, room=8).acquire == []


def test_free_assignment_waits_for_its_member_up_to_patience():
    # One of the two assignments is meant for b, which may not be able to take it.
    brain = Rebalancer("a", 3.0, 10.0, 4, grace_seconds=2 * HEARTBEAT)
    live = [member("a"), member("b")]
    assignments = ASSIGNMENTS[:2]
    first = brain.decide(
        0.0, live, assignments, {}, 0, dict.fromkeys(assignments, FREE), room=8
    ).acquire
    assert len(first) == 1
    (other,) = set(assignments) - set(first)
    mine, views = {first[0]: 0.0}, {other: FREE}
    assert brain.decide(HEARTBEAT, live, assignments, mine, 0, views, room=8).acquire == []
    assert brain.decide(2 * HEARTBEAT, live, assignments, mine, 0, views, room=8).acquire == [other]


def test_patience_restarts_after_another_owner():
    brain = Rebalancer("a", 3.0, 10.0, 4, grace_seconds=2 * HEARTBEAT)
    live = [member("a"), member("b")]
    assignments = ASSIGNMENTS[:2]
    mine, other = {ASSIGNMENTS[0]: 0.0}, ASSIGNMENTS[1]
    for heartbeat in range(10):
        views = {other: PartitionView(heartbeat, "", leased=False)}  # with a new epoch each time
        assert (
            brain.decide(heartbeat * HEARTBEAT, live, assignments, mine, 0, views, room=8).acquire
            == []
        )


def test_instance_takes_no_more_than_its_cap():
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=0.0)
    views = dict.fromkeys(ASSIGNMENTS, FREE)
    taken = brain.decide(0.0, [member("a")], ASSIGNMENTS, {}, 0, views, room=3).acquire
    assert len(taken) == 3
    assert brain.decide(0.0, [member("a")], ASSIGNMENTS, {}, 0, views, room=0).acquire == []


def test_free_assignments_are_taken_a_few_at_a_time():
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=0.0)
    assignments = [Assignment("access", number, "hits") for number in range(100)]
    views, taken, now = dict.fromkeys(assignments, FREE), [], 0.0
    while views:
        decision = brain.decide(
            now, [member("a")], assignments, dict.fromkeys(taken, 0.0), 0, views, room=100
        )
        taken += decision.acquire
        for assignment in decision.acquire:
            del views[assignment]
        assert decision.has_more == bool(views)
        assert len(taken) <= 16 + 64 * now
        now += 0.1
    assert taken == assignments
    assert now < 2.0


def test_assignments_owned_elsewhere_count_for_the_share():
    """Assignments that are owned elsewhere count for the share.

    Otherwise, the member would get assignments and give them back in a loop.
    """
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=0.0)
    mine = dict.fromkeys(ASSIGNMENTS[:6], 0.0)
    other = dict.fromkeys(ASSIGNMENTS[6:], PartitionView(1, "b", leased=True))
    more = Member("b", 1, 0, OFFERS | {("orders", "bill")})
    busy, idle = (MemberView(more, 0, leaving=False, owned=owned) for owned in (6, 2))
    assert brain.decide(9.0, [member("a"), busy], ASSIGNMENTS, mine, 0, other, room=2).shed == []
    assert (
        len(brain.decide(9.1, [member("a"), idle], ASSIGNMENTS, mine, 0, other, room=2).shed) == 2
    )
    # A member with an older version does not report its assignments.
    assert (
        len(
            brain.decide(
                9.2, [member("a"), idle._replace(owned=None)], ASSIGNMENTS, mine, 0, other, room=2
            ).shed
        )
        == 2
    )
    # A member without other offers owns nothing elsewhere, even if its last heartbeat says so.
    same = MemberView(Member("b", 1, 0, OFFERS), 0, leaving=False, owned=6)
    assert (
        len(brain.decide(9.3, [member("a"), same], ASSIGNMENTS, mine, 0, other, room=2).shed) == 2
    )


def test_unfinished_moves_count_against_the_limit():
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=0.0)
    mine = dict.fromkeys(ASSIGNMENTS, 0.0)
    live = [member("a"), member("b")]
    assert len(brain.decide(1.0, live, ASSIGNMENTS, mine, 0, {}, room=0).shed) == 4
    assert len(brain.decide(2.0, live, ASSIGNMENTS, mine, 3, {}, room=0).shed) == 1
    assert brain.decide(3.0, live, ASSIGNMENTS, mine, 4, {}, room=0).shed == []


def test_assignment_moves_to_a_member_that_still_has_a_consumer():
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=0.0)
    me, mine = MemberView(Member("a", 1, 0, frozenset()), 0, False), {ASSIGNMENTS[0]: 0.0}
    assert brain.decide(9.0, [me], ASSIGNMENTS[:1], mine, 0, {}, room=8).shed == []
    assert (
        brain.decide(9.0, [me, member("b")], ASSIGNMENTS[:1], mine, 0, {}, room=8).shed
        == ASSIGNMENTS[:1]
    )


@pytest.mark.parametrize("seed", range(5))
def test_share_of_a_dead_member_is_taken_by_live_members(seed: int):
    fleet = Fleet("a", "b", "c")
    fleet.settle(5)
    victim = "abc"[seed % 3]
    fleet.dead.add(victim)
    fleet.settle(3)
    del fleet.brains[victim]
    assert sorted(fleet.shares().values()) == [4, 4]


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12))
def test_rebalancing_converges_after_any_membership_changes(changes: list[str]):
    fleet = Fleet("z", delay=0.0, hold=0.0)
    fleet.heartbeat()
    for name in changes:
        if name in fleet.brains:
            fleet.dead.add(name)
            fleet.heartbeat()
            fleet.dead.discard(name)
            del fleet.brains[name]
            for assignment in [u for u, (owner, _) in fleet.owned.items() if owner == name]:
                del fleet.owned[assignment]
        else:
            fleet.join(name)
        fleet.heartbeat()
    fleet.settle()
    shares = fleet.shares().values()
    assert sum(shares) == 8
    assert max(shares) - min(shares) <= 1
    fleet.moves.clear()
    fleet.settle(10)
    assert fleet.moves == []


# --- directives of operators ----------------------------------------------------------------------


def order_move(fleet: Fleet, assignment: Assignment, to: str, at: int = 1) -> None:
    fleet.constraints = fleet.constraints._replace(
        moves={**fleet.constraints.moves, assignment: (to, at)}
    )


def test_move_directive_is_applied_immediately_and_kept():
    fleet = Fleet("a", "b", delay=1000.0, hold=1000.0)
    fleet.settle(3)
    assignment = next(assignment for assignment, (owner, _) in fleet.owned.items() if owner == "a")
    fleet.moves.clear()
    order_move(fleet, assignment, "b")
    fleet.heartbeat()
    fleet.settle(400)  # much longer than the delay and the hold
    assert [(what, name, moved) for _, what, name, moved in fleet.moves] == [
        ("shed", "a", assignment),
        ("acquire", "b", assignment),
    ]
    assert fleet.shares() == {"a": 3, "b": 5}


def test_move_directive_waits_for_an_absent_instance():
    fleet = Fleet("a", "b", delay=1000.0, hold=1000.0)
    order_move(fleet, ASSIGNMENTS[0], "c")
    fleet.settle(3)
    assert fleet.shares() == {"a": 4, "b": 4}
    fleet.moves.clear()
    fleet.join("c")
    fleet.settle(3)
    assert fleet.moves == [], "the order is old: it waits for its time like every move"
    fleet.settle(400)
    assert fleet.owned[ASSIGNMENTS[0]][0] == "c"


@pytest.mark.parametrize(
    "target",
    [
        member("b", cap=0)._replace(broken=frozenset(ASSIGNMENTS[:1])),
        member("b", leaving=True),
        MemberView(Member("b", 1, 0, frozenset()), 0, leaving=False),
    ],
    ids=["broken", "leaving", "no offer"],
)
def test_move_directive_to_an_unable_instance_is_ignored(target: MemberView):
    brain = Rebalancer("a", 0.0, 0.0, 8, grace_seconds=0.0)
    chosen = Constraints({ASSIGNMENTS[0]: ("b", 1)})
    mine = {ASSIGNMENTS[0]: 0.0}
    live = [member("a"), target]
    assert (
        brain.decide(1.0, live, ASSIGNMENTS[:1], mine, 0, {}, room=8, constraints=chosen).shed == []
    )


def test_move_directives_respect_the_cap():
    members = [member("a"), member("b", cap=2)]
    moves = dict.fromkeys(ASSIGNMENTS[:3], "b")
    wanted = place(members, ASSIGNMENTS, {}, moves)
    assert [assignment for assignment, owner in wanted.items() if owner == "b"] == ASSIGNMENTS[:2]
    assert set(wanted) == set(ASSIGNMENTS)


def test_moved_assignments_do_not_affect_the_balance():
    wanted = place([member("a"), member("b")], ASSIGNMENTS, {}, dict.fromkeys(ASSIGNMENTS[:2], "b"))
    rest = [wanted[assignment] for assignment in ASSIGNMENTS[2:]]
    assert (rest.count("a"), rest.count("b")) == (3, 3)


def test_drained_instance_releases_all_and_takes_nothing():
    fleet = Fleet("a", "b", delay=1000.0, hold=1000.0, moves=1)
    fleet.settle(3)
    fleet.constraints = Constraints(drained={"b"})
    fleet.settle(3)
    assert fleet.shares() == {"a": 8, "b": 0}
    fleet.dead.add("a")
    fleet.settle(20)
    assert fleet.shares()["b"] == 0, "even if no other instance is left"
    fleet.constraints = Constraints()
    fleet.settle(3)
    assert fleet.shares()["b"] == 8


def test_stopped_group_is_released_and_not_taken():
    """The instances release the partitions of a stopped group, while those of other groups stay."""
    fleet = Fleet("a", "b", delay=1000.0, hold=1000.0, moves=1)
    fleet.settle(3)
    topic, group = ASSIGNMENTS[0].topic, ASSIGNMENTS[0].group
    fleet.constraints = Constraints(stopped={(topic, group)})
    fleet.settle(1)
    kept = {
        assignment
        for assignment in ASSIGNMENTS
        if (assignment.topic, assignment.group) != (topic, group)
    }
    assert set(fleet.owned) == kept
    fleet.settle(20)
    assert set(fleet.owned) == kept
    fleet.constraints = Constraints()
    fleet.settle(5)
    assert set(fleet.owned) == set(ASSIGNMENTS)


def test_assignments_of_a_stopped_group_make_room_below_the_cap():
    """An instance over its cap keeps its other partitions if the stop makes enough room."""
    other = Assignment("t2", 0, "g")
    assignments = [*ASSIGNMENTS[:2], other]
    brain = Rebalancer("a", 0.0, 0.0, 4, grace_seconds=1.0)
    mine = {assignment: float(number) for number, assignment in enumerate(assignments)}
    stopped = Constraints(stopped={(ASSIGNMENTS[0].topic, ASSIGNMENTS[0].group)})
    live = [member("a")]
    decision = brain.decide(1.0, live, assignments, mine, 0, {}, room=-1, constraints=stopped)
    assert decision.shed == sorted(ASSIGNMENTS[:2])


def test_rebalance_now_skips_delay_but_limits_moves():
    fleet = Fleet("a", delay=1000.0, hold=1000.0, moves=1)
    fleet.settle(3)
    fleet.join("b")
    fleet.settle(3)
    assert fleet.shares() == {"a": 8, "b": 0}
    fleet.moves.clear()
    for brain in fleet.brains.values():
        brain.skip_delay_once()
    fleet.settle(10)
    assert fleet.shares() == {"a": 4, "b": 4}
    sheds = [at for at, what, *_ in fleet.moves if what == "shed"]
    assert len(sheds) == len(set(sheds)) == 4
    fleet.join("c")
    fleet.settle(5)
    assert fleet.shares()["c"] == 0, "the hurry is over"


def test_instances_reload_one_after_another():
    before, after = member("a")._replace(reloaded=4), member("a")._replace(reloaded=5)
    silent, later = member("a"), member("c")._replace(reloaded=0)
    assert not may_reload("b", 5, [before, later])
    assert may_reload("b", 5, [after, later])
    assert may_reload("b", 5, [silent, later]), (
        "no instance waits for a member that does not report it"
    )
    assert may_reload("b", 5, [before._replace(leaving=True), later])
    assert may_reload("a", 5, [member("a")._replace(reloaded=0), later])
