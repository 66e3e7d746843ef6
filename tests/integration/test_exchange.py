"""An exchange of the supervisor carries several kinds of calls, and none starves the others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from streamqd.config import Consumer, Daemon, Settings
from streamqd.model import Assignment
from streamqd.scoreboard import Scoreboard
from streamqd.store import members
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.supervisor import lease_manager
from streamqd.supervisor.cluster_state import ClusterState
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.membership import Membership
from streamqd.supervisor.partition import AssignmentState, Phase
from tests.support.costs import Meter
from tests.support.loglines import LogLines
from tests.support.owning import create_groups
from tests.support.servers import Server
from tests.support.waiting import wait_until

MANY = 2 * lease_manager.CALLS_MAX + 10
OTHER = Assignment("orders", 0, "hits")  # an assignment that another instance may own


class Talk:
    """An exchange, and the states of the partitions that it serves."""

    def __init__(self, server: Server, assignments: list[Assignment]) -> None:
        consumer = Consumer(topic="access", group="hits", handler="work:go")
        ours = Settings(
            redis=server.settings,
            daemon=Daemon(instance="west-1", lease_ttl=60.0),
            consumers=(consumer,),
        )
        board = Scoreboard(len(assignments) + 1)
        self.exchange = LeaseManager(ours, board, "lock")
        self.offers = [*assignments, OTHER]
        self.holdings = {
            assignment: AssignmentState(assignment, consumer, board.allot(assignment))
            for assignment in self.offers
        }
        self.held = [self.holdings[assignment] for assignment in assignments]

    def tick(self) -> bool:
        """Take a turn. Return True if another turn must follow immediately."""
        self.exchange.tick(time.monotonic(), self.holdings, self.offers)
        return self.exchange.next_at() <= time.monotonic()

    def own(self) -> None:
        """Own all assignments except the other one, with no calls left to send."""
        for each in self.held:
            each.acquire(0)
        wait_until(
            lambda: (
                not self.tick()
                and all(each.phase is Phase.HELD and each.groups_ready for each in self.held)
            ),
            what="all is held",
        )
        self.exchange.membership.heartbeat_at = float("inf")

    def renew_all(self) -> None:
        for each in self.held:
            each.renew_at = 0.0

    def renewed(self) -> int:
        return sum(each.renew_at > 0.0 for each in self.held)


@pytest.fixture
def talk(server: Server, link: Connection, keys: Keys) -> Iterator[Talk]:
    made = Talk(server, create_groups(link, keys, MANY))
    yield made
    made.exchange.close()


def test_renewals_are_sent_in_bounded_consecutive_parts(talk: Talk, meter: Meter) -> None:
    talk.own()
    for _ in range(2):  # the first turn also loads the script
        talk.renew_all()
        parts = []
        wanted = True
        while wanted:
            with meter.measuring() as cost:
                wanted = talk.tick()
            parts.append((cost.trips, cost.scripts))
    assert parts == [(1, lease_manager.CALLS_MAX), (1, lease_manager.CALLS_MAX), (1, 10)]
    assert talk.renewed() == MANY


def test_refused_renewals_do_not_starve_others(talk: Talk, link: Connection, keys: Keys) -> None:
    """Refused renewals delay neither the renewals after them nor the check of other owners."""
    talk.own()
    refused = talk.held[: lease_manager.CALLS_MAX + 5]
    for each in refused:  # a fence of another type makes each call fail
        link.execute("DEL", keys.fence(*each.assignment))
        link.execute("SET", keys.fence(*each.assignment), "not a hash")
    talk.renew_all()
    for _ in range(2):  # the renewals are due again
        talk.exchange.view, talk.exchange.membership.heartbeat_at = ClusterState(), 0.0
        ticks = 1
        while talk.tick():
            ticks += 1
            assert ticks < 20, "it never comes to rest"
        assert talk.renewed() == MANY - len(refused)
        assert OTHER in talk.exchange.view.views


def test_refused_renewal_is_not_repeated_immediately(
    talk: Talk, link: Connection, keys: Keys
) -> None:
    talk.own()
    refused = talk.held[0]
    link.execute("DEL", keys.fence(*refused.assignment))
    link.execute("SET", keys.fence(*refused.assignment), "not a hash")
    refused.release()
    wait_until(lambda: (talk.tick(), refused.refusal)[1], what="it is refused")
    assert refused.phase is Phase.RELEASING
    assert not talk.exchange.has_changes
    link.execute("DEL", keys.fence(*refused.assignment))
    talk.tick()
    assert talk.exchange.has_changes
    assert refused.phase is Phase.FREE


def test_renewals_skip_an_assignment_lost_during_a_round(talk: Talk) -> None:
    talk.own()
    talk.renew_all()
    assert talk.tick()
    for each in talk.held[lease_manager.CALLS_MAX : -1]:
        del talk.holdings[each.assignment]
    talk.offers = [*talk.holdings]
    assert not talk.tick()
    assert talk.renewed() == lease_manager.CALLS_MAX + 1


# --- another run with our name --------------------------------------------------------------------


def test_duplicate_instance_is_reported_once(link: Connection, keys: Keys) -> None:
    """The event names the other run.

    While the other run drains, the instance waits until it has exited.
    """
    member = Membership(Daemon(instance="west-1", lease_ttl=10.0), keys, "lock")

    def both(**info: object) -> bool:
        other = {"host": "web-2", "pid": 9, "lock": "another", **info}
        call = members.heartbeat(keys, "default", "west-1", "n2", other, 10.0)
        assert link.run(call).word == "OK"
        assert not member.apply_reply(link.run(member.heartbeat(0.0, {}, ())), 0.0)
        assert not member.accepted
        return member.silence.is_duplicate_lasting

    with LogLines() as lines:
        for _ in range(20):
            time.sleep(0.002)  # heartbeats are whole milliseconds
            assert not both(leaving=True)
        wait_until(both)
        (named,) = lines.events("instance.duplicated")
    assert (named["other_host"], named["other_pid"]) == ("web-2", 9)
    assert link.run(members.leave(keys, "default", "west-1", "n2")).word == "OK"
    assert member.apply_reply(link.run(member.heartbeat(0.0, {}, ())), 0.0)
    assert member.accepted
    assert not member.silence.is_duplicate_lasting


def test_duplicate_instance_report_omits_junk(link: Connection, keys: Keys) -> None:
    """The event omits junk, because the record of another run is untrusted input."""
    member = Membership(Daemon(instance="west-1", lease_ttl=10.0), keys, "lock")
    other: dict[str, object] = {"host": ["x"], "pid": True, "lock": 7}
    assert link.run(members.heartbeat(keys, "default", "west-1", "n2", other, 10.0)).word == "OK"
    with LogLines() as lines:
        member.apply_reply(link.run(member.heartbeat(0.0, {}, ())), 0.0)
        (named,) = lines.events("instance.duplicated")
    assert "other_host" not in named
    assert "other_pid" not in named
