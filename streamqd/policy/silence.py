"""Who is dead: one detector of silence, for members, for their leases, and for another run of us.

Redis says when a member sent its last heartbeat and when a lease ends, both by the server's clock.
When that is set back by an hour, the dead seem to live for an hour. So silence is also measured
here: by our own clock, over our own looks. A process that lives sends heartbeats and renews its
leases; what has not changed for long enough while we watched belongs to a dead one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from streamqd.model import Unit
from streamqd.policy.rebalance import MemberView, PartitionView

# A member must be silent over this many heartbeats of our own before its silence means anything:
# after a pause of Redis every member looks old to the first one that is back.
SILENT_BEATS = 2
# A heartbeat of another run may be a late packet of a killed process; a second is of a live one.
DUPLICATE_BEATS = 2
# A member that was silent for so long may be forgotten, at most so many with one heartbeat.
FORGET_BEATS, FORGET_MAX = 10, 100
# A lease that is still renewed is seen to be so sooner, though it may be a little shorter at each
# look. It counts as expired after so many looks and so many of its ttls.
LEASE_LOOKS, LEASE_TTLS = 10, 2.0

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Unchanged(NamedTuple, Generic[Value]):
    """What was seen last, over how many looks it has not changed, and since when (our clock)."""

    value: Value
    looks: int
    since: float


@dataclass
class SilenceWatch(Generic[Key, Value]):
    """Counts for how long each of many things has not changed. Times are seconds.

    `interval` lies between two looks, about. `alive` tells from the value before and the one now
    whether there was a sign of life.
    """

    interval: float
    alive: Callable[[Value, Value], bool] = operator.ne
    seen: dict[Key, Unchanged[Value]] = field(default_factory=dict)
    _counted: float = float("-inf")

    def look(self, now: float, values: Mapping[Key, Value]) -> dict[Key, Unchanged[Value]]:
        """Take what is to be seen now; return it with its silence."""
        # A look right after another proves nothing about the silence of others.
        counts = now - self._counted >= self.interval / 2
        # Nor does what was counted before this instance itself did not look for a while.
        blind = now - self._counted > SILENT_BEATS * self.interval
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
                seen[key] = Unchanged(value, known.looks + counts, known.since)
        self.seen = seen
        return seen


def _is_renewed(before: PartitionView, now: PartitionView) -> bool:
    return before.epoch != now.epoch or now.remaining > before.remaining


class SilenceDetector:
    """What an instance has seen of others, look by look. `now` is any monotonic clock."""

    def __init__(self, me: str, ttl: float, interval: float) -> None:
        """`interval` lies between two heartbeats of ours, about; `ttl` is that of a lease."""
        self._me = me
        self._ttl = ttl
        self._interval = interval
        self._members: SilenceWatch[str, int] = SilenceWatch(interval)
        self._leases: SilenceWatch[Unit, PartitionView] = SilenceWatch(interval, _is_renewed)
        self._duplicate: SilenceWatch[str, int] = SilenceWatch(interval)
        self._duplicate_beats = 0  # heartbeats of another run under our id, sent while we watched

    # --- members ---

    def live(self, now: float, server_unix_ms: int, seen: Sequence[MemberView]) -> list[MemberView]:
        """Return the live members.

        A member is dead when its heartbeat has not moved while this instance sent at least
        `SILENT_BEATS`, and is older than the ttl: by the server's clock, or by ours.
        """
        found = self._members.look(now, {one.member.id: one.beat_unix_ms for one in seen})
        live = []
        for one in seen:
            silence = found[one.member.id]
            old = server_unix_ms - one.beat_unix_ms > self._ttl * 1000
            old = old or now - silence.since > self._ttl
            if one.member.id == self._me or not (old and silence.looks >= SILENT_BEATS):
                live.append(one)
        return live

    @property
    def forgettable(self) -> list[str]:
        """Members that were silent for long while this instance watched, some of them."""
        silent = self._members.seen.items()
        found = (name for name, silence in silent if silence.looks >= FORGET_BEATS)
        return [name for name in found if name != self._me][:FORGET_MAX]

    # --- leases ---

    def expired(
        self,
        now: float,
        views: Mapping[Unit, PartitionView],
        seen: Sequence[MemberView],
        live: Sequence[MemberView],
    ) -> frozenset[Unit]:
        """Return the units whose leases count as expired, though the server says that they last.

        A lease is taken for seconds, but ends at an instant of the server's clock. It counts as
        expired when its owner is dead, when it has never had more to live than at the look before,
        and when it is to stay for longer than it was taken for. An owner that renews it, though its
        heartbeats do not arrive (their node of a cluster is cut off from it), has leases that live
        for a ttl at most. Members that do not tell their ttl are waited for.
        """
        alive = {one.member.id for one in live}
        ttls = {one.member.id: one.ttl for one in seen if one.ttl and one.member.id not in alive}
        of_the_dead = {
            unit: view for unit, view in views.items() if view.leased and view.owner in ttls
        }
        return frozenset(
            unit
            for unit, silence in self._leases.look(now, of_the_dead).items()
            if silence.looks >= LEASE_LOOKS
            and now - silence.since > LEASE_TTLS * ttls[silence.value.owner]
            and silence.value.remaining > ttls[silence.value.owner]
        )

    # --- another run under our id ---

    def duplicate_seen(self, beat_unix_ms: int, now: float, *, leaving: bool = False) -> bool:
        """Note another run under our id, and its last heartbeat. Return True if it is dead.

        `leaving`: it says that it drains. It is waited for, however often it sends a heartbeat.
        """
        known = self._duplicate.seen.get(self._me)
        silence = self._duplicate.look(now, {self._me: beat_unix_ms})[self._me]
        if leaving:
            self._duplicate_beats = 0
        elif known is not None and known.value != beat_unix_ms:
            self._duplicate_beats += 1
        return now - silence.since > self._ttl

    def duplicate_gone(self) -> None:
        """Note that there is no other run under our id."""
        self._duplicate = SilenceWatch(self._interval)
        self._duplicate_beats = 0

    @property
    def duplicate_lives(self) -> bool:
        """True if another run under our id sent a heartbeat while we watched, and does not drain.

        One heartbeat may also be a late packet of a killed process.
        """
        return self._duplicate_beats > 0

    @property
    def duplicate_stays(self) -> bool:
        """True if it is alive and not about to leave."""
        return self._duplicate_beats >= DUPLICATE_BEATS
