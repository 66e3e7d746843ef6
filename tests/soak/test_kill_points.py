"""Every crash point of supervisor, housekeeper and commands, killed and paused, again and again.

The default suite has half of these pairs, and all of the workers and the producers; here are all of
the others. Skipped unless ROUNDS says how often: `make soak-kill-points`. RESULT names a file for
what came of it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamqd.store.client import Link
from tests.benchmarks.quick import machine
from tests.support import kill_desks, kill_houses, kill_trials
from tests.support.kill_desks import COMMANDS, Desk
from tests.support.kill_houses import House
from tests.support.kill_trials import SIDE_BY_SIDE, Trial
from tests.support.servers import Server

pytestmark = [
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif("ROUNDS" not in os.environ, reason="a soak test: `make soak-kill-points`"),
]

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("ROUNDS") or "1")


class Soak:
    """Counts what was struck; each group of instances has the server for itself."""

    def __init__(self, link: Link, server: Server, folder: Path) -> None:
        self.link, self.server, self.folder = link, server, folder
        self.struck: Counter[str] = Counter()

    def supervisors(self, rows: Sequence[kill_trials.Row], act: str) -> None:
        self.link.execute("FLUSHALL")
        folder = self._folder()
        trials = [Trial(row, folder, self._url(n)) for n, row in enumerate(rows)]
        try:
            (kill_trials.run_killed if act == "KILL" else kill_trials.run_paused)(trials)
        finally:
            for trial in trials:
                trial.close()
        self.struck.update(f"{row.point} {act}" for row in rows)

    def houses(self, points: Sequence[str], act: str) -> None:
        self.link.execute("FLUSHALL")
        folder = self._folder()
        houses = [House(folder / str(n), self._url(n)) for n in range(len(points))]
        try:
            (kill_houses.run_killed if act == "KILL" else kill_houses.run_paused)(
                houses, list(points)
            )
        finally:
            for house in houses:
                house.close()
        self.struck.update(f"{point} {act}" for point in points)

    def desks(self, points: Sequence[str], act: str) -> None:
        self.link.execute("FLUSHALL")
        folder = self._folder()
        desks = [Desk(folder / each, self._url(n), each) for n, each in enumerate(points)]
        try:
            (kill_desks.run_killed if act == "KILL" else kill_desks.run_paused)(desks)
        finally:
            for desk in desks:
                desk.close()
        self.struck.update(f"{point} {act}" for point in points)

    def _folder(self) -> Path:
        folder = self.folder / str(self.struck.total())
        folder.mkdir()
        return folder

    def _url(self, number: int) -> str:
        return f"{self.server.url}?db={number}"


def test_every_point_killed_and_paused(link: Link, server: Server, tmp_path: Path) -> None:
    soak, began = Soak(link, server, tmp_path), time.monotonic()
    for done in range(ROUNDS):
        for act in ("KILL", "STOP"):
            for start in range(0, len(kill_trials.ROWS), SIDE_BY_SIDE):
                soak.supervisors(kill_trials.ROWS[start : start + SIDE_BY_SIDE], act)
            for start in range(0, len(kill_houses.POINTS), SIDE_BY_SIDE):
                soak.houses(kill_houses.POINTS[start : start + SIDE_BY_SIDE], act)
            for start in range(0, len(COMMANDS), SIDE_BY_SIDE):
                soak.desks(COMMANDS[start : start + SIDE_BY_SIDE], act)
        seconds = time.monotonic() - began
        print(f"{done + 1}/{ROUNDS}: {soak.struck.total()} strikes, {seconds:.0f} s", flush=True)
    points = {*kill_houses.POINTS, *COMMANDS, *(row.point for row in kill_trials.ROWS)}
    assert soak.struck.keys() == {f"{point} {act}" for point in points for act in ("KILL", "STOP")}
    if "RESULT" in os.environ:
        document = {
            "what": "after every strike each message ran, was charged and died as the model says",
            "command": f"make soak-kill-points ROUNDS={ROUNDS}",
            "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
            "machine": machine(),
            "server": f"{server.product} {server.facts.version}",
            "seconds": round(time.monotonic() - began),
            "struck": dict(sorted(soak.struck.items())),
        }
        path = ROOT / os.environ["RESULT"]
        path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
