"""Kill and pause supervisor, housekeeper and commands at every crash point, many times.

The default suite tests half of these pairs, and all pairs of workers and producers. This soak tests
the rest. Skipped unless ROUNDS sets the repetitions: `make soak NAME=kill-points`. RESULT names the
result file.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streamqd.store.client import Connection
from tests.support import kill_commands, kill_housekeepers, kill_trials
from tests.support.kill_commands import COMMANDS, CommandTrial
from tests.support.kill_housekeepers import HousekeeperTrial
from tests.support.kill_trials import SIDE_BY_SIDE, Trial
from tests.support.machine import machine
from tests.support.servers import Server

pytestmark = [
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif("ROUNDS" not in os.environ, reason="`make soak NAME=kill-points`"),
]

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("ROUNDS") or "1")


class Kind(NamedTuple):
    """Processes of one kind: the fixtures of a strike, its crash points, and how it strikes."""

    make: Callable[..., Any]
    where: Sequence[Any]
    run_killed: Callable[..., None]
    run_paused: Callable[..., None]


KINDS = (
    Kind(Trial, kill_trials.ROWS, kill_trials.run_killed, kill_trials.run_paused),
    Kind(
        HousekeeperTrial,
        kill_housekeepers.POINTS,
        kill_housekeepers.run_killed,
        kill_housekeepers.run_paused,
    ),
    Kind(CommandTrial, COMMANDS, kill_commands.run_killed, kill_commands.run_paused),
)


def test_kill_and_pause_at_every_point_cost_as_modeled(
    link: Connection, server: Server, tmp_path: Path
) -> None:
    struck, began = Counter[str](), time.monotonic()

    def strike(kind: Kind, where: Sequence[Any], act: str) -> None:
        """Run strikes in parallel, each in its own database, on a server of their own."""
        link.execute("FLUSHALL")
        folder = tmp_path / str(struck.total())
        folder.mkdir()
        made = [kind.make(folder, f"{server.url}?db={n}", each) for n, each in enumerate(where)]
        try:
            (kind.run_killed if act == "KILL" else kind.run_paused)(made)
        finally:
            for each in made:
                each.close()
        struck.update(f"{each.point} {act}" for each in made)

    for done in range(ROUNDS):
        for act in ("KILL", "STOP"):
            for kind in KINDS:
                for start in range(0, len(kind.where), SIDE_BY_SIDE):
                    strike(kind, kind.where[start : start + SIDE_BY_SIDE], act)
        seconds = time.monotonic() - began
        print(f"{done + 1}/{ROUNDS}: {struck.total()} strikes, {seconds:.0f} s", flush=True)
    points = {*kill_housekeepers.POINTS, *COMMANDS, *(row.point for row in kill_trials.ROWS)}
    assert struck.keys() == {f"{point} {act}" for point in points for act in ("KILL", "STOP")}
    if "RESULT" in os.environ:
        document = {
            "what": "after every strike each message ran, was charged and died as the model says",
            "command": f"make soak NAME=kill-points ROUNDS={ROUNDS}",
            "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
            "machine": machine(),
            "server": f"{server.product} {server.facts.version}",
            "seconds": round(time.monotonic() - began),
            "struck": dict(sorted(struck.items())),
        }
        path = ROOT / os.environ["RESULT"]
        path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
