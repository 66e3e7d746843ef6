"""Events in the life of a fleet, with checks after each of them. Every scenario returns figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from streamqd.model import Assignment
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import ACQUIRES_AT_ONCE, ACQUIRES_PER_SECOND
from tests.simulation.fleet import Fleet
from tests.simulation.instance import CRASH_COOLDOWN

START_SECONDS = 2.0  # seconds between the first and the last start when instances start together
# If a large fleet has offers that overlap only in part, the last assignments are placed one by one.
# Each one waits for rebalance_delay and rebalance_hold: 80 s with 60 instances, 110 s with 250.
EVEN_TTLS = 20
REST_HEARTBEATS = 6  # number of heartbeats; longer than rebalance_delay plus rebalance_hold
Figures = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """The size of a fleet. Each instance offers `offered` of the topics."""

    members: int
    topics: int
    partitions: int  # partitions of each topic
    offered: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every pair of a topic and a group."""
        return [(f"t{number:02}", "g") for number in range(self.topics)]

    @property
    def assignments(self) -> list[Assignment]:
        """Every assignment."""
        return [Assignment(t, p, g) for t, g in self.pairs for p in range(self.partitions)]

    def member(self, number: int, weight: int = 1, cap: int = 0) -> Member:
        """Return an instance by its number. The offers rotate from one instance to the next."""
        offers = (self.pairs[(number + n) % self.topics] for n in range(self.offered))
        return Member(f"m{number:03}", weight, cap, frozenset(offers))


SMALL = Scope(members=20, topics=4, partitions=50, offered=4)
PARTIAL = Scope(members=20, topics=10, partitions=20, offered=4)
LARGE = Scope(members=500, topics=20, partitions=500, offered=8)


def new_fleet(scope: Scope, seed: int, **options: Any) -> Fleet:
    """Return a fleet in which no instance is running yet."""
    return Fleet(
        [scope.member(n) for n in range(scope.members)], scope.assignments, seed=seed, **options
    )


def start_instances(fleet: Fleet, names: list[str], within: float = START_SECONDS) -> None:
    """Start instances at random times within a number of seconds."""
    for name in names:
        fleet.schedule_in(fleet.chance.uniform(0, within), fleet.instances[name].start)
    fleet.run(within)


class FleetObserver:
    """Observes a fleet from the time at which the observer is created."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.started_at = fleet.now
        self.acquired = len(fleet.server.acquired)
        self.shed = fleet.shed

    def wait_until_even(self, limit: float) -> Figures:
        """Wait until the fleet is even, then check that no assignment moves any more."""
        fleet = self.fleet
        fleet.run_until(lambda: fleet.count_free() == 0, limit)
        owned = fleet.now - self.started_at
        fleet.run_until(lambda: fleet.is_even() and fleet.is_settled(), limit)
        even_seconds = fleet.now - self.started_at
        quiet = self.wait_until_quiet(limit)
        assert fleet.is_even(), fleet.describe()
        figures = {
            "owned_seconds": round(owned, 1),
            "even_seconds": round(even_seconds, 1),
            "quiet_seconds": round(quiet, 1),
            "acquired": len(fleet.server.acquired) - self.acquired,
            "handed_over": fleet.shed - self.shed,
        }
        return figures | check_rest(fleet) | self.peak_rates()

    def wait_until_quiet(self, limit: float) -> float:
        """Wait until nothing has moved for a while. Return the seconds until the last move."""
        fleet, window = self.fleet, REST_HEARTBEATS * self.fleet.heartbeat_interval
        since, before, end = fleet.now, fleet.count_moves(), fleet.now + limit
        while fleet.now - since < window or not fleet.is_settled():
            assert fleet.now < end, f"it does not come to rest: {fleet.describe()}"
            fleet.run(fleet.ttl / 15)
            if fleet.count_moves() != before:
                since, before = fleet.now, fleet.count_moves()
        return since - self.started_at

    def peak_rates(self) -> Figures:
        """Return the server's highest number of calls per second since the start, for each kind."""
        return {
            f"{kind}s_per_second": max(
                (n for at, n in counts.items() if at >= int(self.started_at)), default=0
            )
            for kind, counts in self.fleet.server.per_second.items()
        }


def check_rest(fleet: Fleet) -> Figures:
    """Check that nothing is acquired, handed over or lost in a steady fleet."""
    before = fleet.count_moves()
    fleet.run(REST_HEARTBEATS * fleet.heartbeat_interval)
    assert fleet.count_moves() == before, f"moves in steady state: {before}, {fleet.describe()}"
    return {"moved_at_rest": 0}


def surplus_moves_max(fleet: Fleet, least: int) -> int:
    """Return the number of surplus moves allowed: one per instance, or more if offers differ.

    If offers differ, an instance knows only its own offers, so some assignments move again later.
    """
    each = len(fleet.instances)
    return max(each, least // 2) if fleet.offers_differ() else each


# --- events ---------------------------------------------------------------------------------------


def cold_start(fleet: Fleet) -> Figures:
    """No assignment is owned, and all instances start within two seconds."""
    observer = FleetObserver(fleet)
    start_instances(fleet, list(fleet.instances))
    figures = observer.wait_until_even(EVEN_TTLS * fleet.ttl)
    # No instance acquires more than its share, even if more assignments are free.
    each = ACQUIRES_AT_ONCE + ACQUIRES_PER_SECOND
    assert figures["acquires_per_second"] <= len(fleet.instances) * each
    return figures


def mass_restart(fleet: Fleet) -> Figures:
    """All instances are killed at the same time, and are restarted within two seconds."""
    observer = FleetObserver(fleet)
    for instance in fleet.instances.values():
        instance.kill()
    start_instances(fleet, list(fleet.instances))
    return observer.wait_until_even(EVEN_TTLS * fleet.ttl)


def loss_of_a_third(fleet: Fleet) -> Figures:
    """A third of the hosts fail at the same time."""
    gone = fleet.chance.sample(fleet.live_instances(), len(fleet.live_instances()) // 3)
    lost = {assignment for each in gone for assignment in each.held}
    observer = FleetObserver(fleet)
    for instance in gone:
        instance.kill()
    figures = observer.wait_until_even(EVEN_TTLS * fleet.ttl)
    taken: dict[Assignment, float] = {}
    for at, assignment, _, _ in fleet.server.acquired[observer.acquired :]:
        taken.setdefault(assignment, at - observer.started_at)
    # In a large fleet, a few assignments are always free because they are being moved.
    figures["owned_seconds"] = round(max(taken[assignment] for assignment in lost), 1)
    # If offers differ, two more heartbeats are allowed, because instances may disagree on which of
    # them takes a free assignment.
    assert (
        figures["owned_seconds"]
        <= fleet.ttl + (5 if fleet.offers_differ() else 3) * fleet.heartbeat_interval
    )
    assert figures["acquired"] <= len(lost) + surplus_moves_max(fleet, len(lost))
    return {"lost": len(lost)} | figures


def growth(fleet: Fleet) -> Figures:
    """All instances that are not running start or restart."""
    names = [name for name, each in fleet.instances.items() if not each.alive]
    least = len(fleet.assignments) * len(names) // len(fleet.instances)
    observer = FleetObserver(fleet)
    start_instances(fleet, names)
    figures = observer.wait_until_even(EVEN_TTLS * fleet.ttl)
    assert figures["handed_over"] <= least + surplus_moves_max(fleet, least)
    return {"least_moves": least} | figures


def server_pause(fleet: Fleet) -> Figures:
    """The server hangs for two lease TTLs, and every hundredth reply is lost."""
    observer, late = FleetObserver(fleet), fleet.server.late
    fleet.lost_replies = 0.01
    fleet.server.paused_until = fleet.now + 2 * fleet.ttl
    fleet.run(2 * fleet.ttl + 4.0)
    figures = observer.wait_until_even(5 * fleet.ttl)
    fleet.lost_replies = 0.0
    assert figures["acquired"] == figures["handed_over"] == 0, "no instance may lose an assignment"
    late = fleet.server.late - late
    assert late >= len(fleet.assignments)
    return {"late_renewals": late} | figures


def outage(fleet: Fleet) -> Figures:
    """The network fails for two lease TTLs, and everything sent in that time is lost."""
    fleet.server.unreachable = True
    figures = server_pause(fleet)
    fleet.server.unreachable = False
    return figures


def rolling_restart(fleet: Fleet) -> Figures:
    """Ten instances are drained one after the other, and each is restarted 5 s later."""
    observer, worst = FleetObserver(fleet), 0
    for instance in list(fleet.instances.values())[:10]:
        instance.drain()
        while instance.alive:
            fleet.run(0.25)
        left = fleet.now
        while fleet.now - left < 5.0:
            fleet.run(0.25)
            worst = max(worst, fleet.count_free() if fleet.now - left >= 1.0 else 0)
        instance.start()
        fleet.run(2.0)
    figures = observer.wait_until_even(EVEN_TTLS * fleet.ttl)
    return {"unowned_after_a_second": worst} | figures


def divergence(fleet: Fleet) -> Figures:
    """For 30 s, no instance sees more than two thirds of the others, and a tenth of them die."""
    observer = FleetObserver(fleet)
    fleet.blind_share = 1 / 3
    gone = fleet.chance.sample(fleet.live_instances(), max(1, len(fleet.live_instances()) // 10))
    lost = sum(fleet.server.owned[each.member.id] for each in gone)
    for instance in gone:
        instance.kill()
    fleet.run(30.0)
    fleet.blind_share = 0.0
    return {"lost": lost} | observer.wait_until_even(EVEN_TTLS * fleet.ttl)


def crash_loop(fleet: Fleet) -> Figures:
    """On one instance, the workers of all topics but one crash at every start."""
    bad = fleet.instances["m000"]
    offered = sorted(bad.member.offers)
    bad.poison = frozenset(u for u in fleet.assignments if (u.topic, u.group) in offered[1:])
    observer = FleetObserver(fleet)
    start_instances(fleet, list(fleet.instances))
    fleet.run(2 * CRASH_COOLDOWN)
    tried = [u for _, u, _, owner in fleet.server.acquired if owner == "m000" and u in bad.poison]
    # Each assignment is tried once, and then at most once after every cooldown.
    assert tried
    assert max(tried.count(assignment) for assignment in tried) <= 3
    # In a large fleet, a few assignments are always free because they are being moved.
    left = set(bad.poison)

    def all_are_elsewhere() -> bool:
        left.difference_update(
            [
                assignment
                for assignment in left
                if fleet.server.fences[assignment].owner not in ("", "m000")
            ]
        )
        return not left

    fleet.run_until(all_are_elsewhere, 2 * fleet.ttl)
    return {"tried": len(tried), "crashes": bad.crashes} | observer.peak_rates()


def unequal_instances(fleet: Fleet) -> Figures:
    """Weights, caps and offers differ between instances."""
    chance = fleet.chance
    pairs = sorted({(assignment.topic, assignment.group) for assignment in fleet.assignments})
    for number, instance in enumerate(fleet.instances.values()):
        # The first instance offers all topics and has no cap, so every assignment can have an
        # owner.
        offers = pairs if number == 0 else chance.sample(pairs, len(pairs) // 2)
        cap = 0 if number < len(fleet.instances) // 2 else chance.choice([0, 3, 40])
        instance.describe(weight=chance.choice([1, 1, 2, 3]), cap=cap, offers=frozenset(offers))
    observer = FleetObserver(fleet)
    start_instances(fleet, list(fleet.instances))
    owned = START_SECONDS + fleet.run_until(lambda: fleet.count_free() == 0, 10 * fleet.ttl)
    quiet = observer.wait_until_quiet(30 * fleet.ttl)
    for instance in fleet.live_instances():
        load = fleet.server.owned[instance.member.id]
        assert not instance.member.cap or load <= instance.member.cap
    figures = {
        "owned_seconds": round(owned, 1),
        "quiet_seconds": round(quiet, 1),
        "acquired": len(fleet.server.acquired) - observer.acquired,
        "handed_over": fleet.shed - observer.shed,
    }
    return figures | check_rest(fleet) | observer.peak_rates()


Scenario = Callable[[Fleet], Figures]
# Events for a running fleet. The events of one entry happen one after the other.
RUNNING_FLEET_SCENARIOS: list[dict[str, Scenario]] = [
    {"server pause": server_pause, "network outage": outage},
    {"loss of a third": loss_of_a_third, "growth": growth},
    {"mass restart": mass_restart},
    {"divergent views": divergence, "growth again": growth},
    {"rolling restart": rolling_restart},
]
# All events for one fleet, from its start on.
SEQUENCE: dict[str, Scenario] = {"cold start": cold_start} | dict(
    chain.from_iterable(each.items() for each in RUNNING_FLEET_SCENARIOS)
)
# These events start with a fleet in which no instance is running.
NEW_FLEET_SCENARIOS: dict[str, Scenario] = {
    "crash loop": crash_loop,
    "unequal instances": unequal_instances,
}
