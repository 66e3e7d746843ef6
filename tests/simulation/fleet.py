"""Instances, a server and a virtual clock. Runs with the same seed are identical."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from streamqd.model import Assignment
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import MemberView
from tests.simulation.instance import EXCHANGE_SECONDS, Call, Instance
from tests.simulation.server import Server

LATENCY = (0.0002, 0.005)  # seconds that a round trip between an instance and the server takes
STOP = (0.02, 1.0)  # seconds that a worker needs to finish its messages when it stops
TICK_SECONDS = 1e-6


class Fleet:
    """The simulation, which executes events in the order of their times.

    Events at the same time are executed in the order in which they were created.
    """

    def __init__(
        self,
        members: Sequence[Member],
        assignments: Sequence[Assignment],
        *,
        seed: int,
        ttl: float = 15.0,
        damping: tuple[float, float, int] = (3.0, 10.0, 4),
        lost_replies: float = 0.0,
    ) -> None:
        self.chance = random.Random(seed)
        self.assignments = sorted(assignments)
        self.ttl = ttl
        self.damping = damping
        self.lost_replies = lost_replies
        self.now = 0.0
        self.decisions = self.shed = self.stolen = 0
        self.blind_share = 0.0  # the share of the members that each instance cannot see at present
        self.server = Server(self.assignments, ttl)
        self.instances = {member.id: Instance(self, member) for member in members}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0

    # --- the clock ---

    def schedule_in(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event to happen after a number of seconds."""
        self.schedule_at(self.now + seconds, event)

    def schedule_at(self, when: float, event: Callable[[], None]) -> None:
        """Schedule an event at an exact time, because its receiver compares it with the clock."""
        self._event_count += 1
        heapq.heappush(self._events, (max(when, self.now + TICK_SECONDS), self._event_count, event))

    def run(self, seconds: float) -> None:
        """Advance the clock by a number of seconds."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit: float, step: float = 0.5) -> float:
        """Advance the clock until a condition holds, and return the seconds. Fail at the limit."""
        started_at = self.now
        while not condition():
            assert self.now - started_at < limit, f"not within {limit} s: {self.describe()}"
            self.run(step)
        return self.now - started_at

    # --- between instances and the server ---

    def exchange(self, instance: Instance, calls: list[Call]) -> None:
        """Send calls to the server, which then answers the instance.

        A call takes effect even if its answer is late or lost, unless the server is unreachable.
        """
        sent, run = self.now, instance.run
        arrives = max(self.now + self.chance.uniform(*LATENCY), self.server.paused_until)
        lost = arrives - sent > EXCHANGE_SECONDS or self.chance.random() < self.lost_replies

        def execute() -> None:
            replies = [instance.execute(self.now, call) for call in calls]

            def answer() -> None:
                if run == instance.run:
                    instance.handle_replies(sent, calls, replies)

            if not lost:
                self.schedule_in(self.chance.uniform(*LATENCY), answer)

        def give_up() -> None:
            if run == instance.run:
                instance.handle_timeout()

        if not (self.server.unreachable and arrives > sent + EXCHANGE_SECONDS):
            self.schedule_in(arrives - sent, execute)
        if lost:
            self.schedule_in(EXCHANGE_SECONDS, give_up)

    def wake(self) -> None:
        """Wake every instance."""
        for instance in self.instances.values():
            if instance.alive:
                instance.heartbeat_soon()

    def filter_visible(self, name: str, seen: list[MemberView]) -> list[MemberView]:
        """Return those of the members that an instance can see."""
        if not self.blind_share:
            return seen
        return [e for e in seen if e.member.id == name or self.chance.random() >= self.blind_share]

    def token(self) -> str:
        """Return a unique token."""
        return f"{self.chance.getrandbits(64):016x}"

    def draw_stop_seconds(self) -> float:
        """Return the seconds that a worker needs to stop."""
        return self.chance.uniform(*STOP)

    # --- checks ---

    def check_takeover(self, now: float, assignment: Assignment, owner: str, token: str) -> None:
        """Check that the previous owner of an assignment no longer trusts its lease."""
        before = self.instances.get(owner)
        if before is None or not before.alive or not token:
            return
        held = before.held.get(assignment)
        if held is not None and held.token == token:
            assert held.trusted_until <= now, f"{owner} still trusts its lease of {assignment}"
            self.stolen += 1

    @property
    def heartbeat_interval(self) -> float:
        """The number of seconds between two heartbeats."""
        return self.ttl / 5

    def offers_differ(self) -> bool:
        """Return True if the instances do not all offer the same topics."""
        return len({each.member.offers for each in self.instances.values()}) > 1

    def live_instances(self) -> list[Instance]:
        """Return the instances that are running and are not leaving."""
        return [each for each in self.instances.values() if each.alive and not each.leaving]

    def count_free(self) -> int:
        """Return the number of assignments that no live instance holds with a valid lease."""
        held = sum(
            self.server.fences[assignment].token == mine.token
            and self.server.fences[assignment].until > self.now
            for each in self.live_instances()
            for assignment, mine in each.held.items()
        )
        return len(self.assignments) - held

    def loads(self) -> list[int]:
        """Return the number of assignments of each live instance, sorted."""
        return sorted(self.server.owned[each.member.id] for each in self.live_instances())

    def is_even(self) -> bool:
        """Return True if every assignment is owned, and no two loads differ by more than one."""
        loads = self.loads()
        return bool(loads) and loads[-1] - loads[0] <= 1 and self.count_free() == 0

    def is_settled(self) -> bool:
        """Return True if no assignment is being acquired or handed over."""
        return all(h.phase == "held" for each in self.live_instances() for h in each.held.values())

    def count_moves(self) -> tuple[int, int, int]:
        """Return the number of acquisitions, started hand-overs and releases so far."""
        return len(self.server.acquired), self.shed, self.server.released

    def describe(self) -> dict[str, Any]:
        """Return a description of the fleet's state for a failure message."""
        loads = self.loads()
        return {
            "now": round(self.now, 1),
            "living": len(loads),
            "loads": (loads[0], loads[-1]) if loads else (),
            "free": self.count_free(),
            "shed": self.shed,
            "acquired": len(self.server.acquired),
        }
