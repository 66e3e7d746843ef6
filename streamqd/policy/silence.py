"""Detect failed members, expired leases, and a second process with the ID of this instance.

Redis reports the time of a member's last heartbeat and the remaining time of a lease, both on the
server's clock. If that clock is set back by an hour, members that have exited seem alive for an
hour. Silence is therefore also measured on this instance's clock, between its own checks. A live
process sends heartbeats and renews its leases, so a value that stays unchanged for long enough
belongs to a process that has exited.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from streamqd.model import Assignment
from streamqd.policy.rebalance import MemberView, PartitionView

# A member must be silent for this many of our own heartbeats before its silence counts: after an
# outage of Redis, every member looks old to the first one that returns.
SILENT_HEARTBEATS = 2
# One heartbeat of another run may be a late packet of a killed process. A second proves it is live.
DUPLICATE_HEARTBEATS = 2
# A member that was silent for this many checks may be forgotten, FORGET_MAX per heartbeat.
FORGET_HEARTBEATS, FORGET_MAX = 10, 100
# A lease counts as expired after this many checks and this many TTLs. If it is still renewed, that
# shows earlier, even if its remaining time is slightly shorter at each check.
LEASE_LOOKS, LEASE_TTLS = 10, 2.0

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Unchanged(NamedTuple, Generic[Value]):
    """The last value, the checks since it last changed, and since when (seconds, our clock)."""

    value: Value
    checks: int
    since: float


@dataclass
class SilenceWatch(Generic[Key, Value]):
    """Measures for how long each of many values has not changed. Times are seconds.

    `interval` is the approximate time between two checks. `alive` compares the earlier value with
    the current one, and returns True for a sign of life.
    """

    interval: float
    alive: Callable[[Value, Value], bool] = operator.ne
    seen: dict[Key, Unchanged[Value]] = field(default_factory=dict)
    _counted: float = float("-inf")

    def observe(self, now: float, values: Mapping[Key, Value]) -> dict[Key, Unchanged[Value]]:
        """Record the current values. Return each with its silence."""
        # A check directly after another one proves nothing about silence.
        counts = now - self._counted >= self.interval / 2
        # If this instance itself made no check for a time, earlier counts prove nothing either.
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
    """The observations of the other instances at each check. `now` is any monotonic clock."""

    def __init__(self, me: str, ttl: float, interval: float) -> None:
        """`interval` is the approximate time between our heartbeats, `ttl` the TTL of a lease."""
        self._me = me
        self._ttl = ttl
        self._interval = interval
        self._members: SilenceWatch[str, int] = SilenceWatch(interval)
        self._leases: SilenceWatch[Assignment, PartitionView] = SilenceWatch(interval, _is_renewed)
        self._duplicate: SilenceWatch[str, int] = SilenceWatch(interval)
        # Heartbeats of another run under our id that were sent while we watched.
        self._duplicate_heartbeats = 0

    # --- members ---

    def live(self, now: float, server_unix_ms: int, seen: Sequence[MemberView]) -> list[MemberView]:
        """Return the live members.

        A member is dead under two conditions. Its heartbeat has not changed over at least
        `SILENT_HEARTBEATS` of our own, and is older than the TTL on the server's clock or on ours.
        """
        found = self._members.observe(now, {one.member.id: one.heartbeat_unix_ms for one in seen})
        live = []
        for one in seen:
            silence = found[one.member.id]
            old = server_unix_ms - one.heartbeat_unix_ms > self._ttl * 1000
            old = old or now - silence.since > self._ttl
            if one.member.id == self._me or not (old and silence.checks >= SILENT_HEARTBEATS):
                live.append(one)
        return live

    @property
    def forgettable(self) -> list[str]:
        """Return at most `FORGET_MAX` members that were silent for `FORGET_HEARTBEATS` checks."""
        silent = self._members.seen.items()
        found = (name for name, silence in silent if silence.checks >= FORGET_HEARTBEATS)
        return [name for name in found if name != self._me][:FORGET_MAX]

    # --- leases ---

    def find_expired(
        self,
        now: float,
        views: Mapping[Assignment, PartitionView],
        seen: Sequence[MemberView],
        live: Sequence[MemberView],
    ) -> frozenset[Assignment]:
        """Return the assignments whose leases count as expired although the server disagrees.

        A lease is acquired for a number of seconds, but it expires at an instant of the server's
        clock. It counts as expired if its owner has exited, its remaining time has never grown
        between two checks, and that time exceeds the owner's TTL. If an owner renews its leases
        but its heartbeats do not arrive (it is cut off from their cluster node), the remaining time
        stays within its TTL. The leases of members that do not report a TTL are not judged.
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

    # --- another run under our id ---

    def observe_duplicate(
        self, heartbeat_unix_ms: int, now: float, *, leaving: bool = False
    ) -> bool:
        """Record another run under our ID and its last heartbeat. Return True if that run is dead.

        With `leaving`, the run reports that it drains, and this instance waits for it, regardless
        of the number of heartbeats.
        """
        known = self._duplicate.seen.get(self._me)
        silence = self._duplicate.observe(now, {self._me: heartbeat_unix_ms})[self._me]
        if leaving:
            self._duplicate_heartbeats = 0
        elif known is not None and known.value != heartbeat_unix_ms:
            self._duplicate_heartbeats += 1
        return now - silence.since > self._ttl

    def forget_duplicate(self) -> None:
        """Record that no other run has our ID."""
        self._duplicate = SilenceWatch(self._interval)
        self._duplicate_heartbeats = 0

    @property
    def is_duplicate_live(self) -> bool:
        """True if another run under our ID sent a heartbeat while we watched, and does not drain.

        A single heartbeat may also be a late packet of a killed process.
        """
        return self._duplicate_heartbeats > 0

    @property
    def is_duplicate_lasting(self) -> bool:
        """True if the other run is alive and not about to leave."""
        return self._duplicate_heartbeats >= DUPLICATE_HEARTBEATS
