"""`--burst`: when is everything settled? A question to Redis, asked between the other work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.model import Unit
from streamqd.store import messages
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.partition import OwnedPartition

CHECK_SECONDS = 0.5
CHECKS = 2  # in a row; a message may be on its way from one place to another between two looks


class BurstState(NamedTuple):
    """Nothing more can be done: `broken` units still hold messages but crash in a loop."""

    broken: int


@dataclass
class BurstCheck:
    """Asks at most every half second, and not while a worker boots."""

    leases: LeaseManager
    _next_at: float = 0.0
    _passed: int = 0

    def verdict(self, now: float, partitions: Mapping[Unit, OwnedPartition]) -> BurstState | None:
        """Tell when nothing is unread, pending, delayed or waiting for a retry any more.

        Units of a worker that crashes in a loop are not waited for.
        """
        if now < self._next_at or not self.leases.ok:
            return None
        self._next_at = now + CHECK_SECONDS
        broken = [unit for unit, partition in partitions.items() if partition.broken_until > now]
        busy = any(h.child is not None and not h.ready for h in partitions.values())
        left = None if busy else self._left(list(partitions))
        if left is None or left - set(broken):
            self._passed = 0
            return None
        self._passed += 1
        return BurstState(len(left)) if self._passed >= CHECKS else None

    def _left(self, units: list[Unit]) -> set[Unit] | None:
        """Return the units that are not settled, None when Redis does not say it now."""
        calls = [messages.snapshot(self.leases.keys, unit, limit=1) for unit in units]
        try:
            with self.leases.client.deadline():
                replies = self.leases.link.run_many(calls)
        except RedisUnavailable:
            return None
        left = set()
        for unit, reply in zip(units, replies, strict=True):
            if isinstance(reply, RedisRefused):
                return None
            found = messages.Snapshot.parse(reply)
            if found is None or any(
                (
                    found.unread,
                    found.pending,
                    found.delayed,
                    found.retry_unread,
                    found.retry_pending,
                    found.scheduled,
                )
            ):
                left.add(unit)
        return left
