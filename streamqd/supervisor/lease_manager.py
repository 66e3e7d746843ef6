"""Send the supervisor's calls to Redis, with no more than one bounded round trip per tick.

Renewals, the heartbeat and the other calls for partitions are sent in one write. Anything else
needs a round trip of its own: reading the state of the fleet, waking other instances, or
subscribing to their wake-ups. These round trips follow in the next ticks, which then start without
a pause. If Redis does not answer, each call is repeated with growing pauses until Redis answers it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import random
from typing import Any

from streamqd import logs, registration
from streamqd.config import Settings
from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError
from streamqd.isolate import Isolate, run_directly
from streamqd.model import Assignment
from streamqd.policy import heartbeats
from streamqd.policy.rebalance import PartitionView
from streamqd.scoreboard import Scoreboard, now_ns
from streamqd.store import leases, messages, stacks
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.replies import check_valid, require_all
from streamqd.store.scripts import Reply
from streamqd.store.stacks import PublishedStack
from streamqd.supervisor.bounded_client import BoundedClient, Calls, PubSubListener, TakeReply
from streamqd.supervisor.cluster_state import ClusterState, OwnershipCache, TopicPresence
from streamqd.supervisor.membership import Membership
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.supervisor.resolver import Resolver

# The longest time that a round trip may block the supervisor, in seconds and as a share of the
# lease's TTL. The lower of the two limits applies. It includes name resolution, requests to
# sentinels, connecting and waiting.
EXCHANGE_SECONDS = 1.0
EXCHANGE_SHARE = 0.25
PROBE_AFTER_SECONDS = 0.3  # silence after which the calls are sent again on a new connection
CALLS_MAX = 64  # approximate limit of scripts in one round trip, at about 0.03 ms per script
TOGETHER = 0.2  # a lease may be renewed early, by up to this share of the renewal interval
_REFUSED = "redis.refused", logging.ERROR


class LeaseManager:
    """Owns the supervisor's two connections, one for calls and one for wake-ups."""

    def __init__(
        self,
        settings: Settings,
        board: Scoreboard,
        lock_id: str,
        names: Resolver | None = None,
        isolate: Isolate[Assignment] = run_directly,
    ) -> None:
        self.board = board
        self.isolate = isolate
        self.keys = Keys(settings.keys.control, settings.keys.streams)
        self.ttl = settings.daemon.lease_ttl
        self.instance = settings.daemon.instance
        self.membership = Membership(settings.daemon, self.keys, lock_id)
        self.interval = self.membership.interval
        patience = min(EXCHANGE_SECONDS, self.ttl * EXCHANGE_SHARE)
        redis = partial(connect, settings.redis, timeout=EXCHANGE_SECONDS)
        redis = partial(redis, lookup=(names or Resolver()).lookup)
        self.link = redis(
            name="streamqd:supervisor", probe_after=min(PROBE_AFTER_SECONDS, patience / 2)
        )
        # Keep pauses short. After an outage, an instance that resumed its heartbeats much later
        # than the others would count as dead.
        self.client = BoundedClient(self.link, board, patience, longest_pause=self.interval / 4)
        channel = self.keys.wake(settings.daemon.fleet)
        self.wakes = PubSubListener(redis(name="streamqd:wake", key=channel), channel)
        self.view = ClusterState()
        self.has_changes = (
            False  # True if the last round trip changed a state and may require an action
        )
        self.must_check_topics = False  # True after a fence was missing, as topics may also be
        self._view_is_new = False  # True until `take_view` has returned `view`
        self._view_due = False
        self._wake_ups: list[tuple[str, ...]] = []  # unsent commands that wake the fleet
        self._stacks: list[tuple[Any, ...]] = []  # unsent commands that publish stacks
        self._topics: Collection[str] = {each.topic for each in settings.consumers}
        self._ownership = OwnershipCache(self.keys, isolate)
        self._presence = TopicPresence(self.keys)
        self._bad_fences = logs.bad_values()
        self._scheduler = RenewalScheduler(self.interval)
        self._sent_calls = False  # True if the last round trip carried calls
        self._jitter = 0.0  # chosen once per round trip, so that calls sent together stay together

    @property
    def ok(self) -> bool:
        """True if every node of Redis answered when it was last called."""
        return self.client.ok

    def configure(self, settings: Settings) -> None:
        """Use a reloaded configuration."""
        self.membership.daemon = settings.daemon
        self._topics = {each.topic for each in settings.consumers}

    def next_at(self) -> float:
        """Return when the next round trip is due (monotonic seconds)."""
        more = (
            self._view_due
            or self._wake_ups
            or self._stacks
            or self.membership.predecessor_nonce
            or self.membership.mistyped
            or self._scheduler.has_more
        )
        due = min(self.membership.heartbeat_at, self.wakes.next_at())
        return max(0.0 if more else due, self.client.retry_at)

    # --- one tick ---

    def tick(
        self,
        now: float,
        partitions: Mapping[Assignment, AssignmentState],
        offers: Sequence[Assignment],
    ) -> None:
        """Make the round trip that is due, if any, and process the replies."""
        self.has_changes = False
        if now < self.client.retry_at:
            return
        with self.client.deadline():
            self._run_round_trip(now, partitions, offers)

    def _run_round_trip(
        self,
        now: float,
        partitions: Mapping[Assignment, AssignmentState],
        offers: Sequence[Assignment],
    ) -> None:
        """Make one round trip, either with the calls that are due or with another exchange.

        If several other exchanges are due, only the first of them is made.
        """
        others: list[tuple[object, Callable[[], object]]] = [
            (self._view_due, partial(self._read_fleet, partitions, offers, now)),
            (self.membership.predecessor_nonce, self._remove_predecessor),
            (self.membership.mistyped, partial(self.membership.log_mistyped_keys, self.link)),
            (self._wake_ups, self._send_wake_ups),
            (self._stacks, self._send_stacks),
            (now >= self.wakes.next_at(), partial(self._listen, now)),
        ]
        other = next((say for due, say in others if due), None)
        # Refused calls are due at every tick, so alternate calls with the other exchanges.
        calls = [] if self._sent_calls and other else self._calls(now, partitions, offers)
        self._sent_calls = bool(calls)
        try:
            if calls:
                self.client.run_calls(calls)
            elif other is not None:
                other()
        except RedisUnavailableError as error:
            self.client.pause_all(error)
            self.wakes.link.close()
            # After an outage, send a heartbeat first, because its reply lists the live members.
            self.membership.schedule_heartbeat(time.monotonic())

    def _remove_predecessor(self) -> None:
        # Ignore the result, because Redis removes a silent predecessor later anyway.
        require_all(self.link.run_each([self.membership.predecessor_removal()]))
        self.membership.predecessor_nonce = ""
        self.membership.heartbeat_soon()

    def _send_wake_ups(self) -> None:
        wake_ups, self._wake_ups = self._wake_ups, []
        self.link.pipeline(wake_ups)

    def publish_stack(self, assignment: Assignment, found: PublishedStack) -> None:
        """Publish the stack of a worker at one of the next ticks.

        The stack is lost if Redis is unavailable at that time.
        """
        self._stacks.append(stacks.publish(self.keys, assignment, found))

    def _send_stacks(self) -> None:
        sent, self._stacks = self._stacks, []
        for reply in self.link.pipeline(sent):
            if isinstance(reply, RedisResponseError):
                logs.event(*_REFUSED, request="stack", error=str(reply))

    def _listen(self, now: float) -> None:
        if self.wakes.listen(now, self.client.timeout):
            self.membership.heartbeat_soon()

    def _calls(
        self,
        now: float,
        partitions: Mapping[Assignment, AssignmentState],
        offers: Sequence[Assignment],
    ) -> Calls:
        self._jitter = random()
        sent_ns = now_ns()

        def calls_for(partition: AssignmentState, due: float) -> Calls:
            return (
                self.isolate(partition.assignment, self._partition_calls, sent_ns, partition, due)
                or []
            )

        calls = self._scheduler.next_calls(now, self.membership.heartbeat_at, partitions, calls_for)
        calls = [each for each in calls if not self.client.is_paused(each[0].key, now)]
        if now >= self.membership.heartbeat_at:
            heartbeat = self.membership.heartbeat(now, partitions, offers)
            if self.client.is_paused(heartbeat.key, now):
                self.membership.heartbeat_at = self.client.pause_end(heartbeat.key)
            else:
                calls.append((heartbeat, self._on_heartbeat))
        return calls

    def _partition_calls(self, sent_ns: int, partition: AssignmentState, due: float) -> Calls:
        call = partition.intent(self.keys, self.ttl, self.instance)
        if call is not None:
            return [(call, self._callback(partition, partial(self._on_intent, partition, sent_ns)))]
        calls: Calls = []
        if partition.phase is Phase.HELD and not partition.groups_ready:
            call = messages.ensure_group(self.keys, partition.assignment, "0")
            calls.append((call, self._callback(partition, partial(self._on_group, partition))))
        if partition.phase is Phase.HELD and due >= partition.renew_at:
            call = leases.renew(self.keys, partition.lease, self.ttl)
            on_renew = partial(self._on_renew, partition, sent_ns)
            calls.append((call, self._callback(partition, on_renew)))
        return calls

    def _callback(
        self, partition: AssignmentState, take: Callable[[Reply | RedisResponseError], object]
    ) -> TakeReply:
        """Return a callback that isolates `take`, so that an error affects only this assignment."""
        return lambda reply: self.isolate(partition.assignment, lambda: take(check_valid(reply)))

    # --- answers ---

    def _on_intent(
        self, partition: AssignmentState, sent_ns: int, reply: Reply | RedisResponseError
    ) -> None:
        now = time.monotonic()
        before, found = partition.phase, partition.resumed
        word = partition.apply_reply(reply, now)
        self.has_changes |= partition.phase is not before
        if partition.owned and not isinstance(reply, RedisResponseError):
            self._extend_trust(partition, sent_ns, now)
        if word == "acquired":
            self.board.add("rebalance_acquired")
            assert not isinstance(reply, RedisResponseError)
            taken = leases.Acquired.parse(reply)
            logs.event("lease.acquired", assignment=partition.assignment, **taken.log_fields())
        elif word == "resumed" and found is not None:
            running = [place.decode() for place in found.running]
            logs.event(
                "lease.resumed",
                assignment=partition.assignment,
                epoch=partition.lease.epoch,
                done=len(found.done),
                running=running or None,
            )
        elif word == "released":
            logs.event(
                "lease.released", assignment=partition.assignment, epoch=partition.lease.epoch
            )
            self.wake_fleet()
        elif word == "charged":
            logs.event(
                "worker.charged",
                logging.WARNING,
                assignment=partition.assignment,
                epoch=partition.lease.epoch,
            )
        elif word == "lost":
            self.report_lost(partition)
        elif before is Phase.ACQUIRING and partition.phase is Phase.FREE:
            self.membership.heartbeat_soon()  # to see the instance that acquired the lease first
        if isinstance(reply, RedisResponseError):
            self._report_refused(partition, before.value, reply)
        else:
            partition.refusal = ""

    def _report_refused(
        self, partition: AssignmentState, what: str, error: RedisResponseError
    ) -> None:
        if (partition.refusal, partition.refused) != (error.code, what):
            partition.refusal, partition.refused = error.code, what
            bad = error.code == "BADVALUE"
            name, level = ("redis.bad_value", logging.WARNING) if bad else _REFUSED
            logs.event(name, level, assignment=partition.assignment, request=what, error=str(error))

    def _on_group(self, partition: AssignmentState, reply: Reply | RedisResponseError) -> None:
        if isinstance(reply, RedisResponseError):
            self._report_refused(partition, "group", reply)
            return
        self.board.add("groups_restored", registration.log_restored(partition.assignment, reply))
        partition.groups_ready = self.has_changes = True

    def _on_renew(
        self, partition: AssignmentState, sent_ns: int, reply: Reply | RedisResponseError
    ) -> None:
        if isinstance(reply, RedisResponseError) or partition.phase is not Phase.HELD:
            return
        if reply.word in ("OK", "LATE"):
            self._extend_trust(partition, sent_ns, time.monotonic())
            if reply.word == "LATE":
                self.board.add("renew_late")
                logs.event(
                    "lease.renewed_late",
                    logging.WARNING,
                    assignment=partition.assignment,
                    epoch=partition.lease.epoch,
                )
            return
        self.report_lost(partition)
        partition.become_free()

    def report_lost(self, partition: AssignmentState) -> None:
        """Count and log a lost lease. Call this once for each loss."""
        self.board.add("lease_lost")
        logs.event(
            "lease.lost",
            logging.WARNING,
            assignment=partition.assignment,
            epoch=partition.lease.epoch,
        )
        self.reread_fleet()

    def reread_fleet(self) -> None:
        """Read the fleet again, and check the topics, because all keys may have been deleted."""
        self.must_check_topics = self.has_changes = True
        self.membership.heartbeat_soon()

    def _extend_trust(self, partition: AssignmentState, sent_ns: int, now: float) -> None:
        # The lease starts when the server receives the call, so it is safe to count from the time
        # at which the call was sent.
        partition.slot.trusted_until_ns = sent_ns + int(self.ttl * 0.9 * 1e9)
        partition.renew_at = heartbeats.next_heartbeat(now, self.interval, self._jitter)

    # --- the fleet ---

    def take_view(self) -> ClusterState | None:
        """Return the last view of the fleet, or None if it was already returned."""
        fresh, self._view_is_new = self._view_is_new, False
        return self.view if fresh else None

    def wake_fleet(self) -> None:
        """Wake the other instances at one of the next ticks, so that they notice a change early."""
        self._wake_ups.append(self.membership.wake_command())

    def _on_heartbeat(self, reply: Reply | RedisResponseError | ContractError) -> None:
        before = self.membership.directives
        if self.membership.apply_reply(reply, self._jitter):
            self._view_due = True
        self.has_changes |= self.membership.directives is not before

    def _read_fleet(
        self,
        partitions: Mapping[Assignment, AssignmentState],
        offers: Sequence[Assignment],
        now: float,
    ) -> None:
        """Read the owner and epoch of each offered assignment that this instance does not own."""
        member, silence = self.membership, self.membership.silence
        free = [assignment for assignment in offers if partitions[assignment].phase is Phase.FREE]
        assignments = [
            assignment
            for assignment in free
            if not self.client.is_paused(self.keys.fence(*assignment), now)
        ]
        views: dict[Assignment, PartitionView] = {}
        tokens: dict[Assignment, str] = {}
        lived = {one.member.id for one in self.view.live}
        for assignment, found in self._ownership.read(
            assignments, lived, self._read_assignments
        ).items():
            # An owner with this instance's name is an earlier run of this instance. It has exited,
            # because otherwise it would still hold the instance's lock.
            ours = bool(found.token) and found.owner == self.instance
            tokens[assignment] = found.token if found.owner else ""
            views[assignment] = PartitionView(
                found.epoch,
                found.owner if found.token and not ours else "",
                found.ttl is not None and not ours,
                found.ttl or 0.0,
            )
        self._bad_fences.report_values(self._ownership.bad)
        live = silence.live(now, member.server_unix_ms, member.seen)
        expired = silence.find_expired(now, views, member.seen, live)
        for assignment in expired:
            views[assignment] = views[assignment]._replace(leased=False)
        # If an assignment has a token but no owner in the view, its owner was this instance or an
        # earlier run of it. No process of that owner is left, so its token also counts as dead.
        dead = {u: token for u, token in tokens.items() if u in expired or not views[u].owner}
        self.view = ClusterState(live, views, dead)
        self._view_is_new = self.has_changes = True
        self._view_due = False
        served = {assignment.topic for assignment in partitions}
        if self._presence.check(sorted(self._topics), served, self.link.pipeline_each):
            self.must_check_topics = True

    def _read_assignments(
        self, assignments: Sequence[Assignment], commands: list[tuple[Any, ...]]
    ) -> list[Any]:
        """Run the commands that read these assignments. This implements `cluster_state.Ask`."""
        return self.client.read(
            [self.keys.fence(*assignment) for assignment in assignments], commands
        )

    # --- wake-ups ---

    def drain_wakes(self) -> None:
        """Read the wake-ups that have arrived, and schedule a heartbeat if there were any."""
        if self.wakes.drain():
            self.membership.heartbeat_soon()

    def leave(self) -> None:
        """Try to remove this instance from the fleet, and wake the others. Errors are ignored."""
        try:
            with self.client.deadline():
                self.link.run(self.membership.departure())
                self.link.execute(*self.membership.wake_command())
        except (RedisUnavailableError, RedisResponseError, ContractError):
            pass

    def close(self) -> None:
        """Close both connections."""
        self.link.close()
        self.wakes.link.close()


class RenewalScheduler:
    """Chooses the partitions whose calls are sent in each round trip.

    A round covers all partitions, and each round trip continues the round where the last one
    stopped. The number of calls per round trip is limited, because the server serves no other
    client while it runs them. A call that Redis refused is sent again in the next round.
    """

    def __init__(self, interval: float) -> None:
        """Create the scheduler. `interval` is the time between renewals of a lease, in seconds."""
        self._interval = interval
        self._waiting: list[Assignment] = []
        self._due = 0.0

    @property
    def has_more(self) -> bool:
        """True if the current round has not reached all partitions yet."""
        return bool(self._waiting)

    def next_calls(
        self,
        now: float,
        heartbeat_at: float,
        partitions: Mapping[Assignment, AssignmentState],
        calls_for: Callable[[AssignmentState, float], Calls],
    ) -> Calls:
        """Return the calls of the next partitions in this round, or start a new round.

        `heartbeat_at` is the monotonic time at which the next heartbeat is due. `calls_for` takes a
        partition and a monotonic time, and returns the calls for the partition, including a renewal
        that is due by then.
        """
        if not self._waiting:
            self._waiting = [*partitions][::-1]
            self._due = self._due_until(now, heartbeat_at, partitions)
        found: Calls = []
        while self._waiting and len(found) < CALLS_MAX:
            partition = partitions.get(self._waiting.pop())
            if partition is not None:
                found += calls_for(partition, self._due)
        return found

    def _due_until(
        self, now: float, heartbeat_at: float, partitions: Mapping[Assignment, AssignmentState]
    ) -> float:
        """Return the monotonic time up to which a renewal must be due to be sent now.

        If a renewal or heartbeat has to be sent now anyway, leases that are due soon are renewed in
        the same round trip, so that not every lease needs a round trip of its own.
        """
        renewals = (each.renew_at for each in partitions.values() if each.phase is Phase.HELD)
        first = min(renewals, default=heartbeat_at)
        return now + self._interval * TOGETHER if min(first, heartbeat_at) <= now else now
