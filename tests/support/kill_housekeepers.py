"""Instances whose housekeeper is struck while it has one of every kind of task.

The work of a housekeeper is atomic, and remains correct if another process does it, even twice or
late. A fault therefore costs nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from streamqd import config
from streamqd.model import Assignment, Lease
from streamqd.producer import Producer
from streamqd.registration import ensure_topics
from streamqd.store import leases, messages
from tests.support import crash_points, kill_matrix
from tests.support.crash_points import SCRIPTS, Strikes
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.kill_matrix import changes, freeze, is_at_rest, picture, thaw

PATIENCE = 60.0  # seconds that a busy machine may need
POINTS = [
    *(f"{name}-{side}" for name in SCRIPTS["housekeeper"] for side in ("calls", "called")),
    "reclaim-flagged",
]
ASSIGNMENT = Assignment(TOPIC, 0, GROUP)
OLD = "1-0"  # the id of a dead letter from decades ago


class HousekeeperTrial:
    """An instance whose housekeeper has one of every kind of task, in its own database."""

    def __init__(self, folder: Path, url: str, point: str = "no point") -> None:
        """Configure the instance. `point` is the crash point at which its housekeeper is struck."""
        self.point = point
        folder /= point
        folder.mkdir()
        self.strikes = Strikes(folder / "strikes")
        self.one, self.two = (self._daemon(folder, url, name) for name in ("one", "two"))
        self.runs: Counter[tuple[str, int]] = Counter()  # the expected runs, as (payload, attempt)
        self._seed()

    def _daemon(self, folder: Path, url: str, name: str) -> Daemon:
        made = Daemon(
            folder, url, name=name, daemon=kill_matrix.DAEMON, consumer=kill_matrix.CONSUMER
        )
        made.write_config(topics={TOPIC: {"partitions": 1, "dlq_retention": "1h"}})
        made.module = crash_points.__name__
        made.environment = {crash_points.VARIABLE: str(self.strikes.folder)}
        return made

    def close(self) -> None:
        self.one.close()
        self.two.close()

    def _seed(self) -> None:
        """Write a due retry, a due send, a finished retry, an old letter, and a foreign fetch."""
        daemon, keys, link = self.one, self.one.keys, self.one.link
        ensure_topics(link, config.load(daemon.config_path))
        link.run(leases.acquire(keys, Lease(ASSIGNMENT, "seed", 0), 60.0, "seed"))
        retried = daemon.send(["ok", "ok"])
        kill_matrix.fetch(daemon, 0, "w")
        done, due = ({b"originalId": uid.rpartition("/")[2].encode()} for uid in retried)
        for fields in (done, due):
            fields[b"retryCount"] = b"1"
            place = b"m:" + fields[b"originalId"]
            assert (
                link.run(
                    messages.retry(keys, Lease(ASSIGNMENT, "seed"), [(place, 0.0, fields)])
                ).word
                == "OK"
            )
            if fields is done:
                link.run(messages.promote_retries(keys, ASSIGNMENT, 10))
                stream = keys.retry_stream(*ASSIGNMENT)
                link.execute("XREADGROUP", "GROUP", GROUP, "w", "STREAMS", stream, ">")
                ((entry, _),) = link.execute("XRANGE", stream, "-", "+")
                assert link.execute("XACK", stream, GROUP, entry) == 1
        link.run(leases.release(keys, Lease(ASSIGNMENT, "seed")))
        link.execute("XADD", keys.dlq(TOPIC, 0), OLD, "payload", "old", "originalId", OLD)
        with Producer(settings=config.load(daemon.config_path)) as producer:
            producer.send(TOPIC, "sleep 0", delay=0.001)
        daemon.send(["fail", "sleep 0.001"])
        kill_matrix.fetch(daemon, 0, "legacy")
        daemon.send(["ok"])
        self.runs.update({("ok", 2): 1, ("sleep 0", 1): 1, ("fail", 1): 1, ("fail", 2): 1})
        self.runs.update({("sleep 0.001", 1): 1, ("ok", 1): 1})

    def send_last(self) -> None:
        """Send one more message. Once it is acknowledged, the worker has obeyed all requests."""
        self.one.send(["sleep 0.002"])
        self.runs["sleep 0.002", 1] += 1

    def is_idle(self) -> bool:
        """Return True if the worker has no pending message and none to fetch."""
        keys, link = self.one.keys, self.one.link
        found = messages.Snapshot.parse(link.run(messages.snapshot(keys, ASSIGNMENT)))
        assert found is not None
        pending = 0
        for stream in (keys.stream(TOPIC, 0), keys.retry_stream(*ASSIGNMENT)):
            _, _, _, consumers = link.execute("XPENDING", stream, GROUP)
            pending += sum(int(count) for name, count in consumers or () if name == b"w")
        return not (found.unread or found.retry_unread or pending)

    def verdict(self) -> None:
        """Fail unless every message ran as often as without a fault, and is where it belongs."""
        daemon, scheduled = self.one, self.one.keys.delayed_sends(TOPIC, 0)
        daemon.wait_for(
            lambda: not daemon.link.execute("ZCARD", scheduled),
            timeout=PATIENCE, what="all delayed sends are promoted",
        )  # fmt: skip
        daemon.wait_settled(PATIENCE)
        texts = {each.uid: each.text for each in daemon.ledger.records("sent")}
        found = Counter(
            (texts.get(each.uid, "sleep 0"), each.attempt)
            for each in daemon.ledger.records("start")
        )
        assert found == self.runs, (found - self.runs, self.runs - found)
        # The next check of dead letters removes the old letter.
        assert [each["payload"] for each in daemon.letters() if each["payload"] != "old"] == [
            "fail"
        ]
        assert [key for key in daemon.traces() if not key.startswith("stream:")] == []


def begin(housekeepers: list[HousekeeperTrial], act: str) -> None:
    """Strike each housekeeper at its point."""
    for housekeeper in housekeepers:
        housekeeper.strikes.arm(housekeeper.point, 0, act)
        housekeeper.one.start()
    for housekeeper in housekeepers:
        housekeeper.one.wait_for(
            lambda housekeeper=housekeeper: housekeeper.strikes.struck(housekeeper.point, 0),
            timeout=PATIENCE, what=f"{housekeeper.point} has struck",
        )  # fmt: skip


def run_killed(housekeepers: list[HousekeeperTrial]) -> None:
    """Kill each housekeeper at its point. Its supervisor then forks another one."""
    begin(housekeepers, "KILL")
    for housekeeper in housekeepers:
        housekeeper.verdict()
        assert housekeeper.one.wait_event("housekeeper.exited")["how"] == "signal SIGKILL"
        assert housekeeper.one.events("lease.lost") == []
        assert housekeeper.one.stop() == 0


def run_paused(housekeepers: list[HousekeeperTrial]) -> None:
    """Stop each instance at its point, let another one take over and finish, then resume it."""
    begin(housekeepers, "STOP")
    for housekeeper in housekeepers:
        # The worker must have no pending message, so that a pause costs nothing there either.
        housekeeper.send_last()
        housekeeper.one.wait_for(housekeeper.is_idle, timeout=PATIENCE, what="its worker is idle")
        freeze(housekeeper.one)
        housekeeper.two.start()
    for housekeeper in housekeepers:
        housekeeper.two.wait_for(
            lambda housekeeper=housekeeper: is_at_rest(housekeeper.two, [0]),
            timeout=PATIENCE, what="its successor has taken over",
        )  # fmt: skip
        housekeeper.verdict()
        before = picture(housekeeper.two)
        # Any process may delete an old letter, even at a late time.
        before.pop(("XRANGE", housekeeper.two.keys.dlq(TOPIC, 0), "-", "+"))
        thaw(housekeeper.one)
        housekeeper.one.wait_for(
            lambda housekeeper=housekeeper: not housekeeper.one.pids(),
            timeout=PATIENCE,
            what="it has come back",
        )
        housekeeper.verdict()
        assert {housekeeper.point: changes(housekeeper.two, before)} == {housekeeper.point: {}}
        assert (housekeeper.one.stop(), housekeeper.two.stop()) == (0, 0)
