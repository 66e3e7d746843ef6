"""Redis as a fleet sees it: heartbeats, fences and leases. Each call is atomic, like a script.

The rules of ownership are the same as in lua/lease_*.lua and lua/member_heartbeat.lua.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from streamqd.model import Assignment
from streamqd.policy.rebalance import MemberView, PartitionView

UNOWNED = PartitionView(0, "", leased=False)
START_UNIX_MS = 1_800_000_000_000


@dataclass
class Fence:
    """The owner of an assignment. `until` is the time at which its lease expires."""

    token: str = ""
    owner: str = ""
    epoch: int = 0
    until: float = 0.0


class Server:
    """Fences and heartbeats on the virtual clock.

    The server is paused until `paused_until`, and answers calls from that time on.
    """

    def __init__(self, assignments: list[Assignment], ttl: float) -> None:
        self.ttl = ttl
        self.paused_until = 0.0
        self.unreachable = False  # if True, calls that are sent during a pause are lost
        self.fences = {assignment: Fence() for assignment in assignments}
        self.views = dict.fromkeys(assignments, UNOWNED)
        self.heartbeats: dict[str, tuple[float, MemberView]] = {}
        self.owned: Counter[str] = Counter()
        # the time, the assignment, the previous owner and the new owner of each acquisition
        self.acquired: list[tuple[float, Assignment, str, str]] = []
        self.released = 0
        self.late = 0
        self.calls: Counter[str] = Counter()
        self.per_second: dict[str, Counter[int]] = {
            name: Counter() for name in ("acquire", "heartbeat", "view")
        }
        self._expiries: list[tuple[float, Assignment]] = []

    def count_calls(self, kind: str, now: float, amount: int = 1) -> None:
        """Count calls by kind and by second."""
        self.calls[kind] += amount
        if kind in self.per_second:
            self.per_second[kind][int(now)] += amount

    def heartbeat(self, now: float, seen: MemberView) -> list[MemberView]:
        """Record the heartbeat of a member, and return all members."""
        self.count_calls("heartbeat", now)
        name = seen.member.id
        self.heartbeats[name] = now, seen._replace(heartbeat_unix_ms=self.unix_ms(now))
        for gone in [n for n, (at, _) in self.heartbeats.items() if now - at > 20 * self.ttl]:
            del self.heartbeats[gone]
        return [each for _, each in self.heartbeats.values()]

    def unix_ms(self, now: float) -> int:
        """Return the server's time, in unix milliseconds."""
        return START_UNIX_MS + int(now * 1000)

    def read_views(self, now: float, count: int) -> dict[Assignment, PartitionView]:
        """Return the state of every assignment, and count the query as one for `count` of them."""
        self.count_calls("view", now, count)
        while self._expiries and self._expiries[0][0] <= now:
            _, assignment = heapq.heappop(self._expiries)
            fence = self.fences[assignment]
            if fence.until <= now:
                self.views[assignment] = PartitionView(fence.epoch, fence.owner, leased=False)
            elif fence.token:
                heapq.heappush(self._expiries, (fence.until, assignment))
        return self.views

    def acquire(
        self,
        now: float,
        assignment: Assignment,
        token: str,
        owner: str,
        seen_epoch: int,
        dead_token: str,
    ) -> str:
        """Acquire a lease. Return OK, MINE, HELD or MOVED."""
        self.count_calls("acquire", now)
        fence = self.fences[assignment]
        if fence.until > now and fence.token not in (token, dead_token):
            return "HELD"
        if fence.token == token:
            self._extend_lease(now, assignment, fence)
            return "MINE"
        if fence.epoch != seen_epoch:
            return "MOVED"
        self.acquired.append((now, assignment, fence.owner if fence.token else "", owner))
        self.owned[fence.owner] -= bool(fence.token)
        self.owned[owner] += 1
        epoch = max(fence.epoch + 1, self.unix_ms(now))
        fence.token, fence.owner, fence.epoch = token, owner, epoch
        self._extend_lease(now, assignment, fence)
        return "OK"

    def renew(self, now: float, assignment: Assignment, token: str) -> str:
        """Renew a lease. Return OK, LATE or FENCED."""
        self.count_calls("renew", now)
        fence = self.fences[assignment]
        if fence.token != token:
            return "FENCED"
        word = "OK" if fence.until > now else "LATE"
        self.late += word == "LATE"
        self._extend_lease(now, assignment, fence)
        return word

    def release(self, now: float, assignment: Assignment, token: str) -> str:
        """Release a lease. Return OK or FENCED."""
        self.count_calls("release", now)
        fence = self.fences[assignment]
        if fence.token != token:
            return "FENCED"
        self.owned[fence.owner] -= 1
        self.released += 1
        fence.token = fence.owner = ""
        fence.until = 0.0
        self.views[assignment] = PartitionView(fence.epoch, "", leased=False)
        return "OK"

    def leave(self, name: str) -> None:
        """Remove a member from the fleet."""
        self.heartbeats.pop(name, None)

    def _extend_lease(self, now: float, assignment: Assignment, fence: Fence) -> None:
        if fence.until <= now:
            heapq.heappush(self._expiries, (now + self.ttl, assignment))
        fence.until = now + self.ttl
        if not self.views[assignment].leased or self.views[assignment].epoch != fence.epoch:
            self.views[assignment] = PartitionView(fence.epoch, fence.owner, leased=True)
