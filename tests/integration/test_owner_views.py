"""Views of assignment owners have the right content, and take as few commands as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.model import Assignment, Lease
from streamqd.store import leases
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView
from streamqd.supervisor.cluster_state import OwnershipCache
from tests.contract.harness import ASSIGNMENT, OWNER, TTL, Harness

OTHER = ASSIGNMENT._replace(partition=ASSIGNMENT.partition + 1)


class Watching:
    """An instance that observes two assignments, and the commands that its last look sent."""

    def __init__(self, link: Connection, keys: Keys) -> None:
        self._link = link
        self._looks = OwnershipCache(keys)
        self.asked: list[str] = []
        self.live = {OWNER, "web-3"}

    def look(self) -> dict[Assignment, LeaseView]:
        self.asked = []
        return self._looks.read([ASSIGNMENT, OTHER], self.live, self._ask)

    def _ask(
        self, _assignments: Sequence[Assignment], commands: list[tuple[Any, ...]]
    ) -> list[Any]:
        self.asked += [command[0] for command in commands]
        return self._link.pipeline_each(commands)


def test_owner_view_of_a_known_owner_reads_only_the_lease(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    epoch = harness.own("t1")
    first = watching.look()
    assert (first[ASSIGNMENT].epoch, first[ASSIGNMENT].owner) == (epoch, OWNER)
    assert (first[OTHER].epoch, first[OTHER].token, first[OTHER].ttl) == (0, "", None)
    assert watching.asked == ["HMGET", "PTTL"] * 2
    again = watching.look()
    assert again[ASSIGNMENT] == first[ASSIGNMENT]
    assert watching.asked == ["GET", "HMGET", "PTTL"], "the fence of a free unit is read again"


def test_owner_view_reads_the_lease_ttl_of_a_silent_owner(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    harness.own("t1")
    watching.look()
    link.execute("PEXPIRE", keys.lease(*ASSIGNMENT), 5000)
    seen = watching.look()[ASSIGNMENT].ttl
    assert (seen or 0) > 5, "of an owner that lives it is an old one"
    watching.live = set()
    seen = watching.look()[ASSIGNMENT].ttl
    assert 0 < (seen or 0) <= 5


def test_owner_view_detects_every_change_of_owner(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    harness.own("t1")
    before = watching.look()[ASSIGNMENT]
    link.run(leases.refence(keys, Lease(ASSIGNMENT, "t1"), "t2", TTL, None, b"", []))
    after = watching.look()[ASSIGNMENT]
    assert after.token == "t2"
    assert after.epoch > before.epoch
    link.execute("DEL", keys.lease(*ASSIGNMENT))  # as the owner does when it exits
    ended = watching.look()[ASSIGNMENT]
    assert (ended.token, ended.epoch, ended.ttl) == ("t2", after.epoch, None)
    link.run(leases.acquire(keys, Lease(ASSIGNMENT, "t3", after.epoch), TTL, "web-3", ""))
    taken = watching.look()[ASSIGNMENT]
    assert (taken.owner, taken.ttl is not None) == ("web-3", True)
    link.run(leases.release(keys, Lease(ASSIGNMENT, "t3")))
    assert watching.look()[ASSIGNMENT].token == ""
    link.execute("FLUSHALL")
    assert watching.look()[ASSIGNMENT].epoch == 0


def test_owner_view_omits_an_unknown_assignment(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    harness.own("t1")
    watching.look()
    looks, asked = watching._looks, []

    def silent(assignments: Sequence[Assignment], commands: list[tuple[Any, ...]]) -> list[Any]:
        asked.append(list(assignments))
        return [RedisUnavailableError("no answer", sent=True) for _ in commands]

    assert looks.read([ASSIGNMENT, OTHER], {OWNER}, silent) == {}
    assert asked == [[ASSIGNMENT], [OTHER]], "no look waits twice for a silent node"

    def refusing(_assignments: Sequence[Assignment], commands: list[tuple[Any, ...]]) -> list[Any]:
        return [RedisResponseError("NOPERM", "NOPERM") for _ in commands]

    assert looks.read([ASSIGNMENT, OTHER], {OWNER}, refusing) == {}
    assert set(watching.look()) == {ASSIGNMENT, OTHER}, "and after that everything is read again"
