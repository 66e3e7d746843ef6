"""One instance, working as its supervisor does: exchanges with Redis, then real decisions.

The policies are called in the same way as in streamqd/supervisor. A worker is simulated by the time
that it needs to stop and, if its assignment is poisonous, by a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamqd.model import Assignment, Backoff
from streamqd.policy import heartbeats, restart
from streamqd.policy.assignment import Member
from streamqd.policy.rebalance import MORE_SECONDS, MemberView, PartitionView, Rebalancer
from streamqd.policy.silence import SilenceDetector

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet

EXCHANGE_SECONDS = 1.0
CRASH_SECONDS = 0.3  # seconds from the start of a worker until it crashes on a poisonous assignment
CRASH_LOOP, CRASH_COOLDOWN = 5, 20.0


@dataclass
class HeldAssignment:
    """An assignment that this instance owns or is acquiring."""

    token: str
    phase: str  # acquiring | held | stopping | releasing
    seen_epoch: int = 0
    dead_token: str = ""
    since: float = 0.0
    renew_at: float = 0.0
    trusted_until: float = 0.0


Call = tuple[str, Assignment | None, HeldAssignment | None]  # kind, assignment, its state here


@dataclass
class Instance:
    """One member of the fleet.

    `poison` contains the assignments whose workers crash at every start on this instance.
    """

    fleet: Fleet
    member: Member
    alive: bool = False
    leaving: bool = False
    held: dict[Assignment, HeldAssignment] = field(default_factory=dict)
    poison: frozenset[Assignment] = frozenset()
    broken_until: dict[Assignment, float] = field(default_factory=dict)
    exits: dict[Assignment, list[restart.WorkerExit]] = field(default_factory=dict)
    crashes: int = 0
    run: int = 0  # counts the starts, so that events of a killed run are ignored

    def start(self) -> None:
        """Start with nothing but the data in Redis, as after a boot."""
        damping, name = self.fleet.damping, self.member.id
        self.run += 1
        self.alive, self.leaving = True, False
        self.held, self.broken_until, self.exits = {}, {}, {}
        self.interval = self.fleet.ttl / 5
        self.silence = SilenceDetector(name, self.fleet.ttl, self.interval)
        self.rebalancer = Rebalancer(name, *damping, grace_seconds=2 * self.interval)
        self.assignments = [
            u for u in self.fleet.assignments if (u.topic, u.group) in self.member.offers
        ]
        self.heartbeat_at = self.retry_at = self.last_heartbeat = 0.0
        self.backoff = 0.1
        self.busy = self.view_due = False
        self.pending_wakes = 0
        self.fleet.server.leave(name)  # the lock on the host proves that the predecessor is dead
        self.seen: list[MemberView] = []
        self.server_unix_ms = 0
        self.tick_now()

    def kill(self) -> None:
        """Die immediately, together with all workers."""
        self.alive = False
        self.run += 1

    def drain(self) -> None:
        """Leave as after a SIGTERM: hand over all assignments, then exit."""
        self.leaving = True
        for assignment in list(self.held):
            self._stop(assignment)
        self.heartbeat_soon()

    def tick_now(self) -> None:
        """Run a tick immediately."""
        self.fleet.schedule_in(0.0, self._make_tick(self.run))

    def _make_tick(self, run: int) -> Any:
        return lambda: self.tick() if run == self.run and self.alive else None

    def heartbeat_soon(self) -> None:
        """Send the next heartbeat early, as `Membership.heartbeat_soon` does."""
        at = heartbeats.woken_heartbeat(
            self.last_heartbeat, self.interval, len(self.seen), self.fleet.chance.random()
        )
        if at < self.heartbeat_at:
            self.heartbeat_at = at
            self.fleet.schedule_at(at, self._make_tick(self.run))

    # --- one tick ---

    def tick(self) -> None:
        """Send the calls that are due, as `LeaseManager.tick` does."""
        now = self.fleet.now
        if self.busy or now < self.retry_at:
            return
        calls: list[Call] = []
        for assignment, held in self.held.items():
            if held.phase in ("acquiring", "releasing"):
                calls.append((held.phase, assignment, held))
            elif now >= held.renew_at:
                calls.append(("renew", assignment, held))
        if now >= self.heartbeat_at:
            calls.append(("heartbeat", None, None))
        if not calls and self.view_due:
            calls.append(("view", None, None))
        if not calls and self.pending_wakes:
            self.pending_wakes = 0
            self.fleet.wake()
            # The scheduled event may belong to an assignment that this instance no longer has.
            self.fleet.schedule_at(self.next_at(), self._make_tick(self.run))
        if calls:
            self.busy = True
            self.fleet.exchange(self, calls)
        elif self.leaving and not self.held:
            self.fleet.server.leave(self.member.id)
            self.kill()
            self.fleet.wake()

    def next_at(self) -> float:
        """Return the time at which the next call is due."""
        if self.view_due or self.pending_wakes:
            return 0.0
        has_unsent = any(h.phase in ("acquiring", "releasing") for h in self.held.values())
        renewals = [h.renew_at for h in self.held.values()]
        return max(0.0 if has_unsent else min([self.heartbeat_at, *renewals]), self.retry_at)

    def execute(self, now: float, call: Call) -> Any:
        """Execute one call on the server."""
        kind, assignment, held = call
        server, name = self.fleet.server, self.member.id
        if kind == "heartbeat":
            broken = frozenset(u for u, until in self.broken_until.items() if until > now)
            seen = MemberView(self.member, 0, self.leaving, broken, owned=len(self.held))
            return server.heartbeat(now, seen)
        if kind == "view":
            known = server.read_views(now, len(self.assignments) - len(self.held))
            views = dict(
                zip(self.assignments, map(known.__getitem__, self.assignments), strict=True)
            )
            for mine in self.held:
                views.pop(mine, None)
            return views
        assert assignment is not None
        assert held is not None
        if kind == "acquiring":
            before = server.fences[assignment]
            known = before.owner, before.token
            word = server.acquire(
                now, assignment, held.token, name, held.seen_epoch, held.dead_token
            )
            if word == "OK":
                self.fleet.check_takeover(now, assignment, *known)
            return word
        if kind == "renew":
            return server.renew(now, assignment, held.token)
        return server.release(now, assignment, held.token)

    def handle_timeout(self) -> None:
        """Record that no answer came in time, as `LeaseManager` does."""
        now, chance = self.fleet.now, self.fleet.chance
        self.busy = False
        self.retry_at = now + self.backoff * (0.5 + chance.random())
        self.backoff = min(self.backoff * 2, 2.0, self.interval / 4)
        self.heartbeat_at = min(self.heartbeat_at, now)
        self.fleet.schedule_at(self.retry_at, self._make_tick(self.run))

    def handle_replies(
        self,
        sent: float,
        calls: list[Call],
        replies: list[Any],
    ) -> None:
        """Process the answers of one exchange."""
        now = self.fleet.now
        self.busy, self.backoff = False, 0.1
        for (kind, assignment, held), reply in zip(calls, replies, strict=True):
            if kind == "heartbeat":
                self.last_heartbeat = now
                self.heartbeat_at = heartbeats.next_heartbeat(
                    now, self.interval, self.fleet.chance.random()
                )
                self.seen, self.view_due = self.fleet.filter_visible(self.member.id, reply), True
                self.server_unix_ms = self.fleet.server.unix_ms(now)
            elif kind == "view":
                self.view_due = False
                self._decide(now, reply)
            elif assignment is not None and held is not None and self.held.get(assignment) is held:
                self._apply_reply(now, sent, assignment, held, reply)
        self.fleet.schedule_at(self.next_at(), self._make_tick(self.run))

    def _apply_reply(
        self, now: float, sent: float, assignment: Assignment, held: HeldAssignment, word: str
    ) -> None:
        if held.phase == "acquiring" and word in ("OK", "MINE"):
            held.phase, held.since = "held", now
            if self.leaving:
                self._stop(assignment)
            elif assignment in self.poison:
                self.fleet.schedule_in(CRASH_SECONDS, lambda: self._handle_crash(assignment, held))
        elif held.phase == "releasing" or word in ("HELD", "MOVED", "FENCED"):
            del self.held[assignment]
            self.pending_wakes += held.phase == "releasing"
            self.heartbeat_soon()
            return
        held.trusted_until = sent + self.fleet.ttl * 0.9
        held.renew_at = heartbeats.next_heartbeat(now, self.interval, self.fleet.chance.random())

    # --- decisions ---

    def _decide(self, now: float, views: dict[Assignment, PartitionView]) -> None:
        """Make the same decision that the supervisor makes with a new view."""
        if self.leaving:
            return
        live = self.silence.live(now, self.server_unix_ms, self.seen)
        mine = {assignment: held.since for assignment, held in self.held.items()}
        tokens: dict[Assignment, str] = {}
        me = self.member.id
        for assignment in [assignment for assignment, view in views.items() if view.owner == me]:
            # The assignment belongs to a predecessor, whose lock this instance now holds.
            tokens[assignment] = self.fleet.server.fences[assignment].token
            views[assignment] = PartitionView(views[assignment].epoch, "", leased=False)
        for assignment, until in self.broken_until.items():
            if now < until:
                views.pop(assignment, None)
        moving = sum(held.phase == "stopping" for held in self.held.values())
        cap = self.member.cap or len(self.assignments)
        decision = self.rebalancer.decide(
            now, live, self.assignments, mine, moving, views, room=cap - len(mine)
        )
        self.fleet.decisions += 1
        if decision.has_more:
            self.heartbeat_at = min(self.heartbeat_at, now + MORE_SECONDS)
        for assignment in decision.acquire:
            self.held[assignment] = HeldAssignment(
                self.fleet.token(), "acquiring", views[assignment].epoch, tokens.get(assignment, "")
            )
        for assignment in decision.shed:
            if self.held[assignment].phase in ("acquiring", "held"):
                self.fleet.shed += 1
                self._stop(assignment)

    def _stop(self, assignment: Assignment) -> None:
        held = self.held[assignment]
        if held.phase == "acquiring":
            held.phase = "releasing"
            self.tick_now()
        elif held.phase == "held":
            held.phase = "stopping"
            run = self.run

            def finish_stop() -> None:
                if run == self.run and self.held.get(assignment) is held:
                    held.phase = "releasing"
                    self.tick()

            self.fleet.schedule_in(self.fleet.draw_stop_seconds(), finish_stop)

    def _handle_crash(self, assignment: Assignment, held: HeldAssignment) -> None:
        now = self.fleet.now
        if not self.alive or self.held.get(assignment) is not held or held.phase != "held":
            return
        self.crashes += 1
        exits = self.exits.setdefault(assignment, [])
        exits.append(restart.WorkerExit(now, restart.ExitCause.BOOT))
        decision = restart.decide(
            exits,
            now,
            backoff=Backoff("exponential", 0.5, 60.0),
            crash_loop=CRASH_LOOP,
            cooldown=CRASH_COOLDOWN,
            max_crashes=3,
            jitter=self.fleet.chance.random(),
        )
        if isinstance(decision, restart.GiveUp):
            self.broken_until[assignment] = decision.until
            held.phase = "releasing"
            self.tick()
        else:
            self.fleet.schedule_in(
                decision.after + CRASH_SECONDS, lambda: self._handle_crash(assignment, held)
            )

    def describe(self, **changed: Any) -> None:
        """Change the weight, cap or offers, as a reload does."""
        self.member = replace(self.member, **changed)
