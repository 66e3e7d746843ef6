"""Relays that are struck, each with its own outbox.

Each committed row is in its topic exactly once, and the row that cannot be sent is in the table of
dead rows exactly once. A fault therefore costs nothing, whichever step it interrupts.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from streamqd import config
from streamqd.outbox.database import connect
from streamqd.store.client import connect as connect_redis
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.crash_points import RELAY, SCRIPTS, Strikes
from tests.support.databases import DatabaseServer
from tests.support.forked_relay import ForkedRelay
from tests.support.outboxes import TOPIC, OutboxSite, sender
from tests.support.waiting import wait_until

PATIENCE = 60.0  # seconds that a busy machine may need
POINTS = [
    *(f"{name}-{side}" for name in SCRIPTS["relay"] for side in ("calls", "called")),
    *RELAY,
]
ROWS = 12  # three batches


class RelayTrial:
    """An outbox with rows, a relay that is struck at a crash point, and the relay's successor."""

    def __init__(
        self, folder: Path, redis_url: str, database: DatabaseServer, point: str, act: str
    ) -> None:
        self.point = point
        folder /= point
        folder.mkdir()
        self._link = connect_redis(config.Redis(url=redis_url), timeout=60.0, name="test:relay")
        store = Store(self._link, Keys())
        self.site = OutboxSite(folder, redis_url, store, database, partitions=1, batch=4)
        self.strikes = Strikes(folder / "strikes")
        self.strikes.arm(point, 0 if self._is_of_partition else "-", act)
        self._number = 0
        self.write(ROWS, bad=True)

    @property
    def _is_of_partition(self) -> bool:
        return self.point.startswith(("outbox_fence", "outbox_publish"))

    def write(self, rows: int, *, bad: bool = False) -> None:
        """Commit rows. If `bad` is True, add a row for a topic that does not exist."""
        with contextlib.closing(self.site.database.connect(self.site.url)) as writer:
            cursor = writer.cursor()
            for _ in range(rows):
                sender.send(writer, TOPIC, f"0:{self._number}".encode(), key="k")
                cursor.execute(f"INSERT INTO ledger VALUES (0, {self._number})")
                self._number += 1
            if bad:
                sender.send(writer, "nowhere", b"x")
            writer.commit()

    def start_struck(self) -> None:
        self.struck = self._start("relay-0.log", self.strikes.folder)

    def start_successor(self) -> ForkedRelay:
        return self._start("relay-1.log")

    def _start(self, log: str, strikes: Path | None = None) -> ForkedRelay:
        made = ForkedRelay(self.site.config, self.site.folder / log, strikes)
        self.site.processes.append(made)
        return made

    def wait_struck(self) -> None:
        where = 0 if self._is_of_partition else "-"
        if self.point.startswith("outbox_release"):  # this point is reached when the relay exits
            self.site.wait_empty(PATIENCE, self.point)
            self.struck.send_signal(signal.SIGTERM)
        wait_until(
            lambda: self.strikes.struck(self.point, where), timeout=PATIENCE, what=self.point
        )

    def check(self) -> None:
        """Wait until all rows are sent, and check the topic and the dead-lettered rows."""
        self.site.wait_empty(PATIENCE, self.point)
        assert self.site.check() == self._number, self.point
        with connect(self.site.url) as database:
            assert database.count_dead(10) == 1, self.point

    def stop(self, process: ForkedRelay) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, self.point
        self.site.processes.remove(process)

    def close(self) -> None:
        self.site.close()
        self._link.close()


def run_killed(trials: list[RelayTrial]) -> None:
    """Kill each relay at its point, and let another one finish its work."""
    _strike(trials)
    for trial in trials:
        assert trial.struck.wait(PATIENCE) == -signal.SIGKILL, trial.point
        trial.site.processes.remove(trial.struck)
    successors = [trial.start_successor() for trial in trials]
    for trial, successor in zip(trials, successors, strict=True):
        trial.write(2)
        trial.check()
        trial.stop(successor)


def run_paused(trials: list[RelayTrial]) -> None:
    """Stop each relay at its point, let another one take over and finish, then resume it."""
    _strike(trials)
    successors = [trial.start_successor() for trial in trials]
    for trial, successor in zip(trials, successors, strict=True):
        trial.write(2)
        trial.check()
        trial.struck.send_signal(signal.SIGCONT)
        trial.write(2)
        trial.check()
        if not trial.point.startswith("outbox_release"):
            trial.stop(trial.struck)
        else:
            assert trial.struck.wait(PATIENCE) == 0, trial.point
            trial.site.processes.remove(trial.struck)
        trial.check()
        trial.stop(successor)


def _strike(trials: list[RelayTrial]) -> None:
    for trial in trials:
        trial.start_struck()
    for trial in trials:
        trial.wait_struck()
