"""Detect failed members, expired leases, and a second process with the ID of this instance.

Redis reports the time of a member's last heartbeat and the remaining time of a lease, both by the
server's clock. If that clock is set back by an hour, members that have exited would seem to be
alive for an hour. Silence is therefore also measured between this instance's own checks, by its own
clock. A live process sends heartbeats and renews its leases. If a value does not change for long
enough, its process must have exited.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from streamqd.model import Assignment
from streamqd.policy.rebalance import MemberView, PartitionView

# A member counts as silent only if it sends nothing while this instance sends this many heartbeats.
# The age of its last heartbeat is not enough, because after an outage of Redis, the first instance
# that reconnects finds only old heartbeats.
SILENT_HEARTBEATS = 2
# A single heartbeat of another run may be a late packet of a killed process. A second one proves
# that the run is alive.
DUPLICATE_HEARTBEATS = 2
# A member that was silent for FORGET_HEARTBEATS checks may be removed from the fleet. No more than
# FORGET_MAX members are removed with one heartbeat.
FORGET_HEARTBEATS, FORGET_MAX = 10, 100
# A lease counts as expired only after this many checks and this many TTLs. This is long enough to
# notice that it is still being renewed, even if several checks in a row happen to read a slightly
# shorter remaining time than the one before.
LEASE_LOOKS, LEASE_TTLS = 10, 2.0

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Unchanged(NamedTuple, Generic[Value]):
    """A value that is being watched for changes.

    `checks` is the number of checks since its last change, and `since` is the time from which it
    counts as unchanged (in seconds on the local clock).
    """

    value: Value
    checks: int
    since: float


@dataclass
class SilenceWatch(Generic[Key, Value]):
    """Measures how long each of many values has not changed.

    `interval` is the approximate number of seconds between two checks. `alive` compares the
    previous value with the current one, and returns True if the difference is a sign of life.
    """

    interval: float
    alive: Callable[[Value, Value], bool] = operator.ne
    seen: dict[Key, Unchanged[Value]] = field(default_factory=dict)
    _counted: float = float("-inf")

    def observe(self, now: float, values: Mapping[Key, Value]) -> dict[Key, Unchanged[Value]]:
        """Record the current values, and return for each how long it has been unchanged."""
        # A check that follows too soon after another one does not prove that a value is silent.
        counts = now - self._counted >= self.interval / 2
        # Earlier checks prove nothing if this instance itself made no checks in the meantime.
        blind = now - self._counted > SILENT_HEARTBEATS * self.interval
        if counts:
            self._counted = now
        seen: dict[Key, Unchanged[Value]] = {}
        for key, value in values.items():
            known = self.seen.get(key)
            if known is None or self.alive(known.value, value):
                seen[key] = Unchanged(value, 0, now)
            elif blind:
                seen[key] = Unchanged(value, 1, now)
            else:
                seen[key] = Unchanged(value, known.checks + counts, known.since)
        self.seen = seen
        return seen


def _is_renewed(before: PartitionView, now: PartitionView) -> bool:
    return before.epoch != now.epoch or now.remaining > before.remaining


class SilenceDetector:
    """Observes the other instances of the fleet each time this instance checks them.

    In all methods, `now` is the time in seconds on any monotonic clock.
    """

    def __init__(self, instance: str, ttl: float, interval: float) -> None:
        """Prepare to observe the fleet for the instance `instance`.

        `ttl` is the TTL of a lease, and `interval` the approximate time between two heartbeats of
        this instance. Both are in seconds.
        """
        self._instance = instance
        self._ttl = ttl
        self._interval = interval
        self._members: SilenceWatch[str, int] = SilenceWatch(interval)
        self._leases: SilenceWatch[Assignment, PartitionView] = SilenceWatch(interval, _is_renewed)
        self._duplicate: SilenceWatch[str, int] = SilenceWatch(interval)
        # Number of heartbeats that another run with this ID has sent while this instance watched.
        self._duplicate_heartbeats = 0

    # --- members ---

    def live(self, now: float, server_unix_ms: int, seen: Sequence[MemberView]) -> list[MemberView]:
        """Return the members that count as alive.

        A member is dead if both of these conditions are met: its last heartbeat has stayed the same
        during at least `SILENT_HEARTBEATS` heartbeats of this instance, and this heartbeat is older
        than the TTL by the server's clock or by the local one. This instance itself always counts
        as alive.
        """
        found = self._members.observe(now, {one.member.id: one.heartbeat_unix_ms for one in seen})
        live = []
        for one in seen:
            silence = found[one.member.id]
            old = server_unix_ms - one.heartbeat_unix_ms > self._ttl * 1000
            old = old or now - silence.since > self._ttl
            if one.member.id == self._instance or not (old and silence.checks >= SILENT_HEARTBEATS):
                live.append(one)
        return live

    @property
    def forgettable(self) -> list[str]:
        """Up to `FORGET_MAX` members that were silent for at least `FORGET_HEARTBEATS` checks."""
        silent = self._members.seen.items()
        found = (name for name, silence in silent if silence.checks >= FORGET_HEARTBEATS)
        return [name for name in found if name != self._instance][:FORGET_MAX]

    # --- leases ---

    def find_expired(
        self,
        now: float,
        views: Mapping[Assignment, PartitionView],
        seen: Sequence[MemberView],
        live: Sequence[MemberView],
    ) -> frozenset[Assignment]:
        """Return the assignments whose leases count as expired, although they exist in Redis.

        A lease is acquired for a number of seconds, but it expires at a certain time of the
        server's clock. If that clock is set back, the lease exists for too long. A lease therefore
        counts as expired if its owner is dead, its remaining time has not grown between any two
        checks, and the remaining time exceeds the owner's TTL.

        The last condition excludes an owner that still renews its leases, but whose heartbeats do
        not arrive because it is cut off from their cluster node. The remaining time of its leases
        stays within its TTL. The leases of members that do not report a TTL never count as expired.
        """
        alive = {one.member.id for one in live}
        ttls = {one.member.id: one.ttl for one in seen if one.ttl and one.member.id not in alive}
        of_the_dead = {
            assignment: view
            for assignment, view in views.items()
            if view.leased and view.owner in ttls
        }
        return frozenset(
            assignment
            for assignment, silence in self._leases.observe(now, of_the_dead).items()
            if silence.checks >= LEASE_LOOKS
            and now - silence.since > LEASE_TTLS * ttls[silence.value.owner]
            and silence.value.remaining > ttls[silence.value.owner]
        )

    # --- another run with the ID of this instance ---

    def observe_duplicate(
        self, heartbeat_unix_ms: int, now: float, *, leaving: bool = False
    ) -> bool:
        """Record the last heartbeat of another run that uses the ID of this instance.

        Return True if that run is dead. Pass `leaving=True` if the run reports that it is draining.
        Its heartbeats then do not make it a live duplicate, because this instance waits for it to
        exit.
        """
        known = self._duplicate.seen.get(self._instance)
        silence = self._duplicate.observe(now, {self._instance: heartbeat_unix_ms})[self._instance]
        if leaving:
            self._duplicate_heartbeats = 0
        elif known is not None and known.value != heartbeat_unix_ms:
            self._duplicate_heartbeats += 1
        return now - silence.since > self._ttl

    def forget_duplicate(self) -> None:
        """Record that no other run uses the ID of this instance."""
        self._duplicate = SilenceWatch(self._interval)
        self._duplicate_heartbeats = 0

    @property
    def is_duplicate_live(self) -> bool:
        """True if another run with this ID has sent a heartbeat while this instance watched.

        It is False if that run is draining. A single heartbeat may also be a late packet of a
        killed process.
        """
        return self._duplicate_heartbeats > 0

    @property
    def is_duplicate_lasting(self) -> bool:
        """True if the other run is certainly alive and is not draining."""
        return self._duplicate_heartbeats >= DUPLICATE_HEARTBEATS
