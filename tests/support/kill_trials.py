"""Instances whose supervisor is struck: the rows of the matrix, with one instance per row.

An instance has only one supervisor, so each row has its own instance in its own database. Several
instances run in parallel.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.support import crash_points, kill_matrix
from tests.support.crash_points import Strikes
from tests.support.daemon import Daemon
from tests.support.kill_matrix import VICTIM, changes, freeze, is_at_rest, picture, thaw

PATIENCE = 30.0  # seconds that a busy machine may need for 2 s of work
SIDE_BY_SIDE = 6  # number of instances that run in parallel
MAX_CRASHES = 2
GATE = "go"


class Row(NamedTuple):
    """A crash point that is reached in one of four courses.

    In `start`, the daemon starts with work to do. In `busy`, the victim is running. In `crash`, the
    victim exits its process each time. In `drain`, the daemon is asked to stop while the victim
    runs.
    """

    point: str
    course: str
    again: int = 0  # more runs of the victim than without the fault
    after: int = 0
    resumed: int | None = None  # the same, if the next supervisor reads the state of this one


ROWS = [
    *(Row(f"member_heartbeat-{side}", "start") for side in ("calls", "called")),
    # A start makes two of these calls. The first is for the registration, and this one is for the
    # lease.
    *(Row(f"group_ensure-{side}", "start", after=1) for side in ("calls", "called")),
    *(Row(f"lease_acquire-{side}", "start") for side in ("calls", "called")),
    Row("worker-forked", "start"),
    *(Row(f"lease_renew-{side}", "busy", again=1) for side in ("calls", "called")),
    # Another instance learns of the crash only from Redis, but the next supervisor learns of it
    # from this one.
    Row("worker-ended", "crash", again=1, resumed=0),
    Row("worker-judged", "crash", again=1, resumed=0),
    Row("lease_refence-calls", "crash", again=1, resumed=0),
    Row("lease_refence-called", "crash"),
    *(Row(f"lease_release-{side}", "drain") for side in ("calls", "called")),
    *(Row(f"member_leave-{side}", "drain") for side in ("calls", "called")),
]
PAYLOADS = {"start": "fail", "busy": f"await {GATE}", "crash": "exit 9", "drain": f"await {GATE}"}
WHERE = {"member_heartbeat": "-", "member_leave": "-"}


class Trial:
    """An instance and its database, for one row."""

    def __init__(self, folder: Path, url: str, row: Row) -> None:
        self.row = row
        self.point = row.point
        self.url = url
        self.folder = folder / row.point
        self.folder.mkdir()
        self.strikes = Strikes(self.folder / "strikes")
        self.where = WHERE.get(row.point.partition("-")[0], "0")
        self.one = self.daemon("one")
        self.two = self.daemon("two")
        self.uids: list[str] = []

    def daemon(self, name: str) -> Daemon:
        consumer = kill_matrix.CONSUMER | {"max_crashes": MAX_CRASHES}
        made = Daemon(
            self.folder, self.url, name=name, daemon=kill_matrix.DAEMON, consumer=consumer
        )
        made.module = crash_points.__name__
        made.environment = {crash_points.VARIABLE: str(self.strikes.folder)}
        return made

    def close(self) -> None:
        self.one.close()
        self.two.close()

    def begin(self, act: str) -> None:
        """Start the instance with messages to handle. If `act` is empty, it is not struck."""
        payloads = ["ok", "sleep 0.03", PAYLOADS[self.row.course], "ok", "ok"]
        self.uids = self.one.send(payloads)
        if act and self.row.course in ("start", "crash"):
            self.arm(act)
        self.one.start()

    def arm(self, act: str) -> None:
        self.strikes.arm(self.row.point, self.where, act, self.row.after)

    def drive(self, act: str) -> None:
        """Bring the instance to its point."""
        if self.row.course in ("busy", "drain"):
            self.one.wait_run(self.uids[VICTIM], timeout=PATIENCE)
            self.arm(act)
        if self.row.course == "drain":
            self.one.signal(signal.SIGTERM)
            self.open()

    def open(self) -> None:
        (self.folder / GATE).touch()

    def wait_struck(self) -> None:
        self.one.wait_for(
            lambda: self.strikes.struck(self.row.point, self.where),
            timeout=PATIENCE, what=f"{self.row.point} has struck",
        )  # fmt: skip

    def heartbeat(self) -> float:
        """Return the time of the first instance's last heartbeat (server time)."""
        found = self.one.link.execute("ZSCORE", self.one.keys.members("default"), "one")
        return float(found or 0)

    def is_back(self, heartbeat: float) -> bool:
        """Return True if the first instance sent a new heartbeat and has no workers, or exited."""
        return not self.one.running or (self.heartbeat() > heartbeat and not self.one.pids())

    def unacked(self) -> set[str]:
        """Return the started messages that are still pending, without the victim of the row."""
        begun = {each.uid for each in self.one.ledger.records("start")}
        return begun & self.one.pending_uids() - {self.uids[VICTIM]}

    def verdict(self, again: int, unacked: Iterable[str] = ()) -> str:
        """Return the differences from the model, or '' if there are none."""
        victim = self.uids[VICTIM]
        runs = {uid: Counter({1: 1}) for uid in self.uids}
        buried = []
        if self.row.course == "start":
            runs[victim] = Counter({1: 1, 2: 1})
            buried = [(victim, "attempts", "2", "0")]
        elif self.row.course == "crash":
            runs[victim] = Counter({1: MAX_CRASHES})
            buried = [(victim, "crashes", "0", str(MAX_CRASHES))]
        runs[victim][1] += again
        for uid in unacked:
            runs[uid][1] += 1
        found = kill_matrix.compare(runs, buried, self.one.ledger.records(), self.one.letters())
        left = [key for key in self.one.traces() if not key.startswith("stream:")]
        return found + (f"left behind {left}" if left else "")


def run_killed(trials: list[Trial]) -> None:
    """Kill each supervisor at its point and start the same instance again.

    This proves that all processes of its predecessor are dead, so nothing has to wait until a lease
    expires.
    """
    for trial in trials:
        trial.begin("KILL")
    for trial in trials:
        trial.drive("KILL")
    for trial in trials:
        trial.wait_struck()
        assert trial.one.wait() == -signal.SIGKILL
        trial.open()
        trial.one.start()
    for trial in trials:
        trial.one.wait_settled(PATIENCE)
        row = trial.row
        again = row.again if row.resumed is None else row.resumed
        assert {row: trial.verdict(again)} == {row: ""}
        assert trial.one.stop() == 0


def run_paused(trials: list[Trial]) -> None:
    """Stop each instance at its point, let another one take over and finish, then resume it."""
    for trial in trials:
        trial.begin("STOP")
    for trial in trials:
        trial.drive("STOP")
    again = []
    for trial in trials:
        trial.wait_struck()
        freeze(trial.one)
        # A worker that was forked just now may be in the middle of anything.
        again.append(trial.unacked() if trial.row.point == "worker-forked" else set())
        trial.two.start()
        trial.open()
    for trial, unacked in zip(trials, again, strict=True):
        one, two = trial.one, trial.two
        two.wait_for(
            lambda two=two: is_at_rest(two, [0]), timeout=PATIENCE, what="the other has taken over"
        )
        two.wait_settled(PATIENCE)
        before, heartbeat = picture(two), trial.heartbeat()
        thaw(one)
        two.wait_for(
            lambda trial=trial, heartbeat=heartbeat: trial.is_back(heartbeat),
            timeout=PATIENCE, what=f"the first has come back from {trial.row.point}",
        )  # fmt: skip
        assert {trial.row: changes(two, before)} == {trial.row: {}}
        assert {trial.row: trial.verdict(trial.row.again, unacked)} == {trial.row: ""}
        if trial.row.course != "drain":
            one.signal(signal.SIGTERM)
        assert (one.wait(), two.stop()) == (0, 0)
