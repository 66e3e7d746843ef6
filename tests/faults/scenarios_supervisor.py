"""Scenarios of a supervisor: its calls to Redis over the life of an assignment, tick by tick."""

from __future__ import annotations

import os
import signal
import time

from streamqd.config import Consumer, Daemon, Settings, Topic
from streamqd.errors import RedisUnavailableError
from streamqd.process import Child, Exit
from streamqd.registration import ensure_topics
from streamqd.scoreboard import DONE, RUNNING, Scoreboard, WorkerState
from streamqd.store import members
from streamqd.supervisor.drain import BurstCheck
from streamqd.supervisor.lease_manager import LeaseManager
from streamqd.supervisor.partition import AssignmentState, Phase
from tests.contract.harness import ASSIGNMENT
from tests.faults.scenario_runner import ScenarioContext

LOCK = "the lock of this host"
TRIES = 60


class Talk:
    """A lease manager with one partition, whose clock advances with each tick."""

    def __init__(self, context: ScenarioContext) -> None:
        consumer = Consumer(topic=ASSIGNMENT.topic, group=ASSIGNMENT.group, handler="work:go")
        settings = Settings(
            redis=context.proxy.settings,
            # The intervals are so long that only explicitly requested calls are due.
            daemon=Daemon(instance="west-1", lease_ttl=100_000.0),
            consumers=(consumer,),
        )
        board = Scoreboard(1)
        self.exchange = LeaseManager(settings, board, LOCK)
        self.holding = AssignmentState(ASSIGNMENT, consumer, board.allot(ASSIGNMENT))
        self.holdings = {ASSIGNMENT: self.holding}
        self.now = time.monotonic()

    def wait_for_phase(self, what: str, phase: Phase) -> None:
        """Tick until the partition has reached a phase and no call is due."""
        self.exchange.membership.heartbeat_at = self.holding.renew_at = 0.0
        for _ in range(TRIES):
            self.now += 10.0
            self.exchange.tick(self.now, self.holdings, [ASSIGNMENT])
            quiet = self.exchange.ok and self.exchange.next_at() > self.now + 10.0
            if quiet and self.holding.phase is phase and not self.holding.wants_exchange:
                return
        raise AssertionError(f"{what}: still {self.holding.phase}")

    def run_until_killed(self) -> None:
        """Kill a worker process that has finished one entry and is running another."""
        holding = self.holding
        holding.record_start(Child(os.getpid(), -1, None, "", -1), self.now)  # type: ignore[arg-type]
        assert holding.worker is not None
        holding.worker.ready_at = self.now
        holding.slot.state = WorkerState.READY
        holding.slot.post_batch([b"m:1-0", b"m:2-0", b"m:3-0"])
        holding.slot.states[0] = DONE
        holding.slot.states[1] = RUNNING
        blame = holding.on_exit(Exit(None, signal.SIGKILL))
        assert blame.charged == b"m:2-0"


def an_assignment_from_its_acquisition_to_its_release(context: ScenarioContext) -> None:
    """Take an assignment through its whole life, from its acquisition to its release.

    The supervisor acquires it, creates the group, renews the lease, replaces a killed worker, wakes
    the fleet, releases the lease, and leaves the fleet.
    """
    harness = context.harness
    # A predecessor was killed, so its heartbeat and its token still exist.
    info = {"nonce": "dead", "lock": LOCK}
    harness.link.run(members.heartbeat(harness.keys, "default", "west-1", "dead", info, 15.0))
    harness.pending("1-0", "2-0", "3-0")
    harness.own("of the dead", owner="west-1")
    talk = Talk(context)
    try:
        talk.wait_for_phase("the fleet is known", Phase.FREE)
        view = talk.exchange.view
        talk.holding.acquire(view.views[ASSIGNMENT].epoch, view.dead_tokens[ASSIGNMENT])
        talk.wait_for_phase("acquired", Phase.HELD)
        fence = harness.do("HGETALL", harness.fence)
        talk.run_until_killed()
        talk.wait_for_phase("refenced", Phase.HELD)
        assert harness.do("HGETALL", harness.fence) != fence
        assert harness.do("HGET", harness.fence, "token") == talk.holding.lease.token.encode()
        assert int(harness.do("HGET", harness.fence, "epoch")) == talk.holding.lease.epoch
        assert harness.do("HGET", harness.attempts, "m:2-0:c") == b"1", "charged once"
        assert harness.state()["stream"].groups["hits"][1].keys() == {"2-0", "3-0"}
        assert talk.holding.slot.counter("charged") == 1
        talk.wait_for_phase("renewed", Phase.HELD)
        talk.holding.release()
        talk.wait_for_phase("released", Phase.FREE)
        talk.exchange.leave()
    finally:
        talk.exchange.close()
    # Leaving is not repeated: if the call is lost, the heartbeat simply grows old.
    harness.do("DEL", harness.keys.members("default"), harness.keys.info("default"))
    state = harness.state()
    assert "token" not in state["fence"]
    assert "lease" not in state


def a_burst_that_is_over(context: ScenarioContext) -> None:
    """With `--burst`, exit after two checks in a row have found no work."""
    harness = context.harness
    harness.groups()
    harness.own("t1")
    talk = Talk(context)
    check = BurstCheck(talk.exchange)
    try:
        for _ in range(TRIES):
            talk.now += 1.0
            if check.result(talk.now, talk.holdings) is not None:
                return
    finally:
        talk.exchange.close()
    raise AssertionError("it does not end")


def registration(context: ScenarioContext) -> None:
    """Register topics and groups before the work starts, and repeat an interrupted start."""
    settings = Settings(
        redis=context.proxy.settings,
        topics={"access": Topic(partitions=3)},
        consumers=tuple(
            Consumer(topic="access", group=group, handler="work:go") for group in ("hits", "seen")
        ),
    )
    for _ in range(TRIES):
        link = context.faulty_link()
        try:
            assert ensure_topics(link, settings) == {"access": 3}
            return
        except RedisUnavailableError:
            continue
        finally:
            link.close()
    raise AssertionError("it is never registered")
