"""Views of unit owners: their content, and their minimal number of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.model import Lease, Unit
from streamqd.store import leases
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView
from streamqd.supervisor.cluster_state import OwnershipCache
from tests.contract.harness import OWNER, TTL, UNIT, Harness

OTHER = UNIT._replace(partition=UNIT.partition + 1)


class Watching:
    """An instance that observes two units, and the commands of its last observation."""

    def __init__(self, link: Connection, keys: Keys) -> None:
        self._link = link
        self._looks = OwnershipCache(keys)
        self.asked: list[str] = []
        self.live = {OWNER, "web-3"}

    def look(self) -> dict[Unit, LeaseView]:
        self.asked = []
        return self._looks.read([UNIT, OTHER], self.live, self._ask)

    def _ask(self, _units: Sequence[Unit], commands: list[tuple[Any, ...]]) -> list[Any]:
        self.asked += [command[0] for command in commands]
        return self._link.pipeline_each(commands)


def test_view_of_an_unchanged_owner_reads_only_the_lease(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    epoch = harness.own("t1")
    first = watching.look()
    assert (first[UNIT].epoch, first[UNIT].owner) == (epoch, OWNER)
    assert (first[OTHER].epoch, first[OTHER].token, first[OTHER].ttl) == (0, "", None)
    assert watching.asked == ["HMGET", "PTTL"] * 2
    again = watching.look()
    assert again[UNIT] == first[UNIT]
    assert watching.asked == ["GET", "HMGET", "PTTL"], "the fence of a free unit is read again"


def test_view_reads_the_lease_ttl_of_a_silent_owner(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    harness.own("t1")
    watching.look()
    link.execute("PEXPIRE", keys.lease(*UNIT), 5000)
    seen = watching.look()[UNIT].ttl
    assert (seen or 0) > 5, "of an owner that lives it is an old one"
    watching.live = set()
    seen = watching.look()[UNIT].ttl
    assert 0 < (seen or 0) <= 5


def test_each_change_of_a_holder_is_seen_by_the_next_look(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    harness.own("t1")
    before = watching.look()[UNIT]
    link.run(leases.refence(keys, Lease(UNIT, "t1"), "t2", TTL, None, b"", []))
    after = watching.look()[UNIT]
    assert after.token == "t2"
    assert after.epoch > before.epoch
    link.execute("DEL", keys.lease(*UNIT))  # as at its exit
    ended = watching.look()[UNIT]
    assert (ended.token, ended.epoch, ended.ttl) == ("t2", after.epoch, None)
    link.run(leases.acquire(keys, Lease(UNIT, "t3", after.epoch), TTL, "web-3", ""))
    taken = watching.look()[UNIT]
    assert (taken.owner, taken.ttl is not None) == ("web-3", True)
    link.run(leases.release(keys, Lease(UNIT, "t3")))
    assert watching.look()[UNIT].token == ""
    link.execute("FLUSHALL")
    assert watching.look()[UNIT].epoch == 0


def test_view_omits_an_unknown_unit(link: Connection, keys: Keys) -> None:
    harness, watching = Harness(link, keys), Watching(link, keys)
    harness.own("t1")
    watching.look()
    looks, asked = watching._looks, []

    def silent(units: Sequence[Unit], commands: list[tuple[Any, ...]]) -> list[Any]:
        asked.append(list(units))
        return [RedisUnavailableError("no answer", sent=True) for _ in commands]

    assert looks.read([UNIT, OTHER], {OWNER}, silent) == {}
    assert asked == [[UNIT], [OTHER]], "no look waits twice for a silent node"

    def refusing(_units: Sequence[Unit], commands: list[tuple[Any, ...]]) -> list[Any]:
        return [RedisResponseError("NOPERM", "NOPERM") for _ in commands]

    assert looks.read([UNIT, OTHER], {OWNER}, refusing) == {}
    assert set(watching.look()) == {UNIT, OTHER}, "and after that everything is read again"
