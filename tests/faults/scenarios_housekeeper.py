"""A scenario of a housekeeper that runs all of its tasks in rounds until no work is left."""

from __future__ import annotations

import socket
from unittest import mock

from streamqd.config import Consumer, Daemon, Retention, Settings, Topic
from streamqd.housekeeper import Housekeeper, batch
from streamqd.scoreboard import InstanceFlags, Scoreboard, WorkerState
from tests.contract.harness import ASSIGNMENT, Harness
from tests.faults.scenario_runner import ScenarioContext

ROUNDS = 30
FAR = 9_000_000_000_000  # unix ms, far in the future
PACKED = b"\x92\xa7payload\xa1x"


def seed(harness: Harness) -> None:
    """Create work for every task."""
    harness.groups()
    harness.own("t1")
    # Work for promotion: two retries and two sends that are due, and one of each that is not due.
    for number, due in enumerate((1, 2, FAR)):
        harness.do("ZADD", harness.delayed, due, f"m:{number}-1")
        harness.do("HSET", harness.items, f"m:{number}-1", PACKED)
        harness.do("ZADD", harness.delayed_sends, due, f"send-{number}")
        harness.do("HSET", harness.delayed_send_items, f"send-{number}", PACKED)
    # Work for trimming, for dropping, and for settling after the drop, in nodes of ten entries.
    for number in range(1, 71):
        harness.add(f"{number}-0", "payload", "x")
    harness.do("XACK", harness.stream, ASSIGNMENT.group, *harness.fetch(30))
    harness.fetch(5)
    harness.add("1-0", stream=harness.retry)
    harness.do("XACK", harness.retry, ASSIGNMENT.group, *harness.fetch(1, stream=harness.retry))
    harness.add("2-0", stream=harness.retry)
    harness.fetch(1, consumer="legacy", stream=harness.retry)
    for number in range(1, 6):
        harness.add(f"{number}-0", stream=harness.dlq)


def everything_that_is_due(context: ScenarioContext) -> None:
    """Promote, trim, drop, settle, expire, look for foreign entries, measure and publish."""
    harness = context.harness
    harness.do("CONFIG", "SET", "stream-node-max-entries", 10)
    try:
        seed(harness)
        run_housekeeper_tasks(context)
    finally:
        harness.do("CONFIG", "SET", "stream-node-max-entries", 100)


def run_housekeeper_tasks(context: ScenarioContext) -> None:
    """Act as the housekeeper of one instance."""
    harness = context.harness
    board = Scoreboard(2)
    slot = board.allot(ASSIGNMENT)
    slot.owned, slot.state = 1, WorkerState.READY
    bounds = Retention(max_length=10, drop_unacked_above=20)
    settings = Settings(
        redis=context.proxy.settings,
        daemon=Daemon(instance="web-1"),
        topics={ASSIGNMENT.topic: Topic(partitions=1, retention=bounds, dlq_retention=60.0)},
        consumers=(
            Consumer(
                topic=ASSIGNMENT.topic, group=ASSIGNMENT.group, handler="work:go", reclaim_idle=0.0
            ),
        ),
    )
    board.flags = InstanceFlags.MEMBER
    ours, theirs = socket.socketpair()
    # On a busy machine, no task may stop early: after a round without errors, all work is done.
    with ours, theirs, mock.patch.object(batch, "TURN_SECONDS", 60.0):
        housekeeper = Housekeeper(board, settings, theirs)
        try:
            keep_house(housekeeper)
        finally:
            housekeeper._store.connection.close()
    assert slot.reclaim_requested, "the worker is asked to reclaim foreign entries"
    summary = harness.keys.instance("default", "web-1")
    assert harness.do("PTTL", summary) > 0
    harness.do("DEL", summary)  # the summary contains times, which differ between runs
    state = harness.state()
    for stream in ("stream", "retry"):
        promoted = [entry_id for entry_id in state[stream].entries if len(entry_id) > len("999-0")]
        assert len(promoted) == 2, stream
    assert (len(state["delayed"]), len(state["delayed_sends"])) == (1, 1)
    assert "dlq" not in state or state["dlq"].entries == {}


def keep_house(housekeeper: Housekeeper) -> None:
    """Run every task until three rounds in a row finish without an error."""
    good = 0
    for _ in range(ROUNDS):
        for task in housekeeper._tasks:
            task.due = 0.0
        housekeeper._round()
        well = not housekeeper._redis_episode.open and all(
            not task.episode.open for task in housekeeper._tasks
        )
        good = good + 1 if well else 0
        if good == 3:
            return
    raise AssertionError("it does not come to rest")
