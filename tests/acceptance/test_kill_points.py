"""The kill-point matrix of the worker: each crash point x {SIGKILL, pause + takeover, lost reply}.

Each row of tests/support/kill_matrix.py has its own partition, so that one daemon can pass through
all rows.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd import config
from streamqd.registration import ensure_topics
from streamqd.store import messages, scripts
from tests.support import crash_points, kill_matrix
from tests.support.crash_points import Strikes
from tests.support.daemon import GROUP, PAYLOAD_HANDLER, TOPIC, UNREAD_MAX, Daemon
from tests.support.kill_matrix import (
    BLOCKED,
    ROWS,
    VICTIM,
    Case,
    Cost,
    Row,
    changes,
    freeze,
    is_at_rest,
    picture,
    thaw,
)
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer

NewDaemon = Callable[..., Daemon]
PATIENCE = 30.0  # seconds; 2 are enough unless the machine is busy
IN_PLACE = kill_matrix.CONSUMER | {"on_error": "block"}
# At these points, the first owner still settles messages that the second one already holds, once it
# is resumed.
CONTESTED = (
    *("handler-returned", "outcome-unrecorded", "outcome-recorded", "acks-unsent"),
    *("settle_ack-calls", "settle_retry-calls", "settle_dead-calls", "settle_note-calls"),
)
every_way = pytest.mark.parametrize(
    ("rows", "consumer"),
    [(ROWS, kill_matrix.CONSUMER), (BLOCKED, IN_PLACE)],
    ids=["set aside", "in place"],
)


@pytest.fixture
def strikes(tmp_path: Path) -> Strikes:
    return Strikes(tmp_path / "strikes")


@pytest.fixture
def new_struck(new_daemon: NewDaemon, strikes: Strikes) -> NewDaemon:
    """Configure daemons with crash points."""

    def make(**options: Any) -> Daemon:
        options = {"daemon": kill_matrix.DAEMON, "consumer": kill_matrix.CONSUMER} | options
        daemon = new_daemon(**options)
        daemon.module = crash_points.__name__
        daemon.environment = {crash_points.VARIABLE: str(strikes.folder)}
        return daemon

    return make


def crashes(daemon: Daemon, partition: int) -> list[Any]:
    """Return the place that each crash was charged to, in order.

    None means that it was not charged.
    """
    return [each.get("charged") for each in daemon.events("worker.crashed", partition=partition)]


def judge(daemon: Daemon, cases: dict[int, Case], costs: dict[int, Cost]) -> None:
    """Compare all rows with the model. If any of them differ, show every difference."""
    records, letters = daemon.ledger.records(), daemon.letters()
    found = {
        f"{case.row.point} {case.row.victim}": case.verdict(costs[number], records, letters)
        for number, case in cases.items()
    }
    assert {name: text for name, text in found.items() if text} == {}
    assert daemon.ledger.audit(GROUP).unexpected == []
    # A settled message leaves no keys.
    assert [key for key in daemon.traces() if not key.startswith("stream:")] == []


@pytest.mark.fault("F1", "F2")
@every_way
def test_worker_killed_at_any_point_has_the_modeled_cost(
    new_struck: NewDaemon, strikes: Strikes, rows: list[Row], consumer: dict[str, Any]
):
    daemon = new_struck(partitions=len(rows), consumer=consumer)
    uids = kill_matrix.seed(daemon, rows)
    kill_matrix.arm(strikes, rows, "KILL")
    with daemon:
        daemon.wait_for(
            lambda: all(strikes.struck(row.point, number) for number, row in enumerate(rows)),
            timeout=PATIENCE, what="every point has struck",
        )  # fmt: skip
        daemon.wait_settled(PATIENCE)

        judge(
            daemon,
            {number: Case(row, uids[number]) for number, row in enumerate(rows)},
            {number: row.killed for number, row in enumerate(rows)},
        )
        for number, row in enumerate(rows):
            blamed = f"m:{uids[number][VICTIM].rpartition('/')[2]}"
            first = [blamed] if row.crashed else []
            last = blamed if row.killed.charged and not row.crashed else None
            assert crashes(daemon, number) == [*first, last], row
        assert daemon.stop() == 0


# --- rounds ---------------------------------------------------------------------------------------


# The steps of a round, and how often each step is passed before the kill. Five inherited messages
# take two rounds.
STEPS = [
    *(("quarantine_mark-calls", 0), ("quarantine_mark-called", 0), ("batch-recorded", 0)),
    *(("handler-starts", 0), ("handler-returned", 0), ("outcome-recorded", 0)),
    *(("settle_ack-calls", 0), ("settle_ack-called", 0)),
    *(("quarantine_mark-calls", 1), ("quarantine_mark-called", 1), ("handler-starts", 1)),
    *(("quarantine_end-calls", 0), ("quarantine_end-called", 0)),
]
IN_BATCHES = kill_matrix.CONSUMER | {"handler": "work:many", "batch": 4}
BATCHES = """

def many(messages: list[Message]) -> None:
    for message in messages:
        obey(message)
"""


def inherit_rounds(daemon: Daemon) -> list[str]:
    """Send five messages to each partition and lose its owner. Return the uids of the messages."""
    ensure_topics(daemon.link, config.load(daemon.config_path))
    uids = []
    for number in range(len(STEPS)):
        uids += daemon.send(["ok"] * 5, number)
        kill_matrix.lose_owner(daemon, number)
    return uids


def judge_rounds(daemon: Daemon, uids: list[str]) -> None:
    """Check that each message finished and started at most twice, and that none was charged."""
    starts = Counter(each.uid for each in daemon.ledger.records("start"))
    assert daemon.ledger.finished_uids(GROUP) == {*uids}
    assert max(starts.values()) <= 2
    assert daemon.letters() == []
    assert [key for key in daemon.traces() if not key.startswith("stream:")] == []


@pytest.mark.fault("F1", "F27")
def test_worker_killed_at_any_step_of_a_round_charges_none(new_struck: NewDaemon, strikes: Strikes):
    code = PAYLOAD_HANDLER.read_text() + BATCHES
    daemon = new_struck(partitions=len(STEPS), consumer=IN_BATCHES, code=code)
    uids = inherit_rounds(daemon)
    for number, (point, after) in enumerate(STEPS):
        strikes.arm(point, number, "KILL", after)
    with daemon:
        daemon.wait_for(
            lambda: all(strikes.struck(point, number) for number, (point, _) in enumerate(STEPS)),
            timeout=PATIENCE, what="every step has struck",
        )  # fmt: skip
        daemon.wait_settled(PATIENCE)
        judge_rounds(daemon, uids)
        for number, step in enumerate(STEPS):
            assert crashes(daemon, number) == [None], step
        assert daemon.stop() == 0


@pytest.mark.fault("F7", "F27")
def test_host_lost_at_any_step_of_a_round_charges_none(new_struck: NewDaemon, strikes: Strikes):
    code = PAYLOAD_HANDLER.read_text() + BATCHES
    a, b = (
        new_struck(partitions=len(STEPS), consumer=IN_BATCHES, code=code, name=name)
        for name in ("one", "two")
    )
    uids = inherit_rounds(a)
    for number, (point, after) in enumerate(STEPS):
        strikes.arm(point, number, "STOP", after)
    a.start()
    a.wait_for(
        lambda: all(strikes.struck(point, number) for number, (point, _) in enumerate(STEPS)),
        timeout=PATIENCE, what="every step has struck",
    )  # fmt: skip
    freeze(a)
    for each in a.session():
        each.kill()
    a.wait(PATIENCE)
    with b:
        b.wait_settled(PATIENCE)
        judge_rounds(b, uids)
        assert [each for each in b.events("lease.acquired") if each.get("suspected")] == []
        assert b.events("worker.crashed") == []
        assert b.stop() == 0


# --- a destroyed group ----------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["KILL", "STOP"])
@pytest.mark.parametrize("point", kill_matrix.DESTROYED)
def test_worker_killed_while_restoring_a_group_loses_nothing(
    new_struck: NewDaemon, strikes: Strikes, point: str, act: str
):
    """A worker that is killed while it restores a group loses no message.

    If the group was restored before the kill, no finished message runs again. Otherwise, the
    worker's record is lost, and all messages that are still in the stream run again.
    """
    daemon = new_struck(partitions=1)
    go = daemon.folder / "go"
    with daemon:
        uids = daemon.send(["ok", "ok", f"await {go}", "ok"])
        daemon.wait_run(uids[2], "start")
        strikes.arm(point, 0, act)
        for stream in (daemon.keys.stream(TOPIC, 0), daemon.keys.retry_stream(TOPIC, 0, GROUP)):
            daemon.link.execute("XGROUP", "DESTROY", stream, GROUP)
        go.touch()
        daemon.wait_for(lambda: strikes.struck(point, 0), what="the point is reached")
        if act == "STOP":
            pid = strikes.struck(point, 0)
            assert pid is not None
            os.kill(pid, signal.SIGCONT)
        uids += daemon.send(["ok", "ok"])
        daemon.wait_settled(PATIENCE)

        runs = Counter(each.uid for each in daemon.ledger.records("start"))
        assert set(runs) == set(uids)
        again = act == "KILL" and point == "group_restore-calls"
        assert max(runs.values()) == (2 if again else 1)
        assert daemon.pending() == 0
        assert daemon.letters() == []
        assert daemon.stop() == 0


# --- pause and takeover ---------------------------------------------------------------------------


@pytest.mark.fault("F8")
@every_way
def test_instance_paused_at_any_point_has_the_modeled_cost(
    new_struck: NewDaemon, strikes: Strikes, rows: list[Row], consumer: dict[str, Any]
):
    a, b = (
        new_struck(partitions=len(rows), consumer=consumer, name=name) for name in ("one", "two")
    )
    uids = kill_matrix.seed(a, rows)
    kill_matrix.arm(strikes, rows, "STOP")
    a.start()
    a.wait_for(
        lambda: all(strikes.struck(row.point, number) for number, row in enumerate(rows)),
        timeout=PATIENCE, what="every point has struck",
    )  # fmt: skip
    freeze(a)
    pending = a.pending_uids()
    unacked = {each.uid for each in a.ledger.records("start")} & pending

    # The second instance must hold the messages that the first one will try to settle.
    contested = {number for number, row in enumerate(rows) if row.point in CONTESTED}
    # A charged or accused message is not expected to finish, because it waits until it can run
    # alone.
    suspected = {
        number
        for number, row in enumerate(rows)
        if row.paused.charged or row.point == "quarantine_mark-called"
    }
    free = {*range(len(rows))} - contested - suspected
    for number in contested:
        strikes.arm("handler-starts", number, "STOP")
    b.start()
    b.wait_event("daemon.ready", timeout=PATIENCE)
    b.wait_for(
        lambda: all(strikes.struck("handler-starts", number) for number in contested)
        and is_at_rest(b, free)
        and not count_unsettled(b, free),
        timeout=PATIENCE, what="the second one has everything in hand, or done",
    )  # fmt: skip
    before = picture(b)
    thaw(a)
    a.wait_for(lambda: not a.pids(), timeout=PATIENCE, what="every worker of the first has ended")

    assert changes(b, before) == {}, "a superseded token has changed something"
    thaw(b)
    b.wait_settled(PATIENCE)
    judge(
        b,
        {
            number: Case(row, uids[number], frozenset(unacked & {*uids[number]}))
            for number, row in enumerate(rows)
        },
        {number: row.paused for number, row in enumerate(rows)},
    )
    assert b.events("worker.crashed") == []
    assert (a.stop(), b.stop()) == (0, 0)


def count_unsettled(daemon: Daemon, partitions: set[int]) -> int:
    """Return how many messages of these partitions are not settled."""
    assignments = [
        assignment for assignment in daemon.assignments() if assignment.partition in partitions
    ]
    replies = daemon.link.run_many(
        [messages.snapshot(daemon.keys, assignment, UNREAD_MAX) for assignment in assignments]
    )
    found = [messages.Snapshot.parse(reply) for reply in replies]
    return sum(
        one.unread + one.pending + one.waiting_retries + one.retry_unread + one.retry_pending
        for one in found
        if one is not None
    )


# --- lost replies ---------------------------------------------------------------------------------


# A reply can be lost only at a point where the command has already been sent.
def sent_rows(rows: list[Row]) -> list[Row]:
    return [
        row for row in rows if row.point in ("fetch-sent", "acks-sent") or "called" in row.point
    ]


class Losses:
    """A trigger for each row that makes the proxy lose the reply to the row's command."""

    def __init__(self, proxy: FaultProxy, rows: list[Row]) -> None:
        self._by_sha = {script.sha.encode(): script for script in scripts.load().values()}
        self._read: dict[int, tuple[str, str]] = {}  # the open read of each connection's thread
        self.triggers = {
            number: proxy.arm(
                Fault.DROP_REPLY, nth=row.after + 1, wanted=self._wanted(row.point, str(number))
            )
            for number, row in enumerate(rows)
        }

    def _wanted(self, point: str, partition: str) -> Callable[[list[bytes]], bool]:
        name = point.removesuffix("-called")
        return lambda arguments: self._names(arguments) == (name, partition)

    def _names(self, arguments: list[bytes]) -> tuple[str, str]:
        """Return the crash point and the partition that a command belongs to."""
        word, me = arguments[0].upper(), threading.get_ident()
        if word == b"EVALSHA":
            argv = arguments[3:]
            name = crash_points.point_name(self._by_sha[arguments[1]], argv)
            return name, crash_points.partition_number(argv)
        # The reply to a read is the reply to its EXEC. Each connection has its own thread.
        if word == b"MULTI":
            self._read[me] = ("fetch-sent", "")
        elif word == b"XACK" and me in self._read:
            self._read[me] = ("acks-sent", "")
        elif word == b"XREADGROUP" and me in self._read:
            at = arguments.index(b"STREAMS") + 1
            self._read[me] = (self._read[me][0], crash_points.partition_number(arguments[at:]))
        elif word == b"EXEC" and me in self._read:
            return self._read[me]
        return "", ""


@pytest.fixture
def proxy(fresh_server: ProcessServer) -> Iterator[FaultProxy]:
    with FaultProxy(fresh_server.socket_path) as proxy:
        yield proxy


@pytest.mark.fault("F12")
@every_way
def test_lost_reply_to_a_worker_repeats_no_message(
    new_struck: NewDaemon, fresh_server: ProcessServer, strikes: Strikes, proxy: FaultProxy,
    rows: list[Row], consumer: dict[str, Any],
):  # fmt: skip
    rows = sent_rows(rows)
    daemon = new_struck(partitions=len(rows), redis_url=proxy.url, consumer=consumer)
    uids = kill_matrix.seed(daemon, rows)
    for script in scripts.load().values():
        daemon.link.execute("SCRIPT", "LOAD", script.source)
    for number, row in enumerate(rows):
        if row.crashed:
            strikes.arm("handler-starts", number, "KILL", VICTIM)
    losses = Losses(proxy, rows)
    with daemon:
        for number, trigger in losses.triggers.items():
            daemon.wait_for(
                lambda trigger=trigger: trigger.hit, timeout=PATIENCE, what=rows[number].point
            )
        daemon.wait_settled(PATIENCE)

        judge(
            daemon,
            {number: Case(row, uids[number]) for number, row in enumerate(rows)},
            {number: Cost("nobody", int(row.crashed)) for number, row in enumerate(rows)},
        )
        assert len(daemon.events("worker.crashed")) == sum(row.crashed for row in rows)
        assert daemon.stop() == 0
